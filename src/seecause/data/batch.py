"""Samples in a model's own frame: images and masks of its size, labels among its classes; and a
model's predictions for a dataset."""

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
from seecause.types import wide

log = logging.getLogger(__name__)
IMAGENETS = ("imagenet", "imagenet-s", "imagenet-hard")  # datasets of the 1,000 classes
_READ = 64  # samples held at once
_RIGHT = "check that model and data have the same classes, or give more images"

Group = tuple[int, int]


class Batch(NamedTuple):
    """Samples as a model takes them, on its device. `labels` and `masks` are None where no sample
    has one."""

    images: Tensor  # [B, 3, h, w], normalised
    labels: Tensor | None  # [B] int64
    masks: Tensor | None  # [B, h, w] int32: 1 object, 0 background, IGNORE neither


def to_batch(model: Framed, samples: Iterable[Sample] | Dataset) -> Batch:
    """Bring samples into a model's frame.

    Images and masks are resized and cropped alike, as the model needs them; an image that has the
    model's size keeps every pixel. A sample without a mask among others that have one is all
    IGNORE, so that metrics skip it.

    Args:
        model: The model whose size, normalisation, device and dtype are used.
        samples: Samples, or a dataset.

    Returns:
        Images [B, 3, h, w], labels [B] or None, and masks [B, h, w] or None.

    Example:
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
    raw = torch.stack([raw_in_frame(frame, sample.image) for sample in samples])
    images = frame.normalise(raw).to(model.device, model.dtype)
    labels = [sample.label for sample in samples if sample.label is not None]
    if labels and len(labels) < len(samples):
        unknown = next(sample.id for sample in samples if sample.label is None)
        expected = "labels for all samples of a batch, or for none"
        raise BadOption("samples", f"{unknown} without a label", expected)
    masks = None
    if any(sample.mask is not None for sample in samples):
        masks = torch.stack([_mask(frame, sample.mask) for sample in samples]).to(model.device)
    return Batch(images, torch.tensor(labels, device=model.device) if labels else None, masks)


def need_pictures(model: Framed) -> None:
    """Raise unless the model takes images, which is what datasets hold."""
    if (kind := model.preprocess.kind) != Preprocess.kind:
        remedy = "a model of images, as datasets hold them; `seecause explain` takes other files"
        raise BadOption("model", f"one that takes a {kind}", remedy)


def sample_in_frame(frame: Preprocess, sample: Sample) -> Sample:
    """The sample with image and mask as a model sees them, raw."""
    image, mask = raw_in_frame(frame, sample.image), sample.mask
    mask = None if mask is None else _mask(frame, mask)
    return replace(sample, image=image, mask=mask, parts=None, points=None, box=None)


def raw_in_frame(frame: Preprocess, image: Tensor) -> Tensor:
    """The part of an image that a model sees, raw: [3, H, W] in [0, 1] -> [3, h, w]. Other sizes
    are resized in 8 bits, which is what photos have."""
    return image if tuple(image.shape[1:]) == frame.size else frame.pixels(to_pil(image))


def _mask(frame: Preprocess, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.full(frame.size, IGNORE, dtype=torch.int32)
    return mask.to(torch.int32) if tuple(mask.shape) == frame.size else frame.mask(mask.cpu())


def class_places(model: ImageModel, data: Dataset) -> tuple[int, ...]:
    """The model's class for each label of `data`, by name.

    By order only where names cannot tell: the model or the data has none, ImageNet's classes (one
    order, many spellings), or as many classes as the model's of which it knows no name. One known
    name among unknown ones is a mistake. Matching by order is logged, and needs as many classes.
    """
    need_pictures(model)
    by_order = in_order(data, model.classes, model.n_classes)
    unknown = [] if by_order else [name for name in data.classes if not _knows(model, name)]
    if by_order or len(unknown) == len(data.classes) == model.n_classes:
        if data.classes and data.classes != tuple(model.classes) and not _is_imagenet(data):
            _warn_of_order(model, data)
        return tuple(model.class_index(place) for place in range(len(data.classes)))
    if unknown:
        wordnet = re.fullmatch(r"n\d{8}", unknown[0]) is not None
        ids = " Folders with ImageNet's ids are read by imagenet:PATH." if wordnet else ""
        raise UnknownName(
            f"{data.name} does not fit {model.name}: class",
            unknown[0],
            model.classes,
            f"Its classes are {', '.join(map(repr, model.classes[:3]))}, ..."
            f" ({model.n_classes} in all).{ids} Name folders as `seecause doctor --list-classes`"
            " does, or give names with --classes FILE.",
        )
    return tuple(model.class_index(name) for name in data.classes)


def take_names(model: ImageModel, data: Dataset) -> None:
    """Give a model without class names those of `data`, matched by order, which is logged."""
    if not model.classes and data.classes and not _is_imagenet(data):
        class_places(model, data)
        model.classes = tuple(data.classes)


def _warn_of_order(model: ImageModel, data: Dataset) -> None:
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
    same = not names or data.classes == tuple(names)
    return same or (_is_imagenet(data) and count == len(data.classes))


def _is_imagenet(data: Dataset) -> bool:
    return data.name.partition(":")[0] in IMAGENETS


def _knows(model: ImageModel, name: str) -> bool:
    try:
        model.class_index(name)
    except (UnknownName, BadOption):
        return False
    return True


@dataclass(frozen=True, eq=False)
class Answers:
    """A model's predictions for every sample, in the order of the dataset, on the CPU."""

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
    """Run a model over a dataset with labels.

    Args:
        model: A classifier.
        data: A dataset; its labels are matched to the model's classes by name.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> sc.data.answers(model, sc.data.open("critters:clean", limit=4)).right.shape
        torch.Size([4])
    """
    places = torch.tensor(class_places(model, data) if data.classes else range(model.n_classes))
    logits, labels = list[Tensor](), list[Tensor]()
    groups, ids = list[Group | None](), list[str]()
    for start in range(0, len(data), _READ):
        samples = [data[place] for place in range(start, min(start + _READ, len(data)))]
        batch = to_batch(model, samples)
        if batch.labels is None:
            raise BadOption("data", data.name, "a dataset with labels")
        logits.append(plain_logits(model, batch.images).cpu())
        labels.append(places[batch.labels.cpu()])
        groups += [sample.group for sample in samples]
        ids += [sample.id for sample in samples]
    return Answers(wide(torch.cat(logits)), torch.cat(labels), tuple(groups), tuple(ids))


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
    """Draw from the right predictions (CIGMA, section 1.1).

    Args:
        right: [N] bool, whether each prediction is right.
        labels: [N].
        share: Of the right predictions; drawn without replacement.
        cap: At most so many.
        stratified: Draw the same share of `cap` from every class, so that a large class does not
            crowd out the others; every class must then have a right prediction.
        seed: Of the draw.
        classes: Names, for messages.

    Returns:
        Their indices in ascending order.
    """
    if not 0 < share <= 1:
        raise BadOption("share", share, "more than 0, at most 1")
    if cap is not None and cap < 1:
        raise BadOption("cap", cap, "at least one photo, or None for no limit")
    if len(right) == 0 or right.shape != labels.shape:
        expected = f"one for each of the {len(right)} predictions, and at least one"
        raise BadOption("labels", list(labels.shape), expected)
    right, labels = right.cpu(), labels.cpu()
    if not right.any():
        odd = f"the model predicts none of the {len(right)} images right"
        raise BadInput("the data", odd, _RIGHT)
    pools = [right.nonzero()[:, 0]]
    if stratified:
        labelled = labels.unique().tolist()
        pools = [(right & (labels == label)).nonzero()[:, 0] for label in labelled]
        lost = [label for label, pool in zip(labelled, pools, strict=True) if len(pool) == 0]
        if lost:
            name = classes[lost[0]] if lost[0] < len(classes) else lost[0]
            odd = f"the model predicts no image of class {name} right ({len(lost)} such classes)"
            raise BadInput("the data", odd, _RIGHT)
    generator = torch.Generator().manual_seed(seed)
    wanted = [max(1, round(share * len(pool))) for pool in pools]
    counts = wanted if cap is None else _share_out(cap, wanted)
    drawn = [
        pool[torch.randperm(len(pool), generator=generator)[:count]]
        for pool, count in zip(pools, counts, strict=True)
    ]
    return torch.cat(drawn).sort().values


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


def group_shares(groups: Sequence[Group | None]) -> dict[Group, float]:
    """How large a part of the samples each group is; samples without a group are not counted."""
    counts = Counter(group for group in groups if group is not None)
    return {group: count / counts.total() for group, count in sorted(counts.items())}
