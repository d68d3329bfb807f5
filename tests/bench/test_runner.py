"""Runs that fail, stop and go on: nothing is lost, nothing is computed twice, nothing is silently
left out."""

import json
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from seecause.bench import runner
from seecause.bench.runner import read_cell, run_cells, usual_workers
from seecause.bench.tables import read_plan, read_results, run, status, table
from seecause.data.dataset import open_data
from seecause.errors import BadOption, MissingExtra
from tests.bad_files import bad_file
from tests.bench.job import ToyJob, toy_cell, toy_rows
from tests.bench.toy import REQUEST, prepared


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of four cores on paper, which runs find and leave running."""
    ray = pytest.importorskip("ray", reason="the cluster extra is not installed")
    os.environ.update(runner.RAY_SETTINGS)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(address="local", num_cpus=4, **quiet)
    yield "local"
    ray.shutdown()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("bench") / "run"
    assert run(folder, prepared()).complete
    return folder


def times(folder) -> dict[str, int]:
    """When each cell was written."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}


def rows(folder) -> list:
    """All rows but the seconds that they took."""
    results = read_results(folder)
    return [results.rows[method].drop_columns("seconds") for method in REQUEST.methods]


def test_running_again_computes_nothing_again(whole):
    before = times(whole)
    assert run(whole, read_plan(whole).request).complete and times(whole) == before
    assert len(before) == 9 and status(whole).done == 9


def test_a_stopped_run_goes_on_and_gives_the_same_numbers(whole, tmp_path):
    heard = []

    def stop(images: int) -> None:
        heard.append(images)
        if len(heard) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, prepared(), progress=stop)
    halted = status(tmp_path)
    assert halted.done == 4 and not halted.complete
    assert halted.not_run() == {"caap": 2, "random": 4, "sobel": 4}  # the same images for all
    before = times(tmp_path)
    assert run(tmp_path, prepared()).complete and before.items() <= times(tmp_path).items()
    assert rows(tmp_path) == rows(whole)
    assert table(tmp_path).records() == table(whole).records()


def test_workers_change_no_byte_of_the_table(whole, tmp_path):
    assert run(tmp_path, prepared(), workers=2).complete
    assert rows(tmp_path) == rows(whole)


def test_processes_are_as_many_as_cores_and_work_allow():
    torch.set_num_threads(3)
    try:
        assert [usual_workers(images) for images in (40, 64, 10**6)] == [1, 2, 3]
    finally:
        torch.set_num_threads(1)


def test_a_longer_run_and_a_changed_option_compute_the_new_cells_only(tmp_path):
    methods = {"random": {}, "sobel": {}}
    run(tmp_path, prepared(limit=2, methods=methods))
    before = times(tmp_path)
    assert run(tmp_path, prepared(limit=4, methods=methods)).total == 4
    assert len(times(tmp_path)) == 4 and before.items() <= times(tmp_path).items()
    changed = {**methods, "random": {"seed": 3}}
    assert run(tmp_path, prepared(limit=4, methods=changed)).complete
    assert len(times(tmp_path)) == 6


def test_a_failing_cell_is_listed_with_its_traceback_and_tried_again(tmp_path, monkeypatch):
    work = prepared(limit=2, methods={"caap": {}, "random": {}})
    real = work.run

    def broken(cell):
        if cell.title == "random":
            raise MemoryError("tried to allocate 9 GiB")
        return real(cell)

    monkeypatch.setattr(work, "run", broken)
    state = run(tmp_path, work)
    ((name, error),) = state.failed.items()
    assert (state.done, state.pending, state.complete) == (1, [], False)
    assert name == work.plan.cells[1].name and "Traceback" in error and "9 GiB" in error
    monkeypatch.setattr(work, "run", real)
    assert run(tmp_path, work).complete and not list((tmp_path / "cells").glob("*.txt"))


@pytest.mark.parametrize("damage", ["cut", "flipped", "another file"])
def test_a_damaged_cell_is_computed_again(damage, whole, tmp_path):
    work = prepared()
    run(tmp_path, work)
    name = work.plan.cells[4].name
    path = runner.cell_file(tmp_path, name)
    content = bytearray(path.read_bytes())
    place = content.index(np.float64(read_cell(tmp_path, name)["ins-del"][0].as_py()).tobytes())
    content[place] ^= 1
    damaged = {"cut": content[:200], "flipped": bytes(content), "another file": b"PAR1"}[damage]
    path.write_bytes(damaged)
    assert read_cell(tmp_path, name) is None
    assert read_results(tmp_path).status.done == 8
    assert run(tmp_path, work).complete and rows(tmp_path) == rows(whole)


def test_images_that_cannot_be_read_are_missing_and_those_that_changed_fail(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a.png", "z.png"):
        noise = np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)
        Image.fromarray(noise).save(data / name)
    bad_file(data, "truncated")
    changes = {"data": f"folder:{data}", "target": "predicted", "metrics": ("ins-del",)}
    state = run(tmp_path / "run", prepared(**changes, methods={"sobel": {}}))
    assert state.done == state.total and not state.complete
    assert [(lost.image, lost.metric) for lost in state.missing] == [("truncated.jpg", "ins-del")]
    work = prepared(**changes, methods={"center": {}})
    Image.new("RGB", (90, 60)).save(data / "z.png")
    work.data = open_data(f"folder:{data}")
    state = run(tmp_path / "run", work)
    (error,) = state.failed.values()
    assert "changed after the run began" in error and state.done == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path, whole):
    (tmp_path / "thesis.txt").write_text("years of work")
    for folder in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(BadOption, match="--out"):
            run(folder, REQUEST)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadOption, match="bench run"):
            status(folder)
    plan = json.loads((whole / "run.json").read_text())
    for text in ("", "[]", "{}", json.dumps({**plan, "schema": 4})):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(BadOption, match="of this version"):
            status(tmp_path)


def done(folder, cells) -> list[bool]:
    return [read_cell(folder, cell.name) is not None for cell in cells]


def test_killed_workers_are_replaced_and_one_cell_that_kills_them_takes_no_other_with_it(tmp_path):
    cells = [toy_cell(f"c{n}") for n in range(6)]
    cells[1], cells[4] = toy_cell("once", str(tmp_path / "mark")), toy_cell("always", "die")
    heard = []
    run_cells(tmp_path, cells, ToyJob(), workers=2, progress=heard.append)
    assert done(tmp_path, cells) == [True] * 4 + [False, True] and len(heard) == 6
    assert "killed 4 times" in (tmp_path / "cells" / "always.error.txt").read_text()


def test_workers_report_failures_and_refusals(tmp_path):
    cells = [toy_cell("a"), toy_cell("b", "fail"), toy_cell("c")]
    run_cells(tmp_path, cells, ToyJob(), workers=2)
    assert done(tmp_path, cells) == [True, False, True]
    assert "b cannot be computed" in (tmp_path / "cells" / "b.error.txt").read_text()
    for workers in (1, 2):  # a mistake of the command ends the run
        with pytest.raises(BadOption, match="that of the plan"):
            run_cells(tmp_path, [toy_cell("d")] * 2, ToyJob(refuses=True), workers=workers)


def test_a_cluster_that_is_not_there_is_refused_in_seconds(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    for address in ("127.0.0.1:9", "nonsense:x", "localhost:99999999"):
        with pytest.raises(BadOption, match="--ray"):
            run_cells(tmp_path, [toy_cell("a")], ToyJob(), ray=address)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match="cluster"):
        run_cells(tmp_path, [toy_cell("a")], ToyJob(), ray="auto")


def test_a_cluster_gives_the_same_rows_and_repeats_what_dead_workers_held(cluster, tmp_path, whole):
    cells = [toy_cell("a"), toy_cell("once", str(tmp_path / "mark")), toy_cell("b", "fail")]
    run_cells(tmp_path, cells, ToyJob(), ray=cluster)
    assert (tmp_path / "mark").exists() and done(tmp_path, cells) == [True, True, False]
    run_cells(tmp_path / "here", cells[:2], ToyJob(), evaluate=toy_rows)
    for name in ("a", "once"):
        assert read_cell(tmp_path, name) == read_cell(tmp_path / "here", name)
    with pytest.raises(BadOption, match="that of the plan"):
        run_cells(tmp_path, [toy_cell("c")], ToyJob("other", refuses=True), ray=cluster)
    assert run(tmp_path / "run", prepared(), ray=cluster, workers=2).complete
    assert rows(tmp_path / "run") == rows(whole)
