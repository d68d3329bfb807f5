"""A cell is named by everything that decides its rows, and by nothing else; its rows are what the
library computes."""

import importlib
import json
import multiprocessing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from seecause import _software as software
from seecause.attribution.attribute import attribute
from seecause.bench import cells
from seecause.bench.cells import (
    UNDEFINED,
    Plan,
    Request,
    cell_name,
    metric_sets,
    prepare,
    run_group,
)
from seecause.data.batch import to_batch
from seecause.data.dataset import reading_with
from seecause.engine.chunks import plain_logits
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.metrics import MetricInputs, insertion_deletion, localization
from seecause.metrics.parts import part_truth
from tests.bad_files import bad_file
from tests.bench.toy import REQUEST, model, prepared

PLAN = prepared().plan
QUICK = {  # every group, with as little work as it allows
    "insertion-deletion": {"order": "patch", "steps": 2},
    "perturbation": {"steps": 2},
    "saco": {"groups": 2},
}


def names(plan: Plan, method: str = "") -> list[str]:
    return [cell.name for cell in plan.cells if method in ("", cell.title)]


CHANGES = {
    "an option of the method": {"methods": {**REQUEST.methods, "caap": {"tail": "patched"}}},
    "an option of a metric": {"measures": {"insertion-deletion": {"steps": 3}}},
    "metrics": {"metrics": ("aupr1",), "measures": {}},
    "the explained class": {"target": "predicted"},
    "the seed": {"seed": 1},
    "dtype": {"dtype": "float64"},
    "memory": {"memory": 1 << 20},
    "threads": {"threads": 2},
    "the size of cells": {"cell_size": 3},
    "data": {"data": "critters:balanced:test"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_decides_the_rows_renames_the_cells(what):
    assert not set(names(prepared(**CHANGES[what]).plan, "caap")) & set(names(PLAN, "caap"))


FOUND = {
    "weights": {"model": {**PLAN.model, "fingerprint": "other"}},
    "libraries": {"versions": {**PLAN.versions, "pillow": "other"}},
    "labels that mean other classes": {"places": PLAN.places[::-1]},
    "the code of the model": {"plugins": {"code": "other"}},
    "the code of the method": {"plugins": {"method caap": "other"}},
}


@pytest.mark.parametrize("what", FOUND)
def test_what_is_found_renames_the_cells(what):
    plans, cell = (PLAN, replace(PLAN, **FOUND[what])), (0, ["a"], "digest")
    first, second = (cell_name(plan, "caap", *cell) for plan in plans)
    assert first != second
    first, second = (cell_name(plan, "random", *cell) for plan in plans)
    assert (first == second) == (what == "the code of the method")


def test_nothing_else_renames_a_cell():
    said = {"caap": {"blank": PLAN.request.methods["caap"]["blank"]}, "random": {"seed": 0}}
    assert names(prepared(methods={**said, "sobel": {}}).plan) == names(PLAN)
    assert set(names(prepared(limit=10).plan)) > set(names(PLAN))
    assert names(prepared(methods={"sobel": {}}).plan) == names(PLAN, "sobel")
    again = Plan.read(json.loads(json.dumps(PLAN.record())))
    assert again.cells == PLAN.cells and again.request.memory == 64 << 20


def folder_work(folder) -> cells.Prepared:
    changes = {"target": "predicted", "metrics": ("ins-del",), "methods": {"sobel": {}}}
    return prepared(data=f"folder:{folder}", **changes)


def test_images_that_are_read_ahead_give_the_same_rows(tmp_path):
    """A broken image in the middle, cells that are done, and a cell that is asked for again."""
    for place in range(28):
        Image.effect_noise((120, 100 + place), 60).convert("RGB").save(tmp_path / f"{place}.png")
    (tmp_path / "17.png").write_bytes((tmp_path / "17.png").read_bytes()[:60])
    methods = {"sobel": {}, "random": {}}
    changes = {"target": "predicted", "metrics": ("deletion",), "methods": methods, "cell_size": 7}
    plain = prepared(data=f"folder:{tmp_path}", limit=28, **changes)
    todo = [cell for cell in plain.plan.cells if cell.arguments["start"] != 14]
    again = [*todo, todo[3], plain.plan.cells[2]]
    wanted = [replace(plain).run(cell).drop(["seconds"]) for cell in again]
    ahead = replace(plain)
    with reading_with(2):
        for cell, rows in zip(again, wanted, strict=True):
            assert ahead.run(cell).drop(["seconds"]).equals(rows)
    ahead.ahead = (-1, iter(()))
    assert any(json.loads(text) for rows in wanted for text in rows["reasons"].to_pylist())
    assert not multiprocessing.active_children()


def test_changed_bytes_rename_the_cell_that_holds_them(tmp_path):
    files = [tmp_path / f"{name}.png" for name in "abcd"]
    for place, file in enumerate(files):
        Image.new("RGB", (96, 96), (place, 0, 0)).save(file)
    first, second = names(folder_work(tmp_path).plan)
    changed = bytearray(files[3].read_bytes())
    changed[-1] ^= 1  # the same name and size
    files[3].write_bytes(changed)
    again = names(folder_work(tmp_path).plan)
    assert again[0] == first and again[1] != second


class Own(nn.Module):
    """A module of neither this package nor a library."""


def test_digests_of_code_change_with_the_code(tmp_path, monkeypatch):
    package = tmp_path / "my_plugin"
    package.mkdir()
    for name, text in (("__init__", ""), ("strength", "X = 1"), ("method", "def my_method(): ...")):
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    my_method = importlib.import_module("my_plugin.method").my_method
    first = software.plugin_digest(my_method)
    (package / "strength.py").write_text("X = 2")  # not the file of the method itself
    assert first and software.plugin_digest(my_method) not in ("", first)
    assert software.plugin_digest(prepare) == ""  # ours: `versions` has it
    assert software.model_code_digest(model()) == ""
    assert software.model_code_digest(SimpleNamespace(module=nn.Sequential(Own())))
    (tmp_path / "cli").mkdir()
    for name in ("__init__.py", "metrics.py", "cli/__init__.py"):
        (tmp_path / name).write_text("x = 1")
    monkeypatch.setattr(software.seecause, "__file__", str(tmp_path / "__init__.py"))
    before = software.source_digest.__wrapped__()
    (tmp_path / "cli" / "__init__.py").write_text("x = 2")  # prints and parses, computes nothing
    assert software.source_digest.__wrapped__() == before
    (tmp_path / "metrics.py").write_text("x = 2")
    assert software.source_digest.__wrapped__() != before


def test_a_method_may_have_another_name():
    work = prepared(methods={"black": {"method": "center"}}, metrics=("aupr1",), measures={})
    plain = prepared(methods={"center": {}}, metrics=("aupr1",), measures={})
    black, center = (each.run(each.plan.cells[0]) for each in (work, plain))
    assert black["aupr1"] == center["aupr1"] and not set(names(work.plan)) & set(names(plain.plan))
    assert Request("m", "d", ["caap", "center"]).methods == {"caap": {}, "center": {}}


def test_further_options_go_to_the_methods_that_have_them_and_to_metrics():
    options = {"": {"layers": (1, None)}, "caap": {"tail": "all"}}
    options["insertion-deletion"] = {"steps": 3}
    request = prepare(replace(REQUEST, limit=2), options=options, model=model()).plan.request
    assert (
        request.methods["caap"]["layers"] == (1, None) and request.methods["caap"]["tail"] == "all"
    )
    assert request.measures["insertion-deletion"]["steps"] == 3
    for wrong in ({"": {"tale": 1}}, {"caap": {"tale": 1}}, {"cap": {"tail": 1}}):
        with pytest.raises(BadOption, match=r"tale|cap\.tail"):
            prepare(REQUEST, options=wrong, model=model())


REFUSED = {
    "method": ({"methods": {"capp": {}}}, UnknownName, "Did you mean caap"),
    "method option": ({"methods": {"caap": {"tale": 1}}}, BadOption, "tail"),
    "metric": ({"metrics": ("apur1",)}, UnknownName, "Did you mean aupr1"),
    "metric option": ({"measures": {"insertion-deletion": {"stops": 3}}}, BadOption, "steps"),
    "kind": ({"methods": {"rise": {"masks": "many"}}}, BadOption, "a whole number"),
    "choice": ({"methods": {"caap": {"score": "x"}}}, BadOption, "prob, logprob, logit"),
    "kind of a metric": (
        {"measures": {"insertion-deletion": {"steps": 2.5}}}, BadOption, "a whole number",
    ),
    "options of a column": ({"measures": {"insertion": {"steps": 3}}}, UnknownName, "insertion-"),
    "no method": ({"methods": {}}, BadOption, "at least one"),
    "target": ({"target": "lable"}, BadOption, "predicted"),
    "memory": ({"memory": -1}, BadOption, "at least 1"),
    "cell size": ({"cell_size": 0}, BadOption, "at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_mistake_is_noticed_before_anything_runs(what):
    change, error, said = REFUSED[what]
    with pytest.raises(error, match=said):
        prepared(**change)


def test_the_rows_are_what_the_library_computes():
    work = prepared()
    table = work.run(PLAN.cells[0])
    batch = to_batch(work.model, [work.data[index] for index in range(2)])
    found = attribute(work.model, batch.images, batch.labels, "caap")
    options = {"order": "patch", "steps": 2}
    curves = insertion_deletion(work.model, batch.images, found.maps, batch.labels, **options)
    expected = {
        "ins-del": curves["ins-del"],
        "aupr1": localization(found.maps, batch.masks)["aupr1"],
    }
    for metric, values in expected.items():
        np.testing.assert_allclose(table[metric].to_numpy(), values, rtol=1e-4, atol=1e-6)
    first = table.to_pylist()[0]
    assert first["image"] == "critters:clean:test:0" and first["reasons"] == "{}"
    assert first["target"] == first["label"] == first["predicted"]
    np.testing.assert_allclose(first["map"], found.maps[0], rtol=1e-5)
    assert first["seconds"] > 0
    about = json.loads(table.schema.metadata[b"seecause"])
    assert about["metrics"]["insertion-deletion"]["steps"] == 2 and "select" in about["method"]


def test_shared_runs_end_with_a_change_of_the_model_or_the_images():
    images = model().zeros((96, 96))
    model().memo["shared images"] = {"images": images}
    first = plain_logits(model(), images)
    assert plain_logits(model(), images) is first
    with model().gated(torch.zeros(model().n_layers, model().n_heads)):
        assert not plain_logits(model(), images).equal(first)
    images += 1
    assert not plain_logits(model(), images).equal(first)


def test_every_metric_can_be_measured():
    sets = metric_sets()
    work = prepared(limit=1, methods={"sobel": {}}, metrics=sets["all"], measures=QUICK)
    (row,) = work.run(work.plan.cells[0]).to_pylist()
    reasons = json.loads(row["reasons"])
    for metric in sets["all"]:
        assert (row[metric] != row[metric]) == (reasons.get(metric) == UNDEFINED)


def test_truth_is_measured_once_and_is_that_of_the_library():
    options = {"methods": {"attn-grad": {}, "sobel": {}}, "metrics": ("part-correctness",)}
    work = prepared(limit=2, measures={}, **options)
    table = work.run(work.plan.cells[0])

    def explain(images, target):
        return attribute(model(), images, target, "attn-grad").maps

    truth = part_truth(model(), work.data.latents(0, 2), explain)
    known = torch.tensor(table["part-correctness"].to_pylist())
    np.testing.assert_allclose(known, truth["part-correctness"], rtol=1e-4, atol=1e-6)
    kept = torch.tensor(table["parts: csdc"].to_pylist())
    torch.testing.assert_close(kept, truth["csdc"].float(), equal_nan=True)
    first = work.last[1].truth
    work.run(work.plan.cells[1])
    assert first is not None and work.last[1].truth is first


def test_sets_leave_out_what_the_data_cannot_give_and_names_do_not(tmp_path):
    bad_file(tmp_path, "text")
    changes = {"data": f"folder:{tmp_path}", "target": "predicted", "measures": {}}
    work = prepared(**changes, metrics=("paper",))
    assert work.plan.request.metrics == ("insertion", "deletion", "ins-del")
    assert set(work.left_out) == {"aupr1", "aupr0", "pointing"}
    for name, why in (("aupr1", "masks"), ("part-correctness", "rendered")):
        with pytest.raises(BadOption, match=why):
            prepared(**changes, metrics=(name,))


def test_what_a_method_does_not_define_is_a_reason():
    def refuse(*_):
        raise NotDefined("random logit", "this method has no classes", "Leave it out")

    given = MetricInputs(model(), torch.zeros(2, 3, 96, 96), torch.zeros(2, 2, 2), explain=refuse)
    found = run_group("random-logit", given, {})
    assert found["random-logit"].isnan().all() and "no classes" in found["reasons"][1]
