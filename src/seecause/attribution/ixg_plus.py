"""IxG+: input x gradient of the tokens entering every block, summed (the SkipPLUS family, Mehri et
al. 2024).

    r^l_j = sum_c h^l_jc d score / dh^l_jc,   map = sum_{l = start}^{L-1} r^l

h^0 is the embedding with its positions; the last block's output h^L is never included.
`start="half"` is SkipPLUS: l from floor(L/2); a number starts there. `mixer="relu"` cuts negative
products before they are summed over channels. Attention takes part through the gradient only. The
score is the probability for classifiers and the logit for cosine heads (CLIP), as in the authors'
presets.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seecause.attribution.gradients import differentiate, every_block, over_images
from seecause.attribution.registry import Maps, method
from seecause.engine.patching import run
from seecause.errors import BadOption
from seecause.models.heads import CosineHead, TextHead
from seecause.models.view import VisionModel
from seecause.target import Score, Target

Mixer = Literal["sum", "relu"]
Start = int | Literal["all", "half"]
USUAL_SCORE = "prob; logit for a cosine head (CLIP)"


@method(
    "ixg+",
    forwards="1 + 1 backward",
    needs="activations, gradients",
    unset={"score": USUAL_SCORE},
    signed=True,
)
@over_images(every_block)
@torch.enable_grad()
def ixg_plus(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: Start = "all",
    mixer: Mixer = "sum",
    score: Score | None = None,
) -> Maps:
    """Input x gradient of the tokens entering every block."""
    layout, first = model.check(images), first_layer(model, start)
    bound, _, terms = relevances(model, images, target, score, first=first, mixer=mixer)
    return Maps(torch.stack(terms).sum(dim=0)[:, layout.patches], bound)


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
    if mixer not in ("sum", "relu"):
        raise BadOption("mixer", mixer, "sum or relu")
    names = [f"blocks.{i}.in" for i in range(model.n_layers)[first:last]]
    logits, states_by_name = run(model, images.detach().requires_grad_(), cache=names)
    states = [h for h in (states_by_name[name] for name in names) if isinstance(h, Tensor)]
    score = score or usual_score(model)
    bound, slopes = differentiate(model, logits, target, score, states, start=first)
    products = [(h * slope).detach() for h, slope in zip(states, slopes, strict=True)]
    return bound, states, [(p.relu() if mixer == "relu" else p).sum(dim=-1) for p in products]


def first_layer(model: VisionModel, start: Start) -> int:
    """The first block whose input counts."""
    if start in ("all", "half"):
        return 0 if start == "all" else model.n_layers // 2
    if not isinstance(start, int) or not 0 <= start < model.n_layers:
        raise BadOption("start", start, f"'all', 'half' or a block 0-{model.n_layers - 1}")
    return start


def usual_score(model: VisionModel) -> Score:
    """Probability, but the logit where it is a cosine: its softmax depends on which texts were
    asked for."""
    return "logit" if isinstance(model.extra, CosineHead | TextHead) else "prob"
