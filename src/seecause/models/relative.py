"""Relative position biases (BEiT, Data2Vec): what attention adds to a score by where its row and
its key are. They go with tokens, not with states: a key that is borrowed from another run has the
bias of its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from seecause.models.layout import At, TokenLayout
from seecause.models.multihead import first_or_none

Table = Callable[[TokenLayout], Tensor]  # the native bias of all rows and keys, [1, H, T, T]


# where transformers keeps them: in each block, or one for all
OWN_BIAS = ("relative_position_bias", "attention.attention.relative_position_bias")
SHARED_BIAS = ("shared_position_bias", "encoder.relative_position_bias")


def native_table(owner: Any, *names: str) -> Table | None:
    """A module of transformers that makes biases, as a function of the layout."""
    native = first_or_none(owner, *names)
    return None if native is None else lambda layout: native(layout.grid, False, layout.tokens)


def relative_bias(*tables: Table | None) -> Callable[[At, At], Tensor] | None:
    """`Block.additive` from native tables, which are added; None where there is none."""
    present = [table for table in tables if table is not None]
    if not present:
        return None
    first, *others = present
    key = ("relative", *map(id, present))

    def additive(rows: At, keys: At) -> Tensor:
        if key not in rows.memo:  # once a run
            rows.memo[key] = sum((table(rows.layout) for table in others), first(rows.layout))
        whole = rows.memo[key][0]  # [H, T, T]
        bias = whole[:, rows.index[..., :, None], keys.index[..., None, :]]
        return bias[None] if bias.ndim == 3 else bias.transpose(0, 1)

    return additive
