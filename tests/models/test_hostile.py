"""Damaged and hostile models and results: only errors of ours leave the library, and no code of a
folder runs."""

import json
import shutil
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from transformers import ViTConfig, ViTForImageClassification

import seecause as sc
from seecause.errors import DataMissing, SeecauseError
from tests.tiny import scramble


@pytest.fixture
def saved(tmp_path) -> Path:
    """A card and weights of ours."""
    arguments = {
        **{"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2},
        "num_classes": 3,
    }
    module = scramble(VisionTransformer(**arguments))
    save_file(module.state_dict(), tmp_path / "small.safetensors")
    card = {
        "architecture": {"class": "VisionTransformer", "arguments": arguments},
        "classes": ["a", "b", "c"],
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    }
    (tmp_path / "small.json").write_text(json.dumps(card))
    return tmp_path


@pytest.fixture
def hf(tmp_path) -> Path:
    folder = hf_folder(tmp_path / "hf")
    sc.load(str(folder))
    return folder


def hf_folder(folder: Path) -> Path:
    """A folder of transformers."""
    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
        num_labels=3,
    )
    scramble(ViTForImageClassification(config)).save_pretrained(folder)
    processor = {
        "do_resize": True,
        "size": {"height": 16, "width": 16},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def edit(folder: Path, name: str = "config.json", **values: object) -> None:
    record = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**record, **values}))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


ODD: dict[str, Callable[[Path], object]] = {
    "no config": lambda f: (f / "config.json").unlink(),
    "config is a list": lambda f: (f / "config.json").write_text("[]"),
    "config is {}": lambda f: (f / "config.json").write_text("{}"),
    "config is deep": lambda f: (f / "config.json").write_text("[" * 100_000),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "weights cut": lambda f: cut(f / "model.safetensors", 100),
    "weights odd": lambda f: save_file({"x": torch.zeros(1)}, f / "model.safetensors"),
    "wider": lambda f: edit(f, hidden_size=16),
    "width 0": lambda f: edit(f, hidden_size=0),
    "a word": lambda f: edit(f, hidden_size="eight"),
    "patch 0": lambda f: edit(f, patch_size=0),
    "sides": lambda f: edit(f, image_size=[16, 16, 16]),
    "labels": lambda f: edit(f, id2label={"a": 1}),
    "another kind": lambda f: edit(f, model_type="bert"),
    "no such kind": lambda f: edit(f, model_type="nothing"),
    "architectures": lambda f: edit(f, architectures=7),
    "activation": lambda f: edit(f, hidden_act="nothing"),
    "size": lambda f: edit(f, "preprocessor_config.json", size="x"),
    "mean": lambda f: edit(f, "preprocessor_config.json", image_mean=[0.5]),
    "std": lambda f: edit(f, "preprocessor_config.json", image_std=[0, 0, 0]),
    "processor": lambda f: (f / "preprocessor_config.json").write_text("[]"),
}
HARMLESS = {"labels", "architectures", "activation", "sides"}


@pytest.mark.parametrize("kind", ODD)
def test_odd_hf_folders_are_one_error_of_ours(hf, kind):
    ODD[kind](hf)
    try:
        sc.load(str(hf))
    except SeecauseError:
        return
    assert kind in HARMLESS, "this folder is not that of a model"


@pytest.mark.parametrize("load", ["load", "lvlm.load"])
def test_no_code_of_a_folder_runs_and_nobody_is_asked(tmp_path, monkeypatch, load):
    folder, ran, asked = hf_folder(tmp_path / "hf"), tmp_path / "ran", []
    code = f"open({str(ran)!r}, 'w')\nfrom transformers import *\nclass Config(ViTConfig): pass\n"
    (folder / "remote.py").write_text(code)
    maps = {name: "remote.Config" for name in ("AutoConfig", "AutoModel", "AutoProcessor")}
    maps |= {"AutoModelForImageClassification": "remote.Config"}
    maps |= {"AutoModelForImageTextToText": "remote.Config"}
    edit(folder, auto_map=maps, model_type="nothing")
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    with pytest.raises(SeecauseError):
        attrgetter(load)(sc)(str(folder))
    assert not asked and not ran.exists()


@pytest.mark.parametrize(
    "origin",
    [
        {"library": "transformers", "class": "pipeline"},
        {"library": "transformers", "class": "os"},
        {"library": "timm", "name": "hf_hub:someone/something", "options": {}},
        {"library": "open_clip", "name": "hf-hub:someone/something"},
    ],
)
def test_a_card_names_models_only(saved, tmp_path, origin):
    folder = sc.background.export(sc.load(str(saved)), [(0, 1)], tmp_path / "out")
    shutil.copy(saved / "small.json", folder / "config.json")
    edit(folder, "seecause.json", origin=origin)
    with pytest.raises((DataMissing, SeecauseError)):
        sc.load(str(folder))
