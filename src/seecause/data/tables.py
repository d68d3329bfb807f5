"""The lists that datasets come with: lines of fields, or CSV with a header. A line that cannot be
read is named by its number."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from seecause.errors import DataMissing

T = TypeVar("T")
BITS, THREE = ("0", "1"), ("0", "1", "2")  # what fields of classes, places and splits hold


def read_lines(path: Path, layout: str) -> list[str]:
    """All lines of a text file; a file that is missing, empty or no text says so."""
    if not path.is_file():
        raise DataMissing(str(path), "no such file", layout)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataMissing(str(path), "not a text file", layout) from None
    if not any(line.strip() for line in lines):
        raise DataMissing(str(path), "it lists nothing", layout)
    return lines


def read_fields(
    path: Path,
    take: Callable[[list[str]], T],
    layout: str,
    *,
    separator: str | None = None,
    skip: int = 0,
) -> list[T]:
    """What `take` makes of the fields of each line; it raises ValueError for a line it cannot use.
    `layout` tells what a line looks like."""
    found = []
    for number, line in enumerate(read_lines(path, layout)[skip:], start=skip + 1):
        if line.strip():
            try:
                found.append(take(line.split(separator)))
            except ValueError:
                raise DataMissing(
                    f"{path}, line {number}", f"{line[:80]!r} cannot be read", layout
                ) from None
    return found


def read_csv(
    path: Path, columns: Sequence[str], layout: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """Where each row stands and its fields of `columns`, which must be there; spaces around names
    and fields are cut."""
    rows = csv.reader(read_lines(path, layout), skipinitialspace=True)
    header = [name.strip() for name in next(rows)]
    missing = [name for name in columns if name not in header]
    if missing:
        raise DataMissing(
            str(path), f"no column {', '.join(missing)} among {', '.join(header)[:120]}", layout
        )
    places = [header.index(name) for name in columns]
    name = str(path)
    try:
        for row in rows:
            where = f"{name}, line {rows.line_num}"
            if row and len(row) <= max(places):
                raise DataMissing(where, "fewer fields than the header has", layout)
            if row:
                yield (
                    where,
                    {
                        column: row[place].strip()
                        for column, place in zip(columns, places, strict=True)
                    },
                )
    except csv.Error as broken:
        raise DataMissing(
            f"{name}, line {rows.line_num}", f"cannot be read ({broken})", layout
        ) from broken


def code(field: str, known: Sequence[str], where: str, layout: str) -> int:
    """The place of a field among the values it may have."""
    if field not in known:
        raise DataMissing(where, f"{field!r} where one of {', '.join(known)} was expected", layout)
    return known.index(field)
