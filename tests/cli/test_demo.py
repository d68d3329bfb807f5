"""The demo's jobs on small models that stand in for the embedded ones."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from seecause import critters
from seecause.critters import demo_classifiers
from seecause.critters.demo import JOBS, DemoSetting, audit, compare, explain, remove_heads, repair
from seecause.report.pages import render_page

ARCHITECTURE = {
    "img_size": 96,
    "patch_size": 16,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": len(critters.CLASSES),
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    save_file(VisionTransformer(**ARCHITECTURE).state_dict(), tmp_path / "toy.safetensors")
    architecture = {"library": "timm", "class": "VisionTransformer", "arguments": ARCHITECTURE}
    card = {
        "architecture": architecture,
        "classes": critters.CLASSES,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    (tmp_path / "toy.json").write_text(json.dumps(card))
    return str(tmp_path)


def test_the_explain_job_shows_each_creature_in_two_scenes(folder):
    shown = explain(DemoSetting(), models=[folder], pictures=2)
    page = render_page("Demo", shown.sections)
    assert page.count('<article class="card') == 2
    assert page.count("<figcaption>on another background</figcaption>") == 2
    assert "of 2 answers of" in page
    assert shown.manifests[0]["method"] == "caap"


def test_every_creature_stands_on_its_usual_background_first():
    latents = demo_classifiers._usual_scenes(6, seed=0)
    assert torch.equal(latents.background, critters.usual_background(latents.creature))
    assert len(set(latents.creature.tolist())) == 6
    assert (demo_classifiers._elsewhere(latents) != latents.background).all()


def test_jobs_are_registered():
    assert JOBS["Explain"] is explain


def test_the_compare_job_shows_a_table_and_curves_of_every_method():
    page = render_page(
        "Demo", compare(DemoSetting(), methods=("caap", "random"), pictures=2).sections
    )
    assert page.count('<th scope="row">') == 2
    assert page.index('<article class="card') < page.index('<th scope="row">')  # pictures first
    assert "ins-del" in page and "no value" not in page


def test_the_audit_job_gives_a_verdict_on_each_model(folder):
    shown = audit(DemoSetting(), models=(folder, folder), pictures=3)
    page = render_page("Demo", shown.sections)
    assert page.count('<div class="verdict">') == 2 and '<article class="card">' in page
    assert page.rindex('<div class="verdict">') < page.index('<article class="card">')
    assert len(shown.manifests) == 2


def test_the_heads_job_shows_which_heads_went_and_what_changed(folder):
    job = remove_heads(DemoSetting(), model=folder, pictures=3, top=2, draws=2)
    page = render_page("Demo", job.sections)
    assert "What changed?" in page and "Removed heads are outlined" in page
    assert "as many random heads" in page


def test_the_repair_job_mends_a_model_and_says_one_sentence(folder):
    assert list(JOBS)[2:4] == ["Audit", "Repair"]
    shown = repair(DemoSetting(), model=folder, pictures=40, tested=8)
    page = render_page("Demo", shown.sections)
    assert "before and after" in page and "Which remedy?" in page
    (sentence,) = shown.lines
    assert sentence in page or sentence.replace(">", "&gt;") in page
