"""A shard's name changes with everything that decides its result, and with nothing else."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
from PIL import Image
from torch import nn

import seecause as sc
from seecause import _software as inputs
from seecause._software import model_code_digest
from seecause.bench import plan as plan_module
from seecause.bench.plan import Plan, canonical, make_plan, shard_id
from seecause.data.batch import class_places
from seecause.data.registry import open_data
from seecause.errors import BadOption, UnknownName
from tests.bad_files import bad_file
from tests.bench.toy import REQUEST, model, worker

PLAN = worker().plan


def ids(plan: Plan, method: str | None = None) -> list[str]:
    return [shard.id for shard in plan.shards if method in (None, shard.method)]


def test_shards_cover_every_image_of_every_method_once():
    covered = [
        (shard.method, index) for shard in PLAN.shards for index in range(shard.start, shard.stop)
    ]
    assert covered == [(method, index) for method in REQUEST.methods for index in range(6)]
    assert len(set(ids(PLAN))) == 9
    assert ids(worker().plan) == ids(PLAN)


def test_labels_that_mean_other_classes_are_other_shards():
    other = replace(PLAN, places=PLAN.places[::-1])
    shard = ("caap", 0, 2, "digest of the pictures")
    assert shard_id(PLAN, *shard) != shard_id(other, *shard)


CHANGES = {
    "metric": {"metrics": ("ins-del",)},
    "metric option": {"measures": {"insertion-deletion": {"order": "patch", "steps": 3}}},
    "data": {"data": "critters:clean:train"},
    "target": {"target": "predicted"},
    "seed": {"seed": 1},
    "memory": {"memory": 1 << 20},
    "threads": {"threads": 2},
    "precision": {"precision": "high"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_input_renames_every_shard(what):
    assert not set(ids(worker(**CHANGES[what]).plan)) & set(ids(PLAN))


def test_an_option_renames_the_shards_of_its_method_only():
    changed = worker(methods={"caap": {"tail": "patched"}, "random": {}, "sobel": {}}).plan
    assert not set(ids(changed, "caap")) & set(ids(PLAN, "caap"))
    assert ids(changed, "random") == ids(PLAN, "random") and ids(changed, "sobel") == ids(
        PLAN, "sobel"
    )


def test_a_default_said_aloud_changes_nothing():
    said = worker(
        methods={
            "caap": {"blank": PLAN.request.methods["caap"]["blank"]},
            "random": {"seed": 0},
            "sobel": {},
        }
    )
    assert ids(said.plan) == ids(PLAN)


def test_precision_and_the_way_of_running_are_in_the_name(monkeypatch):
    named = []
    monkeypatch.setattr(
        plan_module, "canonical", lambda value: (named.append(value), canonical(value))[1]
    )
    worker()
    for decisive in named:
        assert decisive["precision"] == "highest" and decisive["plugins"] == [""] * 5
        assert decisive["run"] == [0, "float32", "cpu", 64 << 20, 1]
    assert len(named) == len(PLAN.shards)


def test_other_weights_rename_every_shard():
    one = next(model().module.parameters())
    before = one.clone()
    try:
        one.add_(1e-3)
        changed = worker().plan
    finally:
        one.copy_(before)
    assert not set(ids(changed)) & set(ids(PLAN))
    assert ids(worker().plan) == ids(PLAN)


def test_a_longer_run_asks_for_the_shards_of_a_shorter_one():
    assert ids(PLAN, "caap") == ids(worker(limit=10).plan, "caap")[:3]


def folder_plan(folder):
    request = worker(target="predicted", metrics=("ins-del",), methods={"sobel": {}}).plan.request
    return make_plan(request, model(), open_data(f"folder:{folder}"))


def test_changed_bytes_rename_the_shard_that_holds_them(tmp_path):
    files = [tmp_path / f"{name}.png" for name in "abcd"]
    for place, file in enumerate(files):
        Image.new("RGB", (96, 96), (place, 0, 0)).save(file)
    first, second = ids(folder_plan(tmp_path))
    changed = bytearray(files[3].read_bytes())
    changed[-1] ^= 1  # the same name and size
    files[3].write_bytes(changed)
    again = ids(folder_plan(tmp_path))
    assert again[0] == first and again[1] != second
    Image.new("RGB", (96, 96)).save(tmp_path / "e.png")
    assert ids(folder_plan(tmp_path))[:2] == again


@pytest.mark.parametrize("what", ["source", "scikit-learn", "pillow"])
def test_other_code_renames_every_shard(what, monkeypatch):
    known = plan_module.versions()
    monkeypatch.setattr(plan_module, "versions", lambda: {**known, what: "another"})
    assert not set(ids(worker().plan)) & set(ids(PLAN))


def test_the_digest_of_the_code_changes_with_the_code(tmp_path, monkeypatch):
    for name in ("__init__.py", "metrics.py", "cli/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    monkeypatch.setattr(inputs.seecause, "__file__", str(tmp_path / "__init__.py"))
    digest = inputs.source_digest.__wrapped__
    before = digest()
    (tmp_path / "cli" / "__init__.py").write_text("x = 2")  # draws and asks, decides nothing
    assert digest() == before
    (tmp_path / "metrics.py").write_text("x = 2")
    assert digest() != before


PLUGIN = """
from my_plugin.strength import STRENGTH


def my_method(model, images, target, *, strength: float = STRENGTH): ...
"""


def test_an_edited_plug_in_renames_its_own_shards_only(tmp_path, monkeypatch):
    package = tmp_path / "my_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "strength.py").write_text("STRENGTH = 1.0")
    (package / "method.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    my_method = importlib.import_module("my_plugin.method").my_method
    assert inputs.plugin_digest(make_plan) == ""  # ours: `versions` has it
    first = inputs.plugin_digest(my_method)
    plan, name = replace(PLAN, plugins={"method caap": first}), "method caap"
    (package / "strength.py").write_text("STRENGTH = 2.0")  # not the file of the method itself
    second = inputs.plugin_digest(my_method)
    assert first and second and first != second
    edited = replace(plan, plugins={name: second})
    for method, same in (("caap", False), ("random", True)):
        shard = next(shard for shard in PLAN.shards if shard.method == method)
        piece = (shard.start, shard.stop, shard.data)
        assert (shard_id(plan, method, *piece) == shard_id(edited, method, *piece)) == same
    (tmp_path / "single.py").write_text("def metric(): ...")
    metric = importlib.import_module("single").metric
    before = inputs.plugin_digest(metric)
    (tmp_path / "single.py").write_text("def metric(): return 1")
    assert inputs.plugin_digest(metric) != before


def test_methods_metrics_and_data_of_other_packages_are_digested(monkeypatch):
    monkeypatch.setattr(plan_module, "plugin_digest", lambda source: source.__module__)
    digests = plan_module.plugins(PLAN.request, model(), open_data(PLAN.request.data, limit=1))
    expected = {"data", "method caap", "method random", "method sobel"}
    assert {*digests} == expected | {f"metric {group}" for group in PLAN.request.measures}
    monkeypatch.setattr(plan_module, "plugin_digest", lambda source: "")  # all are ours
    assert plan_module.plugins(PLAN.request, model(), open_data(PLAN.request.data, limit=1)) == {}


def test_what_the_data_has_no_more_is_gone():
    before = replace(PLAN, samples=("a", "b", "c"), gone=("d", "e"))
    fewer = replace(PLAN, samples=("a", "c", "e"), gone=())
    assert plan_module._gone(before, replace(fewer, samples=("a", "e"))) == ["d", "b", "c"]
    assert plan_module._gone(before, fewer) == ["d"]  # as many: a limit may have chosen others
    other = replace(fewer, request=replace(PLAN.request, limit=2))
    assert plan_module._gone(before, other) == []


@pytest.mark.parametrize("name", ["../../outside", "", 7])
def test_a_shard_of_a_stranger_is_no_path(name):
    shard = replace(PLAN.shards[0], id=name)
    with pytest.raises(ValueError, match="shard "):
        plan_module._check_read(replace(PLAN, shards=(shard,)))


def test_the_manifest_tells_the_whole_plan():
    again = Plan.read(json.loads(json.dumps(PLAN.record())))
    assert again.shards == PLAN.shards
    assert again.request.methods["caap"] == json.loads(json.dumps(PLAN.request.methods["caap"]))
    assert (
        again.request.memory == 64 << 20 and PLAN.model["fingerprint"] == again.model["fingerprint"]
    )


def test_a_file_that_cannot_be_read_has_a_name_too(tmp_path):
    bad_file(tmp_path, "text")
    request = worker(target="predicted", metrics=("ins-del",)).plan.request
    plan = make_plan(request, model(), open_data(f"folder:{tmp_path}"))
    assert plan.samples == ("text.jpg",)


def test_labels_go_to_classes_by_name(tmp_path):
    names = model().classes
    for name in (names[5], names[2]):
        (tmp_path / "data" / name).mkdir(parents=True)
        bad_file(tmp_path / "data" / name, "text")
    data = open_data(f"folder:{tmp_path / 'data'}")
    assert class_places(model(), data) == tuple(names.index(name) for name in data.classes)
    (tmp_path / "data" / names[2]).rename(tmp_path / "data" / "walrus")
    with pytest.raises(UnknownName, match="walrus"):
        class_places(model(), open_data(f"folder:{tmp_path / 'data'}"))


def test_the_nine_classes_of_imagenet9_go_by_name_too():
    """Its name begins like ImageNet's, whose 1,000 classes have one order and many spellings."""
    nine = SimpleNamespace(name="imagenet9:bg_challenge:original", classes=tuple("abcdefghi"))
    native = timm.create_model("test_vit", num_classes=9).eval()
    named = sc.wrap(native, mean=(0.5,) * 3, std=(0.5,) * 3, classes=list("ihgfedcba"))
    assert class_places(named, nine) == (8, 7, 6, 5, 4, 3, 2, 1, 0)


class Own(nn.Module):
    """A module of neither this package nor a library."""


def test_the_code_of_a_model_of_ones_own_is_part_of_the_name():
    """Weights may stay while the forward changes. Ours and the libraries' have versions."""
    assert model_code_digest(model()) == ""
    assert model_code_digest(sc.load("timm:test_vit", weights="random")) == ""
    own = model_code_digest(SimpleNamespace(module=nn.Sequential(Own())))
    other, shard = replace(PLAN, plugins={"model": own}), ("caap", 0, 2, "digest of the pictures")
    assert own and shard_id(PLAN, *shard) != shard_id(other, *shard)


def test_names_alone_are_methods_with_their_defaults():
    named = replace(REQUEST, methods=["caap", "center"], metrics="aupr1")
    assert named.methods == {"caap": {}, "center": {}} and named.metrics == ("aupr1",)
    assert replace(REQUEST, methods="caap").methods == {"caap": {}}


REFUSED = {
    "method": ({"methods": {"capp": {}}}, UnknownName, "Did you mean caap"),
    "method option": ({"methods": {"caap": {"tale": 1}}}, BadOption, "tail"),
    "metric": ({"metrics": ("apur1",)}, UnknownName, "Did you mean aupr1"),
    "metric option": ({"measures": {"insertion-deletion": {"stops": 3}}}, BadOption, "steps"),
    "kind of a method option": (
        {"methods": {"rise": {"masks": "many"}}},
        BadOption,
        "a whole number",
    ),
    "choice of a method": (
        {"methods": {"caap": {"score": "probability"}}},
        BadOption,
        "prob, logprob, logit",
    ),
    "range of a method": ({"methods": {"rise": {"masks": 0}}}, BadOption, "at least 1"),
    "layers of a tail": ({"methods": {"caap": {"layers": (0, 2)}}}, BadOption, "tail=source"),
    "kind of a metric option": (
        {"measures": {"insertion-deletion": {"steps": 2.5}}},
        BadOption,
        "a whole number",
    ),
    "choice of a metric": (
        {"measures": {"insertion-deletion": {"order": "random"}}},
        BadOption,
        "pixel, patch",
    ),
    "options of a column": (
        {"measures": {"insertion": {"steps": 3}}},
        UnknownName,
        "Did you mean ins",
    ),
    "no method": ({"methods": {}}, BadOption, "at least one"),
    "target": ({"target": "lable"}, BadOption, "predicted"),
    "memory": ({"memory": -1}, BadOption, "1 or more"),
    "shard size": ({"shard_size": 0}, BadOption, "1 or more"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_mistake_is_noticed_before_anything_runs(what):
    change, error, said = REFUSED[what]
    with pytest.raises(error, match=said):
        worker(**change)
