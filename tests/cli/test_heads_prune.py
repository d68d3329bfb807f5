"""`seecause heads prune`: what is removed, what the page says of it, and what is shipped."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import seecause as sc
from seecause.data import open_data
from tests.background.toys import toy
from tests.cli.calls import SMALL, grey_noise, heads, photos, table, whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize(("form", "by"), [("zeroed", "cigma"), ("sliced", "weight-norm")])
def test_prune_leaves_a_checkpoint_that_answers_like_the_ablated_model(tmp_path, folder, form, by):
    words = (
        "--by",
        by,
        "--top",
        3,
        "--form",
        form,
        "--limit",
        24,
        "--test-limit",
        32,
        "--draws",
        2,
    )
    done = heads("prune", "--model", folder, *words, *SMALL, tmp_path / "p")
    assert done.exit_code == 0, done.output
    removed = [
        tuple(head)
        for head in json.loads((tmp_path / "p" / "manifest.json").read_text())["removed"]
    ]
    assert len(removed) == 3 if by == "weight-norm" else 0 < len(removed) <= 3
    model, pruned = sc.load(folder), sc.load(str(tmp_path / "p" / "model"))
    images = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with sc.background.ablate(model, removed):
        torch.testing.assert_close(pruned(images), model(images), atol=1e-4, rtol=0)
    page = whole((tmp_path / "p" / "index.html").read_text())
    assert (
        page.count(" chosen") >= len(removed)
        and "before" in page
        and "random heads: mean and standard deviation of draws" in page
    )
    rows = table(tmp_path / "p" / "curve.csv")
    assert [int(row["K"]) for row in rows][:2] == [0, 1] and rows[0]["removed"] == "0"


def test_the_page_of_a_prune_says_after_what_the_shipped_model_does(tmp_path, folder):
    words = ("--by", "weight-norm", "--top", 3, "--limit", 24, "--test-limit", 32, "--draws", 2)
    done = heads("prune", "--model", folder, *words, *SMALL, tmp_path / "p")
    assert done.exit_code == 0, done.output
    metadata = json.loads((tmp_path / "p" / "manifest.json").read_text())
    rows = {int(row["removed"]): row for row in table(tmp_path / "p" / "curve.csv")}
    assert set(rows) == {0, 1, 3, 6} and len({row["NLL"] for row in rows.values()}) == 4
    page = (tmp_path / "p" / "index.html").read_text()
    for name, row, shipped in measured(folder, tmp_path / "p" / "model"):
        cells = [f"{value:.3f}" for value in (row, shipped)]
        assert re.search(rf">{name}[^<]*</t[hd]>\s*<td>{cells[0]}</td>\s*<td>{cells[1]}<", page), (
            name
        )
        assert f"{name}: {cells[0]} -> {cells[1]}" in done.stdout
        assert f"{float(rows[0][name]):.3f}" == cells[0]
        assert f"{float(rows[len(metadata['removed'])][name]):.3f}" == cells[1]


def measured(folder, shipped):
    """NLL and flips of the whole model and of the exported one, on the test pictures."""
    numbers = []
    for place in (folder, str(shipped)):
        model = sc.load(place)
        pictures = sc.background.read_pictures(model, open_data("critters:balanced:test", limit=32))
        (outcome,) = sc.background.outcomes(model, pictures, [[]])
        numbers.append(outcome.numbers())
    return [(name, numbers[0][name], numbers[1][name]) for name in ("NLL", "flips")]


def test_prune_removes_nothing_where_no_head_has_a_score_above_zero(tmp_path, folder):
    data = photos(tmp_path / "data", colour="black")  # their mean colour takes nothing away
    words = (
        "--fill",
        "mean",
        "--share",
        1,
        "--steps",
        1,
        "--top",
        2,
        "--test-limit",
        8,
        "--draws",
        2,
    )
    done = heads("prune", "--model", folder, "--data", data, *words, *SMALL, tmp_path / "p")
    assert done.exit_code == 0, done.output
    assert (
        json.loads((tmp_path / "p" / "manifest.json").read_text())["removed"] == []
        and "nothing is removed" in done.stdout
    )
    assert sc.load(str(tmp_path / "p" / "model")).n_heads == 4


def test_top_and_form_are_checked_before_any_mask_is_searched(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(
        "seecause.background.images.read_pictures",
        lambda *_, **__: pytest.fail("pictures were read"),
    )
    planted = toy(tmp_path / "planted", planted=True, library="seecause")
    for message, words in (
        (
            "top=13 cannot be used; expected a count from 1 to 12",
            ("prune", "--model", folder, "--top", 13),
        ),
        ("top=0.01", ("prune", "--model", folder, "--top", 0.01)),
        ("screen=13", ("score", "--model", folder, "--screen", 13)),
        ("top=13", ("ablation-study", "k", "--model", folder, "--top", 13)),
        ("cutting heads out", ("prune", "--model", planted, "--form", "sliced")),
    ):
        done = heads(*words, *SMALL, tmp_path / "out")
        assert done.exit_code == 2 and message in done.stderr, done.output


@pytest.mark.parametrize("top", ["0", "-3", "0.0", "1.5", "many", "nan."])
def test_a_top_that_no_model_has_is_refused_before_one_is_loaded(tmp_path, top):
    done = heads("prune", f"--top={top}", "--model", tmp_path / "nowhere", *SMALL, tmp_path / "out")
    assert (
        done.exit_code == 2
        and f"--top='{top}'" in done.stderr
        and "a count from 1 on" in done.stderr
    ), done.output


def test_greedy_regression_and_contrastive_gating_are_reachable(tmp_path, folder):
    for by, more in (
        ("greedy", ("--guard", "none")),
        ("regression", ("--option", "draws=32")),
        ("contrastive-gating", ("--option", "steps=1", "--option", "fits=1")),
    ):
        words = (
            "--limit",
            24,
            "--share",
            1,
            "--cap",
            6,
            "--fill",
            "mean",
            "--top",
            2,
            "--test-limit",
            32,
            "--draws",
            2,
        )
        done = heads("prune", "--model", folder, "--by", by, *words, *more, *SMALL, tmp_path / by)
        assert done.exit_code == 0, done.output
        metadata = json.loads((tmp_path / by / "manifest.json").read_text())
        assert (
            metadata["by"] == by
            and "BIR, true masks, mean" in (tmp_path / by / "curve.csv").read_text()
            and metadata["background"] == "true masks, mean"
            and metadata["pictures"] <= 6
            and len(metadata["removed"]) <= 2
        )
        assert ("guard" in metadata) == (by == "greedy")
        for name in (
            "accuracy",
            "worst group",
            "mean of groups",
            "groups weighted as in training",
            "NLL",
            "ECE",
        ):
            assert re.search(rf"^{name}: [0-9.]+ -> [0-9.]+$", done.stdout, re.MULTILINE), (
                name,
                done.stdout,
            )


def test_imagenet9_gives_a_gap_before_and_after(tmp_path):
    model, root = (
        toy(tmp_path / "toy", classes=[f"class {place}" for place in range(1000)]),
        tmp_path / "bg_challenge",
    )
    for variant, part, count in (
        ("original", "00_dog", 3),
        ("mixed_same", "00_dog", 3),
        ("mixed_rand", "00_dog", 1),
        ("mixed_rand", "08_fish", 3),
    ):
        for photo in range(count):
            stem = f"n{photo}" if variant == "original" else f"fg_n{photo}_bg_x"
            for folder in (root / variant / "val" / part, root / "fg_mask" / "val" / part):
                folder.mkdir(parents=True, exist_ok=True)
            noise = grey_noise((96, 96), 20 + 40 * photo)
            noise.save(root / variant / "val" / part / f"{stem}.JPEG")
            np.save(
                root / "fg_mask" / "val" / part / f"n{photo}.npy", np.pad(np.ones((48, 48)), 24)
            )
    (root / "in_to_in9.json").write_text(
        json.dumps({str(place): max(0, place - 991) if place else -1 for place in range(1000)})
    )  # nearly all are dogs
    data, test = f"imagenet9:{root}:original", f"imagenet9:{root}:mixed_rand"
    done = heads(
        "audit", "--model", model, "--data", test, "--masks", "oracle", *SMALL, tmp_path / "a"
    )
    assert (
        done.exit_code == 0
        and "BG-gap 0.750" in done.stdout
        and "BG-gap" in (tmp_path / "a" / "index.html").read_text()
    ), done.output
    words = ("--by", "weight-norm", "--top", 2, "--draws", 1, "--share", 1)
    done = heads(
        "prune", "--model", model, "--data", data, "--test", test, *words, *SMALL, tmp_path / "p"
    )
    assert done.exit_code == 0 and re.search(r"^BG-gap: 0.750 -> ", done.stdout, re.MULTILINE), (
        done.output
    )
    assert (
        sc.load(str(tmp_path / "p" / "model")).n_classes == 1000
    )  # the model itself keeps its classes
    done = heads(
        "ablation-study",
        "k",
        "--model",
        model,
        "--data",
        data,
        "--test",
        test,
        "--top",
        1,
        "--draws",
        1,
        "--share",
        1,
        *SMALL,
        tmp_path / "s",
    )
    assert done.exit_code == 0 and len(table(tmp_path / "s" / "table.csv")) >= 2, done.output
    (root / "mixed_same" / "val" / "00_dog" / "fg_n0_bg_x.JPEG").write_bytes(b"no picture")
    done = heads(
        "audit", "--model", model, "--data", test, "--masks", "oracle", *SMALL, tmp_path / "b"
    )
    # the dog that is answered right on the other background has no twin: 1 - 0/3
    assert done.exit_code == 1 and "BG-gap 1.000" in done.stdout, done.output
    assert "(2 and 3 pictures)" in done.stdout
    (hole,) = json.loads((tmp_path / "b" / "manifest.json").read_text())["left out"]
    assert hole["name"] == "00_dog/fg_n0_bg_x.JPEG"
