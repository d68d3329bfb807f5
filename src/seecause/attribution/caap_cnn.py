"""CAAP on networks of stages: convolutional ones (arXiv 2603.13652, appendix B.3), Swin and others.

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

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.caap import ONE_CLASS, Classes, Direction, Swept, to_maps
from seecause.attribution.registry import Maps, method
from seecause.attribution.select import Select, selection
from seecause.engine.blanks import Blank, blank_image
from seecause.engine.chunks import fit, in_chunks, joined
from seecause.engine.graphs import captured, ready
from seecause.errors import BadOption
from seecause.models.dense_families import Places
from seecause.models.layout import TokenLayout
from seecause.models.staged_view import StagedModel
from seecause.target import Score, Target


@method(
    "caap",
    forwards="2 + N x the part after the stage",
    needs="activations",
    architectures=("staged", "dense"),
    unset={"stage": "the one at two thirds of the depth", "classes": ONE_CLASS},
)
@torch.no_grad()
def caap_cnn(
    model: StagedModel,
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
    chosen = selection(model.check(images).grid, select)
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
    model: StagedModel,
    images: Tensor,
    blank: Tensor,
    chosen: Tensor,
    stage: str,
    *,
    direction: Direction = "insert",
) -> Swept:
    """Logits of all interventions chosen [N, N], in chunks of images and of cells that fit the
    memory budget."""
    layout, size, shared = model.check(images), len(images), len(blank) == 1
    one_blank = (id(blank), blank._version) if shared else ()
    key = ("conv caap", stage, direction, id(chosen), chosen._version, *one_blank)
    tensors = (images,) if shared else (images, blank)

    def some_images(first: int, last: int) -> tuple[Tensor, ...]:
        parts = [tensor[first:last] for tensor in tensors]
        same_blank = blank if shared else None
        prepare = partial(
            _prepare, model, last - first, layout, same_blank, chosen, stage, direction
        )
        return captured(model, key, prepare, *parts)

    if not ready(model, key, *tensors):
        size = fit(size, model.forward_bytes(layout), images.device, share=0.5)
    parts = in_chunks(some_images, len(images), size, what="images")
    logits, plain, bare = zip(*parts, strict=True)
    return Swept(joined(logits), joined(plain), bare[0] if shared else joined(bare))


def _prepare(
    model: StagedModel,
    count: int,
    layout: TokenLayout,
    blank: Tensor | None,
    chosen: Tensor,
    stage: str,
    direction: Direction,
) -> Callable[..., tuple[Tensor, ...]]:
    """All that no picture changes. The function turns `count` pictures (and a blank for each, where
    they do not share one) into the logits of all interventions, of the pictures and of blanks."""
    shared = None if blank is None else model.run_to(stage, blank)  # [1, C, h, w]
    cells = chosen.to(model.device).unflatten(1, layout.grid)  # [N, gh, gw]
    each = count * model.forward_bytes(layout, after=stage)
    together = fit(len(cells), each, model.device, share=0.8)

    def run(images: Tensor, *blanks: Tensor) -> tuple[Tensor, ...]:
        features = model.run_to(stage, images)  # [b, C, h, w]
        empty = model.run_to(stage, blanks[0]) if shared is None else shared
        context, donor = (empty, features) if direction == "insert" else (features, empty)

        def some_cells(a: int, b: int) -> Tensor:
            mixed = patched(cells[a:b], donor, context)
            return model.run_from(stage, mixed).unflatten(0, (len(images), b - a))

        logits = list(in_chunks(some_cells, len(cells), together, what="cells"))
        plain, bare = model.run_from(stage, features), model.run_from(stage, empty)
        return joined(logits, dim=1), plain, bare

    return run


def patched(cells: Tensor, donor: Any, context: Any) -> Any:
    """Features [B * n, C, h, w] of contexts (or one for all) in which sets of cells [n, gh, gw] are
    the donors'; of every level, where rows read several."""
    if isinstance(donor, Places):
        return donor.over(context, partial(patched, cells))
    marks = at_features(cells, (donor.shape[-2], donor.shape[-1]))
    return torch.where(marks[None, :, None], donor[:, None], context[:, None]).flatten(0, 1)


def at_features(chosen: Tensor, size: tuple[int, int]) -> Tensor:
    """Cells [N, gh, gw] -> features [N, h, w]: every feature that overlaps a chosen cell."""
    return F.adaptive_max_pool2d(chosen.float()[:, None], size)[:, 0] > 0
