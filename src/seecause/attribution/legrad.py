"""LeGrad (Bousselham et al., ICCV 2025): how sensitive the answer read after each block is to that
block's attention.

    s^l = score of the readout applied to the output of block l
    E^l = mean over heads and rows of ReLU(d s^l / dA^l),   map = mean_l E^l[patches]

Every block is read by the model's own final norm, pool and head. With a class token only its row
has a gradient, so E^l is that row over T. With a latent pool the pool reads every block's output,
and A^l is the pool's attention there, as in the paper. The authors' CLIP code reads the mean of all
tokens instead of the class token; that is not done here. The attention itself is not multiplied in
(see `gae`). s^l depends on A^l through block l alone, so nothing is held but one block. `start`
leaves out earlier blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.attribution.gradients import differentiate, one_block, over_images, settle
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import pool_logits, pool_probabilities, probabilities, weigh
from seecause.engine.walk import Step, walk
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from seecause.target import Score, Target


@method(
    "legrad",
    forwards="1, backward through each block and readout by itself",
    needs="attention, gradients",
)
@over_images(one_block)
@torch.enable_grad()
def legrad(
    model: VisionModel, images: Tensor, target: Target, *, start: int = 0, score: Score = "logit"
) -> Maps:
    """Positive gradient of every block's own readout with respect to its attention."""
    if not 0 <= start < model.n_layers:
        raise BadOption("start", start, f"0-{model.n_layers - 1}, the first block that counts")
    target = settle(model, images, target)
    layout = model.check(images)
    total = images.new_zeros(len(images), layout.tokens)
    for step in walk(model, model.embed(images), model.at(images)):
        step.h = step.h.detach().requires_grad_()
        probs, logits = _read_after(model, step)
        if step.index >= start:
            _, (slope,) = differentiate(model, logits, target, score, [probs])  # [B, H, T, T]
            total = total + slope.relu().mean(dim=(1, 2))
    return Maps(total[:, layout.patches] / (model.n_layers - start), target)


def _read_after(model: VisionModel, step: Step) -> tuple[Tensor, Tensor]:
    """The probabilities that explain a block's output, and the logits read from it."""
    layout = step.at.layout
    if model.readout.latent is None:
        probs = probabilities(step)
        step.o = weigh(probs, step.v)
        return probs, model.readout(step.out, layout)
    probs, v = pool_probabilities(model, step.out, layout)
    return probs, pool_logits(model, probs, v)
