"""critters-ifam's recipe at toy size: what it writes, what it draws, and the study around it."""

import csv
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

import seecause as sc
from seecause.critters.world import CLASSES
from tools.critters import ifam
from tools.critters.ifam_backbone import RECIPES, IfamRecipe, backbone_shape

TINY = backbone_shape() | {"img_size": 48, "embed_dim": 32, "depth": 2, "num_heads": 2}


def tiny(**changes) -> IfamRecipe:
    sizes = {
        "pretraining_samples": 32,
        "pretraining_batch": 16,
        "samples": 64,
        "batch": 16,
        "epochs": 2,
        "regime": "certified",
    }
    return dataclasses.replace(RECIPES["critters-ifam"], architecture=TINY, **(sizes | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("zoo")
    return out, ifam.train(tiny(), out=out, test_samples=32)


def test_three_files_tell_everything(trained):
    out, evaluation = trained
    card = json.loads((out / "critters-ifam.json").read_text())
    assert (
        card["evaluation"] == json.loads(json.dumps(evaluation))
        and tuple(card["classes"]) == CLASSES
    )
    assert all(
        value.dtype in (torch.float16, torch.bool)
        for value in load_file(out / "critters-ifam.safetensors").values()
    )
    rows = list(csv.DictReader((out / "critters-ifam.log.csv").read_text().splitlines()))
    assert [row["phase"] for row in rows] == ["seeing"] * 2 + ["parts"] * 4
    assert {result["quantile"] for result in card["thresholds"]} == {0.97, 0.99}
    assert (
        len(evaluation["validation"]) == 3 * 5
        and "iou" in evaluation["mask"]
        and evaluation["samples"] == 32
    )
    model = sc.load(str(out))
    assert model.layout.grid == (8, 8) and model.module.parts == 4
