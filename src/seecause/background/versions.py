"""What an audit and a repair measure on: pictures, and versions of them that should be answered
alike.

    moved     each object on backgrounds of pictures that the model answers otherwise (or the other
              version of a pair)
    control   each object on backgrounds of pictures that it answers the same: what cutting alone
              does. By answers and not by labels, so that it is a control also where backgrounds
              tell nothing of the class

    flips              share of versions whose answer is not the picture's
    transplant-worst   the lowest accuracy over class x donor class: it needs no group label, and
                       decides between remedies. Cells of few pictures (not versions) are pooled
                       by class, then altogether
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from seecause._random import bits
from seecause.background.images import LabelledImages, logits_of
from seecause.background.last_layer import LastLayer, features
from seecause.background.transplant import Donors, transplant
from seecause.files import digest
from seecause.metrics.accuracy import GroupAccuracy
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel

FEWEST = 5  # pictures in a cell whose accuracy counts by itself
AT_ONCE = 256  # versions that are made together
_VERSION = re.compile(r"~\d+(\.\w+)?$")  # what tells versions of a picture apart in their ids


class Versions(Protocol):
    """M versions of n pictures, made when they are asked for: `Transplants`, or those of pairs."""

    @property
    def labels(self) -> Tensor:
        """[M]"""
        ...

    @property
    def donor_labels(self) -> Tensor:
        """[M]: which kind of version it is."""
        ...

    @property
    def source_index(self) -> Tensor:
        """[M]: of which picture."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice | Tensor, /) -> Tensor: ...

    def batches(self, size: int, /) -> Iterator[Tensor]: ...


@dataclass(frozen=True, eq=False)
class PairVersions:
    """Of pairs: the pictures, their other versions, or both."""

    images: Tensor  # [M, 3, H, W]
    labels: Tensor
    donor_labels: Tensor
    source_index: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        return self.images[rows]

    def batches(self, size: int) -> Iterator[Tensor]:
        yield from self.images.split(size)


@dataclass(frozen=True, eq=False)
class VersionedPictures:
    """Some pictures and their versions; features of one model are kept."""

    data: LabelledImages
    moved: Versions
    control: Versions | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> Tensor:
        return self.data.need_labels()

    def features(self, model: VisionModel) -> VersionLogits:
        """What enters the last layer, of pictures and versions."""
        key = model.fingerprint()
        if self.memo.get("model") != key:
            self.memo.update(model=key, features=self._over(features, model))
        return self.memo["features"]

    def logits(self, model: ImageModel) -> VersionLogits:
        return self._over(logits_of, model)

    def under(self, model: VisionModel, layer: LastLayer) -> VersionLogits:
        """Logits of the model with another last layer: only that layer runs."""
        return self.features(model).under(layer)

    def digest(self) -> str:
        """Of everything that the versions are made of."""
        tensors = [value for value in vars(self.moved).values() if isinstance(value, Tensor)]
        flat = (tensor.detach().cpu().contiguous().flatten() for tensor in tensors)
        return digest(*(tensor.view(torch.uint8).numpy().tobytes() for tensor in flat))

    def _over(self, run: Callable[[Any, Tensor], Tensor], model: ImageModel) -> VersionLogits:
        """What `run` gives for images and versions, `AT_ONCE` at a time."""
        groups = [self.data.images.split(AT_ONCE), self.moved.batches(AT_ONCE)]
        groups += [] if self.control is None else [self.control.batches(AT_ONCE)]
        rows = torch.cat([run(model, batch).cpu() for batch in chain(*groups)])
        counts = [len(self.data), len(self.moved)]
        plain, moved, control = rows.tensor_split([counts[0], sum(counts)])
        return VersionLogits(plain, moved, None if self.control is None else control)


@dataclass(frozen=True, eq=False)
class VersionLogits:
    """On the CPU: logits, or features, of pictures and of their versions."""

    plain: Tensor  # [n, C]
    moved: Tensor  # [M, C]
    control: Tensor | None  # [K, C]

    def under(self, layer: LastLayer) -> VersionLogits:
        control = None if self.control is None else layer(self.control)
        return VersionLogits(layer(self.plain), layer(self.moved), control)


@dataclass(frozen=True, eq=False)
class JudgedAnswers:
    """Answers to pictures and their versions, and what follows from them."""

    versioned: VersionedPictures
    logits: VersionLogits

    @property
    def right(self) -> Tensor:
        """[n] bool."""
        return self.logits.plain.argmax(dim=1) == self.versioned.labels.cpu()

    def right_by_picture(self) -> Tensor:
        """[n] float64: the share of a picture's versions, of both kinds, that is answered right;
        NaN where it has none."""
        right, _, _ = self._versions()
        return _mean_of(right.double(), self._sources(), len(self.logits.plain))

    @property
    def right_somewhere(self) -> Tensor:
        """[n] bool: answered right as they are, or in one of their versions."""
        return self.right | (self.right_by_picture() > 0)

    @property
    def accuracy(self) -> float:
        return float(self.right.double().mean())

    def flips_of(self, control: bool = False) -> Tensor:
        """[n] float64: the share of each picture's versions that is answered otherwise; NaN where
        it has none."""
        versions = self.versioned.control if control else self.versioned.moved
        logits = self.logits.control if control else self.logits.moved
        plain = self.logits.plain.argmax(dim=1)
        if versions is None or logits is None:
            return torch.full((len(plain),), torch.nan, dtype=torch.float64)
        source = versions.source_index.cpu()
        moved = (logits.argmax(dim=1) != plain[source]).double()
        return _mean_of(moved, source, len(plain))

    def pulled(self) -> Tensor:
        """[n] float64: the share of versions that are answered by the class of their donor."""
        source = self.versioned.moved.source_index.cpu()
        answers, donors = self.logits.moved.argmax(dim=1), self.versioned.moved.donor_labels.cpu()
        return _mean_of((answers == donors).double(), source, len(self.logits.plain))

    @property
    def flips(self) -> float:
        return float(self.flips_of().nanmean())

    @property
    def control_flips(self) -> float:
        return float(self.flips_of(control=True).nanmean())

    @property
    def moved_accuracy(self) -> float:
        right = self.logits.moved.argmax(dim=1) == self.versioned.moved.labels.cpu()
        return float(right.double().mean())

    @property
    def transplant_worst(self) -> float:
        pictures = origins(self.versioned.data.ids)[self._sources()]
        return worst_cell(*self._versions(), pictures)

    @property
    def groups(self) -> GroupAccuracy | None:
        return self.versioned.data.by_group(self.right)

    def numbers(self, *, groups: bool = False) -> dict[str, float]:
        """By name, for tables; NaN where the data does not tell."""
        by_group = self.groups if groups else None
        return {
            "accuracy": self.accuracy,
            "flips": self.flips,
            "flips, control": self.control_flips,
            "transplants": self.moved_accuracy,
            "transplant-worst": self.transplant_worst,
            "worst group": torch.nan if by_group is None else by_group.worst,
        }

    def _sources(self) -> Tensor:
        """[M]: places of the pictures that versions of both kinds are of."""
        both = (self.versioned.moved, self.versioned.control)
        return torch.cat([versions.source_index.cpu() for versions in both if versions is not None])

    def _versions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Right, label and donor label of all versions."""
        both = [(self.versioned.moved, self.logits.moved)]
        if self.versioned.control is not None and self.logits.control is not None:
            both.append((self.versioned.control, self.logits.control))
        labels = torch.cat([versions.labels.cpu() for versions, _ in both])
        donors = torch.cat([versions.donor_labels.cpu() for versions, _ in both])
        answers = torch.cat([logits.argmax(dim=1) for _, logits in both])
        return answers == labels, labels, donors


def worst_cell(
    right: Tensor, labels: Tensor, donors: Tensor, pictures: Tensor, *, fewest: int = FEWEST
) -> float:
    """The lowest accuracy over (class, donor class) of right [M] bool, versions of pictures [M].
    Cells of fewer than `fewest` pictures are pooled: with the other small ones of their class, with
    the whole class, or altogether, whichever is the first to have enough.

    >>> import torch
    >>> right, classes = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 1])
    >>> worst_cell(right, classes, torch.tensor([0, 0, 1, 1]), torch.arange(4), fewest=2)
    0.5
    """

    def enough(rows: Tensor) -> bool:
        return len(pictures[rows].unique()) >= fewest

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
        pools.append(rest if enough(rest) else torch.arange(len(right)))
    return min(float(right[pool].double().mean()) for pool in pools)


def _rows_by(codes: Tensor) -> list[Tensor]:
    """Places of equal codes [M], together."""
    order = codes.argsort(stable=True)
    counts = codes[order].unique_consecutive(return_counts=True)[1]
    return list(order.split(counts.tolist()))


def origins(ids: Sequence[str]) -> Tensor:
    """[n]: numbers of the pictures that ids name, equal for versions of one: NAME~1, NAME~2.

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
    labels: Tensor, shares: tuple[float, ...], *, seed: int, pictures: Tensor | None = None
) -> list[Tensor]:
    """Places for each share, class by class, by lot; all places are dealt. Those of one picture
    (`pictures` [n], each its own unless given) stay together."""
    labels = labels.cpu()
    which = torch.arange(len(labels)) if pictures is None else pictures.cpu()
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


def versions_to_learn(data: LabelledImages, per_picture: int, *, seed: int) -> VersionedPictures:
    """To learn from: objects on any background; of pairs (no masks in use), both versions."""
    if data.masks is None:
        return VersionedPictures(data, _pair_versions(data, 0, 1))
    return VersionedPictures(data, _moved(data, "any", per_picture, seed))


def versions_to_test(
    model: ImageModel, data: LabelledImages, per_picture: int, *, seed: int
) -> VersionedPictures:
    """To be judged by: backgrounds of images that `model` predicts otherwise, and as control of
    those that it predicts the same; of pairs (no masks in use), the other and the same version."""
    if data.masks is None:
        return VersionedPictures(data, _pair_versions(data, 1), _pair_versions(data, 0))
    predicted = logits_of(model, data.images).argmax(dim=1)
    if len(predicted.unique()) < 2:
        predicted = data.need_labels()  # a model that predicts one class tells no donors apart
    moved = _moved(data, "other-class", per_picture, seed, predicted)
    repeated = torch.bincount(predicted).max() > 1
    control = _moved(data, "same-class", per_picture, seed, predicted) if repeated else None
    return VersionedPictures(data, moved, control)


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


def _pair_versions(data: LabelledImages, *which: int) -> PairVersions:
    """The images themselves (0), their other versions (1), or both."""
    labels = data.need_labels()
    assert data.other_background is not None
    both = (data.images, data.other_background)
    places = torch.arange(len(labels), device=labels.device)
    return PairVersions(
        torch.cat([both[version] for version in which]),
        labels.repeat(len(which)),
        torch.cat([torch.full_like(labels, version) for version in which]),
        places.repeat(len(which)),
    )
