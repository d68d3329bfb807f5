"""Samples in a model's own frame: pictures and masks of its size, labels among its classes.

What a model answers to a dataset, and the photos it answers right.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from seecause.data.dataset import IGNORE, Dataset, Sample
from seecause.data.images import to_pil
from seecause.engine.chunks import plain_logits
from seecause.errors import BadInput, BadOption, UnknownName
from seecause.models.base import ImageModel
from seecause.models.eval_mode import in_eval_mode
from seecause.models.preprocess import Framed, Preprocess

log = logging.getLogger(__name__)
_RIGHT = "check that model and data have the same classes, or give more images"


class Batch(NamedTuple):
    """Samples as a model takes them, on its device. `labels` and `masks` are None where no sample
    has one."""

    images: Tensor  # [B, 3, h, w], normalised
    labels: Tensor | None  # [B] int64
    masks: Tensor | None  # [B, h, w] int32: 1 object, 0 background, IGNORE neither


def to_batch(model: Framed, samples: Iterable[Sample] | Dataset) -> Batch:
    """Samples of a dataset as one batch: images [B, 3, h, w], labels [B] and masks [B, h, w].

    Pictures and masks are resized and cut alike, as the model wants them; a picture that has the
    model's size keeps every pixel.

    A sample without a mask among others that have one is all IGNORE, so metrics skip it with a
    reason.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> images, labels, masks = to_batch(model, sc.data.open("critters:clean")[:2])
    >>> images.shape, masks.shape
    (torch.Size([2, 3, 96, 96]), torch.Size([2, 96, 96]))
    """
    need_pictures(model)
    samples = list(cast(Iterable[Sample], samples))  # each is read once
    if not samples:
        raise BadOption("samples", None, "at least one")
    frame = model.preprocess
    images = frame.normalise(
        torch.stack([raw_in_frame(frame, sample.image) for sample in samples])
    ).to(model.device, model.dtype)
    masked = any(sample.mask is not None for sample in samples)
    masks = (
        torch.stack([_mask(frame, sample.mask) for sample in samples]).to(model.device)
        if masked
        else None
    )
    return Batch(images, _labels(samples, model.device), masks)


def need_pictures(model: Framed) -> None:
    """Refuse a model of something else than what datasets hold."""
    if (kind := model.preprocess.kind) != Preprocess.kind:
        remedy = "a model of pictures, as datasets hold them; `seecause explain` takes other files"
        raise BadOption("model", f"one that takes a {kind}", remedy)


def sample_in_frame(frame: Preprocess, sample: Sample) -> Sample:
    """The same sample with picture and mask as a model sees them, raw; the originals can go."""
    mask = None if sample.mask is None else _mask(frame, sample.mask)
    return replace(
        sample,
        image=raw_in_frame(frame, sample.image),
        mask=mask,
        parts=None,
        points=None,
        box=None,
    )


def raw_in_frame(frame: Preprocess, image: Tensor) -> Tensor:
    """The part of a picture that a model sees, raw: [3, H, W] in [0, 1] -> [3, h, w]. Other sizes
    pass through 8 bits, which is what photos have."""
    return image if tuple(image.shape[1:]) == frame.size else frame.pixels(to_pil(image))


def _mask(frame: Preprocess, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.full(frame.size, IGNORE, dtype=torch.int32)
    return mask.to(torch.int32) if tuple(mask.shape) == frame.size else frame.mask(mask.cpu())


def _labels(samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    labels = [sample.label for sample in samples if sample.label is not None]
    if labels and len(labels) < len(samples):
        unknown = next(sample.id for sample in samples if sample.label is None)
        raise BadOption(
            "samples",
            f"{unknown} without a label",
            "labels for all samples of a batch, or for none",
        )
    return torch.tensor(labels, device=device) if labels else None


def class_places(model: ImageModel, data: Dataset) -> tuple[int, ...]:
    """The model's class for each label of `data`, by name.

    By position only where names cannot tell: the model or the data has none, ImageNet's classes
    (one order, many spellings), or as many classes as the model's of which not one has a name it
    knows. One known name among unknown ones is a mistake, not another spelling. By position is said
    in a line, and needs as many classes.
    """
    need_pictures(model)
    count = model.n_classes
    if in_order(data, model.classes, count) or (
        count == len(data.classes) and not any(_knows(model, name) for name in data.classes)
    ):
        if data.classes and data.classes != tuple(model.classes):
            _tell_order(model, data)
        return tuple(model.class_index(place) for place in range(len(data.classes)))
    unknown = next((name for name in data.classes if not _knows(model, name)), None)
    if unknown is not None:
        wordnet = re.fullmatch(r"n\d{8}", unknown) is not None
        ids = " Folders with ImageNet's ids are read by imagenet:PATH." if wordnet else ""
        raise UnknownName(
            f"{data.name} does not fit {model.name}: class",
            unknown,
            model.classes,
            f"Its classes are {', '.join(map(repr, model.classes[:3]))}, ... ({count} in all).{ids}"
            " Name folders as `seecause doctor --list-classes` does, or give names with --classes"
            " FILE.",
        )
    return tuple(model.class_index(name) for name in data.classes)


def take_names(model: ImageModel, data: Dataset) -> None:
    """Classes of a model that carries no names are called as those of `data`, which they meet by
    order; that is said. Pages and checkpoints then speak of cats, not of class 0."""
    if not model.classes and data.classes and not _is_imagenet(data):
        class_places(model, data)
        model.classes = tuple(data.classes)


def _tell_order(model: ImageModel, data: Dataset) -> None:
    """Say once that names could not tell, or refuse where the order cannot either."""
    if _is_imagenet(data):
        return
    if len(data.classes) != model.n_classes:
        raise BadOption(
            "data",
            f"{data.name}, {len(data.classes)} classes",
            f"{model.n_classes}, as {model.name} has, which carries no class names to match them"
            " by; name its classes: classes=[...] (--classes FILE)",
        )
    key = ("matched by order", data.name)
    if key not in model.memo:
        model.memo[key] = True
        log.warning(
            "%s: its classes are matched to those of %s by order (%s is class 0, and so on), for"
            " want of common names; name them by classes=[...] (--classes FILE) if that is wrong",
            *(data.name, model.name, data.classes[0]),
        )


def in_order(data: Dataset, names: Sequence[str], count: int) -> bool:
    """Whether label c means the c-th of `count` classes: by the same names, without any, or as
    ImageNet's classes, which have one order and many spellings."""
    return (
        not names
        or data.classes == tuple(names)
        or (_is_imagenet(data) and count == len(data.classes))
    )


def _is_imagenet(data: Dataset) -> bool:
    """Whether labels are the 1,000 classes of ImageNet; ImageNet-9 has nine of its own."""
    return data.name.partition(":")[0] in ("imagenet", "imagenet-s", "imagenet-hard")


def _knows(model: ImageModel, name: str) -> bool:
    try:
        model.class_index(name)
    except (UnknownName, BadOption):
        return False
    return True


log = logging.getLogger(__name__)

_READ = 64  # photos held at once

Group = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Answers:
    """What a model answers to every sample, in the order of the dataset, on the CPU."""

    logits: Tensor  # [N, C] float32, or float64 of such a model
    labels: Tensor  # [N] int64, among the classes of the model
    groups: tuple[Group | None, ...]
    ids: tuple[str, ...]

    @property
    def right(self) -> Tensor:
        """[N] bool."""
        return self.logits.argmax(dim=1) == self.labels


@in_eval_mode
@torch.no_grad()
def answers(model: ImageModel, data: Dataset) -> Answers:
    """Run the model over a dataset with labels, which are matched to its classes by name
    (`class_places`)."""
    places = torch.tensor(class_places(model, data) if data.classes else range(model.n_classes))
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    groups: list[Group | None] = []
    ids: list[str] = []
    for start in range(0, len(data), _READ):
        samples = [data[place] for place in range(start, min(start + _READ, len(data)))]
        batch = to_batch(model, samples)
        if batch.labels is None:
            raise BadOption("data", data.name, "a dataset with labels")
        logits.append(plain_logits(model, batch.images).cpu())
        labels.append(places[batch.labels.cpu()])
        groups += [sample.group for sample in samples]
        ids += [sample.id for sample in samples]
    return Answers(_wide(torch.cat(logits)), torch.cat(labels), tuple(groups), tuple(ids))


def true_positives(
    right: Tensor,
    labels: Tensor,
    *,
    share: float = 0.4,
    cap: int | None = 512,
    stratified: bool = False,
    seed: int = 0,
    classes: Sequence[str] = (),
) -> Tensor:
    """Places of `share` of the right answers, at most `cap`, drawn without replacement and in
    ascending order (CIGMA, section 1.1).

    `right` [N] bool, `labels` [N]. `stratified` draws from every class the same share of `cap` (and
    `share` of its right answers at most), so that a large class does not crowd out the others;
    every class with a sample must then have a right answer.
    """
    if not 0 < share <= 1:
        raise BadOption("share", share, "more than 0, at most 1")
    if cap is not None and cap < 1:
        raise BadOption("cap", cap, "at least one photo, or None for no limit")
    if len(right) == 0 or right.shape != labels.shape:
        raise BadOption(
            "labels",
            list(labels.shape),
            f"one for each of the {len(right)} answers, and at least one",
        )
    right, labels = right.cpu(), labels.cpu()
    if not right.any():
        raise BadInput(
            "the data", f"the model predicts none of the {len(right)} images right", _RIGHT
        )
    pools = [right.nonzero()[:, 0]]
    if stratified:
        names = labels.unique().tolist()
        pools = [(right & (labels == name)).nonzero()[:, 0] for name in names]
        lost = [name for name, pool in zip(names, pools, strict=True) if len(pool) == 0]
        if lost:
            name = classes[lost[0]] if lost[0] < len(classes) else lost[0]
            reason = f"the model predicts no image of class {name} right ({len(lost)} such classes)"
            raise BadInput("the data", reason, _RIGHT)
    generator = torch.Generator().manual_seed(seed)
    wanted = [max(1, round(share * len(pool))) for pool in pools]
    counts = wanted if cap is None else _share_out(cap, wanted)
    return (
        torch.cat(
            [
                pool[torch.randperm(len(pool), generator=generator)[:count]]
                for pool, count in zip(pools, counts, strict=True)
            ]
        )
        .sort()
        .values
    )


def select_true_positives(
    model: ImageModel,
    data: Dataset,
    *,
    share: float = 0.4,
    cap: int | None = 512,
    stratified: bool = False,
    seed: int = 0,
) -> Tensor:
    """Places in `data` of photos that the model answers right: a `share` of them, at most `cap`.

    `stratified` takes as many from every class. Shares of groups are logged, never used.
    """
    answered = answers(model, data)
    chosen = true_positives(
        answered.right,
        answered.labels,
        share=share,
        cap=cap,
        stratified=stratified,
        seed=seed,
        classes=data.classes,
    )
    shares = group_shares([answered.groups[place] for place in chosen.tolist()])
    log.info(
        "%d of %d right answers among %d photos; groups: %s",
        len(chosen),
        int(answered.right.sum()),
        len(answered.labels),
        shares or "not known",
    )
    return chosen


def group_shares(groups: Sequence[Group | None]) -> dict[Group, float]:
    """How large a part of the samples each group is; samples without a group are left out."""
    counts = Counter(group for group in groups if group is not None)
    return {group: count / counts.total() for group, count in sorted(counts.items())}


def _share_out(cap: int, wanted: Sequence[int]) -> list[int]:
    """At most `cap` in all, as even as what is wanted allows; the first ones get what cannot be
    divided."""
    if cap < len(wanted):
        raise BadOption("cap", cap, f"at least one photo for each of the {len(wanted)} classes")
    counts = [0] * len(wanted)
    left = min(cap, sum(wanted))
    while left:
        for place, most in enumerate(wanted):
            if left and counts[place] < most:
                counts[place] += 1
                left -= 1
    return counts


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
