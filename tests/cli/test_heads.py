"""`seecause heads` from the outside: pages, tables, a checkpoint that loads, and one-line
errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

import seecause as sc
from seecause.cli.progress import counting
from seecause.data import open_data
from tests.background.toys import toy
from tests.cli.calls import SMALL, grey_noise, heads, photos, table, whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy(tmp_path_factory.mktemp("toy"))


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


def test_scores_from_the_command_line_are_those_of_python_above_the_noise_floor(
    tmp_path, folder, monkeypatch
):
    real = sc.background.information_gains
    model = sc.load(folder)
    pictures = sc.background.read_pictures(model, open_data("critters:certified:train", limit=24))
    right = sc.background.answered_right(model, pictures, share=1.0)
    plain = sc.background.score(model, right.images, right.oracle, target=right.labels)
    floor = float(plain.value.abs().flatten().median())
    monkeypatch.setattr(
        "seecause.background.cigma.information_gains",
        lambda *given, **options: replace(real(*given, **options), noise_floor=floor),
    )
    words = ("--limit", 24, "--share", 1, "--guard", "none")
    done = heads("score", "--model", folder, *words, *SMALL, tmp_path / "s")
    assert done.exit_code == 0, done.output
    rows = table(tmp_path / "s" / "scores.csv")
    expected = sc.background.select(
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
        grey_noise((120, 96), 30 + 40 * place).save(tmp_path / "data" / f"{place}.png")
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
        "head selector 'cigmo' not found": ("score", "--by", "cigmo"),
        "option 'screen' of random": ("score", "--by", "random", "--screen", 2),
        "class 'cat' not found": ("score", "--data", wrong),
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
    names = list(json.loads(heads("selectors", "--json").stdout))
    assert names == sorted(names) and len(names) > 5


BROKEN = {
    "audit": ("--masks", "discovered", "--steps", 1),
    "score": ("--by", "weight-norm", "--share", 1),
    "prune": ("--by", "weight-norm", "--share", 1, "--draws", 1, "--steps", 1),
    "ablation-study": ("--share", 1, "--draws", 1, "--steps", 1),
}


@pytest.mark.parametrize("command", BROKEN)
def test_a_picture_that_cannot_be_read_is_in_page_manifest_and_exit_code(tmp_path, folder, command):
    data = photos(tmp_path / "data")
    for place, kind in enumerate(sorted((tmp_path / "data").iterdir())):
        grey_noise((96, 96), 30 + 4 * place).save(kind / "b.png")
    bad = sorted((tmp_path / "data").iterdir())[0] / "a.png"
    bad.write_bytes(b"no picture")
    words = [command, *(["k"] if command == "ablation-study" else []), *BROKEN[command]]
    words += ["--data", data, *(["--test", data] if command in ("prune", "ablation-study") else [])]
    done = heads(*words, "--model", folder, *SMALL, tmp_path / "out")
    assert done.exit_code == 1, done.output
    record = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (hole,) = record["left out"]
    assert hole["name"] == f"{bad.parent.name}/a.png" and "a.png" in hole["reason"]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Not read" in page and hole["name"] in page and "1 could not be read." in page
