"""Files and folders that are complete or absent, and digests.

A file is written beside its path, synced and renamed to it. A folder is drafted beside its path;
replacing an earlier one takes two renames, and `recover_folder` recovers from a kill between them.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?$", re.IGNORECASE)
_DRAFT = re.compile(r"^\..+\.(\d+)\.partial$")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which becomes `path` if the block ends without an error; it is synced,
    so that a power cut leaves no partial file."""
    draft = _draft_of(path)
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file atomically: it is complete or absent."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def safe_cell(value: Any) -> Any:
    """A value for a CSV: text that a spreadsheet would read as a formula gets a quote in
    front.

    >>> safe_cell("=1+1"), safe_cell("-0.5"), safe_cell(-0.5)
    ("'=1+1", '-0.5', -0.5)
    """
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula and not _NUMBER.match(value) else value


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as the text of a CSV, in which no cell is a formula.

    >>> csv_text([["method", "mean"], ["=1+1", 0.5]])
    "method,mean\\n'=1+1,0.5\\n"
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*map(safe_cell, row)] for row in rows)
    return text.getvalue()


@contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, which is removed when the block ends. After a kill, the next
    call for `path` removes it."""
    path = path.absolute()
    recover_folder(path)
    draft = _draft_of(path)
    try:
        draft.mkdir(parents=True)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which replaces `path` if the block ends without an
    error."""
    with draft_folder(path) as draft:
        yield draft
        replace_folder(draft, path)


def replace_folder(draft: Path, path: Path) -> None:
    """Move a folder to `path`, replacing an existing one."""
    path = path.absolute()
    old = _old_of(path)
    if path.exists():
        path.rename(old)
    draft.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Undo a replacement that was killed between its two renames, and remove drafts of dead
    processes."""
    path = path.absolute()
    old = _old_of(path)
    if old.is_dir():
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)
    clear_drafts(path.parent, glob.escape(path.name))


def clear_drafts(folder: Path, name: str = "*") -> None:
    """Remove the drafts of files and folders with this name that killed processes left in a
    folder."""
    for draft in folder.glob(f".{name}.*.partial"):
        match = _DRAFT.match(draft.name)
        if match and not _is_alive(int(match[1])):
            if draft.is_dir():
                shutil.rmtree(draft, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    draft.unlink()


def digest(*parts: bytes | str, length: int = 16) -> str:
    """The first hexadecimal digits of the SHA-256 of all parts, each set off from the next.

    >>> digest("ab", "c") == digest("a", "bc")
    False
    """
    total = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        total.update(len(content).to_bytes(8, "big"))
        total.update(content)
    return total.hexdigest()[:length]


def digest_json(value: Any, *, length: int = 16) -> str:
    """A digest of a JSON value; the order of keys does not matter."""
    return digest(json.dumps(value, sort_keys=True), length=length)


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _old_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as failure:  # not ours to signal, or not there
        return not isinstance(failure, ProcessLookupError)
    return True
