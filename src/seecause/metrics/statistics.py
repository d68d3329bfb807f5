"""Means, errors and intervals over images. NaN marks an image that was skipped: it is left out and
counted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from seecause.errors import BadOption

_DRAWN_AT_ONCE = 4_000_000  # numbers drawn at once by the bootstrap
_CACHED = 8_000_000  # weights of its resamplings that are kept for the next column
_EACH_IMAGE = 10_000  # images up to which they are resampled


@dataclass(frozen=True)
class Summary:
    """A mean over images. The standard error is the sample deviation (n - 1) over sqrt(n): NaN
    below two images, for one says nothing of others."""

    mean: float
    standard_error: float
    n: int
    skipped: int = 0

    def text(self, digits: int = 3, *, scale: float = 1.0, sign: str = "") -> str:
        """`0.603 ± 0.017`; a dash stands for an error that is not known."""
        return (
            f"{self.mean * scale:{sign}.{digits}f} ±"
            f" {error_text(self.standard_error * scale, digits)}"
        )


def summarise(values: Tensor) -> Summary:
    """Mean and standard error of values [B].

    >>> import torch
    >>> summary = summarise(torch.tensor([1.0, 2.0, 3.0, float("nan")]))
    >>> summary.mean, summary.n, summary.skipped
    (2.0, 3, 1)
    """
    numbers = _numbers(values)
    return Summary(
        float(numbers.mean()),
        float(standard_error(numbers)),
        len(numbers),
        len(values) - len(numbers),
    )


def standard_error(values: Tensor) -> Tensor:
    """Of the mean over the first dimension of values [B, ...], from the sample deviation; NaN below
    two images."""
    return (
        values.std(dim=0, correction=1) / len(values) ** 0.5
        if len(values) > 1
        else values.new_full(values.shape[1:], torch.nan)
    )


def error_text(error: float, digits: int) -> str:
    """An error to so many decimals, or a dash where it is not known."""
    return "-" if math.isnan(error) else f"{error:.{digits}f}"


def paired_difference(first: Tensor, second: Tensor) -> Summary:
    """first - second image by image, over the images both have. Images vary far more than methods
    do, so this is much sharper than comparing two means with their own errors."""
    _check_alike(first, second)
    return summarise(first.double() - second.double())


def bootstrap_interval(
    values: Tensor, *, confidence: float = 0.95, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The percentile interval of the mean of values [B], over `draws` resamplings of the images.

    Beyond 10,000 images the normal approximation is used, which is then as good.
    """
    check_confidence(confidence)
    numbers = _numbers(values)
    if len(numbers) == 0:
        return torch.nan, torch.nan
    if len(numbers) > _EACH_IMAGE:
        width = NormalDist().inv_cdf((1 + confidence) / 2) * float(standard_error(numbers))
        return float(numbers.mean()) - width, float(numbers.mean()) + width
    if len(numbers) * draws <= _CACHED:
        return _middle(_shares(len(numbers), draws, seed) @ numbers, confidence)
    means = torch.cat([numbers[rows].mean(dim=1) for rows in _resampled(len(numbers), draws, seed)])
    return _middle(means, confidence)


def ratio_interval(
    first: Tensor, second: Tensor, *, confidence: float = 0.95, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The percentile interval of mean(first) / mean(second) over the same images. NaN where a
    resampling divides by zero."""
    check_confidence(confidence)
    _check_alike(first, second)
    both = ~(first.isnan() | second.isnan())
    top, bottom = _numbers(first[both]), _numbers(second[both])
    if len(top) == 0:
        return torch.nan, torch.nan
    ratios = torch.cat(
        [
            top[rows].mean(dim=1) / bottom[rows].mean(dim=1)
            for rows in _resampled(len(top), draws, seed)
        ]
    )
    return _middle(ratios, confidence)


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's correlation of two maps for each image: [B, ...] and [B, ...] -> [B]. Ties share
    their mean rank; NaN for a constant map."""
    _check_alike(first, second)
    x, y = (average_ranks(maps.detach().flatten(1)) for maps in (first, second.to(first.device)))
    x, y = x - x.mean(dim=1, keepdim=True), y - y.mean(dim=1, keepdim=True)
    return (x * y).sum(dim=1) / (x.square().sum(dim=1) * y.square().sum(dim=1)).sqrt()


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


def check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise BadOption("confidence", confidence, "a share between 0 and 1")


def _check_alike(first: Tensor, second: Tensor) -> None:
    if first.shape != second.shape:
        expected = f"values of the same images as the first, {list(first.shape)}"
        raise BadOption("second", list(second.shape), expected)


def _numbers(values: Tensor) -> Tensor:
    if values.ndim != 1:
        raise BadOption("values", list(values.shape), "one number for each image, [B]")
    values = values.detach().cpu().double()
    return values[~values.isnan()]


def _resampled(count: int, draws: int, seed: int) -> Iterator[Tensor]:
    """Places [n, count] of `draws` resamplings, some at a time."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, _DRAWN_AT_ONCE // count)
    for start in range(0, draws, rows):
        yield torch.randint(count, (min(rows, draws - start), count), generator=generator)


@lru_cache(maxsize=2)
def _shares(count: int, draws: int, seed: int) -> Tensor:
    """How much each image weighs in each resampling, [draws, count]: a table has hundreds of cells
    over the same images, and draws them once."""
    rows = torch.cat(list(_resampled(count, draws, seed)))
    return torch.zeros(draws, count, dtype=torch.float64).scatter_add_(
        1, rows, torch.full_like(rows, 1 / count, dtype=torch.float64)
    )


def _middle(values: Tensor, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high
