"""Checkpoints as trainings leave them: wrapped, prefixed, averaged, adapted, in folders."""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peft
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import nn
from torch.testing import assert_close
from transformers import ViTConfig, ViTForImageClassification, ViTModel

import seecause as sc
from seecause.errors import BadOption, DataMissing
from tests.tiny import scramble

NAMES = ["ant", "bee", "cat", "dog", "eel"]
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
VIT |= {"intermediate_size": 48, "image_size": 32, "patch_size": 8}


class AttributeDict(dict):
    """As Lightning keeps hyper-parameters."""


def trained() -> nn.Module:
    return scramble(timm.create_model("test_vit", num_classes=5))


def images() -> torch.Tensor:
    return torch.randn(1, 3, 160, 160, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)


def same(model, module: nn.Module) -> None:
    assert_close(model(images()), module.eval()(images()))


def prefixed(prefix: str, state: dict) -> dict:
    return {f"{prefix}{name}": value for name, value in state.items()}


def lightning(state: dict) -> dict:
    """A .ckpt: hyper-parameters of classes that nobody should load, a loss with weights."""
    return {
        "epoch": 3,
        "state_dict": prefixed("model.", state) | {"criterion.weight": torch.ones(5)},
        "hyper_parameters": AttributeDict(lr=0.1, args=argparse.Namespace(path=Path("x"))),
        "callbacks": {"best": np.float64(0.5), "curve": np.zeros(3)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}}],
    }


SHAPES: dict[str, Callable[[dict], dict]] = {
    "plain": lambda s: s,
    "module.": lambda s: prefixed("module.", s),
    "_orig_mod.": lambda s: prefixed("_orig_mod.", s),
    "both": lambda s: prefixed("module._orig_mod.", s),
    "compiled blocks": lambda s: {n.replace("blocks.0.", "blocks.0._orig_mod."): s[n] for n in s},
    "state_dict": lambda s: {"state_dict": prefixed("model.", s), "epoch": 1},
    "model": lambda s: {"model": s, "optimizer": {"lr": 1}},
    "deeper": lambda s: {"model": prefixed("encoder.vit.", s)},
    "lightning": lightning,
    "averaged": lambda s: {"state_dict": {n: v + 1 for n, v in s.items()}, "state_dict_ema": s},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_checkpoint_is_read_however_it_was_saved(tmp_path, caplog, shape):
    module = trained()
    torch.save(SHAPES[shape](module.state_dict()), tmp_path / "last.ckpt")
    model = sc.load("timm:test_vit", weights=tmp_path / "last.ckpt", **HALF)
    same(model, module)
    assert ("are not used" in caplog.text) is (shape == "lightning")


def test_nothing_of_a_checkpoint_runs(tmp_path):
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return open, (str(ran), "w")

    torch.save({"state_dict": trained().state_dict(), "trap": Trap()}, tmp_path / "trap.pt")
    same(sc.load("timm:test_vit", weights=tmp_path / "trap.pt"), trained())
    assert not ran.exists()


def test_a_misfit_says_how_much_and_what(tmp_path):
    state = trained().state_dict()
    del state["cls_token"]
    state["blocks.0.attn.qkv.weight"] = torch.zeros(2, 2)
    state["extra"] = torch.zeros(1)
    torch.save(state, tmp_path / "odd.pt")
    with pytest.raises(DataMissing) as caught:
        sc.load("timm:test_vit", weights=tmp_path / "odd.pt")
    words = str(caught.value)
    for part in (
        'Missing key(s) in state_dict: "cls_token"',
        'Unexpected key(s) in state_dict: "extra"',
    ):
        assert part in words
    assert "size mismatch for blocks.0.attn.qkv.weight" in words


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_damaged_file_is_told_in_words(tmp_path, suffix):
    file = tmp_path / f"cut{suffix}"
    torch.save(trained().state_dict(), file)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(DataMissing, match="cannot be read"):
        sc.load("timm:test_vit", weights=file)


def test_a_whole_pickled_module_is_refused_with_what_to_save(tmp_path):
    torch.save(trained(), tmp_path / "whole.pt")
    with pytest.raises(DataMissing, match=r"torch\.save\(model\.state_dict"):
        sc.load("timm:test_vit", weights=tmp_path / "whole.pt")


def test_a_file_alone_asks_for_its_architecture(tmp_path):
    module = trained()
    torch.save(module.state_dict(), tmp_path / "bare.pth")
    with pytest.raises(DataMissing, match=r"--model timm:NAME --weights .*bare\.pth"):
        sc.load(str(tmp_path / "bare.pth"))


@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_of_timm_is_a_model(tmp_path, safe):
    module = trained()
    module.pretrained_cfg = {**module.pretrained_cfg, "crop_pct": 0.8}
    words = {"label_names": NAMES, "label_descriptions": {"ant": "a small ant"}}
    save_for_hf(module, tmp_path / "timm", model_config=words, safe_serialization=safe)
    model = sc.load(str(tmp_path / "timm"))
    same(model, module)
    assert model.classes == ("a small ant", *NAMES[1:])
    assert model.preprocess.crop == 0.8
    assert sc.load(str(tmp_path / "timm"), size=96).layout.grid == (6, 6)


def test_weights_of_another_size_ask_for_it(tmp_path):
    torch.save(timm.create_model("test_vit", img_size=96).state_dict(), tmp_path / "96.pt")
    assert sc.load("timm:test_vit", weights=tmp_path / "96.pt", size=96).layout.grid == (6, 6)
    with pytest.raises(DataMissing, match=r"pos_embed.* size= \(--input size"):
        sc.load("timm:test_vit", weights=tmp_path / "96.pt")


def adapter(folder: Path, base: nn.Module, head: str, targets: list[str]) -> nn.Module:
    """A saved adapter, with weights of its own that matter."""
    lora = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=[head])
    adapted = peft.get_peft_model(base, lora)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    adapted.save_pretrained(folder)
    return adapted.eval()


def queries_of(module: nn.Module) -> list[str]:
    """What transformers calls them: `query` before 5.17."""
    ends = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    return sorted(ends & {"q_proj", "query"})


@pytest.mark.parametrize("bare", [False, True])
def test_an_adapter_of_transformers_is_merged_into_its_base(tmp_path, bare):
    kind = ViTModel if bare else ViTForImageClassification
    scramble(kind(ViTConfig(**VIT, num_labels=2))).save_pretrained(tmp_path / "base")
    base = ViTForImageClassification.from_pretrained(
        tmp_path / "base", num_labels=4, ignore_mismatched_sizes=True
    )
    adapted = adapter(tmp_path / "lora", base, "classifier", queries_of(base))
    model = sc.load(str(tmp_path / "lora"), **HALF)
    x = images()[..., :32, :32]
    assert model.n_classes == 4
    assert_close(model(x), adapted.eval()(x).logits, atol=1e-4, rtol=1e-4)
    again = sc.load(f"hf:{tmp_path / 'base'}", weights=tmp_path / "lora", **HALF)
    assert_close(again(x), model(x))


def test_an_adapter_without_a_base_asks_for_it(tmp_path):
    adapter(tmp_path / "lora", trained(), "head", ["qkv"])
    with pytest.raises(DataMissing, match="--model hf:NAME"):
        sc.load(str(tmp_path / "lora"))
    with pytest.raises(BadOption, match="a model of transformers"):
        sc.load("timm:test_vit", weights=tmp_path / "lora")


def test_two_models_in_one_file_are_not_guessed_between(tmp_path):
    state = trained().state_dict()
    torch.save(prefixed("student.", state) | prefixed("teacher.", state), tmp_path / "w.pt")
    with pytest.raises(DataMissing, match=r"several models: student\.\* and teacher\.\*"):
        sc.load("timm:test_vit", weights=tmp_path / "w.pt", **HALF)


def test_weights_that_a_folder_lacks_are_not_made_up(tmp_path):
    ViTForImageClassification(ViTConfig(**VIT, num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(sc.SeecauseError, match=r"mean and std.*--input mean="):  # no processor
        sc.load(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["classifier.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataMissing, match=r"lacks classifier\.weight"):
        sc.load(f"hf:{tmp_path}", **HALF)


@pytest.mark.parametrize("model", ["timm:deit3_small_patch16_224", "hf:google/vit"])
def test_weights_that_cannot_be_fetched_are_one_error(model):
    """The tests run with HF_HUB_OFFLINE."""
    with pytest.raises(DataMissing, match=r"fetching failed.*--weights PATH"):
        sc.load(model)
