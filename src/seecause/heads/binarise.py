"""From soft masks to pixels that are kept (CIGMA, end of phase 1).

topk        exactly round(rho H W) pixels, in order of their value, then of their 5 x 5
neighbourhood's mean, then row by row
percentile  those above the (1 - rho) percentile, strictly: the paper's rule. It keeps none when
more than rho of the pixels saturate at 1, and
            fewer than rho when more than 1 - rho of them are 0
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Rule = Literal["topk", "percentile"]
_DIGITS = 1e6  # values closer than this are ties: enlarging a flat mask must leave it flat


def enlarge(soft: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks [B, g, g] at picture size, [B, H, W]."""
    return F.interpolate(soft[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def harden(
    soft: Tensor,
    size: tuple[int, int],
    *,
    rho: float = 0.35,
    rule: Rule = "topk",
    inside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Soft masks [B, g, g] -> kept pixels [B, H, W] (bool) and, for each image, the share of pixels
    that tie with the last one kept [B].

    Padding (`inside` [B, H, W] is False there) is never kept and does not count.
    """
    large = (enlarge(soft.double(), size) * _DIGITS).round() / _DIGITS
    near = F.avg_pool2d(large[:, None], 5, stride=1, padding=2, count_include_pad=False)[:, 0]
    near = (near * _DIGITS).round()
    hard, ties = (
        torch.zeros_like(large, dtype=torch.bool),
        soft.new_zeros(len(soft), dtype=torch.float64),
    )
    for i in range(len(soft)):
        spots = (
            torch.arange(large[i].numel(), device=soft.device)
            if inside is None
            else inside[i].flatten().nonzero()[:, 0]
        )
        kept, level = _kept(large[i].flatten()[spots], near[i].flatten()[spots], rho, rule)
        hard[i].view(-1)[spots[kept]] = True
        ties[i] = (large[i].flatten()[spots] == level).double().mean()
    return hard, ties


def _kept(values: Tensor, near: Tensor, rho: float, rule: Rule) -> tuple[Tensor, Tensor]:
    """Which of values [P] are kept, as indices or a bool mask, and the value of the last one
    kept."""
    count = round(rho * len(values))
    if rule == "percentile":
        ordered, place = values.sort().values, (1 - rho) * (len(values) - 1)
        low = int(place)
        level = torch.lerp(
            ordered[low], ordered[min(low + 1, len(values) - 1)], place - low
        )  # linear interpolation
        return values > level, level
    order = near.sort(descending=True, stable=True).indices
    order = order[values[order].sort(descending=True, stable=True).indices][:count]
    return order, values[order[-1]] if count else values.max()
