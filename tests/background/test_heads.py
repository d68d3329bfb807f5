"""Every other way to choose heads: its numbers are what its definition says, on one interface."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close

import seecause as sc
from seecause.background import (
    HeadScores,
    LabelledImages,
    ablate,
    above_noise,
    information_gains,
    penalised,
    protected,
    prune_heads,
    random_sets,
    score,
    screen,
    select,
    selectors,
)
from seecause.data.dataset import IGNORE
from seecause.errors import BadOption, NotDefined, SeecauseError
from tests.helpers import view
from tests.reference.cigma import projection
from tests.tiny import pictures, scramble, tiny

NAMES = [
    "attention-mass",
    "cigma",
    "contrastive-gating",
    "gating",
    "greedy",
    "interchange",
    "loss-gain",
    "random",
    "taylor",
]
NAMES += ["weight-norm"]
QUICK = {
    "gating": {"fits": 2, "steps": 2},
    "contrastive-gating": {"fits": 2, "steps": 2},
    "greedy": {"top": 2},
}


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
    with pytest.raises(BadOption, match="draws"):
        random_sets(model, 5, draws=0)
    counts = torch.zeros(4, 3)
    for heads in random_sets(model, 0.5, draws=400):
        for layer, head in heads:
            counts[layer, head] += 1
    assert counts.min() / 400 > 0.35 and counts.max() / 400 < 0.65  # no head is favoured


def test_taylor_is_the_slope_of_the_loss_in_each_gate():
    model, data = set_up()
    scores = select("taylor", model, data, remove="most")
    eps = 1e-5
    for layer, head in [(0, 2), (3, 1)]:
        losses = []
        for sign in (-1, 1):
            gates = torch.ones(4, 3, dtype=torch.float64)
            gates[layer, head] += sign * eps
            with model.gated(gates):
                losses.append(F.cross_entropy(model(data.images), data.labels, reduction="none"))
        slope = ((losses[1] - losses[0]) / (2 * eps)).abs()
        assert_close(scores.value[layer, head], slope.mean(), atol=1e-7, rtol=0)
        assert_close(scores.error[layer, head], slope.std() / 3**0.5, atol=1e-7, rtol=0)
    assert scores.protocol == {"selector": "taylor", "remove": "most", "images": 3}
    least = select("taylor", model, data)
    assert least.order(positive=False) == scores.order(positive=False)[::-1]


def test_guards():
    value = torch.tensor([[0.3, 0.2], [0.1, torch.nan]]).double()
    after = {
        "fig_drop": torch.tensor([[0.4, 0.0], [-0.2, torch.nan]]).double(),
        "accuracy": torch.tensor([[1.0, 0.5], [1.0, torch.nan]]).double(),
    }
    scores = HeadScores(value, after=after, before={"fig": 1.0, "accuracy": 1.0})
    assert_close(
        penalised(scores, alpha=0.5).value,
        torch.tensor([[0.1, 0.2], [0.1, torch.nan]]).double(),
        equal_nan=True,
    )
    kept = protected(scores)
    assert kept.protocol["protected"] == {"fig": 0.05, "accuracy": 0.01}
    mild = {"fig_drop": torch.tensor([[0.025, 0.025, 0.03, 0.025]])}  # of FIG 0.5: just too much
    mild["accuracy"] = torch.tensor([[0.89, 0.88, 0.9, 1.0]])  # the last is better without it
    bar = HeadScores(torch.ones(1, 4), after=mild, before={"fig": 0.5, "accuracy": 0.9})
    assert protected(bar, accuracy=0.0101).value.isneginf().tolist() == [[False, True, True, False]]
    assert penalised(scores).protocol["penalty"] == 1.0
    assert (
        kept.value.isneginf().tolist() == [[True, True], [False, False]]
        and kept.value.isnan().sum() == 1
    )
    assert kept.top(3) == [(1, 0)] and kept.top(3, positive=False) == [(1, 0)]
    noisy = HeadScores(torch.tensor([[0.3, 0.2], [-0.3, 0.1]], dtype=torch.float64))
    assert above_noise(noisy, 0.2).value.tolist() == [[0.3, 0.2], [-0.3, 0.0]]
    assert above_noise(noisy, 0.2).protocol == {"noise_floor": 0.2}
    with pytest.raises(NotDefined, match="guard=True"):
        penalised(replace(scores, after={}))


def test_a_count_is_a_number_of_heads_and_a_share_one_of_all():
    scores = HeadScores(torch.arange(12.0).view(3, 4))
    assert len(scores.top(1)) == 1 and len(scores.top(1.0, positive=False)) == 12
    assert scores.top(0.25) == [(2, 3), (2, 2), (2, 1)] and scores.top(0) == []
    assert len(scores.top(0.3)) == 4  # of 3.6
    stays = HeadScores(torch.tensor([[1.0, -torch.inf], [2.0, 3.0]]))
    assert stays.top(0.5) == [(1, 1), (1, 0)]  # of four, also that which must stay
    assert scores.order(positive=False)[-1] == (0, 0)
    assert len(scores.order()) == 11  # 0 is not above 0
    for wrong in (1.5, -0.5, -1, 13):
        with pytest.raises(BadOption, match="up to 12"):
            scores.top(wrong)


def test_random_weights_choose_heads_at_chance():
    """Heads of one layer are alike before training: two models agree on as many of four as lots
    would. The same model on other pictures agrees on more."""
    pairs = [(toss(seed), toss(seed, pictures=1), toss(seed + 1)) for seed in range(0, 40, 2)]
    same, other = (
        torch.tensor([len(first & sets[place]) for first, *sets in pairs]).double()
        for place in (0, 1)
    )
    expected, spread = 4 * 4 / 12, (4 * 4 / 12 * 8 / 12 * 8 / 11) ** 0.5  # hypergeometric
    assert abs(float(other.mean()) - expected) < 3 * spread / len(pairs) ** 0.5
    assert float(same.mean()) > expected + 3 * spread / len(pairs) ** 0.5


def toss(seed: int, *, pictures: int = 0) -> set[tuple[int, int]]:
    """The four highest of twelve heads of a fresh model."""
    torch.manual_seed(seed)
    module = VisionTransformer(
        img_size=16,
        patch_size=8,
        embed_dim=24,
        depth=1,
        num_heads=12,
        num_classes=5,
        weight_init="skip",
    )
    model = sc.wrap(scramble(module, seed), mean=(0.5,) * 3, std=(0.5,) * 3, size=16, check=False)
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(pictures))
    masks = torch.zeros(6, 16, 16, dtype=torch.bool)
    masks[:, 4:12, 4:12] = True
    return set(
        score(model, LabelledImages(images, masks=masks), guard=False).top(4, positive=False)
    )


@pytest.mark.parametrize("guard", ["penalty", "protect", "none"])
def test_cigma_is_the_guarded_score_above_its_noise_floor(model, cases, guard, monkeypatch):
    real, data = information_gains, cases.with_masks(cases.truth)
    scores = score(model, data)
    floor = float(scores.value.abs().flatten().median())
    assert select("cigma", model, data).protocol["noise_floor"] == real(model, data).noise_floor
    monkeypatch.setattr(
        "seecause.background.scoring.information_gains",
        lambda *arguments, **options: replace(real(*arguments, **options), noise_floor=floor),
    )
    rule = {"penalty": penalised, "protect": protected, "none": lambda scores: scores}[guard]
    chosen = select("cigma", model, data, guard=guard)
    assert_close(chosen.value, rule(above_noise(scores, floor)).value, equal_nan=True)
    assert (above_noise(scores, floor).value == 0).sum() >= 5
    assert chosen.protocol["noise_floor"] == floor and chosen.protocol["guard"] == guard


def test_options_of_cigma_reach_the_score_and_the_screen(model, cases):
    data = cases.with_masks(cases.truth)
    common = {"operator": "resample", "temperature": 2.0, "seed": 3}
    chosen = select("cigma", model, data, **common, guard="none", fill="mean")
    assert_close(chosen.value, score(model, data, **common, fill="mean").value)
    assert chosen.protocol["masks"] == "given"
    screened = select("cigma", model, data, screen=1, verify=3, audit=0.2, guard="none")
    alone = screen(model, data, top=1, verify=3, audit=0.2)
    assert_close(screened.value, alone.scores.value, equal_nan=True)
    assert screened.protocol["screen"] == {
        "verified": 3, "audited": 3, "heads": 12,
        "agreement": alone.agreement, "recall": alone.recall,
    }  # fmt: skip
    pairs = replace(cases, other_object=None)
    with pytest.raises(BadOption, match="'none'"):
        select("cigma", model, pairs, fill="swap")
    chosen = select("cigma", model, pairs, fill="swap", guard="none")
    assert_close(chosen.value, score(model, pairs, fill="swap", guard=False).value)


def test_greedy_heads_come_in_the_order_of_their_removal():
    model, data = set_up()
    found = select("greedy", model, data, top=3, guard="none", fill="mean")
    chosen = sc.background.greedy(model, data, top=3, guard=False, fill="mean")
    assert found.order() == chosen.heads
    assert [float(found.value[head]) for head in chosen.heads] == [3, 2, 1][: len(chosen.heads)]
    for head, gain in zip(chosen.heads, chosen.gains, strict=True):
        assert found.after["score when chosen"][head] == pytest.approx(gain)


@pytest.mark.parametrize("name", NAMES)
def test_every_selector_scores_every_head_there_is(name):
    model, data = set_up()
    model = prune_heads(model, [(0, 1), (2, 0), (2, 1), (2, 2)])
    if selectors()[name].needs == "pairs":
        data = replace(data, other_background=data.images.flip(0))
    scores = select(name, model, data, **QUICK.get(name, {}))
    assert isinstance(scores, HeadScores) and scores.value.shape == (4, 3)
    assert scores.value.isnan()[0].tolist() == [False, False, True]
    assert (2, 0) not in scores.top(0.5)  # a layer without heads keeps one that says nothing
    assert scores.protocol["selector"] == name


@pytest.mark.parametrize("family", ["timm_registers", "hf_dinov2", "torchvision_vit"])
def test_norms_are_those_of_the_output_projection(family):
    native = tiny(family)
    model = view(native, check=False)
    weight = select("weight-norm", model, LabelledImages(pictures(native, 1))).value
    columns = projection(native.blocks[2]).weight.unflatten(1, (3, 8))
    assert_close(weight[2], columns.norm(dim=(0, 2)), atol=1e-10, rtol=0)


def test_loss_gains_are_those_of_ablated_models():
    model, data = set_up()
    found = select("loss-gain", model, data)
    with ablate(model, [(1, 2)]):
        without = F.cross_entropy(model(data.images), data.labels)
    gain = F.cross_entropy(model(data.images), data.labels) - without
    assert_close(found.value[1, 2], gain, atol=1e-10, rtol=0)
    assert found.protocol["guard"] is False


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
        ("taylor", {"remove": "some"}, "most, least"),
        ("taylor", {"keep": 3}, "one of remove"),
        ("taylor", {"labels": None}, "data with labels"),
        ("random", {"labels": torch.tensor([0, 1])}, "each of the 3 images"),
        ("random", {"labels": torch.tensor([0, -1, 3])}, "-1 to 3.* 0-6"),
        ("random", {"labels": torch.tensor([0.0, 1.0, 3.0])}, "whole numbers"),
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
