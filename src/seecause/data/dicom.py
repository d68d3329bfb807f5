"""X-rays from DICOM files (extra `medical`): 8-bit grey, or one clear error that names the file."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from seecause.errors import BadImage, MissingExtra

_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    NotImplementedError,
    RuntimeError,
    struct.error,
)
_EXPECTED = "give a DICOM file of one 8-bit grey picture"


def read_xray(path: Path) -> Image.Image:
    """RGB with three equal channels; MONOCHROME1, where black is the largest number, is turned
    round."""
    header, pixels = _read(path, pixels=True)
    if pixels.ndim != 2 or pixels.dtype != np.uint8:
        raise BadImage(str(path), f"an array {list(pixels.shape)} of {pixels.dtype}", _EXPECTED)
    if header.get("PhotometricInterpretation") == "MONOCHROME1":
        pixels = 255 - pixels
    return Image.fromarray(pixels).convert("RGB")


def xray_size(path: Path) -> tuple[int, int]:
    """Height and width, by the header alone."""
    header, _ = _read(path, pixels=False)
    height, width = header.get("Rows"), header.get("Columns")
    if not height or not width:
        raise BadImage(str(path), "its header tells no size", _EXPECTED)
    return int(height), int(width)


def _read(path: Path, *, pixels: bool) -> tuple[Any, np.ndarray]:
    """Header and, if asked for, pixels."""
    pydicom = _pydicom()
    if not path.is_file():
        raise BadImage(str(path), "no such file", "check the path")
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # pydicom warns about odd identifiers; what matters is checked
        try:
            header = pydicom.dcmread(path, stop_before_pixels=not pixels)
            return header, header.pixel_array if pixels else np.empty(0)
        except pydicom.errors.InvalidDicomError:
            raise BadImage(str(path), "not a DICOM file", _EXPECTED) from None
        except _BROKEN as broken:
            said = str(broken).splitlines()[0] if str(broken) else type(broken).__name__
            raise BadImage(
                str(path), f"damaged or of an unknown kind ({said})", _EXPECTED
            ) from broken


def _pydicom() -> ModuleType:
    try:
        import pydicom
    except ImportError:
        raise MissingExtra("pydicom", "medical") from None
    return pydicom
