"""CAAP and mosaic in one map (ours).

    a = z(CAAP's logits) + z(mosaic),   z(x) = (x - mean over patches) / deviation over patches

CAAP finds where the object is, mosaic what the answer hangs on; the sum stays near the better of
the two in both (docs/results/mosaic.md). Values are deviations, not scores: compare places within a
map.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.attribution.caap import caap
from seecause.attribution.mosaic import Law, mosaic
from seecause.attribution.registry import Maps, method
from seecause.attribution.select import Select
from seecause.engine.blanks import Blank
from seecause.models.view import VisionModel
from seecause.target import Score, Target


@method("caap+mosaic", forwards="3.3 (24 masks)", needs="activations, gradients")
@torch.no_grad()
def caap_mosaic(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    masks: int = 24,
    law: Law = "smooth",
    cells: int = 7,
    eps: float = 0.02,
    antithetic: bool = False,
    score: Score = "prob",
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    seed: int = 0,
) -> Maps:
    """Where it is and what the answer hangs on: z-scored CAAP (logit) plus z-scored mosaic."""
    slopes = mosaic(
        model, images, target, masks=masks, law=law, cells=cells, eps=eps,
        antithetic=antithetic, score=score, blank=blank, seed=seed,
    )  # fmt: skip
    place = caap(model, images, slopes.target, select=select, blank=blank, score="logit", seed=seed)
    both = standardised(place.scores) + standardised(slopes.scores)
    return Maps(both, slopes.target, used={"caap": place.used, "mosaic": slopes.used})


def standardised(scores: Tensor) -> Tensor:
    """Scores [B, N] less their mean, in deviations; a map without differences is zero."""
    spread = scores.std(dim=1, keepdim=True)
    return (scores - scores.mean(dim=1, keepdim=True)) / spread.clamp_min(
        torch.finfo(scores.dtype).tiny
    )
