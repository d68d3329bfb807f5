"""The work of the attribution study in parts, each a run of the benchmark that can be stopped and
continued; and what each will cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from scripts import tables
from scripts.tables import REFERENCE
from seecause.bench.ablate import STUDIES, with_settings
from seecause.bench.measures import PAPER, group_of
from seecause.bench.plan import Plan, Request, Store
from seecause.bench.runner import Status
from seecause.bench.work import predict, read_samples
from seecause.data.batch import class_places, to_batch
from seecause.data.images import read_image
from seecause.data.photos import Photos
from seecause.models.base import ImageModel

CURVE = (
    58  # forwards for insertion and deletion of one map: RISE's 28 steps at 224 pixels, both ways
)
FAITHFUL = ("insertion", "deletion", "ins-del")
PIXELS = (
    "integrated-gradients",
    "rise",
    "smoothgrad",
    "sobel",
    "vit-cx",
)  # explain pixels with their default options; all others patches
SANITY = ("mprt", "mprt-abs", "random-logit", "random-logit-abs")
STEPS = 4  # models that the randomisation check explains, of one for each layer
EXPLAINED = (
    2 + STEPS + 2
    # maps that a sanity check makes of a picture: the map itself, both checks' plain ones, redrawn
    # models, another class
)
# What one map costs in forwards where it is many; a backward pass counts as two. N patches.
MANY = {
    "mda": lambda n: n * min(28, 2 * math.isqrt(n)) + 2 * n,
    "rise": lambda n: 4000,
    "tis": lambda n: 512,
    "atman": lambda n: n,
    "simple-insertion": lambda n: n,
    "simple-deletion": lambda n: n,
    "integrated-gradients": lambda n: 150,
    "smoothgrad": lambda n: 150,
    "vit-cx": lambda n: 100,  # by picture
    "mutex": lambda n: 28,
    "bt": lambda n: 25,
    "tam": lambda n: 22,
}  # fmt: skip
FEW = 4  # of any other


@dataclass(frozen=True)
class Sizes:
    """Pictures of what is too dear for all of them."""

    expensive: int = 100  # of each set
    sane: int = 20
    sane_expensive: int = 3

    def dear(self, photos: Photoset) -> int:
        """Photos of a set that the expensive methods see."""
        return min(len(photos.data), self.expensive)

    @classmethod
    def of(cls, limit: int | None) -> Sizes:
        """With a limit, shares of it that two cores can do."""
        if limit is None:
            return cls()
        return cls(
            *(
                min(most, math.ceil(limit / share))
                for most, share in ((cls.expensive, 20), (cls.sane, 8), (cls.sane_expensive, 40))
            )
        )


@dataclass(frozen=True, eq=False)
class Photoset:
    """Photos, what they show and what the model answers: places among its classes [n], -1 for a
    photo that cannot be read."""

    name: str
    title: str
    data: Photos
    labels: Tensor
    predicted: Tensor

    @property
    def names(self) -> list[str]:
        return [photo.id for photo in self.data.photos]

    @property
    def right(self) -> Tensor:
        """Whether each readable photo is answered right."""
        return (self.predicted == self.labels)[self.predicted >= 0]

    def mistaken(self, among: Photos) -> Photos:
        """The photos among some that are answered otherwise than they are labelled: only those have
        another map for the predicted class."""
        wrong = {
            name
            for name, label, found in zip(
                self.names, self.labels.tolist(), self.predicted.tolist(), strict=True
            )
            if 0 <= found != label
        }
        return replace(among, photos=tuple(photo for photo in among.photos if photo.id in wrong))


@dataclass(frozen=True, eq=False)
class Part:
    """One run of the benchmark; `name` is its folder."""

    name: str
    request: Request
    data: Photos

    def forwards(self, patches: int) -> int:
        """About how many passes of the model it takes."""
        each = EXPLAINED if "mprt" in self.request.metrics else 1
        curve = CURVE if "ins-del" in self.request.metrics else 0
        own = [
            MANY.get(name, lambda n: FEW)(patches)
            for name in map(self.request.method, self.request.methods)
        ]
        again = (
            curve * sum(name in PIXELS for name in self.request.methods) if self.on_patches else 0
        )
        return len(self.data) * (sum(each * one + curve for one in own) + again)

    @property
    def on_patches(self) -> bool:
        """Whether maps of pixels are scored on patches too."""
        return self.name.endswith(("-label", "-label-few"))


@dataclass(frozen=True, eq=False)
class Done:
    """A part as far as it went."""

    part: Part
    store: Store
    plan: Plan
    status: Status

    def finished(self) -> list[str]:
        """The methods of which every map was made."""
        made = {shard.id for shard in self.store.finished(self.plan)}
        lacking = {shard.method for shard in self.plan.shards if shard.id not in made}
        return [method for method in self.plan.request.methods if method not in lacking]


def photoset(name: str, title: str, data: Photos, model: ImageModel) -> Photoset:
    """The photos, each read and cut once for all parts, and what the model answers."""
    frame, read_mask = model.preprocess, data.read_mask
    data = replace(
        data,
        read_picture=cache(lambda path: frame.picture(read_image(path))),
        read_mask=None if read_mask is None else cache(lambda path: frame.mask(read_mask(path))),
    )
    places = class_places(model, data)
    labels = torch.tensor([places[label] for label in data.labels if label is not None])
    predicted = torch.full((len(data),), -1)
    samples, _ = read_samples(data, 0, len(data))
    if samples:
        predicted[list(samples)] = predict(
            model, to_batch(model, list(samples.values())).images
        ).cpu()
    return Photoset(name, title, data, labels, predicted)


def some(data: Photos, count: int, seed: int) -> Photos:
    """A fixed random part of the photos, in their order."""
    chosen = (
        torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count]
        .sort()
        .values.tolist()
    )
    return replace(data, photos=tuple(data.photos[place] for place in chosen))


def parts(
    model: ImageModel, sets: Sequence[Photoset], methods: Sequence[str], sizes: Sizes, base: Request
) -> list[Part]:
    """All of the study, what tells most for its time first: a run that is stopped leaves out the
    end, where the expensive methods are."""
    cheap, dear = (
        [m for m in methods if (m in tables.EXPENSIVE) == wanted] for wanted in (False, True)
    )
    pets = sets[0]

    def table(photos: Photoset, target: str, chosen: Sequence[str]) -> Part:
        data = some(photos.data, sizes.dear(photos), base.seed) if chosen is dear else photos.data
        data = data if target == "label" else photos.mistaken(data)
        metrics = PAPER if photos.data.read_mask is not None else FAITHFUL
        name = f"{photos.name}-{target}{'-few' * (chosen is dear)}"
        return _part(
            name, replace(base, methods=_default(chosen), metrics=metrics, target=target), data
        )

    def sanity(chosen: Sequence[str]) -> Part:
        name, count = (
            ("sanity-few", sizes.sane_expensive) if chosen is dear else ("sanity", sizes.sane)
        )
        measures = {group_of("mprt"): {"steps": STEPS}}
        return _part(
            name,
            replace(base, methods=_default(chosen), metrics=SANITY, measures=measures),
            some(pets.data, count, base.seed),
        )

    def ablation(study: str) -> Part:
        asked = replace(base, methods=_default([REFERENCE]), study=study, metrics=PAPER)
        return _part(f"ablate-{study}", with_settings(asked, model), pets.data)

    found = [
        *(table(photos, "label", cheap) for photos in sets),
        sanity(cheap),
        *(ablation(study) for study in STUDIES),
        *(table(photos, "predicted", cheap) for photos in sets),
        table(pets, "label", dear),
        sanity(dear),
        table(pets, "predicted", dear),
        *(table(photos, target, dear) for photos in sets[1:] for target in ("label", "predicted")),
    ]
    return [part for part in found if part.request.methods and len(part.data)]


def _part(name: str, request: Request, data: Photos) -> Part:
    """On a GPU a shard is one method on a hundred pictures, or on fifty where each is dear;
    elsewhere a shard must end within minutes."""
    dear = any(method in tables.EXPENSIVE for method in request.methods)
    large = request.device.startswith("cuda")
    size = (50 if dear else 100) if large else (1 if dear else 10)
    return Part(name, replace(request, data=data.name, shard_size=size), data)


def _default(methods: Sequence[str]) -> Mapping[str, Mapping[str, object]]:
    return {name: {} for name in methods}
