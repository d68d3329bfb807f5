"""Labelled images with their object masks, groups and other versions, in a model's own frame.

Everything in this package starts from one `LabelledImages`:

    data = sc.background.read_images(model, "critters:certified:test")
    data = data.with_masks(object_masks(model, data, source="timm:NAME"))
    sc.background.score(model, data)

An image and its `other_background` are a pair: two versions that should get the same prediction.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.data.batch import class_places, framed_batch, read_samples, true_positives
from seecause.data.dataset import IGNORE, Dataset, Group, SkippedImage, as_data, capabilities
from seecause.engine.chunks import plain_logits
from seecause.errors import BadOption, SeecauseError
from seecause.metrics.statistics import GroupAccuracy, group_accuracy
from seecause.models.base import ImageModel, in_eval_mode
from seecause.models.block import chain
from seecause.models.view import VisionModel

if TYPE_CHECKING:
    from seecause.critters.world import Latents

log = logging.getLogger(__name__)
READ = 64  # samples that are normalised at once
COVERED = 0.5  # an object patch is covered by the object to at least this share
NONE_OF_NINE = "none of the nine"

MaskKind = Literal["given", "discovered", "network", "own"]
MASK_NAMES = {"given": "true masks", "own": "own masks"}
Advance = Callable[[int], None]  # is called with the number of items that were finished
Progress = Callable[[str, int], AbstractContextManager[Advance]]


def no_advance(done: int) -> None:
    """An `Advance` that shows nothing."""


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Advance]:
    """A `progress` that shows nothing. Others show `what` is done, and how much of `total`."""
    yield no_advance


@dataclass(frozen=True, eq=False)
class PerImage:
    """Base class of data about images: every tensor field has one row for each image."""

    def take(self, rows: Tensor) -> Self:
        """The rows of some images, by index or by a boolean mask."""
        taken: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                taken[name] = value[rows.to(value.device)]
            elif isinstance(value, PerImage):
                taken[name] = value.take(rows)
        return replace(self, **taken)


@dataclass(frozen=True, eq=False, repr=False)
class Masks(PerImage):
    """Object masks of images, on pixels. `LabelledImages` enlarges masks on patches to pixels.

    Attributes:
        hard: [N, h, w] bool, True on the object.
        kind: How the masks were made, such as "given" or "discovered".
        source: The source of the masks, for reports.
        inside: [N, h, w] bool, False on padding and where nothing is known; None: all is known.
        overlap: [N], IoU with the masks of the data; NaN for an image without one.
        soft: [N, g, g] in [0, 1], of discovered masks.
        refused: [N], why a mask was not used for a cut; 0 for those that were used.
        notes: Warnings for reports.
        protocol: How the masks were made.

    Example:
        >>> import torch, seecause as sc
        >>> truth = torch.zeros(1, 96, 96, dtype=torch.bool)
        >>> truth[:, 24:72, 24:72] = True
        >>> sc.background.Masks.given(truth)
        Masks(1, given masks, 25% foreground)
    """

    hard: Tensor  # [N, h, w] bool, True on the object
    kind: MaskKind = "given"
    source: str = "given masks"  # the source of the masks, for reports
    inside: Tensor | None = None  # [N, h, w] bool: False on padding and where nothing is known
    overlap: Tensor | None = None  # [N] float64: IoU with masks of the data; NaN without one
    soft: Tensor | None = None  # [N, g, g] in [0, 1], of discovered masks
    refused: Tensor | None = None  # [N] int64, why a mask is no cut (`REFUSALS`), 0 for those used
    notes: tuple[str, ...] = ()  # warnings for reports
    protocol: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        share = float(self.hard.double().mean())
        return f"Masks({len(self.hard)}, {self.source}, {share:.0%} foreground)"

    def __len__(self) -> int:
        return len(self.hard)

    @property
    def name(self) -> str:
        """In tables: "true masks", "discovered masks" ..."""
        return MASK_NAMES.get(self.kind, f"{self.kind} masks")

    @property
    def known(self) -> Tensor:
        """[N] bool: images with known pixels of object or background."""
        if self.inside is None:
            return torch.ones(len(self), dtype=torch.bool, device=self.hard.device)
        return self.inside.flatten(1).any(dim=1)

    @classmethod
    def given(cls, truth: Tensor) -> Masks:
        """Masks [N, h, w] that come with the data: bool, or integers with 1 on the object and
        IGNORE where it is not known."""
        known = None if truth.dtype == torch.bool else truth != IGNORE
        inside = None if known is None or bool(known.all()) else known
        return cls(truth == 1, inside=inside, protocol={"source": "given"})

    def on_patches(self, grid: tuple[int, int]) -> Tensor:
        """[N, gh, gw] bool: patches whose known pixels are covered by the object to at least
        half."""
        known = torch.ones_like(self.hard) if self.inside is None else self.inside
        parts = torch.stack([self.hard.float(), known.float()], dim=1)
        covered, counted = F.adaptive_avg_pool2d(parts, grid).unbind(dim=1)
        return (covered >= COVERED * counted) & (covered > 0)


def on_pixels(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks [.., gh, gw] of patches as masks [.., H, W] of their pixels."""
    high, wide = size[0] // masks.shape[-2], size[1] // masks.shape[-1]
    return masks.repeat_interleave(high, dim=-2).repeat_interleave(wide, dim=-1)


@dataclass(frozen=True, eq=False, repr=False)
class LabelledImages(PerImage):
    """Images of a dataset in a model's frame, with everything that is known about them.

    Args:
        images: [N, 3, H, W], normalised.
        labels: [N] classes of the model.
        masks: Object masks in use: a `Masks`, or a tensor [N, H, W] that is True (or 1) on the
            object.
        truth: Masks that come with the data; of images without one, nothing is `known`.
        groups: A (object, background) code for each image, or None.
        other_background: [N, 3, H, W], the same objects on other backgrounds, or the other version
            of each pair.
        other_object: [N, 3, H, W], other objects on the same backgrounds.
        skipped: Images of the data that could not be read.
        own_labels: Whether labels are the model's own predictions, because the data has none.

    Example:
        >>> import torch, seecause as sc
        >>> data = sc.background.LabelledImages(torch.zeros(2, 3, 96, 96), torch.tensor([0, 1]))
        >>> len(data), data.images.shape
        (2, torch.Size([2, 3, 96, 96]))
    """

    images: Tensor
    labels: Tensor | None = None
    masks: Masks | Any = None  # a tensor becomes `Masks`
    name: str = "images"
    ids: tuple[str, ...] = ()
    truth: Masks | None = None
    groups: tuple[Group | None, ...] = ()
    other_background: Tensor | None = None
    other_object: Tensor | None = None
    skipped: tuple[SkippedImage, ...] = ()
    own_labels: bool = False

    def __post_init__(self) -> None:
        if not self.ids:
            object.__setattr__(self, "ids", tuple(map(str, range(len(self.images)))))
        if isinstance(self.masks, Tensor):
            object.__setattr__(self, "masks", Masks.given(self.masks))
        for name in ("masks", "truth"):
            if (masks := getattr(self, name)) is None:
                continue
            count, *grid = masks.hard.shape
            odd = len(grid) != 2 or any(map(operator.mod, self.size, grid))
            if count != len(self) or odd:
                expected = (
                    f"a mask for each image of {list(self.images.shape)}, on pixels or patches"
                )
                raise BadOption(name, [count, *grid], expected)
            if masks.hard.shape[1:] != self.size:
                inside = None if masks.inside is None else on_pixels(masks.inside, self.size)
                large = replace(masks, hard=on_pixels(masks.hard, self.size), inside=inside)
                object.__setattr__(self, name, large)

    def __repr__(self) -> str:
        return f"LabelledImages({len(self)} of {self.name})"

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.images.shape[2], self.images.shape[3]

    @property
    def swaps(self) -> bool:
        """Whether exact counterfactuals of both kinds are known."""
        return self.other_background is not None and self.other_object is not None

    @property
    def grouped(self) -> bool:
        return any(group is not None for group in self.groups)

    def need_labels(self) -> Tensor:
        """The labels; data without labels is refused."""
        if self.labels is None:
            expected = "data with labels: folder:PATH has a folder for each class"
            raise BadOption("data", self.name, expected)
        return self.labels

    def with_masks(self, masks: Masks | Tensor | None) -> LabelledImages:
        """These images with other masks in use."""
        return replace(self, masks=masks)

    def by_group(self, correct: Tensor) -> GroupAccuracy | None:
        """Accuracy by group from which predictions are correct [N]; None without groups."""
        return group_accuracy(correct, self.groups) if self.grouped else None

    def to(self, model: ImageModel) -> LabelledImages:
        """On the model's device and in its dtype."""
        moved = {
            name: value.to(model.device, model.dtype if value.is_floating_point() else None)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def take(self, rows: Tensor) -> LabelledImages:
        """Some of the images, by index or by a boolean mask."""
        at = (rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows).tolist()
        ids = tuple(self.ids[i] for i in at)
        groups = tuple(self.groups[i] for i in at) if self.groups else ()
        return replace(super().take(rows), ids=ids, groups=groups)


# "given", "own", "discovered", the name of a network, a network, masks, or a function of the images
MaskSource = str | ImageModel | Tensor | Masks | Callable[[LabelledImages], Masks] | None


def checked_labels(model: ImageModel, images: Tensor, labels: Tensor) -> Tensor:
    """Class indices [N] on the images' device, one for each image."""
    labels = torch.as_tensor(labels)
    whole = labels.shape == images.shape[:1] and not labels.dtype.is_floating_point
    if not whole or not bool(((labels >= 0) & (labels < model.n_classes)).all()):
        expected = f"a class index 0-{model.n_classes - 1} for each of the {len(images)} images"
        raise BadOption("labels", labels.tolist()[:8], expected)
    return labels.long().to(images.device)


def read_images(
    model: ImageModel, data: Dataset | str, *, progress: Advance = no_advance
) -> LabelledImages:
    """Read all images of a dataset into the model's frame.

    Images that cannot be read are skipped and listed in `skipped`. Critters bring exact
    counterfactuals: the same creature elsewhere, and another creature in the same place.

    Args:
        model: The model whose size, normalisation and classes are used.
        data: A dataset, or its name, such as "folder:PATH".
        progress: Called with the number of images after each part that is read.

    Returns:
        `LabelledImages`.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> data = sc.data.open_data("critters:clean:test", limit=2)
        >>> sc.background.read_images(model, data)
        LabelledImages(2 of critters:clean:test)
    """
    data = as_data(data)
    # a dataset of other classes is refused before it is read
    places = class_places(model, data) if data.classes else None
    if len(data) == 0:
        raise BadOption("data", data.name, "at least one image")
    if "counterfactuals" in capabilities(data) and model.preprocess.size == (96, 96):
        latents = cast(Any, data).latents(0, len(data), device=model.device)
        labelled = critter_images(model, latents, name=data.name)
        progress(len(data))
    else:
        labelled = _read_samples(model, data, progress)
    labels = labelled.labels
    if labels is None:
        return labelled
    labels = labels if places is None else torch.tensor(places, device=labels.device)[labels]
    return replace(labelled, labels=checked_labels(model, labelled.images, labels))


def _read_samples(model: ImageModel, data: Any, progress: Advance) -> LabelledImages:
    """Samples in the model's frame, with their second versions if the data has pairs."""
    images, labels, truth, others = (list[Tensor]() for _ in range(4))
    groups, ids, skipped = list[Group | None](), list[str](), list[SkippedImage]()
    paired = "pairs" in capabilities(data)
    read = read_samples(model.preprocess, data, range(len(data)), pairs=paired)
    while rows := list(islice(read, READ)):
        progress(len(rows))
        for row in rows:
            if isinstance(row, SkippedImage):
                log.warning("skipped: %s", row.reason)
                skipped.append(row)
        versions = [row for row in rows if not isinstance(row, SkippedImage)]
        samples, seconds = [row[0] for row in versions], [row[1] for row in versions if paired]
        if not samples:
            continue
        batch = framed_batch(model, samples)
        others += [framed_batch(model, seconds).images] if seconds else []
        images.append(batch.images)
        labels += [] if batch.labels is None else [batch.labels]
        shape = (len(samples), *batch.images.shape[-2:])
        unknown = torch.full(shape, IGNORE, dtype=torch.int32, device=model.device)
        truth.append(unknown if batch.masks is None else batch.masks)
        groups += [sample.group for sample in samples]
        ids += [sample.id or str(len(ids) + row) for row, sample in enumerate(samples)]
    if not images:
        raise SeecauseError(skipped[0].reason)
    masks = torch.cat(truth)
    return LabelledImages(
        images=torch.cat(images),
        labels=torch.cat(labels) if labels else None,
        name=data.name,
        ids=tuple(ids),
        truth=Masks.given(masks) if bool((masks != IGNORE).any()) else None,
        groups=tuple(groups),
        other_background=torch.cat(others) if others else None,
        skipped=tuple(skipped),
    )


def images_of(
    model: ImageModel,
    data: Dataset | LabelledImages | Tensor | str,
    progress: Progress = no_progress,
) -> LabelledImages:
    """A dataset read into the model's frame; images that were read before (a tensor is images of
    which nothing else is known) are moved to its device, and their labels are checked."""
    if isinstance(data, Tensor):
        data = LabelledImages(data)
    if isinstance(data, LabelledImages):
        if data.labels is not None:
            data = replace(data, labels=checked_labels(model, data.images, data.labels))
        return data.to(model)
    data = as_data(data)
    with progress("reading images", len(data)) as advance:
        return read_images(model, data, progress=advance)


def critter_images(
    model: ImageModel, latents: Latents, *, name: str = "critters"
) -> LabelledImages:
    """Scenes with their masks, groups (creature, background) and exact counterfactuals; the other
    background and creature of each are decided by its index in the batch."""
    from seecause import critters
    from seecause.critters.world import BACKGROUNDS

    def normalised(raw: Tensor) -> Tensor:
        return model.preprocess.normalise(raw).to(model.device, model.dtype)

    turn = torch.arange(len(latents), device=latents.seed.device)
    places, creatures = len(BACKGROUNDS), len(critters.CLASSES)
    elsewhere = (latents.background + 1 + turn % (places - 1)) % places
    another = (latents.creature + 1 + turn % (creatures - 1)) % creatures
    scene, moved = critters.render(latents), critters.render(latents.replace(background=elsewhere))
    groups = tuple(zip(latents.creature.tolist(), latents.background.tolist(), strict=True))
    names = [f"{critters.CLASSES[creature]} on {BACKGROUNDS[place]}" for creature, place in groups]
    return LabelledImages(
        images=normalised(scene.image),
        labels=latents.label.to(model.device),
        name=name,
        ids=tuple(f"{number}, {name}" for number, name in enumerate(names)),
        truth=Masks.given(scene.mask.to(model.device)),
        groups=groups,
        other_background=normalised(moved.image),
        other_object=normalised(critters.render(latents.show(another)).image),
    )


def imagenet9_model(model: VisionModel, mapping: Tensor) -> VisionModel:
    """The view with the nine classes of the Backgrounds Challenge (Xiao et al. 2020), and a tenth
    for none of them, which is always wrong.

    `mapping` [1000] (`read_in9_map`) is the class among the nine of each ImageNet class, -1 for
    none. The logit of a class is the largest of its ImageNet classes', as in the release.
    """
    from seecause.data.imagenet import IN9_CLASSES as CLASSES

    members = [(mapping == place).nonzero()[:, 0] for place in (*range(len(CLASSES)), -1)]

    def best(logits: Tensor) -> Tensor:
        columns = [logits[..., classes.to(logits.device)].amax(dim=-1) for classes in members]
        return torch.stack(columns, dim=-1)

    native = model.native
    changed: dict[str, Any] = {
        "readout": replace(model.readout, head=chain(model.readout.head, best)),
        "native": lambda images: best(native(images)),
        "classes": (*CLASSES, NONE_OF_NINE),
        "merged": tuple(mapping.tolist()),
        "memo": {},
    }
    return replace(model, **changed)


def model_for(model: ImageModel, data: Dataset | LabelledImages) -> ImageModel:
    """The model, or for ImageNet-9 and a model with ImageNet's classes, its view with nine
    classes."""
    if not data.name.startswith("imagenet9:") or not isinstance(model, VisionModel):
        return model
    from seecause.data.imagenet import IMAGENET_CLASSES, find_in9_map, read_in9_map

    if model.n_classes != IMAGENET_CLASSES:
        return model
    return imagenet9_model(model, read_in9_map(find_in9_map(data.name)))


@in_eval_mode
@torch.no_grad()
def logits_of(model: ImageModel, images: Tensor) -> Tensor:
    """[N, C] on the model's device, as many images at a time as fit."""
    return plain_logits(model, images.to(model.device, model.dtype), what="images")


@in_eval_mode
def correct_images(
    model: ImageModel, data: LabelledImages, *, seed: int = 0, **sampling: Any
) -> LabelledImages:
    """The images that the model predicts correctly, or a sample of them; all without labels.

    Args:
        **sampling: As `sc.data.true_positives` takes them: `share` (0.4) of the correct images, at
            most `cap` (512), `stratified` by class (CIGMA, section 1.1).
    """
    if data.labels is None:
        return data
    correct = logits_of(model, data.images).argmax(dim=1) == data.labels
    sampling = {"seed": seed, "classes": model.classes, **sampling}
    return data.take(true_positives(correct, data.labels, **sampling))
