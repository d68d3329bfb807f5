"""Photos on other backgrounds: those of ImageNet-9, and composites of one's own in its manner.

`imagenet9:PATH[:VARIANT]`: ImageNet-9, the Backgrounds Challenge (Xiao et al. 2020), PATH being the
folder `bg_challenge` of its release.

    <variant>/val/<NN_class>/*.JPEG         fg_mask/val/<NN_class>/*.npy
Variants: original, mixed_same, mixed_rand, mixed_next (the object on a background of the same, a
random or the next class), only_fg, no_fg, only_bg_b, only_bg_t. Labels are the nine classes, NN =
00 to 08. Masks are there for variants that show the object; a mixed photo says in its name
(`fg_<photo>_bg_<photo>`) whose object it has. The class of a random background is not told by any
file, so there are no groups.

`read_in9_map` reads the release's `in_to_in9.json`, which turns the answers of an ImageNet-1k model
into the nine.

`compose`: photos taken apart and put together again, from photos and the masks of their objects.

    original       the photo
    only_fg        the object on black
    only_bg_b      the photo with the object's box black
    only_bg_t      the object's box tiled with the largest strip of background beside it
    only_bg_f      the object's shape filled from around it
    mixed_same     the object in its place on another photo of its class, its own filled
    mixed_rand     the same on a photo of another class

ImageNet-9 mixes with tiled backgrounds. Where objects are large, boxes leave hardly anything to
tile with, so filled ones are taken here.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib import format as npy
from torch import Tensor

from seecause.data.dataset import evenly, path_and_split
from seecause.data.images import BROKEN, first_line
from seecause.data.photos import Layout, Photos, class_photos
from seecause.errors import BadImage, BadOption

CLASSES = (
    "dog",
    "bird",
    "wheeled vehicle",
    "reptile",
    "carnivore",
    "insect",
    "musical instrument",
    "primate",
    "fish",
)
SHOWING_OBJECT = ("original", "mixed_same", "mixed_rand", "mixed_next", "only_fg")
VARIANTS = (*SHOWING_OBJECT, "no_fg", "only_bg_b", "only_bg_t")
IMAGENET_CLASSES = 1000
MAP = "in_to_in9.json"  # of the release
_LAYOUT = Layout(
    "expected PATH/<variant>/val/<NN_class>/*.JPEG with NN = 00 to 08, and"
    " PATH/fg_mask/val/<NN_class>/*.npy"
)
_MAP_LAYOUT = Layout(
    f'expected the in_to_in9.json of the release: {{"0": class, ...}} with {IMAGENET_CLASSES}'
    " entries, classes 0 to 8 or -1"
)
_OBJECT = re.compile(r"fg_(?P<photo>.+)_bg_.+")


def open_imagenet9(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one variant."""
    root, variant = path_and_split(rest, VARIANTS, "original")
    folder = root / variant / "val"
    masks = root / "fg_mask" / "val"
    masked = variant in SHOWING_OBJECT and masks.is_dir()
    photos = []
    for part in _LAYOUT.class_folders(folder):
        for photo in class_photos(part, _label(part)):
            mask = masks / part.name / f"{object_of(photo.path.stem)}.npy" if masked else None
            photos.append(replace(photo, mask=mask))
    if not photos:
        raise _LAYOUT.refusal(folder, "no class folders in it")
    return Photos(f"imagenet9:{root}:{variant}", CLASSES, evenly(photos, limit), read_object)


def object_of(stem: str) -> str:
    """The photo that an object was cut from."""
    named = _OBJECT.fullmatch(stem)
    return named["photo"] if named else stem


def read_object(path: Path) -> Tensor:
    """[H, W] bool."""
    return torch.from_numpy(_read_npy(path) > 0)


def _read_npy(path: Path) -> np.ndarray:
    """A numpy array [H, W] of real numbers. The header is checked against the file's length before
    anything is made of it."""
    if not path.is_file():
        raise BadImage(str(path), "no such file", _LAYOUT)
    file = BytesIO(path.read_bytes())
    try:
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about headers of Python 2
            shape, fortran, dtype = read_header(file)
    except (*BROKEN, TokenError) as broken:
        raise BadImage(
            str(path), f"not a numpy array that can be read ({first_line(broken)})", _LAYOUT
        ) from broken
    content = file.read()
    if len(shape) != 2 or dtype.kind not in "biuf" or min(shape) < 1:
        raise BadImage(str(path), "not an array [H, W] of numbers", _LAYOUT)
    if shape[0] * shape[1] * dtype.itemsize != len(content):
        raise BadImage(str(path), f"not the bytes of {list(shape)} numbers", _LAYOUT)
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def read_in9_map(path: str | Path) -> Tensor:
    """[1000] int64: the class of ImageNet-9 that each class of ImageNet-1k belongs to, or -1."""
    path = Path(path)
    listed = _MAP_LAYOUT.json(path)
    expected = {str(place) for place in range(IMAGENET_CLASSES)}
    if not isinstance(listed, dict) or set(listed) != expected:
        raise _MAP_LAYOUT.refusal(path, "not one entry for each class of ImageNet-1k")
    for place, value in listed.items():
        if type(value) is not int or not -1 <= value < len(CLASSES):
            got = repr(value)[:40] if isinstance(value, int | float | str) else "no number"
            raise _MAP_LAYOUT.refusal(path, f"class {place} belongs to {got}")
    return torch.tensor([listed[str(place)] for place in range(IMAGENET_CLASSES)])


def find_in9_map(name: str) -> Path:
    """`imagenet9:PATH:VARIANT` -> the map, which lies in PATH or beside it."""
    path, _, last = name.partition(":")[2].rpartition(":")
    root = Path(path if last in VARIANTS else name.partition(":")[2])
    beside = root.parent / MAP
    return beside if beside.is_file() and not (root / MAP).is_file() else root / MAP


def _label(folder: Path) -> int:
    number = folder.name.partition("_")[0]
    if number not in {f"{place:02}" for place in range(len(CLASSES))}:
        raise _LAYOUT.refusal(folder, "not the folder of an ImageNet-9 class")
    return int(number)


ALONE = ("original", "only_fg", "only_bg_b", "only_bg_t", "only_bg_f")  # made of one photo
MIXED = ("mixed_same", "mixed_rand")
MARGIN = 3  # pixels around an object that are filled with it: its edge must not colour the filling
THINNEST = 8  # pixels: a thinner strip is no texture, and is not tiled

Box = tuple[int, int, int, int]  # top, bottom, left, right; the ends are not in it


@dataclass(frozen=True, eq=False)
class Composites:
    """Of N photos; pixels in [0, 1]."""

    alone: dict[str, Tensor]  # [N, 3, H, W] each
    mixed: dict[str, Tensor]  # [draws, N, 3, H, W] each
    donors: dict[str, Tensor]  # [draws, N]: whose background a mixed photo has
    boxes: Tensor  # [N], the share of the frame that the object's box takes
    untiled: int  # photos whose box leaves no strip: filled instead


def compose(
    pixels: Tensor, shapes: Tensor, classes: Tensor, parts: Tensor, *, draws: int, seed: int
) -> Composites:
    """Photos [N, 3, H, W] in [0, 1] with the shapes of their objects [N, H, W] (bool). Backgrounds
    come from photos of the same part `parts` [N]."""
    filled = fill_holes(pixels, shapes)
    donors = {
        "mixed_same": same_class(classes, parts, draws=draws, seed=seed),
        "mixed_rand": other_class(classes, parts, draws=draws, seed=seed),
    }
    boxes = [box_of(shape) for shape in shapes]
    black, tiles = pixels.clone(), pixels.clone()
    untiled = 0
    for place, (top, bottom, left, right) in enumerate(boxes):
        black[place, :, top:bottom, left:right] = 0
        cover = tiling(pixels[place], boxes[place])
        untiled += cover is None
        cover = filled[place] if cover is None else cover
        tiles[place, :, top:bottom, left:right] = cover[:, top:bottom, left:right]
    shown = shapes[:, None]
    versions = (pixels, torch.where(shown, pixels, 0), black, tiles, filled)
    alone: dict[str, Tensor] = dict(zip(ALONE, versions, strict=True))
    mixed = {}
    for name, places in donors.items():
        backgrounds = [filled[rows.to(pixels.device)] for rows in places]
        mixed[name] = torch.stack([torch.where(shown, pixels, behind) for behind in backgrounds])
    areas = [(bottom - top) * (right - left) for top, bottom, left, right in boxes]
    share = torch.tensor(areas, dtype=torch.float64) / shapes[0].numel()
    return Composites(alone, mixed, donors, share, untiled)


def fill_holes(pixels: Tensor, holes: Tensor, *, margin: int = MARGIN) -> Tensor:
    """Photos [N, 3, H, W] whose holes [N, H, W] (bool) are filled with smooth colour from around
    them, by a pyramid of means ("pull-push").

    What a coarse pixel knows of the photo is the mean of its known pixels; what it does not know
    comes from the next coarser one. Known pixels stay. A photo that is all hole becomes black.
    """
    wide = F.max_pool2d(holes[:, None].to(pixels.dtype), 2 * margin + 1, stride=1, padding=margin)
    levels = [(pixels * (1 - wide), 1 - wide)]  # colour times what is known, and what is known
    while max(levels[-1][0].shape[-2:]) > 1:
        colour, known = levels[-1]
        levels.append((_pulled(colour), _pulled(known)))
    colour, known = levels.pop()
    filled = colour / known.clamp_min(torch.finfo(pixels.dtype).tiny)
    for colour, known in reversed(levels):
        size = colour.shape[-2:]
        coarse = F.interpolate(filled, size=size, mode="bilinear", align_corners=False)
        filled = colour + (1 - known) * coarse
    return filled


def _pulled(level: Tensor) -> Tensor:
    return F.avg_pool2d(level, 2, ceil_mode=True, count_include_pad=False)


def box_of(shape: Tensor) -> Box:
    """The smallest box around a shape [H, W] (bool); empty for an empty one."""
    rows = shape.any(dim=1).nonzero()[:, 0].tolist()
    columns = shape.any(dim=0).nonzero()[:, 0].tolist()
    return (rows[0], rows[-1] + 1, columns[0], columns[-1] + 1) if rows else (0, 0, 0, 0)


def tiling(picture: Tensor, box: Box) -> Tensor | None:
    """A picture [3, H, W] tiled with the largest strip beside the box, above it, below it, left or
    right; None where all are too thin."""
    top, bottom, left, right = box
    strips = [picture[:, :top], picture[:, bottom:], picture[:, :, :left], picture[:, :, right:]]
    strip = max(
        (s for s in strips if min(s.shape[1:]) >= THINNEST),
        key=lambda s: s[0].numel(),
        default=None,
    )
    if strip is None:
        return None
    height, width = picture.shape[1:]
    down, across = math.ceil(height / strip.shape[1]), math.ceil(width / strip.shape[2])
    return strip.repeat(1, down, across)[:, :height, :width]


def same_class(classes: Tensor, parts: Tensor, *, draws: int, seed: int) -> Tensor:
    """For each photo, `draws` others of its class and part, [draws, N]: a permutation each, all
    different as long as there are enough."""
    generator = torch.Generator().manual_seed(seed)
    donors = torch.empty(draws, len(classes), dtype=torch.long)
    for group in _groups(classes, parts):
        if len(group) < 2:
            raise BadOption(
                "photos",
                f"one of class {int(classes[group[0]])} in its part",
                "at least two of each class in each part",
            )
        order = group[torch.randperm(len(group), generator=generator)]
        for draw in range(draws):
            donors[draw, order] = order.roll(-1 - draw % (len(group) - 1))
    return donors


def other_class(classes: Tensor, parts: Tensor, *, draws: int, seed: int) -> Tensor:
    """For each photo, `draws` of other classes in its part, [draws, N]: a permutation each.

    Classes in a random order, photos of a class in a random order behind each other: a turn by at
    least the largest class meets no class twice.
    """
    generator = torch.Generator().manual_seed(seed)
    donors = torch.empty(draws, len(classes), dtype=torch.long)
    for part in parts.unique():
        inside = (parts == part).nonzero()[:, 0]
        kinds, counts = classes[inside].unique(return_counts=True)
        largest = int(counts.max())
        if 2 * largest > len(inside):
            raise BadOption(
                "photos", f"{largest} of {len(inside)} of one class", "half of each part at most"
            )
        for draw in range(draws):
            ranks = torch.randperm(len(kinds), generator=generator)
            rank = ranks[torch.searchsorted(kinds, classes[inside])]
            shuffled = torch.randperm(len(inside), generator=generator)
            order = inside[shuffled[rank[shuffled].sort(stable=True).indices]]
            slack = len(inside) - 2 * largest
            turn = largest + int(torch.randint(slack + 1, (), generator=generator))
            donors[draw, order] = order.roll(-turn)
    return donors


def halves(classes: Tensor, *, seed: int) -> Tensor:
    """[N], 0 or 1: each class cut in two at random; an odd photo goes to the second half."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.ones(len(classes), dtype=torch.long)
    for group in _groups(classes, torch.zeros_like(classes)):
        half[group[torch.randperm(len(group), generator=generator)[: len(group) // 2]]] = 0
    return half


def _groups(classes: Tensor, parts: Tensor) -> list[Tensor]:
    """Places of the photos of each class in each part."""
    pairs = torch.stack([parts, classes], dim=1)
    return [(pairs == pair).all(dim=1).nonzero()[:, 0] for pair in pairs.unique(dim=0)]
