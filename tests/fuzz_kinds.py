"""What `tests/fuzz.py` damages: small intact models, results and settings, and who reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from transformers import ViTConfig, ViTForImageClassification

import seecause as sc
from seecause.app.panels.runs import find_runs
from seecause.bench.runner import cell_file, run, status
from seecause.bench.tables import read_results, table, write_rows
from seecause.data.backgrounds import read_in9_map
from seecause.faithful.config import TrainConfig, read_config
from seecause.faithful.run import Snapshot, read_evaluations, read_snapshot, write_snapshot
from seecause.lvlm import HeadAttribution, MeanBank
from seecause.lvlm.bank import Averaged
from seecause.models.image_tokens import Grid, ImageTokens
from seecause.models.load import read_checkpoint, read_class_names
from tests import fuzz_data
from tests.data.mutations import (
    of_bytes,
    of_json,
    of_parquet,
    of_safetensors,
    of_toml,
    of_zip,
)
from tests.files import lines
from tests.fuzz import Mutation, Victim
from tests.tiny import scramble

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2}
TINY |= {"num_classes": 3}
JSON: Sequence[Mutation] = (of_bytes, of_json)
WEIGHTS: Sequence[Mutation] = (of_bytes, of_safetensors)


def small_model(folder: Path) -> Path:
    """A card and weights of ours."""
    folder.mkdir(parents=True)
    save_file(scramble(VisionTransformer(**TINY)).state_dict(), folder / "small.safetensors")
    card = {
        "architecture": {"class": "VisionTransformer", "arguments": TINY},
        "classes": ["a", "b", "c"],
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    }
    (folder / "small.json").write_text(json.dumps(card))
    return folder


def safetensors(folder: Path) -> list[Victim]:
    model = small_model(folder / "model")
    path = folder / "a.safetensors"
    notes = {"classes": '["a", "b"]'}
    save_file({"head.weight": torch.zeros(3, 4), "head.bias": torch.zeros(3)}, path, notes)
    weights = Victim(path, lambda: read_checkpoint(path), WEIGHTS)
    return [
        weights,
        weights,
        Victim(model / "small.safetensors", lambda: sc.load(str(model)), WEIGHTS),
    ]


def json_files(folder: Path) -> list[Victim]:
    model = small_model(folder / "model")
    export = sc.background.export(sc.load(str(model)), [(0, 1)], folder / "export", form="sliced")
    nine, names = folder / "in_to_in9.json", folder / "names.json"
    nine.write_text(json.dumps({str(place): place % 9 for place in range(1000)}))
    names.write_text(json.dumps({"0": "cat", "1": "dog"}))
    config = folder / "config.json"
    TrainConfig(data="critters:clean", backbone="timm:x", out="out").save(config)
    results = folder / "results" / "one"
    results.mkdir(parents=True)
    (results / "index.html").write_text("<p>")
    manifest = results / "manifest.json"
    manifest.write_text(json.dumps({"command": "explain", "model": "m", "files": ["a"], "seed": 0}))
    named = {"results": folder / "results"}
    return [
        Victim(model / "small.json", lambda: sc.load(str(model)), JSON),
        Victim(export / "seecause.json", lambda: sc.load(str(export)), JSON),
        Victim(nine, lambda: read_in9_map(nine), JSON),
        Victim(names, lambda: read_class_names(names), JSON),
        Victim(config, lambda: read_config(config), JSON),
        Victim(manifest, lambda: find_runs(named), JSON),
    ]


def toml_files(folder: Path) -> list[Victim]:
    config = lines(
        folder / "train.toml",
        'data = "critters:clean"',
        'backbone = "timm:vit_tiny_patch16_224"',
        'out = "out"',
        "epochs = 3",
        "[losses]",
        "entropy = 0.5",
    )
    toml = (of_bytes, of_toml)
    return [
        Victim(config, lambda: read_config(config), toml),
    ]


def hf_folders(folder: Path) -> list[Victim]:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    sizes |= {"intermediate_size": 16, "image_size": 16, "patch_size": 8}
    scramble(ViTForImageClassification(ViTConfig(**sizes))).save_pretrained(folder)
    processor = {
        "do_resize": True,
        "size": {"height": 16, "width": 16},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))

    def read() -> None:
        sc.load(str(folder))

    return [
        Victim(folder / "config.json", read, JSON),
        Victim(folder / "preprocessor_config.json", read, JSON),
        Victim(folder / "model.safetensors", read, WEIGHTS),
    ]


def attributions(folder: Path) -> list[Victim]:
    model = sc.load(str(small_model(folder / "model")))
    saved = sc.attribute(model, torch.zeros(1, 3, 16, 16), 1, "rollout").save(folder / "maps")

    def read() -> None:
        loaded = sc.Attribution.load(saved)
        repr(loaded), loaded.pixels(), loaded.overlay(), loaded._repr_html_()

    return [
        Victim(saved / "manifest.json", read, JSON),
        Victim(saved / "maps.safetensors", read, WEIGHTS),
    ]


def run_folders(folder: Path) -> list[Victim]:
    from tests.bench.toy import prepared

    work = prepared(methods={"center": {}}, metrics=("aupr1",), measures={}, limit=2)
    assert run(folder / "run", work).complete

    def read() -> None:
        write_rows(results := read_results(folder / "run"), folder / "rows.csv")
        table(folder / "run"), status(folder / "run"), results.details("center", "map")

    (cell,) = work.plan.cells
    return [
        Victim(folder / "run" / "run.json", read, JSON),
        Victim(cell_file(folder / "run", cell.name), read, (of_bytes, of_parquet)),
    ]


def checkpoints(folder: Path) -> list[Victim]:
    path, other = folder / "a.pt", folder / "old.pt"
    content = {"state_dict": {"head.weight": torch.zeros(3, 4)}, "arch": "vit", "classes": ["a"]}
    torch.save(content, path)
    torch.save(content, other, _use_new_zipfile_serialization=False)
    config = TrainConfig(data="critters:clean", backbone="timm:x", out=str(folder))
    net = {"a": torch.zeros(2)}
    write_snapshot(folder, Snapshot(asdict(config), {"epoch": 1}, net, {}, {}))
    (last,) = set(folder.glob("*.pt")) - {path, other}
    return [
        Victim(path, lambda: read_checkpoint(path), (of_bytes, of_zip)),
        Victim(other, lambda: read_checkpoint(other), (of_bytes,)),
        Victim(last, lambda: read_snapshot(folder, config), (of_bytes, of_zip)),
    ]


def lvlm_results(folder: Path) -> list[Victim]:
    heads = torch.zeros(2, 3, dtype=torch.float64)
    traced = HeadAttribution(heads, 0.1, 0.9, 0.9, 100, 0.8, heads + 1, {"model": "m"})
    traced.save(folder / "heads")
    averaged = Averaged(ImageTokens((Grid(2, 2), Grid(1, 3, newline=True))), (8, 9))
    sums = torch.zeros(2, 1, averaged.tokens.count, 4)
    bank = MeanBank("shape", "model", None, ("d",), {averaged: (sums, sums + 1)}, {averaged: 1})
    bank.save(folder / "bank")

    def read_heads() -> None:
        loaded = HeadAttribution.load(folder / "heads")
        repr(loaded), loaded.top(2), loaded.mask(1)

    def read_bank() -> None:
        loaded = MeanBank.load(folder / "bank")
        repr(loaded), len(loaded)

    return [
        Victim(folder / "heads" / "attribution.json", read_heads, JSON),
        Victim(folder / "heads" / "coefficients.safetensors", read_heads, WEIGHTS),
        Victim(folder / "bank" / "bank.json", read_bank, JSON),
        Victim(folder / "bank" / "bank.safetensors", read_bank, WEIGHTS),
    ]


def faithful_runs(folder: Path) -> list[Victim]:
    from tests.faithful.nets import tiny_net

    tiny_net().float().save(folder)
    evaluations = folder / "evaluation.json"
    evaluations.write_text(json.dumps({"data": "d", "plain": {"accuracy": 0.5}}))
    return [
        Victim(folder / "ifam.json", lambda: sc.faithful.load(folder), JSON),
        Victim(folder / "ifam.safetensors", lambda: sc.faithful.load(folder), WEIGHTS),
        Victim(evaluations, lambda: read_evaluations(folder), JSON),
    ]


KINDS: dict[str, Callable[[Path], list[Victim]]] = {
    "safetensors": safetensors,
    "parquet": fuzz_data.parquet,
    "json": json_files,
    "toml": toml_files,
    "csv": fuzz_data.csv_files,
    "lists": fuzz_data.lists,
    "dicom": fuzz_data.dicom,
    "images": fuzz_data.images,
    "npy": fuzz_data.npy_masks,
    "masks": fuzz_data.png_masks,
    "hf": hf_folders,
    "attributions": attributions,
    "runs": run_folders,
    "checkpoints": checkpoints,
    "pickles": fuzz_data.pickles,
    "lvlm": lvlm_results,
    "faithful": faithful_runs,
}
