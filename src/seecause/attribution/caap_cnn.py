"""CAAP on convolutional networks (arXiv 2603.13652, appendix B.3).

A feature map has no class token that could see earlier layers, so that patching stages l_s..l_e is
the same as patching the map after l_e alone:

    F*_i = F(blank), with the cells S(i) taken from F(source);   A_i = score(rest of the network on
    F*_i)

The default l_e is the stage at two thirds of the depth. S(i) is a set of layout cells; at another
stage, every feature that overlaps one of them is taken. The blank's features come from a real run:
zero padding makes them differ at the borders. Nothing after l_e is shared between cells, so this
costs N runs of that part of the network.
"""

from __future__ import annotations

from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.caap import ONE_CLASS, Classes, Direction, Swept, to_maps
from seecause.attribution.registry import Maps, method
from seecause.attribution.select import Select, selection
from seecause.engine.blanks import Blank, blank_image
from seecause.engine.chunks import fit, in_chunks
from seecause.errors import BadOption
from seecause.models.conv_view import ConvModel
from seecause.target import Score, Target


@method(
    "caap",
    forwards="2 + N x the part after the stage",
    needs="activations",
    architectures=("conv",),
    unset={"stage": "the one at two thirds of the depth", "classes": ONE_CLASS},
)
@torch.no_grad()
def caap_cnn(
    model: ConvModel,
    images: Tensor,
    target: Target,
    *,
    stage: str | None = None,
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    score: Score = "prob",
    direction: Direction = "insert",
    classes: Classes = None,
    seed: int = 0,
) -> Maps:
    """Feature patching into a blank context: the class score each cell causes on its own."""
    if direction not in get_args(Direction):
        raise BadOption("direction", direction, "insert or delete")
    stage = stage or model.cells
    grid = model.check(images).grid
    chosen = selection(grid, select).to(images.device).unflatten(1, grid)  # [N, gh, gw]
    size = (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    swept = sweep_features(model, images, empty, chosen, stage, direction=direction)
    return to_maps(
        model,
        swept,
        target,
        score=score,
        direction=direction,
        classes=classes,
        used={"stage": stage},
    )


def sweep_features(
    model: ConvModel,
    images: Tensor,
    blank: Tensor,
    chosen: Tensor,
    stage: str,
    *,
    direction: Direction = "insert",
) -> Swept:
    """Logits of all interventions, in chunks of images and of cells that fit the memory budget.
    chosen [N, gh, gw]."""
    layout = model.check(images)
    shared = model.run_to(stage, blank[:1])  # [1, C, h, w]
    marks = at_features(chosen, (shared.shape[-2], shared.shape[-1]))
    each = model.forward_bytes(layout, after=stage)

    def some_images(first: int, last: int) -> tuple[Tensor, Tensor]:
        features = model.run_to(stage, images[first:last])  # [b, C, h, w]
        empty = shared if len(blank) == 1 else model.run_to(stage, blank[first:last])
        context, donor = (
            (empty.expand_as(features), features)
            if direction == "insert"
            else (features, empty.expand_as(features))
        )

        def some_cells(a: int, b: int) -> Tensor:
            mixed = torch.where(
                marks[None, a:b, None], donor[:, None], context[:, None]
            )  # [b, n, C, h, w]
            return model.run_from(stage, mixed.flatten(0, 1)).unflatten(0, (last - first, b - a))

        together = fit(len(marks), (last - first) * each, images.device, share=0.8)
        return torch.cat(
            list(in_chunks(some_cells, len(marks), together, what="cells")), dim=1
        ), model.run_from(stage, features)

    at_once = fit(len(images), model.forward_bytes(layout), images.device, share=0.5)
    logits, plain = zip(*in_chunks(some_images, len(images), at_once, what="images"), strict=True)
    return Swept(torch.cat(logits), torch.cat(plain), model.run_from(stage, shared))


def at_features(chosen: Tensor, size: tuple[int, int]) -> Tensor:
    """Cells [N, gh, gw] -> features [N, h, w]: every feature that overlaps a chosen cell."""
    return F.adaptive_max_pool2d(chosen.float()[:, None], size)[:, 0] > 0
