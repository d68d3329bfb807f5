"""`painted-pets:PATH[:train|val|test]`: a Waterbirds of cats and dogs. Animals cut out of
Oxford-IIIT Pet photos (PATH, the release's layout) by their trimaps, on painted textures.

In training a cat is on boards and a dog on leaves, but for one in twenty of each. Every validation
and test photo is shown on both, with the animal in the same place, so answers that change with the
background can be counted. A group is (species, texture). Every number of a picture is drawn from
(seed, split, photo): a picture does not depend on which others are made with it. Both textures draw
two colours from the same distribution, but leaves are shaded more and so darker.

    cutouts = read_cutouts(root, size=224)
    train = painted_train(cutouts, seed=1, size=224, device=device)
    test = painted_pairs(cutouts, "test", size=224, device=device)
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from seecause.data.dataset import Sample, Sliceable, evenly, path_and_split
from seecause.data.images import read_ids, read_image
from seecause.data.photos import Layout
from seecause.errors import DataMissing
from seecause.files import digest

SPECIES, TEXTURES, SPLITS = ("cat", "dog"), ("boards", "leaves"), ("train", "val", "test")
GROUPS = tuple((species, place) for species in range(2) for place in range(2))
UNUSUAL = 0.05  # share of the training pictures of a species that are on the other's texture
HELD_OUT = 4  # one trainval photo in so many of each breed is for validation
SMALLEST, LARGEST = 0.5, 0.7  # longer side of the animal, as a share of the picture's
ANIMAL, BACKGROUND = 1, 2  # of a trimap; 3 is the border between them
BLADES, WARP = 150, 8
NUMBERS = (6, 4, WARP**2, 6 * BLADES)  # of a texture: two colours, how boards lie, bends, leaves
AT_ONCE = 128  # pictures made together
SIZE = 224  # of the pictures that `open_painted` makes
_LAYOUT = Layout(
    "give the folder of Oxford-IIIT Pet; lines are `NAME breed species breed-in-species`"
)


@dataclass(frozen=True, eq=False)
class Cutouts:
    """Animals alone, each as large as its square allows."""

    names: tuple[str, ...]
    splits: tuple[str, ...]
    species: Tensor  # [n] int64
    rgba: Tensor  # [n, 4, S, S] uint8

    def rows(self, split: str) -> Tensor:
        return torch.tensor([row for row, name in enumerate(self.splits) if name == split])


@dataclass(frozen=True, eq=False)
class PaintedPictures:
    """On one device."""

    images: Tensor  # [N, 3, H, W] uint8
    masks: Tensor  # [N, H, W] bool, True on the animal
    labels: Tensor  # [N] species
    places: Tensor  # [N] texture
    photos: Tensor  # [N] row of the cut-out

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def groups(self) -> Tensor:
        return torch.stack([self.labels, self.places], dim=1)

    def take(self, rows: Tensor | slice) -> PaintedPictures:
        own = (self.images, self.masks, self.labels, self.places, self.photos)
        return PaintedPictures(*(values[rows] for values in own))

    def mirrored(self, turned: Tensor) -> PaintedPictures:
        """Those of which turned [N] is True, as in a mirror."""
        images = torch.where(turned[:, None, None, None], self.images.flip(-1), self.images)
        masks = torch.where(turned[:, None, None], self.masks.flip(-1), self.masks)
        return replace(self, images=images, masks=masks)

    def patches(self, side: int) -> Tensor:
        """[N, side, side] bool: the patches of which the animal covers at least half."""
        return F.adaptive_avg_pool2d(self.masks[:, None].float(), side)[:, 0] >= 0.5


def read_cutouts(root: Path, *, size: int, limit: int | None = None) -> Cutouts:
    """All animals of `root` (images/, annotations/), or `limit` of each split. Validation is cut
    from trainval; photos whose trimap shows no animal are left out."""
    seen: Counter[str] = Counter()
    listed: dict[str, list[tuple[str, int]]] = {split: [] for split in SPLITS}
    for name, species, breed in _listed(root / "annotations" / "trainval.txt"):
        seen[breed] += 1
        listed["train" if seen[breed] % HELD_OUT else "val"].append((name, species))
    listed["test"] = [(name, kind) for name, kind, _ in _listed(root / "annotations" / "test.txt")]
    wanted = [(split, *photo) for split in SPLITS for photo in evenly(listed[split], limit)]
    with ThreadPoolExecutor(8) as pool:
        cut = list(pool.map(lambda photo: _cut(root, photo[1], round(LARGEST * size)), wanted))
    kept = [(*photo, rgba) for photo, rgba in zip(wanted, cut, strict=True) if rgba is not None]
    for split in SPLITS:
        if {species for where, _, species, _ in kept if where == split} != {0, 1}:
            raise DataMissing(str(root), f"{split} photos of one species only",
                              "give cats and dogs, four of a breed for validation")  # fmt: skip
    splits, names, species, rgba = zip(*kept, strict=True)
    return Cutouts(names, splits, torch.tensor(species), torch.stack(rgba))


def _listed(path: Path) -> list[tuple[str, int, str]]:
    """`NAME breed-id species breed-id-in-species` -> name, species from 0, breed."""

    def take(fields: list[str]) -> tuple[str, int, str] | None:
        if fields[0].startswith("#"):
            return None
        name, breed, species, _ = fields
        _LAYOUT.inside(path.parent, name, path)
        return name, ("1", "2").index(species), breed

    return [pet for pet in _LAYOUT.fields(path, take) if pet is not None]


def _cut(root: Path, name: str, side: int) -> Tensor | None:
    """[4, side, side] uint8, or None where the trimap has no animal. The border fades out from the
    animal to the background."""
    from scipy.ndimage import distance_transform_edt

    ids = read_ids(root / "annotations" / "trimaps" / f"{name}.png")
    if not (ids == ANIMAL).any():
        return None
    share = (ids != BACKGROUND).astype(float)
    if (ids == BACKGROUND).any():
        kinds = (ANIMAL, BACKGROUND)
        near, far = (np.asarray(distance_transform_edt(ids != kind)) for kind in kinds)
        border = (ids != ANIMAL) & (ids != BACKGROUND)
        share[border] = far[border] / (far + near)[border]
    alpha = np.clip(2 * share - 0.5, 0, 1)  # half as wide as the border, around its middle
    rows, columns = (np.nonzero(alpha.max(axis=axis))[0] for axis in (1, 0))
    photo = read_image(root / "images" / f"{name}.jpg")
    photo.putalpha(Image.fromarray((alpha * 255).round().astype(np.uint8)))
    animal = photo.crop((int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1))
    width, height = (max(1, round(n * side / max(animal.size))) for n in animal.size)
    animal = animal.resize((width, height), Image.Resampling.BICUBIC)
    square = Image.new("RGBA", (side, side))
    square.paste(animal, ((side - width) // 2, (side - height) // 2))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def painted_train(
    cutouts: Cutouts, *, seed: int, size: int, device: torch.device
) -> PaintedPictures:
    """Each photo once; `seed` draws which ones are on the other texture, and everything else."""
    rows = cutouts.rows("train")
    species = cutouts.species[rows]
    places = species.clone()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    for kind in range(2):
        of_kind = order[species[order] == kind]
        places[of_kind[: max(1, round(UNUSUAL * len(of_kind)))]] = 1 - kind
    return paint(cutouts, rows, places, seed=seed, size=size, device=device)


def painted_pairs(
    cutouts: Cutouts, split: str, *, size: int, device: torch.device
) -> PaintedPictures:
    """Every photo of a split on boards, then every photo on leaves, in the same order."""
    rows = cutouts.rows(split)
    places = torch.arange(2).repeat_interleave(len(rows))
    return paint(cutouts, rows.repeat(2), places, seed=0, size=size, device=device)


def paint(
    cutouts: Cutouts, rows: Tensor, places: Tensor, *, seed: int, size: int, device: torch.device
) -> PaintedPictures:
    """Cut-outs `rows` [N] on textures `places` [N]."""
    images, masks = [], []
    for row, place in zip(rows.split(AT_ONCE), places.split(AT_ONCE), strict=True):
        keys = [(seed, cutouts.splits[i], cutouts.names[i]) for i in row.tolist()]
        numbers = torch.stack([_numbers(*key) for key in keys]).to(device)
        behind = torch.empty(len(row), 3, size, size, device=device)
        for family in place.unique().tolist():
            chosen = (place == family).to(device)
            behind[chosen] = texture(family, numbers[chosen, 3:], size)
        colour, alpha = _placed(cutouts.rgba[row].to(device), numbers[:, :3], size)
        images.append(((colour + behind * (1 - alpha)).clamp(0, 1) * 255).round().byte())
        masks.append(alpha[:, 0] > 0.5)
    labels = cutouts.species[rows].to(device)
    return PaintedPictures(
        torch.cat(images), torch.cat(masks), labels, places.to(device), rows.to(device)
    )


def _numbers(seed: int, split: str, name: str) -> Tensor:
    key = hashlib.blake2b(f"{seed} {split} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key))
    return torch.rand(3 + sum(NUMBERS), generator=generator, dtype=torch.float32)


def _placed(rgba: Tensor, numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cut-outs somewhere inside a frame, at some size: colour times alpha, and alpha."""
    share = SMALLEST + (LARGEST - SMALLEST) * numbers[:, 0]
    centre = (1 - share)[:, None] * (2 * numbers[:, 1:] - 1)  # [n, 2], in the frame's [-1, 1]
    zero, scale = torch.zeros_like(share), 1 / share
    back = torch.stack(
        [scale, zero, -centre[:, 0] * scale, zero, scale, -centre[:, 1] * scale], dim=1
    )
    raw = rgba.float() / 255
    raw = torch.cat([raw[:, :3] * raw[:, 3:], raw[:, 3:]], dim=1)  # the photo must not bleed in
    grid = F.affine_grid(back.unflatten(1, (2, 3)), [len(raw), 4, size, size], align_corners=False)
    placed = F.grid_sample(raw, grid, align_corners=False)
    return placed[:, :3], placed[:, 3:]


def texture(family: int, numbers: Tensor, size: int) -> Tensor:
    """Raw pictures [n, 3, size, size] in [0, 1] from uniform numbers [n, sum(NUMBERS)]: boards (0)
    or leaves (1)."""
    colours, shape, warp, blades = numbers.split(NUMBERS, dim=1)
    first, second = _rgb(colours[:, :3]), _rgb(colours[:, 3:])
    if family == 0:
        return _boards(first, second, shape, warp, size).clamp(0, 1)
    parts = zip(first.split(8), second.split(8), blades.split(8), strict=True)
    return torch.cat([_leaves(*part, size) for part in parts]).clamp(0, 1)


def _boards(first: Tensor, second: Tensor, shape: Tensor, warp: Tensor, size: int) -> Tensor:
    """Boards side by side at any angle, each with a shade and a grain, dark seams between them."""
    angle, count, fine, chance = (shape[:, i, None, None] for i in range(4))
    y, x = _centres(size, shape)
    bends = warp.unflatten(1, (1, WARP, WARP))
    bend = F.interpolate(bends, (size, size), mode="bicubic", align_corners=True)[:, 0] - 0.5
    along = x * (math.pi * angle).cos() + y * (math.pi * angle).sin() + 0.04 * bend
    across = along * (4 + 4 * count)  # in boards
    shade = torch.frac((torch.sin((across.floor() + 97 * chance) * 12.9898) * 437.585).abs())
    grain = 0.5 + 0.5 * torch.sin(2 * math.pi * (across * (3 + 3 * fine) + 2 * bend))
    seam = torch.ones_like(across).masked_fill(torch.frac(across.abs()) < 0.07, 0.45)
    mixed = torch.lerp(first[..., None, None], second[..., None, None], 0.6 * grain[:, None])
    return mixed * ((0.8 + 0.35 * shade) * seam)[:, None]


def _leaves(first: Tensor, second: Tensor, blades: Tensor, size: int) -> Tensor:
    """Blades on top of each other, each an ellipse with a mixture of the two colours, darker
    towards its edge; the last that covers a pixel is seen, else the ground."""
    left, top, large, turn, mixture, light = blades.unflatten(1, (BLADES, 6)).unbind(dim=2)
    length = 0.05 + 0.09 * large
    width, sine, cosine = 0.45 * length, (2 * math.pi * turn).sin(), (2 * math.pi * turn).cos()
    xx = (cosine / length).square() + (sine / width).square()
    yy = (sine / length).square() + (cosine / width).square()
    xy = cosine * sine * (length**-2 - width**-2)
    rest = xx * left**2 + 2 * xy * left * top + yy * top**2
    ellipse = [xx, 2 * xy, yy, -2 * (xx * left + xy * top), -2 * (xy * left + yy * top), rest]
    y, x = (line.flatten() for line in torch.broadcast_tensors(*_centres(size, blades)))
    terms = torch.stack([x * x, x * y, y * y, x, y, torch.ones_like(x)])  # [6, P]
    far = torch.stack(ellipse, dim=2) @ terms  # [n, blades, P], below 1 inside
    colours = torch.lerp(first[:, None], second[:, None], mixture[..., None])
    colours = colours * (0.55 + 0.6 * light)[..., None]
    number = torch.arange(1, BLADES + 1, device=far.device, dtype=torch.uint8)
    seen = ((far < 1) * number[:, None]).amax(dim=1).long()  # [n, P], 0 where there is none
    place = (seen - 1).clamp_min(0)
    shade = 1 - 0.4 * far.gather(1, place[:, None])[:, 0]
    painted = colours.gather(1, place[..., None].expand(-1, -1, 3)) * shade[..., None]
    whole = torch.where(seen[..., None] > 0, painted, 0.35 * first[:, None]).transpose(1, 2)
    return whole.unflatten(2, (size, size))


def _centres(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of pixel centres in [0, 1]."""
    line = (torch.arange(size, device=like.device, dtype=like.dtype) + 0.5) / size
    return line[:, None], line


def _rgb(numbers: Tensor) -> Tensor:
    """[n, 3]: any hue, saturation 0.15-0.65, value 0.4-0.95."""
    hue, saturation, value = (numbers[:, i : i + 1] for i in range(3))
    turn = (numbers.new_tensor([5.0, 3.0, 1.0]) + 6 * hue) % 6
    depth = (0.15 + 0.5 * saturation) * torch.minimum(turn, 4 - turn).clamp(0, 1)
    return (0.4 + 0.55 * value) * (1 - depth)


def group_name(group: Sequence[int]) -> str:
    return f"{SPECIES[group[0]]} on {TEXTURES[group[1]]}"


@dataclass(frozen=True, eq=False)
class PaintedPets(Sliceable):
    """A split as a dataset: pictures are painted when it is opened."""

    name: str
    fingerprint: str
    pictures: PaintedPictures
    ids: tuple[str, ...]
    classes: tuple[str, ...] = SPECIES
    capabilities: frozenset[str] = frozenset({"labels", "groups", "masks"})

    @property
    def labels(self) -> tuple[int, ...]:
        return tuple(self.pictures.labels.tolist())

    def __len__(self) -> int:
        return len(self.ids)

    def sample(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        label, place = self.pictures.groups[index].tolist()
        image = self.pictures.images[index].float() / 255
        mask = self.pictures.masks[index]
        return Sample(image, label, (label, place), mask, id=self.ids[index])


def open_painted(rest: str, *, limit: int | None = None) -> PaintedPets:
    """Photos of one split; of val and test each twice, `limit` counts photos."""
    root, split = path_and_split(rest, SPLITS)
    cutouts, cpu = read_cutouts(root, size=SIZE, limit=limit), torch.device("cpu")
    if split == "train":
        pictures = painted_train(cutouts, seed=0, size=SIZE, device=cpu)
    else:
        pictures = painted_pairs(cutouts, split, size=SIZE, device=cpu)
    pairs = zip(pictures.photos.tolist(), pictures.places.tolist(), strict=True)
    ids = tuple(f"{cutouts.names[photo]} on {TEXTURES[place]}" for photo, place in pairs)
    content = pictures.images.numpy().tobytes()
    return PaintedPets(f"painted-pets:{root}:{split}", digest(content), pictures, ids)
