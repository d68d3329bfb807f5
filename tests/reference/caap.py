"""CAAP by definition: one native forward per patch, with hooks that overwrite block outputs.

Cache H0[l] = h^l(context) and HX[l] = h^l(donor), l = 0..L. For each patch i:
  state = H0[l_s] with S(i) from HX[l_s]; then for l = l_s+1 .. L the native block runs on ALL
  tokens, and its output is replaced by H0[l], except for the class token (kept) and S(i): donor's
  for l <= l_e, afterwards by `tail`.
The native head reads the last state. Nothing of the package is used, so any block type works.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def box(grid: tuple[int, int], radius: int = 1) -> list[list[int]]:
    """S(i) for every patch, by two loops."""
    rows, columns = grid
    sets = []
    for r in range(rows):
        for c in range(columns):
            near = [
                y * columns + x
                for y in range(rows)
                for x in range(columns)
                if abs(y - r) <= radius and abs(x - c) <= radius
            ]
            sets.append(near)
    return sets


def caap(
    forward: Callable[[Tensor], Tensor],
    blocks: Sequence[nn.Module],
    context: Tensor,
    donor: Tensor,
    sets: Sequence[Sequence[int]],
    *,
    tail: str,
    first: int,
    last: int,
    prefix: int,
    live: Sequence[int],
    together: int = 1,
) -> Tensor:
    """Logits [n, C] of one context image into which one donor image's tokens are put, set by set
    (`together` at a time)."""
    h0, hx = states(forward, blocks, context), states(forward, blocks, donor)
    chosen = torch.zeros(
        len(sets), h0[0].shape[1], 1, dtype=torch.bool, device=context.device
    )  # [n, T, 1]
    for i, members in enumerate(sets):
        chosen[i, [prefix + j for j in members]] = True
    parts = []
    for some in chosen.split(together):
        with overwritten(blocks, _put(h0, hx, some, tail, first, last, list(live))):
            parts.append(forward(context.expand(len(some), -1, -1, -1)))
    return torch.cat(parts)


def _put(
    h0: list[Tensor],
    hx: list[Tensor],
    chosen: Tensor,
    tail: str,
    first: int,
    last: int,
    live: list[int],
) -> Callable[[int, Tensor], Tensor]:
    """The state after block `level`, given what the block computed from the state before."""

    def put(level: int, out: Tensor) -> Tensor:
        if level < first:
            return h0[level].expand_as(out)
        if level == first:
            return torch.where(chosen, hx[level], h0[level])
        if level > last and tail == "all":
            return out
        new = h0[level].expand_as(out).clone()
        new[:, live] = out[:, live]
        if level <= last or tail == "source":
            return torch.where(chosen, hx[level], new)
        return torch.where(chosen, out, new) if tail == "patched" else new

    return put


def states(
    forward: Callable[[Tensor], Tensor], blocks: Sequence[nn.Module], images: Tensor
) -> list[Tensor]:
    """h^0 .. h^L of a plain native run."""
    seen: list[Tensor] = []

    def watch(level: int, out: Tensor) -> Tensor:
        seen.append(out.detach().clone())
        return out

    with overwritten(blocks, watch):
        forward(images)
    return seen


@contextmanager
def overwritten(
    blocks: Sequence[nn.Module], put: Callable[[int, Tensor], Tensor]
) -> Iterator[None]:
    """Pass the input of the first block (level 0) and every block's output through `put`."""

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return (put(0, args[0]), *args[1:]), kwargs

    def after(level: int) -> Callable[[nn.Module, tuple, object], object]:
        def hook(module: nn.Module, args: tuple, output: object) -> object:
            if isinstance(output, tuple):
                return (put(level, output[0]), *output[1:])
            return put(level, output)  # type: ignore[arg-type]

        return hook

    handles = [blocks[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [
        block.register_forward_hook(after(level)) for level, block in enumerate(blocks, start=1)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
