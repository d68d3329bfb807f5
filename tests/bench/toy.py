"""A small benchmark that runs in a second: the embedded model on a few generated creatures."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from seecause.bench.evaluate import PreparedRun, open_model
from seecause.bench.plan import Plan, Request, Store, make_plan
from seecause.bench.store import ShardStore
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


def worker(**changes) -> PreparedRun:
    """Ready to work on `REQUEST` with some changes; the model is opened once."""
    request = replace(REQUEST, **changes)
    data = open_data(request.data, limit=request.limit)
    return PreparedRun(make_plan(request, model(), data), model(), data)


@contextmanager
def killing(count: int) -> Iterator[set[int]]:
    """Kill so many workers, each when its first shard is done and it is at the next."""
    victims: set[int] = set()
    honest = ShardStore.log

    def log(store, event, shard, **more):
        honest(store, event, shard, **more)
        process = more.get("process", os.getpid())
        if event == "done" and process not in {*victims, os.getpid()} and len(victims) < count:
            victims.add(process)
            os.kill(process, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardStore, "log", log)
        yield victims


def values(store: Store, plan: Plan) -> dict[str, dict[str, Tensor]]:
    """Values [images] by method and metric from the rows, one by one: what `read_results` tells
    from the tensors."""
    blank = torch.full((len(plan.samples),), torch.nan, dtype=torch.float64)
    metrics = plan.request.metrics
    by_name = {m: {metric: blank.clone() for metric in metrics} for m in plan.request.methods}
    for row in store.rows(plan).to_pylist():
        by_name[row["method"]][row["metric"]][row["index"]] = row["value"]
    return by_name
