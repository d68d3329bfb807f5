"""Samples in a model's own frame: images and masks of its size, labels among its classes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from seecause.data.dataset import (
    IGNORE,
    Dataset,
    Names,
    Sample,
    SkippedImage,
    read_ahead,
    readers,
    sample_digests,
    sample_ids,
    to_pil,
)
from seecause.errors import BadImage, BadInput, BadOption, DataMissing, UnknownName
from seecause.files import digest
from seecause.models.base import ImageModel
from seecause.models.preprocess import Framed, Preprocess, as_image
from seecause.options import Count, Share, checked

log = logging.getLogger(__name__)
IMAGENETS = ("imagenet", "imagenet-s", "imagenet-hard")  # datasets of the 1,000 classes
_NO_CORRECT = "check that model and data have the same classes, or give more images"


class Batch(NamedTuple):
    """Samples as a model takes them, on its device. `labels` and `masks` are None if no sample has
    one."""

    images: Tensor  # [B, 3, h, w], normalised
    labels: Tensor | None  # [B] int64
    masks: Tensor | None  # [B, h, w] int32: 1 object, 0 background, IGNORE neither


def to_batch(model: Framed, samples: Iterable[Sample] | Dataset) -> Batch:
    """Bring samples into a model's frame.

    Images and masks are resized and cropped alike, as the model needs them; an image that has the
    model's size keeps every pixel. A sample without a mask among others that have one gets a mask
    of IGNORE, so that metrics skip it.

    Args:
        model: The model whose size, normalisation, device and dtype are used.
        samples: Samples, or a dataset.

    Returns:
        Images [B, 3, h, w], labels [B] or None, and masks [B, h, w] or None.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> data = sc.data.open_data("critters:clean", limit=2)
        >>> images, labels, masks = sc.data.to_batch(model, data)
        >>> images.shape, masks.shape
        (torch.Size([2, 3, 96, 96]), torch.Size([2, 96, 96]))
    """
    need_images(model)
    every = cast(Iterable[Sample], samples)  # reads each sample once
    return framed_batch(model, [sample_in_frame(model.preprocess, sample) for sample in every])


def framed_batch(model: Framed, samples: Sequence[Sample]) -> Batch:
    """`to_batch` of samples that are in the model's frame, raw."""
    if not samples:
        raise BadOption("samples", None, "at least one sample")
    frame = model.preprocess
    raw = torch.stack(_alike([sample.image for sample in samples])).to(model.device)
    if raw.dtype == torch.uint8:  # by a tensor: a GPU rounds division by a number otherwise
        raw = raw.float() / torch.tensor(255.0, device=raw.device)
    images = frame.normalise(raw).to(model.dtype)
    labels = [sample.label for sample in samples if sample.label is not None]
    if 0 < len(labels) < len(samples):
        expected = "labels for all samples of a batch, or for none"
        unknown = next(sample.id for sample in samples if sample.label is None)
        raise BadOption("samples", f"{unknown} without a label", expected)
    masks = None
    if any(sample.mask is not None for sample in samples):
        masks = torch.stack([_mask(frame, sample.mask) for sample in samples]).to(model.device)
    return Batch(images, torch.tensor(labels, device=model.device) if labels else None, masks)


def need_images(model: Framed) -> None:
    """Raise unless the model takes images, which is what datasets hold."""
    if (kind := model.preprocess.kind) != Preprocess.kind:
        remedy = "a model of images, as datasets hold them; `seecause explain` takes other files"
        raise BadOption("model", f"one that takes a {kind}", remedy)


def sample_in_frame(frame: Preprocess, sample: Sample) -> Sample:
    """The sample with image and mask as a model sees them, raw."""
    mask, image = None if sample.mask is None else _mask(frame, sample.mask), sample.image
    if not sample.normalised:
        image = raw_in_frame(frame, image)
    elif tuple(image.shape[1:]) == frame.size:
        image = frame.raw(image[None])[0]
    else:
        what = f"a normalised tensor {list(image.shape)}, not of the model's size"
        raise BadImage(sample.id, what, "transform to that size, or give PIL images")
    frame_only = {"parts": None, "points": None, "box": None, "normalised": False}
    return replace(sample, image=image, mask=mask, **frame_only)


class TorchData:
    """A dataset of torch, or that of a loader, as a dataset of samples: (image, label) or (image,
    label, mask).

    Images are PIL images, whole numbers 0-255, or floating-point tensors [3, H, W]: raw in [0, 1],
    or normalised if any of the first `PROBED` images leaves that range. Classes are named by the
    attribute `classes`, or by their numbers.
    """

    PROBED: ClassVar[int] = 16

    def __init__(self, data: Any):
        self.data: Any = data.dataset if isinstance(data, DataLoader) else data
        if not hasattr(self.data, "__getitem__"):
            expected = 'the name of a dataset ("folder:PATH"), or a torch Dataset or DataLoader'
            raise BadOption("data", type(data).__name__, f"{expected} of (image, label)")
        self.name = type(self.data).__name__

    def __len__(self) -> int:
        return len(self.data)

    @cached_property
    def normalised(self) -> bool:
        """Whether tensors are normalised already."""
        images = [self.data[index][0] for index in range(min(len(self), self.PROBED))]
        return any(_is_float(x) and bool((x < 0).any() or (x > 1).any()) for x in images)

    def __getitem__(self, index: int, /) -> Sample:
        image, label, *masks = self.data[index]
        normalised = _is_float(image) and self.normalised
        if not _is_float(image):
            from torchvision.transforms.functional import to_tensor

            image = to_tensor(as_image(image, f"{self.name}, image {index}"))
        mask = torch.as_tensor(masks[0]) if masks else None
        return Sample(image, int(label), mask=mask, id=str(index), normalised=normalised)

    @cached_property
    def labels(self) -> tuple[int, ...]:
        known = getattr(self.data, "targets", None)
        if known is None:
            known = (self.data[index][1] for index in range(len(self)))
        return tuple(map(int, known))

    @cached_property
    def classes(self) -> Names:
        below = self.data
        while not hasattr(below, "classes") and hasattr(below, "dataset"):
            below = below.dataset  # a torch Subset
        numbers = () if hasattr(below, "classes") else range(max(self.labels) + 1)
        return tuple(map(str, getattr(below, "classes", numbers)))

    @cached_property
    def fingerprint(self) -> str:
        return digest(*sample_digests(self))


def _is_float(image: Any) -> bool:
    return isinstance(image, Tensor) and image.is_floating_point()


@dataclass(frozen=True, eq=False)
class _InFrame:
    """Reads samples of a dataset in a model's frame, each with its second version if asked for."""

    frame: Preprocess
    data: Any
    places: Sequence[int]
    pairs: bool

    def __call__(self, number: int) -> list[Sample] | SkippedImage:
        place = self.places[number]
        try:
            versions = [self.data[place], *([self.data.other(place)] if self.pairs else [])]
            return [_packed(sample_in_frame(self.frame, sample)) for sample in versions]
        except (BadImage, DataMissing) as bad:
            return SkippedImage(sample_ids(self.data)[place], str(bad))


def read_samples(
    frame: Preprocess, data: Dataset, places: Sequence[int], *, pairs: bool = False
) -> Iterator[list[Sample] | SkippedImage]:
    """Samples in a model's frame, raw, in order; with `pairs` each and its second version. Images
    of 8 bits are given as such, for `framed_batch`. An image that cannot be read is a
    `SkippedImage`. `reading_with` says how many processes read."""
    count = len(places)
    return read_ahead(_InFrame(frame, data, places, pairs), count, readers(data, count))


def _packed(sample: Sample) -> Sample:
    """The sample with an image of 8 bits as such, which is a quarter of the bytes."""
    image = sample.image.mul(255).round_().byte()
    same = bool((image.float() / 255 == sample.image).all())
    return replace(sample, image=image) if same else sample


def _alike(images: list[Tensor]) -> list[Tensor]:
    """Raw images, in 8 bits only if all of them are."""
    if len({image.dtype for image in images}) == 1:
        return images
    return [image.float() / 255 if image.dtype == torch.uint8 else image for image in images]


def raw_in_frame(frame: Preprocess, image: Tensor) -> Tensor:
    """The part of an image that a model sees, raw: [3, H, W] in [0, 1] -> [3, h, w]. Images of
    other sizes are resized with 8 bits."""
    if image.ndim != 3 or not image.is_floating_point() or not 0 <= image.min() <= image.max() <= 1:
        what = f"a sample with pixels {str(image.dtype).removeprefix('torch.')} {list(image.shape)}"
        reason = "raw pixels are floating-point numbers from 0 to 1, [3, H, W]"
        raise BadImage(what, reason, "divide whole numbers by 255")
    return image if tuple(image.shape[1:]) == frame.size else frame.pixels(to_pil(image))


def _mask(frame: Preprocess, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.full(frame.size, IGNORE, dtype=torch.int32)
    return mask.to(torch.int32) if tuple(mask.shape) == frame.size else frame.mask(mask.cpu())


def class_places(model: ImageModel, data: Dataset) -> tuple[int, ...]:
    """The index among the model's classes of each label of a dataset, by name.

    Labels are matched by order only if names cannot tell: the model or the data has none, the data
    has ImageNet's classes (which have one order and many spellings), or the model has as many
    classes and knows none of the names. Matching by order is logged.
    """
    need_images(model)
    by_order = in_order(data, model.classes, model.n_classes)
    places = [] if by_order else [_index_of(model, name) for name in data.classes]
    unknown = [name for name, place in zip(data.classes, places, strict=False) if place is None]
    if by_order or len(unknown) == len(data.classes) == model.n_classes:
        alike = _is_imagenet(data) and len(data.classes) == model.n_classes
        if data.classes in ((), tuple(model.classes)) or alike:
            return tuple(range(len(data.classes)))
        if len(data.classes) != model.n_classes:
            expected = (
                f"{model.n_classes} classes, or names for the classes of {model.name} to match them"
                " by (classes=[...] or --classes FILE)"
            )
            raise BadOption("data", f"{data.name}, {len(data.classes)} classes", expected)
        if ("matched by order", data.name) not in model.memo:
            model.memo["matched by order", data.name] = True
            log.warning(
                "%s: its classes are matched to those of %s by order (%s is class 0, and so on),"
                " because they have no common names; name them by classes=[...] (--classes FILE)"
                " if that is wrong",
                *(data.name, model.name, data.classes[0]),
            )
        return tuple(range(len(data.classes)))
    if unknown:
        raise UnknownName(
            f"{data.name} does not fit {model.name}: class",
            unknown[0],
            model.classes,
            f"Its classes are {', '.join(map(repr, model.classes[:3]))}, ..."
            f" ({model.n_classes} in all). Name folders as `seecause doctor --list-classes` does,"
            " or by ImageNet's ids, or give the model's own names with --classes FILE. `bench run"
            " --target predicted` needs no labels.",
        )
    return tuple(place for place in places if place is not None)


def in_order(data: Dataset, names: Sequence[str], count: int) -> bool:
    """Whether label c means the c-th of `count` classes: because the names are equal or missing, or
    because the data has ImageNet's classes."""
    same = not names or data.classes == tuple(names)
    return same or (_is_imagenet(data) and count == len(data.classes))


def _is_imagenet(data: Dataset) -> bool:
    return data.name.partition(":")[0] in IMAGENETS


def _index_of(model: ImageModel, name: str) -> int | None:
    """The class of this name; a WordNet id is the name of a class of a model of ImageNet."""
    if not model.classes_called(name):  # before an error looks for names that are alike
        from seecause.data.imagenet import imagenet_wnids

        wnids = imagenet_wnids()
        if model.n_classes == len(wnids) and name in wnids:
            return wnids.index(name)
    with suppress(UnknownName, BadOption):
        return model.class_index(name)
    return None


def take_names(model: ImageModel, data: Dataset) -> None:
    """Give a model without class names those of `data`, matched by order, which is logged."""
    if not model.classes and data.classes and not _is_imagenet(data):
        class_places(model, data)
        model.classes = tuple(data.classes)


@checked
def true_positives(
    right: Tensor,
    labels: Tensor,
    *,
    share: Share = 0.4,
    cap: Count | None = 512,
    stratified: bool = False,
    seed: int = 0,
    classes: Sequence[str] = (),
) -> Tensor:
    """Draw some of the correct predictions (CIGMA, section 1.1).

    Args:
        right: [N] bool, whether each prediction is correct.
        labels: [N].
        share: The share of the correct predictions that is drawn, without replacement.
        cap: At most this many are drawn. None sets no limit.
        stratified: Draw the same share from every class, as evenly as `cap` allows; every class
            must then have a correct prediction.
        seed: The seed of the draw.
        classes: Names, for messages.

    Returns:
        Their indices in ascending order.
    """
    right, strata = right.cpu(), labels.cpu() if stratified else torch.zeros(len(labels))
    pools = [(right & (strata == label)).nonzero()[:, 0] for label in strata.unique()]
    for label, pool in zip(strata.unique().int().tolist(), pools, strict=True):
        if len(pool) == 0:
            of = f" of class {[*classes, label][min(label, len(classes))]}" if stratified else ""
            odd = f"the model predicts none of the {len(right)} images{of} correctly"
            raise BadInput("the data", odd, _NO_CORRECT)
    counts = [max(1, round(share * len(pool))) for pool in pools]
    if cap is not None:
        if cap < len(counts):
            raise BadOption("cap", cap, f"at least {len(counts)}, one image for each class")
        counts = _capped(counts, cap)
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        pool[torch.randperm(len(pool), generator=generator)[:count]]
        for pool, count in zip(pools, counts, strict=True)
    ]
    return torch.cat(drawn).sort().values


def _capped(wanted: Sequence[int], cap: int) -> list[int]:
    """Counts that are at most `wanted` and together at most `cap`, as even as possible."""
    counts = [0] * len(wanted)
    for _ in range(min(cap, sum(wanted))):
        open_places = [place for place, most in enumerate(wanted) if counts[place] < most]
        counts[min(open_places, key=counts.__getitem__)] += 1
    return counts
