"""Transplants: the object of picture i on the background of picture j.

    patch p of the result = i's patch p                 where i's mask is
                            j's patch p                 elsewhere, outside j's hole
                            another patch of j          in j's hole: j's mask grown by one patch

What fills a hole is drawn from the patches of j outside it. With masks as fine as the pictures the
object is cut by pixels, with soft edges. Every draw is a hash of (seed, i, number of the
transplant): the first four of eight transplants are the four that `per_picture=4` gives.

Pictures may be raw or normalised: copying and mixing commute with normalisation. They are made when
they are asked for, so eight for each picture take no more memory than one batch of them.

Pairs are two versions of a picture that should be answered alike: from data with a second version
(`pairs:WITH:WITHOUT`, `sc.data.paired`, Critters by their exact swaps), or from transplants, each
picture beside itself on another background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause._random import bits, lattice
from seecause.background.images import LabelledImages, logits_of, on_pixels, read_images
from seecause.data.dataset import Dataset
from seecause.errors import BadOption
from seecause.models.base import ImageModel

log = logging.getLogger(__name__)

Donors = Literal["any", "same-class", "other-class"]
SOFT = 1 / 150  # deviation of a soft edge, as a share of the picture's longer side
FEWEST = 12  # patches a side that holes are filled by, where masks are by pixels
_DRAW, _FILL = 1, 2  # what a hash is for


@dataclass(frozen=True, eq=False)
class Transplants:
    """M pictures that `take`, `batches` and indexing make from those they are cut from."""

    images: Tensor  # [n, 3, H, W] the whole pictures
    shapes: Tensor  # [n, H, W] or [n, gh, gw] bool: what of a picture is its object
    holes: Tensor  # [n, gh, gw] bool: what of a background is filled
    labels: Tensor  # [M] of the object
    donor_labels: Tensor  # [M] of the picture whose background it is
    source_index: Tensor  # [M] i
    donor_index: Tensor  # [M] j
    number: Tensor  # [M] which of i's transplants
    seed: int = 0
    left_out: tuple[int, ...] = ()  # pictures of which no transplant can be made

    def __len__(self) -> int:
        return len(self.source_index)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Some of the pictures, [m, 3, H, W], where the whole ones are."""
        return _render(self.take(rows))

    def take(self, rows: slice | Tensor) -> Transplants:
        """Some of them, not made yet."""
        names = ("labels", "donor_labels", "source_index", "donor_index", "number")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def batches(self, size: int) -> Iterator[Tensor]:
        """All pictures, `size` at a time and in order."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def sheet(self, count: int = 6, *, raw: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`count` rows of object, background and transplant beside each other, [3, h, w] in [0, 1]:
        bad cuts are seen at a glance. `raw` undoes normalisation (`model.preprocess.raw`)."""
        rows = torch.linspace(0, len(self) - 1, min(count, len(self))).round().long()
        chosen = self.take(rows)
        parts = (self.images[chosen.source_index], self.images[chosen.donor_index], _render(chosen))
        pictures = torch.stack([part.float().cpu() for part in parts], dim=1)  # [c, 3, 3, H, W]
        pictures = pictures.flatten(0, 1)
        pictures = (pictures if raw is None else raw(pictures)).clamp(0, 1)
        edge = max(2, pictures.shape[-1] // 48)
        framed = F.pad(pictures, [edge] * 4, value=1.0).unflatten(0, (len(rows), 3))
        return framed.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)


def transplant(
    images: Tensor,
    masks: Tensor,
    labels: Tensor,
    *,
    per_picture: int = 8,
    donors: Donors = "any",
    seed: int = 0,
) -> Transplants:
    """Objects of images [n, 3, H, W] on each other's backgrounds, `per_picture` of each.

    `masks` [n, gh, gw] (bool) on a grid of patches, or [n, H, W] by pixels; `labels` [n]. A picture
    without an object, or without a background, gives no transplant of its own and is listed in
    `left_out`; one without a background gives none to others either. `donors="same-class"` is the
    control: what transplanting alone does, with the class's own backgrounds.

    >>> import torch
    >>> images, masks = torch.rand(4, 3, 8, 8), torch.zeros(4, 4, 4, dtype=torch.bool)
    >>> masks[:, 1:3, 1:3] = True
    >>> moved = transplant(images, masks, torch.tensor([0, 0, 1, 1]), per_picture=2)
    >>> len(moved), moved[:3].shape
    (8, torch.Size([3, 3, 8, 8]))
    """
    _check(images, masks, labels, per_picture, donors, seed)
    masks, labels = masks.to(images.device), labels.to(images.device)
    holes = _holes(masks, images)
    objects = masks.flatten(1).any(dim=1) & ~masks.flatten(1).all(dim=1)
    grounds = ~holes.flatten(1).all(dim=1)
    # drawn on the CPU: a picture at a time would wait for the device a thousand times
    drawn_by = (labels.cpu(), objects.cpu(), grounds.cpu())
    drawn = _draw(*drawn_by, per_picture, donors, seed)
    source, donor, number = (part.to(images.device) for part in drawn)
    if len(source) == 0:
        raise BadOption(
            "masks",
            f"{int(objects.sum())} of {len(masks)} with an object and a background",
            "at least two such pictures; in a mask 0 is background, all else object",
        )
    moved = torch.zeros_like(objects).index_fill(0, source, True)
    left_out = tuple((~moved).nonzero()[:, 0].tolist())
    if left_out:
        log.warning(
            "%d of %d pictures are not transplanted (donors: %s): no object, no background,"
            " or no donor",
            *(len(left_out), len(images), donors),
        )
    return Transplants(
        images, masks, holes, labels[source], labels[donor], source, donor, number, seed, left_out
    )


@dataclass(frozen=True, eq=False)
class Pairs:
    """n pictures and their other versions, normalised, on the model's device."""

    name: str
    ids: tuple[str, ...]
    images: Tensor  # [n, 3, H, W]
    others: Tensor  # [n, 3, H, W], to be answered alike
    labels: Tensor | None = None  # [n] classes of the model

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: Tensor) -> Pairs:
        """Some of them, by place."""
        here = rows.to(self.images.device)
        return replace(
            self,
            ids=tuple(self.ids[place] for place in rows.tolist()),
            images=self.images[here],
            others=self.others[here],
            labels=None if self.labels is None else self.labels[here],
        )

    @property
    def labelled(self) -> LabelledImages:
        """As what audits and repairs read: images whose other versions are known."""
        return LabelledImages(
            self.images, self.labels, name=self.name, ids=self.ids, other_background=self.others
        )

    def flips(self, model: ImageModel) -> Tensor:
        """[n] bool on the CPU: another version, another answer."""
        first, second = (logits_of(model, x).argmax(dim=1) for x in (self.images, self.others))
        return (first != second).cpu()


def pairs_of(
    model: ImageModel,
    data: Dataset | LabelledImages | Pairs,
    *,
    progress: Callable[[int], None] | None = None,
) -> Pairs:
    """Pairs of data that has a second version of each picture."""
    if isinstance(data, Pairs):
        return data
    pictures = data
    if not isinstance(pictures, LabelledImages):
        pictures = read_images(model, pictures, progress=progress)
    if pictures.other_background is None:
        raise BadOption(
            "data",
            pictures.name,
            "two versions of each picture: pairs:WITH:WITHOUT, sc.data.paired(data, change), or"
            " masks or an eye to transplant by",
        )
    return Pairs(
        pictures.name, pictures.ids, pictures.images, pictures.other_background, pictures.labels
    )


def transplant_pairs(moved: Transplants, *, name: str = "transplants") -> Pairs:
    """Each picture beside its transplants: one pair for each of them, in their order. Ids tell
    which pairs are of one picture, so that a repair does not tear these apart."""
    if len(moved) == 0:
        raise BadOption("transplants", "none", "at least one")
    places = zip(moved.source_index.tolist(), moved.number.tolist(), strict=True)
    ids = tuple(f"{source}~{number}" for source, number in places)
    others = torch.cat(list(moved.batches(64)))
    return Pairs(name, ids, moved.images[moved.source_index], others, moved.labels)


def _check(
    images: Tensor, masks: Tensor, labels: Tensor, per_picture: int, donors: str, seed: int
) -> None:
    if donors not in get_args(Donors):
        raise BadOption("donors", donors, f"one of {', '.join(get_args(Donors))}")
    if not isinstance(per_picture, int) or per_picture < 1:
        raise BadOption("per_picture", per_picture, "at least one transplant of each picture")
    if not isinstance(seed, int) or seed < 0:
        raise BadOption("seed", seed, "a whole number from 0")
    if images.ndim != 4 or not images.is_floating_point():
        raise BadOption("images", list(images.shape), "pictures [n, 3, H, W] of decimal numbers")
    height, width = images.shape[-2:]
    if not bool(torch.isfinite(images).all()):
        raise BadOption("images", "NaN or infinity among pixels", "finite pixels")
    divides = masks.ndim == 3 and height % masks.shape[1] == 0 and width % masks.shape[2] == 0
    if masks.dtype != torch.bool or len(masks) != len(images) or not divides:
        raise BadOption(
            "masks",
            f"{str(masks.dtype).removeprefix('torch.')} {list(masks.shape)}",
            f"bool [{len(images)}, rows, columns] on a grid of patches of the {height} x {width}"
            f" pixels, or as fine as them: [{len(images)}, {height}, {width}]",
        )
    if labels.shape != (len(images),):
        raise BadOption("labels", list(labels.shape), f"one for each picture, [{len(images)}]")
    if donors != "same-class" and len(labels.unique()) < 2:
        raise BadOption(
            "labels",
            f"one class only ({int(labels[0])})" if len(labels) else "none",
            "pictures of two classes at least: backgrounds of one class tell nothing apart;"
            " donors='same-class' is possible",
        )


def _holes(masks: Tensor, images: Tensor) -> Tensor:
    """What is filled of each background, [n, gh, gw]: the mask grown by one patch; the mask alone
    where nothing would be left. Of fine masks every patch that they touch."""
    if masks.shape[1:] == images.shape[-2:]:
        grid = (masks.shape[1] // _patch(masks.shape[1]), masks.shape[2] // _patch(masks.shape[2]))
        share = F.adaptive_avg_pool2d(masks[:, None].float(), grid)
        half, touched = share >= 0.5, share[:, 0] > 0
    else:
        half, touched = masks[:, None], masks
    grown = (F.max_pool2d(half.float(), 3, stride=1, padding=1)[:, 0] > 0) | touched
    full = grown.flatten(1).all(dim=1)
    return torch.where(full[:, None, None], touched, grown)


def _patch(side: int) -> int:
    """The largest patch that gives at least FEWEST patches a side."""
    return max(size for size in range(1, max(2, side // FEWEST + 1)) if side % size == 0)


def _draw(
    labels: Tensor, objects: Tensor, grounds: Tensor, per_picture: int, donors: Donors, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Source, donor and number of every transplant, [M] each, picture by picture."""
    pools = {kind: _pool(labels, grounds, kind, donors) for kind in labels.unique().tolist()}
    numbers = torch.arange(per_picture, device=labels.device)
    sources, chosen = list[Tensor](), list[Tensor]()
    for place in objects.nonzero()[:, 0].tolist():
        pool = pools[int(labels[place])]
        pool = pool[pool != place]
        if len(pool) == 0:
            continue
        chance = bits(place + (numbers << 32), 4 * seed + _DRAW)
        sources.append(torch.full_like(numbers, place))
        chosen.append(pool[chance % len(pool)])
    if not sources:
        empty = numbers[:0]
        return empty, empty, empty
    return torch.cat(sources), torch.cat(chosen), numbers.repeat(len(sources))


def _pool(labels: Tensor, grounds: Tensor, kind: int, donors: Donors) -> Tensor:
    """Places of the pictures that lend their background to class `kind`."""
    allowed = {
        "any": torch.ones_like(grounds),
        "same-class": labels == kind,
        "other-class": labels != kind,
    }
    return (grounds & allowed[donors]).nonzero()[:, 0]


def _render(rows: Transplants) -> Tensor:
    """The pictures of `rows`, [m, 3, H, W]."""
    source, donor = rows.source_index, rows.donor_index
    background = _filled(rows.images[donor], rows.holes[donor], rows.seed, source, rows.number)
    pictures, shapes = rows.images[source], rows.shapes[source][:, None]
    height, width = pictures.shape[-2:]
    if shapes.shape[-2:] == (height, width):
        share = _softened(shapes.to(pictures.dtype))
        return share * pictures + (1 - share) * background
    return torch.where(on_pixels(shapes, (height, width)), pictures, background)


def _filled(pictures: Tensor, holes: Tensor, seed: int, source: Tensor, number: Tensor) -> Tensor:
    """Backgrounds [m, 3, H, W] whose holes [m, gh, gw] are filled with other patches of theirs."""
    (rows, columns), height, width = holes.shape[1:], *pictures.shape[-2:]
    high, wide = height // rows, width // columns
    hole = holes.flatten(1)  # [m, P]
    free_first = hole.byte().argsort(dim=1, stable=True)
    free = (~hole).sum(dim=1, keepdim=True)
    chance = lattice(source + (number << 32), 4 * seed + _FILL, rows, columns).flatten(1)
    rank = ((chance * 2**24).long() * free) >> 24  # whole numbers: nothing rounds up to `free`
    drawn = free_first.gather(1, rank)
    own = torch.arange(rows * columns, device=holes.device)
    place = torch.where(hole, drawn, own)  # [m, P]
    patches = F.unfold(pictures, (high, wide), stride=(high, wide))  # [m, 3 * high * wide, P]
    patches = patches.gather(2, place[:, None].expand(-1, patches.shape[1], -1))
    return F.fold(patches, (height, width), (high, wide), stride=(high, wide))


def _softened(shapes: Tensor) -> Tensor:
    """Masks [m, 1, H, W] with edges that fade over a few pixels."""
    from torchvision.transforms.functional import gaussian_blur

    sigma = max(0.5, SOFT * max(shapes.shape[-2:]))
    return gaussian_blur(shapes, [2 * round(3 * sigma) + 1] * 2, [sigma] * 2)
