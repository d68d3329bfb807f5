"""Images by name: files, folders, globs, or one sample of a dataset, `DATA#INDEX`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from seecause.data.dataset import Sample, capabilities, is_data, open_data
from seecause.errors import BadImage, BadOption
from seecause.models.preprocess import (
    SUFFIXES,
    check_there,
    decode_image as decode_image,
    kinds,
    read_grey,
    read_ids,
    read_image,
)

if TYPE_CHECKING:
    from torch import Tensor

UNREADABLE = (".heic", ".heif", ".avif")  # listed all the same, so that they are reported
MASKS = "masks"  # a folder beside images that holds masks with the same stems
LOSSY = (".jpg", ".jpeg")
FEW = 16  # a mask with more values has soft edges


def find_images(texts: Iterable[str | Path]) -> list[str]:
    """Names for `open_image`: of files, of the images in folders, of the files that match globs,
    and of samples of datasets; each once.

    A folder without images gives those of all its sub-folders except masks.
    """
    names: list[str] = []
    for text in map(str, texts):
        path = Path(text)
        if path.is_dir():
            names += map(str, _images_below(path))
        elif sample_of(text) or path.exists():
            names.append(text)
        elif set(text) & set("*?["):
            matches = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
            found = sorted(match for match in matches if match.is_file())
            if not found:
                raise BadImage(text, "no file matches", "check the pattern")
            names += map(str, found)
        else:
            _check_file(text)
    return list(dict.fromkeys(names))


def images_in(folder: Path, suffixes: Collection[str] = SUFFIXES) -> list[Path]:
    """The images of one folder, sorted, without hidden files."""
    files = (path for path in folder.iterdir() if path.suffix.lower() in suffixes)
    return sorted(path for path in files if path.name[0] != "." and path.is_file())


def _images_below(folder: Path) -> list[Path]:
    found = images_in(folder, {*SUFFIXES, *UNREADABLE})
    if not found:
        below = (path for path in folder.rglob("*") if path.is_file())
        seen = sorted(p for p in below if not any(n[0] == "." for n in p.relative_to(folder).parts))
        images = [path for path in seen if path.suffix.lower() in SUFFIXES]
        masks = {mask_of(path) for path in images}
        found = [path for path in images if path not in masks]
    if not found:
        raise BadImage(str(folder), "a folder without images", f"give a folder with {kinds()}")
    return found


def mask_of(image: Path) -> Path | None:
    """The mask of an image: the file with its stem in the folder `masks` beside it, or in the
    sub-folder of its class of the folder `masks` beside its class folder. None without one."""
    above = image.parent.parent / MASKS / image.parent.name
    for folder in (image.parent / MASKS, above):
        for suffix in sorted(SUFFIXES) if folder.is_dir() else ():
            if (mask := folder / f"{image.stem}{suffix}").is_file():
                return mask
    return None


def read_mask(path: Path) -> Tensor:
    """[H, W] bool, True on the object: where a file of few values is not 0, where one with soft
    edges is brighter than half. JPEG adds small values around edges, so half is the limit there,
    too."""
    import torch

    try:
        values = read_ids(path)
    except BadImage:  # saved in colour
        values = read_grey(path).astype(np.int64)
    few = path.suffix.lower() not in LOSSY and len(np.unique(values)) <= FEW
    return torch.from_numpy(values > 0 if few else values * 2 > values.max())


def open_image(text: str) -> Image.Image:
    """Open one image by its name.

    Args:
        text: A file, or a sample such as `critters:clean:test#3` or `pets:PATH#0`, counted from 0
            in the order of the dataset.

    Example:
        >>> import seecause as sc
        >>> sc.data.open_image("critters:clean:test#3").size
        (96, 96)
    """
    return ImageOpener()(text)


@dataclass(frozen=True, eq=False)
class ImageFacts:
    """What is known about an image besides its pixels: the name of its class, the mask [H, W] of
    its object as in `Sample`, and its own height and width."""

    label: str | None = None
    mask: Tensor | None = None
    size: tuple[int, int] | None = None


class ImageOpener:
    """Opens images by name; each dataset is opened once."""

    def __init__(self) -> None:
        self._data = cache(open_data)
        self._sample = lru_cache(maxsize=1)(self._read)  # its facts are not read again

    def __call__(self, text: str, *, second: bool = False) -> Image.Image:
        """A file, or a sample of a dataset. With `second`, the other version of a sample of
        pairs."""
        if (named := sample_of(text)) is None:
            _check_file(text)
            return read_image(text)
        sample, data = self._sample(*named), self._data(named[0])
        if second and "pairs" in capabilities(data):
            sample = data.other(named[1])  # type: ignore[attr-defined]
        return to_pil(sample.image)

    def facts(self, text: str) -> ImageFacts:
        """Class and mask of a sample as its dataset has them; those of a file by the name of its
        folder, and by its mask in a folder `masks`."""
        if (named := sample_of(text)) is None:
            path = Path(text).absolute()
            mask = mask_of(path)
            return ImageFacts(path.parent.name, None if mask is None else read_mask(mask))
        sample, classes = self._sample(*named), self._data(named[0]).classes
        label = classes[sample.label] if classes and sample.label is not None else None
        return ImageFacts(label, sample.mask)

    def _read(self, name: str, index: int) -> Sample:
        data = self._data(name)
        if index >= len(data):
            raise BadOption("sample", f"{name}#{index}", f"an index below {len(data)}")
        return data[index]


def second_versions(texts: Sequence[str], folder: Path | None) -> list[str] | None:
    """Names of the other versions of images, for `ImageOpener(text, second=True)`: files of the
    same names in `folder`, and samples of pairs themselves. None if there are none.

    For a film that is a folder of frames, it is a folder of its name in `folder`, or `folder`.
    """
    if folder is None and not any(text.startswith("pairs:") for text in texts):
        return None
    others = []
    for text in texts:
        path = Path(text)
        if sample_of(text) and text.startswith("pairs:"):
            others.append(text)
        elif folder is None or sample_of(text):
            expected = "a folder with files of the same names, or samples of pairs:WITH:WITHOUT"
            raise BadOption("image", text, f"another version of each image: {expected}")
        else:
            frame = folder / path.parent.name / path.name
            other = frame if frame.exists() else folder / path.name
            if path.is_dir() and len(texts) == 1 and not other.exists():
                other = folder
            if not other.is_dir():
                check_there(other)
            others.append(str(other))
    return others


def sample_of(text: str) -> tuple[str, int] | None:
    """Dataset and index of `KIND:...#INDEX`; None for other texts, and for a file of that name."""
    name, _, index = text.rpartition("#")
    if ":" in name and index.isdecimal() and not Path(text).exists():
        return name, int(index)
    return None


def _check_file(text: str) -> None:
    """Raise if there is no such file; a dataset, or a sample written in another way, is told how
    to name one sample."""
    name, _, index = text.rpartition("#")
    if (is_data(text) or (":" in name and index)) and not Path(text).exists():
        example = f"{name or text}#0"
        expected = f"one sample of a dataset, DATA#INDEX, such as {example}"
        raise BadOption("sample", text, f"{expected}; name several one by one")
    check_there(Path(text))


def to_pil(image: Tensor) -> Image.Image:
    """Convert raw pixels to an image of 8 bits.

    Args:
        image: [3, H, W] in [0, 1].

    Example:
        >>> import seecause as sc, torch
        >>> sc.data.to_pil(torch.zeros(3, 4, 6)).size
        (6, 4)
    """
    pixels = (image.detach().float().cpu().clamp(0, 1) * 255).round().byte()  # [3, H, W]
    return Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
