"""Does a model answer from the background? Several measurements side by side, because each one alone can be fooled.

discovered masks   keep the model's own evidence: if that is the background, BIG is small (see `masks`)
mean fill          most of a picture's mean colour is its background's, so it can give the background away (see `erase`)
grey fill          tells nothing of the picture, but no picture looks like it
exact swap         the same object elsewhere: where it can be had, believe it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause.attribution.attribute import protocol
from seecause.errors import BadOption
from seecause.heads.cases import Cases, logits_of
from seecause.heads.erase import Fill
from seecause.heads.gains import Gains, information_gains
from seecause.heads.masks import Masks, discover_masks, iou
from seecause.heads.removal import Look
from seecause.metrics.groups import GroupAccuracy, group_accuracy
from seecause.models.base import ImageModel

MaskSource = Literal["discovered", "oracle", "both"]
SOME, MUCH = 0.1, 0.5  # BIR, or share of flipped answers, from which the background matters some, and mostly


@dataclass(frozen=True, eq=False)
class Audit:
    """FIG and BIG of every picture by every look, and what the answers do otherwise."""

    cases: Cases
    logits: Tensor  # [N, C]
    looks: dict[str, Look]
    gains: dict[str, Gains]
    overlap: Tensor | None = None  # [N], IoU of discovered with true masks
    flips: Tensor | None = None  # [N] bool: another background, another answer
    groups: GroupAccuracy | None = None
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def trusted(self) -> str:
        """The look to believe: an exact swap if there is one, else the one that finds most."""
        return "exact swap" if "exact swap" in self.gains else max(self.gains, key=lambda name: self.gains[name].bir_ratio_of_means)

    @property
    def accuracy(self) -> float | None:
        return None if self.cases.labels is None else float((self.logits.argmax(dim=1) == self.cases.labels.to(self.logits.device)).double().mean())

    def worst(self, count: int) -> list[int]:
        """Places of the pictures whose answers hang most on the background, by the trusted look."""
        gains = self.gains[self.trusted]
        order = (gains.bir + 1e-3 * gains.big).argsort(descending=True, stable=True)
        return order[:count].tolist()

    def verdict(self) -> list[str]:
        """In plain words, the conclusion first."""
        ratio = self.gains[self.trusted].bir_ratio_of_means
        sure = float(self.flips.double().mean()) if self.flips is not None else ratio
        share = max(ratio, sure) if ratio == ratio else sure
        said = [
            "Nothing to repair: these answers hardly depend on the background."
            if not share >= SOME
            else f"The model answers {'mostly' if share >= MUCH else 'partly'} from the background."
        ]
        if self.flips is not None:
            said.append(f"Another background behind the same object changes {int(self.flips.sum())} of {len(self.flips)} answers.")
        said.append(f"BIR is {ratio:.2f} ({self.trusted}): of what the answers lose without object or background, that share is the background's.")
        low = min(self.gains, key=lambda name: self.gains[name].bir_ratio_of_means)
        least = self.gains[low].bir_ratio_of_means
        if share >= SOME and least < SOME:
            said.append(f"Do not be fooled by BIR {least:.3f} with {low}: {_why(self.looks[low])}")
        if self.trusted != "exact swap":
            said.append("Erased pictures look odd, which alone moves answers: check a large BIR with counterfactual pictures if you can make some.")
        if self.overlap is not None and float(self.overlap.nanmean()) < 0.5:
            said.append(
                f"Discovered masks hardly meet the object (IoU {float(self.overlap.nanmean()):.2f}): what they call foreground is the model's evidence."
            )
        if self.groups is not None and len(self.groups.groups) > 1:
            size = int(self.groups.total[self.groups.groups.index(self.groups.worst_group)])
            worst = f"{self.groups.worst:.2f} in the worst of {len(self.groups.groups)} groups ({size} picture{'s' * (size != 1)})"
            said.append(f"Accuracy {self.groups.average:.2f} on average, {worst}.")
        return said


def audit(
    model: ImageModel,
    cases: Cases,
    *,
    masks: MaskSource = "both",
    fills: Sequence[Fill] = ("mean", "grey"),
    steps: int = 250,
    temperature: float = 1.0,
    cache: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Measure every look there is: discovered and true masks, each with every fill, and exact swaps. `progress` is told of masks as they are found.

    `both` takes true masks where the data has them; `oracle` insists on them.
    """
    if masks not in get_args(MaskSource):
        raise BadOption("masks", masks, f"one of {', '.join(get_args(MaskSource))}")
    truth = cases.oracle
    if masks == "oracle" and truth is None:
        raise BadOption("masks", "oracle", f"a dataset with a mask for every picture; {cases.name} has none, so give masks='discovered'")
    found = discover_masks(model, cases.images, steps=steps, temperature=temperature, cache=cache, progress=progress) if masks != "oracle" else None
    sources: list[Masks] = [source for source in (found, truth if masks != "discovered" else None) if source is not None]
    looks = [*(Look(source, fill) for source in sources for fill in fills), *([Look(None, cases.swapped)] if cases.swapped is not None else [])]
    gains = {look.name: information_gains(model, cases.images, look.masks, baseline=look.baseline, temperature=temperature) for look in looks}
    logits = logits_of(model, cases.images)
    flips = None if cases.swapped is None else (logits_of(model, cases.swapped.background).argmax(dim=1) != logits.argmax(dim=1)).cpu()
    groups = None
    if cases.grouped and cases.labels is not None:
        groups = group_accuracy(logits.argmax(dim=1) == cases.labels, cases.groups)
    overlap = iou(found, cases.truth) if found is not None and cases.truth is not None else None
    said = {
        "method": "audit",
        "options": {"masks": masks, "fills": ", ".join(fills), "steps": steps, "temperature": temperature},
        **protocol(model, cases.images),
    }
    return Audit(cases, logits.cpu(), {look.name: look for look in looks}, gains, None if overlap is None else overlap.cpu(), flips, groups, said)


def _why(look: Look) -> str:
    if look.masks is not None and look.masks.source == "discovered":
        return "those masks keep what the model answers from, also where that is the background."
    return "that fill can give the background away." if look.baseline == "mean" else "that fill hides little."


@torch.no_grad()
def top_answers(logits: Tensor, names: Sequence[str], count: int = 2) -> list[list[tuple[str, float]]]:
    """The `count` likeliest classes of each row of logits [N, C], with their probabilities."""
    values, places = logits.float().softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
    return [
        [(names[c] if c < len(names) else f"class {c}", p) for p, c in zip(row_p, row_c, strict=True)]
        for row_p, row_c in zip(values.tolist(), places.tolist(), strict=True)
    ]
