"""Files and folders that are whole or not there, and digests: written once, used everywhere.

A file is written beside its place, synced and moved into it. A folder is drafted beside its place;
replacing an earlier one takes two renames, and `mend_folder` undoes a kill between them.

A store may also be a URL that fsspec knows (s3://BUCKET/RUN, memory://RUN): `place` opens it as a
path. There a file is put whole by the store itself, and nothing can be appended or locked.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import glob
import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.request import url2pathname

from seecause.errors import BadOption, MissingExtra, SeecauseError

log = logging.getLogger(__name__)

_URL = re.compile(r"^[a-z][a-z0-9+.-]+://", re.IGNORECASE)
READ_ONLY = ("http://", "https://", "zip://", "tar://", "data://", "github://")  # for a store
_NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?$", re.IGNORECASE)
PIECE = 1 << 18  # bytes of a file that are read at once
_DRAFT = re.compile(r"^\..+\.(\d+)\.partial$")


def place(where: str | Path) -> Path:
    """A folder by its path, or by a URL that fsspec knows; the latter has a path's methods.

    >>> place("file:///tmp/run")
    PosixPath('/tmp/run')
    """
    if not isinstance(where, str) or not _URL.match(where):
        return Path(where) if isinstance(where, str) else where
    if where.lower().startswith("file://"):
        local = where[len("file://") :].removeprefix("localhost")
        if not local.startswith("/"):
            raise BadOption("URL", where, "file:// and a whole path, as file:///tmp/run")
        return Path(url2pathname(local))
    if where.lower().startswith(READ_ONLY):
        raise BadOption("URL", where, "a place that can be written to, as s3://BUCKET/RUN")
    try:
        from upath import UPath
    except ImportError:
        raise MissingExtra("universal-pathlib", "cluster") from None
    try:
        path: Any = UPath(where, use_listings_cache=False)  # others may write there, too
        path.exists()
    except Exception as failure:  # every store has errors of its own: no credentials, no host
        reason = " ".join(str(failure).split())
        raise BadOption(
            "URL", where, f"a place that fsspec can open ({type(failure).__name__}: {reason})"
        ) from None
    return path


def is_local(path: Path) -> bool:
    """Whether files can be appended to, locked and moved there."""
    return isinstance(path, Path)


def read_many(paths: Sequence[Path]) -> list[bytes | OSError]:
    """Contents, or why there are none; from a remote place all at once."""
    if paths and not is_local(paths[0]):
        remote: Any = paths
        with remote_errors(paths[0].parent):
            contents = remote[0].fs.cat([path.path for path in remote], on_error="return")
            by_name = {name.lstrip("/"): content for name, content in contents.items()}
            for content in by_name.values():
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content  # what cannot be reached is not what was never made
        return [by_name[path.path.lstrip("/")] for path in remote]
    return [bytes_or_failure(path) for path in paths]


@contextmanager
def remote_errors(path: Path) -> Iterator[None]:
    """What a store of objects raises of its own, as an error of files that says where."""
    try:
        yield
    except (FileNotFoundError, SeecauseError):
        raise
    except Exception as failure:
        if is_local(path) or (isinstance(failure, OSError) and failure.strerror):
            raise
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
        raise OSError(errno.EIO, reason, str(path)) from failure


def bytes_or_failure(path: Path | str) -> bytes | OSError:
    """What a file holds, or why that is not known. Who reads tens of thousands gives strings, which
    take half the time."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read()
    except OSError as failure:
        return failure


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which becomes `path` when the block ends well, also across a power
    cut."""
    if not is_local(path):
        whole = io.BytesIO()
        yield whole
        with remote_errors(path):
            path.write_bytes(whole.getvalue())
        return
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
    """Write a file so that its name never stands for half of it."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """The same for a value as indented JSON."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def write_sealed(path: Path, content: bytes) -> None:
    """A file that begins with the checksum of the rest."""
    with atomic_file(path) as file:
        file.write(_seal(content))
        file.write(content)


def read_sealed(path: Path) -> bytes | None:
    """What `write_sealed` wrote, to the last bit; None where nothing is there, or something else:
    then a warning says that it is made again."""
    if not path.is_file():
        return None
    content = unsealed(path.read_bytes())
    if content is None:
        log.warning("%s is damaged: it is not what was written, and is made again", path)
    return content


def unsealed(content: bytes) -> bytes | None:
    """What a sealed file that has this content holds; None where it is not what was written."""
    rest = content[len(_seal(b"")) :]
    return rest if content.startswith(_seal(rest)) else None


def _seal(content: bytes) -> bytes:
    return digest(content, length=64).encode() + b"\n"


def safe_cell(value: Any) -> Any:
    """A value as it may stand in a CSV: a text that a spreadsheet would take for a formula begins
    with a quote.

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
    """An empty folder beside `path`, gone when the block ends; where a kill leaves one, the next
    call for `path` clears it away."""
    path = path.absolute()
    mend_folder(path)
    draft = _draft_of(path)
    try:
        draft.mkdir(parents=True)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `path` (instead of what is there) when the block ends
    well."""
    with draft_folder(path) as draft:
        yield draft
        replace_folder(draft, path)


def replace_folder(draft: Path, path: Path) -> None:
    """Move a folder to `path`, instead of what is there."""
    path = path.absolute()
    old = _old_of(path)
    if path.exists():
        path.rename(old)
    draft.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def move_files(draft: Path, folder: Path) -> None:
    """Move every file of a draft into a folder that holds other things; each is whole, and what has
    the same name goes."""
    for file in sorted(path for path in draft.rglob("*") if path.is_file()):
        place = folder / file.relative_to(draft)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            file.replace(place)
        except OSError as failure:
            if failure.errno != errno.EXDEV:  # another disk is mounted there
                raise
            write_atomic(place, file.read_bytes())


def mend_folder(path: Path) -> None:
    """Undo a replacement that was killed between its two renames, and remove drafts of dead
    processes."""
    path = path.absolute()
    old = _old_of(path)
    if old.is_dir():
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
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
    """A digest of anything that JSON can say; the order of keys does not matter."""
    return digest(json.dumps(value, sort_keys=True), length=length)


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    total = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(PIECE):  # `hashlib.file_digest` clears a buffer for every file
            total.update(part)
    return total.hexdigest()


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _old_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
