"""Methods x images x metrics on one model, in pieces that survive a power cut.

    request = sc.bench.Request("builtin:critters-vit", "critters:clean:test",
                               methods={"caap": {}, "rollout": {}}, metrics=("paper",), limit=64)
    sc.bench.run("runs/first", request).complete
    sc.bench.table("runs/first").cells["caap"]["ins-del"].mean

store     finished work in a folder, by id, with checksums: the resume store of the package
plan      what is asked -> shards, each named by a digest of everything that decides its result
measures  the metrics, by groups that share their work; options, checked before anything runs
work      one shard: read, attribute, measure
runner    what is still to do, in this process, in several, or on a Ray cluster
tables    means, errors, intervals and paired differences; CSV, LaTeX and Markdown
ablate    CAAP with one setting changed at a time, as methods of a run
study     any table: a TOML file of calls, each kept when it is done
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seecause.bench.plan import Plan, Request, Store
    from seecause.bench.runner import Status, prepare, run, status
    from seecause.bench.store import ShardStore
    from seecause.bench.study import StudyStatus, run_study
    from seecause.bench.tables import Table, table

_WHERE = {
    "Plan": "plan",
    "Request": "plan",
    "ShardStore": "store",
    "Status": "runner",
    "Store": "plan",
    "StudyStatus": "study",
    "Table": "tables",
    "prepare": "runner",
    "run": "runner",
    "run_study": "study",
    "status": "runner",
    "table": "tables",
}

__all__ = [
    "Plan",
    "Request",
    "ShardStore",
    "Status",
    "Store",
    "StudyStatus",
    "Table",
    "prepare",
    "run",
    "run_study",
    "status",
    "table",
]


def __getattr__(name: str) -> Any:
    """Import on first use: the store is used by jobs that need no benchmark."""
    if name in _WHERE:
        return getattr(importlib.import_module(f"seecause.bench.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'seecause.bench' has no attribute {name!r}")
