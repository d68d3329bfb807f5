"""Does the answer come and go with the pixels the map puts first?

Insertion and deletion (RISE, Petsiuk et al. 2018). Deletion starts from the picture and covers its
most important pixels with a constant, step by step; insertion starts from the blurred picture and
uncovers them. With class scores y_0 .. y_n,

    area = (y_0 / 2 + y_1 + ... + y_{n-1} + y_n / 2) / n

so every step weighs the same, also a short last one. Low deletion and high insertion are good; the
difference is taken for each image. Not done: curves are not normalised or made monotone, and
misclassified images are not left out.

Region perturbation (Samek et al. 2017) removes patches most important first (MoRF) or least
important first (LeRF). With x_k the picture after k steps,

    AOPC = mean_{k=0..n} [f(x) - f(x_k)]
    ABPC = AOPC_MoRF - AOPC_LeRF = mean_k [f(x_k^LeRF) - f(x_k^MoRF)]

Higher AOPC_MoRF, lower AOPC_LeRF and higher ABPC are better. The MoRF curve is also pixel flipping
(Bach et al. 2015): a low area is good.

ERASER (DeYoung et al. 2020), averaged over shares k of the patches, 10 to 90 %:

    comprehensiveness = f(x) - f(x without the top k)           (higher is better)
    sufficiency       = f(x) - f(only the top k)                (lower is better)
    log-odds          = log p(x without the top k) - log p(x)   (lower is better)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics._pixels import (
    Blur,
    Fill,
    Order,
    Steps,
    Ties,
    Upsampling,
    blurred,
    filled,
    picture_scorer,
    thresholds,
)
from seecause.metrics.registry import higher, lower, metric
from seecause.models.base import ImageModel
from seecause.target import Score, Spec

TENTHS = tuple(tenth / 10 for tenth in range(1, 10))


@dataclass(frozen=True, eq=False)
class Curves:
    """Class scores of each image, float64 [B, n + 1], after each step; `shares` [n + 1] of the
    picture changed by then."""

    deletion: Tensor
    insertion: Tensor
    shares: Tensor
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def deletion_area(self) -> Tensor:
        return area(self.deletion)

    @property
    def insertion_area(self) -> Tensor:
        return area(self.insertion)

    @property
    def difference(self) -> Tensor:
        """Insertion less deletion, [B]; its standard error is that of the difference, not of the
        parts."""
        return self.insertion_area - self.deletion_area


@metric(
    "insertion-deletion",
    family="curves",
    columns={
        "insertion": higher(
            "class score while the patches the map puts first are uncovered in a blurred picture, "
            "area under the curve",
            field="insertion_area",
        ),
        "deletion": lower(
            "class score while the patches the map puts first are covered, area under the curve",
            field="deletion_area",
        ),
        "ins-del": higher(
            "insertion less deletion: one number for faithfulness", field="difference"
        ),
    },
)
def insertion_deletion(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    steps: Steps = "rise",
    order: Order = "pixel",
    upsample: Upsampling = "bilinear",
    blur: Blur = "rise",
    fill: float = 0.0,
    score: Score = "prob",
    ties: Ties = "raster",
) -> Curves:
    """Does the answer come with the pixels that the map puts first, and go without them?

    Maps are [B, gh, gw] or [B, H, W], images normalised [B, 3, H, W], `target` as in
    `sc.attribute`. `steps`: "rise" (8 rows of pixels each), "patch", or their number; `fill`: what
    covers pixels, in normalised units, so 0 is the mean colour; with `order="patch"` whole patches
    change. Areas are `insertion_area` (high is good), `deletion_area` (low) and `difference`.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> images, labels, _ = sc.data.to_batch(model, list(sc.data.open("critters:clean", limit=2)))
    >>> maps = sc.attribute(model, images, labels).maps
    >>> curves = insertion_deletion(model, images, maps, labels, steps=8)
    >>> curves.insertion.shape, (curves.difference > 0).all()
    (torch.Size([2, 9]), tensor(True))
    """
    scorer = picture_scorer(model, images, target, score=score)
    ranks, count = scorer.ranks(maps, order=order, upsample=upsample, ties=ties)
    taken = thresholds(count, scorer.size, scorer.grid, steps)
    images, plain = scorer.images, scorer.plain[:, None]
    deletion = scorer.mixed(images, filled(images, fill), ranks, taken[1:])
    insertion = scorer.mixed(blurred(images, blur), images, ranks, taken[:-1])
    protocol = scorer.protocol(
        "insertion-deletion", steps=steps, evaluations=len(taken), order=order, upsample=upsample,
        blur=blur, fill=fill, ties=ties,
    )  # fmt: skip
    return Curves(
        deletion=torch.cat([plain, deletion], dim=1),
        insertion=torch.cat([insertion, plain], dim=1),
        shares=taken.double() / count,
        protocol=protocol,
    )


def area(curves: Tensor) -> Tensor:
    """The area under curves [B, n + 1] by the trapezoid rule on even steps, [B]."""
    return torch.trapezoid(curves, dim=1) / (curves.shape[1] - 1)


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


@metric(
    "perturbation",
    family="curves",
    columns={
        "aopc-morf": higher(
            "mean drop of the score while patches are removed, most important first"
        ),
        "aopc-lerf": lower(
            "mean drop of the score while patches are removed, least important first"
        ),
        "abpc": higher("area between the curves of patches removed least and most important first"),
        "pixel-flipping": lower(
            "area under the score's curve while patches are removed, most important first",
            field="flipping_area",
        ),
    },
)
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
    """The score while patches are removed, most and least important first.

    Options are those of `insertion_deletion`; `fill` may also be "mean" or "blur" of the picture.
    """
    scorer = picture_scorer(model, images, target, score=score)
    ranks, count = scorer.ranks(maps, order=order, upsample=upsample, ties=ties)
    taken = thresholds(count, scorer.size, scorer.grid, steps)
    plain, empty = scorer.plain[:, None], filled(scorer.images, fill)
    morf, lerf = (
        torch.cat([plain, scorer.mixed(scorer.images, empty, places, taken[1:])], dim=1)
        for places in (ranks, count - 1 - ranks)
    )
    protocol = scorer.protocol(
        "perturbation", steps=steps, order=order, upsample=upsample, fill=fill, ties=ties
    )
    return Perturbation(morf, lerf, taken.double() / count, protocol)


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
    "removal",
    family="removal",
    columns={
        "comprehensiveness": higher("drop of the score without the patches the map puts first"),
        "sufficiency": lower("drop of the score with only the patches the map puts first"),
        "log-odds": lower("change of the log probability without the patches the map puts first"),
    },
)
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
    """What the class loses without the top patches, and with them alone.

    Means over `shares` of the patches: `comprehensiveness`, `sufficiency` and `log_odds`, [B] each.
    """
    scorer = picture_scorer(model, images, target, score="logprob")
    if scorer.target.classes is None or scorer.target.against is not None:
        raise BadOption("target", target, "a class: a contrast or a function has no log-odds")
    ranks, count = scorer.ranks(maps, order="patch", ties=ties)
    taken = patch_counts(shares, count)
    whole, empty = scorer.plain[:, None], filled(scorer.images, fill)
    without_top = scorer.mixed(scorer.images, empty, ranks, taken)
    only_top = scorer.mixed(scorer.images, empty, count - 1 - ranks, count - taken)
    return Removal(
        whole.exp() - without_top.exp(),
        whole.exp() - only_top.exp(),
        whole - without_top,
        tuple(shares),
        scorer.protocol("removal", shares=list(shares), fill=fill, ties=ties),
    )


def patch_counts(shares: Sequence[float], count: int) -> Tensor:
    """How many of `count` patches each share is, at least one, [K]."""
    if not shares or not all(0 < share < 1 for share in shares):
        raise BadOption("shares", shares, "shares of the picture between 0 and 1")
    return torch.tensor([max(1, round(share * count)) for share in shares])
