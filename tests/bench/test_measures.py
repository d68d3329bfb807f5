"""A benchmark knows every metric of the library, says what cannot be measured, and takes nothing
that is not defined for a hole."""

from __future__ import annotations

import pytest
import torch

from seecause.attribution.attribute import attribute
from seecause.bench.measures import (
    UNDEFINED,
    family_of,
    group_options,
    higher_is_better,
    metric_groups,
    metric_sets,
    pick_metrics,
    run_group,
)
from seecause.bench.plan import Store
from seecause.bench.runner import run
from seecause.bench.tables import WIDE, table_of, to_csv, to_latex, to_markdown
from seecause.data.batch import to_batch
from seecause.data.registry import open_data
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.metrics import MetricInputs, metrics, part_truth, stability
from seecause.metrics.registry import FAMILIES
from tests.bad_files import bad_file
from tests.bench.toy import model, values, worker

QUICK = {  # every group, with as little work as it allows
    "insertion-deletion": {"order": "patch", "steps": 2},
    "perturbation": {"steps": 2},
    "removal": {"shares": (0.5,)},
    "mu-fidelity": {"subsets": 4},
    "sensitivity-n": {"shares": (0.5,), "subsets": 4},
    "infidelity": {"subsets": 2},
    "saco": {"groups": 2},
    "road": {"shares": (0.5,)},
    "stability": {"draws": 1},
}


def test_every_metric_of_the_library_has_a_family():
    assert all(entry.family in FAMILIES[:-1] for entry in metrics().values())
    columns = [column for entry in metrics().values() for column in entry.columns]
    assert metric_sets()["all"] == tuple(columns) and len(set(columns)) == len(columns)


def test_every_metric_can_be_run_and_read_back(tmp_path):
    work = worker(limit=1, methods={"sobel": {}}, metrics=metric_sets()["all"], measures=QUICK)
    store = Store(tmp_path)
    status = run(store, work)
    assert status.failed == {} and status.holes == []
    rows = store.rows(work.plan).to_pylist()
    assert [row["metric"] for row in rows] == [*metric_groups()]
    for row in rows:
        assert row["higher_is_better"] == higher_is_better(row["metric"])
        assert (row["value"] != row["value"]) == (row["reason"] == UNDEFINED)
    assert status.undefined == {
        m: n
        for m in metric_groups()
        if (n := sum(row["metric"] == m and row["reason"] == UNDEFINED for row in rows))
    }


def test_truth_and_stability_are_those_of_the_library(tmp_path):
    work = worker(
        limit=2,
        methods={"attn-grad": {}},
        metrics=("part-correctness", "part-contrastivity", "max-sensitivity"),
        measures=QUICK,
    )
    store = Store(tmp_path)
    run(store, work)

    def explain(images, target):
        return attribute(model(), images, target, "attn-grad").maps

    batch = to_batch(model(), [work.data[index] for index in range(2)])
    truth = part_truth(model(), work.data.latents(0, 2), explain)
    moved = stability(model(), batch.images, explain, batch.labels, draws=1)
    expected = {
        "part-correctness": truth.correctness,
        "part-contrastivity": truth.contrastivity,
        "max-sensitivity": moved.max_sensitivity,
    }
    for metric, mine in values(store, work.plan)["attn-grad"].items():
        torch.testing.assert_close(mine, expected[metric], rtol=1e-4, atol=1e-6, equal_nan=True)
    kept = store.tensors(work.plan.shards[0].id)
    torch.testing.assert_close(kept["parts.csdc"], truth.csdc, equal_nan=True)


def test_sets_leave_out_what_the_data_cannot_give_and_names_do_not(tmp_path):
    bad_file(tmp_path, "text")
    data = open_data(f"folder:{tmp_path}")
    picked, left_out = pick_metrics(["paper"], model(), data)
    assert picked == ("insertion", "deletion", "ins-del") and set(left_out) == {
        "aupr1",
        "aupr0",
        "pointing",
    }
    assert "part-correctness" in pick_metrics(["all"], model(), data)[1]
    for name, why in (("aupr1", "masks"), ("part-correctness", "rendered")):
        with pytest.raises(BadOption, match=why):
            pick_metrics([name], model(), data)
    with pytest.raises(UnknownName, match="paper"):
        pick_metrics(["papper"], model(), data)


def test_what_a_method_does_not_define_is_a_reason_and_not_the_end_of_the_shard():
    def refuse(*_):
        raise NotDefined("random logit", "this method has no classes", "Leave it out")

    given = MetricInputs(model(), torch.zeros(2, 3, 96, 96), torch.zeros(2, 2, 2), explain=refuse)
    found = run_group("random-logit", given, {})
    assert found.values["random-logit"].isnan().all() and "no classes" in found.reason(
        "random-logit", 1
    )


def test_what_python_callers_hand_over_is_no_option():
    assert "truth" not in group_options("parts") and "rewrap" not in group_options(
        "parameter-randomisation"
    )
    assert group_options("road")["noise"] == 0.01


def test_small_numbers_do_not_win_infidelity():
    images, maps = (
        torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(0)),
        torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(1)),
    )
    options = {**group_options("infidelity"), "subsets": 3}
    small, large = (
        run_group("infidelity", MetricInputs(model(), images, scale * maps, 0), options).values[
            "infidelity"
        ]
        for scale in (1e-6, 10.0)
    )
    assert options["scaled"] and (small > 0).all()
    torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-12)


def test_a_wide_table_is_cut_by_families():
    columns = {metric: torch.tensor([0.1, 0.2]) for metric in metric_groups()}
    table = table_of({"caap": columns, "random": {m: v + 1 for m, v in columns.items()}})
    pieces = table.column_groups()
    assert [metric for _, metrics in pieces for metric in metrics] == sorted(
        metric_groups(), key=lambda m: FAMILIES.index(family_of(m))
    )
    assert all(title and len(metrics) <= WIDE for title, metrics in pieces)
    assert to_markdown(table).count("| caap |") == to_latex(table).count(r"\toprule") == len(pieces)
    assert len(to_csv(table).splitlines()) == 1 + 2 * len(metric_groups())


def test_a_metric_that_is_equal_for_all_has_no_best():
    same = {"gini": torch.tensor([0.5, 0.5])}
    assert not any(
        cells["gini"].best for cells in table_of({"caap": same, "random": same}).cells.values()
    )


def test_a_saturated_metric_has_no_best_however_many_digits_tell_methods_apart():
    near = {
        "caap": {"insertion": torch.tensor([0.99974, 0.99975])},
        "random": {"insertion": torch.tensor([0.99976, 0.99977])},
    }
    assert not any(cells["insertion"].best for cells in table_of(near).cells.values())
    small = {
        "caap": {"infidelity": torch.tensor([1e-6, 2e-6])},
        "random": {"infidelity": torch.tensor([3e-6, 4e-6])},
    }
    assert table_of(small).cells["caap"]["infidelity"].best


def test_all_that_are_equal_as_shown_are_the_best():
    def best(**found):
        table = table_of(
            {method: {"pointing": torch.tensor(values)} for method, values in found.items()}
        )
        assert to_markdown(table).count("**") == 2 * sum(
            cells["pointing"].best for cells in table.cells.values()
        )
        return [method for method, cells in table.cells.items() if cells["pointing"].best]

    assert best(caap=[1.0, 0.0, 1.0], gae=[0.0, 1.0, 1.0], random=[0.0, 0.0, 1.0]) == [
        "caap",
        "gae",
    ]
    assert best(caap=[1.0, 0.5], gae=[1.0, 0.5 + 1e-9], random=[0.1, 0.5]) == [
        "caap",
        "gae",
    ]  # the digits shown do not tell them apart
    assert best(caap=[1.0, 0.5], gae=[1.0, 0.6], random=[0.1, 0.5]) == ["gae"]
    assert best(caap=[1.0, 1.0], gae=[1.0, 1.0 - 1e-9]) == []
    assert best(caap=[0.3, 0.4]) == ["caap"]


def test_a_method_that_saw_other_pictures_is_not_the_best():
    found = {
        "caap": {"gini": torch.tensor([0.5, 0.6])},
        "random": {"gini": torch.tensor([0.1, 0.2])},
        "mda": {"gini": torch.tensor([0.9, torch.nan])},
    }
    table = table_of(found, unranked=["mda"])
    assert [m for m, cells in table.cells.items() if cells["gini"].best] == ["caap"]
    assert table.cells["mda"]["gini"].difference.n == 1
