"""Pictures from disk, whatever they are: every one comes out as upright 8-bit RGB, or as one clear
error that names the file. Pictures by name: a file, or one sample of a dataset, `DATA#INDEX`."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from seecause.data.dataset import Dataset
from seecause.data.registry import is_data, open_data
from seecause.errors import BadImage, BadOption

T = TypeVar("T")

# about half a gigabyte of RGB; larger headers are refused before anything is decoded
MAX_PIXELS = 178_000_000
MIN_SIDE = 2
# the short side is scaled to the model's input, so a long thin strip would grow without bound
MAX_ASPECT = 64
SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)

_BROKEN = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    struct.error,
    zlib.error,
)  # what pillow's decoders raise
_PATTERN = frozenset("*?[")


def read_image(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """One picture as RGB: turned as its EXIF data says, transparency on white, the first frame of
    an animation."""
    return _read(
        Path(path), lambda opened: _as_rgb(Path(path), ImageOps.exif_transpose(opened)), max_pixels
    )


def read_ids(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """A mask [H, W] int64: the numbers a file holds (palette places, not their colours)."""
    ids = _read(Path(path), np.array, max_pixels)
    if ids.ndim != 2:
        raise BadImage(
            str(path), "a picture in colour", "give a mask with one number for each pixel"
        )
    return ids.astype(np.int64)


def read_grey(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """A mask [H, W] uint8 that may have been saved in colour or with transparency: its brightness,
    whatever its alpha."""
    return _read(Path(path), lambda opened: np.array(opened.convert("L")), max_pixels)


def _read(path: Path, take: Callable[[Image.Image], T], max_pixels: int) -> T:
    """What `take` makes of the opened file, or one clear error."""
    _check_file(path)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # pillow warns about large, odd or damaged files; what matters is checked below
        try:
            with Image.open(path) as opened:
                _check_size(path, opened, max_pixels)
                opened.load()
                return take(opened)
        except UnidentifiedImageError:
            raise BadImage(
                str(path), "not an image that can be read", f"give one of {_kinds()}"
            ) from None
        except Image.DecompressionBombError:
            raise _too_large(path, "its header announces a huge picture", max_pixels) from None
        except _BROKEN as broken:
            said = str(broken).splitlines()[0] if str(broken) else type(broken).__name__
            raise BadImage(
                str(path), f"damaged or truncated ({said})", "give an intact file"
            ) from broken


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Files that exist, pictures of folders (sorted, not of their subfolders) and matches of globs,
    each once."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(
                p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file()
            )
            if not inside:
                raise BadImage(
                    str(path), "a folder without pictures", f"give a folder with {_kinds()}"
                )
            found += inside
        elif not path.exists() and _PATTERN & set(str(path)):
            matches = sorted(
                p for p in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if p.is_file()
            )
            if not matches:
                raise BadImage(str(path), "no file matches", "check the pattern")
            found += matches
        else:
            _check_file(path)
            found.append(path)
    return list(dict.fromkeys(found))


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise BadImage(str(path), "a folder, not a picture", "give a file")
    if not path.exists():
        raise BadImage(str(path), "no such file", "check the path")
    if not path.is_file():
        raise BadImage(str(path), "not a regular file", "give a picture on disk")
    if path.stat().st_size == 0:
        raise BadImage(str(path), "the file is empty", "give an intact file")


def _check_size(path: Path, image: Image.Image, max_pixels: int) -> None:
    """By the header alone, before any pixel is decoded."""
    short, long = sorted(image.size)
    size = f"{image.width} x {image.height} pixels"
    if short < MIN_SIDE:
        raise BadImage(str(path), f"{size} are too small")
    if short * long > max_pixels:
        raise _too_large(path, size, max_pixels)
    if long > MAX_ASPECT * short:
        raise BadImage(
            str(path),
            f"{size} are too long and thin",
            f"cut it so that one side is at most {MAX_ASPECT} times the other",
        )


def _too_large(path: Path, what: str, max_pixels: int) -> BadImage:
    return BadImage(
        str(path),
        f"{what}, more than the limit of {max_pixels / 1e6:.0f} million pixels",
        "scale it down first",
    )


def _as_rgb(path: Path, image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # pillow would clip at 255
        return Image.fromarray(
            (np.asarray(image).astype(np.uint32) // 257).astype(np.uint8)
        ).convert("RGB")
    if image.mode in ("I", "F"):
        raise BadImage(
            str(path), "32-bit pixels have no agreed white", "save it with 8 or 16 bits a channel"
        )
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return image.convert("RGB")


def _kinds() -> str:
    return ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))


def open_picture(text: str) -> Image.Image:
    """A file, or a sample such as `critters:clean:test#3` or `pets:PATH#0`, counted from 0 in the
    order of the dataset."""
    return next(open_pictures([text]))


def open_pictures(texts: Iterable[str]) -> Iterator[Image.Image]:
    """The same for many, one after the other; a dataset is opened once."""
    opened: dict[str, Dataset] = {}
    for text in texts:
        found = sample_of(text)
        if found is None:
            _check_no_sample(text)
            yield read_image(text)
            continue
        name, index = found
        if name not in opened:
            opened[name] = open_data(name)
        if index >= len(opened[name]):
            raise BadOption("sample", text, f"an index below {len(opened[name])}")
        yield to_pil(opened[name][index].image)


def find_pictures(texts: list[str]) -> list[str]:
    """What `open_picture` takes, for files, folders, globs and samples; each once."""
    found: list[str] = []
    for text in texts:
        if sample_of(text):
            found.append(text)
            continue
        _check_no_sample(text)
        found += map(str, find_images([text]))
    return list(dict.fromkeys(found))


def sample_of(text: str) -> tuple[str, int] | None:
    """Dataset and index of `KIND:...#INDEX`; None for anything else, also for a file that is called
    so."""
    name, _, index = text.rpartition("#")
    return (
        (name, int(index))
        if ":" in name and index.isdecimal() and not Path(text).exists()
        else None
    )


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
    """Raw pixels [3, H, W] in [0, 1] as a picture of 8 bits."""
    if image.ndim != 3 or image.shape[0] != 3:
        raise BadImage(
            f"tensor of shape {list(image.shape)}",
            "expected raw pixels [3, H, W] in [0, 1]",
            "see seecause.data.Sample",
        )
    return Image.fromarray(
        np.ascontiguousarray(
            (image.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        )
    )
