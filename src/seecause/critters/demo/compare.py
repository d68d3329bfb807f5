"""The compare job: which attribution method is faithful on this model? A small run of the benchmark
on Critters."""

from __future__ import annotations

import tempfile
from pathlib import Path

from seecause.bench.plan import Request, Store, make_plan
from seecause.bench.runner import run as run_bench
from seecause.bench.table import make_table
from seecause.bench.work import Worker, open_model
from seecause.critters.demo.job import Setting, Shown
from seecause.data import open_data
from seecause.report.bench import curves_section, summaries, table_section

METHODS = ("caap", "gae", "rollout", "random")
METRICS = ("aupr1", "pointing", "deletion", "ins-del")
PICTURES = 8
CHAPTER = "Compare"


def run(setting: Setting, *, methods: tuple[str, ...] = METHODS, pictures: int = PICTURES) -> Shown:
    """A table and curves of `methods` on critters-vit; `seecause bench run` does the same at any
    size."""
    request = Request(
        model="builtin:critters-vit",
        data="critters:clean:test",
        methods={name: {} for name in methods},
        metrics=METRICS,
        measures={"insertion-deletion": {"order": "patch", "steps": 8}},
        limit=pictures,
        seed=setting.seed,
        device=setting.device,
        threads=2,
    )
    model, data = open_model(request), open_data(request.data, limit=request.limit)
    plan = make_plan(request, model, data)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        run_bench(store, Worker(plan, model, data))
        sections = [
            table_section(make_table(store.rows(plan), plan), methods=summaries(plan)),
            *curves_section(store, plan),
        ]
    return Shown(sections, [])
