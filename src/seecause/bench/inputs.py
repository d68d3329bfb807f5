"""What a shard depends on besides its options: the bytes of its own samples, and the code that
reads and explains them."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import seecause
from seecause.data.dataset import Dataset
from seecause.data.photos import Photo, Photos
from seecause.errors import BadImage, DataMissing

LIBRARIES = (
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "numpy",
    "scipy",
    "scikit-learn",
    "pillow",
)
ABOVE = ("report", "demo", "cli")  # packages that draw and ask; nothing in them decides a number


@cache
def versions() -> dict[str, str]:
    """Of everything that can change a bit of the rows; `source` is a digest of our own files."""
    return {
        "python": platform.python_version(),
        "seecause": seecause.__version__,
        "source": source_digest(),
        **{name: version(name) for name in LIBRARIES},
    }


@cache
def source_digest() -> str:
    """Of the package's own code, below the layers that only show results."""
    root, digest = Path(seecause.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if name.parts[0] not in ABOVE:
            digest.update(f"{name.as_posix()} {_of_file(file)}\n".encode())
    return digest.hexdigest()[:16]


def sample_digests(data: Dataset) -> list[str]:
    """One for each sample, whatever else is in the dataset. Files are read to their end; generated
    samples are told by their generator."""
    if isinstance(data, Photos):
        lists = [_of_file(path) for path in data.lists]
        return [_of_photo(photo, lists) for photo in data.photos]
    if hasattr(data, "latents"):
        first = (
            data[0].image.numpy().tobytes() if len(data) else b""
        )  # a change of the renderer shows
        return [_short(f"{data.name} {index} ".encode() + first) for index in range(len(data))]
    return [_of_sample(data, index) for index in range(len(data))]


def joined(digests: list[str]) -> str:
    return _short("\n".join(digests).encode())


def _of_photo(photo: Photo, lists: list[str]) -> str:
    known = [
        photo.id,
        photo.label,
        photo.group,
        photo.box,
        photo.points,
        _of_file(photo.path),
        photo.mask and _of_file(photo.mask),
        lists,
    ]
    return _short(repr(known).encode())


def _of_sample(data: Dataset, index: int) -> str:
    try:
        sample = data[index]
    except (BadImage, DataMissing) as hole:
        return _short(str(hole).encode())
    parts = [
        None if part is None else part.numpy().tobytes()
        for part in (sample.image, sample.mask, sample.points)
    ]
    return _short(repr([sample.id, sample.label, sample.group, sample.box, *parts]).encode())


def _of_file(path: Path) -> str:
    if not path.is_file():
        return "no file"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
