"""Pictures with everything that is known about them, in a model's frame: what audits, repairs and
studies start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from seecause.data.answers import Group, true_positives
from seecause.data.batch import class_places, to_batch
from seecause.data.dataset import IGNORE, Dataset, capabilities
from seecause.engine.chunks import batched, fit
from seecause.errors import BadOption
from seecause.heads.erase import Masks, Swapped
from seecause.heads.registry import checked_labels
from seecause.models.base import ImageModel

if TYPE_CHECKING:
    from seecause.critters import Latents

_READ = 64  # pictures held at once before they have the model's size


@dataclass(frozen=True, eq=False)
class Pictures:
    """On the model's device. What a dataset does not know is None."""

    name: str
    ids: tuple[str, ...]
    images: Tensor  # [N, 3, H, W], normalised
    labels: Tensor | None = None  # [N] classes of the model
    truth: Tensor | None = None  # [N, H, W]: 1 object, 0 background, IGNORE neither
    groups: tuple[Group | None, ...] = ()
    swapped: Swapped | None = None  # exact counterfactuals: Critters only
    objects: tuple[
        str, ...
        # names of the first code of groups: the data's classes, whatever the model calls its own
    ] = ()
    places: tuple[str, ...] = ()  # names of the second code of groups

    def __len__(self) -> int:
        return len(self.images)

    @property
    def oracle(self) -> Masks | None:
        """True masks, where every picture has one."""
        known = self.truth is not None and not bool(
            (self.truth == IGNORE).flatten(1).all(dim=1).any()
        )
        return Masks.oracle(self.truth) if known and self.truth is not None else None

    @property
    def grouped(self) -> bool:
        return any(group is not None for group in self.groups)

    def take(self, rows: Tensor) -> Pictures:
        """Some of them, by place."""
        places, here = rows.tolist(), rows.to(self.images.device)
        swapped = self.swapped
        if swapped is not None:
            swapped = Swapped(
                swapped.background[here],
                None if swapped.foreground is None else swapped.foreground[here],
            )
        return replace(
            self,
            ids=tuple(self.ids[i] for i in places),
            images=self.images[here],
            labels=None if self.labels is None else self.labels[here],
            truth=None if self.truth is None else self.truth[here],
            groups=tuple(self.groups[i] for i in places) if self.groups else (),
            swapped=swapped,
        )


def read_pictures(
    model: ImageModel, data: Dataset, *, progress: Callable[[int], None] | None = None
) -> Pictures:
    """All pictures of a dataset. Critters bring exact counterfactuals: the same creature elsewhere,
    and another creature in the same place."""
    if data.classes:
        class_places(
            model, data
        )  # a dataset of other classes is refused before its pictures are read
    if "counterfactuals" in capabilities(data) and model.preprocess.size == (96, 96):
        found = critter_pictures(
            model, data.latents(0, len(data), device=model.device), name=data.name
        )
        if progress is not None:
            progress(len(data))
        return _with_labels(model, data, found)
    images, labels, truth, groups, ids = (
        list[Tensor](),
        list[Tensor](),
        list[Tensor](),
        list[Group | None](),
        list[str](),
    )
    for start in range(0, len(data), _READ):
        samples = [data[place] for place in range(start, min(start + _READ, len(data)))]
        batch = to_batch(model, samples)
        images.append(batch.images)
        labels += [] if batch.labels is None else [batch.labels]
        truth.append(
            torch.full(
                (len(samples), *batch.images.shape[-2:]),
                IGNORE,
                dtype=torch.int32,
                device=model.device,
            )
            if batch.masks is None
            else batch.masks
        )
        groups += [sample.group for sample in samples]
        ids += [sample.id for sample in samples]
        if progress is not None:
            progress(len(samples))
    masked = any(bool((part != IGNORE).any()) for part in truth)
    if not images:
        raise BadOption("data", data.name, "at least one picture")
    found = Pictures(
        data.name,
        tuple(ids),
        torch.cat(images),
        torch.cat(labels) if labels else None,
        torch.cat(truth) if masked else None,
        tuple(groups),
    )
    found = replace(found, objects=tuple(data.classes), places=tuple(getattr(data, "places", ())))
    return _with_labels(model, data, found)


def critter_pictures(
    model: ImageModel, latents: Latents, *, name: str = "critters", swaps: bool = True
) -> Pictures:
    """Scenes with their masks, groups (creature, background) and exact counterfactuals; where they
    go is decided by their place in the batch."""
    from seecause import critters

    def seen(raw: Tensor) -> Tensor:
        return model.preprocess.normalise(raw).to(model.device, model.dtype)

    turn = torch.arange(len(latents), device=latents.seed.device)
    elsewhere = (latents.background + 1 + turn % (len(critters.BACKGROUNDS) - 1)) % len(
        critters.BACKGROUNDS
    )
    another = (latents.creature + 1 + turn % (len(critters.CLASSES) - 1)) % len(critters.CLASSES)
    scene, swapped = critters.render(latents), None
    if swaps:
        swapped = Swapped(
            seen(critters.render(latents.replace(background=elsewhere)).image),
            seen(critters.render(latents.show(another)).image),
        )
    codes = torch.stack([latents.creature, latents.background], dim=1).tolist()
    return Pictures(
        name=name,
        ids=tuple(
            f"{place}, {critters.CLASSES[creature]} on {critters.BACKGROUNDS[background]}"
            for place, (creature, background) in enumerate(codes)
        ),
        images=seen(scene.image),
        labels=latents.label.to(model.device),
        truth=scene.mask.to(model.device),
        groups=tuple((creature, background) for creature, background in codes),
        swapped=swapped,
        objects=tuple(critters.CLASSES),
        places=tuple(critters.BACKGROUNDS),
    )


@torch.no_grad()
def logits_of(model: ImageModel, images: Tensor) -> Tensor:
    """[N, C] on the model's device, as many pictures at a time as fit."""
    return batched(
        model,
        images,
        fit(len(images), model.forward_bytes(model.check(images)), images.device),
        what="images",
    )


def answered_right(
    model: ImageModel,
    cases: Pictures,
    *,
    share: float = 0.4,
    cap: int | None = 512,
    stratified: bool = False,
    seed: int = 0,
) -> Pictures:
    """A share of the pictures that the model answers right (CIGMA, section 1.1); without labels,
    all of them."""
    if cases.labels is None:
        return cases
    right = logits_of(model, cases.images).argmax(dim=1) == cases.labels
    return cases.take(
        true_positives(
            right,
            cases.labels,
            share=share,
            cap=cap,
            stratified=stratified,
            seed=seed,
            classes=model.classes,
        )
    )


def _with_labels(model: ImageModel, data: Dataset, cases: Pictures) -> Pictures:
    """Labels as places among the model's classes."""
    if cases.labels is None:
        return cases
    labels = (
        torch.tensor(class_places(model, data), device=cases.labels.device)[cases.labels]
        if data.classes
        else cases.labels
    )
    return replace(cases, labels=checked_labels(model, cases.images, labels))
