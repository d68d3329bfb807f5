"""Images by name: files, folders, globs, or one sample of a dataset, `DATA#INDEX`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from seecause._pictures import (
    BROKEN as BROKEN,
    FORMATS as FORMATS,
    MAX_PIXELS as MAX_PIXELS,
    MIN_SIDE as MIN_SIDE,
    SUFFIXES as SUFFIXES,
    check_file,
    check_there,
    decode_image as decode_image,
    first_line as first_line,
    kinds,
    read_grey as read_grey,
    read_ids as read_ids,
    read_image as read_image,
)
from seecause.data.dataset import Dataset, Sample, has_pairs
from seecause.data.registry import is_data, open_data
from seecause.errors import BadImage, BadOption

if TYPE_CHECKING:
    from torch import Tensor

_PATTERN = frozenset("*?[")
PHONES = (".heic", ".heif", ".avif")  # photos that are not read, and should not vanish silently
FILMS = (".npy",)  # of folders without images
MASKS = "masks"  # a folder beside pictures that holds masks of the same stems
LOSSY = (".jpg", ".jpeg")
FEW = 16  # different numbers of a mask that numbers objects; one with more has soft edges


def find_images(paths: Iterable[str | Path], *, deep: bool = False) -> list[Path]:
    """Files that exist, images of folders (sorted) and matches of globs, each once. `deep`: of a
    folder that holds none itself, those of all its sub-folders, or else films."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            # with `deep`, photos that cannot be read are listed too, so that they are reported
            others = PHONES if deep else ()
            with os.scandir(path) as entries:  # of many files: the system is asked once
                known = {*SUFFIXES, *others}
                names = [e.name for e in entries if _is_of(e.name, known) and e.is_file()]
            inside = [path / name for name in sorted(names)]
            if deep and not inside:
                inside = _without_masks(path) or _below(path, FILMS)
            if not inside:
                expected = f"give a folder with {kinds()}"
                raise BadImage(str(path), "a folder without images", expected)
            files += inside
        elif not path.exists() and _PATTERN & set(str(path)):
            matches = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
            found = sorted(p for p in matches if p.is_file())
            if not found:
                raise BadImage(str(path), "no file matches", "check the pattern")
            files += found
        else:
            check_there(path)
            files.append(path)
    return list(dict.fromkeys(files))


def _is_of(name: str, suffixes: Collection[str]) -> bool:
    stem, _, kind = name.rpartition(".")
    return bool(stem) and f".{kind.lower()}" in suffixes


def _below(root: Path, suffixes: Collection[str]) -> list[Path]:
    """Files of all sub-folders except hidden ones."""
    files = (path for path in root.rglob("*") if _is_of(path.name, suffixes) and path.is_file())
    return sorted(p for p in files if not any(n[0] == "." for n in p.relative_to(root).parts))


def _without_masks(root: Path) -> list[Path]:
    """Images of all sub-folders except masks of them."""
    seen = {path: path.relative_to(root).parts for path in _below(root, SUFFIXES)}
    stems = {path.stem for path, parts in seen.items() if MASKS not in parts}
    return [path for path, parts in seen.items() if MASKS not in parts or path.stem not in stems]


def mask_of(picture: Path) -> Path | None:
    """The mask of a picture in a folder `masks` beside it, or beside its class folder; None if
    there is none."""
    beside, above = picture.parent / MASKS, picture.parent.parent / MASKS
    for stem in (beside / picture.stem, above / picture.parent.name / picture.stem):
        for suffix in sorted(SUFFIXES):
            if stem.with_name(stem.name + suffix).is_file():
                return stem.with_name(stem.name + suffix)
    return None


def read_mask(path: Path) -> Tensor:
    """[H, W] bool, True on the object: where a file of few numbers is not 0, where one with soft
    edges is brighter than half. JPEG puts small numbers around edges, so there it is half too."""
    import torch

    try:
        values = read_ids(path)
    except BadImage:  # saved in colour
        values = read_grey(path).astype(np.int64)  # twice 255 is no byte
    few = path.suffix.lower() not in LOSSY and len(np.unique(values)) <= FEW
    return torch.from_numpy(values > 0 if few else values * 2 > values.max())


def open_picture(text: str) -> Image.Image:
    """Open one image by its name.

    Args:
        text: A file, or a sample such as `critters:clean:test#3` or `pets:PATH#0`, counted from 0
            in the order of the dataset.

    Example:
        >>> import seecause as sc
        >>> sc.data.open_picture("critters:clean:test#3").size
        (96, 96)
    """
    return PictureOpener()(text)


@dataclass(frozen=True, eq=False)
class PictureFacts:
    """What is known about an image besides its pixels: the name of its class, a mask [H, W] of its
    object as in `Sample`, and its own height and width."""

    label: str | None = None
    mask: Tensor | None = None
    size: tuple[int, int] | None = None


class PictureOpener:
    """Opens images by name; a dataset is opened once."""

    def __init__(self) -> None:
        self._opened: dict[str, Dataset] = {}
        self._last: tuple[str, Sample] | None = None  # so that its facts are not read again

    def __call__(self, text: str, *, second: bool = False) -> Image.Image:
        """A file, or a sample of a dataset; `second`: of a sample of pairs, the other version."""
        if sample_of(text) is None:
            _check_no_sample(text)
            return read_image(text)
        return to_pil(self._sample(text, second=second).image)

    def facts(self, text: str) -> PictureFacts:
        """Of a sample what its dataset says; of a file the name of its folder, and its mask where a
        folder `masks` has one."""
        if sample_of(text) is None:
            path = Path(text).absolute()
            mask = mask_of(path)
            return PictureFacts(path.parent.name, None if mask is None else read_mask(mask))
        sample, data = self._sample(text), self._opened[text.rpartition("#")[0]]
        named = sample.label is not None and bool(data.classes)
        return PictureFacts(data.classes[sample.label or 0] if named else None, sample.mask)

    def _sample(self, text: str, *, second: bool = False) -> Sample:
        if self._last is not None and self._last[0] == text and not second:
            return self._last[1]
        name, _, place = text.rpartition("#")
        if name not in self._opened:
            self._opened[name] = open_data(name)
        data, index = self._opened[name], int(place)
        if index >= len(data):
            raise BadOption("sample", text, f"an index below {len(data)}")
        if second and has_pairs(data):
            return data.other(index)
        self._last = (text, data[index])
        return self._last[1]


def find_pictures(texts: list[str]) -> list[str]:
    """What `open_picture` takes, for files, folders, globs and samples; each once."""
    names: list[str] = []
    for text in texts:
        if sample_of(text):
            names.append(text)
            continue
        _check_no_sample(text)
        names += map(str, find_images([text], deep=True))
    return list(dict.fromkeys(names))


def second_versions(texts: Sequence[str], folder: Path | None) -> list[str] | None:
    """Names of the other versions of images, for `PictureOpener(text, second=True)`.

    Files of the same names in `folder` (of a film that is a folder of frames: a folder of its name,
    or `folder` itself), and samples of pairs themselves. None where there are none.
    """
    paired = [(sample_of(text) or ("",))[0].startswith("pairs:") for text in texts]
    if folder is None and not any(paired):
        return None
    others = []
    for text, has_second in zip(texts, paired, strict=True):
        if folder is not None and not sample_of(text):
            others.append(str(_second_version(Path(text), folder, alone=len(texts) == 1)))
        elif has_second:
            others.append(text)
        else:
            raise BadOption(
                "picture",
                text,
                "another version of each image: a folder with files of the same names, or"
                " samples of pairs:WITH:WITHOUT",
            )
    return others


def _second_version(path: Path, folder: Path, *, alone: bool) -> Path:
    other = folder / path.name
    if path.is_dir() and other.is_dir():  # a film
        return other
    if path.is_dir() and alone and folder.is_dir():
        return folder
    frame = folder / path.parent.name / path.name
    if frame.is_file() and not other.exists():  # images that may be frames: the model decides
        return frame
    check_file(other)
    return other


def sample_of(text: str) -> tuple[str, int] | None:
    """Dataset and index of `KIND:...#INDEX`; None for anything else, also for a file that is called
    so."""
    name, _, index = text.rpartition("#")
    if ":" in name and index.isdecimal() and not Path(text).exists():
        return name, int(index)
    return None


def _check_no_sample(text: str) -> None:
    """Refuse what is meant as a sample, or several, and is not written as one."""
    name, _, index = text.rpartition("#")
    if (is_data(text) or (":" in name and index)) and not Path(text).exists():
        example = f"{name or text}#0"
        raise BadOption(
            "sample",
            text,
            f"one sample of a dataset, DATA#INDEX, such as {example}; several are named one by one:"
            f" {example} {name or text}#1",
        )


def to_pil(image: Tensor) -> Image.Image:
    """Raw pixels [3, H, W] in [0, 1] as an image of 8 bits."""
    if image.ndim != 3 or image.shape[0] != 3:
        raise BadImage(
            f"tensor of shape {list(image.shape)}",
            "expected raw pixels [3, H, W] in [0, 1]",
            "see seecause.data.Sample",
        )
    pixels = (image.detach().float().cpu().clamp(0, 1) * 255).round().byte()  # [3, H, W]
    return Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
