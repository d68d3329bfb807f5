"""Area under the ROC curve: how often does a positive photo score above a negative one? Exact, by
scikit-learn; ties count half."""

from __future__ import annotations

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics.calibration import checked_logits


def auroc(logits: Tensor, labels: Tensor) -> float:
    """Of logits [N, C] and labels [N]. Two classes: by the probability of class 1. More: the mean
    over classes of one against the rest."""
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
