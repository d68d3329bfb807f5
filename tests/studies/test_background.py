"""The background study on a toy folder and a tiny transformer: every cell, one after the other."""

from __future__ import annotations

import cells_background
import cells_intervals
import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import seecause as sc
from seecause.bench.study import StudyContext
from seecause.data.imagenet import imagenet_wnids
from tests.files import lines
from tests.tiny import scramble

SIDE, BREEDS = 48, ("Abyssinian", "pug", "beagle")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    module = scramble(VisionTransformer(**shape, num_classes=1000))
    return sc.wrap(module, mean=(0.5,) * 3, std=(0.5,) * 3, size=(32, 32))


@pytest.fixture
def real(tmp_path, model):
    """The layout of the real folder. Photos of a breed are nearly alike and labelled as the model
    answers, so that it is right."""
    pets, rng = tmp_path / "pets", np.random.default_rng(0)
    table, listed = ["image,breed,imagenet_index,wnid"], []
    (pets / "images").mkdir(parents=True)
    (pets / "annotations" / "trimaps").mkdir(parents=True)
    bases: dict[int, np.ndarray] = {}  # by answer
    while len(bases) < len(BREEDS):
        base = (rng.integers(20, 230, 3) + rng.integers(-19, 20, (SIDE, SIDE, 3))).astype(np.uint8)
        bases[int(model(model.preprocess(Image.fromarray(base))).argmax())] = base
    for number, (breed, (answer, base)) in enumerate(zip(BREEDS, bases.items(), strict=True)):
        for count in range(5):
            pixels = base + rng.integers(0, 2, base.shape, dtype=np.uint8)
            trimap = np.full((SIDE, SIDE), 2, np.uint8)
            trimap[12:36, 10:30], trimap[14:34, 12:28] = 3, 1
            Image.fromarray(pixels).save(pets / "images" / f"{breed}_{count}.jpg", format="PNG")
            Image.fromarray(trimap).save(pets / "annotations" / "trimaps" / f"{breed}_{count}.png")
            table.append(f"{breed}_{count},{breed},{answer},x")
            listed.append(f"{breed}_{count} {number + 1} 1 1")
    lines(pets / "imagenet_labels.csv", *table)
    lines(pets / "annotations" / "test.txt", *listed)
    for wnid in imagenet_wnids()[:3]:
        folder = tmp_path / "imagenet" / "val" / wnid
        folder.mkdir(parents=True)
        pixels = rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "a.JPEG", format="PNG")
    return tmp_path


def test_every_cell_runs_and_its_intervals_hold_their_values(real, model, tmp_path, monkeypatch):
    monkeypatch.setattr(StudyContext, "load", lambda self, name, **options: model)
    setup = {
        "model": "toy", "weights": "", "pets": "pets:{real}/pets",
        "imagenet": "imagenet:{real}/imagenet",
        "ks": [1, 2], "mask_steps": 1, "mixes": 1, "draws": 2, "seed": 0,
        "gating": {"fits": 1, "steps": 1, "batch": 4},
    }  # fmt: skip
    context, options = StudyContext("cpu", tmp_path, real=real), {"setup": setup}
    earlier = {"answers": cells_background.answers(context, **options), "masks": []}
    for part in range(4):
        earlier["masks"] += cells_background.masks(context, part=part, **options)
    assert len(earlier["masks"]) == 15
    options["earlier"] = earlier
    earlier["audit"] = cells_background.audit(context, **options)
    earlier["scores"] = []
    for by in ("discovered masks", "true masks", "swap", "regression", "controls", "gating",
               "contrastive gating"):  # fmt: skip
        earlier["scores"] += cells_background.scores(context, by=by, **options)
    assert len({row["method"] for row in earlier["scores"]}) == len(earlier["scores"]) == 19
    earlier["removals"] = []
    for sets in ("chosen", "random", "single heads"):
        earlier["removals"] += cells_background.removals(context, sets=sets, **options)
    rows = cells_intervals.intervals(context, earlier=earlier)
    known = {(row["table"], row["row"], row["measure"]): row for row in rows}
    assert known["composites", "original", "right"]["value"] == 1
    assert ("audit", "control: centre, grey", "BIR, ratio of means") in known
    assert known["removal", "the whole model", "change of BG-gap"]["value"] == 0
    assert sum(row["row"] == "one head" for row in rows) == 4 * 6  # heads, measures
    assert all(
        row["low"] <= row["value"] + 1e-9 and row["value"] <= row["high"] + 1e-9 for row in rows
    )
