"""A small benchmark that runs in a second: the embedded model on a few generated creatures."""

import os
import signal
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pyarrow as pa

from seecause.bench.cells import Prepared, Request, open_model, prepare
from seecause.bench.runner import Cell
from seecause.errors import BadOption

REQUEST = Request(
    model="builtin:critters-vit",
    data="critters:clean:test",
    methods={"caap": {}, "random": {}, "sobel": {}},
    metrics=("ins-del", "aupr1"),
    measures={"insertion-deletion": {"order": "patch", "steps": 2}},
    limit=6,
    cell_size=2,
)


@cache
def model():
    return open_model(REQUEST)


def prepared(**changes) -> Prepared:
    """`REQUEST` with some changes, ready to run; the model is opened once."""
    return prepare(replace(REQUEST, **changes), model=model())


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
