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
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load, save as to_bytes
from torch import Tensor

from seecause._files import digest, write_atomic
from seecause.errors import BadOption, SeecauseError

try:
    import fcntl
except ImportError:  # Windows: two runs at once are not noticed there
    fcntl = None

log = logging.getLogger(__name__)

MANIFEST, COPY, LOG = "manifest.json", "manifest.copy", "log.jsonl"
BEGUN = {"lock", "shards", COPY, LOG}  # all there is of a run that was stopped before its manifest


class Damaged(SeecauseError):
    """A file of the store is missing, or not what was written."""

    def __init__(self, name: str, reason: str):
        self.reason = f"{name} {reason}"
        super().__init__(f"{self.reason}; give the same command again, which does it anew.")


@dataclass(frozen=True, eq=False)
class ShardResult:
    """What a shard gives. Its metadata may differ between equal runs; rows and tensors do not."""

    rows: Sequence[Mapping[str, Any]] | pa.Table = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Condition:
    """Metadata of the intact shards among those asked for, and what is wrong with damaged ones."""

    metadata: dict[str, dict[str, Any]]
    damaged: dict[str, str]


@dataclass(frozen=True)
class ShardStore:
    """A folder of finished shards, by id. `command` is the one whose results it holds."""

    folder: Path
    command: str

    @property
    def shards(self) -> Path:
        return self.folder / "shards"

    def file(self, shard: str, kind: str) -> Path:
        """Of a shard: parquet, safetensors or json."""
        return Path(f"{self.shards}/{shard}.{kind}")  # a third of the time of joining, for 12,500

    def check(self) -> None:
        """Refuse, before any work is done, a place that holds something else."""
        if self.folder.exists() and not self.folder.is_dir():
            raise BadOption("--out", str(self.folder), "a folder; this is a file")
        if self.folder.is_dir() and not self._is_ours():
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
        self.shards.mkdir(parents=True, exist_ok=True)
        for name in (COPY, MANIFEST):
            write_checked(self.folder / name, {"command": self.command, **record})

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep a second run out of this folder. The system lets go of the lock when the process
        ends, however it ends."""
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
        self.shards.mkdir(parents=True, exist_ok=True)
        contents: dict[str, bytes] = {}
        if len(rows) or schema is not None:
            table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema)
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink)
            contents["parquet"] = sink.getvalue().to_pybytes()
        if tensors:
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            contents["safetensors"] = to_bytes(plain)
        for kind, content in contents.items():
            write_atomic(self.file(shard, kind), content)
        checksums = {kind: checksum(content) for kind, content in contents.items()}
        record = {"shard": shard, "checksums": checksums, "metadata": dict(metadata or {})}
        write_checked(self.file(shard, "json"), record)

    def read(self, shard: str, columns: Sequence[str] | None = None) -> ShardResult | None:
        """Everything of a shard, or some columns of its rows; None if it is not finished, or
        damaged and to be done again."""
        return next((result for _, result in self.scan([shard], columns=columns)), None)

    def scan(
        self,
        ids: Iterable[str],
        condition: Condition | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[tuple[str, ShardResult]]:
        """Intact shards among these, one at a time; on the way, the `condition` of all is noted."""
        for shard in ids:
            try:
                metadata, contents = self._contents(shard)
            except Damaged as damage:
                if condition is not None and self.file(shard, "json").exists():
                    condition.damaged[shard] = damage.reason
                continue
            if condition is not None:
                condition.metadata[shard] = metadata
            rows = _table(contents["parquet"], columns) if "parquet" in contents else ()
            tensors = load(contents["safetensors"]) if "safetensors" in contents else {}
            yield shard, ShardResult(rows, tensors, metadata)

    def condition(self, ids: Iterable[str]) -> Condition:
        """Which shards are whole, byte by byte. What was never finished is in neither list."""
        condition = Condition({}, {})
        for shard in ids:
            try:
                condition.metadata[shard], _ = self._contents(shard)
            except Damaged as damage:
                if self.file(shard, "json").exists():
                    condition.damaged[shard] = damage.reason
        return condition

    def ids(self) -> list[str]:
        """Shards with a mark, whatever asked for them."""
        return sorted(file.stem for file in self.shards.glob("*.json"))

    def table(self, ids: Iterable[str], columns: Sequence[str] | None = None) -> pa.Table | None:
        """Rows of the intact shards among these, in this order; None if there are none."""
        parts = []
        for shard in ids:
            try:
                _, contents = self._contents(shard)
            except Damaged:
                continue
            if "parquet" in contents:
                parts.append(_table(contents["parquet"], columns))
        return pa.concat_tables(parts, promote_options="default") if parts else None

    def tensors(self, shard: str) -> dict[str, Tensor]:
        """Of a finished shard; `Damaged` if it is not."""
        content = self._content(shard, "safetensors", self._mark(shard)["checksums"])
        return load(content)

    def metadata(self, shard: str) -> dict[str, Any]:
        return self._mark(shard)["metadata"]

    def log(self, event: str, shard: str, **more: Any) -> None:
        """One line, in one write, so that several processes may add to the file."""
        entry = {"time": time.time(), "event": event, "shard": shard, "process": os.getpid()}
        with (self.folder / LOG).open("ab", buffering=0) as file:
            file.write((json.dumps({**entry, **more}) + "\n").encode())

    def events(self) -> list[dict[str, Any]]:
        """Every line that is whole: a power cut can tear one."""
        file = self.folder / LOG
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
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

    def _mark(self, shard: str) -> dict[str, Any]:
        mark = read_checked(self.file(shard, "json"))
        if mark.get("shard") != shard:  # a file that was renamed
            raise Damaged(f"{shard}.json", "is that of another shard")
        if not all(isinstance(mark.get(part), dict) for part in ("checksums", "metadata")):
            raise Damaged(f"{shard}.json", "does not say what the shard holds")
        return mark

    def _contents(self, shard: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Metadata and checked files of a shard, by kind."""
        mark = self._mark(shard)
        sums = mark["checksums"]
        return mark["metadata"], {kind: self._content(shard, kind, sums) for kind in sums}

    def _content(self, shard: str, kind: str, checksums: Mapping[str, str]) -> bytes:
        file = self.file(shard, kind)
        try:
            content = file.read_bytes()
        except OSError as failure:
            raise Damaged(file.name, f"cannot be read ({failure.strerror})") from None
        if checksum(content) != checksums.get(kind):
            raise Damaged(file.name, "is damaged: it is not what was written")
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


def write_checked(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON object that carries its own checksum, whole or not there."""
    write_atomic(path, _checked(value))


def read_checked(path: Path) -> dict[str, Any]:
    """What `write_checked` wrote, to the last bit."""
    try:
        content = path.read_bytes()
    except OSError as failure:
        raise Damaged(path.name, f"cannot be read ({failure.strerror})") from None
    start = len(_sealed(b""))
    if content != _sealed(content[start:]):
        raise Damaged(path.name, "is damaged: it is not what was written")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):  # a checksum keeps out accidents, not strangers
        raise Damaged(path.name, "is not JSON") from None
    del value["checksum"]
    return value


def checksum(content: bytes) -> str:
    return digest(content, length=64)


def _checked(value: Mapping[str, Any]) -> bytes:
    body = json.dumps(value, indent=1).encode() + b"\n"
    return _sealed(body[1:])


def _sealed(rest: bytes) -> bytes:
    """A JSON object whose first entry is the checksum of the `rest`: checked without parsing."""
    return b'{\n "checksum": "' + checksum(rest).encode() + b'",' + rest


def _table(content: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    file = pq.ParquetFile(pa.BufferReader(content))
    return file.read(columns=None if columns is None else list(columns), use_threads=False)


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
