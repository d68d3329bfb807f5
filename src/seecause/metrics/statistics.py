"""Accuracy and calibration of predictions, and errors of means over images.

Accuracy by group: an average hides the groups that a shortcut fails. `unweighted_average` weighs
all groups the same (the "adjusted average" of SubpopBench).

Calibration of a classifier; lower is better:

    NLL = -log p(y | x)
    ECE = sum_b n_b / n |accuracy_b - confidence_b|          (Naeini et al. 2015; Guo et al. 2017)

The confidence of an image is the largest probability. It is binned into `bins` intervals of equal
width on [0, 1], each closed on the left; the last one is closed on both sides. 15 bins and L1 as in
torchmetrics, which differs in one thing: there a confidence of exactly 1 has a bin of its own.

Means, errors and intervals over images leave out and count NaN, which marks a skipped image.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from seecause.errors import BadOption

Group = tuple[int, ...]
Interval = tuple[float, float]

_DRAWS = 10_000  # number of resamplings of the bootstrap
_DRAWN_AT_ONCE = 4_000_000  # numbers drawn at once by the bootstrap
_CACHED = 8_000_000  # maximum number of cached resampling weights
_EACH_IMAGE = 10_000  # maximum number of images for the bootstrap


@dataclass(frozen=True, eq=False)
class GroupAccuracy:
    """Correct predictions of each group. Only groups that occur are here."""

    groups: tuple[Group, ...]
    right: Tensor  # [G] int64
    total: Tensor  # [G] int64

    @property
    def accuracy(self) -> Tensor:
        """[G], float64."""
        return self.right.double() / self.total

    @property
    def average(self) -> float:
        """The mean accuracy over samples of the test set."""
        return float(self.right.sum()) / float(self.total.sum())

    @property
    def worst(self) -> float:
        """The accuracy of the worst group."""
        return float(self.accuracy.min())

    def worst_among(self, groups: Iterable[Group]) -> float:
        """The accuracy of the worst of these groups. iFAM's public code looks at two groups of
        Waterbirds only, (0, 1) and (1, 0)."""
        return min(float(self.accuracy[self.groups.index(group)]) for group in groups)

    @property
    def by_class(self) -> GroupAccuracy:
        """Groups with the same first code as one. iFAM's public code calls the worst of these the
        worst group of MetaShift."""
        names = sorted({group[:1] for group in self.groups})
        member = torch.tensor([names.index(group[:1]) for group in self.groups])
        right, total = (
            torch.bincount(member, weights=counts).long() for counts in (self.right, self.total)
        )
        return GroupAccuracy(tuple(names), right, total)

    @property
    def unweighted_average(self) -> float:
        """The mean accuracy over groups with equal weights."""
        return float(self.accuracy.mean())

    def intervals(self) -> Tensor:
        """Clopper-Pearson interval of each group, [G, 2]."""
        return clopper_pearson(self.right, self.total)


def group_accuracy(right: Tensor, groups: Tensor | Sequence[Group | None]) -> GroupAccuracy:
    """Accuracy of each group, of the worst, and on average.

    Args:
        right: Whether each prediction is correct, [N] bool.
        groups: The group of each sample: a number, a tuple, or a row of [N, k].

    Returns:
        A `GroupAccuracy`.

    Example:
        >>> import torch
        >>> right = torch.tensor([True, True, True, False])
        >>> result = group_accuracy(right, [0, 0, 1, 1])
        >>> result.average, result.worst
        (0.75, 0.5)
    """
    right = torch.as_tensor(right).detach().cpu().bool()
    if not isinstance(groups, Tensor) and None in groups:
        without = f"none for sample {list(groups).index(None)}"
        raise BadOption("groups", without, "a group for every sample; not every dataset has them")
    codes = torch.as_tensor(groups).cpu()
    codes = codes[:, None] if codes.ndim == 1 else codes
    names, member = codes.unique(dim=0, return_inverse=True)
    return GroupAccuracy(
        groups=tuple(tuple(name) for name in names.tolist()),
        right=torch.bincount(member[right], minlength=len(names)),
        total=torch.bincount(member),
    )


def clopper_pearson(right: Tensor, total: Tensor) -> Tensor:
    """The exact 95 % interval of a share, [..., 2]: its coverage is at least 95 %, also for few
    samples and no correct prediction."""
    from scipy.stats import beta

    k, n = right.double().cpu().numpy(), total.double().cpu().numpy()
    low, high = beta.ppf(0.025, k, n - k + 1), beta.ppf(0.975, k + 1, n - k)
    low = torch.from_numpy(low).nan_to_num(nan=0.0)  # undefined for k = 0
    high = torch.from_numpy(high).nan_to_num(nan=1.0)  # undefined for k = n
    return torch.stack([low, high], dim=-1)


@dataclass(frozen=True, eq=False)
class Calibration:
    """For each bin: the number of images [bins], and their mean confidence and accuracy [bins]
    float64 (NaN for an empty bin)."""

    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def error(self) -> float:
        """ECE."""
        gaps = (self.accuracy - self.confidence).abs().nan_to_num(nan=0.0)
        return float((gaps * self.count).sum() / self.count.sum())


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood in nats, [N] float64, of logits [N, C] and labels [N]."""
    losses = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    return losses.detach().cpu()


def calibration(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Calibration:
    """Confidence against accuracy in bins.

    Args:
        logits: Of a classifier, [N, C].
        labels: The true classes, [N].
        bins: How many intervals of equal width the confidence is divided into.

    Returns:
        A `Calibration`; its `error` is the expected calibration error (ECE).

    Example:
        >>> import torch
        >>> sure = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
        >>> round(calibration(sure, torch.tensor([0, 0])).error, 3)  # twice sure, once right
        0.5
    """
    logits, labels = logits.detach().double().cpu(), labels.detach().cpu()
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    member = torch.bucketize(confidence, edges, right=True)  # [N], 0 to bins - 1
    count = torch.bincount(member, minlength=bins)
    sure, right = (
        torch.bincount(member, weights=values, minlength=bins)
        for values in (confidence, (predicted == labels).double())
    )
    return Calibration(count, sure / count, right / count)


def auroc(logits: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve, of logits [N, C] and labels [N]. Two classes: by the probability of
    class 1. More: the mean over classes of one against the rest. Every class must occur."""
    from sklearn.metrics import roc_auc_score

    probabilities = logits.detach().double().cpu().softmax(dim=1).numpy()
    scores = probabilities[:, 1] if logits.shape[1] == 2 else probabilities
    return float(roc_auc_score(labels.cpu().numpy(), scores, multi_class="ovr"))


@dataclass(frozen=True)
class Summary:
    """A mean over images. The standard error is the sample deviation (n - 1) over sqrt(n): NaN
    for fewer than two images."""

    mean: float
    standard_error: float
    n: int
    skipped: int = 0


def summarise(values: Tensor) -> Summary:
    """Mean and standard error of one number for each image.

    Args:
        values: [B]; NaN marks an image that was skipped.

    Returns:
        A `Summary`.

    Example:
        >>> import torch
        >>> summary = summarise(torch.tensor([1.0, 2.0, 3.0, float("nan")]))
        >>> summary.mean, summary.n, summary.skipped
        (2.0, 3, 1)
    """
    numbers = _numbers(values)
    error = float(standard_error(numbers))
    return Summary(float(numbers.mean()), error, len(numbers), len(values) - len(numbers))


def standard_error(values: Tensor) -> Tensor:
    """The standard error of the mean over the first dimension of values [B, ...], from the sample
    deviation; NaN for fewer than two images."""
    if len(values) < 2:
        return values.new_full(values.shape[1:], torch.nan)
    return values.std(dim=0, correction=1) / len(values) ** 0.5


def error_text(error: float, digits: int) -> str:
    """An error to so many decimals, or a dash where it is not known."""
    return "-" if math.isnan(error) else f"{error:.{digits}f}"


def paired_difference(first: Tensor, second: Tensor) -> Summary:
    """The mean of `first - second`, image by image.

    Images vary more than methods, so its error is smaller than that of a difference of two
    means.

    Args:
        first: One number for each image, [B].
        second: Numbers of the same images, [B].

    Returns:
        A `Summary` over the images that have both.

    Example:
        >>> import torch
        >>> paired_difference(torch.tensor([3.0, 5.0]), torch.tensor([2.0, 4.0])).mean
        1.0
    """
    _check_alike(first, second)
    return summarise(first.double() - second.double())


def bootstrap_interval(values: Tensor) -> Interval:
    """The 95 % percentile interval of the mean of values [B], over resamplings of the images.

    Beyond 10,000 images the normal approximation is used, which is then as good.
    """
    numbers = _numbers(values)
    if len(numbers) == 0:
        return torch.nan, torch.nan
    if len(numbers) > _EACH_IMAGE:
        mean, width = float(numbers.mean()), 1.96 * float(standard_error(numbers))
        return mean - width, mean + width
    return _middle(_resampled_means(numbers[:, None])[:, 0])


def ratio_interval(first: Tensor, second: Tensor) -> Interval:
    """The 95 % percentile interval of mean(first) / mean(second) over resamplings of the images.
    NaN where a resampling divides by zero."""
    both = torch.stack([first, second], dim=1).detach().cpu().double()
    both = both[~both.isnan().any(dim=1)]
    if len(both) == 0:
        return torch.nan, torch.nan
    top, bottom = _resampled_means(both).unbind(dim=1)
    return _middle(top / bottom)


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's correlation of two maps for each image.

    Args:
        first: Maps [B, ...].
        second: Maps of the same shape.

    Returns:
        [B], from -1 to 1, float64 on the CPU. Ties share their mean rank; NaN for a constant map.

    Example:
        >>> import torch
        >>> rank_correlation(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 4.0, 9.0]]))
        tensor([1.], dtype=torch.float64)
    """
    from scipy.stats import rankdata

    _check_alike(first, second)
    x, y = (
        torch.from_numpy(rankdata(maps.detach().flatten(1).double().cpu().numpy(), axis=1))
        for maps in (first, second)
    )
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


def _check_alike(first: Tensor, second: Tensor) -> None:
    if first.shape != second.shape:
        expected = f"values of the same images as the first, {list(first.shape)}"
        raise BadOption("second", list(second.shape), expected)


def _numbers(values: Tensor) -> Tensor:
    if values.ndim != 1:
        raise BadOption("values", list(values.shape), "one number for each image, [B]")
    values = values.detach().cpu().double()
    return values[~values.isnan()]


def _resampled_means(numbers: Tensor) -> Tensor:
    """Means [draws, k] of numbers [B, k] over resamplings of the images."""
    count = len(numbers)
    if count * _DRAWS <= _CACHED:
        return _shares(count) @ numbers
    return torch.cat([numbers[rows].mean(dim=1) for rows in _resampled(count)])


def _resampled(count: int) -> Iterator[Tensor]:
    """Indices [n, count] of all resamplings, some at a time."""
    generator = torch.Generator().manual_seed(0)
    rows = max(1, _DRAWN_AT_ONCE // count)
    for start in range(0, _DRAWS, rows):
        yield torch.randint(count, (min(rows, _DRAWS - start), count), generator=generator)


@lru_cache(maxsize=2)
def _shares(count: int) -> Tensor:
    """How much each image weighs in each resampling, [draws, count]: a table has hundreds of cells
    over the same images, and draws them once."""
    rows = torch.cat(list(_resampled(count)))
    return torch.zeros(_DRAWS, count, dtype=torch.float64).scatter_add_(
        1, rows, torch.full_like(rows, 1 / count, dtype=torch.float64)
    )


def _middle(values: Tensor) -> Interval:
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
