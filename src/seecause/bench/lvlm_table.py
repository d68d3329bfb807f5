"""What a study of a vision-language model found: its samples, side by side and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seecause.data.dataset import Dataset
from seecause.data.images import to_pil
from seecause.files import csv_text
from seecause.lvlm import (
    LVLM,
    Grouping,
    HeadGroups,
    RankingCurves,
    embed,
    group_heads,
    grouping,
    picture_map,
    seen_picture,
)
from seecause.lvlm.analysis import STRONG
from seecause.lvlm.trace import LOW_AGREEMENT, LOW_R2, RANKINGS

FEWEST = 10  # samples that groups of samples or heads need


@dataclass(frozen=True, eq=False)
class TracedSample:
    """One sample: numbers and tensors, or why there are none. Where only its image tokens, or other
    wordings and ratios, are missing, `tokens_skipped` or `variants_skipped` says why."""

    index: int
    id: str
    label: str | None
    numbers: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    skipped: str | None = None
    tokens_skipped: str | None = None
    variants_skipped: str | None = None

    @property
    def hole(self) -> str | None:
        parts = {
            "no image tokens": self.tokens_skipped,
            "no other wordings or ratios": self.variants_skipped,
        }
        lines = [f"{what}: {reason}" for what, reason in parts.items() if reason]
        return self.skipped or "; ".join(lines) or None


@dataclass(frozen=True, eq=False)
class LVLMStudy:
    samples: list[TracedSample]
    text: Tensor | None  # u* of the dataset, [T]
    pieces: tuple[str, ...]  # the text rows

    @property
    def traced(self) -> list[TracedSample]:
        """The samples that are not holes."""
        return [sample for sample in self.samples if sample.skipped is None]

    def stacked(self, name: str) -> Tensor:
        """One tensor of all samples that have it, [S, ...]."""
        return torch.stack([s.tensors[name] for s in self.traced if name in s.tensors])

    def column(self, name: str) -> Tensor:
        """One number of all samples that have it, [S] float64."""
        numbers = [sample.numbers.get(name) for sample in self.traced]
        return torch.tensor([n for n in numbers if n is not None], dtype=torch.float64)

    def curves(self) -> dict[str, RankingCurves]:
        """By ranking; one row a sample."""
        return {
            name: RankingCurves(
                self.stacked(f"faithfulness.{name}"), self.stacked(f"completeness.{name}")
            )
            for name in RANKINGS
        }

    def concerns(self) -> list[str]:
        """What makes the coefficients less trustworthy, in words; nothing where all is well."""
        lines, count = [], len(self.traced)
        limits = {
            "r2": (LOW_R2, "foretell masked answers badly (R2"),
            "split_half": (LOW_AGREEMENT, "differ between two halves of the masks (agreement"),
        }
        for name, (least, what) in limits.items():
            low = count - int((self.column(name) >= least).sum())
            if low:
                lines.append(
                    f"in {low} of {count} samples the coefficients {what} below {least}): ask more"
                    " masks, and read single heads with care"
                )
        return lines

    def head_groups(self) -> HeadGroups | None:
        """Heads that matter somewhere, in two clusters by the samples they matter in; None where
        there are too few."""
        coefficients = self.stacked("coefficients")
        strong = int((coefficients > STRONG).any(dim=0).sum())
        return group_heads(coefficients) if strong > 2 and len(coefficients) >= FEWEST else None

    def class_groups(self) -> ClassGroups | None:
        """Whether samples of one class use the same heads; None where classes or samples are too
        few."""
        labels = [sample.label for sample in self.traced if sample.label is not None]
        too_few = len(labels) < FEWEST or not 2 <= len(set(labels)) < len(labels)
        if too_few or len(labels) < len(self.traced):
            return None
        vectors = self.stacked("coefficients").flatten(1)
        purity = grouping(vectors, labels, neighbours=min(5, len(labels) - 1))
        return ClassGroups(labels, embed(vectors), purity)


@dataclass(frozen=True, eq=False)
class ClassGroups:
    """Samples by the coefficients of their heads."""

    labels: list[str]
    points: Tensor  # [S, 2], t-SNE
    grouping: Grouping


@dataclass(frozen=True, eq=False)
class TokenMaps:
    """Where one sample's effect comes from, in the frame that the model sees."""

    label: str
    picture: Tensor  # [3, H, W] in [0, 1]
    coefficients: Tensor  # [gh, gw]
    weighted: Tensor  # [gh, gw]


def token_maps(
    study: LVLMStudy, lvlm: LVLM, data: Dataset, question: str, count: int
) -> list[TokenMaps]:
    """Of the first samples with image tokens."""
    chosen = [sample for sample in study.traced if "gamma" in sample.tensors][:count]
    maps = []
    for sample in chosen:
        picture = to_pil(data[sample.index].image)
        prompt = lvlm.prompt(picture, question)
        gamma, weighted = (
            picture_map(prompt.tokens, sample.tensors[name]) for name in ("gamma", "weighted")
        )
        label = f"{sample.id}: {sample.numbers['answer']}"
        maps.append(TokenMaps(label, seen_picture(lvlm, prompt, picture), gamma, weighted))
    return maps


def to_csv(study: LVLMStudy) -> str:
    """One line a sample, holes with their reason."""
    columns: dict[str, None] = {}
    for sample in study.traced:
        columns |= dict.fromkeys(name for name in sample.numbers if name != "pieces")
    rows = [["sample", "label", *columns, "missing"]]
    for sample in study.samples:
        numbers = [_cell(sample.numbers.get(name)) for name in columns]
        rows.append([sample.id, sample.label or "", *numbers, sample.hole or ""])
    return csv_text(rows)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
