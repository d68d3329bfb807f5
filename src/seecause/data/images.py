"""Pictures from disk, whatever they are: every one comes out as upright 8-bit RGB, or as one clear
error that names the file. Pictures by name: a file, or one sample of a dataset, `DATA#INDEX`."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from seecause.data.dataset import Dataset, has_pairs
from seecause.data.registry import is_data, open_data
from seecause.errors import BadImage, BadOption

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# the largest cameras have 100 million; larger headers are refused before anything is decoded
MAX_PIXELS = 120_000_000
MIN_SIDE = 2
# the short side is scaled to the model's input, so a long thin strip would grow without bound
MAX_ASPECT = 64
SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others, whatever a file is named,
# are not tried: PostScript would run a program, and rarer decoders are rarely looked at
BROKEN = (  # what decoders of pictures raise
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
_PATTERN = frozenset("*?[")


def read_image(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """One picture as RGB: turned as its EXIF data says, transparency on white, the first frame of
    an animation."""
    return _open_image(path, lambda image: _as_rgb(str(path), image), max_pixels)


def decode_image(content: bytes, name: str, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The same for the bytes of a file; `name` is what errors call it."""
    if not content:
        raise BadImage(name, "the file is empty", "give an intact file")
    return _decode(BytesIO(content), name, lambda image: _as_rgb(name, image), max_pixels)


def read_ids(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """A mask [H, W] int64: the numbers a file holds (palette places, not their colours)."""
    ids = _open_image(path, np.array, max_pixels)
    if ids.ndim != 2 or ids.dtype.kind not in "biu":
        raise BadImage(
            str(path), "a picture in colour", "give a mask with one number for each pixel"
        )
    return ids.astype(np.int64)


def read_grey(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """A mask [H, W] uint8 that may have been saved in colour or with transparency: its brightness,
    whatever its alpha."""
    return _open_image(path, lambda image: np.array(image.convert("L")), max_pixels)


def _open_image(path: str | Path, take: Callable[[Image.Image], T], max_pixels: int) -> T:
    _check_file(Path(path))
    return _decode(Path(path), str(path), take, max_pixels)


def _decode(
    source: Path | BytesIO, name: str, take: Callable[[Image.Image], T], max_pixels: int
) -> T:
    """What `take` makes of the opened picture, or one clear error. The only place where a picture
    is opened."""
    with warnings.catch_warnings():
        # pillow warns about large, odd or damaged files; what matters is checked below
        warnings.simplefilter("ignore")
        try:
            with Image.open(source, formats=FORMATS) as image:
                _check_size(name, image, max_pixels)
                image.load()
                return take(image)
        except UnidentifiedImageError:
            raise BadImage(
                name, "not an image that can be read", f"give one of {_kinds()}"
            ) from None
        except Image.DecompressionBombError:
            raise _too_large(name, "its header announces a huge picture", max_pixels) from None
        except BROKEN as broken:
            raise BadImage(
                name, f"damaged or truncated ({first_line(broken)})", "give an intact file"
            ) from broken


def first_line(error: BaseException) -> str:
    """What a foreign error says, short enough for one of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Files that exist, pictures of folders (sorted, not of their subfolders) and matches of globs,
    each once."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(
                p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file()
            )
            if not inside:
                raise BadImage(
                    str(path), "a folder without pictures", f"give a folder with {_kinds()}"
                )
            files += inside
        elif not path.exists() and _PATTERN & set(str(path)):
            matches = sorted(
                p for p in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if p.is_file()
            )
            if not matches:
                raise BadImage(str(path), "no file matches", "check the pattern")
            files += matches
        else:
            _check_file(path)
            files.append(path)
    return list(dict.fromkeys(files))


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise BadImage(str(path), "a folder, not a picture", "give a file")
    if not path.exists():
        raise BadImage(str(path), "no such file", "check the path")
    if not path.is_file():
        raise BadImage(str(path), "not a regular file", "give a picture on disk")
    if path.stat().st_size == 0:
        raise BadImage(str(path), "the file is empty", "give an intact file")


def _check_size(name: str, image: Image.Image, max_pixels: int) -> None:
    """By the header alone, before any pixel is decoded."""
    short, long = sorted(image.size)
    size = f"{image.width} x {image.height} pixels"
    if short < MIN_SIDE:
        raise BadImage(name, f"{size} are too small")
    if short * long > max_pixels:
        raise _too_large(name, size, max_pixels)
    if long > MAX_ASPECT * short:
        raise BadImage(
            name,
            f"{size} are too long and thin",
            f"cut it so that one side is at most {MAX_ASPECT} times the other",
        )


def _too_large(name: str, what: str, max_pixels: int) -> BadImage:
    return BadImage(
        name,
        f"{what}, more than the limit of {max_pixels / 1e6:.0f} million pixels",
        "scale it down first",
    )


def _as_rgb(name: str, image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # pillow would clip at 255
        grey = (np.asarray(image).astype(np.uint32) // 257).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("I", "F"):
        raise BadImage(
            name, "32-bit pixels have no agreed white", "save it with 8 or 16 bits a channel"
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


def open_pictures(texts: Iterable[str], *, second: bool = False) -> Iterator[Image.Image]:
    """The same for many, one after the other; a dataset is opened once. `second`: of samples of
    pairs, the other version."""
    opened: dict[str, Dataset] = {}
    for text in texts:
        sample = sample_of(text)
        if sample is None:
            _check_no_sample(text)
            yield read_image(text)
            continue
        name, index = sample
        if name not in opened:
            opened[name] = open_data(name)
        if index >= len(opened[name]):
            raise BadOption("sample", text, f"an index below {len(opened[name])}")
        data = opened[name]
        shown = data.other(index) if second and has_pairs(data) else data[index]
        yield to_pil(shown.image)


def find_pictures(texts: list[str]) -> list[str]:
    """What `open_picture` takes, for files, folders, globs and samples; each once."""
    names: list[str] = []
    for text in texts:
        if sample_of(text):
            names.append(text)
            continue
        _check_no_sample(text)
        names += map(str, find_images([text]))
    return list(dict.fromkeys(names))


def second_versions(texts: Sequence[str], folder: Path | None) -> list[str] | None:
    """What `open_pictures(second=True)` takes for the other versions of pictures: files of the same
    names in `folder`, and samples of pairs themselves. None where there are none."""
    paired = [(sample_of(text) or ("",))[0].startswith("pairs:") for text in texts]
    if folder is None and not any(paired):
        return None
    others = []
    for text, has_second in zip(texts, paired, strict=True):
        if folder is not None and not sample_of(text):
            others.append(str(folder / Path(text).name))
            _check_file(Path(others[-1]))
        elif has_second:
            others.append(text)
        else:
            raise BadOption(
                "picture",
                text,
                "another version of each picture: a folder with files of the same names, or samples"
                " of pairs:WITH:WITHOUT",
            )
    return others


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
    """Raw pixels [3, H, W] in [0, 1] as a picture of 8 bits."""
    if image.ndim != 3 or image.shape[0] != 3:
        raise BadImage(
            f"tensor of shape {list(image.shape)}",
            "expected raw pixels [3, H, W] in [0, 1]",
            "see seecause.data.Sample",
        )
    pixels = (image.detach().float().cpu().clamp(0, 1) * 255).round().byte()  # [3, H, W]
    return Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
