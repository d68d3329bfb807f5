"""Every other way to choose heads: its numbers are what its definition says, on one interface."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import seecause as sc
from seecause.background import (
    HeadScores,
    LabelledImages,
    information_gains,
    penalised,
    prune_heads,
    score,
    screen,
    select,
    selectors,
)
from seecause.background.heads import random_sets
from seecause.data.dataset import IGNORE
from seecause.errors import BadOption, SeecauseError
from tests.helpers import view
from tests.tiny import pictures, tiny

NAMES = ["attention-mass", "cigma", "gating", "interchange", "random", "taylor"]
QUICK = {"gating": {"fits": 2, "steps": 2}}


def set_up(family="timm_registers", batch=3):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native, batch)
    masks = torch.zeros(batch, *native.size, dtype=torch.bool)
    masks[:, 8:24, 12:40] = True  # half a patch on either side
    return model, LabelledImages(images, torch.tensor([1, 0, 3])[:batch], masks)


def test_the_list_is_complete():
    assert sorted(selectors()) == NAMES
    assert all(entry.summary and entry.cost and entry.needs for entry in selectors().values())


def test_random_sets_are_20_draws_of_k_different_heads():
    model, _ = set_up()
    sets = random_sets(model, 5)
    assert len(sets) == 20 and all(len(set(heads)) == 5 for heads in sets)
    assert len({tuple(heads) for heads in sets}) > 15 and sets == random_sets(model, 5)
    assert not {tuple(s) for s in random_sets(model, 5, seed=1)} & {tuple(s) for s in sets[:5]}
    assert select("random", *set_up()).value.dtype == torch.float64
    counts = torch.zeros(4, 3)
    for heads in random_sets(model, 6, draws=400):
        for layer, head in heads:
            counts[layer, head] += 1
    assert counts.min() / 400 > 0.35 and counts.max() / 400 < 0.65  # no head is favoured


def test_taylor_is_the_slope_of_the_loss_in_each_gate():
    model, data = set_up()
    scores = select("taylor", model, data)
    eps, slopes = 1e-5, []
    for layer, head in [(0, 2), (3, 1)]:
        losses = []
        for sign in (-1, 1):
            gates = torch.ones(4, 3, dtype=torch.float64)
            gates[layer, head] += sign * eps
            with model.gated(gates):
                losses.append(F.cross_entropy(model(data.images), data.labels, reduction="none"))
        slope = ((losses[1] - losses[0]) / (2 * eps)).abs()
        slopes.append(float(slope.mean()))
        assert_close(scores.error[layer, head], slope.std() / 3**0.5, atol=1e-7, rtol=0)
    assert float(scores.value[0, 2] - scores.value[3, 1]) == pytest.approx(
        slopes[1] - slopes[0], abs=1e-7
    )  # the least important head has the highest score
    assert scores.value.min() == 0 and scores.protocol == {"selector": "taylor", "images": 3}


def test_the_highest_heads_come_first():
    scores = HeadScores(torch.arange(12.0).view(3, 4))
    assert scores.top(3) == [(2, 3), (2, 2), (2, 1)] and scores.top(0) == []
    assert len(scores.order()) == 11  # 0 is not above 0
    assert scores.order(positive=False)[-1] == (0, 0) and len(scores.top(99)) == 11


@pytest.mark.parametrize("guard", [True, False])
def test_cigma_is_the_guarded_score_above_its_noise_floor(model, cases, guard, monkeypatch):
    real, data = information_gains, cases.with_masks(cases.truth)
    scores = score(model, data)
    floor = float(scores.value.abs().flatten().median())
    assert select("cigma", model, data).protocol["noise_floor"] == real(model, data).noise_floor
    monkeypatch.setattr(
        "seecause.background.scoring.information_gains",
        lambda *arguments, **options: replace(real(*arguments, **options), noise_floor=floor),
    )
    above = torch.where(scores.value.abs() < floor, 0.0, scores.value)
    assert (above == 0).sum() >= 5
    expected = replace(scores, value=above)
    chosen = select("cigma", model, data, guard=guard)
    assert_close(chosen.value, (penalised(expected) if guard else expected).value)
    assert chosen.protocol["noise_floor"] == floor and chosen.protocol["guard"] is guard


def test_options_of_cigma_reach_the_score_and_the_screen(model, cases):
    data = cases.with_masks(cases.truth)
    common = {"temperature": 2.0}
    chosen = select("cigma", model, data, **common, guard=False, fill="mean")
    assert_close(chosen.value, score(model, data, **common, fill="mean").value)
    assert chosen.protocol["masks"] == "given"
    screened = select("cigma", model, data, screen=1, guard=False)
    alone = screen(model, data, top=1)
    assert_close(screened.value, alone.value, equal_nan=True)
    assert_close(screened.after["guess"], alone.after["guess"])
    pairs = replace(cases, other_object=None)
    with pytest.raises(BadOption, match="no other objects"):
        select("cigma", model, pairs, fill="swap")
    chosen = select("cigma", model, pairs, fill="swap", guard=False)
    assert_close(chosen.value, score(model, pairs, fill="swap", guard=False).value)


@pytest.mark.parametrize("name", NAMES)
def test_every_selector_scores_every_head_there_is(name):
    model, data = set_up()
    model = prune_heads(model, [(0, 1), (2, 0), (2, 1), (2, 2)])
    if selectors()[name].needs == "pairs":
        data = replace(data, other_background=data.images.flip(0))
    scores = select(name, model, data, **QUICK.get(name, {}))
    assert isinstance(scores, HeadScores) and scores.value.shape == (4, 3)
    assert scores.value.isnan()[0].tolist() == [False, False, True]
    if name != "taylor":  # a layer without heads keeps one that says nothing: the least important
        assert (2, 0) not in scores.top(5)
    assert scores.protocol["selector"] == name


def test_attention_mass_is_what_class_rows_send_to_the_background():
    model, data = set_up()
    _, cache = sc.run(model, data.images, cache=["blocks.2.probs"])
    row = cache["blocks.2.probs"][:, :, 0, model.layout.patches]
    edged = data.masks.hard.int().masked_fill(torch.arange(48) < 8, IGNORE)
    for masks, background in ((data.masks.hard, ~data.masks.hard), (edged, edged == 0)):
        share = F.avg_pool2d(background.double()[:, None], 8).flatten(1)  # [B, patches]
        found = select("attention-mass", model, data.with_masks(masks)).value
        assert_close(found[2], (row * share[:, None]).sum(-1).mean(0), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("by", "changes", "message"),
    [
        ("taylr", {}, "Did you mean taylor"),
        ("taylor", {"keep": 3}, "one of no options"),
        ("taylor", {"labels": None}, "data with labels"),
        ("random", {"labels": torch.tensor([0, 1])}, "each of the 3 images"),
        ("random", {"labels": torch.tensor([0, -1, 3])}, "a class index 0-6"),
        ("random", {"labels": torch.tensor([0.0, 1.0, 3.0])}, "a class index 0-6"),
        ("random", {"images": torch.zeros(3, 3, 16, 16), "masks": None}, "32 x 48"),
        ("attention-mass", {"masks": None}, "object masks"),
        ("gating", {"steps": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_used_is_named(by, changes, message):
    model, data = set_up()
    fields = {name: changes[name] for name in ("images", "labels", "masks") if name in changes}
    options = {name: value for name, value in changes.items() if name not in fields}
    with pytest.raises(SeecauseError, match=message):
        select(by, model, replace(data, **fields), **options)
