"""`seecause lvlm` on a small model in a folder."""

import json

import pytest
from safetensors.torch import load_file

import seecause as sc
from seecause.data.dataset import read_image
from tests.cli.calls import invoke
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
    return invoke("lvlm", *words, "--device", "cpu")


def manifest_of(out):
    return json.loads((out / "manifest.json").read_text())


def test_every_word_of_an_answer_is_traced(toy, photos, tmp_path):
    out = tmp_path / "out"
    asked = (photos / "0.png", "--question", QUESTION, "--model", toy, "--calibration", photos)
    done = lvlm("answer", *asked, "--answer", "the tail is jade .", "--masks", 8, "--out", out)
    assert done.exit_code == 0, done.output
    manifest, tensors = manifest_of(out), load_file(out / "words.safetensors")
    assert manifest["answer"] == "the tail is jade ." and len(manifest["words"]) == 5
    assert tensors["image"].shape == (5, 16)
    for name, logs in (("probability", "log_seen"), ("without", "log_unseen")):
        chances = [row[name] for row in manifest["words"]]
        assert chances == pytest.approx(tensors[logs].exp().tolist())
    page = (out / "index.html").read_text()
    assert page.count('class="behind"') == page.count('class="head-grid"') == 5
    assert "What is behind &#39;the tail is jade .&#39;" in page
    assert "answer: the tail is jade ." in done.stdout and "with the image" in done.stdout
    assert "note: 4 calibration" in done.stderr
    assert done.stdout.splitlines()[-1] == f"page: {out / 'index.html'}"


def test_a_word_is_traced_by_a_saved_bank(toy, photos, tmp_path):
    bank, out = tmp_path / "bank", tmp_path / "out"
    made = lvlm("bank", *(photos / f"{n}.png" for n in (1, 2, 3)), "--model", toy, "--out", bank)
    assert made.exit_code == 0 and f"bank: {bank}" in made.stdout, made.output
    assert manifest_of(bank)["images"] == 3
    asked = (photos / "0.png", "--question", QUESTION, "--model", toy, "--bank", bank)
    asked += ("--masks", 100, "--floor", 0, "--out", out)
    done = lvlm("trace", *asked)
    assert done.exit_code == 0 and "heads are enough" in done.stdout, done.output
    assert "words that receive the image" in done.stdout
    manifest, page = manifest_of(out), (out / "index.html").read_text()
    assert manifest["command"] == "lvlm trace" and f"answer: {manifest['answer']};" in done.stdout
    assert page.count('class="head-grid"') == 3 and 'class="prompt"' in page
    assert page.count('<figure class="chart">') == 2
    assert read_image(out / "overlay.png").width > 1000
    assert "causal" in (out / "heads.csv").read_text().splitlines()[0]
    assert load_file(out / "trace.safetensors")["tokens.coefficients"].shape == (16,)
    more = ("--heads-only", "--ablated", 0.6, "--seed", 3, "--quiet")
    quiet = lvlm("trace", *asked, *more)
    assert quiet.exit_code == 0 and quiet.output == "" and not (out / "overlay.png").exists()
    assert manifest_of(out)["run"]["sampling"]["p"] == 0.6


def test_edited_heads_speak(toy, photos):
    asked = (photos / "0.png", "--question", QUESTION, "--model", toy)
    change = ("--heads", "(0, 1), (2,3)", "--redirect", photos / "1.png", "--length", 3)
    done = lvlm("edit", *asked, *change, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["heads"] == [[0, 1], [2, 3]]
    model = sc.lvlm.load(toy)
    decode, prompt = model.processor.tokenizer.decode, model.prompt(pictures(1)[0], QUESTION)
    assert facts["before"] == decode(model.speak(prompt, 3)).strip()
    with sc.lvlm.edited_heads(model, [(0, 1), (2, 3)], redirect=pictures(2)[1]):
        assert facts["after"] == decode(model.speak(prompt, 3)).strip()
    blind = lvlm("edit", *asked, "--heads", "(0, 1)", "--blind", "--calibration", photos)
    assert blind.exit_code == 0 and blind.stdout.startswith("before: "), blind.output
