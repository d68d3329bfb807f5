"""Boxes and pixels: CAAP and mosaic of every family equal one native forward for each mixture."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.mosaic import MaskPlan, draw_masks
from seecause.attribution.result import Attribution
from seecause.errors import BadOption, NotDefined, UnknownName
from tests.families.dense import DENSE, tiny_dense
from tests.helpers import hooks, near
from tests.reference import caap as token_reference
from tests.reference.rows import mixed_answers
from tests.tiny import pictures

COARSE, LEVELS = [(4, 6)], [(8, 12), (4, 6), (2, 3)]
# by family: the module whose output is mixed, its fields, the grids in each tensor, what is held
SEAMS = {
    "detr": ("model.encoder", ["last_hidden_state"], [COARSE], []),
    "table_transformer": ("model.encoder", ["last_hidden_state"], [COARSE], []),
    "rf_detr": ("model.backbone.projector", [], [[(8, 8)]], ["model.enc_output_norm.0"]),
    "segformer": ("segformer", ["hidden_states"], [[(16, 24)], *([grid] for grid in LEVELS)], []),
    "mask2former": (
        "model.pixel_level_module",
        ["decoder_last_hidden_state", "decoder_hidden_states"],
        [[(16, 24)], [(2, 3)], [(4, 6)], [(8, 12)]],
        [],
    ),
}
for _name in ("rt_detr", "rt_detr_v2", "d_fine"):
    SEAMS[_name] = (
        *("model.encoder", ["last_hidden_state"], [[grid] for grid in LEVELS]),
        ["model.enc_score_head"],
    )


def asked(family):
    """What is asked of each family, and how it is read off native outputs [B, ..] by hand."""
    if "detr" in family or family in ("d_fine", "table_transformer"):
        return "box:2:frog", lambda outputs: outputs.logits[:, 2, 1]
    if family == "segformer":  # answers of 16 x 24; pixels 16 to 48, 0 to 32
        return "region:16,0,48,32:train", lambda o: o.logits[:, 2, :8, 4:12].mean(dim=(1, 2))
    return "region:16,0,48,32:train", _share_of_train


def _share_of_train(outputs):
    classes = outputs.class_queries_logits.softmax(dim=-1)[..., 2]
    masks = outputs.masks_queries_logits.sigmoid()[:, :, :8, 4:12].mean(dim=(2, 3))
    return (classes * masks).sum(dim=1).log()


@cache
def setting(family):
    native = tiny_dense(family)
    picture = 0.3 * pictures(native, batch=1)
    model = sc.wrap(native.module, check=False, **native.options)
    blank = model.preprocess.normalise(torch.ones_like(picture))
    native.module(pixel_values=picture)
    spec, read = asked(family)

    def forward(images):
        return native.module(pixel_values=images)

    at, fields, levels, held = SEAMS[family]
    part = native.module.get_submodule
    pair = [images.repeat(2, 1, 1, 1) for images in (blank, picture)]  # see `_alone`
    twin = partial(mixed_answers, forward, part(at), fields, levels, *pair)
    kept = [part(h) for h in held]
    return native, model, picture, spec, lambda w: read(twin(w, kept))[:1]


@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_caap_equals_the_slow_twin(family):
    native, model, picture, spec, twin = setting(family)
    before = hooks(native.module)  # transformers leaves some of its own
    fast = sc.attribute(model, picture, spec, score="logit").maps[0]
    grid = model.layout.grid
    slow = []
    for nearby in token_reference.box(grid):
        weights = torch.zeros(grid, dtype=torch.float64)
        weights.view(-1)[nearby] = 1
        slow.append(twin(weights))
    slow = torch.cat(slow)
    assert slow.std() > 1e-6  # the comparison means something
    near(fast.flatten(), slow, 1e-10)
    assert hooks(native.module) == before


@pytest.mark.parametrize("family", DENSE)
def test_mosaic_equals_the_slow_twin(family):
    _, model, picture, spec, twin = setting(family)
    options = {"masks": 2, "cells": 2, "seed": 5, "score": "logit"}
    fast = sc.attribute(model, picture, spec, "mosaic", **options).maps[0]
    slopes = []
    for mask in draw_masks(MaskPlan(masks=2, cells=2, seed=5), model.layout.grid):
        leaf = mask.clone().requires_grad_()
        score = twin(leaf.view(model.layout.grid))
        slopes.append(torch.autograd.grad(score, leaf)[0])
    slow = torch.stack(slopes).mean(dim=0)
    assert slow.abs().max() > 1e-6
    near(fast.flatten(), slow, 1e-10)


def test_what_is_asked_is_checked(tmp_path):
    _, model, picture, *_ = setting("detr")
    logits = model.module(pixel_values=picture).logits[0].softmax(dim=-1)
    surest = sc.attribute(model, picture)
    index = int(logits[:, :3].amax(dim=1).argmax())
    assert surest.labels[0].endswith(f"of box {index}")
    assert surest.manifest["target"]["class"] == [int(logits[index, :3].argmax())]
    train = sc.attribute(model, picture, "train")
    assert train.labels == [f"train of box {int(logits[:, 2].argmax())}"]
    both = sc.attribute(model, picture.repeat(2, 1, 1, 1), [sc.Box(0), sc.Box(1, label=1)])
    assert [label.split()[-1] for label in both.labels] == ["0", "1"]
    assert Attribution.load(both.save(tmp_path)).regions.shape == (2, 64, 96)
    for wrong, error in {
        "box:9": BadOption,
        "box:1:dog": UnknownName,
        "box:1:no object": BadOption,
        sc.Region((1, 2)): NotDefined,
    }.items():
        with pytest.raises(error):
            sc.attribute(model, picture, wrong)


def test_regions_are_corners_places_or_masks():
    _, model, picture, *_ = setting("segformer")
    logits = model.module(pixel_values=picture).logits[0]  # [3, 16, 24]
    mask = torch.zeros(64, 96)
    mask[8:12, 16:24] = 1  # one row, two columns of answers
    result = sc.attribute(model, picture, sc.Region(mask, label="frog"))
    assert result.manifest["target"]["value"][0] == pytest.approx(float(logits[1, 2, 4:6].mean()))
    assert torch.equal(result.regions[0], mask.to(torch.uint8))
    pixel = sc.attribute(model, picture, "region:18,9:frog")
    assert pixel.manifest["target"]["value"][0] == pytest.approx(float(logits[1, 2, 4]))
    assert pixel.manifest["target"]["place"] == [[18, 9, 19, 10]]
    largest = sc.attribute(model, picture)
    whole = torch.nn.functional.interpolate(logits[None], size=(64, 96), mode="bilinear")
    classes = whole.argmax(dim=1)[0]
    assert torch.equal(largest.regions[0] == 1, classes == classes.flatten().mode().values)
    for wrong in ("region:97,1,100,4", "region:a,b", sc.Region(mask[:3]), sc.Region(0 * mask)):
        with pytest.raises(BadOption):
            sc.attribute(model, picture, wrong)
    for where in ((1, 2, 3), (float("nan"), 2)):
        with pytest.raises(BadOption):
            sc.Region(where)
    with pytest.raises(NotDefined):
        sc.attribute(model, picture, "box:1")


def test_gradients_of_pixels_are_those_of_the_row():
    _, model, picture, *_ = setting("detr")
    row, leaf = model.aim(picture, "box:2:frog").model, picture.clone().requires_grad_()
    (mine,) = torch.autograd.grad(row(leaf)[0, 1], leaf)
    native = model.module(pixel_values=leaf.expand(2, -1, -1, -1)).logits[0, 2, 1]
    near(mine, torch.autograd.grad(native, leaf)[0], 1e-10)
    maps = sc.attribute(model, picture, "box:2:frog", "integrated-gradients", steps=4).maps
    assert maps.std() > 0
    with pytest.raises(NotDefined, match="many rows"):
        sc.evidence(model, picture, maps=maps)


def test_what_needs_one_answer_is_aimed_first():
    _, model, picture, *_ = setting("detr")
    maps = torch.rand(1, *model.layout.grid)
    for target in (None, 0, sc.Box(1)):
        with pytest.raises(NotDefined, match="Aim first"):
            sc.metrics.insertion_deletion(model, picture, maps, target=target)
    with pytest.raises(NotDefined, match="Aim first"):
        sc.background.discover_masks(model, picture, steps=1)
    aim = model.aim(picture, sc.Box(2))
    curve = sc.metrics.insertion_deletion(aim.model, picture, maps, target=aim.target)
    mine = model.module(pixel_values=picture).logits[0, 2].softmax(dim=-1)[aim.target]
    assert_close(curve["deletion curve"][0, 0], mine)


@pytest.mark.parametrize("family", ["segformer", "mask2former", "rt_detr", "d_fine"])
@torch.no_grad()
def test_pictures_of_another_size_are_explained(family):
    _, model, picture, *_ = setting(family)
    wide = picture.repeat(1, 1, 1, 2)
    aim = model.aim(wide, 1)
    assert aim.model.n_classes == aim.model(wide).shape[-1] == 3
    aim.model.forget()
    maps = sc.attribute(model, wide, 1).maps
    assert maps.shape[2] == 2 * model.layout.grid[1] and maps.std() > 0


def test_arrays_are_masks_and_classes():
    _, model, picture, *_ = setting("segformer")
    mask = np.zeros((64, 96), bool)
    mask[8:12, 16:24] = True
    result = sc.attribute(model, picture, sc.Region(mask), "sobel")
    assert torch.equal(result.regions[0] == 1, torch.from_numpy(mask))
    _, model, picture, *_ = setting("detr")
    both = picture.repeat(2, 1, 1, 1)
    for classes in (torch.tensor([0, 1]), np.array([0, 1])):
        labels = sc.attribute(model, both, classes, "sobel").labels
        assert [label.split()[0] for label in labels] == ["cat", "frog"]


def test_every_picture_has_its_own_other_version():
    _, model, picture, *_ = setting("detr")
    both = torch.cat([picture, picture.flip(3)])
    others = torch.stack([torch.zeros_like(picture[0]), torch.ones_like(picture[0])])
    result = sc.explain(model, both, methods=["caap"], target="box:1:frog", others=others).first
    for place in range(2):
        one = slice(place, place + 1)
        alone = sc.attribute(model, both[one], "box:1:frog", blank=others[one]).maps
        assert_close(result.maps[one], alone)
