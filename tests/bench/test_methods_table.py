"""The table of all methods: compared with CAAP whatever was asked for, holes counted once each, and
small to keep; and what each costs."""

from __future__ import annotations

import torch

from benchmarks import methods as costs
from scripts import methods_table, tables
from seecause.bench.plan import Store
from seecause.bench.runner import Status
from seecause.bench.tables import table_of
from tests.bench.toy import model


def status(**undefined: int) -> Status:
    return Status(1, 1, {}, {}, [], [], [], undefined)


def test_the_table_is_written_against_caap_and_says_how(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "EXPENSIVE", ("center",))
    monkeypatch.setattr(methods_table, "TRUTH", ())
    methods_table.main(
        limit=2, limit_expensive=1, method="sobel,center", device="cpu", out=tmp_path / "out",
        runs=tmp_path / "runs", shard_size=2,
    )  # fmt: skip
    page = (tmp_path / "out" / "methods-critters.md").read_text()
    assert (
        "`python scripts/methods_table.py --limit 2 --limit-expensive 1 --method caap,sobel,center`"
        in page
    )
    assert "better than caap by" in page and page.index("| caap |") < page.index(
        "| sobel |"
    ) < page.index("| center * |")
    kept = [Store(tmp_path / "runs" / name) for name in ("critters-cheap", "critters-expensive")]
    shapes = [
        tuple(tensor.shape)
        for store in kept
        for shard in store.plan().shards
        for tensor in store.tensors(shard.id).values()
    ]
    assert all(
        max((*shape, 0)) < 96 for shape in shapes
    )  # nothing of the size of a picture is kept


def test_values_that_are_not_defined_are_summed_over_runs():
    _, lines = tables.undefined([status(pointing=2), status(pointing=3, aupr1=1)])
    assert "pointing: 5 values" in lines and "aupr1: 1 values" in lines


def test_a_difference_without_an_error_has_no_ratio():
    columns = {
        "caap": {"gini": torch.tensor([0.1, 0.2])},
        "other": {"gini": torch.tensor([0.6, 0.7])},
        "none": {"gini": torch.full((2,), torch.nan)},
    }
    shown = tables.differences(table_of(columns))
    assert "+0.500 ± 0.000 (-)" in shown and "no value" in shown


def test_what_the_others_are_divided_by_is_timed_however_long_it_takes(monkeypatch):
    monkeypatch.setattr(costs, "methods", lambda: ["caap", "sobel"])
    monkeypatch.setattr(costs.peers, "captum", lambda *_, **__: {})
    monkeypatch.setattr(costs.peers, "grad_cam", lambda *_: {})
    skip = {"plain forward", "caap", "sobel", "ixg (pixels)", "simple-deletion (one patch)"}
    assert list(costs.contenders(model(), torch.zeros(1, 3, 96, 96), skip=skip)) == [
        "plain forward",
        "caap",
    ]
