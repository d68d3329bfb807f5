"""Runs that fail, stop and go on: nothing is lost, nothing is done twice, nothing is silently left
out."""

from __future__ import annotations

import csv
import os
import signal
from collections import Counter
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from seecause.attribution.attribute import attribute
from seecause.bench import runner
from seecause.bench.evaluate import read_samples
from seecause.bench.plan import Store
from seecause.bench.results import read_results
from seecause.bench.runner import inspect, run
from seecause.bench.tables import table_of, to_csv, to_latex, write_rows
from seecause.bench.workers import LOST, RETRIES, WorkersFailed, attempt
from seecause.data.batch import to_batch
from seecause.errors import BadOption, SeecauseError, UnknownName
from seecause.metrics import insertion_deletion, localization
from seecause.report.bench import missing_section
from tests.bad_files import bad_file
from tests.bench.toy import values, worker


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run."""
    store, work = Store(tmp_path_factory.mktemp("bench") / "run"), worker()
    assert run(store, work).complete
    return store, work


def done(store: Store) -> Counter:
    return Counter(event["shard"] for event in store.events() if event["event"] == "done")


def test_the_rows_are_what_the_library_says(whole):
    store, work = whole
    batch = to_batch(work.model, [work.data[index] for index in range(6)])
    found = attribute(work.model, batch.images, batch.labels, "caap")
    curves = insertion_deletion(
        work.model, batch.images, found.maps, batch.labels, order="patch", steps=2
    )
    expected = {"ins-del": curves.difference, "aupr1": localization(found.maps, batch.masks).aupr1}
    for metric, mine in values(store, work.plan)["caap"].items():
        torch.testing.assert_close(mine, expected[metric], rtol=1e-4, atol=1e-6)
    row = store.rows(work.plan).to_pylist()[0]
    assert (
        row["image"] == "critters:clean:test:0"
        and row["target"] == row["label"]
        and row["higher_is_better"]
        and row["reason"] == ""
    )
    assert (
        row["shard"] == work.plan.shards[0].id
        and '"steps":2' in row["protocol"]
        and '"select"' in row["options"]
    )


def test_a_map_that_is_not_kept_is_read_again(whole, monkeypatch):
    store, work = whole
    maps = read_results(store, work.plan).maps
    monkeypatch.setattr("seecause.bench.results.COMPARED", 1)
    results = read_results(store, work.plan)
    assert [len(kept) for kept in results.maps.values()] == [1] * 3
    for method, by_sample in maps.items():
        assert len(by_sample) == 6
        for sample, expected in by_sample.items():
            assert torch.equal(results.map_of(method, sample), expected)


def test_running_again_does_nothing_again(whole):
    store, work = whole
    assert run(store, work).complete
    assert set(done(store).values()) == {1} and len(done(store)) == 9


def test_a_stopped_run_goes_on_and_gives_the_same_bits(whole, tmp_path):
    store, heard = Store(tmp_path), []

    def stop(images: int) -> None:
        heard.append(images)
        if len(heard) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, worker(), advance=stop)
    assert inspect(store, worker().plan).done == 4
    assert run(store, worker()).complete
    assert set(done(store).values()) == {1}
    assert store.rows(store.plan()).equals(whole[0].rows(whole[1].plan))
    assert all(
        store.file(s.id, "parquet").read_bytes() == whole[0].file(s.id, "parquet").read_bytes()
        for s in whole[1].plan.shards
    )


def test_a_run_ends_early_between_shards_when_it_is_enough(whole, tmp_path):
    store, heard = Store(tmp_path), []
    status = run(
        store,
        worker(),
        advance=heard.append,
        enough=lambda: "four will do" if len(heard) == 4 else "",
    )
    assert (status.done, len(status.pending), status.complete, status.stopped) == (
        4,
        5,
        False,
        "four will do",
    )
    assert run(store, worker(), enough=lambda: "none at all").done == 4
    status = run(store, worker())
    assert status.complete and not status.stopped and set(done(store).values()) == {1}
    assert store.rows(store.plan()).equals(whole[0].rows(whole[1].plan))


def test_pictures_are_read_once_for_all_methods(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(
        "seecause.bench.evaluate.read_samples",
        lambda data, a, b, **frame: (reads.append((a, b)), read_samples(data, a, b, **frame))[1],
    )
    quick = {"methods": {"center": {}, "random": {}, "sobel": {}}, "metrics": ("aupr1",)}
    work = partial(worker, **quick, measures={})
    assert run(Store(tmp_path / "kept"), work()).complete
    assert reads == [(0, 2), (2, 4), (4, 6)]  # of three methods
    monkeypatch.setattr("seecause.bench.evaluate.KEPT_BYTES", 1)
    assert run(Store(tmp_path / "read"), work()).complete
    assert len(reads) == 3 + 9
    monkeypatch.setattr(
        "seecause.bench.evaluate.KEPT_BYTES", work().read(work().plan.shards[0]).bytes + 1
    )
    reads.clear()
    assert run(Store(tmp_path / "one"), work()).complete
    assert reads.count((0, 2)) == 1 and len(reads) == 1 + 2 * 3  # the one that fits stays
    rows = [Store(tmp_path / name).rows(work().plan) for name in ("kept", "read", "one")]
    assert rows[0].equals(rows[1]) and rows[0].equals(rows[2])


class FakeWorker:
    """A worker that is here, and may die of an item."""

    def __init__(self, do, dies=lambda item: False, refusal=""):
        self.do, self.dies, self.out = do, dies, []
        self.opening = Future()
        self.opening.set_result(refusal)

    def submit(self, item):
        self.out.append(item)
        future = Future()
        if self.dies(item):
            future.set_exception(BrokenProcessPool("killed"))
        else:
            future.set_result(attempt(self.do, item, (SeecauseError,)))
        return future

    def is_lost(self, failure):
        return isinstance(failure, BrokenProcessPool)

    def close(self):
        pass


def hired(monkeypatch, work, **how) -> list[FakeWorker]:
    """Workers of a run, as they are begun."""
    hands: list[FakeWorker] = []

    def start(job):
        hands.append(FakeWorker(runner._shard_function(work), **how))
        return hands[-1]

    monkeypatch.setattr("seecause.bench.cluster.ProcessWorker", start)
    return hands


def test_no_more_shards_are_handed_out_than_there_are_workers(tmp_path, monkeypatch):
    store, work, heard = Store(tmp_path), worker(methods={"sobel": {}}, limit=10), []
    hands = hired(monkeypatch, work)
    status = run(
        store, work, workers=2, advance=heard.append, enough=lambda: "one will do" if heard else ""
    )
    assert (status.done, status.stopped) == (2, "one will do")
    assert [len(hand.out) for hand in hands] == [1, 1]
    assert run(store, work, workers=2).complete
    assert sorted(shard.start for hand in hands for shard in hand.out) == [0, 2, 4, 6, 8]


def test_workers_that_are_refused_do_nothing_and_say_why(tmp_path, monkeypatch):
    store, work = Store(tmp_path), worker(methods={"sobel": {}}, limit=4)
    hired(monkeypatch, work, refusal="torch is another")
    with pytest.raises(WorkersFailed, match="no worker is left: torch is another"):
        run(store, work, workers=2)
    assert inspect(store, work.plan).done == 0


def test_a_longer_run_does_the_new_images_only(tmp_path):
    store, methods = Store(tmp_path), {"random": {}, "sobel": {}}
    run(store, worker(limit=2, methods=methods))
    status = run(store, worker(limit=4, methods=methods))
    assert (
        status.complete
        and status.stale == []
        and set(done(store).values()) == {1}
        and len(done(store)) == 4
    )


def test_a_changed_option_redoes_its_shards_only_and_the_old_ones_wait(tmp_path):
    store, first = Store(tmp_path), worker(limit=2)
    run(store, first)
    changed = worker(limit=2, methods={"caap": {"tail": "patched"}, "random": {}, "sobel": {}})
    status = run(store, changed)
    assert status.complete and status.stale == [first.plan.shards[0].id]
    assert len(done(store)) == 4
    assert (
        run(store, first).complete and len(store.events()) == 8
    )  # asked for again, and still there


def test_a_failure_is_told_and_tried_again(tmp_path, monkeypatch):
    store, work = Store(tmp_path), worker(limit=2, methods={"caap": {}, "random": {}})
    real = runner.run_shard

    def broken(work, shard):
        if shard.method == "random":
            raise torch.cuda.OutOfMemoryError("tried to allocate\n 9 GiB")
        return real(work, shard)

    monkeypatch.setattr(runner, "run_shard", broken)
    status = run(store, work)
    assert not status.complete and status.done == 1 and status.pending == []
    assert status.failed == {work.plan.shards[1].id: "tried to allocate 9 GiB"}
    monkeypatch.setattr(runner, "run_shard", real)
    assert run(store, work).complete


def test_a_bad_picture_is_a_row_with_its_reason(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.png", "z.png"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)).save(
            folder / name
        )
    bad_file(folder, "truncated")
    work = worker(
        data=f"folder:{folder}", target="predicted", methods={"sobel": {}}, metrics=("ins-del",)
    )
    store = Store(tmp_path / "run")
    status = run(store, work)
    assert status.done == status.total and not status.complete
    assert [(hole.image, hole.metric) for hole in status.holes] == [("truncated.jpg", "ins-del")]
    assert "truncated" in status.holes[0].reason
    rows = store.rows(work.plan).to_pylist()
    assert [row["image"] for row in rows] == ["a.png", "truncated.jpg", "z.png"]
    assert (
        np.isnan(rows[1]["value"])
        and rows[1]["predicted"] is None
        and rows[2]["predicted"] is not None
    )
    cell = table_of(values(store, work.plan)).cells["sobel"]["ins-del"]
    assert (cell.n, cell.missing) == (2, 1)


def test_every_number_stands_in_a_csv_with_the_reason_where_it_is_missing(whole, tmp_path):
    store, work = whole
    write_rows(read_results(store, work.plan), tmp_path / "rows.csv")
    lines = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    rows = store.rows(work.plan).to_pylist()
    for line, row in zip(lines, rows, strict=True):
        assert float(line["value"]) == row["value"] and line["reason"] == row["reason"] == ""
        for name in ("image", "method", "metric", "label", "target", "predicted"):
            assert line[name] == str(row[name])
    (tmp_path / "data").mkdir()
    for name in ("=1+1.png", "z.png"):
        Image.new("RGB", (96, 96), "red").save(tmp_path / "data" / name)
    bad_file(tmp_path / "data", "truncated")
    options = {"metrics": ("ins-del",), "methods": {"sobel": {}}, "target": "predicted"}
    holes, work = Store(tmp_path / "run"), worker(data=f"folder:{tmp_path / 'data'}", **options)
    run(holes, work)
    known = read_results(holes, work.plan)
    known.values["sobel"]["=2+2"] = known.values["sobel"]["ins-del"]  # as a stranger's plan may
    write_rows(known, tmp_path / "rows.csv")
    text = (tmp_path / "rows.csv").read_text()
    first, odd, broken, _, last, _ = csv.DictReader(text.splitlines())
    assert first["image"] == "'=1+1.png" and odd["metric"] == "'=2+2" and last["value"]
    assert broken["value"] == broken["predicted"] == "" and "truncated" in broken["reason"]


def test_methods_go_through_the_pictures_together_and_nothing_older_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("seecause.bench.evaluate.ROUND", 4)
    work = worker(methods={"center": {}, "random": {}}, limit=8)
    order, kept = [], []

    def stop(images: int) -> None:
        kept.append(sorted(work.loaded))

    monkeypatch.setattr(Store, "log", lambda store, event, shard, **_: order.append(shard))
    assert run(Store(tmp_path), work, advance=stop).complete
    planned = {shard.id: (shard.method, shard.start) for shard in work.plan.shards}
    begun = [planned[shard] for shard in dict.fromkeys(order)]
    rounds = [[("center", a), ("center", a + 2), ("random", a), ("random", a + 2)] for a in (0, 4)]
    assert begun == [*rounds[0], *rounds[1]]
    assert kept[3] == [(0, 2), (2, 4)] and kept[-1] == [(4, 6), (6, 8)]


def test_a_page_lists_some_holes_and_says_where_all_are(whole):
    _, work = whole
    holes = [
        runner.MissingValue("caap", f"{number}.png", "ins-del", "torn") for number in range(999)
    ]
    status = runner.Status(9, 9, {}, {}, [], [], holes, {})
    section = missing_section(status, work.plan)
    assert str(section.body).count("torn") == 100 and "The first 100 of 999" in section.note


def test_a_run_folder_of_another_version_is_refused(whole, tmp_path):
    store = Store(tmp_path)
    store.write_manifest({**whole[1].plan.record(), "schema": 4})
    with pytest.raises(BadOption, match="of this version"):
        store.plan()


def test_masks_that_are_not_there_are_noticed_before_anything_runs(tmp_path):
    Image.new("RGB", (96, 96), "red").save(tmp_path / "a.png")
    with pytest.raises(BadOption, match="needs masks"):
        worker(
            data=f"folder:{tmp_path}", target="predicted", methods={"sobel": {}}, metrics=("aupr1",)
        )


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing(whole, tmp_path):
    store, work, killed = Store(tmp_path), worker(), []

    def kill_one(images: int) -> None:
        if not killed:
            killed.append(store.events()[-1]["process"])
            os.kill(killed[0], signal.SIGKILL)

    assert run(store, work, workers=2, advance=kill_one).complete and killed
    assert store.rows(work.plan).equals(whole[0].rows(whole[1].plan))


def test_a_shard_that_kills_its_worker_is_given_up_and_takes_no_other_with_it(
    tmp_path, monkeypatch
):
    store, work = Store(tmp_path), worker(methods={"sobel": {}}, limit=10)
    hands = hired(monkeypatch, work, dies=lambda shard: shard.start == 2)
    status = run(store, work, workers=2)
    poison = work.plan.shards[1].id
    assert (status.done, status.failed) == (4, {poison: LOST})
    handed = Counter(shard.id for hand in hands for shard in hand.out)
    assert handed.pop(poison) == RETRIES + 1 and set(handed.values()) == {1}


def test_python_has_what_the_command_line_calls(whole):
    import seecause as sc

    store, work = whole
    assert sc.bench.status(store.folder).complete and sc.bench.Store is Store
    assert sc.bench.run(store.folder, work.plan.request).complete  # nothing is done again
    assert set(done(store).values()) == {1}
    mine = sc.bench.table(str(store.folder), against="random")
    assert mine == table_of(values(store, work.plan), against="random")


def test_the_table_marks_the_best_and_compares_image_by_image(whole):
    store, work = whole
    table = table_of(values(store, work.plan), against="random")
    mine, other = (values(store, work.plan)[method]["ins-del"] for method in ("caap", "random"))
    cell = table.cells["caap"]["ins-del"]
    assert (
        cell.difference.mean == pytest.approx(float((mine - other).mean()))
        and table.cells["random"]["ins-del"].difference is None
    )
    assert cell.interval[0] <= cell.mean <= cell.interval[1]
    means = {method: table.cells[method]["ins-del"].mean for method in table.methods}
    assert [method for method in means if table.cells[method]["ins-del"].best] == [
        max(means, key=means.get)
    ]
    assert len(to_csv(table).splitlines()) == 1 + 3 * 2
    assert to_latex(table).count(r"\mathbf") == 2
    with pytest.raises(UnknownName, match="of this run"):
        table_of(values(store, work.plan), against="rollout")
