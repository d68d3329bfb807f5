"""`seecause bench` as a command: complete, or with its holes listed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from seecause.bench.runner import read_plan
from seecause.cli import app
from tests.bad_files import bad_file

SMALL = (
    "--metric-option",
    "order=patch",
    "--metric-option",
    "steps=2",
    "--cell-size",
    "2",
    "--device",
    "cpu",
    "--quiet",
)
RUN = (
    "run",
    "--method",
    "caap,random,sobel",
    "--metric",
    "ins-del,insertion,aupr1",
    "--limit",
    "12",
    *SMALL,
    "--out",
)


def bench(*words: object):
    return CliRunner().invoke(app, ["bench", *map(str, words)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 18 cells."""
    out = tmp_path_factory.mktemp("bench") / "run"
    done = bench(*RUN, out)
    assert done.exit_code == 0 and done.output == "", done.output
    return out


def test_what_decides_a_run_stands_in_its_plan(tmp_path):
    words = ("--memory", 3, "--threads", 1, "--seed", 5, "--target", "predicted", "--limit", 2)
    sobel = ("run", "--method", "sobel", "--metric", "aupr1", *words)
    done = bench(*sobel, *SMALL[4:], "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    request = read_plan(tmp_path / "run").request
    assert request.memory == 3 << 20  # MiB
    assert (request.threads, request.seed, request.limit, request.target) == (1, 5, 2, "predicted")


def test_the_report_is_one_file_with_everything_in_it(whole):
    done = bench("report", whole, "--against", "random")
    assert done.exit_code == 0, done.output
    *table, also, page_line = done.stdout.splitlines()
    assert also == "also: table.csv, table.tex, table.md, rows.csv"
    assert page_line == f"page: {whole / 'index.html'}"
    printed = "\n".join(table)
    assert all(word in printed for word in ("method", "ins-del ↑", "random", "±", "★"))
    page = (whole / "index.html").read_text()
    for title in (
        "Which method is best?",
        "Does the prediction follow the map?",
        "What does faithfulness cost?",
        "Which images show most?",
        "What is missing",
    ):
        assert f"<h2>{title}</h2>" in page
    assert "Not drawn: insertion" in page and page.count('<article class="card') == 9
    assert "Nothing is missing: 12 images x 3 methods x 3 metrics." in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert (whole / "table.tex").read_text().count(r"\mathbf") == 2


def test_a_bad_picture_ends_the_run_with_one_and_shows_in_the_report(tmp_path):
    folder, out = tmp_path / "data", tmp_path / "run"
    folder.mkdir()
    for name in ("a.png", "z.png"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)).save(
            folder / name
        )
    bad = bad_file(folder, "truncated")
    words = (
        "run",
        "--method",
        "sobel",
        "--data",
        f"folder:{folder}",
        "--target",
        "predicted",
        *SMALL,
        "--out",
        out,
    )
    done = bench(*words)
    assert done.exit_code == 1 and "truncated.jpg: 3 values missing" in done.stderr
    assert bench("report", out).exit_code == 0
    page = (out / "index.html").read_text()
    assert "1 of 3 missing" in page and str(bad) in page and "Not complete" in page
    bad.unlink()
    assert bench(*words).exit_code == 0


REFUSED = {
    "unknown method": (("--method", "capp"), "Did you mean caap"),
    "option of no method": (("--method", "caap,random", "--option", "random.tail=patched"), "tail"),
    "option without value": (("--option", "tail"), "KEY=VALUE"),
    "unknown metric": (("--metric", "apur1"), "Did you mean aupr1"),
    "unknown metric option": (("--metric-option", "stops=3"), "steps"),
    "kind of an option": (("--method", "rise", "--option", "masks=many"), "a whole number"),
    "choice of a metric option": (("--metric-option", "order=random"), "pixel, patch"),
    "unknown data": (("--data", "criters:clean"), "critters:REGIME"),
    "no labels": (("--data", "folder:{tmp}/data"), "predicted"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_wrong_option_is_one_line(tmp_path, why):
    (tmp_path / "data").mkdir()
    Image.new("RGB", (96, 96)).save(tmp_path / "data" / "a.png")
    words, said = REFUSED[why]
    done = bench("run", *(word.format(tmp=tmp_path) for word in words), "--out", tmp_path / "out")
    assert (
        done.exit_code == 2
        and done.stderr.startswith("seecause: ")
        and done.stderr.count("\n") == 1
    )
    assert said in done.stderr and not (tmp_path / "out").exists()


def test_an_out_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert bench("run", "--out", tmp_path).exit_code == 2
    assert (
        bench("report", tmp_path).exit_code == bench("report", tmp_path / "nowhere").exit_code == 2
    )
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_how_a_model_is_read_decides_a_run(tmp_path):
    """A checkpoint of one's own, its class names in a file, another mean: in the plan and in every
    process."""
    import timm
    import torch

    torch.save(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "mine.pth")
    (tmp_path / "names.txt").write_text("bee\nant\n")
    for name in ("ant", "bee"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (160, 160), "green").save(tmp_path / "photos" / name / "1.png")
    own = ("--model", "timm:test_vit", "--weights", tmp_path / "mine.pth", "--mean", "0.25")
    own += ("--std", "0.2,0.2,0.3", "--classes", tmp_path / "names.txt", "--method", "random")
    data = ("--data", f"folder:{tmp_path / 'photos'}", "--metric", "ins-del", "--workers", 2)
    done = bench("run", *own, *data, *SMALL, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    plan = read_plan(tmp_path / "run")
    assert plan.model["classes"] == ["bee", "ant"] and list(plan.places) == [1, 0]
    assert plan.model["frame"]["mean"] == [0.25] * 3


def test_serve_reads_one_model_as_told_and_no_others():
    done = CliRunner().invoke(app, ["serve", "--size", "96"])
    assert done.exit_code == 2 and "one --model beside it" in done.output
