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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from seecause._pieces import Work, in_pieces
from seecause._random import bits
from seecause.background.baselines import LastLayer, features
from seecause.background.images import Pictures, logits_of, logits_piece
from seecause.background.objects import EyeMasks
from seecause.background.transplant import Donors, transplant
from seecause.errors import BadOption
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

    pictures: Pictures
    moved: Versions
    control: Versions | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> Tensor:
        assert self.pictures.labels is not None
        return self.pictures.labels

    def features(self, model: VisionModel) -> VersionLogits:
        """What enters the last layer, of pictures and versions."""
        key = model.fingerprint()
        if self.memo.get("model") != key:
            self.memo.update(model=key, features=self._over(_features_piece, model))
        return self.memo["features"]

    def logits(self, model: ImageModel) -> VersionLogits:
        return self._over(logits_piece, model)

    def under(self, model: VisionModel, layer: LastLayer) -> VersionLogits:
        """Logits of the model with another last layer: only that layer runs."""
        return self.features(model).under(layer)

    def _over(self, work: Work, model: ImageModel) -> VersionLogits:
        """What `work` gives for pictures and versions, `AT_ONCE` at a time."""
        groups = [self.pictures.images.split(AT_ONCE), self.moved.batches(AT_ONCE)]
        groups += [] if self.control is None else [self.control.batches(AT_ONCE)]
        pieces = ({"images": batch} for batch in chain(*groups))
        rows = torch.cat([next(iter(p.values())) for p in in_pieces(work, model, pieces)])
        counts = [len(self.pictures), len(self.moved)]
        plain, moved, control = rows.tensor_split([counts[0], sum(counts)])
        return VersionLogits(plain, moved, None if self.control is None else control)


def _features_piece(model: VisionModel, images: Tensor) -> dict[str, Tensor]:
    return {"features": features(model, images.to(model.device, model.dtype))}


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
        pictures = origins(self.versioned.pictures.ids)[self._sources()]
        return worst_cell(*self._versions(), pictures)

    @property
    def groups(self) -> GroupAccuracy | None:
        return self.versioned.pictures.by_group(self.right)

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


@dataclass(frozen=True, eq=False)
class Material:
    """Labelled pictures with masks of their objects; or with another version of each."""

    pictures: Pictures
    masks: EyeMasks | None  # None: pairs

    def take(self, rows: Tensor) -> Material:
        pictures = self.pictures.take(rows)
        if self.masks is None:
            return Material(pictures, None)
        here = rows.to(self.masks.masks.device)
        fine, overlap = self.masks.fine, self.masks.overlap
        masks = replace(
            self.masks,
            masks=self.masks.masks[here],
            confidence=self.masks.confidence[here.to(self.masks.confidence.device)],
            fine=None if fine is None else fine[here],
            overlap=None if overlap is None else overlap[rows],
        )
        return Material(pictures, masks)

    def lesson(self, per_picture: int, *, seed: int) -> VersionedPictures:
        """To learn from: objects on any background; of pairs, both versions."""
        if self.masks is None:
            return VersionedPictures(self.pictures, self._pair_versions(0, 1))
        return VersionedPictures(self.pictures, self._moved("any", per_picture, seed))

    def test(self, model: ImageModel, per_picture: int, *, seed: int) -> VersionedPictures:
        """To be judged by: backgrounds of pictures that `model` answers otherwise, and as control
        of those that it answers the same."""
        if self.masks is None:
            return VersionedPictures(self.pictures, self._pair_versions(1), self._pair_versions(0))
        answers = logits_of(model, self.pictures.images).argmax(dim=1)
        if len(answers.unique()) < 2:
            answers = self._labels  # a model that says one thing only tells no donors apart
        moved = self._moved("other-class", per_picture, seed, answers)
        repeated = torch.bincount(answers).max() > 1
        control = self._moved("same-class", per_picture, seed, answers) if repeated else None
        return VersionedPictures(self.pictures, moved, control)

    @property
    def _labels(self) -> Tensor:
        if self.pictures.labels is None:
            raise BadOption("data", self.pictures.name, "data with labels")
        return self.pictures.labels

    def _moved(
        self, donors: Donors, per_picture: int, seed: int, answers: Tensor | None = None
    ) -> Versions:
        """Transplants by classes, or by the answers of a model [n]."""
        assert self.masks is not None
        labels = self._labels
        kinds = labels if answers is None else answers
        moved = transplant(
            self.pictures.images,
            self.masks.cut,
            kinds,
            per_picture=per_picture,
            donors=donors,
            seed=seed,
        )
        source, donor = moved.source_index, moved.donor_index
        return replace(moved, labels=labels[source], donor_labels=labels[donor])

    def _pair_versions(self, *which: int) -> PairVersions:
        """The pictures themselves (0), their other versions (1), or both."""
        swapped, labels = self.pictures.swapped, self._labels
        assert swapped is not None
        both = (self.pictures.images, swapped.background)
        places = torch.arange(len(labels), device=labels.device)
        return PairVersions(
            torch.cat([both[version] for version in which]),
            labels.repeat(len(which)),
            torch.cat([torch.full_like(labels, version) for version in which]),
            places.repeat(len(which)),
        )
