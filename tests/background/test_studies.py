"""Tables of studies: each number is what its setting gives when it is measured alone."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from scipy.stats import spearmanr
from torchvision.models import resnet18

import seecause as sc
from seecause.background import (
    AnswerSampling,
    Background,
    Erasure,
    HeadScores,
    ablation_study,
    answered_right,
    discover_masks,
    information_gains,
    iou,
    outcomes,
    penalised,
    random_sets,
    score,
    studies,
)
from seecause.background.studies import STUDIES, StudySetup, ablation_table
from seecause.errors import BadOption, NotDefined, UnknownName

TOP = 2


@pytest.fixture
def setup(model, cases, tmp_path):
    looks = (Erasure(cases.oracle, "grey"),)
    search = {"steps": 2, "cache": tmp_path / "masks"}
    return StudySetup(
        model, cases, cases, cases.oracle, looks, top=TOP, draws=2, search=search, seed=3
    )


def scores_of(setup, rows=None, masks=None, **options):
    """By the library's own functions, not by the setup's."""
    pictures = setup.train if rows is None else setup.train.take(rows)
    masks = masks or (setup.masks if rows is None else setup.masks.take(rows))
    return penalised(score(setup.model, pictures.images, masks, target=pictures.labels, **options))


def numbers_without(setup, heads):
    return outcomes(setup.model, setup.test, [heads], setup.erasures)[0].numbers()


def agreement(first, second):
    return spearmanr(first.value.flatten(), second.value.flatten()).statistic


def same(row, expected):
    """A row has these numbers, whatever else it has."""
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, abs=1e-9), name


def test_k_has_the_highest_heads_and_as_many_by_lot(setup):
    table, scores = ablation_table("k", setup), scores_of(setup)
    assert [row["K"] for row in table.rows] == [0, 2, 4, 8] and table.x == "K"
    for row in table.rows:
        heads = scores.top(row["K"])
        same(row, numbers_without(setup, heads))
        lots = random_sets(setup.model, len(heads), draws=2, seed=3)
        for name in ("accuracy", "worst group", "flips", "BIR, true masks, grey"):
            drawn = [numbers_without(setup, lot)[name] for lot in lots]
            mean = sum(drawn) / 2
            same(row, {f"{name}, random": mean, f"{name}, random sd": abs(drawn[0] - mean)})
    assert table.test is setup.test and table.masks is setup.masks and table.train is setup.train
    assert table.note.endswith("mean and deviation of 2 random sets of as many.")


def test_k_counts_heads_that_there_are(setup):
    from seecause.background import prune_heads

    pruned = prune_heads(
        setup.model, [(1, 0), *((2, head) for head in range(4))]
    )  # 7 heads are left
    rows = ablation_table("k", replace(setup, model=pruned)).rows
    assert [row["K"] for row in rows] == [0, 2, 4]


def test_fractions_are_parts_of_one_order(setup):
    table = ablation_table("fraction", setup)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    whole = scores_of(setup, order.sort().values)
    assert [(row["share"], row["pictures"]) for row in table.rows] == [
        (0.4, 2), (0.6, 4), (0.8, 5), (1.0, 6),
    ]  # fmt: skip
    for row in table.rows:
        scores = scores_of(setup, order[: row["pictures"]].sort().values)
        same(row, {"rank correlation with all": agreement(scores, whole)})
        same(row, numbers_without(setup, scores.top(TOP)))


def test_masks_are_searched_anew_for_each_setting(setup, monkeypatch):
    settings = {"default": {}, "rho 0.25": {"rho": 0.25}, "noise": {"baseline": "noise"}}
    monkeypatch.setattr(studies, "MASKS", settings)
    table = ablation_table("masks", setup)
    assert [row["setting"] for row in table.rows] == list(settings)
    images, first = setup.train.images, None
    for row, options in zip(table.rows, settings.values(), strict=True):
        masks = discover_masks(setup.model, images, **setup.search, **options)
        fill = options.get("baseline", "grey")
        gains = information_gains(setup.model, images, masks, baseline=fill)
        scores = scores_of(setup, masks=masks, baseline=fill)
        first = first or scores
        overlap = float(iou(masks, setup.train.truth).nanmean())
        same(row, {"FIG": float(gains.fig.mean()), "BIG": float(gains.big.mean())})
        same(row, {"BIR": gains.bir_ratio_of_means, "IoU": overlap})
        same(row, {"rank correlation with default": agreement(scores, first)})
        same(row, numbers_without(setup, scores.top(TOP)))
    files = list(setup.search["cache"].iterdir())
    assert len(files) == 2 * 6  # rho costs nothing, another fill is another search


def test_what_a_study_changes_wins_over_what_was_asked_for(setup, monkeypatch):
    monkeypatch.setattr(studies, "MASKS", {"default": {}, "rho 0.25": {"rho": 0.25}})
    asked = replace(setup, search={**setup.search, "rho": 0.6}, erasures=())
    for row, rho in zip(ablation_table("masks", asked).rows, (0.6, 0.25), strict=True):
        masks = discover_masks(setup.model, setup.train.images, **{**asked.search, "rho": rho})
        same(row, {"IoU": float(iou(masks, setup.train.truth).nanmean())})


def test_temperatures_change_the_choice_of_heads_alone(setup):
    table, usual = ablation_table("temperature", setup), scores_of(setup)
    assert [row["temperature"] for row in table.rows] == [0.5, 1.0, 2.0]
    for row in table.rows:
        scores = scores_of(setup, temperature=row["temperature"])
        same(row, {"rank correlation with 1": agreement(scores, usual)})
        same(row, numbers_without(setup, scores.top(TOP)))


def test_thirds_of_the_blocks_lose_their_own_heads(setup):
    rows = {row["blocks"]: row for row in ablation_table("layers", setup).rows}
    assert list(rows) == ["none", "all", "first third", "middle third", "last third"]
    order = scores_of(setup).order()
    same(rows["none"], numbers_without(setup, []))
    same(rows["all"], numbers_without(setup, order[:TOP]))
    note = ablation_table("layers", replace(setup, top=3, erasures=())).note
    assert note.startswith("The 3 best heads of those blocks alone go")
    for layer, name in enumerate(("first third", "middle third", "last third")):
        same(rows[name], numbers_without(setup, [head for head in order if head[0] == layer][:TOP]))


def test_halves_are_compared_with_each_other_and_with_all(setup, monkeypatch):
    monkeypatch.setattr(studies, "FAR", 2)
    table, chance = ablation_table("stability", setup), torch.Generator().manual_seed(3)
    halves = [torch.randperm(6, generator=chance)[:3].sort().values for _ in range(6)]
    scores, whole = [scores_of(setup, rows) for rows in halves], scores_of(setup)
    places = torch.stack([(-s.value.flatten()).argsort().argsort() for s in scores]).double()
    for place, row in enumerate(table.rows):
        others = [agreement(scores[place], s) for i, s in enumerate(scores) if i != place]
        moved = ((places[place] - places.mean(dim=0)).abs() > 2).double().mean()
        in_top = len(set(scores[place].top(TOP)) & set(whole.top(TOP)))
        same(row, {"half": place, "rank correlation with the others": sum(others) / 5})
        same(
            row,
            {"heads that moved over 2 ranks": float(moved), "in the top of all pictures": in_top},
        )
        same(row, numbers_without(setup, scores[place].top(TOP)))
    top = (-whole.value.flatten()).argsort()[:TOP]
    spread = places[:, top].std(dim=0, correction=0).mean()
    assert f"The rank of the top 2 heads varies by {spread:.1f} between halves." in table.note


def test_without_a_guard_scores_are_bare(setup):
    bare = replace(setup, guard=False).scores()
    plain = score(setup.model, setup.train.images, setup.masks, target=setup.train.labels)
    assert torch.equal(bare.value, plain.value) and "fig" not in bare.after
    assert not math.isclose(float(bare.value.sum()), float(setup.scores().value.sum()))


def test_every_study_has_a_question():
    assert list(STUDIES) == ["k", "fraction", "masks", "temperature", "layers", "stability"]


def test_settings_are_those_of_the_paper():
    assert studies.KS == (0, 4, 8, 16, 24, 32) and studies.FAR == 5 and studies.HALVES == 6
    assert studies.FRACTIONS == (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
    expected = {
        "default": {},
        **{f"rho {rho}": {"rho": rho} for rho in (0.25, 0.45)},
        **{f"grid {grid}": {"grid": grid} for grid in (16, 64)},
        **{f"TV {weight}": {"weights": (1.0, 0.01, weight)} for weight in (0.05, 0.2)},
        **{f"area {weight}": {"weights": (1.0, weight, 0.1)} for weight in (0.005, 0.02)},
        "blurred fill": {"baseline": "blur"},
    }
    assert expected == studies.MASKS


def test_a_table_has_the_columns_of_all_its_rows(setup):
    table = studies.StudyTable("k", "?", [{"K": 0, "a": 1}, {"K": 2, "b": 3}])
    assert table.columns == ["K", "a", "b"] and table.holes == ()
    with pytest.raises(BadOption, match="from 1 to 12 heads"):
        ablation_table("k", replace(setup, top=0))
    with pytest.raises(UnknownName, match="stability"):
        ablation_table("stabilty", setup)


def test_a_study_is_set_up_as_it_is_asked_for(model, cases, monkeypatch):
    setups = []

    def kept(name, setup):
        setups.append(setup)
        return studies.StudyTable(name, "?", [])

    monkeypatch.setattr(studies, "ablation_table", kept)
    nine = replace(model, name="nine")  # what a model is where the data has other answers
    monkeypatch.setattr(studies, "model_for", lambda given, data: nine)
    labels = model(cases.images).argmax(dim=1)
    train, background = (
        replace(cases, labels=labels),
        Background("discovered", "blur", {"steps": 1}),
    )
    around = {"sampling": AnswerSampling(share=0.7, cap=3), "background": background}
    done = []

    @contextmanager
    def progress(what, total):
        yield lambda count: done.append((what, count))

    around["progress"] = progress
    ablation_study("stability", model, train, cases, top=3, guard=False, draws=7, seed=3, **around)
    assert done[-1] == ("study stability", 1)
    (setup,) = setups
    assert setup.train.ids == answered_right(model, train, seed=3, share=0.7, cap=3).ids
    assert setup.train.ids != answered_right(model, train, seed=0, share=0.7, cap=3).ids
    assert setup.test is cases and setup.search == {"steps": 1} and setup.model is nine
    assert (setup.top, setup.fill, setup.guard, setup.draws, setup.seed) == (3, "blur", False, 7, 3)
    masks = discover_masks(model, setup.train.images, steps=1)
    assert torch.equal(setup.masks.hard, masks.hard)
    assert [look.name for look in setup.erasures] == ["discovered masks, blur", "exact swap"]
    assert torch.equal(
        setup.erasures[0].masks.hard, discover_masks(model, cases.images, steps=1).hard
    )
    ablation_study("fraction", model, train, cases, seed=3, **around)  # of at most three
    assert setups[1].train.ids == answered_right(model, train, seed=3, share=1.0, cap=3).ids
    with pytest.raises(BadOption, match="studies compare masks"):
        ablation_study("k", model, train, cases, background=Background(fill="swap"))


def test_data_may_be_named_and_other_models_are_refused_in_words(model):
    table = ablation_study("k", model, "critters:certified:train", "critters:certified:test",
                           top=1, draws=1, background=Background(masks="oracle"))  # fmt: skip
    assert table.train is not None and table.train.name.startswith("critters:certified:train")
    staged = sc.wrap(resnet18(num_classes=2).eval(), mean=(0.5,) * 3, std=(0.5,) * 3, size=32)
    scored, labels = HeadScores(torch.zeros(1, 1)), torch.arange(2)
    for run in (
        lambda: ablation_study("k", staged, table.train, table.test),
        lambda: random_sets(staged, 1),
        lambda: sc.background.greedy(staged, table.train.images),
        lambda: sc.background.head_gates(staged, (table.train.images, table.train.labels)),
        lambda: sc.background.divprune(staged, table.train.images),
        lambda: sc.background.curve(staged, table.test, scored, [0]),
        lambda: sc.background.retrain_last_layer(staged, torch.zeros(2, 3, 32, 32), labels, labels),
    ):
        with pytest.raises(NotDefined, match="read by its stages, not by heads"):
            run()
