"""Commands on networks of stages: a saved Swin and a ConvNeXt checkpoint, from the outside."""

import json

import pytest
import timm
import torch
from timm.models import save_for_hf

from seecause.attribution.result import Attribution
from tests.cli.calls import explain, invoke, photo
from tests.tiny import scramble

SWIN = dict(
    img_size=64, embed_dim=8, depths=(2, 1, 2, 1), num_heads=(1, 2, 2, 2), window_size=2
)  # the smallest that shifts its windows


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Words that name a Swin in a folder, and a ConvNeXt by name and checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    swin = timm.create_model("swin_tiny_patch4_window7_224", num_classes=3, **SWIN)
    card = {"label_names": ["cat", "dog", "owl"]}
    save_for_hf(scramble(swin), folder / "swin", model_config=card, model_args=SWIN)
    convnext = timm.create_model("test_convnext", num_classes=3)
    torch.save(scramble(convnext).state_dict(), folder / "convnext.pth")
    return {
        "swin": ("--model", folder / "swin"),
        "convnext": ("--model", "timm:test_convnext", "--weights", folder / "convnext.pth"),
    }


@pytest.mark.parametrize("kind", ["swin", "convnext"])
def test_explain_draws_every_kind_of_method(models, kind, tmp_path):
    out = tmp_path / "out"
    methods = ("--method", "caap,mosaic,sobel")
    done = explain(photo(tmp_path / "a.jpg"), *models[kind], *methods, "--out", out)
    assert done.exit_code == 0, done.output
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest["maps"]) == {"caap", "mosaic", "sobel"}
    maps = Attribution.load(out / manifest["maps"]["caap"])
    assert maps.manifest["architecture"] == "staged" and maps.maps.std() > 0
    assert maps.manifest["used"]["stage"] == "stage3"
    assert (out / "index.html").stat().st_size > 10_000
    if kind == "swin":
        assert any(name in done.stdout for name in ("cat", "dog", "owl"))


def test_what_needs_tokens_is_refused_and_says_what_works(models, tmp_path):
    done = explain(photo(tmp_path / "a.jpg"), *models["swin"], "--method", "gae")
    assert done.exit_code == 2 and "no heads" in done.output and "mosaic" in done.output


def test_doctor_says_what_was_verified_and_what_works(models):
    done = invoke("doctor", *models["swin"], "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert list(facts["verified"]) == ["logits", "stages", "resume", "locality"]
    assert facts["inside"]["stages"] == "stem, stage1, stage2, stage3, stage4"
    assert "caap" in facts["what works"]["methods"]
