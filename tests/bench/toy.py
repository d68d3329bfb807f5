"""A small benchmark that runs in a second: the embedded model on a few generated creatures."""

from dataclasses import replace
from functools import cache

from seecause.bench.cells import Prepared, Request, open_model, prepare

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
