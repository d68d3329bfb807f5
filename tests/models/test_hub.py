"""Weights that cannot be had are refused quickly, with everything that was said about it."""

from __future__ import annotations

import io
import json

import pytest
from safetensors.torch import load_file, save_file

import seecause as sc
from seecause.errors import DataMissing, SeecauseError
from seecause.models.sources import fetched


def asked_in_vain(*_: object, **__: object) -> None:
    raise AssertionError("the library was asked, and would ask the hub again and again")


@pytest.mark.parametrize(
    ("model", "loader"),
    [
        ("timm:deit3_small_patch16_224", "timm.create_model"),
        ("hf:google/vit", "transformers.AutoConfig.from_pretrained"),
    ],
)
def test_an_unreachable_hub_is_noticed_before_a_library_asks_it(model, loader, monkeypatch):
    """The tests run with HF_HUB_OFFLINE."""
    monkeypatch.setattr(loader, asked_in_vain)
    with pytest.raises(
        DataMissing,
        match=r"not on this machine, and https://\S+ cannot be reached .*--weights PATH",
    ):
        sc.load(model)


def test_a_file_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        DataMissing,
        match=r"model\.safetensors is no folder.*Give a folder that transformers wrote",
    ):
        sc.load("hf:google/vit", weights="model.safetensors")


def test_what_a_library_says_is_not_cut_in_the_middle():
    def fail() -> None:
        raise OSError("one line of a long message, " * 10 + "\nand the second")

    with pytest.raises(DataMissing, match=r"OSError: one line .* and the second\)\. Pass weights="):
        fetched("timm:x", fail)


def saved_vit(folder):
    """A tiny ViT with three classes, as transformers writes it."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=16,
        num_labels=3,
    )
    ViTForImageClassification(config).save_pretrained(folder)
    return folder / "config.json", folder / "model.safetensors"


OPTIONS = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "size": (32, 32)}


def test_code_in_a_folder_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch):
    config, _ = saved_vit(tmp_path)
    card = json.loads(config.read_text())
    card |= {"model_type": "foreign", "auto_map": {"AutoConfig": "evil.Config"}}
    config.write_text(json.dumps(card))
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(SeecauseError):
        sc.load(f"hf:{tmp_path}", **OPTIONS)
    assert not marker.exists()


def test_weights_that_a_checkpoint_lacks_are_not_made_up(tmp_path):
    _, weights = saved_vit(tmp_path)
    tensors = load_file(weights)
    del tensors["classifier.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(DataMissing, match=r"lacks classifier\.weight"):
        sc.load(f"hf:{tmp_path}", **OPTIONS)
