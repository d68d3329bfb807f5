"""Cells without a model, for the runner. Nothing here imports torch, so that workers start in
half a second."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from seecause.bench.runner import Cell
from seecause.errors import BadOption


def toy_cell(name: str, do: str = "") -> Cell:
    """A cell without a model. `do` says what happens to its worker: "", "fail", "die", or a file:
    die unless it is there."""
    return Cell(name, name, {"do": do})


@dataclass(frozen=True)
class ToyJob:
    key: str = "toy"
    refuses: bool = False

    def open(self):
        if self.refuses:
            raise BadOption("torch", "another version", "that of the plan")
        return toy_rows


def toy_rows(cell: Cell) -> pa.Table:
    do = cell.arguments["do"]
    if do == "fail":
        raise RuntimeError(f"{cell.name} cannot be computed")
    if do == "die" or (do and not Path(do).exists()):
        if do != "die":
            Path(do).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return pa.table({"image": [cell.name], "reasons": ["{}"]})
