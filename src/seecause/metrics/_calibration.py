"""Does a classifier know how sure it may be?

    NLL = -log p(y | x)
    ECE = sum_b n_b / n |accuracy_b - confidence_b|          (Naeini et al. 2015; Guo et al. 2017)
The confidence of a photo is the largest probability. It is binned into `bins` intervals of equal
width on [0, 1], each closed on the left; the last one is closed on both sides. 15 bins and L1 as in
torchmetrics, which differs in one thing: there a confidence of exactly 1 has a bin of its own.
Lower is better, both. `auroc` is the area under the ROC curve: how often a positive photo scores
above a negative one; exact, by scikit-learn, ties count half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.errors import BadOption


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
    """[N] float64 in nats, of logits [N, C] and labels [N]."""
    logits, labels = checked_logits(logits, labels)
    return -logits.log_softmax(dim=1).gather(1, labels[:, None])[:, 0]


def calibration(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Calibration:
    """Confidence against accuracy, of logits [N, C] and labels [N]."""
    if bins < 1:
        raise BadOption("bins", bins, "at least one bin")
    logits, labels = checked_logits(logits, labels)
    confidence, answer = logits.softmax(dim=1).max(dim=1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    member = torch.bucketize(confidence, edges, right=True)  # [N], 0 to bins - 1
    count = torch.bincount(member, minlength=bins)
    sure, right = (
        torch.zeros(bins, dtype=torch.float64).index_add(0, member, values)
        for values in (confidence, (answer == labels).double())
    )
    return Calibration(count, sure / count, right / count)


def checked_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the CPU, logits in float64; or what is wrong with them."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or len(labels) == 0:
        raise BadOption(
            "labels",
            list(labels.shape),
            f"[N] beside logits [N, C], which are {list(logits.shape)}, and at least one",
        )
    if int(labels.min()) < 0 or int(labels.max()) >= logits.shape[1]:
        raise BadOption(
            "labels",
            f"{int(labels.min())} to {int(labels.max())}",
            f"classes 0 to {logits.shape[1] - 1}",
        )
    return logits.detach().double().cpu(), labels.detach().cpu().long()


def auroc(logits: Tensor, labels: Tensor) -> float:
    """Of logits [N, C] and labels [N]. Two classes: by the probability of class 1. More: the mean
    over classes of one against the rest."""
    from sklearn.metrics import roc_auc_score

    logits, labels = checked_logits(logits, labels)
    missing = [name for name in range(logits.shape[1]) if not (labels == name).any()]
    if missing or logits.shape[1] < 2:
        raise BadOption(
            "labels",
            f"no sample of class {missing[0] if missing else 1}",
            "samples of every class: the curve needs positives and negatives",
        )
    probabilities = logits.softmax(dim=1)
    areas = [
        float(roc_auc_score((labels == name).numpy(), probabilities[:, name].numpy()))
        for name in range(logits.shape[1])
    ]
    return areas[1] if len(areas) == 2 else float(torch.tensor(areas, dtype=torch.float64).mean())
