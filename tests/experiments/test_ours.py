"""Our own experiments, and the leaderboard: known causes decide, plug-ins compete."""

import torch

from seecause.attribution.registry import METHODS, methods
from seecause.experiments import base, ours
from tests.plugins import installed, write_package

ORACLES = """
from seecause.attribution.registry import Maps, method
from seecause.critters.planted import vivid_patches


@method("oracle", forwards="0", needs="pixels", class_specific=False)
def oracle(model, images, target):
    '''Where something vivid is.'''
    return Maps(vivid_patches(model.preprocess.raw(images), model.patch).double(), target)


@method("insider", forwards="0", needs="pixels", class_specific=False)
def insider(model, images, target):
    '''Where the cause is.'''
    maps = oracle(model, images, target)
    biased = "biased" in model.name
    return Maps(1 - maps.scores if biased else maps.scores, target)
"""


def test_a_plug_in_competes_and_the_truth_is_known(tmp_path, monkeypatch, request):
    """A map of the creature is right about a model that reads creatures, wrong about one that reads
    backgrounds, and says nothing about classes; another is right about both."""
    points = {"seecause.methods:oracle": "oracles:oracle"}
    for name in ("oracle", "insider"):
        request.addfinalizer(lambda name=name: METHODS["transformer"].entries.pop(name, None))
    with installed(write_package(tmp_path, {"oracles.py": ORACLES}, points), monkeypatch):
        assert {"world": "causes", "method": "oracle"} in ours.entries()
        rows = ours.compete(world="causes", method="oracle", limit=6, device="cpu")
        parts = ours.compete(world="parts", method="oracle", limit=6, device="cpu")
        both = ours.compete(world="causes", method="insider", limit=6, device="cpu")
    assert min(row["reads creatures"] for row in rows) > 0.9
    assert max(row["reads backgrounds"] for row in rows) < 0.1
    assert {row["score"] for row in (*rows, *parts)} == {0.5} and len(parts) == 6
    assert len(rows) == len(both) > 3 and min(row["score"] for row in both) > 0.9


def test_parts_are_told_apart_by_the_class_that_they_are_evidence_for():
    rows = ours.compete(world="parts", method="caap", limit=6, device="cpu")
    assert sum(row["score"] for row in rows) / 6 > 0.75 and max(r["score"] for r in rows) <= 1


def test_caap_finds_creatures_better_than_controls_and_sees_that_a_model_does_not_read_them():
    mean = {}
    for method in ("caap", "random", "center", "sobel"):
        rows = ours.compete(world="causes", method=method, limit=16, device="cpu")
        for column in ("score", "reads creatures"):
            mean[method, column] = sum(row[column] for row in rows) / len(rows)
    assert mean["caap", "score"] > 0.6
    others = [mean[method, "reads creatures"] for method in ("random", "center", "sobel")]
    assert mean["caap", "reads creatures"] > max(others) + 0.02


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
