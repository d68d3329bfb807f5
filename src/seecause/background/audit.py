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
    cannot tell   it contains `SOME`, cutting alone changes most predictions, other draws of the
                  backgrounds could change the verdict, or the masks are the model's own (its maps,
                  or discovered ones): they show what it uses, not the object
    too few       fewer than `ENOUGH` correct predictions

Of pairs, flips are predictions that differ between the two versions; there is no control.

Every number has one name: the attribute of `BackgroundAudit` is the name in `numbers()`, files,
pages and sentences, with `_` for the space or hyphen. All are of the same images, except accuracy
(all images) and the gains (correct predictions).

Each measurement can mislead alone: the mean colour of an image reveals its background, discovered
masks keep the model's own evidence, grey images look like no other. Prefer
exact counterfactuals (fill="swap") where the data has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    logits_of,
    model_for,
    no_progress,
)
from seecause.background.masks import object_masks
from seecause.background.transplant import (
    Predictions,
    Versions,
    check_cuts,
    versions_to_test,
)
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
PER_IMAGE = 4  # number of transplants of each kind per image, at first
MOST_DRAWN = 32  # at most, if the draw of backgrounds could change the verdict
SURE = 2.0  # standard errors of the draw that the interval keeps from `SOME`


@dataclass(frozen=True, eq=False, repr=False)
class BackgroundAudit(Result):
    """Predictions on images and on versions of them with other backgrounds."""

    judged: Predictions
    # of correct predictions, by every fill (the first counts), and by exact swaps
    erasures: dict[str, Gains] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        count = len(self.data)
        return (
            f"BackgroundAudit({self.verdict}: extra flips {self.extra_flips:+.0%}, {count} images)"
        )

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

    @property
    def paired(self) -> bool:
        """Whether two versions of each image were compared, not backgrounds."""
        return self.judged.versions.paired

    @cached_property
    def extra_flips_by_image(self) -> Tensor:
        """[m]: for each compared image, the share of predictions that change on backgrounds of
        images predicted otherwise, less that on backgrounds of images predicted the same; of pairs,
        1 where the prediction differs between the versions."""
        moved, control = self.judged.compared
        return moved if self.paired else (moved - control)[~control.isnan()]

    @property
    def extra_flips(self) -> float:
        """The mean of `extra_flips_by_image`."""
        return float(self.extra_flips_by_image.mean())

    @property
    def compared_images(self) -> int:
        """The images of `flips`, `control_flips`, `extra_flips` and its interval."""
        return len(self.extra_flips_by_image)

    @property
    def flips(self) -> float:
        """The share of predictions that change on backgrounds of images predicted otherwise, or in
        the second version of a pair."""
        return self.judged.flips

    @property
    def control_flips(self) -> float:
        """The share of predictions that change on backgrounds of images predicted the same; NaN
        where there are none, and for pairs."""
        return torch.nan if self.paired else self.judged.control_flips

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `extra_flips`. Values that are all equal leave room for an event
        that n images do not show."""
        values = self.extra_flips_by_image.sort().values
        low, high = bootstrap_interval(values)
        room = RULE_OF_THREE / len(values) if len(values) and low == high else 0.0
        return max(-1.0, low - room), min(1.0, high + room)

    @property
    def extra_flips_low(self) -> float:
        """The lower end of `interval`."""
        return self.interval[0]

    @property
    def extra_flips_high(self) -> float:
        """The upper end of `interval`."""
        return self.interval[1]

    @property
    def unsettled(self) -> bool:
        """Whether other draws of the backgrounds could change the verdict."""
        nearest = min(abs(end - SOME) for end in self.interval)
        return nearest < SURE * self.judged.draw_error

    @property
    def doubt(self) -> str:
        """Why flips and BIR are not conclusive; empty if they are."""
        if self.compared_images < ENOUGH:
            return f"{self.compared_images} of at least {ENOUGH} correct predictions"
        if self.control_flips > MOSTLY:
            return "cutting alone changes most predictions"
        if self.masks is not None and self.masks.kind in OWN:
            return "masks of the model's own show what it uses, not the object"
        return ""

    @property
    def verdict(self) -> Verdict:
        """Does the model predict from the background?"""
        low, high = self.interval
        if self.compared_images < ENOUGH:
            return "too few"
        if self.doubt or low <= SOME <= high or self.unsettled:
            return "cannot tell"
        return "no" if high < SOME else "yes"

    @property
    def accuracy(self) -> float:
        return self.judged.accuracy

    @property
    def other_accuracy(self) -> float:
        return self.judged.other_accuracy

    @property
    def transplant_worst(self) -> float:
        return self.judged.transplant_worst

    @property
    def worst_group(self) -> float:
        """The lowest accuracy over groups; NaN without groups."""
        return torch.nan if self.groups is None else self.groups.worst

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
        names = ("accuracy", "flips", "control flips", "extra flips", "extra flips low")
        names += ("extra flips high", "compared images", "other accuracy", "transplant-worst")
        names += ("worst group",)
        numbers = {name: getattr(self, re.sub("[ -]", "_", name)) for name in names}
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

    Returns:
        One sentence for each limit that is not met.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=16)
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
        low, high = audit.interval
        check("extra flips", max_flips, low, high, audit.doubt)
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
    per_image: Count | None = None,
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
        per_image: Transplants of each image and kind. None draws four, and more, up to 32, as long
            as other draws could change the verdict.
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
    judged = settled(model, labelled, per_image, seed=seed, progress=progress)
    result = audit_part(model, judged.versions, judged, fills=fills)
    if not bool(result.judged.counted.any()):
        raise BadInput(
            labelled.name,
            f"the model predicts none of {len(labelled)} images correctly",
            "check that model and data have the same classes, or give more images",
        )
    return result


def settled(
    model: ImageModel,
    data: LabelledImages,
    per_image: int | None,
    *,
    seed: int,
    progress: Progress = no_progress,
) -> Predictions:
    """Predictions of images and their versions; without `per_image`, of as many versions as the
    verdict needs, up to `MOST_DRAWN`."""
    counts = (PER_IMAGE, 3 * PER_IMAGE, MOST_DRAWN) if per_image is None else (per_image,)
    judged: Any = None
    model.memo["shared images"] = {"images": data.images}  # plain predictions are made once
    try:
        for count in counts:
            with progress(f"predicting {count} versions of each image", 1) as advance:
                judged = versions_to_test(model, data, count, seed=seed).predict(model, judged)
                advance(1)
            found = BackgroundAudit(judged)
            if found.doubt or not found.unsettled:
                break
    finally:
        model.memo.pop("shared images")
    return judged


def masked_or_paired(
    model: ImageModel,
    data: Dataset | LabelledImages,
    masks: MaskSource,
    progress: Progress,
) -> LabelledImages:
    """Labelled images of two classes or more with object masks in use; pairs, without masks, where
    no source is given and the data has none."""
    labelled = images_of(model, data, progress)
    others = labelled.other_background if labelled.truth is None else None
    if masks is None and labelled.masks is None and others is not None:
        if labelled.labels is None:  # what the model says of the second versions
            labels = logits_of(model, others).argmax(dim=1)
            labelled = replace(labelled, labels=labels, own_labels=True)
        return labelled
    labels = labelled.need_labels()
    if masks is None and labelled.masks is not None:
        return labelled if labelled.masks.refused is not None else check_cuts(model, labelled)
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
        found = object_masks(model, labelled, masks, progress=advance)
    return check_cuts(model, labelled.with_masks(found))


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
        asked: list[Fill] = [*fills] if data.masks is not None else []
        if data.swaps and fills:
            asked.append("swap")
        for fill in asked:
            name = Erased(model, correct, fill).name
            erasures[name] = information_gains(model, correct, fill=fill)
    options = {"versions": int((~part.control).sum())}
    options |= {"masks": "pairs" if data.masks is None else data.masks.source}
    record = {"method": "audit", "options": options, **protocol(model, data.images)}
    return BackgroundAudit(judged, erasures, protocol=record)
