"""Files that cannot be used as pictures, each for its own reason."""

import struct
import zlib
from pathlib import Path

from PIL import Image


def write_huge_header(path: Path, side: int = 20_000) -> None:
    """A valid PNG header of a huge picture with hardly any data behind it."""

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = part(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + header
        + part(b"IDAT", zlib.compress(b"\0" * 1000))
        + part(b"IEND", b"")
    )


def bad_file(folder: Path, kind: str) -> Path:
    """A file (or none) that cannot be used."""
    path = folder / f"{kind}.jpg"
    if kind == "truncated":
        Image.effect_noise((64, 64), 90).save(path)
        path.write_bytes(path.read_bytes()[:900])
    elif kind == "text":
        path.write_text("I am not a picture")
    elif kind == "empty":
        path.touch()
    elif kind == "pixel":
        Image.new("RGB", (1, 1)).save(path)
    elif kind == "huge":
        write_huge_header(path)
    elif kind == "strip":
        Image.new("L", (2000, 2)).save(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "float":
        Image.new("F", (8, 8)).save(path, format="TIFF")
    return path


REASONS = {
    "missing": "no such file",
    "text": "not an image",
    "truncated": "truncated",
    "empty": "empty",
    "pixel": "1 x 1 pixels are too small",
    "huge": "120 million pixels",
    "strip": "long and thin",
    "folder": "a folder",
    "float": "32-bit",
}
