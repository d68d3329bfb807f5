"""A name in the store stands for a whole file, its mark is the last to appear, and what the disk
did to a file later is noticed, named and done again."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pytest
import torch

from seecause.bench import store as store_module
from seecause.bench.plan import ROWS, Store
from seecause.bench.runner import inspect, run
from seecause.bench.shard_files import sealed_json
from seecause.bench.store import Damaged, ShardStore, read_checked
from seecause.errors import BadOption
from tests.bench.toy import worker

PLAN = worker().plan
SHARD = PLAN.shards[0]
ROW = {name: None for name in ROWS.names}
KINDS = ("parquet", "safetensors", "json")


def save(store: Store, shard: str, *values: float) -> None:
    rows = [{**ROW, "value": value, "index": place} for place, value in enumerate(values)]
    maps = torch.arange(18.0).reshape(2, 3, 3)
    metadata = {"seconds": {"read": 0.25}, "images": 2, "holes": [["a", "b", "gone"]]}
    store.save(shard, rows=rows, schema=ROWS, tensors={"maps": maps}, metadata=metadata)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "run")
    store.prepare(PLAN)
    return store


def test_what_is_saved_comes_back(store):
    save(store, SHARD.id, 0.1, float("nan"))
    assert store.finished(PLAN) == [SHARD]
    assert store.rows(PLAN).column("value").to_pylist()[0] == 0.1
    assert store.rows(PLAN, ["value"]).column_names == ["value"]
    assert torch.equal(store.tensors(SHARD.id)["maps"], torch.arange(18.0).reshape(2, 3, 3))
    assert store.read(SHARD.id).metadata["seconds"] == {"read": 0.25}
    assert sorted(file.suffix for file in store.shards.iterdir()) == [
        ".json",
        ".parquet",
        ".safetensors",
    ]


def test_any_job_can_keep_its_shards_here(tmp_path):
    store = ShardStore(tmp_path / "study", "lvlm study")
    store.write_manifest({"question": "what is it?"})
    assert store.manifest() == {"command": "lvlm study", "question": "what is it?"}
    assert store.read("a") is None
    store.save("a", tensors={"deltas": torch.ones(3)}, metadata={"answer": "cat", "share": None})
    store.save("b", rows=[{"x": 1, "y": "one"}, {"x": 2, "y": None}])
    store.save("c")
    assert torch.equal(store.read("a").tensors["deltas"], torch.ones(3))
    assert store.read("a").metadata == {"answer": "cat", "share": None}
    assert store.read("b").rows.to_pylist() == [{"x": 1, "y": "one"}, {"x": 2, "y": None}]
    assert store.read("c").metadata == {} and store.ids() == ["a", "b", "c"]
    store.file("a", "safetensors").write_bytes(b"")
    assert store.read("a") is None and list(store.condition("abc").metadata) == ["b", "c"]
    with pytest.raises(BadOption, match="bench run"):
        Store(store.folder).check()


def test_rows_come_in_the_order_of_the_plan(store):
    for place in (2, 0, 1):
        save(store, PLAN.shards[place].id, float(place))
    assert store.rows(PLAN).column("value").to_pylist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_shard_that_was_not_written_to_its_end_is_not_finished(store, monkeypatch, written):
    write, count = store_module.write_atomic, 0

    def stop_after(path, content):
        nonlocal count
        if count == written:
            raise KeyboardInterrupt
        count += 1
        write(path, content)

    monkeypatch.setattr(store_module, "write_atomic", stop_after)
    with pytest.raises(KeyboardInterrupt):
        save(store, SHARD.id, 1.0)
    assert store.finished(PLAN) == [] and store.rows(PLAN).num_rows == 0
    assert inspect(store, PLAN).damaged == {}  # stopped, which is no damage


def broken(content: bytes, how: str) -> bytes:
    half = len(content) // 2
    return {
        "cut": content[:half],
        "empty": b"",
        "random": random.Random(0).randbytes(len(content)),
        "zeros": bytes(len(content)),
        "longer": content + b"\0",
    }[how]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["cut", "empty", "random", "zeros", "longer"])
def test_a_damaged_file_is_named_and_its_shard_is_not_done(store, kind, how):
    for shard in PLAN.shards[:2]:
        save(store, shard.id, 1.0)
    file = store.file(SHARD.id, kind)
    file.write_bytes(broken(file.read_bytes(), how))
    status = inspect(store, PLAN)
    assert status.done == 1 and SHARD in status.pending
    assert list(status.damaged) == [SHARD.id] and file.name in status.damaged[SHARD.id]
    assert store.finished(PLAN) == [PLAN.shards[1]] and store.rows(PLAN).num_rows == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_gone_is_noticed(store, kind):
    save(store, SHARD.id, 1.0)
    store.file(SHARD.id, kind).unlink()
    status = inspect(store, PLAN)
    assert status.done == 0 and SHARD in status.pending
    if kind != "json":  # without its mark a shard was never finished
        assert f"{SHARD.id}.{kind} cannot be read" in status.damaged[SHARD.id]
    assert store.read(SHARD.id) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_noticed(store, kind):
    save(store, SHARD.id, 0.5, 0.25)
    file = store.file(SHARD.id, kind)
    whole, draw = file.read_bytes(), random.Random(f"bits of {kind}")
    for _ in range(200):
        place, bit = draw.randrange(len(whole)), draw.randrange(8)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        file.write_bytes(flipped)
        condition = store.condition([SHARD.id])
        assert condition.metadata == {} and list(condition.damaged) == [SHARD.id], (place, bit)
    file.write_bytes(whole)
    assert list(store.condition([SHARD.id]).metadata) == [SHARD.id]


def test_shards_that_changed_places_are_noticed(store):
    for shard in PLAN.shards[:2]:
        save(store, shard.id, 1.0)
    for kind in KINDS:
        store.file(SHARD.id, kind).write_bytes(store.file(PLAN.shards[1].id, kind).read_bytes())
    assert "another shard" in store.condition([SHARD.id]).damaged[SHARD.id]


def test_damaged_shards_are_done_again(tmp_path):
    store, work = Store(tmp_path), worker(methods={"sobel": {}})
    assert run(store, work).complete
    rows = store.rows(work.plan)
    for shard, kind in zip(work.plan.shards, KINDS, strict=True):
        file = store.file(shard.id, kind)
        file.write_bytes(file.read_bytes()[:-3])
    assert inspect(store, work.plan).done == 0
    assert run(store, work).complete and store.rows(work.plan).equals(rows)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_bytes(
        sealed_json({"command": "bench run", "share": 0.1, "names": ["ä", None, True]})
    )
    whole, draw = path.read_bytes(), random.Random(0)
    for _ in range(200):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            read_checked(path)


BROKEN = [b"", b"{", b"\xff\xfe", b"[]", b"3", b'{"command": "bench run"}']


@pytest.mark.parametrize("content", [*BROKEN, None])
def test_a_damaged_manifest_is_read_from_its_copy(store, caplog, content):
    save(store, SHARD.id, 1.0)
    path = store.folder / "manifest.json"
    path.unlink() if content is None else path.write_bytes(content)
    store.check()
    assert store.plan().shards == PLAN.shards and inspect(store, store.plan()).done == 1
    assert "its copy is read instead" in caplog.text


@pytest.mark.parametrize("content", BROKEN)
def test_a_damaged_manifest_without_a_copy_is_written_anew_by_the_same_command(tmp_path, content):
    store, work = Store(tmp_path), worker(methods={"sobel": {}})
    run(store, work)
    (tmp_path / "index.html").write_text("an earlier page")
    for name in ("manifest.json", "manifest.copy"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadOption, match=r"manifest\.json is damaged.*same `seecause bench run`"):
        store.plan()
    status = run(store, work)
    assert status.complete and store.plan().shards == work.plan.shards
    assert len([event for event in store.events() if event["event"] == "done"]) == 3


def test_a_kill_during_the_first_manifest_does_not_lock_the_folder(tmp_path):
    for name in ("lock", ".manifest.json.1.partial", "log.jsonl"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "shards").mkdir()
    store, work = Store(tmp_path), worker(methods={"sobel": {}}, limit=2)
    store.check()
    assert run(store, work).complete
    assert not list(tmp_path.glob(".*.partial"))


def test_torn_drafts_of_a_killed_run_are_cleared_away(store):
    (store.shards / ".x.parquet.1.partial").write_bytes(b"half")
    (store.folder / ".manifest.json.1.partial").write_bytes(b"half")
    with store.locked():
        assert list(store.shards.iterdir()) == [] and not list(store.folder.glob(".*"))


def test_two_runs_cannot_share_a_folder(store):
    with (
        store.locked(),
        pytest.raises(BadOption, match="no other run"),
        Store(store.folder).locked(),
    ):
        pass
    with store.locked():  # and the lock does not outlive its run
        pass


def test_shards_of_another_plan_are_stale(store):
    save(store, SHARD.id, 1.0)
    other = worker(seed=1).plan
    assert store.finished(other) == [] and store.stale(other) == [SHARD.id]
    assert store.stale(PLAN) == []


def test_a_failure_counts_until_the_shard_is_done(store):
    store.log("start", SHARD.id)
    store.log("failed", SHARD.id, reason="out of luck")
    assert inspect(store, PLAN).failed == {SHARD.id: "out of luck"}
    save(store, SHARD.id, 1.0)
    assert inspect(store, PLAN).failed == {}


def test_a_torn_line_of_the_log_costs_that_line_only(store):
    store.log("start", SHARD.id)
    with (store.folder / "log.jsonl").open("ab") as log:
        log.write(b'7\n{"time": 1.0, "event": "fai\xc3')
    assert [event["event"] for event in store.events()] == ["start"]
    with store.locked():
        store.log("failed", SHARD.id, reason="out of luck")
    assert [event["event"] for event in store.events()] == ["start", "failed"]
    assert store.failures([SHARD.id]) == {SHARD.id: "out of luck"}


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


def test_rows_of_shards_with_other_columns_stand_together(tmp_path):
    store = ShardStore(tmp_path, "study")
    store.save("a", rows=[{"x": 1}])
    store.save("b", rows=[{"x": 2, "y": "new"}])
    assert store.table(["a", "b"]).to_pylist() == [{"x": 1, "y": None}, {"x": 2, "y": "new"}]
    assert isinstance(store.table(["b"]), pa.Table) and store.table([]) is None


@pytest.mark.parametrize("kind", ["/../../../manifest.json", "\ud800", "\0", "txt"])
def test_a_mark_that_names_other_files_is_damage(store, kind):
    save(store, SHARD.id, 0.1)
    mark = read_checked(store.file(SHARD.id, "json"))
    sums = {**mark["checksums"], kind: "0"}
    store.file(SHARD.id, "json").write_bytes(sealed_json({**mark, "checksums": sums}))
    assert "no shard has" in store.condition([SHARD.id]).damaged[SHARD.id]
    assert store.read(SHARD.id) is None
