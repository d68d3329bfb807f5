"""What a shard depends on besides its options: the bytes of its own samples, and the code that
reads and explains them."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import seecause

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


def joined(digests: list[str]) -> str:
    return _short("\n".join(digests).encode())


def _of_file(path: Path) -> str:
    if not path.is_file():
        return "no file"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
