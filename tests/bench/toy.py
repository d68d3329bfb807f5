"""A small benchmark that runs in a second: the embedded model on a few generated creatures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from seecause.bench.plan import Request, make_plan
from seecause.bench.work import Worker, open_model
from seecause.data.registry import open_data

REQUEST = Request(
    model="builtin:critters-vit",
    data="critters:clean:test",
    methods={"caap": {}, "random": {}, "sobel": {}},
    metrics=("ins-del", "aupr1"),
    measures={"insertion-deletion": {"order": "patch", "steps": 2}},
    limit=6,
    shard_size=2,
)


@cache
def model():
    return open_model(REQUEST)


def worker(**changes) -> Worker:
    """Ready to work on `REQUEST` with some changes; the model is opened once."""
    request = replace(REQUEST, **changes)
    data = open_data(request.data, limit=request.limit)
    return Worker(make_plan(request, model(), data), model(), data)
