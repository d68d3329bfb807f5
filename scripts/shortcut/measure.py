"""How the studies of a shortcut count answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from scripts.shortcut.data import GROUPS, Pictures
from seecause.metrics import group_accuracy

Row = dict[str, Any]


def measure(logits: Tensor, pictures: Pictures) -> Row:
    """Accuracies, and flips: the share of photos whose answer changes with the texture (both halves
    of `pictures` show the same photos)."""
    answers = logits.to(pictures.labels.device).argmax(dim=1)
    groups = group_accuracy(answers == pictures.labels, pictures.groups)
    accuracy = dict(zip(groups.groups, groups.accuracy.tolist(), strict=True))
    boards, leaves = answers.chunk(2)
    flips = float((boards != leaves).double().mean())
    return {
        "average": groups.average,
        "worst": groups.worst,
        "groups": [accuracy[group] for group in GROUPS],
        "flips": flips,
    }


@contextmanager
def fast(device: torch.device | str) -> Iterator[None]:
    """Float32 products in TF32 on a GPU, where answers are only counted. Views are verified and
    heads scored outside, in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if torch.device(device).type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
