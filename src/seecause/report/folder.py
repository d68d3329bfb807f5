"""Result folders that are whole or not there: written beside their place and moved into it at the
end; names of files in them, and tables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seecause.errors import BadOption
from seecause.files import (
    csv_text,
    draft_folder,
    mend_folder,
    move_files,
    replace_folder,
    write_json,
)

MANIFEST = "manifest.json"
LONGEST = 80  # characters of a name that is made


def check_out(out: Path, *, overwrite: bool = False) -> bool:
    """Refuse, before any work is done, a place that cannot be written or holds something that is
    not ours. What an earlier command that was killed left behind is put right.

    Whether an earlier result is there, which the new one will replace.
    """
    there = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    if out.absolute().parent.is_dir() and os.access(out.absolute().parent, os.W_OK):
        mend_folder(out)
    if out.exists() and not out.is_dir():
        raise BadOption("--out", str(out), "a folder; this is a file")
    occupied = out.is_dir() and any(out.iterdir())
    ours = occupied and _is_ours(out)
    if occupied and not ours and not overwrite:
        raise BadOption(
            "--out",
            str(out),
            "a new folder, an empty one, or one that holds only results of seecause; give"
            " --overwrite to write into it",
        )
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadOption("--out", str(out), f"a place that can be written; {there} is not")
    return ours


@contextmanager
def result_folder(
    out: Path, manifest: dict[str, Any], *, overwrite: bool = False
) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when the block ends well. The manifest, as it is
    then, with the list of all files, is added to it.

    Earlier results of ours are replaced as a whole. In a folder with other things, `overwrite`
    replaces files of the same names and leaves the rest.
    """
    check_out(out, overwrite=overwrite)
    beside = out.is_dir() and any(out.iterdir()) and not _is_ours(out)
    try:
        with draft_folder(out) as draft:
            yield draft
            files = [path for path in draft.rglob("*") if path.is_file()]
            names = sorted(str(path.relative_to(draft)) for path in files)
            write_json(draft / MANIFEST, {**manifest, "files": [*names, MANIFEST]})
            (move_files if beside else replace_folder)(draft, out)
    except OSError as failure:
        raise BadOption(
            "--out", str(out), f"a place that can be written ({failure.strerror or failure})"
        ) from failure


def made_names(names: Sequence[str], suffix: str) -> list[str]:
    """A file name for each of some names, whatever they hold: no folders, no odd characters, no two
    alike on any file system."""
    taken: set[str] = set()
    made = []
    for name in names:
        plain = re.sub(r"[^\w.]+", "-", name).strip(".-")[:LONGEST] or "picture"
        unique, count = plain, 1
        while unique.casefold() in taken:
            count += 1
            unique = f"{plain}-{count}"
        taken.add(unique.casefold())
        made.append(unique + suffix)
    return made


def rows_csv(rows: Sequence[Mapping[str, str | float]]) -> str:
    """CSV of rows that may lack columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return csv_text([columns, *([row.get(name, "") for name in columns] for row in rows)])


def _is_ours(out: Path) -> bool:
    """Whether the folder holds nothing but what its manifest lists."""
    try:
        listed = set(json.loads((out / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()} <= listed
