"""How much of the picture does a map point at? Of the sizes a = |A| of its values, whatever it
explains:

    Gini    = 1 - 2 sum_k a_(k) / sum(a) * (n - k + 1/2) / n      a_(1) <= ... <= a_(n)
    (Chalasani et al. 2020)
    entropy = - sum_k p_k ln p_k,   p = a / sum(a)                                          (Bhatt
    et al. 2020)
Gini is 0 for a flat map and 1 - 1/n for one patch (higher is sparser); entropy is ln n and 0 (lower
is simpler). Simple is not the same as
right: read both beside a faithfulness metric. An empty map has neither: NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.metrics._pixels import checked
from seecause.metrics.registry import higher, lower, metric


@dataclass(frozen=True, eq=False)
class Complexity:
    """float64 [B] each."""

    gini: Tensor
    entropy: Tensor


@metric(
    "complexity",
    family="the map itself",
    columns={
        "gini": higher("how few patches hold the map: 0 flat, near 1 a single patch", field="gini"),
        "entropy": lower("how widely the map is spread, in nats", field="entropy"),
    },
)
@torch.no_grad()
def complexity(maps: Tensor) -> Complexity:
    """Of maps [B, gh, gw] or [B, H, W], at their own resolution."""
    sizes = checked(maps).abs().flatten(1).cpu()
    shares = (sizes / sizes.sum(dim=1, keepdim=True)).sort(dim=1).values
    count = shares.shape[1]
    below = (count - torch.arange(1, count + 1, dtype=torch.float64) + 0.5) / count
    return Complexity(1 - 2 * (shares * below).sum(dim=1), torch.special.entr(shares).sum(dim=1))
