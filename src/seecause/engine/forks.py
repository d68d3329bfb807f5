"""Replace heads one at a time and run only what comes after them; or gate all of them at once.

What a head of block l carries matters nowhere before the output projection of block l. So the rows
stream through the blocks once; at each block as many copies fork off as heads are asked for, each
with one head replaced, and the rest of the model runs on all copies together. Where the answer is
read from class tokens alone, the last block computes those rows only, so its own heads cost next to
nothing.

Heads are replaced at the input of the output projection (after a sub-norm or output gate), where
taking one away leaves all others as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from seecause.engine.chunks import fit, in_chunks
from seecause.models.block import fused
from seecause.models.layout import At
from seecause.models.view import VisionModel

Head = tuple[int, int]  # (layer, head), both from 0
Content = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, what all rows carry [R, T, H, dh], which tokens those are [T]) -> what replaced heads
carry in the forked rows: broadcasts to [F, T, H, dh]."""
Each = Callable[[int, list[int], Tensor], None]
HELD = 0.25  # of the memory budget: the rows that stream; the copies have the rest


def zeros(layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
    """Replaced heads carry nothing: zero ablation."""
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
    """Plain logits [R, C] of all images; on the way, `each(layer, heads, logits [k, F, C])` gets
    those without each head, some heads at a time.

    Copies are made of the first `forking` images (default: all); the others only serve `content`.
    """
    layout, count = model.check(images), len(images) if forking is None else forking
    at, h = layout.at(images.device), model.embed(images)
    each_copy = count * model.forward_bytes(layout)
    for index, block in enumerate(model.blocks):
        chosen = [head for layer, head in heads if layer == index]
        h, carried, tokens = _to_projection(model, index, h, at)
        if chosen:
            run = partial(
                _without,
                model,
                index,
                h[:count],
                carried[:count],
                content(index, carried, tokens),
                chosen,
                at,
            )
            done = 0
            for logits in in_chunks(
                run,
                len(chosen),
                fit(len(chosen), each_copy, images.device, share=1 - HELD),
                what="heads",
            ):
                each(index, chosen[done : done + len(logits)], logits)
                done += len(logits)
        h = block.close(h, _gated(carried, model.gate(index)))
    return _read(model, h, at)


def gated_logits(
    model: VisionModel, images: Tensor, gates: Tensor, *, content: Content = zeros
) -> Tensor:
    """Logits [F, C] of the first F images, where every head of every image has a gate of its own:
    gates [F, L, H]. Differentiable in the gates.

    A head carries g times its own and 1 - g times `content`. Images beyond the first F run plainly,
    to serve `content`.
    """
    return _gated_rest(
        model, model.embed(images), model.check(images).at(images.device), gates, 0, content
    )


def logits_of_sets(model: VisionModel, images: Tensor, gates: Tensor) -> Tensor:
    """Logits [S, N, C] of images under each of some gates [S, L, H]. Equal gates run once, and each
    only from the first block that it changes."""
    layout, (kinds, which) = model.check(images), gates.unique(dim=0, return_inverse=True)
    changed = (kinds != 1).any(dim=2)  # [K, L]
    first = torch.where(changed.any(dim=1), changed.int().argmax(dim=1), model.n_layers).tolist()

    def some(a: int, b: int) -> Tensor:
        at, h = layout.at(images.device), model.embed(images[a:b])
        found: dict[int, Tensor] = {}
        for index in range(model.n_layers):
            mine = [kind for kind, start in enumerate(first) if start == index]

            def copies(
                start: int, stop: int, h: Tensor = h, index: int = index, mine: list[int] = mine
            ) -> Tensor:
                rows = h.expand(stop - start, -1, -1, -1).flatten(0, 1)
                return _gated_rest(
                    model,
                    rows,
                    at,
                    kinds[mine[start:stop]].repeat_interleave(b - a, dim=0),
                    index,
                    zeros,
                ).unflatten(0, (stop - start, b - a))

            size = fit(
                max(1, len(mine)),
                (b - a) * model.forward_bytes(layout),
                images.device,
                share=1 - HELD,
            )
            parts = list(in_chunks(copies, len(mine), size, what="sets of heads"))
            found.update(zip(mine, torch.cat(parts) if parts else (), strict=True))
            h, carried, _ = _to_projection(model, index, h, at)
            h = model.blocks[index].close(h, _gated(carried, model.gate(index)))
        plain = _read(model, h, at)
        return torch.stack([found.get(kind, plain) for kind in range(len(kinds))])

    size = fit(len(images), model.forward_bytes(layout), images.device, share=HELD)
    return torch.cat(list(in_chunks(some, len(images), size, what="images")), dim=1)[
        which.to(images.device)
    ]


def _gated_rest(
    model: VisionModel, h: Tensor, at: At, gates: Tensor, start: int, content: Content
) -> Tensor:
    """Logits [F, C] of the first F rows h [R, T, D] that enter block `start`, under gates [F, L,
    H]."""
    count = len(gates)
    for index in range(start, model.n_layers):
        block = model.blocks[index]
        h, carried, tokens = _to_projection(model, index, h, at)
        instead = content(index, carried, tokens)
        gate = gates[:, index, None, : block.heads, None].to(carried.dtype)  # [F, 1, H, 1]
        mixed = instead + gate * (carried[:count] - instead)
        mixed = mixed if count == len(carried) else torch.cat([mixed, carried[count:]])
        h = block.close(h, _gated(mixed, model.gate(index)))
    return _read(model, h[:count], at)


@torch.no_grad()
def mean_carried(model: VisionModel, images: Tensor) -> list[Tensor]:
    """The mean over images of what each head carries at each token, one [T, H, dh] for each
    block."""
    layout = model.check(images)
    sums: list[Tensor] = []

    def some(a: int, b: int) -> list[Tensor]:
        at, h = layout.at(images.device), model.embed(images[a:b])
        found = []
        for index, block in enumerate(model.blocks):
            q, k, v = block.qkv(h, at)
            carried = block.carried(h, fused(q, k, v, block.scale, block.bias(at, at)))
            found.append(
                carried.sum(dim=0, dtype=torch.promote_types(carried.dtype, torch.float32))
            )
            h = block.close(h, _gated(carried, model.gate(index)))
        return found

    for found in in_chunks(
        some,
        len(images),
        fit(len(images), model.forward_bytes(layout), images.device),
        what="images",
    ):
        sums = [x + y for x, y in zip(sums, found, strict=True)] if sums else found
    return [(total / len(images)).to(model.dtype) for total in sums]


@torch.no_grad()
def inert(model: VisionModel) -> set[Head]:
    """Heads that cannot matter: gated to zero, or met by zeros in the output projection. Their
    effect is exactly 0, so nothing needs to run."""
    found: set[Head] = set()
    for layer, block in enumerate(model.blocks):
        unit = (
            1024
            * torch.eye(block.heads * block.head_dim, dtype=model.dtype, device=model.device)[None]
        )  # large, or a bias would round small weights away
        reach = (block.mix(unit) - block.mix(torch.zeros_like(unit)))[0].unflatten(
            0, (block.heads, block.head_dim)
        )  # [H, dh, D]
        silent = (reach == 0).flatten(1).all(dim=1)
        gate = model.gate(layer)
        silent = silent if gate is None else silent | (gate == 0)
        found |= {(layer, head) for head in silent.nonzero()[:, 0].tolist()}
    return found


def _without(
    model: VisionModel,
    index: int,
    h: Tensor,
    carried: Tensor,
    content: Tensor,
    heads: list[int],
    at: At,
    start: int,
    stop: int,
) -> Tensor:
    """Logits [k, F, C] of copies of rows h [F, T, D], each with one of `heads[start:stop]` of this
    block replaced."""
    block, copies = model.blocks[index], stop - start
    replaced = torch.zeros(copies, block.heads, dtype=torch.bool, device=h.device)
    replaced[range(copies), heads[start:stop]] = True
    mixed = _gated(
        torch.where(replaced[:, None, None, :, None], content, carried), model.gate(index)
    )  # [k, F, T, H, dh]
    states = block.close(h.expand(copies, -1, -1, -1).flatten(0, 1), mixed.flatten(0, 1))
    return _rest(model, states, at, index + 1).unflatten(0, (copies, len(h)))


def _to_projection(
    model: VisionModel, index: int, h: Tensor, at: At
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows h [R, T, D] entering a block -> the rows it goes on with, what their heads carry, and
    which tokens they are.

    All of them, but in the last block only those a class-token readout reads.
    """
    block, tokens = model.blocks[index], at.index
    q, k, v = block.qkv(h, at)
    if index == model.n_layers - 1 and model.readout.reads_rows:
        tokens = torch.tensor(model.readout.read_prefix(at.layout), device=h.device)
        h, q = h[:, tokens], q[:, :, tokens]
    return h, block.carried(h, fused(q, k, v, block.scale, block.bias(at.take(tokens), at))), tokens


def _rest(model: VisionModel, h: Tensor, at: At, start: int) -> Tensor:
    """Logits of states that enter block `start`."""
    for index in range(start, model.n_layers):
        h, carried, _ = _to_projection(model, index, h, at)
        h = model.blocks[index].close(h, _gated(carried, model.gate(index)))
    return _read(model, h, at)


def _read(model: VisionModel, h: Tensor, at: At) -> Tensor:
    """Logits of the last block's output, which `_to_projection` may have narrowed."""
    if model.readout.reads_rows:
        return model.readout.head(model.readout.norm(h).flatten(1))
    return model.readout(h, at.layout)


def _gated(carried: Tensor, gate: Tensor | None) -> Tensor:
    return carried if gate is None else carried * gate[:, None]
