"""Cells at tiny settings, and the arithmetic behind the tables."""

from __future__ import annotations

import cells_attribution
import cells_background
import cells_faithful
import cells_heads
import cells_intervals
import cells_lvlm
import cells_words
import pytest
import torch

from seecause.bench.study import StudyContext
from seecause.errors import DataMissing

CRITTERS = {"model": "builtin:critters-vit", "data": "critters:clean:test"}
CURVES = {"order": "patch", "steps": 2}


def test_a_variant_is_asked_for_as_it_is_or_lighter():
    lighter = {"rise": {"masks": 64, "cells": 5}}
    assert cells_attribution.named("rise") == ("rise", {"method": "rise"})
    assert cells_attribution.named("gae", lighter) == ("gae", {"method": "gae"})
    assert cells_attribution.named("rise", lighter)[1] == {
        "method": "rise", "masks": 64, "cells": 5,
    }  # fmt: skip
    own = {"name": "few", "method": "rise", "masks": 8}
    asked = {"method": "rise", "masks": 8, "cells": 5}  # what a variant says itself stands
    assert cells_attribution.named(own, lighter) == ("few", asked)


def test_a_checkpoint_that_is_missing_costs_its_cell_only(tmp_path):
    with pytest.raises(DataMissing, match="critters-biased-9"):
        cells_heads.open_model(StudyContext("cpu", tmp_path), f"{tmp_path}/critters-biased-9")


def test_smoothing_is_the_mean_over_the_neighbours():
    maps = torch.zeros(1, 4, 5)
    maps[0, 1, 1] = 36
    smooth = cells_attribution.smoothed(maps)[0]
    assert smooth[1, 1] == 4 and smooth[0, 0] == 9 and smooth[0, 1] == 6 and smooth[3, 3] == 0


def test_maps_are_scored_as_they_are_and_changed(tmp_path):
    options = {**CRITTERS, "curves": CURVES, "changes": True}
    variant = {"name": "ig", "method": "integrated-gradients", "steps": 2}
    rows = cells_attribution.scored(
        StudyContext("cpu", tmp_path, limit=2), variant=variant, **options
    )
    changes = {row["change"] for row in rows}
    assert changes == {"", "patches", "smoothed", "absolute", "absolute, smoothed"}
    assert len(rows) == 2 * len(changes) and all(0 <= row["aupr1"] <= 1 for row in rows)
    plain = [row for row in rows if row["change"] == ""]
    assert plain[0]["ins-del"] == pytest.approx(plain[0]["insertion"] - plain[0]["deletion"])
    earlier = {"label": [{**row, "table": "x", "aupr1": 7.0} for row in rows]}
    again = cells_attribution.scored(
        StudyContext("cpu", tmp_path, limit=2),
        variant=variant,
        target="predicted",
        earlier=earlier,
        **options,
    )
    assert {row["aupr1"] for row in again} == {7.0} and "table" not in again[0]  # answered right


def test_settings_sanity_truth_and_depth_have_their_rows(tmp_path):
    context = StudyContext("cpu", tmp_path, limit=2)
    rows = cells_attribution.ablation(context, setting="score", curves=CURVES, **CRITTERS)
    assert [row["method"] for row in rows] == ["prob"] * 2 + ["logprob"] * 2 + ["logit"] * 2
    assert rows[0]["rank correlation with the default"] == pytest.approx(1)
    rows = cells_attribution.sanity(context, variant="rollout", steps=1, **CRITTERS)
    assert all(row["random-logit"] == pytest.approx(1) for row in rows)  # one map for all classes
    model = {"model": "builtin:critters-vit", "regime": "clean", "count": 2}
    first, *each = cells_attribution.against_truth(context, variant="rollout", **model)
    assert 0 <= first["completeness"] <= 1 and len(each) == 2
    rows = cells_attribution.class_attention(context, **CRITTERS)
    assert len(rows) == 12 and all(row["on the object"] > row["on the background"] for row in rows)
    rows = cells_attribution.background_share(context, **model)
    assert all(0 <= row["share"] <= 100 and row["flips"] == 0 for row in rows)


def removal(method, k, val, test=0.5, **more):
    row = {"table": "removal", "seed": 0, "method": method, "K": k, "removed": k, **more}
    row |= {"val worst group": val, "val accuracy": 0.5}
    return row | {"test worst group": test, "test accuracy": test}


def test_k_is_chosen_on_validation_pictures_and_beside_as_many_random_heads():
    rows = [removal(cells_heads.ERM, 0, 0.2), removal("a", 1, 0.1, 0.9), removal("a", 2, 0.3, 0.6)]
    rows += [removal(cells_heads.RANDOM, 2, 0.1, test, draw=i) for i, test in enumerate((0.2, 0.4))]
    found = {row["method"]: row for row in cells_heads.chosen(None, earlier={"removals": rows})}
    assert found["a"]["K"] == 2 and found["a"][
        "test worst group, as many at random"
    ] == pytest.approx(0.3)
    assert found[cells_heads.RANDOM]["K"] == 0  # none is allowed
    assert cells_heads.averaged([{"K": 1, "x": 1.0}, {"K": 1, "x": 2.0, "y": 1.0}])[0]["x"] == 1.5


def test_audit_of_a_model_that_ignores_the_background(tmp_path):
    sizes = {"measured": 4, "mask_steps": 1}
    (row,) = cells_heads.audit(StudyContext("cpu", tmp_path), model="builtin:critters-vit", **sizes)
    assert row["flips"] == 0 and row["BIR, exact swap"] < 0.01


def test_the_regime_is_chosen_by_what_erm_does_on_validation():
    rows = [
        {"regime": f"simplicity 0.9{i}", "val worst": worst}
        for i, worst in ((5, 1.0), (7, 1.0), (9, 0.95))
    ]
    assert cells_faithful.where_erm_fails(rows) == "simplicity 0.99"
    assert (
        cells_faithful.where_erm_fails([*rows, {"regime": "simplicity 0.97", "val worst": 0.7}])
        == "simplicity 0.97"
    )


@pytest.mark.slow
def test_a_training_of_parts_is_measured_with_and_without_its_intervention(tmp_path):
    shape = {"img_size": 48, "embed_dim": 32, "depth": 2, "num_heads": 2}
    samples = {
        "pretraining_samples": 32,
        "pretraining_batch": 16,
        "samples": 32,
        "batch": 16,
        "epochs": 2,
    }
    pictures = {"test": 64, "val": 64, "calibration": 64}
    options = {
        "regime": "where ERM fails",
        "seed": 0,
        "samples": {**samples, "architecture": shape},
    }
    earlier = {"erm": [{"regime": "simplicity 0.97", "val worst": 0.1}]}
    (row,) = cells_faithful.trained(
        StudyContext("cpu", tmp_path),
        row="iFAM, K = 4",
        pictures=pictures,
        earlier=earlier,
        **options,
    )
    assert row["regime"] == "simplicity 0.97" and 0 <= row["worst"] <= row["average"] <= 1
    assert "changed_worst" in row and len(list(tmp_path.glob("backbone-parts-0-*.pt"))) == 1


def test_the_fewest_tokens_that_hold_a_share():
    assert cells_lvlm.tokens_for(torch.tensor([5.0, -9.0, 3.0, 2.0]), 0.8) == 2


def test_effects_of_a_removal_are_changes_from_the_whole_model():
    whole = {
        "imagenet": [1, 1, 1, 0],
        "pets": [1, 1, 0, 0],
        "mixed_same": [1, 1, 0, 0],
        "mixed_rand": [0, 0, 0, 0],
    }
    for name in (*cells_background.AFTER, cells_background.SWAP):
        whole |= {f"FIG, {name}": [0.2, 0.4], f"BIG, {name}": [0.2, 0.2]}
    better = whole | {"mixed_rand": [1, 1, 0, 0], "BIG, true masks, grey": [0.0, 0.0]}
    found = cells_intervals.effects(better, whole)
    value, change = found["BG-gap"]
    assert value == 0 and change.value == -0.5
    value, change = found["BIR, true masks, grey"]
    assert value == 0 and change.value == pytest.approx(-0.4) and change.high < 0
    assert found["pets accuracy"][1] == cells_intervals.Estimate(0.0, 0.0, 0.0)


@pytest.mark.slow
def test_every_method_chooses_heads_and_the_model_is_measured_without_them(tmp_path):
    sizes = {"scored": 4, "mask_steps": 1, "measured": 4, "regression_draws": 32}
    gating = {"fits": 1, "batch": 4, "steps": 1}
    more = {"val": 32, "test": 32, "iid": 4, "retrained": 64, "draws": 1, "seed": 0, "ks": [1, 2]}
    context = StudyContext("cpu", tmp_path)
    rows = cells_heads.removals(
        context, model="builtin:critters-biased", gating=gating, **sizes, **more
    )
    removed = [row for row in rows if row["table"] == "removal"]
    none = next(row for row in removed if row["method"] == cells_heads.ERM)
    assert none["flips"] == 1 and none["test accuracy"] == 0.25
    assert all(row["removed"] <= row["K"] for row in removed)
    best = cells_heads.chosen(context, earlier={"removals": [{**row, "seed": 0} for row in rows]})
    assert {cells_heads.PRINTED, cells_heads.GREY, cells_heads.DFR} <= {
        row["method"] for row in best
    }
    ranks = {row["method"]: row for row in rows if row["table"] == "ranking"}
    assert ranks[cells_heads.GOLD]["Spearman with gold"] == pytest.approx(1)


@pytest.mark.slow
def test_without_its_planted_heads_a_model_ignores_the_background(tmp_path, monkeypatch):
    monkeypatch.setattr(cells_heads, "KS", (1,))
    sizes = {"scored": 2, "mask_steps": 1, "measured": 2, "regression_draws": 64}
    gating = {"fits": 1, "batch": 2, "steps": 1}
    context = StudyContext("cpu", tmp_path)
    rows = cells_heads.planted(context, model="builtin:critters-planted", gating=gating, **sizes)
    after = next(row for row in rows if row["method"] == "planted heads")
    assert after["largest difference"] == 0 and after["test accuracy"] == 1


SIZES = {"model": "builtin:critters-llava", "pictures": 2, "masks": 200, "floor": 1.0}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    context = StudyContext("cpu", tmp_path_factory.mktemp("work"))
    return context, {"heads": cells_lvlm.heads(context, part=0, parts=2, **SIZES)}


def test_heads_and_tokens_of_a_vision_language_model(traced):
    context, earlier = traced
    (row,) = earlier["heads"]
    assert row["answer"].strip() == row["object"] and row["r2"] > 0
    (row,) = cells_lvlm.tokens(context, part=0, parts=2, earlier=earlier, **SIZES)
    assert 0 <= row["sufficiency"] <= 2 and row["kept rows"] < row["rows"]
    numbers = {row["number"] for row in cells_lvlm.over_pictures(context, earlier=earlier)}
    assert "mean depth of chosen heads" in numbers


@pytest.mark.parametrize(
    ("look", "holds"),
    [
        ("part", lambda row: "left_out" in row or row["part_share"] <= 1),
        pytest.param("bfloat16", lambda row: row["r2 of bfloat16"] > 0.99, marks=pytest.mark.slow),
        ("adaptive", lambda row: row["masks"] >= 100 and row["reached"] in (0.0, 1.0)),
        pytest.param(
            "wordings",
            lambda row: row["ceiling"] <= 1 and -1 <= row["cosine_1"] <= 1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_further_look_at_a_picture(traced, look, holds):
    context, earlier = traced
    (row,) = cells_lvlm.further(context, look=look, count=1, level=0.5, earlier=earlier, **SIZES)
    assert holds(row) and row["picture"] == 0


@pytest.mark.slow
def test_every_share_of_ablated_heads_is_tried(traced):
    context, earlier = traced
    rows = cells_lvlm.further(context, look="ratios", count=1, earlier=earlier, **SIZES)
    assert [row["p"] for row in rows] == list(cells_lvlm.RATIOS)


def test_a_sentence_is_right_if_all_three_marks_are():
    right = {"gains": [5.0, 0.1, -0.6], "told": [1.0, 0.0, 0.0]}
    against = {"gains": [5.0, 0.1, -1.1], "told": [1.0, 0.0, 0.0]}
    unseen = {"gains": [0.2, 0.1], "told": [1.0, 0.0]}
    assert cells_words.share_right([right, against, unseen, right], 0.7) == 0.5
