"""A Waterbirds of cats and dogs: animals cut out of Oxford-IIIT Pet photos by their trimaps, pasted
on generated textures (`textures.py`).

In training a cat is on boards and a dog on leaves, but for one in twenty of each. Every validation
and test photo is shown twice, once on each texture, with the animal in the same place: groups are
balanced, and answers that change with the background can be counted. Every number that a picture is
made of is drawn from (seed, split, photo), so a picture does not depend on which others are made
with it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from scripts.shortcut.textures import NUMBERS, texture
from seecause.data.dataset import evenly
from seecause.data.images import read_ids, read_image
from seecause.errors import DataMissing

SPECIES = ("cat", "dog")
GROUPS = tuple(
    (species, place) for species in range(2) for place in range(2)
)  # cat on boards, cat on leaves, dog on boards, dog on leaves
SPLITS = ("train", "val", "test")
UNUSUAL = 0.05  # share of the training pictures of a species that are on the other's texture
HELD_OUT = 4  # one trainval photo in so many of each breed is for validation
SMALLEST, LARGEST = 0.5, 0.7  # longer side of the animal, as a share of the picture's
ANIMAL, BACKGROUND = 1, 2  # of a trimap; 3 is the border between them
_AT_ONCE = 128  # pictures made together
Listed = tuple[str, int, str]  # name, species from 0, breed


@dataclass(frozen=True, eq=False)
class Cutouts:
    """Animals alone, each as large as its square allows."""

    names: tuple[str, ...]
    splits: tuple[str, ...]  # of each
    species: Tensor  # [n] int64
    rgba: Tensor  # [n, 4, S, S] uint8
    without: tuple[str, ...] = ()  # photos that were left out: their trimap has no animal

    def rows(self, split: str) -> Tensor:
        return torch.tensor([row for row, found in enumerate(self.splits) if found == split])

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(
            self.rgba.numpy().tobytes() + repr((self.names, self.splits)).encode()
        ).hexdigest()[:12]


@dataclass(frozen=True, eq=False)
class Pictures:
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

    def take(self, rows: Tensor | slice) -> Pictures:
        return Pictures(
            self.images[rows],
            self.masks[rows],
            self.labels[rows],
            self.places[rows],
            self.photos[rows],
        )

    def mirrored(self, turned: Tensor) -> Pictures:
        """Those of which turned [N] is True, as in a mirror."""
        images = torch.where(turned[:, None, None, None], self.images.flip(-1), self.images)
        return Pictures(
            images,
            torch.where(turned[:, None, None], self.masks.flip(-1), self.masks),
            self.labels,
            self.places,
            self.photos,
        )

    def patches(self, side: int) -> Tensor:
        """[N, side, side] bool: the patches of which the animal covers at least half."""
        return F.adaptive_avg_pool2d(self.masks[:, None].float(), side)[:, 0] >= 0.5


def read_cutouts(root: Path, *, size: int, limit: int | None = None) -> Cutouts:
    """All animals of `root` (images/, annotations/), or `limit` of each split. Validation is cut
    from trainval; test is the release's."""
    trainval = _listed(root / "annotations" / "trainval.txt")
    seen: Counter[str] = Counter()
    parts: dict[str, list[Listed]] = {split: [] for split in SPLITS}
    for one in trainval:
        seen[one[2]] += 1
        parts["val" if seen[one[2]] % HELD_OUT == 0 else "train"].append(one)
    parts["test"] = _listed(root / "annotations" / "test.txt")
    wanted = [(split, one) for split in SPLITS for one in evenly(parts[split], limit)]
    with ThreadPoolExecutor(8) as pool:
        cut = list(pool.map(lambda item: _cut(root, item[1][0], round(LARGEST * size)), wanted))
    kept = [
        (split, one, found)
        for (split, one), found in zip(wanted, cut, strict=True)
        if found is not None
    ]
    for split in SPLITS:
        if {one[1] for where, one, _ in kept if where == split} != {0, 1}:
            raise DataMissing(
                f"{root} ({split})",
                "photos of one species only",
                "give photos of cats and dogs in both lists, four of a breed for validation",
            )
    return Cutouts(
        names=tuple(one[0] for _, one, _ in kept),
        splits=tuple(split for split, _, _ in kept),
        species=torch.tensor([one[1] for _, one, _ in kept]),
        rgba=torch.stack([found for _, _, found in kept]),
        without=tuple(one[0] for (_, one), found in zip(wanted, cut, strict=True) if found is None),
    )


def train_pictures(cutouts: Cutouts, *, seed: int, size: int, device: torch.device) -> Pictures:
    """Each photo once. Which ones are on the other texture, and everything else, is drawn by
    `seed`."""
    rows = cutouts.rows("train")
    species = cutouts.species[rows]
    places = species.clone()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    for kind in range(2):
        of_kind = order[species[order] == kind]
        places[of_kind[: _unusual(len(of_kind))]] = 1 - kind
    return compose(cutouts, rows, places, seed=seed, size=size, device=device)


def training_shares(cutouts: Cutouts) -> list[float]:
    """How often training meets each of GROUPS; the same for all seeds."""
    many = torch.bincount(cutouts.species[cutouts.rows("train")], minlength=len(SPECIES)).tolist()
    return [
        (_unusual(many[species]) if place != species else many[species] - _unusual(many[species]))
        / sum(many)
        for species, place in GROUPS
    ]


def _unusual(photos: int) -> int:
    return max(1, round(UNUSUAL * photos))


def both_ways(cutouts: Cutouts, split: str, *, size: int, device: torch.device) -> Pictures:
    """Every photo of a split on boards, then every photo on leaves, in the same order; the same for
    all seeds of training."""
    rows = cutouts.rows(split)
    return compose(
        cutouts,
        rows.repeat(2),
        torch.arange(2).repeat_interleave(len(rows)),
        seed=0,
        size=size,
        device=device,
    )


def compose(
    cutouts: Cutouts, rows: Tensor, places: Tensor, *, seed: int, size: int, device: torch.device
) -> Pictures:
    """Cut-outs `rows` [N] on textures `places` [N]."""
    images, masks = [], []
    for row, place in zip(rows.split(_AT_ONCE), places.split(_AT_ONCE), strict=True):
        numbers = torch.stack(
            [_numbers(seed, cutouts.splits[one], cutouts.names[one]) for one in row.tolist()]
        ).to(device)
        behind = torch.empty(len(row), 3, size, size, device=device)
        for family in place.unique().tolist():
            of_family = (place == family).to(device)
            behind[of_family] = texture(family, numbers[of_family, 3:], size)
        colour, alpha = _placed(cutouts.rgba[row].to(device), numbers[:, :3], size)
        images.append(((colour + behind * (1 - alpha)).clamp(0, 1) * 255).round().byte())
        masks.append(alpha[:, 0] > 0.5)
    return Pictures(
        torch.cat(images),
        torch.cat(masks),
        cutouts.species[rows].to(device),
        places.to(device),
        rows.to(device),
    )


def _placed(rgba: Tensor, numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cut-outs somewhere inside a frame, at some size: colour times alpha [n, 3, size, size], and
    alpha [n, 1, size, size]."""
    share = SMALLEST + (LARGEST - SMALLEST) * numbers[:, 0]
    centre = (1 - share)[:, None] * (2 * numbers[:, 1:] - 1)  # [n, 2], in the frame's [-1, 1]
    zero = torch.zeros_like(share)
    back = torch.stack(
        [1 / share, zero, -centre[:, 0] / share, zero, 1 / share, -centre[:, 1] / share], dim=1
    ).unflatten(1, (2, 3))
    raw = rgba.float() / 255
    raw = torch.cat(
        [raw[:, :3] * raw[:, 3:], raw[:, 3:]], dim=1
    )  # so that colours of the photo's background do not bleed in
    found = F.grid_sample(
        raw,
        F.affine_grid(back, [len(raw), 4, size, size], align_corners=False),
        align_corners=False,
    )
    return found[:, :3], found[:, 3:]


def _numbers(seed: int, split: str, name: str) -> Tensor:
    key = int.from_bytes(hashlib.blake2b(f"{seed} {split} {name}".encode(), digest_size=7).digest())
    return torch.rand(3 + NUMBERS, generator=torch.Generator().manual_seed(key))


def _cut(root: Path, name: str, side: int) -> Tensor | None:
    """[4, side, side] uint8, or None where the trimap has no animal. The border fades out from the
    animal to the background."""
    ids = read_ids(root / "annotations" / "trimaps" / f"{name}.png")
    if not (ids == ANIMAL).any():
        return None
    to_animal, to_background = (
        distance_transform_edt(ids != ANIMAL),
        (distance_transform_edt(ids != BACKGROUND) if (ids == BACKGROUND).any() else np.inf),
    )
    share = np.where(
        ids == ANIMAL,
        1.0,
        np.where(
            ids == BACKGROUND,
            0.0,
            to_background / (to_background + to_animal) if np.ndim(to_background) else 1.0,
        ),
    )
    alpha = np.clip(2 * share - 0.5, 0, 1)  # half as wide as the border, around its middle
    rows, columns = np.nonzero(alpha.max(axis=1))[0], np.nonzero(alpha.max(axis=0))[0]
    photo = read_image(root / "images" / f"{name}.jpg")
    photo.putalpha(Image.fromarray((alpha * 255).round().astype(np.uint8)))
    animal = photo.crop((int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1))
    scale = side / max(animal.size)
    animal = animal.resize(
        (max(1, round(animal.width * scale)), max(1, round(animal.height * scale))),
        Image.Resampling.BICUBIC,
    )
    square = Image.new("RGBA", (side, side))
    square.paste(animal, ((side - animal.width) // 2, (side - animal.height) // 2))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def _listed(path: Path) -> list[Listed]:
    """`NAME breed-id species breed-id-in-species`, species 1 for cats and 2 for dogs."""
    if not path.is_file():
        raise DataMissing(
            str(path),
            "no such file",
            "give the folder that holds pets_small/ with images/ and annotations/",
        )
    lines = [
        line.split()
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    if not lines or not all(len(fields) == 4 and fields[2] in ("1", "2") for fields in lines):
        raise DataMissing(
            str(path),
            "cannot be read",
            "expected lines `NAME breed-id species breed-id-in-species`",
        )
    return [(fields[0], int(fields[2]) - 1, fields[1]) for fields in lines]
