"""Pictures with everything that is known about them, in a model's frame: what audits, repairs and
studies start from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seecause.background.erase import Erasure, Masks, OfImages, Swapped
from seecause.background.heads import checked_labels
from seecause.data.batch import Group, class_places, sample_in_frame, to_batch, true_positives
from seecause.data.dataset import (
    IGNORE,
    Dataset,
    Hole,
    Sample,
    has_counterfactuals,
    has_pairs,
    sample_ids,
)
from seecause.data.registry import as_data
from seecause.engine.chunks import plain_logits
from seecause.errors import BadImage, BadOption, DataMissing, SeecauseError
from seecause.metrics.accuracy import GroupAccuracy, group_accuracy
from seecause.models.base import ImageModel
from seecause.models.block import chain
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel

if TYPE_CHECKING:
    from seecause.critters import Latents

log = logging.getLogger(__name__)
NONE = "none of the nine"
_READ = 64  # pictures held at once before they have the model's size


Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Where nobody watches. Others show `what` they are at, and are told how much of `total` is
    done, each time some is."""
    yield lambda done: None


@dataclass(frozen=True, eq=False, repr=False)
class Pictures(OfImages):
    """On the model's device. What a dataset does not know is None."""

    name: str
    ids: tuple[str, ...]
    images: Tensor  # [N, 3, H, W], normalised
    labels: Tensor | None = None  # [N] classes of the model
    truth: Tensor | None = None  # [N, H, W]: 1 object, 0 background, IGNORE neither
    groups: tuple[Group | None, ...] = ()
    swapped: Swapped | None = None  # exact counterfactuals: Critters, and data of pairs
    objects: tuple[str, ...] = ()  # names of the first code of groups: the data's own classes
    places: tuple[str, ...] = ()  # names of the second code of groups
    holes: tuple[Hole, ...] = ()  # what else the data has, and could not be read

    def __repr__(self) -> str:
        return f"Pictures({len(self)} of {self.name})"

    def __len__(self) -> int:
        return len(self.images)

    @property
    def oracle(self) -> Masks | None:
        """True masks, where every picture has one."""
        if self.truth is None or bool((self.truth == IGNORE).flatten(1).all(dim=1).any()):
            return None
        return Masks.oracle(self.truth)

    def true_masks(self) -> Masks:
        """The same, or a refusal where some picture has none."""
        if (masks := self.oracle) is None:
            raise BadOption(
                "masks",
                "oracle",
                f"data with a mask for every picture; {self.name} has none, so give"
                " masks='discovered'",
            )
        return masks

    @property
    def exact_swaps(self) -> list[Erasure]:
        """The erasure by counterfactuals, where both kinds are known."""
        known = self.swapped is not None and self.swapped.foreground is not None
        return [Erasure(None, self.swapped)] if known else []  # type: ignore[arg-type]

    @property
    def grouped(self) -> bool:
        return any(group is not None for group in self.groups)

    def by_group(self, right: Tensor) -> GroupAccuracy | None:
        """Accuracy by group, from which answers are right [N]; None where there are no groups."""
        return group_accuracy(right, self.groups) if self.grouped else None

    def to(self, model: ImageModel) -> Pictures:
        """On the model's device, in its type."""
        device, dtype = model.device, model.dtype
        if self.images.device == device and self.images.dtype == dtype:
            return self
        return replace(
            self,
            images=self.images.to(device, dtype),
            labels=None if self.labels is None else self.labels.to(device),
            truth=None if self.truth is None else self.truth.to(device),
            swapped=None if self.swapped is None else self.swapped.to(device, dtype),
        )

    def take(self, rows: Tensor) -> Pictures:
        """Some of them, by place."""
        places = rows.tolist()
        return replace(
            super().take(rows),
            ids=tuple(self.ids[i] for i in places),
            groups=tuple(self.groups[i] for i in places) if self.groups else (),
            swapped=None if self.swapped is None else self.swapped.take(rows),
        )


def read_pictures(
    model: ImageModel, data: Dataset | str, *, progress: Callable[[int], None] | None = None
) -> Pictures:
    """All pictures of a dataset, or of the one of that name; those that cannot be read are left
    out and named (`holes`). Critters bring exact counterfactuals: the same creature elsewhere, and
    another creature in the same place."""
    data = as_data(data)
    if data.classes:
        class_places(model, data)  # a dataset of other classes is refused before it is read
    if has_counterfactuals(data) and model.preprocess.size == (96, 96):
        latents = data.latents(0, len(data), device=model.device)
        pictures = critter_pictures(model, latents, name=data.name)
        if progress is not None:
            progress(len(data))
        return _with_labels(model, data, pictures)
    if len(data) == 0:
        raise BadOption("data", data.name, "at least one picture")
    images, labels, truth = list[Tensor](), list[Tensor](), list[Tensor]()
    groups, ids = list[Group | None](), list[str]()
    others = list[Tensor]()
    holes = list[Hole]()
    for start in range(0, len(data), _READ):
        places = range(start, min(start + _READ, len(data)))
        samples, seconds = _read(model, data, places, holes)
        if progress is not None:
            progress(len(places))
        if not samples:
            continue
        batch = to_batch(model, samples)
        others += [to_batch(model, seconds).images] if seconds else []
        images.append(batch.images)
        labels += [] if batch.labels is None else [batch.labels]
        shape = (len(samples), *batch.images.shape[-2:])
        unknown = torch.full(shape, IGNORE, dtype=torch.int32, device=model.device)
        truth.append(unknown if batch.masks is None else batch.masks)
        groups += [sample.group for sample in samples]
        ids += [sample.id or str(len(ids) + row) for row, sample in enumerate(samples)]
    if not images:
        raise SeecauseError(holes[0].reason)
    masked = any(bool((part != IGNORE).any()) for part in truth)
    pictures = Pictures(
        data.name,
        tuple(ids),
        torch.cat(images),
        torch.cat(labels) if labels else None,
        torch.cat(truth) if masked else None,
        tuple(groups),
        swapped=Swapped(torch.cat(others)) if others else None,
        objects=tuple(data.classes),
        places=tuple(getattr(data, "places", ())),
        holes=tuple(holes),
    )
    return _with_labels(model, data, pictures)


def _read(
    model: ImageModel, data: Dataset, places: range, holes: list[Hole]
) -> tuple[list[Sample], list[Sample]]:
    """Samples in the model's frame, and their second versions where there are such. What cannot be
    read is named and left out."""
    samples, seconds, frame = list[Sample](), list[Sample](), model.preprocess
    paired = has_pairs(data)
    for place in places:
        try:
            sample = sample_in_frame(frame, data[place])
            second = [sample_in_frame(frame, data.other(place))] if paired else []
        except (BadImage, DataMissing) as bad:
            log.warning("left out: %s", bad)
            holes.append(Hole(sample_ids(data)[place], str(bad)))
            continue
        samples.append(sample)
        seconds += second
    return samples, seconds


def pictures_of(model: ImageModel, data: Dataset | Pictures, progress: Progress) -> Pictures:
    """A dataset's pictures in the model's frame, or those that were read before, brought to the
    model's device and type."""
    if isinstance(data, Pictures):
        return data.to(model)
    with progress("reading pictures", len(data)) as advance:
        return read_pictures(model, data, progress=advance)


def critter_pictures(
    model: ImageModel, latents: Latents, *, name: str = "critters", swaps: bool = True
) -> Pictures:
    """Scenes with their masks, groups (creature, background) and exact counterfactuals; where they
    go is decided by their place in the batch."""
    from seecause import critters

    def normalised(raw: Tensor) -> Tensor:
        return model.preprocess.normalise(raw).to(model.device, model.dtype)

    turn = torch.arange(len(latents), device=latents.seed.device)
    places, creatures = len(critters.BACKGROUNDS), len(critters.CLASSES)
    elsewhere = (latents.background + 1 + turn % (places - 1)) % places
    another = (latents.creature + 1 + turn % (creatures - 1)) % creatures
    scene, swapped = critters.render(latents), None
    if swaps:
        moved = critters.render(latents.replace(background=elsewhere))
        swapped = Swapped(
            normalised(moved.image), normalised(critters.render(latents.show(another)).image)
        )
    codes = torch.stack([latents.creature, latents.background], dim=1).tolist()
    return Pictures(
        name=name,
        ids=tuple(
            f"{place}, {critters.CLASSES[creature]} on {critters.BACKGROUNDS[background]}"
            for place, (creature, background) in enumerate(codes)
        ),
        images=normalised(scene.image),
        labels=latents.label.to(model.device),
        truth=scene.mask.to(model.device),
        groups=tuple((creature, background) for creature, background in codes),
        swapped=swapped,
        objects=tuple(critters.CLASSES),
        places=tuple(critters.BACKGROUNDS),
    )


def imagenet9_model(model: VisionModel, mapping: Tensor) -> VisionModel:
    """The same view with the nine answers of the Backgrounds Challenge (Xiao et al. 2020), and a
    tenth for none of them, which is always wrong.

    `mapping` [1000] (`read_in9_map`) says which of the nine each ImageNet class is, -1 for none.
    The logit of an answer is the largest of its classes, so the answer is the release's own.
    """
    from seecause.data.backgrounds import CLASSES

    members = [(mapping == place).nonzero()[:, 0] for place in (*range(len(CLASSES)), -1)]
    if any(len(classes) == 0 for classes in members):
        raise BadOption(
            "mapping",
            mapping.unique().tolist(),
            "classes for each of the nine, and some that are none of them (-1)",
        )

    def best(logits: Tensor) -> Tensor:
        columns = [logits[..., classes.to(logits.device)].amax(dim=-1) for classes in members]
        return torch.stack(columns, dim=-1)

    native = model.native
    changed: dict[str, Any] = {
        "readout": replace(model.readout, head=chain(model.readout.head, best)),
        "native": lambda images: best(native(images)),
        "classes": (*CLASSES, NONE),
        "merged": tuple(mapping.tolist()),
        "memo": {},
    }
    return replace(model, **changed)


def model_for(model: ImageModel, data: Dataset | Pictures) -> ImageModel:
    """The model, or for ImageNet-9 and a model with ImageNet's classes, the one that gives the nine
    answers."""
    if not data.name.startswith("imagenet9:") or not isinstance(model, VisionModel):
        return model
    from seecause.data.backgrounds import IMAGENET_CLASSES, find_in9_map, read_in9_map

    if model.n_classes != IMAGENET_CLASSES:
        return model
    return imagenet9_model(model, read_in9_map(find_in9_map(data.name)))


@in_eval_mode
@torch.no_grad()
def logits_of(model: ImageModel, images: Tensor) -> Tensor:
    """[N, C] on the model's device, as many pictures at a time as fit."""
    return plain_logits(model, images.to(model.device, model.dtype), what="images")


def logits_piece(model: ImageModel, images: Tensor) -> dict[str, Tensor]:
    """The same on the CPU, for `in_pieces`."""
    return {"logits": logits_of(model, images).cpu()}


@dataclass(frozen=True)
class AnswerSampling:
    """Which right answers heads are scored on (CIGMA, section 1.1): a share of them, at most `cap`;
    `stratified` takes as many from every class."""

    share: float = 0.4
    cap: int | None = 512
    stratified: bool = False


@in_eval_mode
def answered_right(
    model: ImageModel, pictures: Pictures, *, seed: int = 0, **sampling: Any
) -> Pictures:
    """The pictures that the model answers right, or some of them: keywords are those of
    `AnswerSampling`. Without labels, all."""
    if pictures.labels is None:
        return pictures
    right = logits_of(model, pictures.images).argmax(dim=1) == pictures.labels
    places = true_positives(
        right,
        pictures.labels,
        seed=seed,
        classes=model.classes,
        **asdict(AnswerSampling(**sampling)),
    )
    return pictures.take(places)


def _with_labels(model: ImageModel, data: Dataset, pictures: Pictures) -> Pictures:
    """Labels as places among the model's classes."""
    if pictures.labels is None:
        return pictures
    labels = pictures.labels
    if data.classes:
        labels = torch.tensor(class_places(model, data), device=labels.device)[labels]
    return replace(pictures, labels=checked_labels(model, pictures.images, labels))
