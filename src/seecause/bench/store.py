"""The run folder, the only source of truth:

    manifest.json               the plan
    shards/ID.safetensors       maps, and curves where they were measured
    shards/ID.json              seconds and memory: what may differ between equal runs
    shards/ID.parquet           the rows; written last, so this file is the mark of a finished shard
    log.jsonl                   start, done and failed, one line each, only ever added to

Every file is written beside its place, flushed to the disk and moved, so it is whole or not there,
whatever happens. Rows of different shards are joined when they are read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.bench.plan import Plan, Shard
from seecause.errors import BadOption

try:
    import fcntl
except ImportError:  # Windows: two runs at once are not noticed there
    fcntl = None  # type: ignore[assignment]

ROWS = pa.schema(
    [
        ("image", pa.string()),
        ("index", pa.int64()),
        ("label", pa.int64()),
        ("target", pa.int64()),
        ("predicted", pa.int64()),
        ("method", pa.string()),
        ("options", pa.string()),
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("higher_is_better", pa.bool_()),
        ("reason", pa.string()),
        ("model", pa.string()),
        ("model_fingerprint", pa.string()),
        ("data", pa.string()),
        ("data_fingerprint", pa.string()),
        ("seed", pa.int64()),
        ("dtype", pa.string()),
        ("protocol", pa.string()),
        ("shard", pa.string()),
        ("memory_halvings", pa.string()),
    ]
)


@dataclass(frozen=True, eq=False)
class Result:
    """What a shard gives. `said` is for the sidecar: it may differ between equal runs."""

    rows: list[dict[str, Any]]
    tensors: Mapping[str, Tensor]
    said: Mapping[str, Any]


@dataclass(frozen=True)
class Store:
    """A run folder."""

    folder: Path

    @property
    def shards(self) -> Path:
        return self.folder / "shards"

    def rows_file(self, shard: str) -> Path:
        return self.shards / f"{shard}.parquet"

    def check(self) -> None:
        """Refuse, before any work is done, a place that holds something else."""
        if self.folder.exists() and not self.folder.is_dir():
            raise BadOption("--out", str(self.folder), "a folder; this is a file")
        if self.folder.is_dir() and any(self.folder.iterdir()) and not self._ours():
            raise BadOption(
                "--out",
                str(self.folder),
                "a new folder, an empty one, or one that `seecause bench run` made",
            )

    def prepare(self, plan: Plan) -> None:
        """Put a plan in force. Shards of earlier plans stay: a plan that asks for them again finds
        them."""
        self.shards.mkdir(parents=True, exist_ok=True)
        place(
            self.folder / "manifest.json",
            (json.dumps(plan.record(), indent=1, ensure_ascii=False) + "\n").encode(),
        )

    def plan(self) -> Plan:
        """The plan in force."""
        if not (self.folder / "manifest.json").is_file() or not self._ours():
            raise BadOption(
                "run", str(self.folder), "a folder that `seecause bench run --out` made"
            )
        return Plan.read(json.loads((self.folder / "manifest.json").read_text(encoding="utf-8")))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep a second run out of this folder. The system lets go of the lock when the process
        ends, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as held:
            try:
                if fcntl is not None:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadOption(
                    "--out",
                    str(self.folder),
                    "a folder no other run writes to; wait for that one, or give another folder",
                ) from None
            for torn in self.shards.glob(".*.partial"):  # of a run that was killed
                torn.unlink()
            self._end_torn_line()
            yield

    def save(self, shard: Shard, result: Result) -> None:
        """Everything of a shard, the rows last."""
        rows = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(result.rows, schema=ROWS), rows)
        place(
            self.shards / f"{shard.id}.safetensors",
            save({name: t.detach().cpu().contiguous() for name, t in result.tensors.items()}),
        )
        place(self.shards / f"{shard.id}.json", (json.dumps(result.said) + "\n").encode())
        place(self.rows_file(shard.id), rows.getvalue().to_pybytes())

    def finished(self, plan: Plan) -> list[Shard]:
        """In the order of the plan."""
        return [shard for shard in plan.shards if self.rows_file(shard.id).is_file()]

    def stale(self, plan: Plan) -> list[str]:
        """Finished shards that the plan does not ask for."""
        asked = {shard.id for shard in plan.shards}
        return sorted(file.stem for file in self.shards.glob("*.parquet") if file.stem not in asked)

    def rows(self, plan: Plan) -> pa.Table:
        """All finished rows, in the order of the plan."""
        parts = [
            pq.read_table(self.rows_file(shard.id), schema=ROWS) for shard in self.finished(plan)
        ]
        return pa.concat_tables(parts) if parts else ROWS.empty_table()

    def tensors(self, shard: Shard) -> dict[str, Tensor]:
        return load_file(self.shards / f"{shard.id}.safetensors")

    def said(self, shard: Shard) -> dict[str, Any]:
        return json.loads((self.shards / f"{shard.id}.json").read_text(encoding="utf-8"))

    def maps(self, plan: Plan) -> dict[str, dict[int, Tensor]]:
        """Maps [gh, gw] of finished shards, by method and sample."""
        found: dict[str, dict[int, Tensor]] = {method: {} for method in plan.request.methods}
        for shard in self.finished(plan):
            tensors = self.tensors(shard)
            found[shard.method] |= dict(
                zip(tensors["index"].tolist(), tensors.get("maps", ()), strict=True)
            )
        return found

    def log(self, event: str, shard: Shard, **more: Any) -> None:
        """One line, in one write, so that several processes may add to the file."""
        entry = {
            "time": time.time(),
            "event": event,
            "shard": shard.id,
            "process": os.getpid(),
            **more,
        }
        with (self.folder / "log.jsonl").open("ab", buffering=0) as file:
            file.write((json.dumps(entry) + "\n").encode())

    def events(self) -> list[dict[str, Any]]:
        """Every line that is whole: a power cut can tear the last one."""
        file = self.folder / "log.jsonl"
        lines = (
            file.read_text(encoding="utf-8", errors="replace").splitlines()
            if file.is_file()
            else []
        )
        return [event for line in lines if (event := _parsed(line)) is not None]

    def failures(self, plan: Plan) -> dict[str, str]:
        """Why unfinished shards failed when they were last tried, by id."""
        last = {event["shard"]: event for event in self.events()}
        open_ids = {shard.id for shard in plan.shards} - {shard.id for shard in self.finished(plan)}
        return {
            shard: event["reason"]
            for shard, event in last.items()
            if shard in open_ids and event["event"] == "failed"
        }

    def _end_torn_line(self) -> None:
        """So that the next event has a line of its own."""
        file = self.folder / "log.jsonl"
        if file.is_file() and not file.read_bytes().endswith(b"\n"):
            with file.open("ab") as log:
                log.write(b"\n")

    def _ours(self) -> bool:
        """Whether a run lives here; a folder with nothing but a lock is one that was stopped before
        it began."""
        try:
            return (
                json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))["command"]
                == "bench run"
            )
        except FileNotFoundError:
            return self.folder.is_dir() and {file.name for file in self.folder.iterdir()} <= {
                "lock",
                "shards",
            }
        except (OSError, ValueError, KeyError, TypeError):
            return False


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def place(path: Path, content: bytes) -> None:
    """Write a file so that its name never stands for half of it, not even after a power cut."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
