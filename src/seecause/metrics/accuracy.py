"""How good are a model's predictions? Accuracy by group: an average hides the groups
that a shortcut fails.

Two numbers go by the name "adjusted average" and are told apart here: `train_weighted_average`
weighs the groups of the test set as the training set has them (Sagawa et al. 2020),
`unweighted_average` weighs them all the same (SubpopBench).

The Backgrounds Challenge (Xiao et al. 2020) asks how much accuracy another background costs:
    BG-gap = accuracy(mixed_same) - accuracy(mixed_rand)
on ImageNet-9, whose nine classes each gather some of ImageNet-1k's. An ImageNet-1k
model predicts the class its largest logit belongs to; 630 of 1,000 classes belong to none (-1) and
are always wrong.

Does a classifier know how sure it may be?

    NLL = -log p(y | x)
    ECE = sum_b n_b / n |accuracy_b - confidence_b|          (Naeini et al. 2015; Guo et al. 2017)

The confidence of a photo is the largest probability. It is binned into `bins` intervals of equal
width on [0, 1], each closed on the left; the last one is closed on both sides. 15 bins and L1 as in
torchmetrics, which differs in one thing: there a confidence of exactly 1 has a bin of its own.
Lower is better, both. `auroc` is the area under the ROC curve: how often a positive photo scores
above a negative one; exact, by scikit-learn, ties count half.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics.statistics import check_confidence

Group = tuple[int, ...]
NINE = 9  # classes of ImageNet-9


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
        """Over samples, as the test set has them."""
        return float(self.right.sum()) / float(self.total.sum())

    @property
    def worst(self) -> float:
        """The accuracy of the worst group."""
        return float(self.accuracy.min())

    @property
    def worst_group(self) -> Group:
        return self.groups[int(self.accuracy.argmin())]

    def worst_among(self, groups: Iterable[Group]) -> float:
        """The accuracy of the worst of these groups. iFAM's public code looks at two groups of
        Waterbirds only, (0, 1) and (1, 0)."""
        chosen = list(groups)
        untested = [group for group in chosen if group not in self.groups]
        if untested or not chosen:
            raise BadOption(
                "groups", chosen, f"groups that were tested: {', '.join(map(str, self.groups))}"
            )
        return min(float(self.accuracy[self.groups.index(group)]) for group in chosen)

    @property
    def by_class(self) -> GroupAccuracy:
        """Groups with the same first code as one. iFAM's public code calls the worst of these the
        worst group of MetaShift."""
        names = sorted({group[:1] for group in self.groups})
        member = torch.tensor([names.index(group[:1]) for group in self.groups])
        right, total = (
            torch.zeros(len(names), dtype=torch.int64).index_add(0, member, counts)
            for counts in (self.right, self.total)
        )
        return GroupAccuracy(tuple(names), right, total)

    @property
    def unweighted_average(self) -> float:
        """Over groups, each the same."""
        return float(self.accuracy.mean())

    def train_weighted_average(self, train: Mapping[Group, float]) -> float:
        """Over groups, each as often as training met it: `train` holds counts or probabilities. A
        group met there must have been tested."""
        met = [group for group, share in train.items() if share > 0]
        untested = [group for group in met if group not in self.groups]
        if untested:
            raise BadOption("train", f"groups {untested}", "only groups that the test set has too")
        shares = [float(train.get(group, 0.0)) for group in self.groups]
        weights = torch.tensor(shares, dtype=torch.float64)
        return float((weights * self.accuracy).sum() / weights.sum())

    def intervals(self, confidence: float = 0.95) -> Tensor:
        """Clopper-Pearson interval of each group, [G, 2]."""
        return clopper_pearson(self.right, self.total, confidence)


def group_accuracy(right: Tensor, groups: Tensor | Sequence[Group | None]) -> GroupAccuracy:
    """Accuracy of each group, of the worst, and on average.

    `right` [N] bool: whether each prediction is correct; `groups`: its group, as a tuple, a
    number, or a row of [N, k].

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
    try:
        codes = torch.as_tensor(groups).cpu()
    except (TypeError, ValueError) as odd:
        raise BadOption("groups", str(odd), "numbers, or tuples of as many numbers each") from None
    codes = codes[:, None] if codes.ndim == 1 else codes
    if len(right) == 0 or len(codes) != len(right):
        expected = f"one for each of the {len(right)} samples, and at least one"
        raise BadOption("groups", f"{len(codes)} of them", expected)
    names, member = codes.unique(dim=0, return_inverse=True)
    return GroupAccuracy(
        groups=tuple(tuple(name) for name in names.tolist()),
        right=torch.bincount(member[right], minlength=len(names)),
        total=torch.bincount(member),
    )


def clopper_pearson(right: Tensor, total: Tensor, confidence: float = 0.95) -> Tensor:
    """The exact interval of a share, [..., 2]: it covers the truth at least as often as promised,
    also for few samples and none right."""
    from scipy.stats import beta

    check_confidence(confidence)
    tail = (1 - confidence) / 2
    k, n = right.double().cpu().numpy(), total.double().cpu().numpy()
    low, high = beta.ppf(tail, k, n - k + 1), beta.ppf(1 - tail, k + 1, n - k)
    low = torch.from_numpy(low).nan_to_num(nan=0.0)  # undefined for k = 0
    high = torch.from_numpy(high).nan_to_num(nan=1.0)  # undefined for k = n
    return torch.stack([low, high], dim=-1)


def in9_predictions(logits: Tensor, mapping: Tensor | None = None) -> Tensor:
    """Classes [N] from 0 to 8, or -1, of logits [N, 1000] with `mapping` [1000] (`read_in9_map`),
    or of the logits [N, 9] of a model with nine classes."""
    expected = NINE if mapping is None else len(mapping)
    if logits.ndim != 2 or logits.shape[1] != expected:
        raise BadOption(
            "logits",
            list(logits.shape),
            f"[N, {expected}]; a model with 1000 classes needs a mapping, one with nine has none",
        )
    predicted = logits.argmax(dim=1).cpu()
    return predicted if mapping is None else mapping.cpu()[predicted]


def in9_right(logits: Tensor, labels: Tensor, mapping: Tensor | None = None) -> Tensor:
    """[N] bool: whether each prediction is correct."""
    return in9_predictions(logits, mapping) == labels.cpu()


def background_gap(same: Tensor, random: Tensor) -> float:
    """BG-gap from `in9_right` on mixed_same and on mixed_rand, as a share (times 100: points). 0:
    the background does not matter; lower is better."""
    if len(same) == 0 or len(random) == 0:
        raise BadOption("same", f"{len(same)} and {len(random)} photos", "photos of both variants")
    return float(same.to(torch.float64).mean() - random.to(torch.float64).mean())


@dataclass(frozen=True, eq=False)
class Calibration:
    """What each bin holds: how many photos [bins], and their mean confidence and accuracy [bins]
    float64 (NaN for an empty bin)."""

    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def error(self) -> float:
        """ECE."""
        gaps = (self.accuracy - self.confidence).abs().nan_to_num(nan=0.0)
        return float((gaps * self.count).sum() / self.count.sum())

    @property
    def largest(self) -> float:
        """The gap of the worst bin, MCE."""
        return float((self.accuracy - self.confidence).abs().nan_to_num(nan=0.0).max())


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood in nats, [N] float64, of logits [N, C] and labels [N]."""
    logits, labels = checked_logits(logits, labels)
    return -logits.log_softmax(dim=1).gather(1, labels[:, None])[:, 0]


def calibration(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Calibration:
    """Confidence against accuracy in bins, of logits [N, C] and labels [N].

    >>> import torch
    >>> sure = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    >>> round(calibration(sure, torch.tensor([0, 0])).error, 3)  # twice sure, once right
    0.5
    """
    if bins < 1:
        raise BadOption("bins", bins, "at least one bin")
    logits, labels = checked_logits(logits, labels)
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    member = torch.bucketize(confidence, edges, right=True)  # [N], 0 to bins - 1
    count = torch.bincount(member, minlength=bins)
    sure, right = (
        torch.zeros(bins, dtype=torch.float64).index_add(0, member, values)
        for values in (confidence, (predicted == labels).double())
    )
    return Calibration(count, sure / count, right / count)


def checked_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the CPU, logits in float64; or what is wrong with them."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or len(labels) == 0:
        expected = f"[N] beside logits [N, C], which are {list(logits.shape)}, and at least one"
        raise BadOption("labels", list(labels.shape), expected)
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        raise BadOption("labels", f"{low} to {high}", f"classes 0 to {logits.shape[1] - 1}")
    return logits.detach().double().cpu(), labels.detach().cpu().long()


def auroc(logits: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve, of logits [N, C] and labels [N]. Two classes: by the probability of
    class 1. More: the mean over classes of one against the rest."""
    from sklearn.metrics import roc_auc_score

    logits, labels = checked_logits(logits, labels)
    missing = [name for name in range(logits.shape[1]) if not (labels == name).any()]
    if missing or logits.shape[1] < 2:
        raise BadOption(
            "labels",
            f"no sample of class {missing[0] if missing else 1}",
            "samples of every class: the curve needs positives and negatives",
        )
    probabilities = logits.softmax(dim=1).numpy()
    scores = probabilities[:, 1] if logits.shape[1] == 2 else probabilities
    return float(roc_auc_score(labels.numpy(), scores, multi_class="ovr"))
