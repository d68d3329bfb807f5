"""Does a model answer from the background? Its own pictures with the background exchanged say so.

    flips     answers that change when the object stands on the background of a picture that is
              answered otherwise, less those that change on the background of one that is answered
              the same: what cutting alone does
    FIG, BIG  how far answers move without the object, and without the background (`heads.gains`)
    groups    accuracy by group, where groups are known
    worst     transplant-worst, the lowest accuracy over class x donor class

The verdict heeds its interval (95 %, bootstrap over pictures that are answered right):

    yes           the whole interval of extra flips is above `SOME`
    no            the whole interval is below it
    cannot tell   it holds `SOME`, or cutting alone changes most answers
    perhaps       a yes by the model's own masks, which cannot be trusted alone
    too few       fewer than `ENOUGH` right answers
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from seecause.background.erase import Masks
from seecause.background.gains import Gains, information_gains
from seecause.background.images import Pictures, Progress, model_for, no_progress, pictures_of
from seecause.background.objects import Eye, EyeMasks, eye as open_eye
from seecause.background.transplant import on_pixels
from seecause.background.versions import JudgedAnswers, Material, VersionedPictures
from seecause.data.dataset import Dataset
from seecause.data.registry import as_data
from seecause.errors import BadInput, BadOption
from seecause.metrics.accuracy import GroupAccuracy, clopper_pearson
from seecause.metrics.statistics import bootstrap_interval
from seecause.models.base import ImageModel, protocol
from seecause.models.eval_mode import in_eval_mode

Verdict = Literal["yes", "no", "cannot tell", "perhaps", "too few"]
SOME = 0.1  # extra flips from which the background matters
MOSTLY = 0.5  # flips by cutting alone, from which nothing can be told
ENOUGH = 20  # right answers
RULE_OF_THREE = 3.0  # over n: the 95 % bound on a share of which n draws show none
PER_PICTURE = 4  # transplants of each kind


@dataclass(frozen=True, eq=False, repr=False)
class BackgroundAudit:
    """Answers to pictures and their versions, and what they say."""

    judged: JudgedAnswers
    masks: EyeMasks | None  # None: pairs
    gains: Gains | None = None  # of pictures that are answered right
    protocol: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        low, high = self.interval
        flips = f"extra flips {self.extra_flips.mean():+.0%} ({low:+.0%} to {high:+.0%})"
        of = f"{len(self.pictures)} pictures of {self.pictures.name}"
        return f"BackgroundAudit({self.verdict}: {flips}, {of})"

    @property
    def pictures(self) -> Pictures:
        return self.judged.versioned.pictures

    @cached_property
    def counted(self) -> Tensor:
        """[n] bool: pictures whose flips count, those that are answered right. Of pairs, in either
        version: a mark flips just those answers that are wrong with it."""
        return self.judged.right if self.masks is not None else self.judged.right_somewhere

    @cached_property
    def extra_flips(self) -> Tensor:
        """Of right answers with versions of both kinds: the share that flips on backgrounds of
        pictures answered otherwise, less that on those answered the same. Without a control, the
        share that becomes the donor's class."""
        right, moved = self.counted, self.judged.flips_of()
        control = self.judged.flips_of(control=True)
        if bool(control.isnan().all()):
            return _known(self.judged.pulled()[right])
        return _known((moved - control)[right])

    @property
    def flips(self) -> float:
        """Of right answers, on backgrounds of pictures that are answered otherwise."""
        return float(self.judged.flips_of()[self.counted].nanmean())

    @property
    def control_flips(self) -> float:
        """Of right answers, on backgrounds of pictures that are answered the same; NaN where there
        are none."""
        return float(self.judged.flips_of(control=True)[self.counted].nanmean())

    @cached_property
    def interval(self) -> tuple[float, float]:
        """95 % of the mean of `extra_flips`."""
        return bootstrap_interval(self.extra_flips)

    @property
    def verdict(self) -> Verdict:
        """Does the model answer from the background?"""
        own = self.masks is not None and self.masks.kind == "own"
        control = self.control_flips
        return verdict_of(self.extra_flips, control=control, own=own, interval=self.interval)

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
        """Pictures that are answered right and most of whose versions are not: their place, and
        that of a version that is answered otherwise."""
        shares = self.judged.flips_of().nan_to_num(nan=-1.0)
        shares = torch.where(self.counted, shares, -1.0)
        order = shares.argsort(descending=True, stable=True)[:count]
        order = order[shares[order] >= 0].tolist()
        answers = self.judged.logits.moved.argmax(dim=1)
        source = self.judged.versioned.moved.source_index.cpu()
        plain = self.judged.logits.plain.argmax(dim=1)
        places = []
        for picture in order:
            rows = (source == picture).nonzero()[:, 0]
            changed = rows[answers[rows] != plain[picture]]
            places.append((picture, int((changed if len(changed) else rows)[0])))
        return places

    def numbers(self) -> dict[str, float]:
        """By name, for tables and files."""
        low, high = self.interval
        numbers = self.judged.numbers(groups=True)
        numbers |= {"extra flips": float(self.extra_flips.mean()), "low 95%": low, "high 95%": high}
        numbers |= {"right answers": int(self.counted.sum())}
        if self.gains is not None:
            numbers |= {
                "FIG": float(self.gains.fig.mean()),
                "BIG": float(self.gains.big.mean()),
                "BIR": self.gains.bir_or_zero,
            }
        return {name: value for name, value in numbers.items() if value == value}


def verdict_of(
    extra: Tensor,
    *,
    control: float = 0.0,
    own: bool = False,
    interval: tuple[float, float] | None = None,
) -> Verdict:
    """From extra flips [n] of right answers; `control`: flips by cutting alone."""
    if len(extra) < ENOUGH:
        return "too few"
    low, high = bootstrap_interval(extra) if interval is None else interval
    if control > MOSTLY:
        return "cannot tell"
    if low > SOME:
        return "perhaps" if own else "yes"
    return "no" if high < SOME else "cannot tell"


def missed_limits(
    audit: BackgroundAudit,
    *,
    max_flips: float | None = None,
    max_bir: float | None = None,
    min_accuracy: float | None = None,
    min_worst_group: float | None = None,
) -> list[str]:
    """Check an audit against limits; return one reason for each limit that it does not meet.

    A limit is met if the whole 95 % interval meets it: more images may show it. A model with random
    weights meets no limit. `max_flips` and `max_bir` are never met where the audit cannot tell (too
    few correct predictions, the model's own maps as masks, cutting alone changes most).

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
        >>> len(missed_limits(sc.audit(model, data, per_picture=1), max_flips=0.1))
        1
    """
    doubt = ""
    if len(audit.extra_flips) < ENOUGH:
        doubt = f"fewer than {ENOUGH} correct predictions"
    elif audit.masks is not None and audit.masks.kind == "own":
        doubt = "the model's own maps show what it looks at, not the object"
    elif audit.control_flips > MOSTLY:
        doubt = "cutting alone changes most predictions"
    checks = list[tuple[str, float, tuple[float, float], float, str]]()  # the last: -1 for at most
    if max_flips is not None:
        extra, (low, high) = audit.extra_flips, audit.interval
        if len(extra) and bool(
            (extra == extra[0]).all()
        ):  # an interval without spread is too short
            high = min(1.0, high + RULE_OF_THREE / len(extra))
        checks.append(("flips", max_flips, (low, high), -1, doubt))
    if max_bir is not None:
        if audit.gains is None:
            raise BadOption("max_bir", max_bir, "object masks and a model with exclusive classes")
        checks.append(("BIR", max_bir, audit.gains.interval, -1, doubt))
    if min_accuracy is not None:
        right = audit.judged.right
        total = torch.tensor([len(right)])
        low, high = clopper_pearson(right.sum().reshape(1), total)[0].tolist()
        checks.append(("accuracy", min_accuracy, (low, high), 1, ""))
    if min_worst_group is not None:
        if audit.groups is None:
            raise BadOption("min_worst_group", min_worst_group, "data with groups")
        low, high = audit.groups.intervals().min(dim=0).values.tolist()
        checks.append(("worst group", min_worst_group, (low, high), 1, ""))
    missed = []
    for name, limit, (low, high), sign, reason in checks:
        if audit.protocol.get("random_weights"):
            reason = "the model has random weights"
        if reason or not sign * (low if sign > 0 else high) >= sign * limit:
            wanted = f"{'at least' if sign > 0 else 'at most'} {limit:g}"
            why = f"; {reason}" if reason else ""
            missed.append(f"{name} {low:.3f} to {high:.3f} (95 %), {wanted}{why}")
    return missed


@in_eval_mode
def audit(
    model: ImageModel,
    data: Dataset | Pictures | str,
    *,
    eye: Eye | ImageModel | Tensor | str | None = None,
    per_picture: int = PER_PICTURE,
    seed: int = 0,
    progress: Progress = no_progress,
) -> BackgroundAudit:
    """Does the model answer from the background? Objects are put on the backgrounds of pictures
    that are answered otherwise, and right answers that change are counted, less those that change
    on backgrounds of pictures answered the same.

    `data`: labelled pictures of two classes at least, or their name (`"folder:PATH"`). `eye` finds
    the objects: another network (`"timm:NAME"`, or a model), `"own"` maps, masks, or None for masks
    or pairs that the data brings (`sc.eye`). `per_picture`: transplants of each kind.

    The result has a `verdict` ("yes", "no", "cannot tell", "perhaps", "too few"), the `interval`
    that it heeds, `flips`, `accuracy`, `transplant_worst`, and all of them as `numbers()`.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-biased")
    >>> data = sc.data.open_data("critters:certified:test", limit=40)
    >>> sc.audit(model, data, per_picture=1).verdict
    'yes'
    """
    data = as_data(data)
    model = model_for(model, data)
    material = material_of(model, data, eye, progress)
    result = audit_part(
        model, material.test(model, per_picture, seed=seed), material.masks, progress
    )
    if not bool(result.counted.any()):
        raise BadInput(
            material.pictures.name,
            f"the model predicts none of {len(material.pictures)} images correctly",
            "check that model and data have the same classes, or give more images",
        )
    return result


def material_of(
    model: ImageModel,
    data: Dataset | Pictures,
    eye: Eye | ImageModel | Tensor | str | None,
    progress: Progress,
) -> Material:
    """Labelled pictures of two classes or more, with masks by the eye; pairs where no eye is given
    and the data has no masks."""
    pictures = pictures_of(model, data, progress)
    if pictures.labels is None:
        raise BadOption("data", pictures.name, "labels: of folder:PATH a folder for each class")
    if eye is None and pictures.truth is None and pictures.swapped is not None:
        return Material(pictures, None)
    if len(pictures.labels.unique()) < 2:
        raise BadOption(
            "data",
            f"{pictures.name}: one class only",
            "pictures of two classes at least: backgrounds of one class tell nothing apart",
        )
    if eye is None and pictures.truth is None:
        raise BadOption(
            "eye",
            None,
            "an eye that finds the objects (--eye timm:NAME, builtin:NAME, own), or masks (of"
            f" folder:PATH in PATH/masks): {pictures.name} has neither masks nor pairs",
        )
    look = open_eye(eye, model=model)
    with progress("finding objects", len(pictures)) as advance:
        return Material(pictures, look.masks(pictures, progress=advance))


def audit_part(
    model: ImageModel,
    part: VersionedPictures,
    masks: EyeMasks | None,
    progress: Progress = no_progress,
    judged: JudgedAnswers | None = None,
    *,
    with_gains: bool = True,
) -> BackgroundAudit:
    """The audit of pictures whose versions are drawn already, or even answered. Verdicts need no
    gains, which cost four more answers to each picture."""
    if judged is None:
        with progress("answering versions", 1) as advance:
            judged = JudgedAnswers(part, part.logits(model))
            advance(1)
    gains = _gains(model, part, masks, judged.right) if with_gains else None
    options = {"versions": len(part.moved), "eye": "pairs" if masks is None else masks.source}
    record = {"method": "audit", "options": options, **protocol(model, part.pictures.images)}
    return BackgroundAudit(judged, masks, gains, record)


def _gains(
    model: ImageModel, part: VersionedPictures, masks: EyeMasks | None, right: Tensor
) -> Gains | None:
    """FIG and BIG with the eye's masks and grey; None for pairs, where classes answer
    independently, and where no answer is right."""
    if masks is None or model.sigmoid or not bool(right.any()):
        return None
    images = part.pictures.images
    rows = right.to(images.device).nonzero()[:, 0]
    hard = masks.cut.to(images.device)[rows]
    pixels = on_pixels(hard, (images.shape[-2], images.shape[-1]))
    region = Masks(pixels, protocol={"source": masks.source})
    return information_gains(model, images[rows], region, baseline="grey")


def _known(values: Tensor) -> Tensor:
    return values[~values.isnan()]
