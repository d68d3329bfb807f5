"""Kinds of patches, step by step: each against what a reader of the docstrings would write out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from seecause._random import bits
from seecause.background import patch_kinds
from seecause.background.patch_kinds import KindPlan, ObjectPatches, Trials, kinds_at
from tests.background.repair_toys import plain_vit, scenes, wrapped

SEED = 3
PLAN = KindPlan(kinds=3, top=6, trials=20, most=9, seed=SEED)


def random_bools(*shape, seed=0, share=0.5):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def lot(number, purpose, among):
    return among[int(bits(torch.tensor(number), 4 * SEED + purpose)) % len(among)]


@pytest.mark.parametrize("known", [True, False])
def test_pastes_go_where_the_recipients_object_is_covered_least_and_spare_it(known):
    """Every draw again, one at a time: the lender's own object plays no part."""
    answers = torch.tensor([1, 0, 1, 0, 2, 0, 1, 2])
    sets = random_bools(8, 12, seed=1) & (answers == 1)[:, None]
    sets[6] = False  # answered 1, and lends nothing
    objects = random_bools(8, 12, seed=2)
    trials = patch_kinds._drawn(sets, answers, 1, objects if known else None, (3, 4), PLAN)
    assert len(trials) == 6 + 20  # those that sort out, and those that count
    lenders, others = [0, 2], [1, 3, 4, 5, 7]
    for place in range(26):
        number = (1 << 32) + place
        source, control = lot(number, 11, lenders), lot(number, 13, others)
        recipients = [lot(4 * number + draw, 12, others) for draw in range(4)]
        left = [sets[source] & ~objects[recipient] for recipient in recipients]
        best = max(range(4), key=lambda draw: (int(left[draw].sum()), -draw))
        if not known:
            best, left = 0, [sets[source]]
        assert int(trials.sources[place]) == source
        assert int(trials.recipients[place]) == recipients[best]
        assert int(trials.controls[place]) == control
        assert trials.sets[place].flatten().equal(left[best])


def lent_one_by_one(picture, patch, distance, answers, side, whole, plan):
    """What `_lent` says it gives, on a grid of four by five."""
    nearest = distance.argmin(dim=2).tolist()
    examples = list(zip(picture.tolist(), patch.tolist(), strict=True))
    for kind in range(distance.shape[2]):
        far = distance[..., kind].tolist()
        for answer in sorted(set(answers)):
            rows = [(n, p) for n, p in examples if nearest[n][p] == kind and answers[n] == answer]
            if len({n for n, _ in rows}) < 3:
                continue
            rows.sort(key=lambda row: far[row[0]][row[1]])
            every, spots = torch.zeros(2, *whole.shape, dtype=torch.bool)
            for n in range(len(answers)):
                if answers[n] != answer:
                    continue
                typical = sorted((far[n][p], p) for p in range(20) if whole[n, p])[: plan.most]
                every[n, [p for _, p in typical if nearest[n][p] == kind]] = True
                middle = next((p for picture, p in rows if picture == n), None)
                if middle is not None:
                    near = [p for p in range(20) if abs(p // 5 - middle // 5) <= 1
                            and abs(p % 5 - middle % 5) <= 1 and side[n, p]]  # fmt: skip
                    spots[n, near] = True
            yield rows, every, "all", answer
            yield rows, spots, "spot", answer


def test_what_pictures_lend_is_as_if_looked_for_one_by_one(monkeypatch):
    answers = [0] * 5 + [1] * 3 + [2] * 2 + [0] * 2  # of class 2 there are too few
    draw = torch.Generator().manual_seed(0)
    distance = torch.rand(12, 20, 3, generator=draw)
    side = random_bools(12, 20, seed=4)
    whole = side | random_bools(12, 20, seed=5)
    side[0, 6:] = whole[0, 6:] = False  # fewer than a paste may have
    picture, patch = side.nonzero().unbind(dim=1)
    monkeypatch.setattr(patch_kinds, "_clusters", lambda *_: (picture, patch, distance))
    scores = torch.zeros(12, 20)
    lent = list(patch_kinds._lent(None, scores, torch.tensor(answers), side, whole, (4, 5), PLAN))
    slow = list(lent_one_by_one(picture, patch, distance, answers, side, whole, PLAN))
    assert len(lent) == len(slow) == 12  # three kinds of two answers, in two ways
    for (rows, sets, extent, answer), expected in zip(lent, slow, strict=True):
        assert ([tuple(row) for row in rows.tolist()], extent, answer) == (
            expected[0], *expected[2:]
        )  # fmt: skip
        assert sets.equal(expected[1])


def test_clusters_are_of_the_highest_patches_of_each_picture_on_one_side():
    tokens = torch.zeros(2, 4, 2)
    tokens[0, :2], tokens[0, 2:], tokens[1] = torch.tensor([3.0, 0]), torch.tensor([0, 4.0]), 9.0
    scores = torch.tensor([[1.0, 2, 3, 4], [4, 3, 2, 1]])
    side = torch.tensor([[True, True, True, False], [False, False, True, False]])
    plan = replace(PLAN, kinds=3, top=2)
    picture, patch, distance = patch_kinds._clusters(tokens, scores, side, plan)
    assert list(zip(picture.tolist(), patch.tolist(), strict=True)) == [(0, 2), (0, 1), (1, 2)]
    assert_close(distance[0, 0].sort().values, torch.tensor([0.0, 5.0, 117**0.5]))
    assert_close(distance[1].amin(dim=1), torch.zeros(4), atol=1e-3, rtol=0)
    assert patch_kinds._clusters(tokens, scores, side, replace(plan, kinds=9))[2].shape[2] == 3


def test_kinds_on_objects_and_off_them_spare_what_is_shown_or_covered():
    """A whole background reaches up to what objects cover by half; a spot spares all of them."""
    draw = torch.Generator().manual_seed(0)
    tokens, scores = torch.randn(12, 20, 8, generator=draw), torch.rand(12, 20, generator=draw)
    shown = random_bools(12, 20, seed=6, share=0.6)
    covered = shown & random_bools(12, 20, seed=7)
    answers = torch.arange(12) % 2
    kinds = list(kinds_at(tokens, scores, answers, ObjectPatches(shown, covered), (4, 5), 1, PLAN))
    reaching = 0
    for kind in kinds:
        on_side = shown[kind.tokens[:, 0], kind.tokens[:, 1]]
        assert on_side.all() or not on_side.any()
        assert kind.evidence == pytest.approx(
            sum(float(scores[n, p]) for n, p in kind.tokens.tolist()) / len(kind.tokens)
        )
        share = (kind.sets & shown).sum() / kind.sets.sum()
        if kind.extent == "spot":
            share = on_side.float().mean()
            assert not (kind.sets & (~shown if on_side.all() else shown)).any()
        elif not on_side.any():
            assert not (kind.sets & covered).any()
            reaching += int((kind.sets & shown).sum())
        assert kind.on_object == pytest.approx(float(share))
        spared = (covered if kind.extent == "all" else shown)[kind.trials.recipients]
        assert kind.trials.sets.flatten(1).equal(kind.sets[kind.trials.sources] & ~spared)
    assert reaching and {kind.extent for kind in kinds} == {"all", "spot"}


def test_kinds_hang_on_the_seed_of_the_plan(monkeypatch):
    from sklearn import cluster

    states, real = [], cluster.KMeans
    monkeypatch.setattr(
        cluster, "KMeans", lambda *a, **k: states.append(k["random_state"]) or real(*a, **k)
    )
    draw = torch.Generator().manual_seed(0)
    tokens, scores = torch.randn(6, 20, 8, generator=draw), torch.rand(6, 20, generator=draw)
    list(kinds_at(tokens, scores, torch.arange(6) % 2, None, (4, 5), 1, PLAN))
    assert states == [SEED]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_tokens_are_what_a_patch_shows_less_what_its_place_does(layer):
    module = plain_vit().eval()
    model, images = wrapped(module), scenes(5).images
    entered = []
    for block in module.blocks:
        block.register_forward_pre_hook(lambda _, x: entered.append(x[0]))
    module.blocks[-1].register_forward_hook(lambda _, x, out: entered.append(out))
    with torch.no_grad():
        module(images)
        states = entered[layer][:, 1:]  # without the class token
        tokens = patch_kinds.tokens_at(model, images, layer)
    rest = states - states.mean(dim=0)
    expected = rest / rest.norm(dim=-1, keepdim=True)
    assert_close(tokens, expected, atol=1e-5, rtol=1e-5)


def test_evidence_is_the_mean_of_maps_by_their_own_spread(monkeypatch):
    """Two pictures of four patches; maps from the start on, and from the layers between."""
    maps = {None: [[0.0, 0, 0, 2], [5, 7, 5, 7]], (1, None): [[0.0, 4, 0, 0], [3, 3, 1, 1]]}
    calls = []

    def attribute(model, images, *, method, layers=None, **options):
        calls.append((method, layers, options))
        return SimpleNamespace(maps=torch.tensor(maps[layers]).unflatten(1, (2, 2)))

    monkeypatch.setattr(patch_kinds, "attribute", attribute)
    model = wrapped(plain_vit())  # of two blocks
    evidence = patch_kinds.evidence_of(model, None, "caap", (0, 1, 2), {"score": "logit"})
    assert calls == [("caap", start, {"score": "logit"}) for start in maps]
    spikes = torch.tensor([[-0.5, -0.5, -0.5, 1.5], [-0.5, 1.5, -0.5, -0.5]]).double()
    waves = torch.tensor([[-0.5, 0.5, -0.5, 0.5], [0.5, 0.5, -0.5, -0.5]]).double() * 3**0.5
    assert_close(evidence, torch.stack([spikes.mean(dim=0), waves.mean(dim=0)]))
    calls.clear()
    patch_kinds.evidence_of(model, None, "caap", (1,), {"layers": (1, None)})
    assert calls == [("caap", (1, None), {})]  # who asks for a start gets that one


def test_trials_and_what_is_turned_round_in_them():
    parts = (torch.tensor([n, n + 1]) for n in (10, 20, 30))
    trials = Trials(*parts, random_bools(2, 2, 2))

    def roles(some):
        return [part.tolist() for part in (some.sources, some.recipients, some.controls)]

    assert roles(trials.covering) == [[30, 31], [10, 11], [20, 21]]  # sources are covered
    assert roles(trials.pasting_controls) == [[30, 31], [20, 21], [10, 11]]
    assert roles(patch_kinds.join([trials, trials.take(slice(1, None))])) == [
        [10, 11, 11], [20, 21, 21], [30, 31, 31]
    ]  # fmt: skip
    for other in (trials.covering, trials.pasting_controls):
        assert other.sets.equal(trials.sets)
