"""The Backgrounds Challenge (Xiao et al. 2020): how much accuracy does another background cost?

    BG-gap = accuracy(mixed_same) - accuracy(mixed_rand)
on ImageNet-9, whose nine classes each gather some of ImageNet-1k's. The answer of an ImageNet-1k
model is the class its largest logit belongs to; 630 of 1,000 classes belong to none (-1) and are
always wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.errors import BadOption

NINE = 9


def in9_answers(logits: Tensor, mapping: Tensor | None = None) -> Tensor:
    """Classes [N] from 0 to 8, or -1, of logits [N, 1000] with `mapping` [1000] (`read_in9_map`),
    or of the logits [N, 9] of a model with nine classes."""
    expected = NINE if mapping is None else len(mapping)
    if logits.ndim != 2 or logits.shape[1] != expected:
        raise BadOption(
            "logits",
            list(logits.shape),
            f"[N, {expected}]; a model with 1000 classes needs a mapping, one with nine has none",
        )
    answer = logits.argmax(dim=1).cpu()
    return answer if mapping is None else mapping.cpu()[answer]


def in9_right(logits: Tensor, labels: Tensor, mapping: Tensor | None = None) -> Tensor:
    """[N] bool: whether each photo was answered right."""
    return in9_answers(logits, mapping) == labels.cpu()


def background_gap(same: Tensor, random: Tensor) -> float:
    """BG-gap from `in9_right` on mixed_same and on mixed_rand, as a share (times 100: points). 0:
    the background does not matter; lower is better."""
    if len(same) == 0 or len(random) == 0:
        raise BadOption("same", f"{len(same)} and {len(random)} photos", "photos of both variants")
    return float(same.to(torch.float64).mean() - random.to(torch.float64).mean())
