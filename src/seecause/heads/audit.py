"""Does a model answer from the background? Several measurements side by side, because each one
alone can be fooled.

discovered masks   keep the model's own evidence: if that is the background, BIG is small (see
`masks`)
mean fill          most of a picture's mean colour is its background's, so it can give the
background away (see `erase`)
grey fill          tells nothing of the picture, but no picture looks like it
exact swap         the same object elsewhere: where it can be had, believe it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause.attribution.attribute import protocol
from seecause.errors import BadOption
from seecause.heads.erase import Erasure, Fill, Masks
from seecause.heads.gains import FEW, Gains, information_gains
from seecause.heads.masks import discover_masks, iou
from seecause.heads.pictures import Pictures, logits_of
from seecause.metrics.groups import GroupAccuracy, group_accuracy
from seecause.models.base import ImageModel

MaskSource = Literal["discovered", "oracle", "both"]
Counted = Literal["right", "all"]
SOME, MUCH = (
    0.1,
    0.5,
)  # BIR, or share of flipped answers, from which the background matters some, and mostly


@dataclass(frozen=True, eq=False)
class Audit:
    """FIG and BIG of every picture by every look, and what the answers do otherwise."""

    cases: Pictures
    logits: Tensor  # [N, C]
    looks: dict[str, Erasure]
    gains: dict[str, Gains]
    overlap: Tensor | None = None  # [N], IoU of discovered with true masks
    flips: Tensor | None = None  # [N] bool: another background, another answer
    groups: GroupAccuracy | None = None
    counted: Tensor | None = (
        None  # [N] bool: the pictures that gains are averaged over; None for all
    )
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def means(self) -> dict[str, Gains]:
        """Gains of the pictures that count: by default those that are answered right, since a wrong
        answer has no object to hang on."""
        return (
            self.gains
            if self.counted is None
            else {name: gains.take(self.counted) for name, gains in self.gains.items()}
        )

    @property
    def trusted(self) -> str:
        """The look to believe: an exact swap if there is one, else, of those with true masks if
        there are any, the one that finds most."""
        found = self.means
        true = [name for name in found if not self._is_discovered(name)]
        return (
            "exact swap"
            if "exact swap" in found
            else max(true or found, key=lambda name: _ratio(found[name]))
        )

    def _is_discovered(self, name: str) -> bool:
        masks = self.looks[name].masks
        return masks is not None and masks.source == "discovered"

    @property
    def accuracy(self) -> float | None:
        return (
            None
            if self.cases.labels is None
            else float(
                (self.logits.argmax(dim=1) == self.cases.labels.to(self.logits.device))
                .double()
                .mean()
            )
        )

    def worst(self, count: int) -> list[int]:
        """Places of the pictures whose answers hang most on the background, by the trusted look."""
        gains = self.gains[self.trusted]
        order = (gains.bir + 1e-3 * gains.big).argsort(descending=True, stable=True)
        return order[:count].tolist()

    def verdict(self) -> list[str]:
        """In plain words, the conclusion first."""
        means, trusted = self.means, self.trusted
        ratio = _ratio(means[trusted])
        share = ratio if self.flips is None else max(ratio, float(self.flips.double().mean()))
        said = [
            (
                "Nothing to repair: these answers hardly depend on the background."
                if share < SOME
                else (
                    f"The model answers {'mostly' if share >= MUCH else 'partly'} from the"
                    " background."
                )
            )
        ]
        if self.flips is not None:
            said.append(
                f"Another background behind the same object changes {int(self.flips.sum())} of"
                f" {len(self.flips)} answers."
            )
        count = len(means[trusted].big)
        over = f"{count} {'' if self.counted is None else 'right '}answer{'s' * (count != 1)}"
        told = (
            f"95 % interval {means[trusted].interval_text(2)}, {trusted}, {over}"
            if count >= FEW
            else f"{trusted}, {over}, too few for an interval"
        )
        said.append(
            f"BIR is {_shown(ratio, 2)} ({told}): of what the answers lose without object or"
            " background, that share is the background's."
        )
        least = min(means, key=lambda name: _ratio(means[name]))
        if share >= SOME and least != trusted and _ratio(means[least]) < share / 2:
            said.append(
                f"Do not be fooled by BIR {_shown(_ratio(means[least]), 3)} with {least}:"
                f" {_why(self.looks[least])}"
            )
        most = max(means, key=lambda name: _ratio(means[name]))
        if (
            self._is_discovered(most)
            and not self._is_discovered(trusted)
            and _ratio(means[most]) > max(SOME, 2 * ratio)
        ):
            why = (
                "those masks keep a fixed share of a picture, so what they erase can be the object."
            )
            said.append(f"BIR {_ratio(means[most]):.2f} with {most} is no proof: {why}")
        if trusted != "exact swap":
            said.append(
                "Erased pictures look odd, which alone moves answers: check a large BIR with"
                " counterfactual pictures if you can make some."
            )
        if self.overlap is not None and float(self.overlap.nanmean()) < 0.5:
            said.append(
                "Discovered masks hardly meet the object (IoU"
                f" {float(self.overlap.nanmean()):.2f}): what they call foreground is the model's"
                " evidence."
            )
        if self.groups is not None and len(self.groups.groups) > 1:
            size = int(self.groups.total[self.groups.groups.index(self.groups.worst_group)])
            of, pictures = (
                f"the worst of {len(self.groups.groups)} groups",
                f"{size} picture{'s' * (size != 1)}",
            )
            worst = (
                f"{self.groups.worst:.2f} in {of} ({pictures})"
                if size >= FEW
                else f"{of} has only {pictures}, too few to tell its accuracy"
            )
            said.append(f"Accuracy {self.groups.average:.2f} on average; {worst}.")
        return said


def audit(
    model: ImageModel,
    cases: Pictures,
    *,
    masks: MaskSource = "both",
    fills: Sequence[Fill] = ("mean", "grey"),
    steps: int = 250,
    mask_options: Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    count: Counted = "right",
    cache: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Measure every look there is: discovered and true masks, each with every fill, and exact
    swaps. `progress` is told of masks as they are found.

    `both` takes true masks where the data has them; `oracle` insists on them. Means are those of
    right answers (CIGMA, section 1.1), or of all with `count="all"`; without labels, or without a
    right answer, all count. Flips and groups are always of all pictures. `mask_options` are more
    options of `discover_masks`.
    """
    if masks not in get_args(MaskSource):
        raise BadOption("masks", masks, f"one of {', '.join(get_args(MaskSource))}")
    if count not in get_args(Counted):
        raise BadOption("count", count, f"one of {', '.join(get_args(Counted))}")
    truth = cases.oracle
    if masks == "oracle" and truth is None:
        raise BadOption(
            "masks",
            "oracle",
            f"a dataset with a mask for every picture; {cases.name} has none, so give"
            " masks='discovered'",
        )
    search = {"steps": steps, "temperature": temperature, **(mask_options or {})}
    found = (
        discover_masks(model, cases.images, cache=cache, progress=progress, **search)
        if masks != "oracle"
        else None
    )
    sources: list[Masks] = [
        source for source in (found, truth if masks != "discovered" else None) if source is not None
    ]
    looks = [
        *(Erasure(source, fill) for source in sources for fill in fills),
        *([Erasure(None, cases.swapped)] if cases.swapped is not None else []),
    ]
    gains = {
        look.name: information_gains(
            model, cases.images, look.masks, baseline=look.baseline, temperature=temperature
        )
        for look in looks
    }
    logits = logits_of(model, cases.images)
    flips = (
        None
        if cases.swapped is None
        else (
            logits_of(model, cases.swapped.background).argmax(dim=1) != logits.argmax(dim=1)
        ).cpu()
    )
    right = None if cases.labels is None else (logits.argmax(dim=1) == cases.labels).cpu()
    groups = group_accuracy(right, cases.groups) if cases.grouped and right is not None else None
    counted = right if count == "right" and right is not None and bool(right.any()) else None
    overlap = iou(found, cases.truth) if found is not None and cases.truth is not None else None
    searched = {} if found is None else {"steps": steps, **_asked(mask_options)}
    said = {
        "method": "audit",
        "options": {
            "masks": masks,
            "fills": ", ".join(fills),
            **searched,
            "temperature": temperature,
            "count": count,
        },
        **protocol(model, cases.images),
    }
    return Audit(
        cases=cases,
        logits=logits.cpu(),
        looks={look.name: look for look in looks},
        gains=gains,
        overlap=None if overlap is None else overlap.cpu(),
        flips=flips,
        groups=groups,
        counted=counted,
        protocol=said,
    )


def _asked(options: Mapping[str, Any] | None) -> dict[str, str]:
    return (
        {"mask options": ", ".join(f"{name}={value}" for name, value in options.items())}
        if options
        else {}
    )


def _ratio(gains: Gains) -> float:
    """BIR, 0 where nothing matters anywhere."""
    found = gains.bir_ratio_of_means
    return found if found == found else 0.0


def _shown(ratio: float, digits: int) -> str:
    """Without a zero that only rounding made."""
    return (
        f"{ratio:.{digits}f}"
        if ratio == 0 or round(ratio, digits) > 0
        else f"below {10**-digits:.{digits}f}"
    )


def _why(look: Erasure) -> str:
    if look.masks is not None and look.masks.source == "discovered":
        return "those masks keep what the model answers from, also where that is the background."
    return (
        "that fill can give the background away."
        if look.baseline == "mean"
        else "that fill hides little."
    )


@torch.no_grad()
def top_answers(
    logits: Tensor, names: Sequence[str], count: int = 2
) -> list[list[tuple[str, float]]]:
    """The `count` likeliest classes of each row of logits [N, C], with their probabilities."""
    values, places = logits.float().softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
    return [
        [
            (names[c] if c < len(names) else f"class {c}", p)
            for p, c in zip(row_p, row_c, strict=True)
        ]
        for row_p, row_c in zip(values.tolist(), places.tolist(), strict=True)
    ]
