"""`seecause audit` and `seecause repair` on a tiny model and pictures in folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification
from typer.testing import CliRunner

import seecause as sc
from seecause.cli import app
from seecause.data import to_pil
from seecause.errors import BadOption
from tests.background.repair_toys import CLASSES, PATCH, SIDE, biased_clip, fitted, scenes


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A model in a folder, and pictures in one folder a class."""
    from seecause.background import export

    root = tmp_path_factory.mktemp("repair")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = ViTConfig(
            image_size=SIDE, patch_size=PATCH, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=64, num_labels=2,
        )  # fmt: skip
        module = ViTForImageClassification(config).eval()
    export(fitted(scenes(64), module=module), [], root / "model")
    cases = scenes(60, usual=0.9, seed=1)
    for place, image in enumerate(cases.images):
        folder = root / "pictures" / CLASSES[int(cases.labels[place])]
        folder.mkdir(parents=True, exist_ok=True)
        to_pil((image / 2 + 0.5).clamp(0, 1)).save(folder / f"{place}.png")
    return root


def run(command, places, out, *more):
    words = [command, "--model", str(places / "model"), "--data", f"folder:{places / 'pictures'}"]
    return CliRunner().invoke(app, [*words, "--device", "cpu", "--out", str(out), *more])


def test_an_audit_writes_a_page_a_table_and_a_verdict(places, tmp_path):
    eye = ("--eye", "own", "--eye-cache", str(tmp_path / "eye"))
    done = run("audit", places, tmp_path / "audit", *eye, "--per-picture", "2")
    assert done.exit_code == 0, done.output
    assert any(path.is_file() for path in (tmp_path / "eye").rglob("*"))
    manifest = json.loads((tmp_path / "audit" / "manifest.json").read_text())
    assert manifest["verdict"] in ("perhaps", "no", "cannot tell", "too few")  # never yes
    page = (tmp_path / "audit" / "index.html").read_text()
    assert "How were they cut?" in page and "Where does it happen?" in page
    lines = (tmp_path / "audit" / "audit.csv").read_text().splitlines()
    assert len(lines) == 61 and lines[0].startswith("picture,answer,label,flips")


@pytest.mark.parametrize("command", ["audit", "repair"])
def test_the_eye_warns_once(places, tmp_path, caplog, command):
    done = run(command, places, tmp_path / "out", "--eye", "own", "--per-picture", "1")
    assert done.exit_code == 0, done.output
    warned = sum("shows the background" in record.message for record in caplog.records)
    assert warned + done.output.count("shows the background") == 1


@pytest.mark.parametrize("limit, told", [(19, True), (20, False)])
def test_pictures_too_few_for_a_verdict_are_told_before_the_model_is_opened(
    places, tmp_path, monkeypatch, limit, told
):
    def stop(*words):
        raise BadOption("model", None, "none: what is told comes first")

    monkeypatch.setattr("seecause.cli.audit.AskedModel.ask", stop)
    note = f'note: {limit} pictures: the verdict can only be "too few"'
    done = run("audit", places, tmp_path / "out", "--limit", str(limit))
    assert (note in " ".join(done.stderr.split())) == told and done.exit_code == 2
    quiet = run("audit", places, tmp_path / "out", "--limit", str(limit), "--quiet")
    assert note not in " ".join(quiet.stderr.split())


def test_a_vision_language_model_is_audited_when_it_is_asked_for_classes(tmp_path):
    words = ["--model", "builtin:critters-llava", "--classify", "name_ll", "--device", "cpu"]
    words += ["--limit", "4", "--per-picture", "1", "--out"]
    done = CliRunner().invoke(app, ["audit", *words, str(tmp_path / "audit")])
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "audit" / "manifest.json").read_text())
    assert manifest["verdict"] == "too few" and manifest["numbers"]["accuracy"] == 1.0
    assert "worst background" not in done.stdout and "95 % interval" not in done.stdout
    words = ["repair", "--model", "builtin:critters-llava", "--out", str(tmp_path / "no")]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2 and not (tmp_path / "no").exists()
    assert "answers in words" in refused.output and "heads prune" in refused.output


def word_tokenizer():
    """Of the words that CLIP is asked with here, as a folder can hold it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {word: place for place, word in enumerate(["a", "photo", "of", ".", *CLASSES])}
    words = Tokenizer(models.WordLevel({**known, "<end>": 63}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", 63)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>", model_max_length=8
    )


def test_a_zero_shot_model_is_audited_and_repaired(places, tmp_path):
    from transformers import CLIPImageProcessor

    tokenizer, usual = word_tokenizer(), ("a photo of a {}.",)
    frame = CLIPImageProcessor(
        size={"shortest_edge": SIDE}, crop_size=SIDE, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    for part in (biased_clip(scenes(64), tokenizer, usual).module, tokenizer, frame):
        part.save_pretrained(tmp_path / "clip")
    (tmp_path / "names.txt").write_text("\n".join(CLASSES))
    shutil.copytree(places / "pictures", tmp_path / "pictures")
    (tmp_path / "pictures" / "masks").mkdir()
    for place, mask in enumerate(scenes(60, usual=0.9, seed=1).truth):
        to_pil(mask.float().expand(3, -1, -1)).save(tmp_path / f"pictures/masks/{place}.png")
    words = ("--model", f"hf:{tmp_path / 'clip'}", "--classes", str(tmp_path / "names.txt"))
    done = run("audit", tmp_path, tmp_path / "audit", *words, "--per-picture", "2")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "audit" / "manifest.json").read_text())["verdict"] == "yes"
    more = ("--remedies", "last-layer", "--per-picture", "4", "--option", "last-layer.strength=1")
    for name, option in (("new", ()), ("texts", ("--option", "last-layer.anchor=true"))):
        done = run("repair", tmp_path, tmp_path / name, *words, *more, *option)
        assert done.exit_code == 0, done.output
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert manifest["after"]["flips"] < manifest["before"]["flips"] - 0.3, done.output
        assert sc.load(str(tmp_path / name / "model")).classes == CLASSES


def test_a_repair_writes_a_checkpoint_that_loads(places, tmp_path):
    out = tmp_path / "repaired"
    more = ("--eye", "own", "--per-picture", "2", "--remedies", "last-layer", "--force")
    tested = ("--limit", "40", "--test", f"folder:{places / 'pictures'}")
    done = run("repair", places, out, *more, *tested)
    assert done.exit_code == 0, done.output
    record = json.loads((out / "manifest.json").read_text())["run"]
    assert (record["learn"] + record["choose"], record["report"]) == (40, 40)
    assert "mended by last-layer" in done.output
    native = ViTForImageClassification.from_pretrained(out / "model")
    assert native.config.num_labels == 2
    assert not out.with_name("repaired.work").exists()
    assert "The same pictures, before and after" in (out / "index.html").read_text()


@pytest.mark.slow
def test_a_repair_that_is_killed_from_outside_goes_on_and_ends_alike(places, tmp_path):
    """kill -9 after the first epoch of fine-tuning, then the same command again."""
    more = ["--eye", "own", "--per-picture", "2", "--remedies", "last-layer,fine-tune", "--force"]
    more += ["--option", "fine-tune.epochs=4", "--option", "fine-tune.patience=9"]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert run("repair", places, whole, *more).exit_code == 0
    words = [sys.executable, "-m", "seecause", "repair", "--model", str(places / "model")]
    words += ["--data", f"folder:{places / 'pictures'}", "--device", "cpu", "--out", str(out)]
    process = subprocess.Popen([*words, *more], start_new_session=True)
    work, until = out.with_name("killed.work"), time.monotonic() + 120
    while not list(work.glob("fine-tune-*/fine-tune.sealed")):
        assert process.poll() is None and time.monotonic() < until, "it ended before it was killed"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert list(work.glob("last-layer-*/done.sealed")) and not out.exists()
    done = run("repair", places, out, *more)
    assert done.exit_code == 0 and not work.exists(), done.output
    first, again = (json.loads((place / "manifest.json").read_text()) for place in (whole, out))
    assert again["after"] == pytest.approx(first["after"], abs=1e-5)
    assert again["remedy"] == first["remedy"]


@pytest.mark.parametrize(
    ("command", "more", "line"),
    [
        ("audit", (), "neither masks nor"),
        ("repair", (), "neither masks nor"),
        ("repair", ("--eye", "own", "--remedies", "last-layr"), "remedy 'last-layr' not found"),
        ("repair", ("--eye", "own", "--remedies", "dfr"), "groups=True"),
        ("repair", ("--eye", "own", "--option", "epochs=3"), "REMEDY.KEY=VALUE"),
        ("repair", ("--eye", "own", "--option", "last-layer.epochs=3"), "one of strength"),
        ("audit", ("--eye", "builtin:critters-nobody"), "critters-nobody"),
        (
            "audit",
            ("--eye", "timm:test_vit"),
            "--eye-weights FILE beside it: ",
        ),  # nothing is fetched here
        ("audit", ("--eye-weights", "x"), "--eye NAME"),
        ("audit", ("--eye", "own", "--eye-weights", "x"), "--eye NAME"),
        ("audit", ("--eye-cache", "x"), "--eye NAME"),
        ("audit", ("--eye", "given", "--eye-method", "mosaic"), "--eye NAME"),
        ("repair", ("--eye-method", "mosaic"), "--eye NAME"),
        ("repair", ("--eye", "own", "--groups"), "group for every picture"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_half_written(places, tmp_path, command, more, line):
    done = run(command, places, tmp_path / "out", *more)
    assert done.exit_code == 2 and line in done.output, done.output
    assert "Traceback" not in done.output and not (tmp_path / "out").exists()


FAST = {
    "audit": ("--eye", "own", "--per-picture", "1"),
    "repair": ("--eye", "own", "--per-picture", "1", "--remedies", "directions"),
    "discover": ("--kinds", "2", "--trials", "2", "--layers", "1", "--method", "caap"),
}


@pytest.fixture(scope="module")
def broken(places, tmp_path_factory):
    """The same model and pictures, one of which is none."""
    root = tmp_path_factory.mktemp("broken")
    shutil.copytree(places / "pictures", root / "pictures")
    shutil.copytree(places / "model", root / "model")
    (root / "pictures" / CLASSES[0] / "a.png").write_bytes(b"no picture")
    return root


@pytest.mark.parametrize("command", FAST)
def test_one_bad_picture_is_named_counted_and_skipped(broken, tmp_path, caplog, command):
    done = run(command, broken, tmp_path / "out", *FAST[command])
    assert done.exit_code == 1, done.output
    assert "a.png" in caplog.text and "Traceback" not in done.output
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Not read" in page and "dark/a.png" in page
    record = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (hole,) = record["left out"]
    assert hole["name"] == "dark/a.png" and "a.png" in hole["reason"]


def test_a_limit_that_is_not_met_leaves_with_3_and_is_filed(places, tmp_path):
    more = ("--per-picture", "1", "--eye", "own", "--min-accuracy")
    done = run("audit", places, tmp_path / "out", *more, "0.999")
    assert done.exit_code == 3 and "Limit not met: accuracy" in done.output
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["limits"] == {"min_accuracy": 0.999} and len(manifest["limits not met"]) == 1
    assert run("audit", places, tmp_path / "met", *more, "0").exit_code == 0


def test_where_no_picture_can_be_read_the_first_is_the_error(places, tmp_path):
    for name in CLASSES:
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "a.png").write_bytes(b"no picture")
    shutil.copytree(places / "model", tmp_path / "model")
    done = run("audit", tmp_path, tmp_path / "out", "--eye", "own")
    assert done.exit_code == 2 and "a.png" in done.output and not (tmp_path / "out").exists()
