"""A name in the run folder stands for a whole file, and the rows are the last to appear."""

from __future__ import annotations

import json

import pytest
import torch

from seecause.bench.store import ROWS, Result, Store
from seecause.errors import BadOption
from tests.bench.toy import worker

PLAN = worker().plan
SHARD = PLAN.shards[0]
ROW = {name: None for name in ROWS.names}


def result(*values: float) -> Result:
    return Result(
        [{**ROW, "value": value, "index": place} for place, value in enumerate(values)],
        {"maps": torch.ones(2, 3, 3)},
        {"seconds": {}},
    )


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "run")
    store.prepare(PLAN)
    return store


def test_what_is_saved_comes_back(store):
    store.save(SHARD, result(0.1, float("nan")))
    assert store.finished(PLAN) == [SHARD]
    assert store.rows(PLAN).column("value").to_pylist()[0] == 0.1
    assert torch.equal(store.tensors(SHARD)["maps"], torch.ones(2, 3, 3)) and store.said(SHARD) == {
        "seconds": {}
    }
    assert sorted(file.suffix for file in store.shards.iterdir()) == [
        ".json",
        ".parquet",
        ".safetensors",
    ]


def test_rows_come_in_the_order_of_the_plan(store):
    for place in (2, 0, 1):
        store.save(PLAN.shards[place], result(float(place)))
    assert store.rows(PLAN).column("value").to_pylist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_shard_that_was_not_written_to_its_end_is_not_finished(store, monkeypatch, written):
    from seecause.bench import store as module

    place, count = module.place, 0

    def stop_after(path, content):
        nonlocal count
        if count == written:
            raise KeyboardInterrupt
        count += 1
        place(path, content)

    monkeypatch.setattr(module, "place", stop_after)
    with pytest.raises(KeyboardInterrupt):
        store.save(SHARD, result(1.0))
    assert store.finished(PLAN) == [] and store.rows(PLAN).num_rows == 0


def test_torn_drafts_of_a_killed_run_are_cleared_away(store):
    (store.shards / ".x.parquet.1.partial").write_bytes(b"half")
    with store.alone():
        assert list(store.shards.iterdir()) == []


def test_two_runs_cannot_share_a_folder(store):
    with store.alone(), pytest.raises(BadOption, match="no other run"), Store(store.folder).alone():
        pass
    with store.alone():  # and the lock does not outlive its run
        pass


def test_shards_of_another_plan_are_stale(store):
    store.save(SHARD, result(1.0))
    other = worker(seed=1).plan
    assert (
        store.finished(other) == [] and store.stale(other) == [SHARD.id] and store.stale(PLAN) == []
    )


def test_a_failure_counts_until_the_shard_is_done(store):
    store.log("start", SHARD)
    store.log("failed", SHARD, reason="out of luck")
    assert store.failures(PLAN) == {SHARD.id: "out of luck"}
    store.save(SHARD, result(1.0))
    assert store.failures(PLAN) == {}


def test_a_torn_line_of_the_log_costs_that_line_only(store):
    store.log("start", SHARD)
    with (store.folder / "log.jsonl").open("ab") as log:
        log.write(b'{"time": 1.0, "event": "fai\xc3')
    assert [event["event"] for event in store.events()] == ["start"]
    with store.alone():
        store.log("failed", SHARD, reason="out of luck")
    assert [event["event"] for event in store.events()] == ["start", "failed"] and store.failures(
        PLAN
    ) == {SHARD.id: "out of luck"}


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"command": "explain"}))
    for refused in (
        Store(tmp_path).check,
        Store(tmp_path).plan,
        Store(tmp_path / "manifest.json").check,
    ):
        with pytest.raises(BadOption):
            refused()
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]
