"""Result folders that are whole or not there: written beside their place and moved into it at the
end; names of files in them, and tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seecause.errors import BadOption
from seecause.files import (
    draft_folder,
    mend_folder,
    move_files,
    replace_folder,
    write_json,
)

MANIFEST = "manifest.json"


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


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds nothing but the files that its manifest lists."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = set(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()} <= files
