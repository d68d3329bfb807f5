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

from seecause._stop import may_stop
from seecause.models.block import Block, fused
from seecause.models.layout import At

_UNASKED: Any = object()
Rows = Tensor | slice | list[int]


class HasBlocks(Protocol):
    """A vision model, a tower, a decoder. Its `gate(layer)`, [H] or None, counts."""

    @property
    def blocks(self) -> Sequence[Block]: ...


class Step:
    """One block of a walk. `h` [B, R, D] are the states entering it; `at` says which tokens its
    rows are, `keys_at` which its keys are; `gate` multiplies its heads."""

    __slots__ = (
        *("index", "block", "gate", "at", "keys_at"),
        *("_h", "_q", "_k", "_v", "_bias", "_o", "_carried", "_out"),
    )
    _h: Any  # a tensor, or None: not known yet, or released
    _q: Any
    _k: Any
    _v: Any
    _bias: Any
    _o: Any
    _carried: Any
    _out: Any

    def __init__(self, index: int, block: Block, h: Tensor, at: At, gate: Tensor | None):
        self.index, self.block, self.gate = index, block, gate
        self.at = self.keys_at = at
        self.h = h

    @property
    def h(self) -> Tensor:
        return self._h

    @h.setter
    def h(self, states: Tensor) -> None:
        self._h = states
        self._q = self._k = self._v = self._o = self._carried = self._out = None
        self._bias = _UNASKED

    @property
    def q(self) -> Tensor:
        """Queries [B, H, R, dh], unscaled."""
        return self._projected("_q")

    @q.setter
    def q(self, q: Tensor) -> None:
        self._q = q

    @property
    def k(self) -> Tensor:
        """Keys [B, Hkv, K, dh]."""
        return self._projected("_k")

    @k.setter
    def k(self, k: Tensor) -> None:
        self._k = k

    @property
    def v(self) -> Tensor:
        """Values [B, Hkv, K, dh]."""
        return self._projected("_v")

    @v.setter
    def v(self, v: Tensor) -> None:
        self._v = v

    @property
    def bias(self) -> Tensor | None:
        """What is added to the scores, [1|B, 1|H, R, K] or None."""
        if self._bias is _UNASKED:
            self._bias = self.block.bias(self.at, self.keys_at)
        return self._bias

    @bias.setter
    def bias(self, bias: Tensor | None) -> None:
        self._bias = bias

    @property
    def o(self) -> Tensor:
        """What attention gives each head, [B, R, H, dh]."""
        if self._o is None:
            self._o = fused(self.q, self.k, self.v, self.block.scale, self.bias)
        return self._o

    @o.setter
    def o(self, o: Tensor) -> None:
        self._o = o

    @property
    def carried(self) -> Tensor:
        """What each head brings to the output projection, [B, R, H, dh], before the gate."""
        if self._carried is None:
            self._carried = self.block.carried(self.h, self.o)
        return self._carried

    @carried.setter
    def carried(self, carried: Tensor) -> None:
        self._carried = carried

    @property
    def out(self) -> Tensor:
        """The block's output [B, R, D]. To read it is to finish the block now; one that is set
        takes its place."""
        if self._out is None:
            if self._carried is None:
                finished = self.block.finish(self._h, self.o, self.gate)
            else:
                finished = self.block.close(self._h, self._carried, self.gate)
            self._out = self.block.leave(finished, self.at)
        return self._out

    @out.setter
    def out(self, out: Tensor) -> None:
        self._out = out

    def take(self, rows: Rows) -> None:
        """Go on with these rows only; keys stay those of all. Before `bias` is read or set."""
        if self._o is None:
            self._q = self.q[:, :, rows]
        else:
            self._o = self._o[:, rows]
        self._h, self.at = self._h[:, rows], self.at.take(self.at.index[..., rows])

    def _projected(self, name: str) -> Tensor:
        if getattr(self, name) is None:
            q, k, v = self.block.qkv(self._h, self.keys_at)
            self._q = q if self._q is None else self._q
            self._k = k if self._k is None else self._k
            self._v = v if self._v is None else self._v
        return getattr(self, name)

    def release(self) -> None:
        """Hold no tensor any more: the caller's loop variable outlives the block."""
        self._h = self._q = self._k = self._v = self._o = self._carried = self._out = None
        self._bias = None


class Walk:
    """Blocks `start` to `stop` of a model on states `h`; `h` and `at` move along."""

    def __init__(
        self,
        model: HasBlocks,
        h: Tensor,
        at: At,
        start: int = 0,
        stop: int | None = None,
        last: Rows | None = None,
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

    `last` names the rows that the model's last block goes on with, where no other is read.
    """
    return Walk(model, h, at, start, stop, last)


def _open(layer: int) -> None:
    """No gate."""
