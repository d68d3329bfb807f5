"""The whole study on toys: every method, every table, every hypothesis; and arithmetic of its
page."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

import pytest
import torch

from scripts import heads_hypotheses, heads_numbers, heads_page, heads_study
from scripts.head_methods import GREY, PRINTED
from tests.heads.toys import toy


def test_the_study_writes_every_table_and_answers_every_hypothesis(tmp_path, monkeypatch):
    monkeypatch.setattr(heads_study, "RETRAINED", {"refits": 1, "strengths": (0.1,)})
    monkeypatch.setattr(heads_study, "KS", (1, 4))
    monkeypatch.setattr(
        torch.backends.cudnn, "allow_tf32", False
    )  # the study turns it off; this turns it back
    models = {
        name: Path(toy(tmp_path / name, planted=name == "known", seed=seed))
        for seed, name in enumerate(("biased", "known", "clean"))
    }
    toy(tmp_path / "more", "critters-biased-1", seed=3)
    toy(tmp_path / "more", "critters-biased-rs0.5", seed=4)  # one folder may hold seeds and a sweep

    def run():
        heads_study.main(
            models=tmp_path / "more", sweep=tmp_path / "more", device="cpu",
            limit=6, gating_steps=1, memory=1, biased=str(models["biased"]),
            known=str(models["known"]),
            clean=str(models["clean"]), tf32=False, out=tmp_path / "out", work=tmp_path / "work",
        )  # fmt: skip
        return (tmp_path / "out" / "heads-critters.csv").read_bytes(), (
            tmp_path / "out" / "heads-critters.md"
        ).read_text()

    table, page = run()
    monkeypatch.setattr(heads_study, "one_seed", None)  # finished seeds are not run again
    assert run()[0] == table
    assert "its numbers mean nothing" in page
    assert (
        re.findall(r"\*\*(H\d)\..*: (yes|no|in part|not decided[^.]*)\.\*\*", page)
        and len(re.findall(r"\*\*H\d\.", page)) == 5
    )
    rows = list(csv.DictReader((tmp_path / "out" / "heads-critters.csv").read_text().splitlines()))
    methods = {row["method"] for row in rows}
    assert {
        "cigma as printed",
        "random",
        "none (ERM)",
        "retrained last layer (DFR)",
        "gating, contrastive",
        "interchange (gold)",
        "taylor",
    } <= methods
    assert all(f"| {method} |" in page for method in methods - {heads_numbers.AS_MANY})
    assert {row["seed"] for row in rows} == {"0", "1"}
    assert (
        "`python scripts/heads_study.py --models DIR --sweep DIR --limit 6 --gating-steps 1"
        " --no-tf32`"
        in page
        and str(tmp_path) not in page
    )
    assert (
        page.count("| critters-biased-rs0.5 | 0.950 |") == 1
    )  # its toy card names the regime and nothing else
    for row in rows:  # whatever was removed, as many random heads were removed too
        if row["removed"] != "0":
            beside = [
                one
                for one in rows
                if one["seed"] == row["seed"]
                and one["removed"] == row["removed"]
                and one["method"] in (heads_numbers.RANDOM, heads_numbers.AS_MANY)
            ]
            assert len(beside) >= 2
            assert (
                sum(one["BIR, true masks, grey"] != "" for one in beside) == 1
            )  # of one draw, as the page says
    draws = [
        row for row in rows if row["method"] == "random" and row["seed"] == "0" and row["K"] == "4"
    ]
    assert len(draws) == 2 and all(row["removed"] == "4" for row in draws)
    found = [row for row in rows if row["method"] == "weight norm" and row["K"] == "4"]
    cell = re.search(
        r"^\| weight norm \|(?: [\d.]+ / [\d.]+ \|){1} [\d.]+ / ([\d.]+) \|", page, re.M
    )
    assert cell and float(cell[1]) == pytest.approx(
        statistics.fmean(float(row["test accuracy"]) for row in found), abs=6e-4
    )


def test_k_is_chosen_on_validation_pictures_alone():
    def row(method, k, val, test):
        return {
            "seed": "0",
            "method": method,
            "K": k,
            "val worst group": val,
            "val accuracy": val,
            "test worst group": test,
            "test accuracy": test,
        }

    study = heads_study.Study(heads_study.Sizes())
    study.about = {"seeds": ["0"]}
    study.rows = [
        row("none (ERM)", 0, 0.2, 0.2),
        row("m", 1, 0.3, 0.0),
        row("m", 2, 0.1, 0.9),
        row("worse", 1, 0.1, 0.9),
    ]
    assert [found["K"] for found in heads_numbers.choose(study, "m")] == [1]
    assert [found["K"] for found in heads_numbers.choose(study, "worse")] == [
        0
    ]  # nothing is removed where validation says so


def test_intervals_are_students():
    assert heads_numbers.interval([1.0, 2.0, 3.0]) == "2.000 ± 2.484"
    assert heads_numbers.interval([0.5]) == "0.500"


def test_help_means_a_gain_over_as_many_random_heads_beyond_the_interval():
    """Random sets of another size are no measure: they say 0.9 here."""

    def rows(*values, removed=2):
        return [
            {"seed": str(seed), "method": "m", "K": 4, "removed": removed, "x": value}
            for seed, value in enumerate(values)
        ]

    study = heads_study.Study(heads_study.Sizes())
    kinds = (
        ("none (ERM)", 0, 0.6),
        (heads_numbers.RANDOM, 4, 0.9),
        (heads_numbers.AS_MANY, 2, 0.1),
    )
    study.rows = [
        {"seed": str(seed), "method": name, "removed": removed, "x": value}
        for seed in range(3)
        for name, removed, value in kinds
    ]
    picked = {
        "sure": rows(0.5, 0.6, 0.55),
        "lucky": rows(0.1, 0.9, 0.1),
        "worse": rows(0.0, 0.0, 0.0),
        "nothing": rows(0.6, 0.6, 0.6, removed=0),
    }
    assert heads_page.helpful(study, picked, "x") == ["sure"]
    assert heads_numbers.lot(study, rows(0.6, removed=0)[0], "x") == 0.6  # the whole model


def test_a_number_that_some_draws_lack_is_averaged_over_the_others():
    found = heads_numbers.averaged([{"K": 2, "a": 1.0, "b": 4.0}, {"K": 2, "a": 3.0}])
    assert [(row["a"], row["b"]) for row in found] == [(2.0, 4.0)]


def test_h2_is_decided_only_where_heads_differ_in_cost():
    study = heads_study.Study(heads_study.Sizes())

    def heads(base, plain, guarded):
        return [
            {
                "method": name + guard,
                "costly among top 4": guarded if guard else plain,
                "costly among all": base,
            }
            for name in (PRINTED, GREY, "cigma, exact swap")
            for guard in ("", " + guard")
        ]

    for given, said in (
        ((0.25, 0.5, 0.1), "yes."),
        ((0.25, 0.1, 0.1), "no."),
        ((0.25, 0.5, 0.5), "in part."),
        ((0.95, 1.0, 0.9), "not decided, since more"),
    ):
        study.heads = heads(*given)
        assert f"the guard mends it: {said}" in heads_hypotheses._h2(study)
    study.heads = heads(0.25, 0.5, float("nan"))
    assert "with guard no head chosen" in heads_hypotheses._h2(
        study
    ) and "nan" not in heads_hypotheses._h2(study)


def test_h5_compares_with_as_many_random_heads_and_names_what_was_asked_later():
    study = heads_study.Study(heads_study.Sizes())
    study.about = {"seeds": ["0"]}
    study.facts = [{"model": "critters-biased 0", "Gini": 0.5}]

    def row(method, k, removed, worst, accuracy):
        told = {
            "val worst group": worst,
            "val accuracy": accuracy,
            "test worst group": worst,
            "test accuracy": accuracy,
        }
        return {"seed": "0", "method": method, "K": k, "removed": removed, **told}

    study.rows = [
        row("none (ERM)", 0, 0, 0.2, 0.2), row(f"{GREY} + guard", 4, 1, 0.4, 0.7),
        row(heads_numbers.AS_MANY, 1, 1, 0.3, 0.4),
        row(heads_numbers.RANDOM, 4, 4, 0.9, 0.9),  # more heads than really went: not the measure
    ]  # fmt: skip
    said = heads_hypotheses._h5(study)
    assert (
        "gain +0.100 (beyond" in said
        and "Post hoc, balanced accuracy at the K that validation chose: seed 0: 1 removed,"
        " gain +0.300"
        in said
    )


def test_h1_is_decided_along_three_values_of_r_s_or_not_at_all():
    study = heads_study.Study(heads_study.Sizes())

    def fact(r, rising, name="critters-biased-rs"):
        keys = ("BIR, true masks, mean", "BIR, true masks, grey", "flips")
        return {
            "model": f"{name}{r}",
            "r_s": r,
            "IoU": 0.5 - r / 10,
            "BIR, discovered masks, mean": 0.01,
            **dict.fromkeys(keys, rising),
        }

    study.facts = [fact(r, r) for r in (0.25, 0.5, 0.95)]
    said = heads_hypotheses._h1(study)
    assert "rise: yes.**" in said and "flips 0.250, 0.500, 0.950" in said
    study.facts = [fact(r, 0.3) for r in (0.25, 0.5, 0.95)]
    assert "rise: in part.**" in heads_hypotheses._h1(
        study
    ) and "flips rises: no" in heads_hypotheses._h1(study)
    study.facts = [
        fact(0.25, 0.25),
        fact(0.95, 0.95),
        fact(0.5, 0.5, name="critters-vit"),
    ]  # another recipe is no point of this line
    assert (
        "not decided.** A trend takes 3 values of r_s or more, and here are 2."
        in heads_hypotheses._h1(study)
    )
