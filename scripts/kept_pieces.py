"""Work in pieces: each is one JSON file, so a run that stops goes on where it was, and the time it
may take is kept."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class OutOfTime(Exception):
    """The next piece was not begun."""


@dataclass
class Pieces:
    """What is finished, by name. `ends` is a time of `time.monotonic`: no piece begins after it,
    and one that has begun is finished."""

    folder: Path
    ends: float = float("inf")
    machine: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    machines: set[str] = field(default_factory=set)

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What an earlier run made, or what `make` makes now."""
        path = self.folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.json"
        if not path.is_file():
            if time.monotonic() > self.ends:
                raise OutOfTime(name)
            start = time.perf_counter()
            made = make()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            print(f"{seconds:7.1f} s  {name}", flush=True)
            write_whole(
                path,
                json.dumps(
                    {"name": name, "machine": self.machine, "seconds": seconds, "content": made}
                ),
            )
        self._read(path)  # also what was just made: the same whether it is new or not
        return self.found[name]

    def look(self) -> None:
        """Take up all that is finished, asked for or not."""
        for path in sorted(self.folder.glob("*.json")):
            self._read(path)

    def _read(self, path: Path) -> None:
        kept = json.loads(path.read_text(encoding="utf-8"))
        self.found.pop(kept["name"], None)  # what is asked for stands in the order it is asked for
        self.found[kept["name"]], self.seconds[kept["name"]] = kept["content"], kept["seconds"]
        self.machines.add(kept["machine"])


def write_whole(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def pack(values: Tensor) -> dict[str, Any]:
    """float32 numbers as text, bit by bit."""
    return {
        "shape": list(values.shape),
        "float32": (
            base64.b64encode(values.float().cpu().contiguous().numpy().tobytes()).decode("ascii")
        ),
    }


def unpack(packed: dict[str, Any]) -> Tensor:
    return torch.frombuffer(
        bytearray(base64.b64decode(packed["float32"])), dtype=torch.float32
    ).reshape(packed["shape"])
