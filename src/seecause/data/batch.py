"""Samples in a model's own frame: pictures and masks of its size, labels among its classes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from seecause.data.dataset import IGNORE, Dataset, Sample
from seecause.data.images import to_pil
from seecause.errors import BadOption, OtherClasses, UnknownClass
from seecause.models.base import ImageModel
from seecause.models.preprocess import Preprocess

log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """On the model's device. `labels` and `masks` are None where no sample has one."""

    images: Tensor  # [B, 3, h, w], normalised
    labels: Tensor | None  # [B] int64
    masks: Tensor | None  # [B, h, w] int32: 1 object, 0 background, IGNORE neither


class Framed(Protocol):
    """What a batch is made for: a model, or anything that tells as much."""

    @property
    def preprocess(self) -> Preprocess: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


def to_batch(model: Framed, samples: Sequence[Sample]) -> Batch:
    """Resize and cut pictures and masks alike, as the model wants them. A picture that has the
    model's size keeps every pixel.

    A sample without a mask among others that have one is all IGNORE, so metrics skip it with a
    reason.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> images, labels, masks = to_batch(model, list(sc.data.open_data("critters:clean", limit=2)))
    >>> images.shape, masks.shape
    (torch.Size([2, 3, 96, 96]), torch.Size([2, 96, 96]))
    """
    frame = model.preprocess
    images = frame.normalise(torch.stack([seen(frame, sample.image) for sample in samples])).to(
        model.device, model.dtype
    )
    masked = any(sample.mask is not None for sample in samples)
    masks = (
        torch.stack([_mask(frame, sample.mask) for sample in samples]).to(model.device)
        if masked
        else None
    )
    return Batch(images, _labels(samples, model.device), masks)


def framed(frame: Preprocess, sample: Sample) -> Sample:
    """The same sample with picture and mask as a model sees them, raw; the originals can go."""
    mask = None if sample.mask is None else _mask(frame, sample.mask)
    return replace(
        sample, image=seen(frame, sample.image), mask=mask, parts=None, points=None, box=None
    )


def seen(frame: Preprocess, image: Tensor) -> Tensor:
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
    count = model.n_classes
    if in_order(data, model.classes, count) or (
        count == len(data.classes) and not any(_knows(model, name) for name in data.classes)
    ):
        if data.classes and data.classes != tuple(model.classes):
            _tell_order(model, data)
        return tuple(model.class_index(place) for place in range(len(data.classes)))
    unknown = next((name for name in data.classes if not _knows(model, name)), None)
    if unknown is not None:
        raise OtherClasses(data.name, model.name, unknown, model.classes)
    return tuple(model.class_index(name) for name in data.classes)


def _tell_order(model: ImageModel, data: Dataset) -> None:
    """Say once that names could not tell, or refuse where the order cannot either."""
    if data.name.startswith("imagenet"):
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
        or (data.name.startswith("imagenet") and count == len(data.classes))
    )


def _knows(model: ImageModel, name: str) -> bool:
    try:
        model.class_index(name)
    except UnknownClass:
        return False
    return True
