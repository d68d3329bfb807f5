"""Which heads go and what that does: `prune_and_test` gives the numbers of its parts."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from seecause import critters
from seecause.background import (
    HeadScores,
    Masks,
    ablate,
    discover_masks,
    divprune,
    information_gains,
    object_masks,
    prune_and_test,
    score_heads,
    select,
)
from seecause.background.heads import (
    PruneResult,
    curve,
    logits_without,
    outcomes,
    random_sets,
)
from seecause.background.images import correct_images, critter_images
from seecause.engine.chunks import budget, plain_logits
from seecause.engine.trace import kept_logits
from seecause.errors import BadOption, UnknownName
from seecause.metrics.statistics import calibration, group_accuracy
from tests.helpers import view
from tests.reference import divprune as reference
from tests.tiny import pictures, tiny

ALL = {"share": 1.0, "cap": None}


@pytest.fixture(scope="module")
def train(model):
    return critter_images(model, critters.draw("certified", "train", 64), name="train")


@pytest.fixture(scope="module")
def test(model):
    return critter_images(model, critters.draw("balanced", "test", 64)[::4], name="test")


@pytest.fixture(scope="module")
def result(model, train, test):
    options = {"selector": "random", "top": 3, "draws": 3, "seed": 5}
    return prune_and_test(model, train, test, **options)


def test_logits_are_those_of_ablated_models_in_chunks_of_any_size(model, cases):
    sets = [[(1, 0)], [], [(2, 1), (1, 3)], [], [(1, 0)], [(2, 2)]]
    whole = logits_without(model, cases.images, sets)
    for place, heads in enumerate(sets):
        with ablate(model, heads):
            assert_close(whole[place], model(cases.images), atol=1e-10, rtol=0)
    assert torch.equal(whole[0], whole[4]) and torch.equal(whole[1], whole[3])
    with budget(2 * model.forward_bytes(model.layout)):
        assert_close(logits_without(model, cases.images, sets), whole, atol=1e-12, rtol=0)


def test_outcomes_are_the_gains_and_flips_of_the_ablated_model(model, cases):
    data, heads = cases.with_masks(cases.truth), [(0, 2), (2, 1)]
    labels = cases.labels.clone()
    with ablate(model, heads):
        labels[:2] = model(cases.images[:2]).argmax(dim=1)  # some are correct
        gains = information_gains(model, data)
        swapped = information_gains(model, data, fill="swap")
        p, others = (model(x).softmax(dim=1) for x in (cases.images, cases.other_background))
    (found,) = outcomes(model, replace(data, labels=labels), [heads], ["grey", "swap"])
    right = p.argmax(dim=1) == labels
    groups = group_accuracy(right, cases.groups)
    expected = {
        "accuracy": float(right.double().mean()), "worst group": groups.worst,
        "mean of groups": groups.unweighted_average,
        "NLL": float(-p[range(6), labels].log().mean()), "ECE": calibration(p.log(), labels).error,
        "flips": float((p.argmax(dim=1) != others.argmax(dim=1)).double().mean()),
    }  # fmt: skip
    for name, by in (("true masks, grey", gains), ("exact swap", swapped)):
        expected |= {f"FIG, {name}": float(by.fig.mean()), f"BIG, {name}": float(by.big.mean())}
        expected[f"BIR, {name}"] = by.bir_ratio_of_means
    assert found.numbers == pytest.approx(expected, abs=1e-10)
    without = outcomes(model, data, [heads], ["grey"])[0].numbers
    assert without["flips"] == expected["flips"]  # without a swap, too
    bare = replace(cases, labels=None, other_background=None, groups=())
    assert outcomes(model, bare, [[(0, 1)]])[0].numbers == {}


def test_the_curve_starts_at_the_whole_model_and_has_a_random_band(model, cases):
    scores = select("random", model, cases)
    found = curve(model, cases, scores, [0, 3], ["swap"], draws=4)
    assert found.chosen[0].heads == [] and sorted(found.chosen[1].heads) == sorted(scores.top(3))
    assert [draw.heads for draw in found.random[1]] == random_sets(model, 3, draws=4)
    few = HeadScores(torch.where(torch.arange(12).view(3, 4) < 2, 1.0, -1.0).double())
    lengths = [len(draw.heads) for draw in curve(model, cases, few, [8], draws=2).random[0]]
    assert lengths == [2, 2]  # as many as really went
    assert found.band("accuracy")[0] == (found.chosen[0].numbers["accuracy"], 0.0)
    drawn = torch.tensor([draw.numbers["NLL"] for draw in found.random[1]], dtype=torch.float64)
    mean, deviation = found.band("NLL")[1]
    assert mean == pytest.approx(float(drawn.mean())) and found.at(3) is found.chosen[1]
    assert deviation == pytest.approx(float(drawn.std(correction=0))) and deviation > 0


def test_heads_are_scored_on_a_sample_of_correct_images(model, train):
    sampling = {"share": 0.5, "cap": 2}
    right = correct_images(model, train, seed=3, **sampling)
    scores = score_heads(model, train, selector="taylor", sampling=sampling, seed=3)
    assert scores.data.ids == right.ids and len(right) == 2
    assert (model(right.images).argmax(dim=1) == right.labels).all()
    assert_close(scores.value, select("taylor", model, right).value)
    assert scores.protocol["scored"] == {"data": "train", "images": 2, "by": "taylor"}
    own = replace(train, labels=model(train.images).argmax(dim=1))
    assert len(score_heads(model, own, selector="taylor").data) == round(0.4 * 64)
    other = score_heads(model, train, selector="random", sampling=ALL, seed=4)
    assert_close(other.value, select("random", model, train, seed=4).value)


def test_masks_and_fill_reach_the_selector(model, train):
    right = correct_images(model, train, **ALL)
    masked = right.with_masks(right.truth)
    for fill in ("mean", "swap"):
        scores = score_heads(model, train, sampling=ALL, fill=fill)
        assert_close(scores.value, select("cigma", model, masked, fill=fill).value)
    found = discover_masks(model, right.images, steps=2, grid=4)
    masks = partial(object_masks, model, source="discovered", steps=2, grid=4)
    scores = score_heads(model, train, sampling=ALL, masks=masks)
    assert torch.equal(scores.data.masks.hard, found.hard)
    assert scores.protocol["scored"] == {
        "data": "train", "images": len(right), "by": "cigma",
        "background": "discovered masks, grey", "guard": True,
    }  # fmt: skip
    mass = score_heads(model, train, selector="attention-mass", sampling=ALL)
    assert_close(mass.value, select("attention-mass", model, masked).value)
    assert mass.protocol["scored"]["masks"] == "given masks"
    seeded = score_heads(model, train, options={"screen": 1}, sampling=ALL, seed=2)
    expected = select("cigma", model, masked, screen=1, seed=2)
    assert_close(seeded.value, expected.value, equal_nan=True)


def test_pairs_are_scored_on_all_images_and_unlabelled_ones_on_predictions(model, train):
    train = train.take(torch.arange(12))
    scores = score_heads(model, train, selector="interchange")
    assert len(scores.data) == 12
    assert bool((model(train.images).argmax(1) != train.labels).any())
    assert_close(scores.value, select("interchange", model, train).value)
    bare = replace(train.take(torch.arange(4)), labels=None)
    assert score_heads(model, bare).before["accuracy"] == 1


def test_the_highest_heads_go_and_the_rest_is_measured(model, train, test, result):
    heads = select("random", model, train, seed=5).top(3)
    masked = test.with_masks(test.truth)
    before, after = outcomes(model, masked, [[], heads], ["grey", "swap"])
    assert result.heads == heads and result.before.numbers == before.numbers
    assert result.after.numbers == pytest.approx(after.numbers)
    assert after.numbers["NLL"] != pytest.approx(before.numbers["NLL"])
    assert result.changes()["NLL"] == (before.numbers["NLL"], result.after.numbers["NLL"])
    assert result.curve.ks == [0, 1, 3, 6]
    drawn = [outcome.heads for outcome in result.curve.random[2]]
    assert drawn == random_sets(model, 3, draws=3, seed=5)
    assert repr(result).startswith("PruneResult(without [(") and len(repr(result)) < 300


def test_a_model_that_gets_worse_is_said_to_be_worse():
    changes = {"accuracy": (0.891, 0.812), "BIR, grey": (0.08, 0.112), "flips": (0.4, 0.1)}
    result = SimpleNamespace(changes=lambda: changes)
    words = "The model is worse without these heads: accuracy 0.891 -> 0.812, BIR, grey 0.080 ->"
    assert PruneResult.warning.fget(result) == f"{words} 0.112."
    changes = {name: values[::-1] for name, values in changes.items() if name != "flips"}
    assert PruneResult.warning.fget(result) == ""


def test_masks_are_not_searched_where_no_score_needs_them(model, train, test, monkeypatch):
    monkeypatch.setattr("seecause.background.masks.discover_masks", lambda *_, **__: pytest.fail())
    bare, other = (replace(part.take(torch.arange(6)), truth=None) for part in (train, test))
    found = prune_and_test(model, bare, other, selector="random", top=1, draws=1)
    assert not any(name.startswith("BIR, discovered") for name in found.changes())


def test_pairs_need_no_masks(model, train, test):
    """Neither to choose heads nor to measure what their removal does."""
    pair = [replace(data, truth=None, other_object=None) for data in (train, test)]
    few = [data.take(torch.arange(6)) for data in pair]
    asked = {"masks": lambda data: pytest.fail("masks were looked for"), "top": 1, "draws": 1}
    found = prune_and_test(model, *few, selector="interchange", **asked)
    assert "flips" in found.changes() and not any("BIG" in name for name in found.changes())


def test_a_curve_ends_where_no_more_heads_were_measured(model, train):
    found = prune_and_test(
        model, train, train.take(torch.arange(4)), options={"screen": 1, "guard": False}, top=2,
        draws=1, sampling={"share": 1.0, "cap": 4},
    )  # fmt: skip
    assert int(found.scores.value.isfinite().sum()) == 3
    assert max(found.curve.ks) <= 3 and len(found.heads) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 13}, "a count from 1 to 12"),
        ({"top": 0.01}, "from 0.083 to 1.0"),
        ({"top": 0}, "a count from 1 to 12"),
        ({"options": {"fill": "mean"}}, "cigma option fill"),
        ({"options": {"guard": "protect"}}, "true or false"),
        ({"masks": "mine"}, "'mine' not found"),
        ({"fill": "white"}, "mean, grey, blur, noise, swap"),
        ({"selector": "cigmo"}, "cigma"),
    ],
)
def test_what_cannot_be_used_is_named(model, train, test, options, message):
    with pytest.raises((BadOption, UnknownName), match=message):
        prune_and_test(model, train, test, **{"top": 1, **options})


def test_data_must_have_what_is_asked_of_it(model, train):
    partly = train.truth.hard.int()
    partly[:] = 255
    partly[0, 0, 0] = 0  # known of one image only
    bare = replace(train, truth=None, other_background=None)
    for data, options, message in (
        (replace(train, truth=Masks.given(partly)), {"masks": "given"}, "a mask for every image"),
        (bare, {"masks": "given"}, "has none"),
        (bare, {"fill": "swap"}, "have other versions"),
        (replace(train, labels=None), {"selector": "taylor"}, "taylor needs them"),
    ):
        with pytest.raises(BadOption, match=message):
            score_heads(model, data, **options)
    some = train.take(torch.arange(8))
    known = some.truth.hard.int()
    known[4:] = 255
    predicted = plain_logits(model, some.images).argmax(dim=-1)
    some = replace(some, labels=predicted, truth=Masks.given(known))
    found = score_heads(model, some, sampling=ALL, options={"guard": False})
    assert found.protocol["scored"]["background"] == "discovered masks, grey"


@pytest.mark.parametrize("family", ["timm_registers", "timm_mean", "hf_siglip", "hf_dinov3"])
def test_predictions_are_read_from_the_tokens_that_stay(family):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native)
    logits, tokens = divprune(model, images, keep=0.4)
    layout = model.layout
    assert tokens.sum(dim=1).tolist() == [round(0.4 * layout.n_patches)] * 2
    h = model.embed(images)
    for row, features in zip(tokens, h[:, layout.patches], strict=True):
        expected = reference.most_diverse(features, int(row.sum()))
        assert set(row.nonzero().flatten().tolist()) == expected
    expected = kept_logits(model, h, tokens, layout.at())
    assert_close(logits, expected, atol=1e-10, rtol=0)
    everything = divprune(model, images, keep=1.0)[0]
    assert_close(everything, model(images), atol=1e-10, rtol=0)
