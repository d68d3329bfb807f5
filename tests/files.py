"""Small files that datasets are made of."""

from pathlib import Path

import numpy as np
from PIL import Image


def photo(path: Path, size: tuple[int, int] = (6, 4), seed: int = 0) -> np.ndarray:
    """A noisy picture, width x height, written without loss whatever its suffix."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="PNG")
    return pixels


def grey(path: Path, values: np.ndarray, mode: str = "L") -> None:
    """A grey picture, also as colour or with an alpha of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).convert(mode).save(path, format="PNG")


def lines(path: Path, *rows: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path
