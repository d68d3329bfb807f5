"""What scoring heads gives: a number for each, its error, and what else its removal did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seecause.errors import BadOption

Head = tuple[int, int]  # (layer, head), both from 0


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Higher means more worth removing. A head that a block does not have, or that was not scored,
    is NaN; one that must stay is -inf."""

    value: Tensor  # [L, H] float64, on the CPU
    error: Tensor | None = None  # [L, H], standard error of the mean over images
    after: dict[str, Tensor] = field(
        default_factory=dict
        # [L, H] each: what the model is like without the head (accuracy, nll, entropy, fig_drop,
        # ...)
    )
    before: dict[str, float] = field(default_factory=dict)  # the same of the whole model
    protocol: dict[str, Any] = field(default_factory=dict)
    total: int | None = None  # heads of the model, scored or not; None: as many as have a score
    effects: Tensor | None = (
        None  # [B, L, H], of each image, where they were asked for; `value` is their mean
    )
    fig_drops: Tensor | None = (
        None  # [B, L, H], what FIG of each image loses, beside `effects` where FIG was measured
    )

    def order(self, *, positive: bool = True) -> list[Head]:
        """Heads from the highest score down; with `positive`, only those above zero."""
        flat = self.value.flatten().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        chosen = [
            i
            for i in flat.argsort(descending=True, stable=True).tolist()
            if flat[i] > (0 if positive else -torch.inf)
        ]
        return [divmod(i, self.value.shape[1]) for i in chosen]

    def top(self, k: int | float, *, positive: bool = True) -> list[Head]:
        """The `k` highest heads: a count, or a share of all heads of the model between 0 and 1.
        Fewer, when fewer were scored or are above zero."""
        total = int((~self.value.isnan()).sum()) if self.total is None else self.total
        return self.order(positive=positive)[: head_count(k, total)]


def head_count(k: int | float, total: int) -> int:
    """`k` of `total` heads: a count, or a share between 0.0 and 1.0."""
    count = round(k * total) if isinstance(k, float) and 0 <= k <= 1 else k
    if isinstance(count, float) or not 0 <= count <= total:
        raise BadOption("k", k, f"a count up to {total}, or a share between 0.0 and 1.0")
    return count
