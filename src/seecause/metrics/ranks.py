"""Ranks with ties, for many maps at once."""

from __future__ import annotations

import torch
from torch import Tensor


def tie_ends(ordered: Tensor) -> Tensor:
    """For rows [B, P] whose equal values lie side by side: where the run of equals of each entry
    ends, [B, P]."""
    count = ordered.shape[1]
    ends = torch.ones_like(ordered, dtype=torch.bool)
    ends[:, :-1] = ordered[:, 1:] != ordered[:, :-1]
    index = torch.arange(count, device=ordered.device).where(ends, count)
    return index.flip(1).cummin(dim=1).values.flip(1)


def average_ranks(values: Tensor) -> Tensor:
    """Ranks from 0, ascending, of values [B, P]; equals share the mean of their places. float64."""
    ordered, order = values.sort(dim=1)
    last = tie_ends(ordered)
    first = ordered.shape[1] - 1 - tie_ends(ordered.flip(1)).flip(1)
    return torch.zeros_like(values, dtype=torch.float64).scatter_(
        1, order, (first + last).double() / 2
    )
