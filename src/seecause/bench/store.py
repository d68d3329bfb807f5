"""Finished work in a folder, piece by piece: the one resume store of the package.

    manifest.json               what was asked last
    manifest.copy               the same again, for when the disk damages the first
    shards/ID.parquet           rows, where the shard has some
    shards/ID.safetensors       tensors, likewise
    shards/ID.json              metadata and the checksums of the other two; written last, so this
                                file is the mark of a finished shard
    log.jsonl                   start, done and failed, one line each, only ever added to
    lock                        held while a run writes here

ID is a digest of everything that decides the shard. Every file is written beside its place, flushed
to the disk and moved, so it is whole or not there. What the disk did to it later is noticed when it
is read: JSON files carry their own checksum, and a damaged shard counts as not done.

The folder may be a URL (`files.place`). Object stores put files whole, but cannot append or lock:
there only failures are logged, a file each (failed/), and two runs into one place are not noticed;
they write the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from seecause.bench.shard_files import (
    Damaged,
    EncodedShard,
    Files,
    ShardResult,
    checksum,
    encoded,
    parse_checked,
    read_checked,
    read_file,
    read_table,
    read_tensors,
    sealed_json,
)
from seecause.errors import BadOption
from seecause.files import is_local, place, read_many, remote_errors, write_atomic

try:
    import fcntl
except ImportError:  # Windows: two runs at once are not noticed there
    fcntl = None

log = logging.getLogger(__name__)

MANIFEST, COPY, LOG = "manifest.json", "manifest.copy", "log.jsonl"
FAILED = "failed"  # the folder of failures where a log cannot grow
KINDS = ("json", "parquet", "safetensors")
FEW = 4  # shards whose files are asked for by name: listing a place takes a request per thousand
TOGETHER = 64  # shards that are read at once from a remote place
BEGUN = {"lock", "shards", COPY, LOG, FAILED}  # of a run that was stopped before its manifest


@dataclass(frozen=True)
class Condition:
    """Metadata of the intact shards among those asked for, and what is wrong with damaged ones."""

    metadata: dict[str, dict[str, Any]]
    damaged: dict[str, str]


@dataclass(frozen=True)
class ShardStore:
    """A folder of finished work, shard by shard, so that a killed job goes on. `command` is the one
    whose results it holds."""

    folder: Path
    command: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", place(self.folder))

    @cached_property
    def shards(self) -> Path:
        return self.folder / "shards"

    def file(self, shard: str, kind: str) -> Path:
        """Of a shard: parquet, safetensors or json."""
        return self.shards / f"{shard}.{kind}"

    def check(self) -> None:
        """Refuse, before any work is done, a place that holds something else."""
        with remote_errors(self.folder):
            there, is_folder = self.folder.exists(), self.folder.is_dir()
            ours = not is_folder or self._is_ours()
        if there and not is_folder:
            raise BadOption("--out", str(self.folder), "a folder; this is a file")
        if not ours:
            raise BadOption(
                "--out",
                str(self.folder),
                f"a new folder, an empty one, or one that `seecause {self.command}` made",
            )

    def manifest(self) -> dict[str, Any]:
        """What was asked last."""
        try:
            record = self._record()
        except Damaged as damage:
            if (self.folder / MANIFEST).exists() and self._is_ours():
                raise BadOption(
                    "run",
                    str(self.folder),
                    f"a run folder; of this one {damage.reason}, and so is its copy. Give the same"
                    f" `seecause {self.command}` command again: it writes a new one and keeps every"
                    " shard that is intact",
                ) from None
            record = {}
        if record.get("command") != self.command:
            raise BadOption(
                "run", str(self.folder), f"a folder that `seecause {self.command} --out` made"
            )
        return record

    def write_manifest(self, record: Mapping[str, Any]) -> None:
        self._make_room()
        content = sealed_json({"command": self.command, **record})
        for name in (COPY, MANIFEST):
            write_atomic(self.folder / name, content)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out of this folder. The system lets go of the lock when the process
        ends, however it ends."""
        if not is_local(self.folder):
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as lock:
            try:
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadOption(
                    "--out",
                    str(self.folder),
                    "a folder no other run writes to; wait for that one, or give another folder",
                ) from None
            for place in (self.folder, self.shards):
                for draft in place.glob(".*.partial"):  # of a run that was killed
                    draft.unlink()
            self._end_torn_line()
            yield

    def save(
        self,
        shard: str,
        *,
        rows: Sequence[Mapping[str, Any]] | pa.Table = (),
        schema: pa.Schema | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Everything of a shard, its mark last."""
        self.write(shard, encoded(ShardResult(rows, tensors or {}, metadata or {}), schema))

    def write(self, shard: str, files: EncodedShard) -> None:
        """What was encoded, here or by a worker."""
        self._make_room()
        for kind, content in files.contents.items():
            write_atomic(self.file(shard, kind), content)
        checksums = {kind: checksum(content) for kind, content in files.contents.items()}
        record = {"shard": shard, "checksums": checksums, "metadata": dict(files.metadata)}
        write_atomic(self.file(shard, "json"), sealed_json(record))

    def _make_room(self) -> None:
        if is_local(self.folder):  # elsewhere folders come with their files
            self.shards.mkdir(parents=True, exist_ok=True)

    def read(self, shard: str) -> ShardResult | None:
        """Everything of a shard; None if it is not finished, or damaged and to be done again."""
        for _, metadata, contents in self.files([shard]):
            with contextlib.suppress(Damaged):
                rows = read_table(shard, contents["parquet"]) if "parquet" in contents else ()
                tensors = read_tensors(shard, contents.get("safetensors"))
                return ShardResult(rows, tensors, metadata)
        return None

    def condition(self, ids: Iterable[str]) -> Condition:
        """Which shards are whole, byte by byte. What was never finished is in neither list."""
        condition = Condition({}, {})
        for _ in self.files(ids, condition):
            pass
        return condition

    def files(
        self, ids: Iterable[str], condition: Condition | None = None
    ) -> Iterator[tuple[str, dict[str, Any], dict[str, bytes]]]:
        """Metadata and checked files, by kind and not opened, of the intact shards among these."""
        for shard, files in self._files_of(ids):
            try:
                metadata, contents = self._contents(shard, files)
            except Damaged as damage:
                if condition is not None and self._is_marked(shard, files):
                    condition.damaged[shard] = damage.reason
                continue
            if condition is not None:
                condition.metadata[shard] = metadata
            yield shard, metadata, contents

    def _files_of(self, ids: Iterable[str]) -> Iterator[tuple[str, Files | None]]:
        """Shards; of a remote place with their files, many at once: a request each takes long."""
        if is_local(self.folder):
            yield from ((shard, None) for shard in ids)
            return
        wanted = list(ids)
        names = self._listed() if len(wanted) > FEW else None
        for start in range(0, len(wanted), TOGETHER):
            batch = wanted[start : start + TOGETHER]
            if names is None:
                paths = [self.file(shard, kind) for shard in batch for kind in KINDS]
            else:
                paths = [file for shard in batch for file in names.get(shard, ())]
            contents = zip((path.name for path in paths), read_many(paths), strict=True)
            files = {name: c for name, c in contents if not isinstance(c, FileNotFoundError)}
            yield from ((shard, files) for shard in batch)

    def _listed(self) -> dict[str, list[Path]]:
        """Files of a remote place, by shard."""
        names: dict[str, list[Path]] = {}
        with remote_errors(self.shards):
            for file in self.shards.iterdir() if self.shards.is_dir() else ():
                names.setdefault(file.stem, []).append(file)
        return names

    def _is_marked(self, shard: str, files: Files | None) -> bool:
        return f"{shard}.json" in files if files is not None else self.file(shard, "json").exists()

    def ids(self) -> list[str]:
        """Shards with a mark, whatever asked for them."""
        return sorted(file.stem for file in self.shards.glob("*.json"))

    def table(self, ids: Iterable[str], columns: Sequence[str] | None = None) -> pa.Table | None:
        """Rows of the intact shards among these, in this order; None if there are none."""
        parts = []
        for shard, _, contents in self.files(ids):
            if "parquet" in contents:
                with contextlib.suppress(Damaged):
                    parts.append(read_table(shard, contents["parquet"], columns))
        return pa.concat_tables(parts, promote_options="default") if parts else None

    def tensors(self, shard: str) -> dict[str, Tensor]:
        """Of a finished shard; `Damaged` if it is not."""
        content = self._content(shard, "safetensors", self._mark(shard)["checksums"])
        return read_tensors(shard, content)

    def log(self, event: str, shard: str, **more: Any) -> None:
        """One line, in one write, so that several processes may add to the file."""
        entry = {"time": time.time(), "event": event, "shard": shard, "process": os.getpid()}
        entry |= more
        if not is_local(self.folder):
            if event == "failed":
                write_atomic(self.folder / FAILED / f"{shard}.json", json.dumps(entry))
            return
        with (self.folder / LOG).open("ab", buffering=0) as file:
            file.write((json.dumps(entry) + "\n").encode())

    def events(self) -> list[dict[str, Any]]:
        """Every line that is whole: a power cut can tear one."""
        file, failures = self.folder / LOG, self.folder / FAILED
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if not is_local(self.folder) and failures.is_dir():
            contents = read_many(list(failures.iterdir()))
            text = "\n".join(c.decode(errors="replace") for c in contents if isinstance(c, bytes))
        lines = [_parsed(line) for line in text.splitlines()]
        return [line for line in lines if line is not None]

    def failures(self, ids: Iterable[str]) -> dict[str, str]:
        """Why these shards failed, where that is the last that was heard of them."""
        last = {event["shard"]: event for event in self.events()}
        failed = {shard: last[shard] for shard in ids if shard in last}
        return {
            shard: event.get("reason", "no reason was written")
            for shard, event in failed.items()
            if event["event"] == "failed"
        }

    def _record(self) -> dict[str, Any]:
        """The manifest, or its copy where the disk damaged it; `Damaged` if both are."""
        try:
            return read_checked(self.folder / MANIFEST)
        except Damaged as damage:
            if not (self.folder / COPY).exists():
                raise
            try:
                record = read_checked(self.folder / COPY)
            except Damaged:
                raise damage from None
            log.warning("%s: %s; its copy is read instead", self.folder, damage.reason)
            return record

    def _mark(self, shard: str, files: Files | None = None) -> dict[str, Any]:
        name = f"{shard}.json"
        mark = parse_checked(name, read_file(self.shards, name, files))
        if mark.get("shard") != shard:  # a file that was renamed
            raise Damaged(name, "is that of another shard")
        if not all(isinstance(mark.get(part), dict) for part in ("checksums", "metadata")):
            raise Damaged(name, "does not say what the shard holds")
        if not mark["checksums"].keys() <= set(KINDS):  # a stranger's, perhaps of files elsewhere
            raise Damaged(name, "names files that no shard has")
        return mark

    def _contents(
        self, shard: str, files: Files | None = None
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Metadata and checked files of a shard, by kind."""
        mark = self._mark(shard, files)
        sums = mark["checksums"]
        return mark["metadata"], {kind: self._content(shard, kind, sums, files) for kind in sums}

    def _content(
        self, shard: str, kind: str, checksums: Mapping[str, str], files: Files | None = None
    ) -> bytes:
        name = f"{shard}.{kind}"
        content = read_file(self.shards, name, files)
        if checksum(content) != checksums.get(kind):
            raise Damaged(name, "is damaged: it is not what was written")
        return content

    def _end_torn_line(self) -> None:
        """So that the next event has a line of its own."""
        file = self.folder / LOG
        if file.is_file() and not file.read_bytes().endswith(b"\n"):
            with file.open("ab") as log:
                log.write(b"\n")

    def _is_ours(self) -> bool:
        """Whether this command's results are here, or nothing yet. A damaged manifest does not
        hide shards that are intact."""
        names = {file.name for file in self.folder.iterdir() if not _is_draft(file.name)}
        if names <= BEGUN:
            return True
        try:
            return self._record().get("command") == self.command
        except Damaged:
            pass
        try:
            command = json.loads((self.folder / MANIFEST).read_bytes())["command"]
            if command != self.command:
                return False
        except (OSError, ValueError, KeyError, TypeError):
            pass
        condition = (self.condition([shard]) for shard in self.ids())
        return names <= {*BEGUN, MANIFEST} or any(shard.metadata for shard in condition)


def _is_draft(name: str) -> bool:
    return name.startswith(".") and name.endswith(".partial")


def _parsed(line: str) -> dict[str, Any] | None:
    """A line of the log; None if it is torn or damaged."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(event, dict) and {"event", "shard"} <= event.keys()
    return event if whole else None
