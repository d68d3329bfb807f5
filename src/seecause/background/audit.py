"""Does a model predict from the background? The background of each image is exchanged, and
predictions that change are counted.

    flips     predictions that change when the object stands on the background of an image with
              another prediction, less those that change on the background of an image with the same
              prediction: the effect of cutting alone
    FIG, BIG  how far predictions move without the object, and without the background (`gains`), by
              the masks with each fill, and by exact counterfactuals where the data has them
    groups    accuracy by group, where groups are known
    worst     transplant-worst, the lowest accuracy over class x donor class

The verdict follows from the 95 % interval of extra flips (bootstrap over correct predictions):

    yes           the whole interval is above `SOME`
    no            the whole interval is below it
    cannot tell   it contains `SOME`, cutting alone changes most predictions, or the masks are the
                  model's own (its maps, or discovered ones): they show what it uses, not the object
    too few       fewer than `ENOUGH` correct predictions

Each measurement can mislead alone: the mean colour of an image reveals its background, discovered
masks keep the model's own evidence, grey images look like no other. Prefer
exact counterfactuals (fill="swap") where the data has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from seecause.background.gains import Erased, Fill, Gains, information_gains
from seecause.background.images import (
    LabelledImages,
    Masks,
    MaskSource,
    Progress,
    images_of,
    model_for,
    no_progress,
)
from seecause.background.masks import object_masks
from seecause.background.transplant import Predictions, Versions, versions_to_test
from seecause.data.dataset import Dataset, as_data
from seecause.errors import BadInput, BadOption
from seecause.metrics.statistics import GroupAccuracy, bootstrap_interval, clopper_pearson
from seecause.models.base import ImageModel, in_eval_mode, protocol
from seecause.options import Count, Fraction, checked
from seecause.results import Result

Verdict = Literal["yes", "no", "cannot tell", "too few"]
SOME = 0.1  # from this share of extra flips on, the verdict is "yes"
MOSTLY = 0.5  # from this share of control flips on, the verdict is "cannot tell"
ENOUGH = 20  # minimum number of correct predictions for a verdict
OWN = ("own", "discovered")  # masks of the model's own
# an event that n trials do not show has a probability of at most about 3 / n (95 % upper limit)
RULE_OF_THREE = 3.0
PER_IMAGE = 4  # default number of transplants of each kind per image


@dataclass(frozen=True, eq=False, repr=False)
class BackgroundAudit(Result):
    """Predictions on images and on versions of them with other backgrounds."""

    judged: Predictions
    # of correct predictions, by every fill (the first counts), and by exact swaps
    erasures: dict[str, Gains] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        extra, count = float(self.extra_flips.mean()), len(self.data)
        return f"BackgroundAudit({self.verdict}: extra flips {extra:+.0%}, {count} images)"

    @property
    def data(self) -> LabelledImages:
        return self.judged.versions.data

    @property
    def masks(self) -> Masks | None:
        """The object masks; None for pairs."""
        return self.data.masks

    @property
    def gains(self) -> Gains | None:
        """The gains by the masks and the first fill; None for pairs."""
        return None if self.masks is None else next(iter(self.erasures.values()), None)

    @cached_property
    def extra_flips(self) -> Tensor:
        """[m]: for each compared image, the share of predictions that change on backgrounds of
        images predicted otherwise, less that on backgrounds of images predicted the same."""
        moved, control = self.judged.compared
        return (moved - control)[~control.isnan()]

    @property
    def flips(self) -> float:
        """The share of predictions that change on backgrounds of images predicted otherwise, over
        the images of `extra_flips`."""
        return self.judged.flips

    @property
    def control_flips(self) -> float:
        """The share of predictions that change on backgrounds of images predicted the same, over
        the images of `extra_flips`; NaN where there are none."""
        return self.judged.control_flips

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean of `extra_flips`."""
        return bootstrap_interval(self.extra_flips)

    @property
    def doubt(self) -> str:
        """Why flips and BIR are not conclusive; empty if they are."""
        if len(self.extra_flips) < ENOUGH:
            return f"fewer than {ENOUGH} correct predictions"
        if self.control_flips > MOSTLY:
            return "cutting alone changes most predictions"
        if self.masks is not None and self.masks.kind in OWN:
            return "masks of the model's own show what it uses, not the object"
        return ""

    @property
    def verdict(self) -> Verdict:
        """Does the model predict from the background?"""
        low, high = self.interval
        if len(self.extra_flips) < ENOUGH:
            return "too few"
        if self.doubt or low <= SOME <= high:
            return "cannot tell"
        return "no" if high < SOME else "yes"

    @property
    def accuracy(self) -> float:
        return self.judged.accuracy

    @property
    def transplant_worst(self) -> float:
        return self.judged.transplant_worst

    @property
    def groups(self) -> GroupAccuracy | None:
        return self.judged.groups

    def worst(self, count: int) -> list[tuple[int, int]]:
        """Counted images most of whose versions are predicted otherwise: the index of the image,
        and of such a version."""
        judged, versions = self.judged, self.judged.versions
        shares = judged.flips_by_image().nan_to_num(nan=-1.0)
        shares = torch.where(judged.counted, shares, -1.0)
        order = shares.argsort(descending=True, stable=True)[:count]
        source, moved = versions.source.cpu(), ~versions.control.cpu()
        changed = judged.moved.argmax(dim=1) != judged.plain.argmax(dim=1)[source]
        places = []
        for place in order[shares[order] >= 0].tolist():
            own = (source == place) & moved
            rows = own & changed if bool((own & changed).any()) else own
            places.append((place, int(rows.nonzero()[0])))
        return places

    def numbers(self) -> dict[str, float]:
        """Numbers by name, for tables and files, without those that the data does not allow."""
        low, high = self.interval
        numbers = self.judged.numbers(groups=True)
        numbers |= {"extra flips": float(self.extra_flips.mean()), "low 95%": low, "high 95%": high}
        numbers |= {"compared images": len(self.extra_flips)}
        for name, gains in self.erasures.items():
            by = "" if gains is self.gains else f", {name}"
            fig, big = float(gains.fig.mean()), float(gains.big.mean())
            numbers |= {f"FIG{by}": fig, f"BIG{by}": big, f"BIR{by}": gains.bir_ratio_of_means}
        return {name: value for name, value in numbers.items() if value == value}


@checked
def missed_limits(
    audit: BackgroundAudit,
    *,
    max_flips: Fraction | None = None,
    max_bir: Fraction | None = None,
    min_accuracy: Fraction | None = None,
    min_worst_group: Fraction | None = None,
) -> list[str]:
    """Check an audit against limits; return one reason for each limit that it does not meet.

    A limit is met if the whole 95 % interval meets it: more images may show it. A model with random
    weights meets no limit. `max_flips` and `max_bir` are never met where the audit cannot tell (too
    few correct predictions, masks of the model's own, cutting alone changes most).

    Args:
        audit: A result of `sc.audit`.
        max_flips: Share of correct predictions that another background changes, beyond those that
            cutting alone changes.
        max_bir: Background influence (BIR); needs object masks.
        min_accuracy: Accuracy on plain images.
        min_worst_group: Accuracy in the worst group; needs groups.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=40)
        >>> len(missed_limits(sc.audit(model, data, per_image=1), max_flips=0.1))
        1
    """
    if max_bir is not None and audit.gains is None:
        raise BadOption("max_bir", max_bir, "no limit: BIR needs masks and exclusive classes")
    if min_worst_group is not None and audit.groups is None:
        raise BadOption("min_worst_group", min_worst_group, "no limit: the data has no groups")
    missed = []

    def check(name: str, limit: float, low: float, high: float, doubt: str | None = None) -> None:
        """Check an upper limit (which may have a `doubt`) or a lower limit."""
        least = doubt is None
        reason = "the model has random weights" if audit.protocol.get("random_weights") else doubt
        if reason or not (low >= limit if least else high <= limit):  # NaN meets no limit
            wanted = f"{'at least' if least else 'at most'} {limit:g}"
            why = f"; {reason}" if reason else ""
            missed.append(f"{name} {low:.3f} to {high:.3f} (95 %), {wanted}{why}")

    if max_flips is not None:
        extra, (low, high) = audit.extra_flips, audit.interval
        if len(extra) and bool((extra == extra[0]).all()):  # no spread: no bootstrap
            high = min(1.0, high + RULE_OF_THREE / len(extra))
        check("flips", max_flips, low, high, audit.doubt)
    if max_bir is not None and audit.gains is not None:
        check("BIR", max_bir, *audit.gains.interval, audit.doubt)
    if min_accuracy is not None:
        right = audit.judged.correct
        interval = clopper_pearson(right.sum().reshape(1), torch.tensor([len(right)]))[0]
        check("accuracy", min_accuracy, *interval.tolist())
    if min_worst_group is not None and audit.groups is not None:
        check("worst group", min_worst_group, *audit.groups.intervals().amin(dim=0).tolist())
    return missed


@checked
@in_eval_mode
def audit(
    model: ImageModel,
    data: Dataset | LabelledImages | str,
    *,
    masks: MaskSource = None,
    fills: Sequence[Fill] = ("grey",),
    per_image: Count = PER_IMAGE,
    seed: int = 0,
    progress: Progress = no_progress,
) -> BackgroundAudit:
    """Does the model predict from the background?

    Objects are put on the backgrounds of images that are predicted otherwise, and correct
    predictions that change are counted, less those that change on backgrounds of images predicted
    the same.

    Args:
        model: A classifier.
        data: Labelled images of at least two classes, or the name of a dataset ("folder:PATH").
        masks: A source of `object_masks`: another network ("timm:NAME", or a model), "own" or
            "discovered" masks, masks, or None for the masks or pairs that the data brings.
        fills: FIG, BIG and BIR are measured with each of these fills; the first counts.
        per_image: Transplants of each image and kind.
        seed: Draws the transplants.
        progress: Shows what is done.

    Returns:
        An audit with a `verdict` ("yes", "no", "cannot tell", "too few"), the `interval`
        that decides it, `flips`, `accuracy`, `transplant_worst`, and all of them as `numbers()`.

    Raises:
        BadInput: If the model predicts no image correctly.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=40)
        >>> sc.audit(model, data, per_image=1).verdict
        'yes'
    """
    data = as_data(data)
    model = model_for(model, data)
    labelled = masked_or_paired(model, data, masks, progress)
    part = versions_to_test(model, labelled, per_image, seed=seed)
    with progress("predicting versions", 1) as advance:
        result = audit_part(model, part, fills=fills)
        advance(1)
    if not bool(result.judged.counted.any()):
        raise BadInput(
            labelled.name,
            f"the model predicts none of {len(labelled)} images correctly",
            "check that model and data have the same classes, or give more images",
        )
    return result


def masked_or_paired(
    model: ImageModel,
    data: Dataset | LabelledImages,
    masks: MaskSource,
    progress: Progress,
) -> LabelledImages:
    """Labelled images of two classes or more with object masks in use; pairs, without masks, where
    no source is given and the data has none."""
    labelled = images_of(model, data, progress)
    labels = labelled.need_labels()
    if masks is None and labelled.masks is not None:
        return labelled
    if masks is None and labelled.truth is None and labelled.other_background is not None:
        return labelled
    if len(labels.unique()) < 2:
        raise BadOption(
            "data",
            f"{labelled.name}: one class only",
            "images of at least two classes, whose backgrounds can be exchanged",
        )
    if masks is None and labelled.truth is None:
        raise BadOption(
            "masks",
            None,
            "a source of masks (timm:NAME, builtin:NAME, own), or data with masks (of folder:PATH"
            f" in PATH/masks): {labelled.name} has neither masks nor pairs",
        )
    with progress("finding objects", len(labelled)) as advance:
        return labelled.with_masks(object_masks(model, labelled, masks, progress=advance))


def audit_part(
    model: ImageModel,
    part: Versions,
    judged: Predictions | None = None,
    *,
    fills: Sequence[Fill] = ("grey",),
) -> BackgroundAudit:
    """The audit of images whose versions are drawn already, or even predicted. A verdict needs no
    `fills`, which cost four more predictions of each image."""
    judged = part.predict(model) if judged is None else judged
    data, erasures = part.data, dict[str, Gains]()
    if not model.sigmoid and bool(judged.correct.any()):
        correct = data.take(judged.correct)
        asked = [*fills] if data.masks is not None else []
        for fill in [*asked, *(["swap"] if data.swaps and fills else [])]:
            name = Erased(model, correct, fill).name
            erasures[name] = information_gains(model, correct, fill=fill)
    options = {"versions": int((~part.control).sum())}
    options |= {"masks": "pairs" if data.masks is None else data.masks.source}
    record = {"method": "audit", "options": options, **protocol(model, data.images)}
    return BackgroundAudit(judged, erasures, protocol=record)
