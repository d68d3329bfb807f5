"""Pictures: as training sees them, cut at random as iFAM's public code measures mIoU, and with
their parts in colour.

What is drawn depends on (seed, epoch, sample) alone: not on the reading process, the batch or what
came before.

birds            CUB, Waterbirds, MetaShift: short side to S, mirror, Planckian jitter, turn by +-90
                 degrees, shift by 20 %, scale 0.8-1.2, random cut
birds_no_jitter  the same without Planckian jitter, as PDiscoFormer was trained
plain            SIIM: both sides to S, mirror
imagenet         random cut of 8-100 % of the picture, mirror, RandAugment (m = 6, mstd = 0.5)
none             what a test picture gets
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.functional import pil_to_tensor

from seecause.data.batch import raw_in_frame
from seecause.data.dataset import IGNORE, Dataset, Sample
from seecause.data.images import to_pil
from seecause.faithful.config import Augment
from seecause.models.preprocess import Preprocess

JITTER = 0.8  # share of pictures in another light
Transform = Callable[[Tensor], Tensor]  # raw [3, H, W] in [0, 1] -> raw [3, S, S]

TILE = 192  # pixels of a picture of parts, at least
_ALPHA, _DIM = 0.6, 0.35
# Okabe and Ito, also for the colour-blind
_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#999999"]


class PlanckianJitter(nn.Module):
    """The same scene under another black body, with probability `share` (Zini et al. 2023): red and
    blue are scaled against green, and clipped."""

    def __init__(self, share: float = JITTER):
        super().__init__()
        self.share = share

    def forward(self, image: Tensor) -> Tensor:
        if torch.rand(()) >= self.share:
            return image
        table = illuminants()
        red, green, blue = table[int(torch.randint(len(table), ()))].tolist()
        light = image.new_tensor([red / green, 1.0, blue / green])
        return (image * light[:, None, None]).clamp(max=1)


@cache
def illuminants() -> Tensor:
    """[25, 3] red, green, blue of a black body at 3,000 to 15,000 kelvin."""
    with (
        resources.files("seecause.faithful")
        .joinpath("planckian.csv")
        .open(encoding="utf-8") as file
    ):
        rows = list(csv.DictReader(file))
    colours = [(float(row["red"]), float(row["green"]), float(row["blue"])) for row in rows]
    return torch.tensor(colours)


def augmentation(kind: Augment, frame: Preprocess) -> Transform:
    """From raw pixels of any size to raw pixels of the frame's."""
    side = min(frame.size)
    bilinear, bicubic = v2.InterpolationMode.BILINEAR, v2.InterpolationMode.BICUBIC
    mirror = v2.RandomHorizontalFlip()
    if kind in ("birds", "birds_no_jitter"):
        resize = v2.Resize(side, bilinear, antialias=True)
        light = [PlanckianJitter()] if kind == "birds" else []
        turn = v2.RandomAffine((-90, 90), translate=(0.2, 0.2), scale=(0.8, 1.2))
        cut = v2.RandomCrop(frame.size, pad_if_needed=True)  # of a frame that is no square
        return v2.Compose([resize, mirror, *light, turn, cut])
    if kind == "plain":
        return v2.Compose([v2.Resize(frame.size, bilinear, antialias=True), mirror])
    if kind == "imagenet":
        cut = v2.RandomResizedCrop(frame.size, interpolation=bicubic, antialias=True)
        return v2.Compose([cut, _in_range, mirror, _rand_augment(side)])
    return partial(raw_in_frame, frame)


@contextmanager
def seeded(seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Every generator that transforms draw from, seeded by these three inside the block and as it
    was after it."""
    name = f"{seed} {epoch} {sample}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
    plain, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)


def _rand_augment(side: int) -> Transform:
    from timm.data.auto_augment import rand_augment_transform

    settings = {"translate_const": int(side * 0.45), "img_mean": (124, 116, 104)}
    change = rand_augment_transform("rand-m6-mstd0.5", settings)
    return lambda image: pil_to_tensor(change(to_pil(image))).float() / 255


def _in_range(image: Tensor) -> Tensor:
    return image.clamp(0, 1)  # bicubic overshoots


@dataclass(frozen=True)
class RandomCuts:
    """`data` with every picture that has a mask resized until it covers `frame`, and cut at random,
    each place with some object the same.

    A cut depends on (seed, index) alone. Boxes, key points and parts are left behind. Pictures
    without a mask stay as they are.
    """

    data: Dataset
    frame: Preprocess
    seed: int = 0

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes

    @property
    def fingerprint(self) -> str:
        return f"{self.data.fingerprint}-cut-{self.seed}"

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        sample = self.data[index]
        if sample.mask is None:
            return sample
        image, mask = _covering(sample.image, sample.mask, self.frame)
        places = cuts_with_object(mask, self.frame.size)
        with seeded(self.seed, 0, index):
            top, left = places[int(torch.randint(len(places), ()))].tolist()
        height, width = self.frame.size
        rows, columns = slice(top, top + height), slice(left, left + width)
        picture, cut = image[:, rows, columns], mask[rows, columns]
        return dataclasses.replace(
            sample, image=picture, mask=cut, parts=None, box=None, points=None
        )


def cuts_with_object(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """[n, 2]: top and left of every cut of this size in which mask [H, W] has object; of every cut
    where it has none at all."""
    there = ((mask != 0) & (mask != IGNORE)).float()[None]
    there = F.max_pool2d(there, (size[0], 1), stride=1)
    held = F.max_pool2d(there, (1, size[1]), stride=1)[0]  # [H - h + 1, W - w + 1]
    return (held > 0).nonzero() if held.any() else torch.ones_like(held).nonzero()


def _covering(image: Tensor, mask: Tensor, frame: Preprocess) -> tuple[Tensor, Tensor]:
    """Raw image [3, H, W] and mask [H, W], the smallest that cover the frame in their own shape."""
    height, width = mask.shape
    scale = max(frame.size[0] / height, frame.size[1] / width)
    high, wide = max(frame.size[0], round(height * scale)), max(frame.size[1], round(width * scale))
    picture = to_pil(image).resize((wide, high), getattr(Image.Resampling, frame.filter.upper()))
    ids = F.interpolate(mask.to(torch.float64)[None, None], (high, wide), mode="nearest-exact")
    return pil_to_tensor(picture).float() / 255, ids[0, 0].to(torch.int32)


def part_colours(parts: int) -> Tensor:
    """[K, 3] in [0, 1], as far apart as so many can be; up to eight also for the colour-blind."""
    import matplotlib
    from matplotlib.colors import to_rgb

    if parts <= len(_COLOURS):
        colours = [to_rgb(colour) for colour in _COLOURS[:parts]]
    else:
        table = matplotlib.colormaps["tab20"]
        colours = [table(part % table.N)[:3] for part in range(parts)]
    return torch.tensor(colours, dtype=torch.float32)


def part_picture(image: Tensor, maps: Tensor, removed: Sequence[int] = ()) -> Image.Image:
    """A raw picture [3, H, W] whose background is dimmed and whose parts have a colour each; maps
    are [K + 1, gh, gw]. Removed parts are dimmed too."""
    scale = max(1, -(-TILE // min(image.shape[1:])))
    raw = _enlarged(image.detach().float().cpu().clamp(0, 1), scale, scale)  # [3, H, W]
    # patch by patch: smooth outlines would show what is not seen
    winner, background = maps.argmax(dim=0).cpu(), len(maps) - 1
    label = _enlarged(
        winner, raw.shape[1] // winner.shape[0], raw.shape[2] // winner.shape[1]
    )  # [H, W]
    hidden = torch.isin(label, torch.tensor([background, *removed], dtype=label.dtype))
    colours = torch.cat([part_colours(background), torch.zeros(1, 3)])
    paint = colours[label].permute(2, 0, 1)  # [3, H, W]
    # on grey, so that a part has the colour of the legend, whatever it covers
    grey = raw.mean(dim=0, keepdim=True)
    return to_pil(torch.where(hidden, raw * _DIM, grey * (1 - _ALPHA) + paint * _ALPHA))


def part_sheet(images: Tensor, maps: Tensor, *, columns: int = 8) -> Image.Image:
    """Raw pictures [B, 3, H, W], each above its parts [B, K + 1, gh, gw]."""
    tiles = [part_picture(image, its_maps) for image, its_maps in zip(images, maps, strict=True)]
    wide, high = tiles[0].size
    columns = min(columns, len(tiles))
    canvas = Image.new("RGB", (columns * wide, 2 * high * -(-len(tiles) // columns)), "white")
    for place, (image, tile) in enumerate(zip(images, tiles, strict=True)):
        left, top = place % columns * wide, place // columns * 2 * high
        plain = to_pil(image).resize((wide, high), Image.Resampling.NEAREST)
        canvas.paste(plain, (left, top))
        canvas.paste(tile, (left, top + high))
    return canvas


def mask_pixels(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Selected patches [B, gh, gw] as pixels [B, H, W], bool."""
    return F.interpolate(mask[:, None].float(), size, mode="nearest")[:, 0] > 0


def _enlarged(image: Tensor, down: int, across: int) -> Tensor:
    """Every pixel of [..., H, W] so many times."""
    return image.repeat_interleave(down, dim=-2).repeat_interleave(across, dim=-1)
