"""What an iFAM forward pass gives, and what was done to it at test time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

By = Literal["distance", "dot"]


@dataclass(frozen=True, eq=False)
class IFAMOutput:
    """Grids are [gh, gw]; channel K of K + 1 is the background."""

    logits: Tensor  # [B, C] the answer: of stage 2, or of the parts where there is one stage
    maps: Tensor  # [B, K + 1, gh, gw] soft part maps, sum to 1
    # [B, gh, gw] bool: the patches that stage 2 reads; with one stage, those that belong to some
    # part
    mask: Tensor
    pair: Tensor  # [B, 2, gh, gw] the best part and the background, which the mask compares
    embeddings: Tensor  # [B, D, K + 1] modulated part embeddings
    part_logits: Tensor  # [B, C, K] what each part votes for
    # [B, K + 1, gh, gw] feature . prototype (the released code calls them part logits; they are
    # not)
    dots: Tensor
    distances: Tensor  # [B, K + 1, gh, gw] squared distance to each prototype
    warped_maps: Tensor | None = None  # [B, K + 1, gh, gw] of the second view that `warped` brought

    @property
    def stage1_logits(self) -> Tensor:
        """[B, C]: the mean over parts."""
        return self.part_logits.mean(dim=-1)

    @property
    def empty(self) -> Tensor:
        """[B] bool: nothing was selected, so the answer comes from the special tokens and says
        nothing about the picture."""
        return ~self.mask.flatten(1).any(dim=1)

    @property
    def notes(self) -> list[str]:
        """What a reader of the answers should know."""
        count = int(self.empty.sum())
        return (
            [
                f"{count} of {len(self.mask)} images select no patch: their answers do not depend"
                " on the picture"
            ]
            if count
            else []
        )


@dataclass(frozen=True)
class Intervention:
    """Parts taken out of the mask, and the quantile of tokens that are trusted (None: all)."""

    drop_parts: tuple[int, ...] = ()
    quantile: float | None = None
    by: By = "distance"

    def __bool__(self) -> bool:
        return bool(self.drop_parts) or self.quantile is not None


@dataclass(frozen=True)
class Thresholds:
    """Per part, how far from its prototype (or how little like it) a token may be; and how many
    tokens of how many pictures decided it."""

    quantile: float
    by: By
    values: tuple[float, ...]  # K of them; infinite where no token was seen
    tokens: tuple[int, ...] = field(default=())
    pictures: int = 0


def as_parts(parts: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in parts}))
