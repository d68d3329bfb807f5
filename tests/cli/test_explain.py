"""`seecause explain` from the outside: what it writes, what it says, and what it refuses."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

import seecause as sc
from seecause.attribution.result import Attribution
from seecause.data.dataset import open_data, open_image, read_image
from seecause.metrics.pixels import to_pixels
from tests.bad_files import bad_file
from tests.cli.calls import MODEL, explain, photo


def test_everything_is_written_and_said(tmp_path):
    first, second = photo(tmp_path / "a.jpg"), photo(tmp_path / "b.png")
    out = tmp_path / "out"
    words = ("--method", "caap,sobel", "--option", "tail=patched", "--overlays", "--out", out)
    done = explain(first, second, *MODEL, "--class", "tabby, tabby cat", *words)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"page: {out / 'index.html'}"
    assert "a.jpg: " in done.stdout and "explained: tabby, tabby cat" in done.stdout

    manifest = json.loads((out / "manifest.json").read_text())
    assert sorted(manifest["files"]) == sorted(
        str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()
    )
    assert [row["file"] for row in manifest["images"]] == [str(first), str(second)]
    assert all(read_image(out / row["overlay"]).width > 1000 for row in manifest["images"])
    maps = Attribution.load(out / manifest["maps"]["caap"])
    assert maps.maps.shape == (2, 10, 10)
    assert maps.manifest["options"]["tail"] == "patched" and maps.manifest["random_weights"] is True
    assert "random weights" in (out / "index.html").read_text()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_evidence_and_pairs_are_on_the_page_and_in_a_file(tmp_path):
    out, words = tmp_path / "out", ("--model", "builtin:critters-vit", "--evidence")
    done = explain("critters:clean:test#3", *words, "--interactions", "--out", out)
    assert done.exit_code == 0, done.output
    page = (out / "index.html").read_text()
    for words_of_page in ("Enough: ", "Needed: without these", "red regions need each other"):
        assert words_of_page in page
    (finding,) = json.loads((out / "findings.json").read_text())
    model = sc.load("builtin:critters-vit")
    images = sc.data.to_batch(model, [open_data("critters:clean:test")[3]]).images
    both = sc.evidence(model, images)
    assert finding["evidence"]["enough"]["patches"] == both.enough.patches[0].nonzero().tolist()
    assert finding["evidence"]["needed"]["answer"] == both.needed.labels[0]
    assert len(finding["pairs"]) == 50


@pytest.mark.parametrize("words", [(), ("--seed", "3")])
def test_the_seed_reaches_the_methods(tmp_path, words):
    out = tmp_path / "out"
    sample = "critters:clean:test#3"
    done = explain(
        sample, "--method", "random,sobel", *words, "--out", out, "--device", "cpu", "-q"
    )
    assert done.exit_code == 0 and done.output == ""
    model = sc.load("builtin:critters-vit")
    image = model.preprocess(open_image(sample))
    expected = sc.attribute(model, image, method="random", seed=3 if words else 0).maps
    torch.testing.assert_close(Attribution.load(out / "maps" / "random").maps, expected)


def test_a_tree_of_classes_is_walked_and_compared_with_the_answers(tmp_path):
    """Class folders are truths where the model knows them, and masks tell how much of a map lies on
    the background."""
    data, root = open_data("critters:clean:test"), tmp_path / "pics"
    for place in range(4):
        folder = root / data.classes[data[place].label]
        (root / "masks" / folder.name).mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        sc.data.to_pil(data[place].image).save(folder / f"{place}.png")
        mask = Image.fromarray(data[place].mask.numpy().astype(np.uint8) * 255)
        mask.save(root / "masks" / folder.name / f"{place}.png")
    done = explain(root, "--method", "caap", "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["images"]
    assert len(rows) == 4 and all(row["right"] is (row["truth"] == row["answers"][0]["name"])
                                  for row in rows)  # fmt: skip
    model = sc.load("builtin:critters-vit")
    batch = sc.data.to_batch(model, [data[int(Path(rows[0]["file"]).stem)]])
    att = sc.attribute(model, model.preprocess(read_image(rows[0]["file"])))
    pixels = to_pixels(att.maps, tuple(batch.masks.shape[1:])) - att.maps.median()
    pixels = pixels.clamp(min=0)
    share = float((pixels * (batch.masks == 0)).sum() / pixels.sum())
    assert rows[0]["background"] == pytest.approx(share, abs=1e-5)
    assert rows[0]["background_area"] == pytest.approx(
        1 - float(batch.masks.double().mean()), abs=0.02
    )
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("data-background=") == 4
    assert "highest half lies on the background" in page


def test_json_is_all_that_is_printed(tmp_path):
    picture, bad = photo(tmp_path / "a.png"), bad_file(tmp_path, "text")
    words = (*MODEL, "--method", "center", "--out", tmp_path / "out", "--json")
    done = explain(picture, bad, *words)
    facts = json.loads(done.stdout)
    assert done.exit_code == 1 and "skipped: " in done.stderr
    assert facts["page"] == "index.html" and facts["out"] == str(tmp_path / "out")
    assert facts["images"][0]["answers"][0]["probability"] > 0 and "error" in facts["images"][1]
    refused_too = explain(tmp_path / "nowhere.png", *words)
    assert refused_too.exit_code == 2 and refused_too.stdout == ""


def test_output_names_are_made_so_nothing_is_written_elsewhere_or_twice(tmp_path, monkeypatch):
    """Names that collide, a path with `..`, and names that differ by case only."""
    work = tmp_path / "deep" / "work"
    for folder in (tmp_path, work / "q", work / "r"):
        folder.mkdir(parents=True, exist_ok=True)
        photo(folder / "t.png")
    photo(work / "r" / "T.png")
    monkeypatch.chdir(work)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    names = ("q/t.png", "../../t.png", "r/t.png", "r/T.png")
    done = explain(*names, *MODEL, "--method", "center", "--overlays", "--out", "o")
    assert done.exit_code == 0, done.output
    rows = json.loads((work / "o" / "manifest.json").read_text())["images"]
    written = [(work / "o" / row["overlay"]).resolve() for row in rows]
    assert all(path.is_file() and path.parent == work / "o" / "overlays" for path in written)
    assert len({path.name.casefold() for path in written}) == 4
    after = {
        path for path in tmp_path.rglob("*") if path.is_file() and work / "o" not in path.parents
    }
    assert after == set(before) and all(path.read_bytes() == before[path] for path in after)


def test_an_earlier_result_is_replaced_and_that_is_said(tmp_path):
    picture, out = photo(tmp_path / "a.png"), tmp_path / "out"
    for times in range(2):
        done = explain(picture, *MODEL, "--method", "center" if times else "caap", "--out", out)
        assert (
            f"the earlier result in {out} is replaced at the end" in done.stdout.splitlines()
        ) == bool(times)
    assert [p.name for p in (out / "maps").iterdir()] == ["center"]
    assert explain(picture, *MODEL, "--method", "center", "--out", out, "--quiet").output == ""


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a result but its manifest, which names the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.name != "manifest.json"}


def test_workers_change_nothing_and_a_broken_image_in_the_middle_stops_none(tmp_path):
    """Files, samples and masks; read and drawn by two processes, or all in this one."""
    good = [photo(tmp_path / f"{place:02d}.png") for place in range(18)]
    good[13].write_bytes(good[13].read_bytes()[:70])
    samples = [f"critters:clean:test#{place}" for place in range(5)]
    rows, written = [], []
    for workers in (0, 2):
        out = tmp_path / "out"
        words = ("--method", "caap", "--overlays", "--workers", workers, "--out", out, "--json")
        done = explain(*good, *samples, "--model", "builtin:critters-vit", *words)
        assert done.exit_code == 1 and done.stderr.count("skipped: ") == 1, done.output
        rows.append(json.loads(done.stdout)["images"])
        written.append(contents(out))
    assert rows[0] == rows[1] and written[0] == written[1]
    assert [row["file"] for row in rows[0]] == [*map(str, good), *samples]
    assert ["error" in row for row in rows[0]].index(True) == 13
    assert all("background" in row for row in rows[0][-5:])
    assert sum(name.startswith("overlays/") for name in written[0]) == 22
    assert not multiprocessing.active_children()


def is_running(process: str) -> bool:
    """Whether a process has not ended; nobody may have asked yet how it ended."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_interrupting_ends_all_workers(tmp_path):
    photo(tmp_path / "a.bmp")
    for place in range(200):
        shutil.copy(tmp_path / "a.bmp", tmp_path / f"{place:03d}.bmp")
    words = ["--model", "builtin:critters-vit", "--workers", "2", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "seecause", "explain", str(tmp_path), *words, "--method", "mosaic"],
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's & ignores it
    )  # fmt: skip
    workers: set[str] = set()
    while process.poll() is None and len(workers) < 2:
        time.sleep(0.05)
        with suppress(psutil.NoSuchProcess):
            workers = {str(c.pid) for c in psutil.Process(process.pid).children(recursive=True)}
    os.killpg(process.pid, signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in told, told
    assert len(workers) >= 2
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
    assert not (tmp_path / "out").exists()


def test_many_images_have_files_beside_the_page_or_one_file(tmp_path):
    names = [f"critters:clean:test#{place}" for place in range(9)]
    sizes = {}
    for kind in ((), ("--one-file",)):
        out = tmp_path / "-".join(["out", *kind])
        assert explain(*names, "--method", "sobel", *kind, "--out", out).exit_code == 0
        sizes[kind] = (out / "index.html").stat().st_size
        written = {path.parent.name for path in out.rglob("*") if path.is_file()}
        assert written == {out.name, "sobel"} | (set() if kind else {"data", "images"})
    page = (tmp_path / "out---one-file" / "index.html").read_text()
    assert page.count("\\u003carticle") == 9 and sizes[()] < sizes["--one-file",] / 2
    apart, whole = (Attribution.load(tmp_path / out / "maps" / "sobel") for out in ("out", out))
    assert torch.equal(apart.maps, whole.maps)
    assert (apart.images - whole.images).abs().mean() < 0.02  # JPEG


def test_a_bad_image_among_good_ones_is_skipped_and_named(tmp_path):
    bad, out = bad_file(tmp_path, "text"), tmp_path / "out"
    good = [photo(tmp_path / "first.png"), photo(tmp_path / "last.png")]
    done = explain(good[0], bad, good[1], *MODEL, "--method", "center", "--out", out)
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith(f"skipped: {bad}: ") and done.stderr.count("\n") == 1
    assert "first.png: " in done.stdout and "last.png: " in done.stdout
    rows = json.loads((out / "manifest.json").read_text())["images"]
    assert [sorted(row) for row in rows][1] == ["error", "file", "name"]
    page = (out / "index.html").read_text()
    assert "Skipped images" in page and "1 could not be read" in page and bad.name in page
    assert Attribution.load(out / "maps" / "center").names == ["first.png", "last.png"]


def test_a_model_of_critters_warns_about_other_images(tmp_path):
    done = explain(photo(tmp_path / "a.png"), "--method", "center", "--out", tmp_path / "out")
    assert done.exit_code == 0 and "knows only Critters images" in done.stderr
    words = (*MODEL, "--method", "center", "--out", tmp_path / "out")
    assert explain(photo(tmp_path / "a.png"), *words).stderr == ""
