"""A small benchmark that runs in a second: the embedded model on a few generated creatures."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pyarrow as pa

from seecause.bench.cells import Prepared, Request, make_plan, open_model
from seecause.data.registry import open_data
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
    request = replace(REQUEST, **changes)
    data = open_data(request.data, limit=request.limit)
    return Prepared(make_plan(request, model(), data), model(), data)


@dataclass(frozen=True)
class ToyCell:
    """A cell without a model: `do` says what happens to its worker."""

    name: str
    do: str = ""  # "", "fail", "die", or a file: die unless it is there

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True)
class ToyJob:
    key: str = "toy"
    refuses: bool = False

    def open(self):
        if self.refuses:
            raise BadOption("torch", "another version", "that of the plan")
        return toy_rows


def toy_rows(cell: ToyCell) -> pa.Table:
    if cell.do == "fail":
        raise RuntimeError(f"{cell.name} cannot be computed")
    if cell.do == "die" or (cell.do and not Path(cell.do).exists()):
        if cell.do != "die":
            Path(cell.do).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return pa.table({"image": [cell.name], "reasons": ["{}"]})
