"""Reading image files: every image is returned as upright 8-bit RGB, or one clear error names the
file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from seecause.errors import BadImage

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


def read_image(path: str | Path) -> Image.Image:
    """One image as RGB: turned as its EXIF data says, transparency on white, the first frame of an
    animation."""
    return _open_image(path, lambda image: as_rgb(str(path), image))


def even_places(total: int, count: int) -> list[int]:
    """`count` evenly spaced indices below `total`, the first and the last among them."""
    return [round(place * (total - 1) / max(1, count - 1)) for place in range(count)]


def decode_image(content: bytes, name: str, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """One image from the bytes of a file, as `read_image` reads it; errors call it `name`."""
    if not content:
        raise BadImage(name, "the file is empty", "give an intact file")
    return _decode(BytesIO(content), name, lambda image: as_rgb(name, image), max_pixels)


def read_ids(path: str | Path) -> np.ndarray:
    """A mask [H, W] int64: the numbers a file holds (palette places, not their colours)."""
    ids = _open_image(path, np.array)
    if ids.ndim != 2 or ids.dtype.kind not in "biu":
        raise BadImage(
            str(path), "an image in colour", "give a mask with one number for each pixel"
        )
    return ids.astype(np.int64)


def read_grey(path: str | Path) -> np.ndarray:
    """A mask [H, W] uint8 that may have been saved in colour or with transparency: its brightness,
    whatever its alpha."""
    return _open_image(path, lambda image: np.array(image.convert("L")))


def _open_image(path: str | Path, take: Callable[[Image.Image], T]) -> T:
    check_there(Path(path))
    if Path(path).stat().st_size == 0:
        raise BadImage(str(path), "the file is empty", "give an intact file")
    return _decode(Path(path), str(path), take, MAX_PIXELS)


def _decode(
    source: Path | BytesIO, name: str, take: Callable[[Image.Image], T], max_pixels: int
) -> T:
    """What `take` returns for the opened image, or one clear error."""
    with warnings.catch_warnings():
        # pillow warns about large, odd or damaged files; what matters is checked below
        warnings.simplefilter("ignore")
        try:
            with Image.open(source, formats=FORMATS) as image:
                _check_size(name, image, max_pixels)
                image.load()
                return take(image)
        except BadImage:
            raise
        except UnidentifiedImageError:
            raise BadImage(
                name, "not an image that can be read", f"give one of {kinds()}"
            ) from None
        except Image.DecompressionBombError:
            raise _too_large(name, "its header announces a huge image", max_pixels) from None
        except Exception as broken:  # decoders raise anything on a damaged file
            reason = f"damaged or truncated ({first_line(broken)})"
            raise BadImage(name, reason, "give an intact file") from broken


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, shortened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def check_there(path: Path) -> None:
    """Refuse a path that is not a file, without reading it."""
    if path.is_dir():
        raise BadImage(str(path), "a folder, not an image", "give its files in a list")
    if not path.exists():
        raise BadImage(str(path), "no such file", "check the path")


def _check_size(name: str, image: Image.Image, max_pixels: int) -> None:
    """By the header alone, before any pixel is decoded."""
    short, long = sorted(image.size)
    size = f"{image.width} x {image.height} pixels"
    if short < MIN_SIDE:
        raise BadImage(name, f"{size} are too small")
    if short * long > max_pixels:
        raise _too_large(name, size, max_pixels)
    if long > MAX_ASPECT * short:
        remedy = f"cut it so that one side is at most {MAX_ASPECT} times the other"
        raise BadImage(name, f"{size} are too long and thin", remedy)


def _too_large(name: str, what: str, max_pixels: int) -> BadImage:
    limit = f"the limit of {max_pixels / 1e6:.0f} million pixels"
    return BadImage(name, f"{what}, more than {limit}", "scale it down first")


def as_rgb(name: str, image: Image.Image) -> Image.Image:
    """An image upright, in 8 bits, with transparency on white; errors call it `name`."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # pillow would clip at 255
        grey = (np.asarray(image).astype(np.uint32) // 257).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("I", "F"):
        remedy = "save it with 8 or 16 bits a channel"
        raise BadImage(name, "32-bit pixels have no agreed white", remedy)
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return image.convert("RGB")


def kinds() -> str:
    """The kinds of files that can be read, for error messages."""
    return ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))


def as_image(value: Any, name: str = "image") -> Image.Image:
    """A PIL image, a path, the bytes of a file, or raw pixels as upright RGB. Raw pixels are whole
    numbers 0-255, [H, W], [H, W, 3] or [3, H, W], or floating-point numbers 0-1, [H, W, 3]."""
    if isinstance(value, Image.Image):
        _check_size(name, value, MAX_PIXELS)
        return as_rgb(name, value)
    if isinstance(value, str | Path):
        return read_image(value)
    if isinstance(value, bytes):
        return decode_image(value, name)
    pixels = as_array(value)
    if pixels is None:
        raise BadImage(
            f"{name}: {type(value).__name__}",
            "expected a PIL image, a path, bytes of a file, or pixels",
            "for samples of a dataset use sc.data.to_batch(model, samples)",
        )
    image = Image.fromarray(_eight_bits(name, pixels))
    _check_size(name, image, MAX_PIXELS)
    return as_rgb(name, image)


def as_array(value: Any) -> np.ndarray | None:
    """An array, or a tensor as one; None for anything else. Torch is not needed to tell."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "detach"):
        return None
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def _eight_bits(name: str, pixels: np.ndarray) -> np.ndarray:
    """Raw pixels as [H, W] or [H, W, 3 or 4] uint8, or what is wrong with them."""
    what, whole = f"{name}: {pixels.dtype} {list(pixels.shape)}", pixels.dtype.kind in "ui"
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    flat = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if not flat or not pixels.size or not (whole or pixels.dtype.kind == "f"):
        raise BadImage(what, "expected pixels [H, W, 3], [3, H, W] or [H, W]", "check the axes")
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= (255 if whole else 1)):
        raise BadImage(
            what,
            f"its values reach from {low:g} to {high:g}",
            "give whole numbers 0-255, floating-point numbers 0-1, or, if they are normalised"
            " already, a tensor [B, 3, H, W]",
        )
    return np.ascontiguousarray(pixels if whole else (pixels * 255).round()).astype(np.uint8)
