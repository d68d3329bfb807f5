"""`seecause heads score` and `prune` as library functions: the same numbers as their parts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause import critters
from seecause.background import (
    AnswerSampling,
    Background,
    Erasure,
    Pictures,
    Screening,
    ablate,
    ablation_study,
    answered_right,
    outcomes,
    prune,
    prune_and_test,
    random_sets,
    read_pictures,
    score,
    score_heads,
    select,
)
from seecause.background._outcomes import changes, examples
from seecause.background.erase import ErasedViews
from seecause.background.images import critter_pictures
from seecause.background.prune import _checked_top, _steps, check_selector
from seecause.data import open_data
from seecause.data.batch import group_shares
from seecause.data.dataset import Hole
from seecause.errors import BadOption, UnknownName


@pytest.fixture(scope="module")
def train(model) -> Pictures:
    return critter_pictures(model, critters.draw("certified", "train", 64), name="train")


@pytest.fixture(scope="module")
def test(model) -> Pictures:
    return critter_pictures(model, critters.draw("balanced", "test", 64)[::4], name="test")


@pytest.fixture(scope="module")
def result(model, train, test):
    return prune_and_test(
        model, train, test, selector="weight-norm", top=3, draws=3, seed=5, background=MEAN
    )


MEAN = Background(fill="mean")
ALL = AnswerSampling(share=1.0)


def test_the_job_removes_the_highest_heads_and_measures_without_them(model, train, test, result):
    heads = select("weight-norm", model, train.images, train.labels).top(3)
    erasures = [Erasure(test.oracle, "mean"), Erasure(None, test.swapped)]
    before, after, other = outcomes(model, test, [[], heads, heads[:1]], erasures)
    assert result.heads == heads and result.test is test
    assert result.before.numbers() == before.numbers()
    for name, value in result.after.numbers().items():
        if name != "groups weighted as in training":
            assert value == pytest.approx(after.numbers()[name]), name
    assert result.after.nll != pytest.approx(before.nll) != pytest.approx(other.nll)
    assert result.changes()["NLL"] == (before.nll, pytest.approx(after.nll))
    assert "removed" not in result.changes()
    assert result.curve.ks == [0, 1, 3, 6]
    assert [len(outcome.heads) for outcome in result.curve.chosen] == [0, 1, 3, 6]


def test_a_share_of_heads_by_a_selector_with_options_on_two_kinds_of_pictures(model, train, test):
    rows = [place for place, group in enumerate(train.groups) if group in test.groups]
    narrow, metadata = train.take(torch.tensor(rows)), []

    def progress(what, total):
        metadata.append((what, total))
        return sc.background.pictures.no_progress(what, total)

    ids = tuple(f"00_dog/fg_n{place}_bg_{place}.JPEG" for place in range(len(test)))
    tested = replace(test, ids=ids)
    same = replace(train.take(torch.arange(5)), ids=ids[:5], holes=(Hole(ids[9], "cut"),))
    options = {"selector": "weight-norm", "options": {"remove": "least"}, "top": 0.25, "draws": 1}
    background = Background(fill="swap")
    result = prune_and_test(
        model, narrow, tested, background=background, same=same, progress=progress, **options
    )
    assert result.heads == select(
        "weight-norm", model, train.images, train.labels, remove="least"
    ).top(3)
    record = {"data": "train", "pictures": len(result.scored.pictures), "by": "weight-norm"}
    assert result.scored.record == {**record, "remove": "least"}
    assert metadata == [("scoring heads", 12 * record["pictures"]), ("measuring", 16)]
    erasures = [Erasure(test.oracle, "grey"), Erasure(None, test.swapped)]
    shares = group_shares(narrow.groups)
    before, after = outcomes(model, tested, [[], result.heads], erasures, train=shares)
    assert "groups weighted as in training" in before.numbers()
    assert result.before.numbers() == pytest.approx(before.numbers())
    assert result.after.numbers() == pytest.approx(after.numbers())
    shown, erased = result.examples.versions, erased_views(model, tested, "grey")
    for place, name in enumerate(("no background", "no object")):
        assert torch.equal(shown[name][-1], erased[place][-1])
    assert torch.equal(shown["elsewhere"][-1], test.swapped.background[-1])
    for heads, gap in zip(([], result.heads), result.gaps, strict=True):
        with ablate(model, heads):
            right = [
                (model(part.images).argmax(dim=1) == part.labels).double() for part in (same, test)
            ]
        seen = torch.arange(16) != 9  # that object could not be read in the other variant
        assert gap == pytest.approx(float(right[0].mean() - right[1][seen].mean()))
    assert result.changes()["BG-gap"] == result.gaps and result.holes == same.holes
    assert result.model is model


def erased_views(model, pictures, fill):
    return ErasedViews(model, pictures.images, pictures.oracle, fill).erased(slice(None))


def test_curves_go_from_none_by_quarters_to_twice_as_many_where_there_are():
    assert _steps(8, 12) == [0, 2, 4, 8] and _steps(4, 12) == [0, 1, 2, 4, 8]
    assert _steps(6, 12) == [0, 1, 3, 6, 12] and _steps(2, 3) == [0, 1, 2]
    assert _steps(0, 12) == [0, 1]


def test_a_screen_may_look_for_all_heads_and_stands_in_the_record(model, train):
    check_selector(model, "cigma", {"screen": 12}, Background())
    assert _checked_top(model, 2, Screening(top=2)) == _checked_top(model, 2, 2) == 2
    screening = Screening(top=1, verify=2, audit=0.0)
    scored = score_heads(
        model,
        train,
        options={"screen": screening, "guard": "protect"},
        sampling=AnswerSampling(cap=2),
        background=Background("discovered", search={"steps": 1, "grid": 4, "cache": None}),
    )
    assert scored.record == {
        "data": "train", "pictures": 2, "by": "cigma", "background": "discovered masks, grey",
        "operator": "zero", "guard": "protect", "mask options": {"grid": 4},
        "screen": {"top": 1, "verify": 2, "audit": 0.0, "half": False},
    }  # fmt: skip


def test_groups_are_weighted_as_in_all_training_pictures(model, train, result):
    assert result.scored.shares == group_shares(train.groups)
    assert len(result.scored.pictures) < len(train)
    assert result.scored.shares != group_shares(result.scored.pictures.groups)


def test_as_many_random_heads_stand_beside_them(model, result):
    drawn = [outcome.heads for outcome in result.curve.random[2]]
    assert drawn == random_sets(model, 3, draws=3, seed=5) != random_sets(model, 3, draws=3, seed=0)


def test_what_is_exported_answers_like_the_ablated_model(model, test, result, tmp_path):
    shipped = sc.load(str(result.export(tmp_path / "model")), dtype="float64")
    with ablate(model, result.heads):
        assert_close(shipped(test.images), model(test.images), atol=1e-10, rtol=0)
    count = len(result.scored.pictures)
    note = f"chosen by weight-norm on {count} pictures of train: the 3 highest scores."
    assert note in (tmp_path / "model" / "README.md").read_text()
    sliced = sc.load(str(result.export(tmp_path / "sliced", form="sliced")), dtype="float64")
    assert sum(block.heads for block in sliced.blocks) == 12 - 3


def test_pictures_that_could_not_be_read_are_named_once(model, train, test):
    first, second = Hole("a", "cut"), Hole("b", "empty")
    few, many = replace(train, holes=(first,)), replace(test, holes=(second, first))
    result = prune_and_test(model, few, many, selector="weight-norm", top=1, draws=1)
    assert result.holes == (first, second)
    table = ablation_study("layers", model, few, many, top=1, sampling=ALL, guard=False)
    assert table.holes == (first, second)


def test_examples_are_answered_before_and_after(model, test, result):
    shown = result.examples
    assert len(shown.pictures) == 6 and shown.pictures.ids[0] == test.ids[0]
    assert shown.pictures.ids[-1] == test.ids[-1]
    assert list(shown.versions) == ["picture", "no background", "no object", "elsewhere"]
    for name, images in shown.versions.items():
        assert_close(shown.logits[name][0], model(images), atol=1e-10, rtol=0)
        with ablate(model, result.heads):
            assert_close(shown.logits[name][1], model(images), atol=1e-10, rtol=0)
    alone = examples(model, test.take(torch.arange(2)), None)
    assert alone.logits["picture"].shape == (1, 2, model.n_classes)


def test_changes_have_what_both_have_and_the_gaps(result):
    numbers = changes(result.before, replace(result.after, flips=torch.nan), (0.3, 0.1))
    assert numbers["BG-gap"] == (0.3, 0.1) and "flips" not in numbers and "accuracy" in numbers


def test_heads_are_scored_on_right_answers(model, train):
    right = answered_right(model, train, share=0.5, cap=2, seed=3)
    scored = score_heads(
        model, train, selector="taylor", sampling=AnswerSampling(share=0.5, cap=2), seed=3
    )
    assert scored.pictures.ids == right.ids and len(right) == 2
    assert (model(right.images).argmax(dim=1) == right.labels).all()
    assert_close(scored.scores.value, select("taylor", model, right.images, right.labels).value)
    assert scored.erasure is None
    assert scored.record == {"data": "train", "pictures": 2, "by": "taylor"}
    other = score_heads(model, train, selector="random", sampling=ALL, seed=4)
    assert_close(
        other.scores.value, select("random", model, train.images, train.labels, seed=4).value
    )


def test_masks_and_fill_reach_the_selector(model, train):
    right = answered_right(model, train, share=1.0)
    for background, options in (
        (Background(fill="mean"), {"masks": right.oracle, "baseline": "mean"}),
        (Background(fill="swap"), {"baseline": right.swapped}),
    ):
        scored = score_heads(model, train, sampling=ALL, background=background)
        expected = select("cigma", model, right.images, right.labels, **options)
        assert_close(scored.scores.value, expected.value)
    searched, steps, told = Background("discovered", search={"steps": 2, "grid": 4}), [], []

    @contextmanager
    def progress(what, total):
        told.append((what, total))
        yield lambda done: steps.append((what, done))

    scored = score_heads(model, train, sampling=ALL, background=searched, progress=progress)
    assert told == [("searching masks", len(right)), ("scoring heads", 12 * len(right))]
    for what, total in told:
        assert sum(done for name, done in steps if name == what) == total
    masks = sc.background.discover_masks(model, right.images, steps=2, grid=4)
    assert torch.equal(scored.erasure.masks.hard, masks.hard)
    assert scored.record["mask options"] == {"grid": 4}
    assert scored.record["background"] == "discovered masks, grey"
    assert scored.record["operator"] == "zero" and scored.record["guard"] == "penalty"
    mass = score_heads(model, train, selector="attention-mass", sampling=ALL)
    expected = select("attention-mass", model, right.images, right.labels, masks=right.oracle)
    assert_close(mass.scores.value, expected.value)
    assert mass.record["masks"] == "oracle" and "background" not in mass.record
    seeded = score_heads(model, train, options={"operator": "resample"}, sampling=ALL, seed=2)
    around = {"masks": right.oracle, "operator": "resample"}
    expected = select("cigma", model, right.images, right.labels, seed=2, **around)
    assert_close(seeded.scores.value, expected.value)
    assert seeded.record["operator"] == "resample"


def test_pairs_are_scored_on_all_pictures_and_bare_ones_on_their_own_answers(model, train):
    train = train.take(torch.arange(12))
    scored = score_heads(model, train, selector="interchange")
    swap = {"baseline": train.swapped}
    expected = select("interchange", model, train.images, train.labels, **swap)
    assert scored.pictures is train and bool((model(train.images).argmax(1) != train.labels).any())
    assert_close(scored.scores.value, expected.value)
    assert scored.record["background"] == "exact swap"
    bare = replace(train.take(torch.arange(4)), labels=None)
    own = model(bare.images).argmax(dim=1)
    scored = score_heads(model, bare)
    expected = select("cigma", model, bare.images, own, masks=bare.oracle)
    assert_close(scored.scores.after["accuracy"], expected.after["accuracy"])
    assert scored.scores.before["accuracy"] == 1


def test_a_dataset_is_read_by_the_job(model):
    data = open_data("critters:certified:train", limit=24)
    metadata = []

    def progress(what, total):
        metadata.append((what, total))
        return sc.background.pictures.no_progress(what, total)

    scored = score_heads(model, data, selector="output-norm", sampling=ALL, progress=progress)
    right = answered_right(model, read_pictures(model, data), share=1.0)
    assert scored.pictures.ids == right.ids
    assert metadata == [("reading pictures", 24), ("scoring heads", 12 * len(right))]


def test_greedy_is_told_how_many_may_go(model, train, test, monkeypatch):
    result = prune_and_test(
        model,
        train,
        test,
        selector="greedy",
        options={"guard": "none"},
        top=0.17,  # of 12
        sampling=AnswerSampling(share=1.0, cap=4),
        draws=1,
    )
    assert result.scored.options["top"] == 2 and len(result.heads) == 2
    monkeypatch.setattr(prune, "_score", lambda *given: pytest.fail(f"{given[-1]}"))
    with pytest.raises(pytest.fail.Exception, match=r"{'top': 1}"):  # unless it is an option
        prune_and_test(model, train, test, selector="greedy", options={"top": 1}, top=2)


def test_a_study_reads_scores_and_measures(model, train, test):
    begun = []

    def progress(what, total):
        begun.append((what, total))
        return sc.background.pictures.no_progress(what, total)

    options = {"sampling": ALL, "background": MEAN, "guard": False, "progress": progress}
    table = ablation_study("k", model, train, test, top=2, draws=2, **options)
    assert table.train.ids == answered_right(model, train, share=1.0).ids and table.test is test
    assert ("study k", 1) in begun and len(table.rows[0]) == len(table.columns)
    scores = score(
        model,
        table.train.images,
        table.train.oracle,
        target=table.train.labels,
        baseline="mean",
        guard=False,
    )
    (expected,) = outcomes(model, test, [scores.top(2)], [Erasure(test.oracle, "mean")])
    row = next(row for row in table.rows if row["K"] == 2)
    assert row["NLL"] == pytest.approx(expected.nll) and "BIR, exact swap" in row
    fraction = ablation_study(
        "fraction",
        model,
        train,
        test,
        top=1,
        sampling=AnswerSampling(share=0.1),
        draws=1,
        guard=False,
    )
    assert len(fraction.train) == len(table.train)  # it takes its shares of all right answers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 13}, "a count from 1 to 12"),
        ({"top": 0.01}, "from 0.083 to 1.0"),
        ({"top": 0}, "a count from 1 to 12"),
        ({"options": {"mask_steps": 3}}, "option 'mask_steps' of cigma"),
        ({"top": 4, "options": {"screen": 2}}, "4 or more"),
        ({"options": {"screen": 13}}, "1 to 12"),
        ({"options": {"masks": None}}, "option 'masks' of cigma"),
        ({"options": {"guard": True}}, "penalty, protect, none"),
        ({"background": Background("mine")}, "auto, discovered, oracle"),
        ({"background": Background(fill="white")}, "mean, grey, blur, noise, swap"),
        ({"background": Background(search={"blur": 1})}, "option 'blur' of the mask search"),
        ({"background": Background(search={"rho": 0.2})}, "masks of its own"),
        ({"background": Background(fill="swap", search={"rho": 0.2})}, "masks that are searched"),
    ],
)
def test_what_cannot_be_used_is_named(model, train, test, options, message):
    with pytest.raises(BadOption, match=message):
        prune_and_test(model, train, test, **{"top": 1, **options})


def test_data_must_have_what_is_asked_of_it(model, train):
    bare = replace(train, truth=None, swapped=None)
    with pytest.raises(BadOption, match="a mask for every picture"):
        score_heads(model, bare, background=Background("oracle"))
    with pytest.raises(BadOption, match="no other versions of its pictures"):
        score_heads(model, bare, background=Background(fill="swap"))
    with pytest.raises(BadOption, match="taylor needs them"):
        score_heads(model, replace(train, labels=None), selector="taylor")
    with pytest.raises(BadOption, match="fills no background"):
        score_heads(model, train, selector="taylor", background=MEAN)
    with pytest.raises(UnknownName, match="cigma"):
        score_heads(model, train, selector="cigmo")


def test_results_print_one_line(model, result, cases):
    """Not the pixels of every picture."""
    audited = sc.background.heads_audit(model, cases, masks="oracle")
    for value in (result, audited, cases, cases.oracle, result.scored.scores, result.scored):
        assert len(repr(value)) < 900 and "tensor(" not in repr(value)
    assert repr(result).startswith("PruneResult(without [(")
