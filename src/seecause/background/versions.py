"""Predictions on images and on versions of them that should get the same prediction.

moved     each object on backgrounds of images that the model predicts otherwise (or the other
          version of a pair)
control   each object on backgrounds of images that it predicts the same: the effect of cutting
          alone. By predictions and not by labels, so that it is a control also where backgrounds
          are independent of the class

flips              share of versions whose prediction is not that of the image
transplant-worst   lowest accuracy over class x donor class; it needs no group label, and decides
                   between remedies. Cells of few images (not versions) are pooled by class, then
                   altogether
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from seecause._random import bits
from seecause.background.images import LabelledImages, logits_of
from seecause.background.last_layer import LastLayer, features
from seecause.background.transplant import Donors, Versions, transplant
from seecause.files import digest
from seecause.metrics.statistics import GroupAccuracy
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel

FEWEST = 5  # images in a cell whose accuracy counts by itself
AT_ONCE = 256  # versions that are rendered together
_VERSION = re.compile(r"~\d+(\.\w+)?$")  # the end of an id that tells versions of an image apart


@dataclass(frozen=True, eq=False)
class VersionedImages:
    """Images and versions of them. The features of one model are kept."""

    data: LabelledImages
    moved: Versions
    control: Versions | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> Tensor:
        return self.data.need_labels()

    def features(self, model: VisionModel) -> list[Tensor]:
        """Features of the last layer: of images [n, P], of `moved` and of `control` [M, P]."""
        key = model.fingerprint()
        if self.memo.get("model") != key:
            self.memo.update(model=key, features=self._over(features, model))
        return self.memo["features"]

    def predict(self, model: ImageModel) -> Predictions:
        return Predictions(self, *self._over(logits_of, model))

    def predict_under(self, model: VisionModel, layer: LastLayer) -> Predictions:
        """Predictions of the model with another last layer, from its features."""
        return Predictions(self, *(layer(rows) for rows in self.features(model)))

    def digest(self) -> str:
        """Of everything that the versions are made of."""
        tensors = [value for value in vars(self.moved).values() if isinstance(value, Tensor)]
        flat = (tensor.detach().cpu().contiguous().flatten() for tensor in tensors)
        return digest(*(tensor.view(torch.uint8).numpy().tobytes() for tensor in flat))

    def _over(self, run: Callable[[Any, Tensor], Tensor], model: ImageModel) -> list[Tensor]:
        """`run(model, ...)` of images and versions, on the CPU, `AT_ONCE` at a time."""
        groups = [self.data.images.split(AT_ONCE), self.moved.batches(AT_ONCE)]
        groups += [] if self.control is None else [self.control.batches(AT_ONCE)]
        rows = torch.cat([run(model, batch).cpu() for batch in chain(*groups)])
        counts = [len(self.data), len(self.moved)]
        counts += [] if self.control is None else [len(self.control)]
        return list(rows.split(counts))


@dataclass(frozen=True, eq=False)
class Predictions:
    """Logits of images and of their versions, on the CPU, and the numbers that follow from them."""

    versioned: VersionedImages
    plain: Tensor  # [n, C]
    moved: Tensor  # [M, C]
    control: Tensor | None = None  # [K, C]

    @property
    def correct(self) -> Tensor:
        """[n] bool."""
        return self.plain.argmax(dim=1) == self.versioned.labels.cpu()

    def accuracy_by_image(self) -> Tensor:
        """[n] float64: accuracy over the versions of each image; NaN without versions."""
        correct, _, _, source = self._versions()
        return _mean_of(correct.double(), source, len(self.plain))

    @property
    def correct_somewhere(self) -> Tensor:
        """[n] bool: predicted correctly as they are, or in one of their versions."""
        return self.correct | (self.accuracy_by_image() > 0)

    @property
    def accuracy(self) -> float:
        return float(self.correct.double().mean())

    def flips_by_image(self, control: bool = False) -> Tensor:
        """[n] float64: share of each image's versions with another prediction than the image; NaN
        without versions."""
        versions = self.versioned.control if control else self.versioned.moved
        logits = self.control if control else self.moved
        plain = self.plain.argmax(dim=1)
        if versions is None or logits is None:
            return torch.full((len(plain),), torch.nan, dtype=torch.float64)
        source = versions.source_index.cpu()
        return _mean_of((logits.argmax(dim=1) != plain[source]).double(), source, len(plain))

    def pulled_by_image(self) -> Tensor:
        """[n] float64: share of each image's versions that are predicted as the donor's class."""
        source = self.versioned.moved.source_index.cpu()
        pulled = self.moved.argmax(dim=1) == self.versioned.moved.donor_labels.cpu()
        return _mean_of(pulled.double(), source, len(self.plain))

    @property
    def transplant_worst(self) -> float:
        correct, labels, donors, source = self._versions()
        return worst_cell(correct, labels, donors, origins(self.versioned.data.ids)[source])

    @property
    def groups(self) -> GroupAccuracy | None:
        return self.versioned.data.by_group(self.correct)

    def numbers(self, *, groups: bool = False) -> dict[str, float]:
        """By name, for tables; NaN where the data does not tell."""
        by_group = self.groups if groups else None
        moved = self.moved.argmax(dim=1) == self.versioned.moved.labels.cpu()
        return {
            "accuracy": self.accuracy,
            "flips": float(self.flips_by_image().nanmean()),
            "flips, control": float(self.flips_by_image(control=True).nanmean()),
            "transplants": float(moved.double().mean()),
            "transplant-worst": self.transplant_worst,
            "worst group": torch.nan if by_group is None else by_group.worst,
        }

    def _versions(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of versions of both kinds: whether they are predicted correctly, their labels, donor
        labels and images."""
        both = [(self.versioned.moved, self.moved)]
        if self.versioned.control is not None and self.control is not None:
            both.append((self.versioned.control, self.control))
        columns = [
            (logits.argmax(dim=1) == of.labels.cpu(), of.labels, of.donor_labels, of.source_index)
            for of, logits in both
        ]
        correct, labels, donors, source = (
            torch.cat([part.cpu() for part in column]) for column in zip(*columns, strict=True)
        )
        return correct, labels, donors, source


def worst_cell(
    correct: Tensor, labels: Tensor, donors: Tensor, images: Tensor, *, fewest: int = FEWEST
) -> float:
    """The lowest accuracy over (class, donor class) of versions [M] of images [M]. Cells of fewer
    than `fewest` images are pooled: with the other small cells of their class, with the whole
    class, or altogether, whichever is the first to have enough.

    >>> import torch
    >>> correct, classes = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 1])
    >>> worst_cell(correct, classes, torch.tensor([0, 0, 1, 1]), torch.arange(4), fewest=2)
    0.5
    """

    def enough(rows: Tensor) -> bool:
        return len(images[rows].unique()) >= fewest

    pools, left = list[Tensor](), list[Tensor]()
    for whole in _rows_by(labels):
        cells = [whole[rows] for rows in _rows_by(donors[whole])]
        pools += [cell for cell in cells if enough(cell)]
        small = [cell for cell in cells if not enough(cell)]
        if small:
            rest = torch.cat(small)
            pool = rest if enough(rest) else whole
            (pools if enough(pool) else left).append(pool)
    if left:
        rest = torch.cat(left)
        pools.append(rest if enough(rest) else torch.arange(len(correct)))
    return min(float(correct[pool].double().mean()) for pool in pools)


def _rows_by(codes: Tensor) -> list[Tensor]:
    """Rows of each code [M]."""
    order = codes.argsort(stable=True)
    counts = codes[order].unique_consecutive(return_counts=True)[1]
    return list(order.split(counts.tolist()))


def origins(ids: Sequence[str]) -> Tensor:
    """[n] int: equal for ids of versions of the same image, NAME~1 and NAME~2.

    >>> origins(["a.png", "b~1.png", "b~2.png", "c"]).tolist()
    [0, 1, 1, 2]
    """
    names = [_VERSION.sub("", name) for name in ids]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def _mean_of(values: Tensor, source: Tensor, count: int) -> Tensor:
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, source, values)
    return sums / torch.bincount(source, minlength=count)  # NaN for 0 of 0


def split_rows(
    labels: Tensor, shares: tuple[float, ...], *, seed: int, images: Tensor | None = None
) -> list[Tensor]:
    """Rows of each share, drawn class by class. Rows of the same image (`images` [n], by default
    each its own) stay together."""
    labels = labels.cpu()
    which = torch.arange(len(labels)) if images is None else images.cpu()
    which = which.unique(return_inverse=True)[1]
    place = torch.arange(len(labels))
    first = torch.full((int(which.max()) + 1,), len(labels)).scatter_reduce(0, which, place, "amin")
    chance = bits(first, 8 * seed + 5).double()
    part_of = torch.zeros(len(first), dtype=torch.long)
    for kind in labels.unique().tolist():
        members = (labels[first] == kind).nonzero()[:, 0]
        members = members[chance[members].argsort()]
        ends = torch.tensor(shares).cumsum(0) / sum(shares) * len(members)
        part_of[members] = torch.bucketize(
            torch.arange(len(members)), ends.round().long(), right=True
        )
    return [(part_of[which] == part).nonzero()[:, 0] for part in range(len(shares))]


def versions_to_learn(data: LabelledImages, per_picture: int, *, seed: int) -> VersionedImages:
    """Versions for training: objects on any background; of pairs (no masks in use), both
    versions."""
    if data.masks is None:
        return VersionedImages(data, _pair_versions(data, 0, 1))
    return VersionedImages(data, _moved(data, "any", per_picture, seed))


def versions_to_test(
    model: ImageModel, data: LabelledImages, per_picture: int, *, seed: int
) -> VersionedImages:
    """Versions for a test: objects on backgrounds of images that `model` predicts otherwise, and as
    control, of images that it predicts the same; of pairs (no masks in use), the other version and
    the image itself."""
    if data.masks is None:
        return VersionedImages(data, _pair_versions(data, 1), _pair_versions(data, 0))
    predicted = logits_of(model, data.images).argmax(dim=1)
    if len(predicted.unique()) < 2:
        predicted = data.need_labels()  # a model that predicts one class tells no donors apart
    moved = _moved(data, "other-class", per_picture, seed, predicted)
    repeated = torch.bincount(predicted).max() > 1
    control = _moved(data, "same-class", per_picture, seed, predicted) if repeated else None
    return VersionedImages(data, moved, control)


def _moved(
    data: LabelledImages,
    donors: Donors,
    per_picture: int,
    seed: int,
    predicted: Tensor | None = None,
) -> Versions:
    """Transplants by classes, or by the predictions of a model [n]."""
    assert data.masks is not None
    labels = data.need_labels()
    kinds = labels if predicted is None else predicted
    options: Any = {"per_picture": per_picture, "donors": donors, "seed": seed}
    moved = transplant(data.images, data.masks.hard, kinds, **options)
    source, donor = moved.source_index, moved.donor_index
    return replace(moved, labels=labels[source], donor_labels=labels[donor])


def _pair_versions(data: LabelledImages, *which: int) -> Versions:
    """The images themselves (0), their other versions (1), or both."""
    labels = data.need_labels()
    assert data.other_background is not None
    both = (data.images, data.other_background)
    places = torch.arange(len(labels), device=labels.device)
    images = torch.cat([both[version] for version in which])
    return Versions(
        images,
        labels.repeat(len(which)),
        torch.cat([torch.full_like(labels, version) for version in which]),
        places.repeat(len(which)),
        torch.arange(len(images), device=images.device),
    )
