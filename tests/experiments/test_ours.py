"""Our own experiments, and the leaderboard: known causes decide, plug-ins compete."""

from __future__ import annotations

import torch

from seecause.attribution.registry import METHODS, methods
from seecause.experiments import base, ours
from seecause.experiments.base import Part
from tests.plugins import installed, write_package

ORACLE = """
from seecause.attribution.registry import Maps, method
from seecause.critters.planted import vivid_patches


@method("oracle", forwards="0", needs="pixels", class_specific=False)
def oracle(model, images, target):
    '''Where something vivid is.'''
    return Maps(vivid_patches(model.preprocess.raw(images), model.patch).double(), target)
"""


def part(data: str, model: str, count: int = 4) -> Part:
    return Part({"spec": f"builtin:{model}"}, data, count, 0, count, "label", "cpu")


def test_a_plug_in_competes_and_the_truth_is_known(tmp_path, monkeypatch, request):
    """A map of the creature is right about a model that reads creatures, and wrong about one that
    reads backgrounds."""
    points = {"seecause.methods:oracle": "oracle_method:oracle"}
    request.addfinalizer(lambda: METHODS["transformer"].entries.pop("oracle", None))
    folder = write_package(tmp_path, {"oracle_method.py": ORACLE}, points)
    with installed(folder, monkeypatch):
        assert {"world": "causes", "method": "oracle"} in ours.entries()
        rows = ours.compete(world="causes", method="oracle", limit=6, device="cpu")
        parts = ours.compete(world="parts", method="oracle", limit=6, device="cpu")
    scores = {kind: [r["score"] for r in rows if kind in r["image"]] for kind in ("vit", "biased")}
    assert min(scores["vit"]) > 0.9 and max(scores["biased"]) < 0.1 and len(rows) == 12
    assert all(0 <= row["score"] <= 1 for row in parts)


def test_heads_that_read_the_background_are_found_by_exchange_and_not_by_lot():
    found = ours.compete(world="heads", method="interchange", limit=8, device="cpu")
    lot = ours.compete(world="heads", method="random", limit=8, device="cpu")
    assert [row["score"] for row in found] == [1.0] and 0.0 < lot[0]["score"] < 1.0
    assert found[0]["data"] == "heads"


def test_every_method_and_selector_competes():
    grid = base.find_experiment("critters/leaderboard").cells
    names = {world: {c["method"] for c in grid if c["world"] == world} for world in ours.WORLDS}
    assert names["parts"] == names["causes"] == set(methods())
    assert "cigma" in names["heads"] and all("random" in known for known in names.values())


def test_edits_of_all_heads_make_the_model_say_what_the_other_image_shows(monkeypatch):
    monkeypatch.setitem(ours.RANKINGS, "all", lambda engine: torch.arange(48.0))
    monkeypatch.setattr(ours, "COUNTS", (48,))
    rows = ours.redirected(ranking="all", limit=2, device="cpu")
    assert [row["changed"] for row in rows] == [100.0, 100.0]
