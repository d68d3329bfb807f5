"""The files of a shard, as bytes: rows in Parquet, tensors in safetensors, and JSON with a checksum
of its own. Workers make them, the one that runs the job writes them (`store`)."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.torch import load, save as to_bytes
from torch import Tensor

from seecause.errors import SeecauseError
from seecause.files import bytes_or_failure, digest, is_local, read_many

Files = Mapping[str, bytes | OSError]  # by name


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


@dataclass(frozen=True, eq=False)
class EncodedShard:
    """The same as bytes by kind of file: what workers send to the one that writes."""

    contents: Mapping[str, bytes]
    metadata: Mapping[str, Any]


def encoded(result: ShardResult, schema: pa.Schema | None = None) -> EncodedShard:
    """A result as the files of a shard."""
    contents: dict[str, bytes] = {}
    rows = result.rows
    if len(rows) or schema is not None:
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows), schema)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        contents["parquet"] = sink.getvalue().to_pybytes()
    if result.tensors:
        plain = {name: value.detach().cpu().contiguous() for name, value in result.tensors.items()}
        contents["safetensors"] = to_bytes(plain)
    return EncodedShard(contents, dict(result.metadata))


def read_checked(path: Path) -> dict[str, Any]:
    """A JSON object that carries its own checksum, to the last bit."""
    return parse_checked(path.name, read_file(path.parent, path.name))


def parse_checked(name: str, content: bytes) -> dict[str, Any]:
    start = len(_sealed(b""))
    if content != _sealed(content[start:]):
        raise Damaged(name, "is damaged: it is not what was written")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):  # a checksum keeps out accidents, not strangers
        raise Damaged(name, "is not JSON") from None
    del value["checksum"]
    return value


def checksum(content: bytes) -> str:
    return digest(content, length=64)


def sealed_json(value: Mapping[str, Any]) -> bytes:
    body = json.dumps(value, indent=1).encode() + b"\n"
    return _sealed(body[1:])


def _sealed(rest: bytes) -> bytes:
    """A JSON object whose first entry is the checksum of the `rest`: checked without parsing."""
    return b'{\n "checksum": "' + checksum(rest).encode() + b'",' + rest


def read_table(shard: str, content: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Rows; `Damaged` for what is no Parquet, though its checksum is right: a stranger's file."""
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        return file.read(columns=None if columns is None else list(columns), use_threads=False)
    except (pa.ArrowException, OSError, ValueError, LookupError):
        raise Damaged(f"{shard}.parquet", "is not Parquet") from None


def read_tensors(shard: str, content: bytes | None) -> dict[str, Tensor]:
    """The same for tensors; none where the shard has none."""
    try:
        return {} if content is None else load(content)
    except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError):
        raise Damaged(f"{shard}.safetensors", "is not safetensors") from None


def read_file(folder: Path, name: str, files: Files | None = None) -> bytes:
    """A file, from those that were read together if there are some."""
    if files is not None:
        content = files.get(name, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    elif not is_local(folder):
        content = read_many([folder / name])[0]
    else:
        content = bytes_or_failure(f"{folder}{os.sep}{name}")
    if isinstance(content, OSError):
        raise Damaged(name, f"cannot be read ({content.strerror or content})")
    return content
