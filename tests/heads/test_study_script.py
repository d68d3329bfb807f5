"""The whole study on toys: every method, every table, every hypothesis; and arithmetic of its page."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

import pytest

from scripts import heads_page, heads_study
from tests.heads.toys import toy


def test_the_study_writes_every_table_and_answers_every_hypothesis(tmp_path, monkeypatch):
    monkeypatch.setattr(heads_study, "DFR", {"refits": 1, "strengths": (0.1,)})
    monkeypatch.setattr(heads_study, "KS", (1, 4))
    models = {name: Path(toy(tmp_path / name, planted=name == "known", seed=seed)) for seed, name in enumerate(("biased", "known", "clean"))}
    toy(tmp_path / "more", "critters-biased-1", seed=3)

    def run():
        heads_study.main(
            models=tmp_path / "more", sweep=None, device="cpu", limit=6, gating_steps=1, memory=1, biased=str(models["biased"]), known=str(models["known"]),
            clean=str(models["clean"]), tf32=False, out=tmp_path / "out", work=tmp_path / "work",
        )  # fmt: skip
        return (tmp_path / "out" / "heads-critters.csv").read_bytes(), (tmp_path / "out" / "heads-critters.md").read_text()

    table, page = run()
    monkeypatch.setattr(heads_study, "one_seed", None)  # finished seeds are not run again
    assert run()[0] == table
    assert "its numbers mean nothing" in page
    assert re.findall(r"\*\*(H\d)\..*: (yes|no|in part|not decided[^.]*)\.\*\*", page) and len(re.findall(r"\*\*H\d\.", page)) == 5
    rows = list(csv.DictReader((tmp_path / "out" / "heads-critters.csv").read_text().splitlines()))
    methods = {row["method"] for row in rows}
    assert {"cigma as printed", "random", "none (ERM)", "retrained last layer (DFR)", "gating, contrastive", "interchange (gold)", "taylor"} <= methods
    assert all(f"| {method} |" in page for method in methods)
    assert {row["seed"] for row in rows} == {"0", "1"}
    draws = [row for row in rows if row["method"] == "random" and row["seed"] == "0" and row["K"] == "4"]
    assert len(draws) == 2 and all(row["removed"] == "4" for row in draws)
    found = [row for row in rows if row["method"] == "weight norm" and row["K"] == "4"]
    cell = re.search(r"^\| weight norm \|(?: [\d.]+ / [\d.]+ \|){1} [\d.]+ / ([\d.]+) \|", page, re.M)
    assert cell and float(cell[1]) == pytest.approx(statistics.fmean(float(row["test accuracy"]) for row in found), abs=6e-4)


def test_k_is_chosen_on_validation_pictures_alone():
    def row(method, k, val, test):
        return {"seed": "0", "method": method, "K": k, "val worst group": val, "val accuracy": val, "test worst group": test, "test accuracy": test}

    study = heads_study.Study(heads_study.Sizes())
    study.about = {"seeds": ["0"]}
    study.rows = [row("none (ERM)", 0, 0.2, 0.2), row("m", 1, 0.3, 0.0), row("m", 2, 0.1, 0.9), row("worse", 1, 0.1, 0.9)]
    assert [found["K"] for found in heads_page.choose(study, "m")] == [1]
    assert [found["K"] for found in heads_page.choose(study, "worse")] == [0]  # nothing is removed where validation says so


def test_intervals_are_students():
    assert heads_page.interval([1.0, 2.0, 3.0]) == "2.000 ± 2.484"
    assert heads_page.interval([0.5]) == "0.500"


def test_help_means_a_gain_over_random_heads_beyond_the_interval():
    def rows(*values):
        return [{"x": value} for value in values]

    picked = {heads_page.RANDOM: rows(0.1, 0.1, 0.1), "sure": rows(0.5, 0.6, 0.55), "lucky": rows(0.1, 0.9, 0.1), "worse": rows(0.0, 0.0, 0.0)}
    assert heads_page.helpful(picked, "x") == ["sure"]


def test_hypotheses_say_when_no_head_was_chosen_and_compare_with_as_many_random_heads():
    study = heads_study.Study(heads_study.Sizes())
    study.heads = [
        {"method": name + guard, "costly among top 4": float("nan") if guard else 0.5, "costly among all": 0.25}
        for name in (heads_page.PRINTED, heads_page.GREY, "cigma, exact swap")
        for guard in ("", " + guard")
    ]
    assert "with guard no head chosen" in heads_page._h2(study) and "nan" not in heads_page._h2(study)
    study.facts = [{"model": "critters-biased 0", "Gini": 0.5, heads_page.AS_MANY: [0.3, 0.3]}]
    study.rows = [
        {"seed": "0", "method": f"{heads_page.GREY} + guard", "K": 4, "removed": 1, "test worst group": 0.4},
        {"seed": "0", "method": heads_page.RANDOM, "K": 4, "removed": 4, "test worst group": 0.9},  # more heads than really went: not the measure
    ]
    assert "gain +0.100 (beyond" in heads_page._h5(study)


def test_a_sweep_is_told_along_its_values():
    study = heads_study.Study(heads_study.Sizes())
    keys = ("IoU", "BIR, discovered masks, mean", "BIR, true masks, mean", "BIR, true masks, grey", "flips")
    study.facts = [{"r_s": r, **dict.fromkeys(keys, r)} for r in (0.125, 0.5, 0.95)]
    assert "Flips by r_s: 0.125: 0.125, 0.5: 0.500, 0.95: 0.950" in heads_page._h1(study) and "no trend" not in heads_page._h1(study)
    study.facts = study.facts[::2]
    assert "no trend, only ends" in heads_page._h1(study)
