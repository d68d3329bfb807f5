"""Replace heads one at a time and run only later blocks, or gate all heads at once.

The output of a head in block l affects nothing before the output projection of block l. So the rows
pass through the blocks once; each block adds a copy for each requested head, with that head
replaced, and the rest of the model runs on all copies together. Where logits are
read from class tokens alone, the last block computes those rows only, so its own heads cost next to
nothing.

Heads are replaced at the input of the output projection (after a sub-norm or output gate), where
removing one leaves all others unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.chunks import fit, in_chunks, run_in_chunks
from seecause.engine.walk import Step, Walk, walk
from seecause.models.block import At, span, wide_dtype
from seecause.models.view import VisionModel

Head = tuple[int, int]  # (layer, head), both from 0
Content = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, what all rows carry [R, T, H, dh], which tokens those are [T]) -> what replaced heads
carry in the forked rows: broadcasts to [F, T, H, dh]."""
Each = Callable[[int, list[int], Tensor], None]
HELD = 0.25  # share of the memory budget for the main pass; the rest is for copies


def zeros(layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
    """Zero ablation: replaced heads output zeros."""
    return carried.new_zeros(1, 1, 1, 1)


def fork(
    model: VisionModel,
    images: Tensor,
    heads: Sequence[Head],
    each: Each,
    *,
    content: Content = zeros,
    forking: int | None = None,
) -> Tensor:
    """Plain logits [R, C] of all images. `each(layer, heads, logits)` is called with the logits
    [k, F, C] of the runs in which one of k heads is replaced, for some heads at a time.

    Copies are made of the first `forking` images (default: all); the others only serve `content`.
    """
    layout, count = model.check(images), len(images) if forking is None else forking
    each_copy = count * model.forward_bytes(layout)
    steps = _steps(model, model.embed(images), model.at(images))
    for step in steps:
        chosen = [head for layer, head in heads if layer == step.index]
        if not chosen:
            continue
        instead = content(step.index, step.carried, step.at.index)
        run_copies = partial(_without, model, step, count, instead, chosen)
        size = fit(len(chosen), each_copy, images.device, share=1 - HELD)
        done = 0
        for logits in in_chunks(run_copies, len(chosen), size, what="heads"):
            each(step.index, chosen[done : done + len(logits)], logits)
            done += len(logits)
    return model.readout.of_rows(steps.h, layout)


def gated_logits(
    model: VisionModel, images: Tensor, gates: Tensor, *, content: Content = zeros
) -> Tensor:
    """Logits [F, C] of the first F images, where every head of every image has a gate of its own:
    gates [F, L, H]. Differentiable in the gates.

    A head carries g times its own and 1 - g times `content`. Images beyond the first F run plainly,
    to serve `content`.
    """
    model.check(images)
    return _gated_rest(model, model.embed(images), model.at(images), gates, 0, content)


def carried_logits(
    model: VisionModel, images: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits [R, C] of images and, of each block, what its heads carried [R, T, H, dh] and which
    tokens those are [T]. Under gradients, logits are differentiable in what was carried, and in
    nothing that comes before it."""
    layout, carried = model.check(images), []
    steps = _steps(model, model.embed(images), model.at(images))
    for step in steps:
        if torch.is_grad_enabled() and step.index == 0:
            step.carried = step.carried.detach().requires_grad_()
        carried.append((step.carried, step.at.index))
    return model.readout.of_rows(steps.h, layout), carried


def logits_of_sets(model: VisionModel, images: Tensor, gates: Tensor) -> Tensor:
    """Logits [S, N, C] of images under each of some gates [S, L, H]. Equal gates run once, and each
    only from the first block that it changes."""
    layout, device = model.check(images), images.device
    kinds, which = gates.cpu().unique(dim=0, return_inverse=True)
    changed = F.pad((kinds != 1).any(dim=2).int(), (0, 1), value=1)  # [K, L + 1]
    first, order = changed.argmax(dim=1).sort(stable=True)
    which, kinds = order.argsort()[which].to(device), kinds[order].to(device)
    # kinds[ends[l]:ends[l + 1]] are the distinct gates whose first change is in block l; the last
    # index is the run without gates
    ends = torch.searchsorted(first, torch.arange(model.n_layers + 1)).tolist()

    def run_images(a: int, b: int) -> Tensor:
        some_images, logits = images[a:b], []
        at, each_set = model.at(some_images), len(some_images) * model.forward_bytes(layout)
        read, steps = model.readout.rows(layout), walk(model, model.embed(some_images), at)
        for step in steps:
            start, stop = ends[step.index : step.index + 2]
            if start < stop:
                starting = kinds[start:stop]
                run_sets = partial(_under_gates, model, step.h, at, step.index, starting)
                size = fit(len(starting), each_set, device, share=1 - HELD)
                logits += in_chunks(run_sets, len(starting), size, what="sets of heads")
            if read is not None and step.index == model.n_layers - 1:
                step.take(read)
        plain = model.readout.of_rows(steps.h, layout)
        return torch.cat([*logits, plain[None]])

    count, each = len(images), model.forward_bytes(layout)
    every = run_in_chunks(run_images, count, each, device, what="images", share=HELD, dim=1)
    return every[which]


def _under_gates(
    model: VisionModel, h: Tensor, at: At, layer: int, gates: Tensor, start: int, stop: int
) -> Tensor:
    """Logits [k, N, C] of rows h [N, T, D] that enter block `layer`, under gates[start:stop]
    [k, L, H]."""
    copies, images = stop - start, len(h)
    rows = h.expand(copies, -1, -1, -1).flatten(0, 1)
    spread = gates[start:stop].repeat_interleave(images, dim=0)
    logits = _gated_rest(model, rows, at.copies(copies), spread, layer, zeros)
    return logits.unflatten(0, (copies, images))


def _gated_rest(
    model: VisionModel, h: Tensor, at: At, gates: Tensor, start: int, content: Content
) -> Tensor:
    """Logits [F, C] of the first F rows h [R, T, D] that enter block `start`, under gates [F, L,
    H]."""
    count, steps = len(gates), _steps(model, h, at, start)
    for step in steps:
        carried = step.carried
        instead = content(step.index, carried, step.at.index)
        gate = gates[:, step.index, None, : step.block.heads, None].to(carried)  # [F, 1, H, 1]
        mixed = instead + gate * (carried[:count] - instead)
        step.carried = mixed if count == len(carried) else torch.cat([mixed, carried[count:]])
    return model.readout.of_rows(steps.h[:count], at.layout)


@torch.no_grad()
def mean_carried(model: VisionModel, images: Tensor) -> list[Tensor]:
    """The mean over images of what each head carries at each token, one [T, H, dh] for each
    block."""
    layout = model.check(images)
    sums: list[Tensor] = []

    def run_images(a: int, b: int) -> list[Tensor]:
        steps = walk(model, model.embed(images[a:b]), model.at(images[a:b]))
        return [step.carried.sum(dim=0, dtype=wide_dtype(step.carried.dtype)) for step in steps]

    size = fit(len(images), model.forward_bytes(layout), images.device)
    for part in in_chunks(run_images, len(images), size, what="images"):
        sums = [x + y for x, y in zip(sums, part, strict=True)] if sums else part
    return [(total / len(images)).to(model.dtype) for total in sums]


@torch.no_grad()
def inert(model: VisionModel) -> set[Head]:
    """Heads without effect: their gate is zero, or their columns of the output projection are.
    Nothing needs to run for them."""
    idle: set[Head] = set()
    for layer, block in enumerate(model.blocks):
        large = 1024 * torch.eye(block.heads * block.head_dim).to(model.device, model.dtype)[None]
        # large inputs, so that the bias does not round small weights away
        reach = block.mix(large) - block.mix(torch.zeros_like(large))  # [1, H * dh, D]
        silent, gate = (reach == 0).view(block.heads, -1).all(dim=1), model.gate(layer)
        silent = silent if gate is None else silent | (gate == 0)
        idle |= {(layer, head) for head in silent.nonzero()[:, 0].tolist()}
    return idle


def _without(
    model: VisionModel,
    step: Step,
    count: int,
    instead: Tensor,
    heads: list[int],
    start: int,
    stop: int,
) -> Tensor:
    """Logits [k, F, C] of copies of the first `count` rows of a step, each with one of
    `heads[start:stop]` replaced."""
    block, copies, h = step.block, stop - start, step.h[:count]
    replaced = torch.eye(block.heads, dtype=torch.bool, device=h.device)[span(heads[start:stop])]
    carried = step.carried[:count]
    mixed = torch.where(replaced[:, None, None, :, None], instead, carried)  # [k, F, T, H, dh]
    rows = h.expand(copies, -1, -1, -1).flatten(0, 1)
    states = block.close(rows, mixed.flatten(0, 1), step.gate)
    at = step.keys_at.of(slice(count)).copies(copies)
    rest = _steps(model, states, at, step.index + 1).end()
    return model.readout.of_rows(rest, step.at.layout).unflatten(0, (copies, count))


def _steps(model: VisionModel, h: Tensor, at: At, start: int = 0) -> Walk:
    """Blocks from `start` on; of the last, only the rows that are read."""
    return walk(model, h, at, start=start, last=model.readout.rows(at.layout))
