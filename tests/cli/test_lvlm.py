"""`seecause lvlm` from the outside, and the demo's trace job, on a small model in a folder."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import seecause as sc
from seecause.cli import app
from seecause.cli.lvlm import _lines
from seecause.cli.lvlm_options import AskedPicture, CalibratedModel
from seecause.critters.demo import JOBS, DemoSetting, trace
from seecause.data.images import read_image
from seecause.errors import BadOption
from seecause.report.pages import render_page
from tests.lvlm.toy import QUESTION, pictures, save_toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for index, shown in enumerate(pictures(4)):
        shown.save(folder / f"{index}.png")
    return folder


def lvlm(*words: object):
    return CliRunner().invoke(app, ["lvlm", *map(str, words), "--device", "cpu"])


def test_every_word_is_traced_and_edited_heads_speak(toy, photos, tmp_path):
    out = tmp_path / "out"
    asked = (photos / "0.png", "--question", QUESTION, "--model", toy, "--calibration", photos)
    done = lvlm("answer", *asked, "--answer", "the tail is jade .", "--masks", 8, "--out", out)
    assert done.exit_code == 0, done.output
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["answer"] == "the tail is jade ." and len(manifest["words"]) == 5
    assert load_file(out / "words.safetensors")["image"].shape == (5, 16)
    page = (out / "index.html").read_text()
    assert page.count('class="behind"') == page.count('class="head-grid"') == 5
    assert "What is behind &#39;the tail is jade .&#39;" in page
    assert f"{photos / '0.png'}: {QUESTION}" in page
    assert [row["heads"].count("(") for row in manifest["words"]] == [3] * 5
    tensors = load_file(out / "words.safetensors")
    for name, logs in (("probability", "log_seen"), ("without", "log_unseen")):
        chances = [row[name] for row in manifest["words"]]
        assert chances == pytest.approx(tensors[logs].exp().tolist())
    assert manifest["command"] == "lvlm answer" and manifest["image"] == str(photos / "0.png")
    card = json.loads((out / "words.json").read_text())
    assert [row["word"] for row in manifest["words"]] == ["the", "tail", "is", "jade", "."]
    assert [row["source"] for row in manifest["words"]] == card["sources"]
    for place, row in enumerate(manifest["words"]):
        order = tensors["heads"][place].flatten().argsort(descending=True, stable=True)[:3]
        assert row["heads"] == ", ".join(str(divmod(int(head), 4)) for head in order)
    assert done.stdout.splitlines()[:-1] == [
        "answer: the tail is jade .",
        *(
            f"  {row['word']:<14} {row['source']:<9} {row['probability']:.3f} with the picture,"
            f" {row['without']:.3f} without; heads {row['heads']}"
            for row in manifest["words"]
        ),
    ]
    assert "note: 4 calibration pictures" in done.stderr
    ends = re.findall(r'class="scale">\s*<span>([^<]+)</span>.*?<span>([^<]+)</span>', page)
    assert len(ends) == 5 and all(float(low) == -float(high) for low, high in ends)
    assert "jade" in done.stdout and done.stdout.splitlines()[-1].startswith("page: ")
    change = ("--heads", "(0, 1), (2,3)", "--boost", 0, "--length", 3, "-o", tmp_path / "edit")
    edited = lvlm("edit", *asked, *change, "--json")
    assert edited.exit_code == 0, edited.output
    facts = json.loads(edited.stdout)
    assert facts["heads"] == [[0, 1], [2, 3]]
    manifest = json.loads((tmp_path / "edit" / "manifest.json").read_text())
    assert {name: manifest[name] for name in facts} == facts
    assert manifest["options"] == {"blind": False, "redirect": None, "boost": 0, "length": 3}
    assert (manifest["command"], manifest["question"]) == ("lvlm edit", QUESTION)
    model = sc.lvlm.load(toy)
    decode, prompt = model.processor.tokenizer.decode, model.prompt(pictures(1)[0], QUESTION)
    assert facts["before"] == decode(model.speak(prompt, 3)).strip()
    with sc.lvlm.edited_heads(model, [(0, 1), (2, 3)], boost=0):
        assert facts["after"] == decode(model.speak(prompt, 3)).strip()
    assert manifest["model_fingerprint"] == model.fingerprint() and manifest["model"] == toy
    for wrong, text in (("0.x", "--heads"), ("(0, 1", "--heads"), ("0.1", "one of --blind")):
        more = () if wrong == "0.1" else ("--boost", 1)
        refused = lvlm("edit", *asked, "--heads", wrong, *more)
        assert refused.exit_code == 2 and text in refused.output


def test_heads_words_and_tokens_are_written(toy, photos, tmp_path):
    bank = tmp_path / "bank"
    made = lvlm(
        "bank", photos / "1.png", photos / "2.png", photos / "3.png", "--model", toy, "--out", bank
    )
    assert made.exit_code == 0 and "3 pictures" in made.stdout, made.output
    manifest = json.loads((bank / "manifest.json").read_text())
    own = {"command": "lvlm bank", "model": toy, "pictures": 3, "mode": "shape"}
    assert {name: manifest[name] for name in own} == own
    out = tmp_path / "out"
    asked = (
        photos / "0.png",
        "--question",
        QUESTION,
        "--model",
        toy,
        "--bank",
        bank,
        "--masks",
        100,
        "--floor",
        0,
        "--out",
        out,
    )
    done = lvlm("tokens", *asked)
    assert done.exit_code == 0, done.output
    assert (
        done.stdout.splitlines()[-1] == f"page: {out / 'index.html'}"
        and "heads are enough" in done.stdout
    )
    assert "note: 3 calibration pictures" in done.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    own = {"command": "lvlm tokens", "page": "index.html", "image": str(photos / "0.png")}
    assert {name: manifest[name] for name in own} == own
    assert f"answer: {manifest['answer']};" in done.stdout
    assert sorted(manifest["files"]) == sorted(
        str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()
    )
    page = (out / "index.html").read_text()
    assert (
        page.count('class="head-grid"') == 2
        and 'class="prompt"' in page
        and page.count("<polyline") == 10  # four rankings twice, the fit, and depth
        and page.count('class="dot"') == 100
        and "at other thresholds" in page
        and "are they needed?" in page
    )
    assert read_image(out / "overlay.png").width > 1000
    assert load_file(out / "tokens.safetensors")["coefficients"].shape == (16,)
    quiet = lvlm("heads", *asked, "--ablated", 0.6, "--seed", 3, "--quiet")
    assert quiet.output == "" and not (out / "overlay.png").exists()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["command"] == "lvlm heads"
    assert manifest["run"]["options"]["heads"].startswith("100 masks, p 0.6, bernoulli, seed 3")
    kept = sc.lvlm.HeadAttribution.load(out / "heads")
    engine = sc.lvlm.MaskEngine(
        sc.lvlm.load(toy),
        read_image(photos / "0.png"),
        QUESTION,
        sc.lvlm.MeanBank.load(bank),
        floor=0,
    )
    assert kept.top(3) == sc.lvlm.attribute_heads(engine, masks=100, p=0.6, seed=3).top(3)


def test_a_trace_is_told_in_a_few_lines():
    coefficients = torch.arange(12.0).reshape(3, 4)
    fit = sc.lvlm.HeadAttribution(coefficients, 0.0, 0.876, 0.9, 8, 0.9, coefficients / 100)
    chosen = torch.arange(12) > 2
    heads = SimpleNamespace(heads=fit, chosen=chosen, left=lambda: 0.3)
    engine = SimpleNamespace(answer="jade", span=1.236)
    trace = SimpleNamespace(engine=engine, heads=heads, tokens=None)
    named = "(2, 3), (2, 2), (2, 1), (2, 0), (1, 3), (1, 2), (1, 1), (1, 0)"
    lines = [
        "answer: jade; the picture moves its logit by 1.24",
        f"9 of 12 heads are enough: {named} ... (layer, head; R2 0.88, standard error 0.0500)",
        "needed? in part: without them 30% of the effect is left",
    ]
    assert _lines(trace) == lines
    trace.tokens = SimpleNamespace(
        effects=SimpleNamespace(pieces=("\n", " tail", "?")),
        text=torch.tensor([True, False, True]),
        sufficiency=0.874,
    )
    received = "words that receive the picture: 'newline' '?' (alone 87% of the effect of those"
    assert _lines(trace) == [*lines, f"{received} heads)"]
    heads.chosen = torch.arange(12) > 9
    assert _lines(trace)[1].startswith("2 of 12 heads are enough: (2, 3), (2, 2) (layer, head;")


SHOWN = "critters:clean:test#1 --question Q --model"


def test_models_of_the_zoo_are_calibrated_with_critters(tmp_path):
    for model in (str(tmp_path), f"hf:{tmp_path}"):
        with pytest.raises(BadOption, match="--calibration"):
            CalibratedModel(model=model).check()
    (tmp_path / "card.json").write_text("{}")  # `seecause zoo train` writes one
    for model in (str(tmp_path), f"hf:{tmp_path}", "builtin:critters-llava"):
        CalibratedModel(model=model).check()


def test_an_embedded_model_is_not_asked_about_photos_without_a_word(toy, tmp_path, capsys):
    def warn(image, *, model="builtin:critters-llava", quiet=False):
        AskedPicture(image=image, question="Q", model=model).warn(quiet=quiet)

    warn("cat.jpg")
    assert (
        "knows only Critters pictures" in (message := capsys.readouterr().err)
        and "cat.jpg means nothing" in message
    )
    warn("critters:clean:test#3")
    warn("cat.jpg", model=str(toy))
    warn("cat.jpg", quiet=True)
    assert capsys.readouterr().err == ""


def test_the_demo_traces_one_answer(toy):
    shown = trace(DemoSetting(), model=toy, masks=100, pictures=3, floor=None)
    page = render_page("Demo", shown.sections)
    assert "From where in the picture" in page and "For the demo" in page
    assert shown.manifests[0]["method"].startswith("head attribution")
    assert JOBS["Trace"] is trace


def test_without_the_embedded_model_the_job_shows_nothing():
    shown = trace(DemoSetting(), model="builtin:not-embedded")
    assert not shown.sections and not shown.manifests


def test_an_unknown_mode_of_a_bank_names_those_there_are(toy, photos, tmp_path):
    done = lvlm("bank", photos, "--model", toy, "--mode", "median", "--out", tmp_path / "out")
    assert done.exit_code == 2 and "median" in done.stderr and "mean, grid." in done.stderr
    assert not (tmp_path / "out").exists()
