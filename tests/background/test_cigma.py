"""CIGMA as a selector: its options, its guards and its noise floor, and which heads scores
choose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close

import seecause as sc
from seecause.background import (
    HeadScores,
    Screening,
    above_noise,
    information_gains,
    penalised,
    protected,
    score,
    screen,
    select,
)
from seecause.errors import BadOption, NotDefined
from tests.tiny import scramble


@pytest.mark.parametrize("guard", ["penalty", "protect", "none"])
def test_cigma_is_the_guarded_score_above_its_noise_floor(model, cases, guard, monkeypatch):
    real = information_gains
    scores = score(model, cases.images, cases.oracle, target=cases.labels)
    floor = float(scores.value.abs().flatten().median())
    monkeypatch.setattr(
        "seecause.background.cigma.information_gains",
        lambda *arguments, **options: replace(real(*arguments, **options), noise_floor=floor),
    )
    rule = {"penalty": penalised, "protect": protected, "none": lambda scores: scores}[guard]
    expected = rule(above_noise(scores, floor))
    chosen = select("cigma", model, cases.images, cases.labels, masks=cases.oracle, guard=guard)
    assert_close(chosen.value, expected.value, equal_nan=True)
    assert (above_noise(scores, floor).value == 0).sum() >= 5
    assert chosen.protocol["noise_floor"] == floor and chosen.protocol["guard"] == guard
    assert not torch.equal(chosen.value, rule(scores).value)


def test_the_noise_floor_is_that_of_the_gains(model, cases, monkeypatch):
    gains = information_gains(model, cases.images, cases.oracle, baseline="grey")
    chosen = select("cigma", model, cases.images, cases.labels, masks=cases.oracle)
    assert chosen.protocol["noise_floor"] == gains.noise_floor
    asked = []  # at the temperature of the scores that it is held against

    def recorded(*arguments, temperature=1.0, **options):
        asked.append(temperature)
        return gains

    monkeypatch.setattr("seecause.background.cigma.information_gains", recorded)
    for temperature in (0.25, "matched"):
        options = {"masks": cases.oracle, "temperature": temperature}
        select("cigma", model, cases.images, cases.labels, **options)
    assert asked == [0.25, 1.0]


def test_a_screen_is_an_option_of_cigma(model, cases):
    options = Screening(top=1, verify=3, audit=0.2)
    chosen = select(
        "cigma", model, cases.images, cases.labels, masks=cases.oracle, screen=options, guard="none"
    )
    alone = screen(
        model, cases.images, cases.oracle, top=1, verify=3, audit=0.2, target=cases.labels
    )
    assert_close(chosen.value, alone.scores.value, equal_nan=True)
    assert chosen.protocol["screen"] == {
        "verified": 3, "audited": 3, "heads": 12,
        "agreement": alone.agreement, "recall": alone.recall,
    }  # fmt: skip
    assert alone.agreement != alone.recall


def test_cigma_without_other_foregrounds_has_no_guard(model, cases):
    swap = sc.background.Swapped(cases.swapped.background)
    with pytest.raises(BadOption, match="'none'"):
        select("cigma", model, cases.images, cases.labels, baseline=swap)
    chosen = select("cigma", model, cases.images, cases.labels, baseline=swap, guard="none")
    expected = score(model, cases.images, target=cases.labels, baseline=swap, guard=False)
    assert_close(chosen.value, expected.value)


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
    return set(sc.background.score(model, images, masks, guard=False).top(4, positive=False))
