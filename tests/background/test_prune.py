"""Which heads go and what that does: the job gives the numbers of its parts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause import critters
from seecause.background import (
    Gains,
    HeadScores,
    Masks,
    ablate,
    correct_images,
    discover_masks,
    divprune,
    information_gains,
    outcomes,
    prune,
    prune_and_test,
    random_sets,
    score,
    score_heads,
    select,
)
from seecause.background.images import critter_images
from seecause.background.prune import (
    background_gaps,
    changes,
    curve,
    examples,
    logits_without,
    most_diverse,
    over_groups,
)
from seecause.data import open_data
from seecause.data.batch import group_shares
from seecause.data.dataset import SkippedImage
from seecause.engine import forks
from seecause.engine.chunks import budget
from seecause.engine.trace import kept_logits
from seecause.errors import BadOption, UnknownName
from seecause.metrics.accuracy import calibration, group_accuracy
from tests.helpers import noise, view
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
    options = {"selector": "weight-norm", "top": 3, "draws": 3, "seed": 5}
    return prune_and_test(model, train, test, **options)


# removals and outcomes


def test_removals_are_those_of_the_ablated_model(model, cases):
    sets = [[], [(0, 1), (2, 3)], [(1, 0)]]
    found = logits_without(model, cases.images, sets)
    for place, heads in enumerate(sets):
        with ablate(model, heads):
            assert_close(found[place], model(cases.images), atol=1e-10, rtol=0)


def test_equal_sets_run_once_and_memory_decides_chunks_only(model, cases, monkeypatch):
    sets = [[(1, 0)], [], [(2, 1), (1, 3)], [], [(1, 0)], [(2, 2)]]
    whole = logits_without(model, cases.images, sets)
    assert torch.equal(whole[0], whole[4]) and torch.equal(whole[1], whole[3])
    rows, rest = list[tuple[int, int]](), forks._gated_rest
    monkeypatch.setattr(
        forks,
        "_gated_rest",
        lambda m, h, at, gates, start, content: (
            rows.append((start, len(h))) or rest(m, h, at, gates, start, content)
        ),
    )
    with budget(2 * model.forward_bytes(model.layout)):
        assert_close(logits_without(model, cases.images, sets), whole, atol=1e-12, rtol=0)
    begun = {layer: sum(count for at, count in rows if at == layer) for layer in (1, 2)}
    assert begun == {1: 2 * len(cases), 2: len(cases)}  # two different sets begin in block 1


def test_outcomes_are_the_gains_and_flips_of_the_ablated_model(model, cases):
    data, heads = cases.with_masks(cases.truth), [(0, 2), (2, 1)]
    (found,) = outcomes(model, data, [heads], ["grey", "swap"])
    with ablate(model, heads):
        gains = information_gains(model, data)
        swapped = information_gains(model, data, fill="swap")
        predicted, others = (model(x).argmax(dim=1) for x in (cases.images, cases.other_background))
    for name, expected in (("true masks, grey", gains), ("exact swap", swapped)):
        assert_close(found.gains[name].big, expected.big, atol=1e-10, rtol=0)
        assert_close(found.gains[name].fig, expected.fig, atol=1e-10, rtol=0)
    assert found.accuracy == pytest.approx(float((predicted == cases.labels).double().mean()))
    assert found.flips == pytest.approx(float((predicted != others).double().mean()))
    assert outcomes(model, data, [heads], ["grey"])[0].flips == found.flips  # without a swap, too


def test_more_images_than_are_measured_together(model, cases, monkeypatch):
    data = cases.with_masks(cases.truth)
    whole, done = outcomes(model, data, [[], [(1, 2)]], ["grey", "swap"]), []
    monkeypatch.setattr(prune, "TOGETHER", 4)
    parts = outcomes(model, data, [[], [(1, 2)]], ["grey", "swap"], progress=done.append)
    assert done == [4, 2]
    for first, second in zip(whole, parts, strict=True):
        assert first.numbers() == pytest.approx(second.numbers()) and first.heads == second.heads


def test_numbers_are_those_of_the_logits(model, cases):
    labels = cases.labels.clone()
    labels[:2] = model(cases.images[:2]).argmax(dim=1)  # some are correct
    (found,) = outcomes(model, replace(cases, labels=labels), [[]], ["swap"])
    p = model(cases.images).softmax(dim=1)
    right, gains = p.argmax(dim=1) == labels, found.gains["exact swap"]
    groups = group_accuracy(right, cases.groups)
    assert found.numbers() == pytest.approx({
        "removed": 0, "accuracy": float(right.double().mean()), "worst group": groups.worst,
        "mean of groups": groups.unweighted_average,
        "NLL": float(-p[range(6), labels].log().mean()),
        "ECE": calibration(p.log(), labels).error, "flips": found.flips,
        "FIG, exact swap": float(gains.fig.mean()), "BIG, exact swap": float(gains.big.mean()),
        "BIR, exact swap": gains.bir_ratio_of_means,
    })  # fmt: skip
    bare = replace(cases, labels=None, other_background=None, groups=())
    assert outcomes(model, bare, [[(0, 1)]])[0].numbers() == {"removed": 1}
    still = replace(found, gains={"x": Gains(torch.zeros(2), torch.zeros(2), 0.0)})
    assert still.numbers()["BIR, x"] == 0.5


def test_averages_over_groups_have_their_own_names(model, cases, caplog):
    labels = model(cases.images[:4]).argmax(dim=1)
    labels[1] = (labels[1] + 1) % model.n_classes  # one wrong prediction, in group (0, 1)
    four = cases.take(torch.arange(4))
    four = replace(four, groups=((0, 0), (0, 1), (1, 0), (1, 1)), labels=labels)
    train = {(0, 0): 0.7, (0, 1): 0.1, (1, 1): 0.2, (5, 5): 0.0}  # the last never occurred
    found = outcomes(model, four, [[]], train=train)[0].numbers()
    assert found["mean of groups"] == pytest.approx(0.75)
    assert found["groups weighted as in training"] == pytest.approx(0.9)
    assert found["worst group"] == found["worst of groups (0, 1) and (1, 0)"] == 0
    assert not caplog.records
    lacking = outcomes(model, four, [[]], train={(2, 0): 0.9, (0, 0): 0.1})[0].numbers()
    assert "groups weighted as in training" not in lacking and "group (2, 0)" in caplog.text
    for wrong, worst in (((1, 4, 8, 9, 12, 13, 14), 0.5), ((0, 1, 4, 5, 6, 8), 0.25)):
        groups = [(0, 0)] * 4 + [(0, 1)] * 4 + [(1, 0)] * 4 + [(1, 1)] * 4
        right = torch.tensor([place not in wrong for place in range(16)])
        averages = over_groups(group_accuracy(right, groups))
        assert averages["worst of groups (0, 1) and (1, 0)"] == worst


def test_the_curve_starts_at_the_whole_model_and_has_a_random_band(model, cases):
    scores = select("weight-norm", model, cases)
    found = curve(model, cases, scores, [0, 3], ["swap"], draws=4)
    assert found.chosen[0].heads == [] and sorted(found.chosen[1].heads) == sorted(scores.top(3))
    assert [draw.heads for draw in found.random[1]] == random_sets(model, 3, draws=4)
    few = HeadScores(torch.where(torch.arange(12).view(3, 4) < 2, 1.0, -1.0).double())
    lengths = [len(draw.heads) for draw in curve(model, cases, few, [8], draws=2).random[0]]
    assert lengths == [2, 2]  # as many as really went
    assert found.band("accuracy")[0] == (pytest.approx(found.chosen[0].accuracy), 0.0)
    drawn = torch.tensor([draw.nll for draw in found.random[1]], dtype=torch.float64)
    mean, deviation = found.band("NLL")[1]
    assert mean == pytest.approx(float(drawn.mean())) and found.at(3) is found.chosen[1]
    assert deviation == pytest.approx(float(drawn.std(correction=0))) and deviation > 0


# the jobs


def test_heads_are_scored_on_a_sample_of_correct_images(model, train):
    sampling = {"share": 0.5, "cap": 2}
    right = correct_images(model, train, seed=3, **sampling)
    scored = score_heads(model, train, selector="taylor", sampling=sampling, seed=3)
    assert scored.data.ids == right.ids and len(right) == 2
    assert (model(right.images).argmax(dim=1) == right.labels).all()
    assert_close(scored.scores.value, select("taylor", model, right).value)
    assert scored.record == {"data": "train", "images": 2, "by": "taylor"}
    assert scored.shares == group_shares(train.groups)  # of all training images
    own = replace(train, labels=model(train.images).argmax(dim=1))
    assert len(score_heads(model, own, selector="taylor").data) == round(0.4 * 64)
    other = score_heads(model, train, selector="random", sampling=ALL, seed=4)
    assert_close(other.scores.value, select("random", model, train, seed=4).value)


def test_masks_and_fill_reach_the_selector(model, train):
    right = correct_images(model, train, **ALL)
    masked = right.with_masks(right.truth)
    for fill in ("mean", "swap"):
        scored = score_heads(model, train, sampling=ALL, fill=fill)
        assert_close(scored.scores.value, select("cigma", model, masked, fill=fill).value)
    steps, begun = [], []

    @contextmanager
    def progress(what, total):
        begun.append((what, total))
        yield lambda done: steps.append((what, done))

    search = {"steps": 2, "grid": 4, "cache": None}
    asked = {"masks": "discovered", "mask_options": search, "progress": progress}
    scored = score_heads(model, train, sampling=ALL, **asked)
    assert begun == [("finding objects", len(right)), ("scoring heads", 12 * len(right))]
    for what, total in begun:
        assert sum(done for name, done in steps if name == what) == total
    found = discover_masks(model, right.images, steps=2, grid=4)
    assert torch.equal(scored.data.masks.hard, found.hard)
    assert scored.record == {
        "data": "train", "images": len(right), "by": "cigma", "operator": "zero",
        "background": "discovered masks, grey", "guard": "penalty", "mask options": {"grid": 4},
    }  # fmt: skip
    mass = score_heads(model, train, selector="attention-mass", sampling=ALL)
    assert_close(mass.scores.value, select("attention-mass", model, masked).value)
    assert mass.record["masks"] == "given masks" and "background" not in mass.record
    seeded = score_heads(model, train, options={"operator": "resample"}, sampling=ALL, seed=2)
    expected = select("cigma", model, masked, operator="resample", seed=2)
    assert_close(seeded.scores.value, expected.value)


def test_pairs_are_scored_on_all_images_and_unlabelled_ones_on_predictions(model, train):
    train = train.take(torch.arange(12))
    scored = score_heads(model, train, selector="interchange")
    assert len(scored.data) == 12
    assert bool((model(train.images).argmax(1) != train.labels).any())
    assert_close(scored.scores.value, select("interchange", model, train).value)
    bare = replace(train.take(torch.arange(4)), labels=None)
    assert score_heads(model, bare).scores.before["accuracy"] == 1


def test_the_job_removes_the_highest_heads_and_measures_without_them(model, train, test, result):
    heads = select("weight-norm", model, train).top(3)
    masked = test.with_masks(test.truth)
    before, after = outcomes(model, masked, [[], heads], ["grey", "swap"])
    assert result.heads == heads and result.before.numbers() == before.numbers()
    for name, value in result.after.numbers().items():
        if name != "groups weighted as in training":
            assert value == pytest.approx(after.numbers()[name]), name
    assert result.after.nll != pytest.approx(before.nll)
    assert result.changes()["NLL"] == (before.nll, pytest.approx(after.nll))
    assert "removed" not in result.changes()
    assert result.curve.ks == [0, 1, 3, 6]
    drawn = [outcome.heads for outcome in result.curve.random[2]]
    assert drawn == random_sets(model, 3, draws=3, seed=5)
    numbers = changes(result.before, replace(result.after, flips=torch.nan), (0.3, 0.1))
    assert numbers["BG-gap"] == (0.3, 0.1) and "flips" not in numbers and "accuracy" in numbers
    assert repr(result).startswith("PruneResult(without [(") and len(repr(result)) < 300


def test_examples_are_predicted_before_and_after(model, test, result):
    shown = result.examples
    assert shown.data.ids[0] == test.ids[0] and shown.data.ids[-1] == test.ids[-1]
    assert list(shown.versions) == ["image", "no background", "no object", "elsewhere"]
    assert shown.erasure == "true masks, grey"
    for name, images in shown.versions.items():
        assert_close(shown.logits[name][0], model(images), atol=1e-10, rtol=0)
        with ablate(model, result.heads):
            assert_close(shown.logits[name][1], model(images), atol=1e-10, rtol=0)
    assert examples(model, test.take(torch.arange(2))).logits["image"].shape == (1, 2, 8)


def test_the_exported_model_is_the_ablated_one(model, test, result, tmp_path):
    shipped = sc.load(str(result.export(tmp_path / "model")), dtype="float64")
    with ablate(model, result.heads):
        assert_close(shipped(test.images), model(test.images), atol=1e-10, rtol=0)
    assert "chosen by weight-norm" in (tmp_path / "model" / "README.md").read_text()
    sliced = sc.load(str(result.export(tmp_path / "sliced", form="sliced")), dtype="float64")
    assert sum(block.heads for block in sliced.blocks) == 12 - 3


def test_the_gap_of_two_variants_and_skipped_images(model, train, test):
    ids = tuple(f"00_dog/fg_n{place}_bg_{place}.JPEG" for place in range(len(test)))
    lost, cut = SkippedImage("a", "empty"), SkippedImage(ids[9], "cut")
    tested = replace(test, ids=ids, skipped=(lost,))
    same = replace(train.take(torch.arange(5)), ids=ids[:5], skipped=(cut, lost))
    options = {"selector": "weight-norm", "options": {"remove": "least"}, "top": 0.25, "draws": 1}
    found = prune_and_test(model, train, tested, same=same, **options)
    assert found.heads == select("weight-norm", model, train, remove="least").top(3)
    gaps, counts = background_gaps(model, same, tested, [[], found.heads])
    assert found.gaps == pytest.approx(gaps) and counts == (5, 15)
    assert found.changes()["BG-gap"] == found.gaps and set(found.skipped) == {lost, cut}


def test_greedy_may_remove_as_many_as_were_asked_for(model, train, test):
    asked = {"selector": "greedy", "options": {"guard": "none"}, "sampling": {"cap": 4}}
    found = prune_and_test(model, train, test, top=0.17, draws=1, **asked)  # of 12
    assert found.scored.scores.protocol["top"] == 2 and len(found.heads) <= 2


def test_a_curve_ends_where_no_more_heads_were_measured(model, train):
    options = {"screen": 2, "verify": 3, "audit": 0.0, "guard": "none"}
    sampling = {"share": 1.0, "cap": 4}
    found = prune_and_test(
        model, train, train.take(torch.arange(4)), options=options, top=2, draws=1,
        sampling=sampling,
    )  # fmt: skip
    assert int(found.scored.scores.value.isfinite().sum()) == 3
    assert max(found.curve.ks) <= 3 and len(found.heads) <= 2
    assert found.scored.record["verify"] == 3


def test_a_dataset_is_read_by_the_job(model):
    data, begun = open_data("critters:certified:train", limit=24), []

    def progress(what, total):
        begun.append((what, total))
        return sc.background.images.no_progress(what, total)

    scored = score_heads(model, data, selector="weight-norm", sampling=ALL, progress=progress)
    assert begun == [("reading images", 24), ("scoring heads", 12 * len(scored.data))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 13}, "a count from 1 to 12"),
        ({"top": 0.01}, "from 0.083 to 1.0"),
        ({"top": 0}, "a count from 1 to 12"),
        ({"top": 4, "options": {"screen": 2}}, "4 or more"),
        ({"options": {"screen": 13}}, "1 to 12"),
        ({"options": {"fill": "mean"}}, "option 'fill' of cigma"),
        ({"options": {"guard": True}}, "penalty, protect, none"),
        ({"masks": "mine"}, "'mine' not found"),
        ({"fill": "white"}, "mean, grey, blur, noise, swap"),
        ({"mask_options": {"blur": 1}}, "option 'blur' of the mask search"),
        ({"mask_options": {"rho": 0.2}}, "masks of its own"),
        ({"fill": "swap", "mask_options": {"rho": 0.2}}, "masks that are searched"),
        ({"selector": "taylor", "fill": "mean"}, "taylor fills no background"),
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
        (bare, {"fill": "swap"}, "no other versions of its images"),
        (replace(train, labels=None), {"selector": "taylor"}, "taylor needs them"),
        (replace(train, labels=None), {"selector": "contrastive-gating"}, "needs them"),
    ):
        with pytest.raises(BadOption, match=message):
            score_heads(model, data, **options)


def test_a_share_is_one_of_all_heads_also_after_a_screen(model, cases):
    heads = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    found = score(model, cases.with_masks(cases.truth), heads=heads)
    assert found.total == 12
    assert [len(found.top(k, positive=False)) for k in (0.25, 12)] == [3, 6]


# DivPrune


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_the_choice_is_the_brute_force_greedy_one(count):
    tokens = noise(4, 9, 5) + 0.5
    kept = most_diverse(tokens, count)
    assert kept.sum(dim=1).tolist() == [count] * 4
    for row, features in zip(kept, tokens, strict=True):
        assert set(row.nonzero().flatten().tolist()) == reference.most_diverse(features, count)


def test_copies_of_a_token_come_last():
    distinct = torch.eye(4, dtype=torch.float64)
    tokens = torch.cat([distinct[:1], distinct[:1], distinct[:1], distinct[1:]])[None]
    kept = most_diverse(tokens, 4)[0]
    assert kept[3:].all() and kept[:3].sum() == 1
    assert most_diverse(tokens[:, :1], 1).tolist() == [[True]]


@pytest.mark.parametrize("family", ["timm_registers", "timm_mean", "hf_siglip", "hf_dinov3"])
@pytest.mark.parametrize("after", [0, 2])
def test_predictions_are_read_from_the_tokens_that_stay(family, after):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native)
    logits, tokens = divprune(model, images, keep=0.4, after=after)
    layout = model.layout
    assert tokens.sum(dim=1).tolist() == [round(0.4 * layout.n_patches)] * 2
    h = model.embed(images)
    for block in model.blocks[:after]:
        h = block(h, layout.at())
    for row, features in zip(tokens, h[:, layout.patches], strict=True):
        expected = reference.most_diverse(features, int(row.sum()))
        assert set(row.nonzero().flatten().tolist()) == expected
    expected = kept_logits(model, h, tokens, layout.at(), start=after)
    assert_close(logits, expected, atol=1e-10, rtol=0)
    everything = divprune(model, images, keep=1.0, after=after)[0]
    assert_close(everything, model(images), atol=1e-10, rtol=0)


@pytest.mark.parametrize("options", [{"keep": 0.0}, {"keep": 1.5}, {"after": 4}])
def test_shares_and_blocks_that_do_not_exist_are_refused(options):
    native = tiny("hf_vit")
    with pytest.raises(BadOption):
        divprune(view(native, check=False), pictures(native), **options)
