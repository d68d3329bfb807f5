"""The demo's jobs on small models that stand in for the embedded ones."""

import json

import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from seecause import critters
from seecause.critters.demo import JOBS, audit, explain, pairs_of_scenes, parts, repair, words
from tests.report.examples import rendered

ARCHITECTURE = {"img_size": 96, "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 3}
ARCHITECTURE |= {"num_classes": len(critters.CLASSES)}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    save_file(VisionTransformer(**ARCHITECTURE).state_dict(), tmp_path / "toy.safetensors")
    architecture = {"library": "timm", "class": "VisionTransformer", "arguments": ARCHITECTURE}
    card = {"architecture": architecture, "classes": critters.CLASSES}
    card |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    (tmp_path / "toy.json").write_text(json.dumps(card))
    return str(tmp_path)


def test_the_explain_job_shows_each_creature_in_two_scenes(folder):
    shown = explain("cpu", models=[folder], count=2)
    page = rendered("Demo", shown.sections)
    assert page.count('<article class="card') == 4
    assert "of 2 predictions of" in page
    both = pairs_of_scenes(2)
    assert (both.background[::2] != both.background[1::2]).all()
    assert (both.seed[::2] == both.seed[1::2]).all() and (
        both.creature[::2] == both.creature[1::2]
    ).all()
    assert shown.manifests[0]["method"] == "caap"


def test_the_audit_job_gives_a_verdict_on_each_model(folder):
    shown = audit("cpu", models=(folder, folder), count=3)
    page = rendered("Demo", shown.sections)
    assert page.count('<div class="verdict">') == 2
    assert len(shown.manifests) == 2


def test_the_repair_job_repairs_a_model_and_says_one_sentence(folder):
    assert list(JOBS)[1:3] == ["Audit", "Repair"]
    shown = repair("cpu", model=folder, count=40, tested=8)
    page = rendered("Demo", shown.sections)
    assert "before and after" in page and "Which remedy?" in page
    (sentence,) = shown.lines
    assert sentence in page or sentence.replace(">", "&gt;") in page


def test_the_parts_and_words_jobs_show_the_embedded_networks():
    shown = parts("cpu", count=2)
    page = rendered("Demo", shown.sections)
    assert page.count('<article class="card') == 2 and shown.manifests[0]["method"] == "iFAM"
    sections = words("cpu", masks=16, count=4, floor=None).sections
    assert len(sections) == 3 and "calibration images" in sections[0].note
