"""Transplants: the object of image i on the background of image j.

    patch p of the result = i's patch p                 inside i's mask
                            j's patch p                 elsewhere, outside j's hole
                            another patch of j          in j's hole: j's mask grown by one patch

The patches that fill a hole are drawn from those of j outside it. If masks are as fine as the
images, the object is cut by pixels, with soft edges. Every draw is a hash of (seed, i, number of
the transplant): the first four of eight transplants are the four of `per_picture=4`.

Images may be raw or normalised, because copying and mixing commute with normalisation. Transplants
are rendered when they are indexed, so eight for each image take the memory of one batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause._random import bits, lattice
from seecause.background.images import LabelledImages, on_pixels
from seecause.errors import BadOption
from seecause.options import Count, Seed, checked

log = logging.getLogger(__name__)

Donors = Literal["any", "same-class", "other-class"]
SOFT = 1 / 150  # deviation of a soft edge, as a share of the image's longer side
FEWEST = 12  # patches per side by which holes are filled, if masks are by pixels
_DRAW, _FILL = 1, 2  # purposes of a hash


@dataclass(frozen=True, eq=False)
class Versions:
    """M versions of images, rendered when they are indexed: objects on other backgrounds, or whole
    images (`shapes` is None)."""

    images: Tensor  # [n, 3, H, W] that versions are made of
    labels: Tensor  # [M] of the object
    donor_labels: Tensor  # [M] of the image whose background it is
    source_index: Tensor  # [M] image that the version belongs to
    donor_index: Tensor  # [M] image whose background it has, or that it is
    shapes: Tensor | None = None  # [n, H, W] or [n, gh, gw] bool: objects
    holes: Tensor | None = None  # [n, gh, gw] bool: what is filled in a background
    number: Tensor | None = None  # [M] which of the image's transplants
    seed: int = 0
    skipped: tuple[int, ...] = ()  # images of which no transplant can be made

    def __len__(self) -> int:
        return len(self.source_index)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Some of the versions, rendered, [m, 3, H, W]."""
        some = self.take(rows)
        if some.shapes is None or some.holes is None or some.number is None:
            return some.images[some.donor_index]
        source, donor = some.source_index, some.donor_index
        holes = some.holes[donor]
        background = _filled(some.images[donor], holes, some.seed, source, some.number)
        images, shapes = some.images[source], some.shapes[source][:, None]
        size = (images.shape[-2], images.shape[-1])
        if shapes.shape[-2:] == size:
            share = _softened(shapes.to(images.dtype))
            return share * images + (1 - share) * background
        return torch.where(on_pixels(shapes, size), images, background)

    def take(self, rows: slice | Tensor) -> Versions:
        """Some of the versions, not rendered."""
        names = ["labels", "donor_labels", "source_index", "donor_index"]
        names += [] if self.number is None else ["number"]
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def batches(self, size: int) -> Iterator[Tensor]:
        """All versions, rendered, `size` at a time and in order."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def pairs(self, name: str = "transplants") -> LabelledImages:
        """Each image beside its versions: one pair for each version, in order. Ids end in ~NUMBER,
        so that a repair keeps pairs of one image together."""
        return LabelledImages(
            self.images[self.source_index],
            self.labels,
            name=name,
            ids=tuple(f"{source}~{n}" for n, source in enumerate(self.source_index.tolist())),
            other_background=torch.cat(list(self.batches(64))),
        )

    def sheet(self, count: int = 6, *, raw: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`count` rows of object, background and version side by side, [3, h, w] in [0, 1], to
        check the cuts. `raw` undoes normalisation (`model.preprocess.raw`)."""
        rows = torch.linspace(0, len(self) - 1, min(count, len(self))).round().long()
        some = self.take(rows)
        parts = (self.images[some.source_index], self.images[some.donor_index], self[rows])
        images = torch.stack([part.float().cpu() for part in parts], dim=1)  # [c, 3, 3, H, W]
        images = images.flatten(0, 1)
        images = (images if raw is None else raw(images)).clamp(0, 1)
        edge = max(2, images.shape[-1] // 48)
        framed = F.pad(images, [edge] * 4, value=1.0).unflatten(0, (len(rows), 3))
        return framed.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)


@checked
def transplant(
    images: Tensor,
    masks: Tensor,
    labels: Tensor,
    *,
    per_picture: Count = 8,
    donors: Donors = "any",
    seed: Seed = 0,
) -> Versions:
    """Put objects of images on each other's backgrounds.

    Args:
        images: [n, 3, H, W].
        masks: Object masks, bool: [n, gh, gw] on a grid of patches, or [n, H, W] by pixels.
        labels: [n] classes.
        per_picture: Transplants of each image.
        donors: Classes that lend backgrounds. "same-class" is a control: it shows the effect of
            cutting alone.
        seed: Of the draws.

    Returns:
        `Versions`. An image without an object or without a background gives no transplant and is
        listed in `skipped`; one without a background lends none to others.

    Example:
        >>> import torch
        >>> images, masks = torch.rand(4, 3, 8, 8), torch.zeros(4, 4, 4, dtype=torch.bool)
        >>> masks[:, 1:3, 1:3] = True
        >>> moved = transplant(images, masks, torch.tensor([0, 0, 1, 1]), per_picture=2)
        >>> len(moved), moved[:3].shape
        (8, torch.Size([3, 3, 8, 8]))
    """
    _check(images, masks, labels, donors)
    masks, labels = masks.to(images.device), labels.to(images.device)
    holes = _holes(masks, images)
    objects = masks.flatten(1).any(dim=1) & ~masks.flatten(1).all(dim=1)
    grounds = ~holes.flatten(1).all(dim=1)
    # drawn on the CPU: one image at a time would wait for the device a thousand times
    drawn = _draw(labels.cpu(), objects.cpu(), grounds.cpu(), per_picture, donors, seed)
    source, donor, number = (part.to(images.device) for part in drawn)
    if len(source) == 0:
        raise BadOption(
            "masks",
            f"{int(objects.sum())} of {len(masks)} with an object and a background",
            "at least two such images; in a mask 0 is background, all else object",
        )
    moved = torch.zeros_like(objects).index_fill(0, source, True)
    skipped = tuple((~moved).nonzero()[:, 0].tolist())
    if skipped:
        log.warning(
            "%d of %d images are not transplanted (donors: %s): no object, no background,"
            " or no donor",
            *(len(skipped), len(images), donors),
        )
    return Versions(
        images, labels[source], labels[donor], source, donor, masks, holes, number, seed, skipped
    )


def _check(images: Tensor, masks: Tensor, labels: Tensor, donors: str) -> None:
    if images.ndim != 4 or not images.is_floating_point() or not bool(images.isfinite().all()):
        got = f"{images.dtype} {list(images.shape)}"
        raise BadOption("images", got, "finite floating-point images [n, 3, H, W]")
    height, width = images.shape[-2:]
    divides = masks.ndim == 3 and height % masks.shape[1] == 0 and width % masks.shape[2] == 0
    if masks.dtype != torch.bool or len(masks) != len(images) or not divides:
        raise BadOption(
            "masks",
            f"{masks.dtype} {list(masks.shape)}",
            f"bool [{len(images)}, rows, columns] on a grid of patches of the {height} x {width}"
            f" pixels, or as fine as them: [{len(images)}, {height}, {width}]",
        )
    if labels.shape != (len(images),):
        raise BadOption("labels", list(labels.shape), f"one for each image, [{len(images)}]")
    if donors != "same-class" and len(labels.unique()) < 2:
        expected = "images of two classes at least, or donors='same-class'"
        raise BadOption("labels", f"{len(labels.unique())} classes", expected)


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
    """Source, donor and number of every transplant, [M] each, image by image."""
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
    """Places of the images that lend their background to class `kind`."""
    allowed = {
        "any": torch.ones_like(grounds),
        "same-class": labels == kind,
        "other-class": labels != kind,
    }
    return (grounds & allowed[donors]).nonzero()[:, 0]


def _filled(images: Tensor, holes: Tensor, seed: int, source: Tensor, number: Tensor) -> Tensor:
    """Backgrounds [m, 3, H, W] whose holes [m, gh, gw] are filled with other patches of theirs."""
    (rows, columns), height, width = holes.shape[1:], *images.shape[-2:]
    high, wide = height // rows, width // columns
    hole = holes.flatten(1)  # [m, P]
    free_first = hole.byte().argsort(dim=1, stable=True)
    free = (~hole).sum(dim=1, keepdim=True)
    chance = lattice(source + (number << 32), 4 * seed + _FILL, rows, columns).flatten(1)
    rank = ((chance * 2**24).long() * free) >> 24  # whole numbers: nothing rounds up to `free`
    drawn = free_first.gather(1, rank)
    own = torch.arange(rows * columns, device=holes.device)
    place = torch.where(hole, drawn, own)  # [m, P]
    patches = F.unfold(images, (high, wide), stride=(high, wide))  # [m, 3 * high * wide, P]
    patches = patches.gather(2, place[:, None].expand(-1, patches.shape[1], -1))
    return F.fold(patches, (height, width), (high, wide), stride=(high, wide))


def _softened(shapes: Tensor) -> Tensor:
    """Masks [m, 1, H, W] with edges that fade over a few pixels."""
    from torchvision.transforms.functional import gaussian_blur

    sigma = max(0.5, SOFT * max(shapes.shape[-2:]))
    return gaussian_blur(shapes, [2 * round(3 * sigma) + 1] * 2, [sigma] * 2)
