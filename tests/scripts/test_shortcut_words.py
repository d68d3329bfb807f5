"""What the shortcut study's page says, by its rules."""

from __future__ import annotations

import dataclasses

import pytest

from scripts.shortcut import choice, plan, protocol, rows, slices, words
from scripts.shortcut.methods import Job, Setup


def result(job, worst, average=0.9):
    return {
        **dataclasses.asdict(job),
        "val": {"worst": worst, "average": average, "kept": 0.213},
        "seconds": 1.0,
    }


def test_a_choice_without_group_labels_can_take_another_setting():
    def reached(job, groups, worst):
        return {
            **result(job, min(groups)),
            "val": {"groups": groups, "worst": min(groups), "average": 0.5},
            "test": {"worst": worst, "average": 0.8},
        }

    usual, fair, near = plan.tuning("mask")[:3]
    shares = [0.45, 0.05, 0.05, 0.45]
    results = {
        usual.file: reached(usual, [1.0, 0.2, 0.2, 1.0], 0.1),
        fair.file: reached(fair, [0.9, 0.8, 0.8, 0.9], 0.7),
    }
    results[near.file] = reached(near, [1.0, 0.15, 0.2, 1.0], 0.6)
    assert (
        plan.best_so_far("mask", results) == fair
        and choice.best_as_trained("mask", results, shares) == usual
    )
    assert choice.as_trained(results[usual.file]["val"], shares) == pytest.approx(0.92)
    assert choice.near_best("mask", results, shares, 0.01) == [0.1, 0.6]
    row = next(
        line for line in choice.rules(results, shares, 100) if line.startswith("| early mask")
    )
    assert (
        row
        == "| early mask by the true trimap | 1 | 3 of 4 | 10.0 | 60.0 | 70.0 | 80.0, 70.0 | 80.0,"
        " 10.0 | 10.0 to 60.0 (2 settings) |"
    )


def test_a_gain_is_told_only_if_all_seeds_agree():
    def line(*worst, settled=True):
        return rows.Line(
            "x",
            "labels",
            {seed: {"worst": value, "average": 0.9} for seed, value in enumerate(worst)},
            settled,
        )

    erm = line(0.5, 0.5, 0.5)
    assert words.verdict(line(0.6, 0.55, 0.51), erm).startswith(
        "helps: WGA +5.3 points (+10.0, +5.0, +1.0)"
    )
    assert words.verdict(line(0.9, 0.9, 0.49), erm).startswith("makes no clear difference")
    assert words.verdict(line(0.51, 0.51, 0.51), erm).startswith("makes no clear difference")
    for unfinished in (
        words.verdict(line(0.4, 0.4), erm),
        words.verdict(line(0.4, 0.4, 0.4), line(0.5, 0.5)),
    ):
        assert unfinished.startswith("has no verdict yet (2 of 3 seeds): WGA -10.0 points")
    assert words.verdict(line(0.4, 0.4, 0.4), line(0.5, 0.5, 0.5, settled=False)).startswith(
        "has no verdict yet (setting not final)"
    )
    assert words.best_row([line(0.5, 0.5, 0.5), line(0.9, 0.9)]).startswith(
        "x, 50.0 ± 0.0 %"
    ) and words.best_row([line(0.9)]).startswith("not told")


def row(title, *worst, average=0.9, **more):
    return rows.Line(
        title,
        "labels",
        {seed: {"worst": value, "average": average, **more} for seed, value in enumerate(worst, 1)},
    )


def test_accuracy_on_a_texture_is_over_photos_and_not_over_groups():
    assert words.over_photos([1.0, 0.4, 0.7, 0.9], words.OTHER, [100, 300]) == pytest.approx(
        (40 + 210) / 400
    )
    said = words.shortcut(
        row("ERM", 0.4, 0.4, 0.4, groups=[1.0, 0.4, 0.7, 0.9], flips=0.4), [100, 300]
    )
    assert (
        "right on 92.5 % of the photos" in said
        and "on 62.5 % with it on the other one" in said
        and "It has learnt the shortcut." in said
    )


def test_cigma_is_compared_with_what_is_chosen_like_it():
    lot, printed, guarded = (
        rows.REPAIRS[key][0] for key in ("random, chosen", "printed", "guarded")
    )
    erm = row("ERM", 0.4, 0.4, 0.4)
    found = {
        line.title: line
        for line in (
            row(printed, 0.6, 0.6, 0.4),
            row(guarded, 0.41, 0.42, 0.43),
            row(lot, 0.45, 0.46, 0.47),
        )
    }
    said = list(words.beside_erm({"ERM": erm, **found}, erm))
    assert f"- **{lot}** helps: WGA +6.0 points (+5.0, +6.0, +7.0), average accuracy +0.0." in said
    assert (
        f"- **{printed}**, beside a random order chosen alike, makes no clear difference: WGA +7.3"
        " points (+15.0, +14.0, -7.0)" in said[3]
    )
    assert (
        f"- **{guarded}**, beside a random order chosen alike, is worse: WGA -4.0 points (-4.0,"
        " -4.0, -4.0)" in said[4]
    )
    assert (
        "its +6.0 points over ERM are what choosing on validation pictures buys" in said[5]
        and len(said) == 6
    )


def test_random_sets_are_counted_chosen_and_unchosen():
    kept = {
        "printed": {"heads": [[0, 1]], "test": {"worst": 0.5}},
        "guarded": {"heads": [], "test": {"worst": 0.4}},
    }
    kept |= {
        "random, chosen": {"worst": [0.4, 0.5, 0.3]},
        "random, printed": {"worst": [0.6, 0.1]},
        "random, guarded": {"worst": [0.4]},
    }
    assert (
        choice.as_good(kept, "printed")
        == "1 of 3 random orders chosen alike and 1 of 2 random sets of as many heads, which"
        " nothing chose"
    )
    assert (
        choice.as_good(kept, "guarded") == "2 of 3 random orders chosen alike (it removes no head)"
    )


def test_interventions_are_compared_with_the_same_net_without_them():
    results = {job.file: result(job, 0.5) for method in plan.TUNED for job in plan.tuning(method)}
    runs = [job for best in rows.part_jobs("ifam", results) for job in plan.seeds_of(best)]
    results |= {
        job.file: {
            **result(job, 0.5),
            "chosen": {
                "drop": [0] if job is runs[0] else [],
                "quantile": 0.97 if job is runs[1] else None,
            },
        }
        for job in runs
    }

    def told(*changed):
        some = (row("iFAM, K = 4", 0.8, 0.8, 0.8), row("iFAM, K = 4, with interventions", *changed))
        return words.changed("ifam", {line.title: line for line in some}, results)

    assert (
        "Nothing was changed in 7 of 9 runs. **iFAM, K = 4, with interventions** makes no clear"
        " difference: WGA +1.0 points" in told(0.83, 0.8, 0.8)
    )
    assert "**A loss: interventions do not help iFAM here.**" in told(
        0.83, 0.8, 0.8
    ) and "A loss" not in told(0.83, 0.82, 0.82)
    assert "has no verdict yet (2 of 3 seeds)" in told(0.8, 0.8) and "A loss" not in told(0.8, 0.8)


def test_the_best_row_names_the_next_and_the_seeds_that_disagree():
    said = words.best_row(
        [row("a", 0.9, 0.8, 0.9), row("b", 0.5, 0.5, 0.91), row(rows.NAMES["mask"], 1.0, 1.0, 1.0)]
    )
    assert (
        said.startswith("a, 86.7 ± 5.8 %")
        and "Next: b, " in said
        and "**Their order changes between seeds** (seed 3, 90.0 against 91.0)" in said
    )
    assert words.best_row([row("a", 0.9, 0.8, 0.9), row("b", 0.5, 0.5, 0.5)]).endswith(
        "It is behind on every seed."
    )


def test_a_setting_at_the_edge_of_its_grid_is_told():
    assert choice.edges(Job("erm", 0, 1e-4, length=3.0)) == {
        "rate": "inside",
        "length": "the highest of 3",
    }
    assert choice.edges(Job("ifam", 0, 3e-5, 5.0, 0.3)) == {
        "rate": "the lowest of 2",
        "background": "the highest of 2",
        "total variation": "the lowest of 2",
    }
    inside, edge = (
        {
            job.file: result(job, float(job.rate == 3e-5 and job.length == length))
            for job in plan.tuning("erm")
        }
        for length in (1.0, 3.0)
    )
    assert (
        "ERM: inside (rate 3e-05 inside, length 1 inside)" in choice.edges_told(inside)[0]
        and "undertuned" not in choice.edges_told(inside)[0]
    )
    assert (
        "length 3 the highest of 3" in choice.edges_told(edge)[0]
        and "it may be undertuned" in choice.edges_told(edge)[0]
    )


def test_time_is_that_of_planned_jobs_and_by_the_clock_where_it_is_known(tmp_path):
    setup, about = (
        Setup(tmp_path, tmp_path, device="cpu"),
        {
            "machine": "m",
            "torch": "t",
            "timm": "i",
        },
    )
    jobs = [*plan.tuning("erm")[:2], Job("erm", 1, 0.5)]  # no plan asks for the last
    results = {job.file: {**result(job, 0.5), **about} for job in jobs}
    said = protocol._command(setup, results)
    assert (
        "2 jobs on m" in said
        and "2 seconds of work in 2 jobs" in said
        and "By the clock: not known." in said
    )
    assert "Not counted: 1 seconds in 1 jobs of an earlier plan" in said
    slices.remember(tmp_path, seconds=7.0, workers=3, jobs=1)
    assert (
        "By the clock: at least 7 seconds (1 slice, 3 jobs at once; earlier slices were not timed)."
        in protocol._command(setup, results)
    )
    slices.remember(tmp_path, seconds=5.0, workers=0, jobs=1)
    assert "By the clock: 12 seconds (2 slices, 1, 3 jobs at once)." in protocol._command(
        setup, results
    )
    assert "at least 8 seconds (1 slice, 5 jobs at once, shared" in slices.by_the_clock(
        [{"seconds": 8, "workers": 5, "jobs": None, "note": "shared"}], 1
    )
