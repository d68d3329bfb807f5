"""Patches removed in the order of the map: AOPC, pixel flipping, comprehensiveness, sufficiency,
log-odds.

Region perturbation (Samek et al. 2017) removes patches most important first (MoRF) or least
important first (LeRF). With x_k the picture after k steps,
    AOPC = mean_{k=0..n} [f(x) - f(x_k)]        ABPC = AOPC_MoRF - AOPC_LeRF = mean_k [f(x_k^LeRF) -
    f(x_k^MoRF)]
Higher AOPC_MoRF, lower AOPC_LeRF and higher ABPC are better. The MoRF curve is also pixel flipping
(Bach et al. 2015): a low area is good.

ERASER (DeYoung et al. 2020), averaged over shares k of the patches, 10 to 90 %:
    comprehensiveness = f(x) - f(x without the top k)   (higher is better)
    sufficiency       = f(x) - f(only the top k)        (lower is better)
    log-odds          = log p(x without the top k) - log p(x)   (lower is better)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics._insertion_deletion import area
from seecause.metrics._pixels import Order, Steps, Ties, Upsampling, importance_ranks, thresholds
from seecause.metrics._scorer import Fill, PictureScorer, filled, picture_scorer
from seecause.metrics.registry import higher, lower, metric
from seecause.models.base import ImageModel
from seecause.target import Score, Spec

TENTHS = tuple(tenth / 10 for tenth in range(1, 10))


@dataclass(frozen=True, eq=False)
class Perturbation:
    """Scores [B, n + 1], float64, after each step of removal; `shares` [n + 1] of the picture gone
    by then."""

    morf: Tensor
    lerf: Tensor
    shares: Tensor
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def aopc_morf(self) -> Tensor:
        return (self.morf[:, :1] - self.morf).mean(dim=1)

    @property
    def aopc_lerf(self) -> Tensor:
        return (self.lerf[:, :1] - self.lerf).mean(dim=1)

    @property
    def abpc(self) -> Tensor:
        return (self.lerf - self.morf).mean(dim=1)

    @property
    def flipping_area(self) -> Tensor:
        """The area under the pixel-flipping curve."""
        return area(self.morf)


@dataclass(frozen=True, eq=False)
class Removal:
    """What is lost, for each share, float64 [B, K]; the metrics are their means [B]."""

    lost_without_top: Tensor
    lost_with_top_only: Tensor
    log_lost_without_top: Tensor
    shares: tuple[float, ...]
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def comprehensiveness(self) -> Tensor:
        return self.lost_without_top.mean(dim=1)

    @property
    def sufficiency(self) -> Tensor:
        return self.lost_with_top_only.mean(dim=1)

    @property
    def log_odds(self) -> Tensor:
        return -self.log_lost_without_top.mean(dim=1)


@metric(
    "perturbation",
    family="curves",
    columns={
        "aopc-morf": higher(
            "mean drop of the score while patches are removed, most important first",
            field="aopc_morf",
        ),
        "aopc-lerf": lower(
            "mean drop of the score while patches are removed, least important first",
            field="aopc_lerf",
        ),
        "abpc": higher(
            "area between the curves of patches removed least and most important first",
            field="abpc",
        ),
        "pixel-flipping": lower(
            "area under the score's curve while patches are removed, most important first",
            field="flipping_area",
        ),
    },
)
@torch.no_grad()
def perturbation(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    steps: Steps = "patch",
    order: Order = "patch",
    upsample: Upsampling = "bilinear",
    fill: Fill = 0.0,
    score: Score = "prob",
    ties: Ties = "raster",
) -> Perturbation:
    """MoRF and LeRF curves of maps [B, gh, gw] or [B, H, W]; one patch a step unless told
    otherwise."""
    scorer = picture_scorer(model, images, target, score=score)
    scorer.cells(maps)
    ranks, count = importance_ranks(
        maps.to(scorer.images.device),
        scorer.size,
        scorer.grid,
        order=order,
        upsample=upsample,
        ties=ties,
    )
    taken = thresholds(count, scorer.size, scorer.grid, steps)
    later = taken[1:]  # before the first step nothing is gone
    morf, lerf = (
        torch.cat([scorer.plain[:, None], _curve(scorer, places, later, fill)], dim=1)
        for places in (ranks, count - 1 - ranks)
    )
    protocol = scorer.protocol(
        "perturbation", steps=steps, order=order, upsample=upsample, fill=fill, ties=ties
    )
    return Perturbation(morf, lerf, taken.double() / count, protocol)


@metric(
    "removal",
    family="removal",
    columns={
        "comprehensiveness": higher(
            "drop of the score without the patches the map puts first", field="comprehensiveness"
        ),
        "sufficiency": lower(
            "drop of the score with only the patches the map puts first", field="sufficiency"
        ),
        "log-odds": lower(
            "change of the log probability without the patches the map puts first", field="log_odds"
        ),
    },
)
@torch.no_grad()
def removal(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    shares: Sequence[float] = TENTHS,
    fill: Fill = 0.0,
    ties: Ties = "raster",
) -> Removal:
    """Comprehensiveness, sufficiency and log-odds in probabilities of the target class."""
    scorer = picture_scorer(model, images, target, score="logprob")
    if scorer.target.classes is None or scorer.target.against is not None:
        raise BadOption("target", target, "a class: a contrast or a function has no log-odds")
    scorer.cells(maps)
    ranks, count = importance_ranks(
        maps.to(scorer.images.device), scorer.size, scorer.grid, order="patch", ties=ties
    )
    taken = patch_counts(shares, count)
    whole = scorer.plain[:, None]
    without_top = _curve(scorer, ranks, taken, fill)
    only_top = _curve(scorer, count - 1 - ranks, count - taken, fill)
    protocol = scorer.protocol("removal", shares=list(shares), fill=fill, ties=ties)
    return Removal(
        whole.exp() - without_top.exp(),
        whole.exp() - only_top.exp(),
        whole - without_top,
        tuple(shares),
        protocol,
    )


def patch_counts(shares: Sequence[float], count: int) -> Tensor:
    """How many of `count` patches each share is, at least one, [K]."""
    if not shares or not all(0 < share < 1 for share in shares):
        raise BadOption("shares", shares, "shares of the picture between 0 and 1")
    return torch.tensor([max(1, round(share * count)) for share in shares])


def _curve(scorer: PictureScorer, places: Tensor, taken: Tensor, fill: Fill) -> Tensor:
    """Scores [B, n] with the pixels at the first `taken` [n] places [B, H, W] replaced."""
    goal, taken = filled(scorer.images, fill), taken.to(places.device)

    def picture(image: Tensor, step: Tensor) -> Tensor:
        gone = places[image] < taken[step][:, None, None]  # [m, H, W]
        return torch.where(gone[:, None], goal[image], scorer.images[image])

    return scorer.each(len(taken), picture)
