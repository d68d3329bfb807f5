"""`imagenet-hard:PATH`: ImageNet-Hard (Taesiri et al. 2023) as it is released,
`PATH/data/validation-*.parquet`. It has no masks.

Columns used: `image` (the bytes of a picture file) and `label` (a list of ImageNet-1k classes). A
picture may have several right answers; `Sample.label` is the first, `answers(index)` gives all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from seecause._files import digest
from seecause.data.dataset import Sample, evenly
from seecause.data.imagenet import imagenet_classes
from seecause.data.images import BROKEN, decode_image, first_line
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
    capabilities: ClassVar = frozenset({"labels"})

    @property
    def classes(self) -> tuple[str, ...]:
        return imagenet_classes()

    @cached_property
    def fingerprint(self) -> str:
        """Of files, their sizes, rows and answers."""
        sizes = {row.path: row.path.stat().st_size for row in self.rows}
        return digest(*(f"{row.id} {row.answers} {sizes[row.path]}" for row in self.rows))

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(row.id for row in self.rows)

    @property
    def labels(self) -> tuple[int, ...]:
        return tuple(row.answers[0] for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        entry = _pictures(row.path, row.group)[row.row].as_py()
        content = entry.get("bytes") if isinstance(entry, dict) else None
        if not isinstance(content, bytes):
            raise BadImage(row.id, "no bytes of a picture", _LAYOUT)
        pixels = torch.from_numpy(np.array(decode_image(content, row.id)))  # [H, W, 3] uint8
        return Sample(pixels.permute(2, 0, 1).float() / 255, row.answers[0], id=row.id)

    def answers(self, index: int) -> tuple[int, ...]:
        """All classes that count as right."""
        return self.rows[index].answers


def open_imagenet_hard(rest: str, *, limit: int | None = None) -> ImageNetHard:
    """All validation pictures, in the order of the files."""
    folder = Path(rest) / "data"
    files = sorted(folder.glob("validation-*.parquet"))
    if not files:
        raise DataMissing(str(folder), "no validation-*.parquet in it", _LAYOUT)
    rows: list[_Row] = []
    for path in files:
        rows += _rows(path)
    return ImageNetHard(f"imagenet-hard:{rest}", evenly(rows, limit))


def _rows(path: Path) -> list[_Row]:
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = {"image", "label"} - set(names)
            groups = [] if missing else range(file.num_row_groups)
            labels = [file.read_row_group(group, columns=["label"])["label"] for group in groups]
            listed = [column.to_pylist() for column in labels]
    except (pa.ArrowException, *BROKEN) as broken:
        raise DataMissing(str(path), f"cannot be read ({first_line(broken)})", _LAYOUT) from broken
    if missing:
        raise DataMissing(str(path), f"has the columns {', '.join(names)[:120]}", _LAYOUT)
    rows = []
    for group, column in enumerate(listed):
        for place, label in enumerate(column):
            rows.append(_Row(path, group, place, _answers(label, f"{path}:{group}:{place}")))
    return rows


def _answers(label: object, where: str) -> tuple[int, ...]:
    answers = tuple(label) if isinstance(label, list) else ()
    if not answers or not all(type(answer) is int and 0 <= answer < 1000 for answer in answers):
        raise DataMissing(
            where,
            f"its labels are {str(answers)[:60]}",
            "expected ImageNet-1k classes, at least one",
        )
    return answers


@lru_cache(maxsize=1)
def _pictures(path: Path, group: int) -> pa.ChunkedArray:
    """The pictures of one row group; kept, because the next one asked for is most likely its
    neighbour."""
    try:
        with pq.ParquetFile(path) as file:
            return file.read_row_group(group, columns=["image"])["image"]
    except (pa.ArrowException, *BROKEN) as broken:
        raise DataMissing(str(path), f"cannot be read ({first_line(broken)})", _LAYOUT) from broken
