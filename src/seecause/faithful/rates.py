"""How fast iFAM learns, and when (arXiv 2506.08915, appendix; PDiscoFormer's steps): the rules
around the parameter groups of `objective.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

BATCH = 16  # the batch that base rates are given for


def scaled_rate(base: float, batch: int) -> float:
    """The square-root rule: a batch of 128 learns at 2.8 times the rate of a batch of 16."""
    return base * math.sqrt(batch / BATCH)


def normalised_decay(decay: float, steps: int) -> float:
    """Weight decay of a run of `steps`: 0.05 over 4,140 steps becomes 7.8e-4, which AdamW
    multiplies by each group's rate."""
    return decay * math.sqrt(1 / max(1, steps))


def cosine(epoch: int, epochs: int) -> float:
    """Share of the rate in an epoch counted from 0: half a cosine to zero, constant inside an
    epoch, no warm-up."""
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


def stepped(epoch: int, *, every: int, factor: float) -> float:
    """Share of the rate in an epoch counted from 0, multiplied by `factor` after every so many
    epochs: PDiscoFormer halves it after every 4 of 28."""
    return factor ** (epoch // every)


def set_pace(groups: Iterable[dict[str, Any]], share: float) -> None:
    """Give every group of an optimiser this share of the rate it started with."""
    for group in groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * share
