"""Head scores when others are missing too: a linear fit to random removals.

Removing one head at a time overlooks those that stand in for each other. Here every image meets
`draws` random sets of removed heads, each head with probability `rate`, and its loss of response is
explained by which heads were gone:
    R_i - R_i^(-S) = sum over h in S of beta_h + error,         score(h) = beta_h
fitted by least squares (`ridge` > 0 shrinks). Errors are clustered by image: the draws of one image
are not independent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seecause._options import check_options
from seecause.errors import BadOption
from seecause.heads.cigma import masks_at_hand
from seecause.heads.erase import Baseline
from seecause.heads.masks import Masks
from seecause.heads.registry import selector
from seecause.heads.result import HeadScores
from seecause.heads.study import Operator, Study
from seecause.models.view import VisionModel


@torch.no_grad()
def regress(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None = None,
    *,
    draws: int = 32,
    rate: float = 0.1,
    ridge: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> HeadScores:
    """Scores [L, H] with standard errors; costs `draws` forwards for each version of each image.
    Options are those of `score`.

    `before["r2"]` is the share of the variance between removals that the fit explains.
    """
    if draws < 1 or not 0 < rate < 1 or ridge < 0:
        raise BadOption(
            "draws, rate, ridge",
            (draws, rate, ridge),
            "at least one draw, a probability between 0 and 1, and a ridge of at least 0",
        )
    check_options("regress", Study, options)
    study = Study(model, images, masks, seed=seed, **{"guard": False, **options})
    exists = torch.zeros(model.n_layers, model.n_heads, dtype=torch.bool)
    for layer, head in study.heads:
        exists[layer, head] = True
    rows = len(study.images) * draws
    if ridge == 0 and rows < 2 * len(study.heads):
        raise BadOption(
            "draws",
            draws,
            f"enough for {len(study.heads)} heads: {-(-2 * len(study.heads) // len(study.images))}"
            " or more, or ridge above 0",
        )
    gone = (
        torch.rand(
            len(study.images),
            draws,
            *exists.shape,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        < rate
    )
    gone &= exists

    def some(part: slice) -> Tensor:
        whole = study.gated(
            part, torch.ones(part.stop - part.start, *exists.shape, device=model.device)
        )["response"]
        lost = [
            whole - study.gated(part, (~gone[part, draw]).float().to(model.device))["response"]
            for draw in range(draws)
        ]
        return torch.stack(lost, dim=1).double().cpu()  # [b, draws]

    lost = torch.cat(study.over_images(some))
    value, error, explained = fit(gone[:, :, exists].double(), lost, ridge=ridge)
    table = torch.full((2, *exists.shape), torch.nan, dtype=torch.float64)
    table[:, exists] = torch.stack([value, error])
    said = {
        "estimator": "regression",
        "draws": draws,
        "rate": rate,
        "ridge": ridge,
        "seed": seed,
        "operator": study.operator,
        **study.record(),
    }
    return HeadScores(table[0], table[1], before={"r2": explained}, protocol=said)


@selector(
    "regression", cost="2 * draws forwards, and 500 for masks", needs="nothing; masks if at hand"
)
def regression(
    model: VisionModel,
    images: Tensor,
    labels: Tensor,
    *,
    masks: Masks | Tensor | None = None,
    baseline: Baseline = "grey",
    operator: Operator = "zero",
    draws: int = 32,
    rate: float = 0.1,
    ridge: float = 0.0,
    steps: int = 250,
    seed: int = 0,
) -> HeadScores:
    """What each head adds to BIG while random others are missing too, by least squares. It has no
    guard."""
    found = masks_at_hand(model, images, masks, baseline, steps=steps)
    scores = regress(
        model,
        images,
        found,
        draws=draws,
        rate=rate,
        ridge=ridge,
        seed=seed,
        target=labels,
        baseline=baseline,
        operator=operator,
    )
    return replace(scores, protocol={**scores.protocol, "selector": "regression"})


def fit(gone: Tensor, lost: Tensor, *, ridge: float = 0.0) -> tuple[Tensor, Tensor, float]:
    """Least squares of lost [B, n] on gone [B, n, P], with an intercept -> slopes [P], their errors
    clustered by image [P], and R^2."""
    x = torch.cat([torch.ones_like(gone[..., :1]), gone], dim=-1)  # [B, n, 1 + P]
    penalty = ridge * torch.eye(x.shape[-1], dtype=x.dtype)
    penalty[0, 0] = 0
    gram = torch.einsum("bnp,bnq->pq", x, x) + penalty
    if torch.linalg.matrix_rank(gram, hermitian=True) < len(
        gram
    ):  # a head that never went, or some that always went together
        raise BadOption(
            "draws",
            x.shape[1],
            "more of them, or ridge above 0: these removals cannot tell all heads apart",
        )
    inverse = torch.linalg.inv(gram)
    slopes = inverse @ torch.einsum("bnp,bn->p", x, lost)
    residual = lost - x @ slopes
    scores = torch.einsum("bnp,bn->bp", x, residual)  # summed within each image
    variance = inverse @ (scores.T @ scores) @ inverse
    explained = 1 - float(residual.square().sum() / (lost - lost.mean()).square().sum())
    return slopes[1:], variance.diagonal().clamp_min(0).sqrt()[1:], explained
