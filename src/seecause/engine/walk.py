"""The one loop over blocks: a step at a time, which its caller reads or changes.

    steps = walk(model, h, at)
    for step in steps:          # a block that has not run yet
        step.k, step.v          # read: computed when first asked for, and never otherwise
        step.o = other          # change: everything that follows from it uses this
    h = steps.h                 # states behind the last block

A step goes h -> q, k, v -> o -> carried -> out; each is made of the one before it unless the caller
set it. Nothing is copied, fused attention stays where `o` is not replaced, and gradients flow as in
a plain run. Leaving the loop early leaves the block unfinished: `steps.h` is what entered it.

This file needs blocks and positions only, and views run by it: it stands below `models`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from seecause.errors import may_stop
from seecause.models.block import At, Block, fused

Rows = Tensor | slice | list[int]


class HasBlocks(Protocol):
    """A vision model, a tower or a decoder. If it has a method `gate(layer)`, the returned factors
    [H] multiply the heads of that block (None: no factors)."""

    @property
    def blocks(self) -> Sequence[Block]: ...


class Step:
    """One block of a walk. `at` says which tokens its rows are, `keys_at` which its keys are;
    `gate` multiplies its heads. Every other part is made of those before it when it is first read:

        h         states entering the block [B, R, D]; setting them forgets all that follows
        q, k, v   queries [B, H, R, dh], unscaled; keys and values [B, Hkv, K, dh]
        bias      the bias of the attention scores, [1|B, 1|H, R, K] or None
        o         the attention output of each head, [B, R, H, dh]
        carried   the input of each head to the output projection, [B, R, H, dh], before the gate
        out       the block's output [B, R, D]; reading it runs the rest of the block
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    o: Tensor
    carried: Tensor
    out: Tensor

    def __init__(self, index: int, block: Block, h: Tensor, at: At, gate: Tensor | None):
        self.index, self.block, self.gate = index, block, gate
        self.at = self.keys_at = at
        self._h: Any = h  # None once it is released

    @property
    def h(self) -> Tensor:
        return self._h

    @h.setter
    def h(self, states: Tensor) -> None:
        self.release()
        self._h = states

    def __getattr__(self, name: str) -> Any:
        """A part that was neither read nor set so far."""
        if name in ("q", "k", "v"):
            made = self.block.qkv(self.h, self.keys_at)
            for part, value in zip(("q", "k", "v"), made, strict=True):
                vars(self).setdefault(part, value)
        elif name == "bias":
            self.bias = self.block.bias(self.at, self.keys_at)
        elif name == "o":
            self.o = fused(self.q, self.k, self.v, self.block.scale, self.bias)
        elif name == "carried":
            self.carried = self.block.carried(self.h, self.o)
        elif name == "out":
            self.out = self._finished()
        else:
            raise AttributeError(name)
        return vars(self)[name]

    def _finished(self) -> Tensor:
        if "carried" in vars(self):
            return self.block.close(self.h, self.carried, self.gate)
        return self.block.finish(self.h, self.o, self.gate)

    def take(self, rows: Rows) -> None:
        """Keep only these query rows; keys and values of all rows are kept. Must be called before
        `bias` is read or set."""
        if "o" in vars(self):
            self.o = self.o[:, rows]
        else:
            self.q = self.q[:, :, rows]
        self._h, self.at = self._h[:, rows], self.at.take(self.at.index[..., rows])

    def release(self) -> None:
        """Drop all tensors, because the caller's loop variable outlives the block."""
        self._h = None
        for part in _MADE:
            vars(self).pop(part, None)


_MADE = ("q", "k", "v", "bias", "o", "carried", "out")


class Walk:
    """Blocks `start` to `stop` of a model on states `h`; `h` and `at` move along."""

    def __init__(
        self, model: HasBlocks, h: Tensor, at: At, start: int, stop: int | None, last: Rows | None
    ):
        self.h, self.at = h, at
        self.blocks = model.blocks
        self.layers = range(len(self.blocks))[start:stop]
        self.last = last
        self._gate: Callable[[int], Tensor | None] = getattr(model, "gate", _open)

    def __iter__(self) -> Iterator[Step]:
        for index in self.layers:
            may_stop()
            step = Step(index, self.blocks[index], self.h, self.at, self._gate(index))
            if self.last is not None and index == len(self.blocks) - 1:
                step.take(self.last)
            yield step
            self.h, self.at = step.out, step.at
            step.release()

    def end(self) -> Tensor:
        """Walk to the end: states behind the last block."""
        for _ in self:
            pass
        return self.h


def walk(
    model: HasBlocks,
    h: Tensor,
    at: At,
    *,
    start: int = 0,
    stop: int | None = None,
    last: Rows | None = None,
) -> Walk:
    """The blocks from `start` on (to before `stop`) for states h [B, R, D] that enter the first of
    them, at tokens `at`.

    `last` selects the rows to compute in the model's last block, if the readout uses no others.
    """
    return Walk(model, h, at, start, stop, last)


def _open(layer: int) -> None:
    """No gate."""
