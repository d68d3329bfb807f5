"""`imagenet-hard:PATH`: ImageNet-Hard (Taesiri et al. 2023) as it is released,
`PATH/data/validation-*.parquet`. It has no masks.

Columns used: `image` (the bytes of a picture file) and `label` (a list of ImageNet-1k classes). A
picture may have several right answers; `Sample.label` is the first, `answers(index)` gives all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from seecause.data.dataset import Sample, evenly
from seecause.data.imagenet import imagenet_classes
from seecause.errors import BadImage, DataMissing

_LAYOUT = "expected PATH/data/validation-*.parquet with the columns image and label"


@dataclass(frozen=True)
class _Row:
    """Where a picture lies; its bytes are not read yet."""

    path: Path
    group: int
    row: int
    answers: tuple[int, ...]

    @property
    def id(self) -> str:
        return f"{self.path.name}:{self.group}:{self.row}"


@dataclass(frozen=True, eq=False)
class ImageNetHard:
    """Pictures inside Parquet files, read one row group at a time."""

    name: str
    rows: tuple[_Row, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        return imagenet_classes()

    @cached_property
    def fingerprint(self) -> str:
        """Of files, their sizes, rows and answers."""
        sizes = {row.path: row.path.stat().st_size for row in self.rows}
        told = "\n".join(f"{row.id} {row.answers} {sizes[row.path]}" for row in self.rows)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        pixels = _decode(_pictures(row.path, row.group)[row.row].as_py()["bytes"], row.id)
        return Sample(
            image=torch.from_numpy(pixels).permute(2, 0, 1).float() / 255,
            label=row.answers[0],
            id=row.id,
        )

    def answers(self, index: int) -> tuple[int, ...]:
        """All classes that count as right."""
        return self.rows[index].answers


def open_imagenet_hard(rest: str, *, limit: int | None = None) -> ImageNetHard:
    """All validation pictures, in the order of the files."""
    folder = Path(rest) / "data"
    files = sorted(folder.glob("validation-*.parquet"))
    if not files:
        raise DataMissing(str(folder), "no validation-*.parquet in it", _LAYOUT)
    rows = [row for path in files for row in _rows(path)]
    return ImageNetHard(f"imagenet-hard:{rest}", evenly(rows, limit))


def _rows(path: Path) -> list[_Row]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as broken:
        raise DataMissing(str(path), f"cannot be read ({broken})", _LAYOUT) from broken
    with file:
        if not {"image", "label"} <= set(file.schema_arrow.names):
            raise DataMissing(
                str(path), f"has the columns {', '.join(file.schema_arrow.names)}", _LAYOUT
            )
        labels = [
            file.read_row_group(group, columns=["label"])["label"].to_pylist()
            for group in range(file.num_row_groups)
        ]
    rows = [
        _Row(path, group, row, _answers(label))
        for group, part in enumerate(labels)
        for row, label in enumerate(part)
    ]
    for row in rows:
        if not row.answers or not all(0 <= answer < 1000 for answer in row.answers):
            raise DataMissing(
                f"{path.parent / row.id}",
                f"its labels are {list(row.answers)}",
                "expected ImageNet-1k classes, at least one",
            )
    return rows


def _answers(label: object) -> tuple[int, ...]:
    return tuple(label) if isinstance(label, list) else ()


@lru_cache(maxsize=1)
def _pictures(path: Path, group: int) -> pa.ChunkedArray:
    """The pictures of one row group; kept, because the next one asked for is most likely its
    neighbour."""
    with pq.ParquetFile(path) as file:
        return file.read_row_group(group, columns=["image"])["image"]


def _decode(content: bytes | None, name: str) -> np.ndarray:
    """[H, W, 3] uint8."""
    try:
        with Image.open(BytesIO(content or b"")) as opened:
            return np.array(opened.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as broken:
        raise BadImage(
            name, f"damaged or truncated ({broken})", "give the files of the release"
        ) from broken
