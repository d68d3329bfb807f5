"""Run folders that a disk or a stranger changed: read, or refused in words."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from seecause.bench.plan import Store
from seecause.bench.results import read_results
from seecause.bench.runner import inspect, run
from seecause.bench.store import _sealed
from seecause.bench.tables import table
from tests.bench.toy import worker
from tests.data.mutations import survives

HEAD = len(_sealed(b""))  # of a checked JSON file: what the checksum stands in


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    work = worker(methods={"center": {}}, metrics=("aupr1",), measures={}, limit=2)
    assert run(Store(folder), work).complete
    return folder


@pytest.fixture
def store(finished, tmp_path) -> Store:
    store = Store(shutil.copytree(finished, tmp_path / "run"))
    (store.folder / "manifest.copy").unlink()  # it would hide damage
    return store


def read(store: Store) -> None:
    plan = store.plan()
    results = read_results(store, plan)
    inspect(store, plan, results.condition)
    table(store.folder)


def test_a_damaged_run_folder_ends_in_our_error_or_in_a_damaged_shard(store):
    assert survives(store.folder / "manifest.json", lambda: read(store)) > 30
    survives(store.folder / "log.jsonl", lambda: read(store))
    for kind in ("json", "parquet", "safetensors"):
        (file,) = store.shards.glob(f"*.{kind}")
        survives(file, lambda: read(store))


def test_a_forged_run_folder_whose_checksums_are_right(store):
    def sealed(content: bytes) -> bytes:
        return _sealed(content[HEAD:])

    assert survives(store.folder / "manifest.json", lambda: read(store), 80, forge=sealed) > 30
    (mark,) = store.shards.glob("*.json")
    survives(mark, lambda: read(store), 80, forge=sealed)
