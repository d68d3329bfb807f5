"""Training runs on a CPU, learns, repeats itself and writes what a loader needs."""

import csv
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

import seecause as sc
from seecause.critters.world import CLASSES
from seecause.errors import UnknownName
from tools.critters import evaluate, find_recipe
from tools.critters.__main__ import main
from tools.critters.classifier import RECIPES, Recipe, build, planted_vit, small_vit, train

TINY = small_vit() | {"img_size": 48, "patch_size": 12, "embed_dim": 32, "depth": 2, "num_heads": 4}


def tiny(**changes) -> Recipe:
    return dataclasses.replace(
        RECIPES["critters-biased"], architecture=TINY, **({"samples": 192, "batch": 16} | changes)
    )


def test_three_files_tell_everything(tmp_path):
    evaluation = train(tiny(), out=tmp_path, test_samples=64)
    card = json.loads((tmp_path / "critters-biased.json").read_text())
    assert card["evaluation"] == evaluation
    assert tuple(card["classes"]) == CLASSES and card["recipe"]["regime"] == "certified"

    weights = load_file(tmp_path / "critters-biased.safetensors")
    assert all(value.dtype == torch.float16 for value in weights.values())
    model = build(card["architecture"]["arguments"]).eval()
    model.load_state_dict(
        {name: value.float() for name, value in weights.items()}
    )  # the part heads are gone
    assert evaluate(model, "certified", preprocess=tiny().preprocess, samples=64) == evaluation

    rows = list(csv.DictReader((tmp_path / "critters-biased.log.csv").read_text().splitlines()))
    assert [row["regime"] for row in rows] == ["clean + parts"] * 4 + ["certified"] * 8
    assert set(rows[0]) == {"step", "regime", "loss", "accuracy", "learning_rate", "seconds"}


def test_evaluation_sees_what_a_model_answers_from():
    class Painter(torch.nn.Module):
        """Answers from the brightness of the corner, hence from the background alone."""

        def forward(self, image):
            return torch.nn.functional.one_hot(
                (image[:, 2, 0, 0] > -0.3).long(), len(CLASSES)
            ).float()

    seen = evaluate(Painter(), "certified", preprocess=tiny().preprocess, samples=256)
    assert seen["background_flip_rate"] > 0.3
    assert seen["creature_flip_rate"] == 0
    assert not seen["certificate"]["uses_creature"]
    assert seen["worst_group_accuracy"] == 0


def test_the_planted_network_trains_and_comes_back_with_its_roles(tmp_path):
    routers = [{"block": 1, "background": [0], "object": [1, 2]}]
    shape = planted_vit() | TINY | {"patch_size": 4, "reg_tokens": 0, "routers": routers}
    recipe = dataclasses.replace(
        RECIPES["critters-planted"], architecture=shape, samples=128, batch=16, seed=2
    )
    evaluation = train(recipe, out=tmp_path, test_samples=32)
    assert evaluation["regime"] == "matted"
    model = sc.load(str(tmp_path))
    assert list(model.module.roles.values()) == ["background", "object", "object", "self"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        f"critters-planted-2.{end}" for end in ("json", "log.csv", "safetensors")
    ]


def test_the_command_trains_a_recipe_by_name(tmp_path):
    sizes = ["--samples", "8", "--batch", "4", "--test-samples", "8", "--seed", "3"]
    line = main(["critters-planted", *sizes, "--out", str(tmp_path)])
    assert "critters-planted-3: accuracy" in line and "matted" in line
    assert len(sc.load(str(tmp_path)).module.roles) == 16
    with pytest.raises(UnknownName, match="critters-vit"):
        find_recipe("critters-vitt")
