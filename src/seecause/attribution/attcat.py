"""AttCAT (Qiang et al., NeurIPS 2022): attentive class activation tokens.

    map_j = sum_l a^l_j * sum_c h^l_jc dh^l_jc,   a^l_j = mean over heads and query rows of A^l_ij

with dh = d score / dh. The authors' code pairs A^l with the states entering its block
(`pairing="input"`); LibraGrad's port pairs it with those leaving it and drops the last block
(`pairing="output"`). Attention is a weight here, not a path: it has no gradient of its own, and
query rows are all alike, whichever tokens the model reads. A latent pool's attention is not used.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seecause.attribution.gradients import every_block, over_images
from seecause.attribution.ixg_plus import relevances
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import probabilities
from seecause.engine.walk import walk
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from seecause.target import Score, Target

Pairing = Literal["input", "output"]


@method("attcat", forwards="1 + 1 backward", needs="attention, activations, gradients", signed=True)
@over_images(every_block)
@torch.enable_grad()
def attcat(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    pairing: Pairing = "input",
    score: Score = "logit",
) -> Maps:
    """Input x gradient of every block's tokens, weighted by the attention they receive."""
    if pairing not in ("input", "output"):
        raise BadOption("pairing", pairing, "input or output")
    layout = model.check(images)
    bound, states, terms = relevances(
        model, images, target, score
    )  # lists of [B, T, D] and [B, T], one per block
    if pairing == "output":
        states, terms = states[:-1], terms[1:]
    received = []  # [B, T] each
    with torch.no_grad():
        for step in walk(model, states[0], model.at(images), stop=len(states)):
            step.h = step.out = states[step.index]  # recorded: nothing runs again
            received.append(probabilities(step).mean(dim=(1, 2)))
    total = torch.stack([a * r for a, r in zip(received, terms, strict=True)]).sum(dim=0)
    return Maps(total[:, layout.patches], bound)
