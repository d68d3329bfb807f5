"""Ratios of means with bootstrap intervals, and paired differences between them.

    before, after = (resampled_ratio(big, fig + big) for fig, big in ...)   # BIR of two models
    estimate(before), ratio_difference(after, before)

All ratios over the same number of images share their resamplings, so a difference is paired. With
groups, whole groups are drawn: images of one breed are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

DRAWS = 4000


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class ResampledRatio:
    value: Tensor
    drawn: Tensor  # [DRAWS], what it is in every resampling


@cache
def resamplings(count: int) -> Tensor:
    """[DRAWS, count]: how often each of `count` things is drawn; the same for all intervals."""
    places = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(DRAWS, count, dtype=torch.float64)
    return torch.zeros(DRAWS, count, dtype=torch.float64).scatter_add_(1, places, ones)


def resampled_ratio(
    top: Tensor, bottom: Tensor | None = None, groups: Sequence[Any] | None = None
) -> ResampledRatio:
    """mean(top) / mean(bottom) of float64 [N], or mean(top) alone; images are drawn, or whole
    groups."""
    bottom = torch.ones_like(top) if bottom is None else bottom
    value = top.sum() / bottom.sum()
    if groups is not None:
        kinds, places = torch.tensor(groups).unique(return_inverse=True)
        zeros = torch.zeros(len(kinds), dtype=torch.float64)
        top, bottom = (zeros.index_add(0, places, values) for values in (top, bottom))
    weights = resamplings(len(top))
    return ResampledRatio(value, (weights @ top) / (weights @ bottom))


def estimate(ratio: ResampledRatio) -> Estimate:
    return _interval(ratio.value, ratio.drawn)


def ratio_difference(first: ResampledRatio, second: ResampledRatio) -> Estimate:
    """first - second over the same resamplings of the same images."""
    return _interval(first.value - second.value, first.drawn - second.drawn)


def _interval(value: Tensor, drawn: Tensor) -> Estimate:
    defined = drawn[~drawn.isnan()]  # a resampling may have nothing to divide by
    low, high = defined.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(value), low, high)
