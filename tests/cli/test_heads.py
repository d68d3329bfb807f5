"""`seecause heads` from the outside: pages, tables, a checkpoint that loads, and one-line
errors."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import seecause as sc
from seecause import critters
from seecause.cli import app, heads as commands
from seecause.cli.heads_options import TRAIN, open_asked
from seecause.cli.options import Device, Dtype
from seecause.cli.progress import counting
from seecause.data import open_data
from tests.heads.toys import toy
from tests.lvlm.toy import save_toy

SMALL = ("--device", "cpu", "--out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy(tmp_path_factory.mktemp("toy"))


def heads(*words: object):
    return CliRunner().invoke(app, ["heads", *map(str, words)])


def whole(page: str) -> str:
    assert (
        not re.search(r'(src|href)="(?!data:|#)', page)
        and "http:" not in page
        and "https:" not in page
    )
    return page


def table(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_audit_writes_a_verdict_a_gallery_and_a_line_for_each_picture(tmp_path, folder):
    done = heads("audit", "--model", folder, "--limit", 33, "--steps", 2, *SMALL, tmp_path / "a")
    assert done.exit_code == 0, done.output
    page = whole((tmp_path / "a" / "index.html").read_text())
    assert re.findall(r"<h2>([^<]+)</h2>", page) == [
        "What was found",
        "Who pays for it?",
        "Where does it happen?",
        "Protocol",
    ]
    assert (
        page.count('<article class="card">') == 6
        and "exact swap" in page
        and "on another" not in page
    )
    rows = table(tmp_path / "a" / "audit.csv")
    assert (
        len(rows) == 33
        and all(0 <= float(row["BIR, exact swap"]) <= 1 for row in rows)
        and {"IoU", "flips", "group"} <= set(rows[0])
    )
    verdict = json.loads((tmp_path / "a" / "manifest.json").read_text())["verdict"]
    assert done.stdout.splitlines()[0] == verdict[0] and verdict[0] in page


def test_score_fills_the_grid_for_any_selector(tmp_path, folder):
    for by, more in (
        ("cigma", ()),
        ("taylor", ()),
        ("attention-mass", ()),
        ("gating", ("--option", "steps=1", "--option", "fits=1")),
    ):
        done = heads(
            "score",
            "--model",
            folder,
            "--limit",
            24,
            "--share",
            1,
            "--by",
            by,
            *more,
            *SMALL,
            tmp_path / by,
        )
        assert done.exit_code == 0, done.output
        page = whole((tmp_path / by / "index.html").read_text())
        assert page.count('title="layer ') == 12, by
        assert len(table(tmp_path / by / "scores.csv")) == 12
        metadata = json.loads((tmp_path / by / "manifest.json").read_text())
        assert ({"guard", "operator", "background"} <= set(metadata)) == (
            by == "cigma"
        )  # only what ran
    first = table(tmp_path / "cigma" / "scores.csv")[0]
    assert {
        "standard error",
        "fig_drop without it",
        "accuracy without it",
        "nll without it",
    } <= set(first)


def test_score_can_screen_first_and_protect(tmp_path, folder):
    words = (
        "--limit",
        24,
        "--share",
        1,
        "--screen",
        1,
        "--guard",
        "protect",
        "--operator",
        "mean",
        "--fill",
        "swap",
    )
    done = heads("score", "--model", folder, *words, *SMALL, tmp_path / "s")
    assert done.exit_code == 0, done.output
    assert (
        "3 verified + 1 audited of 12 heads" in done.stdout
        and len(table(tmp_path / "s" / "scores.csv")) == 4
    )
    assert "not scored" in (tmp_path / "s" / "index.html").read_text()


def test_the_mask_search_takes_options_and_an_earlier_result_is_named(tmp_path, folder):
    words = (
        "audit",
        "--model",
        folder,
        "--limit",
        2,
        "--steps",
        1,
        "--masks",
        "discovered",
        *SMALL,
        tmp_path / "a",
    )
    assert "replaced" not in heads(*words).stdout
    before = table(tmp_path / "a" / "audit.csv")
    done = heads(
        *words,
        "--mask-option",
        "rho=0.9",
        "--mask-option",
        "grid=4",
        "--mask-option",
        "param=sigmoid",
    )
    assert (
        done.exit_code == 0 and f"replaced the earlier result in {tmp_path / 'a'}" in done.stdout
    ), done.output
    assert all(
        row["IoU"] != old["IoU"]
        for row, old in zip(table(tmp_path / "a" / "audit.csv"), before, strict=True)
    )  # other masks
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["run"]["options"]["mask options"] == "rho=0.9, grid=4, param=sigmoid"

    metadata = (
        "--model",
        folder,
        "--limit",
        24,
        "--share",
        1,
        "--steps",
        1,
        "--masks",
        "discovered",
        "--mask-option",
        "grid=4",
        "--mask-option",
        "early_stop=0.5",
    )
    for command, more in (("score", ()), ("prune", ("--test-limit", 32, "--draws", 1, "--top", 1))):
        done = heads(command, *metadata, *more, *SMALL, tmp_path / command)
        assert done.exit_code == 0, done.output
        assert json.loads((tmp_path / command / "manifest.json").read_text())["mask options"] == {
            "grid": 4,
            "early_stop": 0.5,
        }
        assert (
            "replaced the earlier result"
            in heads(command, *metadata, *more, *SMALL, tmp_path / command).stdout
        )


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
    with sc.heads.ablate(model, removed):
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
        pictures = sc.heads.read_pictures(model, open_data("critters:balanced:test", limit=32))
        (outcome,) = sc.heads.outcomes(model, pictures, [[]])
        numbers.append(outcome.numbers())
    return [(name, numbers[0][name], numbers[1][name]) for name in ("NLL", "flips")]


def test_scores_from_the_command_line_are_those_of_python_above_the_noise_floor(
    tmp_path, folder, monkeypatch
):
    real = sc.heads.information_gains
    model = sc.load(folder)
    pictures = sc.heads.read_pictures(model, open_data("critters:certified:train", limit=24))
    right = sc.heads.answered_right(model, pictures, share=1.0)
    plain = sc.heads.score(model, right.images, right.oracle, target=right.labels)
    floor = float(plain.value.abs().flatten().median())
    monkeypatch.setattr(
        "seecause.heads.cigma.information_gains",
        lambda *given, **options: replace(real(*given, **options), noise_floor=floor),
    )
    words = ("--limit", 24, "--share", 1, "--guard", "none")
    done = heads("score", "--model", folder, *words, *SMALL, tmp_path / "s")
    assert done.exit_code == 0, done.output
    rows = table(tmp_path / "s" / "scores.csv")
    expected = sc.heads.select(
        "cigma", model, right.images, right.labels, masks=right.oracle, guard="none"
    )
    for row in rows:
        value = float(expected.value[int(row["layer"]), int(row["head"])])
        assert float(row["score"]) == pytest.approx(value, abs=1e-7)
        assert float(row["score"]) == 0 or abs(float(row["score"])) >= floor
    assert sum(float(row["score"]) == 0 for row in rows) >= 5
    metadata = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert metadata["run"]["noise_floor"] == floor


def test_flags_reach_the_selector(tmp_path, folder):
    words = ("--limit", 24, "--share", 1, "--screen", 1, "--guard", "protect", "--operator", "mean")
    words += ("--option", "verify=3", "--option", "temperature=2", "--seed", 3, "--fill", "blur")
    done = heads("score", "--model", folder, *words, *SMALL, tmp_path / "s")
    assert done.exit_code == 0, done.output
    metadata = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert (metadata["guard"], metadata["operator"]) == ("protect", "mean")
    assert metadata["background"] == "true masks, blur"
    assert metadata["run"]["temperature"] == 2 and metadata["run"]["seed"] == 3
    assert metadata["run"]["screen"]["verified"] == 3


def test_an_audit_counts_what_is_asked_for(tmp_path, folder):
    words = ("--masks", "oracle", "--limit", 33)
    for count, message in (
        ("right", "that are answered right"),
        ("all", "Means over all pictures"),
    ):
        out = tmp_path / count
        done = heads("audit", "--model", folder, *words, "--count", count, *SMALL, out)
        assert done.exit_code == 0 and message in (out / "index.html").read_text(), done.output


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


@pytest.mark.parametrize("study", ["k", "layers"])
def test_a_study_writes_table_charts_and_csv(tmp_path, folder, study):
    words = ("--limit", 24, "--share", 1, "--test-limit", 32, "--draws", 2)
    done = heads("ablation-study", study, "--model", folder, *words, *SMALL, tmp_path / "s")
    assert done.exit_code == 0, done.output
    page = whole((tmp_path / "s" / "index.html").read_text())
    assert (
        "<svg" in page and len(table(tmp_path / "s" / "table.csv")) == {"k": 3, "layers": 5}[study]
    )


def test_photos_without_masks_groups_or_labels_can_be_audited(tmp_path, folder):
    (tmp_path / "data").mkdir()
    for place in range(3):
        Image.effect_noise((120, 96), 30 + 40 * place).convert("RGB").save(
            tmp_path / "data" / f"{place}.png"
        )
    done = heads(
        "audit",
        "--model",
        folder,
        "--data",
        f"folder:{tmp_path / 'data'}",
        "--steps",
        1,
        *SMALL,
        tmp_path / "a",
    )
    assert done.exit_code == 0, done.output
    assert set(table(tmp_path / "a" / "audit.csv")[0]) & {"label", "group", "IoU", "flips"} == set()
    assert "Erased pictures look odd" in done.stdout


def photos(root, *, names=critters.CLASSES, colour="grey") -> str:
    """One plain picture of each class."""
    for name in names:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (96, 96), colour).save(root / name / "a.png")
    return f"folder:{root}"


def test_mistakes_are_one_line_and_exit_code_2(tmp_path, folder):
    data = photos(tmp_path / "data")
    wrong = photos(tmp_path / "wrong", names=["cat", "dog"])
    cases = {
        "masks='oracle'": ("score", "--data", data, "--masks", "oracle", "--share", 1),
        "has no other versions of its pictures": (
            "score",
            "--data",
            data,
            "--fill",
            "swap",
            "--share",
            1,
        ),
        "top=99": ("prune", "--top", 99, "--by", "weight-norm"),
        "--top='many'": ("prune", "--top", "many"),
        "no head selector is called 'cigmo'": ("score", "--by", "cigmo"),
        "option 'screen' of random": ("score", "--by", "random", "--screen", 2),
        "no class is called 'cat'": ("score", "--data", wrong),
        "no photo of class": ("score", "--data", data, "--stratified"),
        "from 1 to 12": ("ablation-study", "k", "--top", 13),
        "option 'nonsense' of taylor": ("score", "--by", "taylor", "--option", "nonsense=1"),
        "expected --steps, which is a flag": ("score", "--option", "mask_steps=100"),
        "expected --seed, which is a flag": ("score", "--by", "random", "--option", "seed=1"),
        "option 'response' of cigma": ("score", "--option", "response=fig"),
        "option 'temperature' of cigma": ("score", "--option", "temperature=warm"),
        "option 'steps' of gating": ("score", "--by", "gating", "--option", "steps=many"),
        "option 'remove' of taylor": ("score", "--by", "taylor", "--option", "remove=all"),
        "option 'suppress' of gating": ("score", "--by", "gating", "--option", "suppress=1"),
        "option 'guard' of taylor": ("prune", "--by", "taylor", "--guard", "none"),
        "option 'operator' of taylor": ("score", "--by", "taylor", "--operator", "mean"),
        "by taylor fills no background": ("score", "--by", "taylor", "--fill", "mean"),
        "--top='1.5'": ("prune", "--top", "1.5"),
        "screen=1": ("prune", "--top", 2, "--screen", 1),
        "option 'blur' of the mask search": ("audit", "--mask-option", "blur=1"),
        "option 'rho' of the mask search": ("score", "--mask-option", "rho=much"),
        "expected --steps, which is a flag of": ("prune", "--mask-option", "steps=5"),
        "such as rho=0.2": ("audit", "--mask-option", "rho"),
        "give --masks discovered or both": (
            "audit",
            "--masks",
            "oracle",
            "--mask-option",
            "rho=0.2",
        ),
        "has masks of its own": ("score", "--mask-option", "rho=0.2"),
        "not selector='taylor'": ("score", "--by", "taylor", "--mask-option", "rho=0.2"),
    }
    for message, words in cases.items():
        done = heads(
            *words,
            "--model",
            folder,
            *(() if words[0] == "ablation-study" else ("--limit", 24)),
            *SMALL,
            tmp_path / "out",
        )
        assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, (
            message,
            done.output,
            done.exception,
        )
    assert not (tmp_path / "out").exists()


def test_top_and_form_are_checked_before_any_mask_is_searched(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(
        "seecause.heads.pictures.read_pictures", lambda *_, **__: pytest.fail("pictures were read")
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
            Image.effect_noise((96, 96), 20 + 40 * photo).convert("RGB").save(
                root / variant / "val" / part / f"{stem}.JPEG"
            )
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


def test_a_vision_language_model_is_audited_scored_and_pruned(tmp_path):
    model, some = save_toy(tmp_path / "llava"), ("--limit", 24, "--masks", "oracle")
    for scope, shape in (("vision", (2, 2)), ("llm", (3, 4))):
        words = ("--model", model, "--classify", "name_ll", "--scope", scope)
        done = heads("score", *words, *some, "--share", 1, *SMALL, tmp_path / scope)
        assert done.exit_code == 0, done.output
        rows = table(tmp_path / scope / "scores.csv")
        assert len(rows) == shape[0] * shape[1]
        assert all(
            float(row["score"]) == 0 for row in rows if scope == "vision" and row["layer"] == "1"
        )  # LLaVA drops its last block
    done = heads("audit", *words, "--masks", "oracle", "--limit", 4, *SMALL, tmp_path / "a")
    assert done.exit_code == 0 and len(table(tmp_path / "a" / "audit.csv")) == 4, done.output
    done = heads(
        "prune",
        *words,
        *some,
        "--by",
        "weight-norm",
        "--top",
        2,
        "--share",
        1,
        "--test-limit",
        32,
        "--draws",
        1,
        *SMALL,
        tmp_path / "p",
    )
    assert done.exit_code == 0, done.output
    removed = json.loads((tmp_path / "p" / "manifest.json").read_text())["removed"]
    pruned = sc.lvlm.load(str(tmp_path / "p" / "model"))
    for layer, head in removed:
        width = pruned.blocks[layer].head_dim
        assert (
            not pruned.blocks[layer]
            .native.self_attn.o_proj.weight[:, head * width : (head + 1) * width]
            .any()
        )
    cases = {
        "--form='sliced'": ("prune", *words, "--form", "sliced"),
        "--classify name_ll or label_token beside it": ("score", "--scope", "llm"),
        "a vision-language model brings its own": ("score", *words, "--weights", "random"),
        "--classify name_ll (or label_token) beside a vision-language model": (
            "score",
            "--model",
            model,
        ),
    }
    for message, given in cases.items():
        done = heads(*given, *SMALL, tmp_path / "out")
        assert done.exit_code == 2 and message in done.stderr, done.output


def test_an_asked_model_is_opened_as_it_is_stored_and_a_classifier_in_float32(monkeypatch):
    monkeypatch.setattr("seecause.cli.lvlm_open.open_lvlm", lambda name, device, dtype: dtype)
    monkeypatch.setattr("seecause.lvlm.classifier", lambda opened, *_, **__: opened)
    monkeypatch.setattr("seecause.cli.heads_options.open_model", lambda name, *, dtype, **_: dtype)
    opened = partial(
        open_asked,
        data=TRAIN,
        weights=None,
        device=Device.cpu,
        seed=0,
        classify=None,
        scope=None,
        question=None,
    )
    assert (
        opened("builtin:critters-llava", dtype=None) is None
        and opened("builtin:critters-llava", dtype=Dtype.bfloat16) is Dtype.bfloat16
    )
    assert (
        opened("builtin:critters-vit", dtype=None) is Dtype.float32
        and opened("builtin:critters-vit", dtype=Dtype.float64) is Dtype.float64
    )
    for command in (commands.audit, commands.score, commands.prune, commands.ablation_study):
        assert signature(command).parameters["dtype"].default is None


def test_critters_llava_looks_at_the_creature(tmp_path):
    done = heads(
        "audit",
        "--model",
        "builtin:critters-llava",
        "--data",
        "critters:clean:test",
        "--masks",
        "oracle",
        "--limit",
        3,
        *SMALL,
        tmp_path / "a",
    )
    assert done.exit_code == 0, done.output
    rows = table(tmp_path / "a" / "audit.csv")
    assert all(row["answer"] == row["label"] and row["flips"] == "0" for row in rows)


def test_long_runs_say_how_far_they_are_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("seecause.cli.progress.EVERY", 0.0)
    with counting("searching masks", 8) as advance:
        advance(2)
        advance(3)
    with counting("searching masks", 8, quiet=True) as advance:
        advance(8)
    assert capsys.readouterr().err == "searching masks: 2 of 8\nsearching masks: 5 of 8\n"


def test_selectors_are_listed():
    done = heads("selectors")
    assert done.exit_code == 0 and "attention-mass" in done.stdout and "cigma" in done.stdout
