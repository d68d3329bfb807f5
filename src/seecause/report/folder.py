"""Result folders that are whole or not there: written beside their place and moved into it at the
end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seecause.errors import BadOption

MANIFEST = "manifest.json"


def check_out(out: Path, *, overwrite: bool = False) -> bool:
    """Refuse, before any work is done, a place that cannot be written or holds something that is
    not ours.

    Whether an earlier result is there, which the new one will replace.
    """
    if out.exists() and not out.is_dir():
        raise BadOption("--out", str(out), "a folder; this is a file")
    occupied = out.is_dir() and any(out.iterdir())
    ours = occupied and _ours(out)
    if occupied and not ours and not overwrite:
        raise BadOption(
            "--out",
            str(out),
            "a new folder, an empty one, or one that holds only results of seecause; give"
            " --overwrite to write into it",
        )
    there = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadOption("--out", str(out), f"a place that can be written; {there} is not")
    return ours


@contextmanager
def result_folder(
    out: Path, manifest: dict[str, Any], *, overwrite: bool = False
) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when the block ends well. The manifest, with the
    list of all files, is added to it.

    Earlier results of ours are replaced as a whole. In a folder with other things, `overwrite`
    replaces files of the same names and leaves the rest.
    """
    check_out(out, overwrite=overwrite)
    draft = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.partial")
    try:
        draft.mkdir(parents=True)
        yield draft
        files = sorted(str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file())
        (draft / MANIFEST).write_text(
            json.dumps({**manifest, "files": [*files, MANIFEST]}, indent=2) + "\n", encoding="utf-8"
        )
        _move(draft, out.absolute())
    except OSError as failure:
        raise BadOption(
            "--out", str(out), f"a place that can be written ({failure.strerror or failure})"
        ) from failure
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _ours(out: Path) -> bool:
    """Whether the folder holds nothing but what its manifest lists."""
    try:
        listed = set(json.loads((out / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()} <= listed


def _move(draft: Path, out: Path) -> None:
    if out.is_dir() and any(out.iterdir()) and not _ours(out):
        shutil.copytree(draft, out, dirs_exist_ok=True)
        return
    old = draft.with_suffix(".old")
    if out.exists():
        out.rename(old)
    draft.rename(out)
    shutil.rmtree(old, ignore_errors=True)
