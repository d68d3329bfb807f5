"""Libra IxG+ (LibraGrad, Mehri et al., CVPR 2025): IxG+ with gradients that balance.

    map = sum_{l = start}^{L-1} r^l,   r^l_j = sum_c h^l_jc dh^l_jc,   dh by the rules of
    `seecause.engine.libra`

Under these rules r^l and the terms of all later biases add up to the logit at every depth l; the
bias terms belong to no patch and are not part of the map. Softmax or sigmoid of the score keep
their plain gradient, and so does the L2 norm of a cosine head, unless `unit="constant"`. Other
options and the usual score are those of `ixg+`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.attribution.gradients import every_block, over_images
from seecause.attribution.ixg_plus import USUAL_SCORE, Mixer, Start, first_layer, relevances
from seecause.attribution.registry import Maps, method
from seecause.engine.libra import Unit, libra_rules
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.target import Score, Target


def _both_paths(model: VisionModel, layout: TokenLayout) -> int:
    """Norms and gates keep their value and their rule."""
    return every_block(model, layout) * 3 // 2


@method(
    "libra-ixg+",
    forwards="1 + 1 backward",
    needs="activations, gradients",
    unset={"score": USUAL_SCORE},
    signed=True,
)
@over_images(_both_paths)
@torch.enable_grad()
def libra_ixg_plus(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: Start = "all",
    mixer: Mixer = "sum",
    unit: Unit = "plain",
    score: Score | None = None,
) -> Maps:
    """Input x gradient of the tokens entering every block, with balanced gradients."""
    layout, first = model.check(images), first_layer(model, start)
    with libra_rules(model, unit=unit):
        bound, _, terms = relevances(model, images, target, score, first=first, mixer=mixer)
    return Maps(torch.stack(terms).sum(dim=0)[:, layout.patches], bound)
