"""Input x gradient (Shrikumar et al. 2016), where the input is pixels, the tokens entering blocks,
or the feature map of a stage.

    r_j = sum_c x_jc g_jc,   g = d score / dx

is a linear estimate of what is lost when the input j becomes 0: one gradient, no baseline, and sums
that are complete only where the network is linear or its gradients are made to balance (Libra).
`mixer="relu"` cuts negative products before they are summed over channels. On pixels, positions and
biases of the embedding count for nothing; on tokens they do. The score of tokens is the probability
for classifiers and the logit for cosine heads (CLIP), as in the presets of LibraGrad's authors.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seecause.attribution.gradients import (
    differentiate,
    every_block,
    every_stage,
    feature_products,
    features_and_slope,
    on_cells,
    over_images,
    patch_sums,
    pixel_slope,
)
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import probabilities
from seecause.engine.walk import walk
from seecause.errors import BadOption
from seecause.models.heads import CosineHead, TextHead
from seecause.models.staged import StagedModel
from seecause.models.view import VisionModel
from seecause.target import Score, Target

Mixer = Literal["sum", "relu"]
Start = int | Literal["all", "half"]
USUAL_SCORE = "prob; logit for a cosine head (CLIP)"


@method(
    "ixg", forwards="1 + 1 backward", needs="gradients", unset={"score": USUAL_SCORE}, signed=True
)
@over_images(every_block)
def ixg(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    space: Literal["token", "pixel"] = "token",
    mixer: Mixer = "sum",
    score: Score | None = None,
) -> Maps:
    """Input x gradient of the first tokens, or of pixels."""
    if space == "pixel":
        return _of_pixels(model, images, target, score or usual_score(model), mixer)
    bound, _, (term,) = relevances(model, images, target, score, last=1, mixer=mixer)
    return Maps(term[:, model.check(images).patches], bound)


@method(
    "ixg+",
    forwards="1 + 1 backward",
    needs="activations, gradients",
    unset={"score": USUAL_SCORE},
    signed=True,
)
@over_images(every_block)
def ixg_plus(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: Start = "all",
    mixer: Mixer = "sum",
    score: Score | None = None,
) -> Maps:
    """Input x gradient of the tokens entering every block.

    map = sum_{l = start}^{L-1} r^l of h^l (SkipPLUS, Mehri et al. 2024): h^0 is the embedding with
    its positions, and the last block's output h^L is never included. `start="half"` is SkipPLUS
    itself, from floor(L/2); a number starts there. Attention takes part through the gradient only.
    """
    layout, first = model.check(images), first_layer(model, start)
    bound, _, terms = relevances(model, images, target, score, first=first, mixer=mixer)
    return Maps(torch.stack(terms).sum(dim=0)[:, layout.patches], bound)


@method("attcat", forwards="1 + 1 backward", needs="attention, activations, gradients", signed=True)
@over_images(every_block)
def attcat(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    pairing: Literal["input", "output"] = "input",
    score: Score = "logit",
) -> Maps:
    """Input x gradient of every block's tokens, weighted by the attention they receive.

    map_j = sum_l a^l_j r^l_j, a^l_j the mean over heads and query rows of A^l_ij (AttCAT, Qiang et
    al., NeurIPS 2022). The authors' code pairs A^l with the states entering its block
    (`pairing="input"`); LibraGrad's port pairs it with those leaving it and drops the last block
    (`pairing="output"`). Attention is a weight here, not a path: it has no gradient of its own, and
    query rows are all alike, whichever tokens the model reads. A latent pool's is not used.
    """
    bound, states, terms = relevances(model, images, target, score)
    if pairing == "output":
        states, terms = states[:-1], terms[1:]
    total = torch.zeros_like(terms[0])  # [B, T]
    with torch.no_grad():
        for step in walk(model, states[0], model.at(images), stop=len(states)):
            step.h = step.out = states[step.index]  # recorded: nothing runs again
            total = total + probabilities(step).mean(dim=(1, 2)) * terms[step.index]
    return Maps(total[:, model.check(images).patches], bound)


@method(
    "ixg",
    forwards="1 + 1 backward",
    needs="gradients",
    architectures=("staged",),
    unset={"stage": "the one at two thirds of the depth"},
    signed=True,
)
@over_images(every_stage)
def ixg_staged(
    model: StagedModel,
    images: Tensor,
    target: Target,
    *,
    space: Literal["stage", "pixel"] = "stage",
    stage: str | None = None,
    score: Score = "prob",
) -> Maps:
    """Input x gradient of a stage's features, or of pixels.

    A cell has the sum over the features it covers, or its share of the feature that it lies in.
    """
    if space == "pixel":
        return _of_pixels(model, images, target, score, "sum")
    stage = stage or model.cells
    bound, features, slope = features_and_slope(model, images, target, stage, score)
    product = feature_products(model, features, slope, stage)  # [B, h, w]
    layout = model.check(images)
    features_of_a_cell = product[0].numel() / layout.n_patches
    return Maps(on_cells(product, layout) * features_of_a_cell, bound, used={"stage": stage})


def _of_pixels(
    model: VisionModel | StagedModel, images: Tensor, target: Target, score: Score, mixer: Mixer
) -> Maps:
    """Input x gradient of the normalised picture."""
    bound, slope = pixel_slope(model, images, target, score)
    product = images * slope
    pixels = (product.relu() if mixer == "relu" else product).sum(dim=1)  # [B, H, W]
    return Maps(patch_sums(model, pixels), bound, native=pixels)


def relevances(
    model: VisionModel,
    images: Tensor,
    target: Target,
    score: Score | None = None,
    *,
    first: int = 0,
    last: int | None = None,
    mixer: Mixer = "sum",
) -> tuple[Target, list[Tensor], list[Tensor]]:
    """The bound target, the states entering blocks `first` to `last` [B, T, D], and input x
    gradient of each [B, T]."""
    steps = walk(model, model.embed(images.detach().requires_grad_()), model.at(images))
    states = [step.h for step in steps][first:last]
    logits, score = model.readout(steps.h, model.check(images)), score or usual_score(model)
    bound, slopes = differentiate(model, logits, target, score, states, start=first)
    products = [(h * slope).detach() for h, slope in zip(states, slopes, strict=True)]
    return bound, states, [(p.relu() if mixer == "relu" else p).sum(dim=-1) for p in products]


def first_layer(model: VisionModel, start: Start) -> int:
    """The first block whose input counts."""
    if isinstance(start, str):
        return 0 if start == "all" else model.n_layers // 2
    if not 0 <= start < model.n_layers:
        raise BadOption("start", start, f"'all', 'half' or a block 0-{model.n_layers - 1}")
    return start


def usual_score(model: VisionModel) -> Score:
    """Probability, but the logit where it is a cosine: its softmax depends on which texts were
    asked for."""
    return "logit" if isinstance(model.extra, CosineHead | TextHead) else "prob"
