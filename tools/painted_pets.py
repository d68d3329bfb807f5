"""Painted pets: a Waterbirds of cats and dogs. Animals cut out of Oxford-IIIT Pet photos by their
trimaps, on generated textures.

    python -m tools.painted_pets PETS OUT                  # OUT/train, OUT/val and OUT/test
    seecause repair --data folder:OUT/train --test folder:OUT/test --model ...

PETS is the release's folder. Each split is a folder for `folder:PATH`: images in class folders,
`masks` with the same names, and `groups.csv` with the texture of each image. In training a cat is
on boards and a dog on leaves, except for a share of `--unusual` of each. Every validation and test
photo is shown on both, with the animal in the same place, so that predictions which change with the
background can be counted. Every number of an image is drawn from (seed, split, photo): an image
does not depend on which others are made with it. Both textures draw two colours from the same
distribution, but leaves are shaded more and so darker.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from seecause.data.dataset import read_ids, read_image, to_pil

SPECIES, TEXTURES, SPLITS = ("cat", "dog"), ("boards", "leaves"), ("train", "val", "test")
UNUSUAL = 0.05  # share of the training images of a species that are on the other's texture
HELD_OUT = 4  # one trainval photo in so many of each breed is for validation
SMALLEST, LARGEST = 0.5, 0.7  # longer side of the animal, as a share of the image's
ANIMAL, BACKGROUND = 1, 2  # of a trimap; 3 is the border between them
BLADES, WARP = 150, 8
NUMBERS = (6, 4, WARP**2, 6 * BLADES)  # of a texture: two colours, how boards lie, bends, leaves
AT_ONCE = 128  # images made together
SIZE = 224


def main(arguments: list[str] | None = None) -> None:
    """Write all splits."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pets", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--unusual", type=float, default=UNUSUAL)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    for split in SPLITS:
        painted = painted_split(
            asked.pets, split, size=asked.size, unusual=asked.unusual, seed=asked.seed
        )
        write_folder(painted, asked.out / split)


class Painted(NamedTuple):
    """The images of one split."""

    images: Tensor  # [N, 3, H, W] uint8
    masks: Tensor  # [N, H, W] bool, True on the animal
    groups: tuple[tuple[int, int], ...]  # species, texture
    ids: tuple[str, ...]


def write_folder(painted: Painted, folder: Path) -> None:
    """As `folder:PATH` reads it."""
    rows = [("file", "background")]
    for image, mask, (species, place), id in zip(*painted, strict=True):
        name = f"{SPECIES[species]}/{id}.png"
        for file in (folder / name, folder / "masks" / name):
            file.parent.mkdir(parents=True, exist_ok=True)
        to_pil(image / 255).save(folder / name)
        Image.fromarray(mask.numpy()).save(folder / "masks" / name)
        rows.append((name, TEXTURES[place]))
    with (folder / "groups.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def painted_split(
    root: Path, split: str, *, size: int = SIZE, unusual: float = UNUSUAL, seed: int = 0
) -> Painted:
    """Images of one split; each photo of val and test twice. `seed` draws which training photos are
    on the other texture, and everything else of them."""
    names, species, rgba = read_cutouts(root, split, size=size)
    rows = torch.arange(len(names))
    if split == "train":
        places = species.clone()
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        for kind in range(2):
            of_kind = order[species[order] == kind]
            places[of_kind[: round(unusual * len(of_kind))]] = 1 - kind
    else:
        places, rows, seed = torch.arange(2).repeat_interleave(len(rows)), rows.repeat(2), 0
    keys = [f"{seed} {split} {names[row]}" for row in rows.tolist()]
    images, masks = paint(rgba, rows, places, keys, size=size)
    groups = tuple(zip(species[rows].tolist(), places.tolist(), strict=True))
    ids = tuple(f"{names[row]} on {TEXTURES[p]}" for row, p in zip(rows, places, strict=True))
    return Painted(images, masks, groups, ids)


def read_cutouts(root: Path, split: str, *, size: int) -> tuple[list[str], Tensor, Tensor]:
    """Names [n], species [n] and cut-outs [n, 4, S, S] uint8 of a split. Validation is cut from
    trainval; photos whose trimap shows no animal are skipped."""
    wanted, seen = [], Counter[str]()
    listing = root / "annotations" / f"{'test' if split == 'test' else 'trainval'}.txt"
    for line in listing.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, breed, species, _ = line.split()
            seen[breed] += 1
            if split == "test" or (seen[breed] % HELD_OUT == 0) == (split == "val"):
                wanted.append((name, int(species) - 1))
    with ThreadPoolExecutor(8) as pool:
        cut = list(pool.map(lambda photo: _cut(root, photo[0], round(LARGEST * size)), wanted))
    kept = [(*photo, rgba) for photo, rgba in zip(wanted, cut, strict=True) if rgba is not None]
    names, species, rgba = zip(*kept, strict=True)
    return list(names), torch.tensor(species), torch.stack(rgba)


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


def paint(
    rgba: Tensor, rows: Tensor, places: Tensor, keys: list[str], *, size: int
) -> tuple[Tensor, Tensor]:
    """Cut-outs `rows` [N] on textures `places` [N]: images [N, 3, H, W] uint8 and masks."""
    images, masks = [], []
    numbers = torch.stack([_numbers(key) for key in keys])
    for row, place, drawn in zip(
        rows.split(AT_ONCE), places.split(AT_ONCE), numbers.split(AT_ONCE), strict=True
    ):
        behind = torch.empty(len(row), 3, size, size)
        for family in place.unique().tolist():
            chosen = place == family
            behind[chosen] = texture(family, drawn[chosen, 3:], size)
        colour, alpha = _placed(rgba[row], drawn[:, :3], size)
        images.append(((colour + behind * (1 - alpha)).clamp(0, 1) * 255).round().byte())
        masks.append(alpha[:, 0] > 0.5)
    return torch.cat(images), torch.cat(masks)


def _numbers(key: str) -> Tensor:
    seed = hashlib.blake2b(key.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed))
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
    """Raw images [n, 3, size, size] in [0, 1] from uniform numbers [n, sum(NUMBERS)]: boards (0)
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


if __name__ == "__main__":
    main()
