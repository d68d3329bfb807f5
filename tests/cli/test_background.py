"""`seecause audit`, `repair` and `heads` on a tiny model and images in folders."""

import csv
import json

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

import seecause as sc
from seecause.data import to_pil
from tests.background.repair_toys import CLASSES, PATCH, SIDE, fitted, scenes
from tests.cli.calls import invoke


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A model in a folder, and images with masks in one folder a class."""
    from seecause.background import export

    root = tmp_path_factory.mktemp("background")
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
        folder = root / "images" / CLASSES[int(cases.labels[place])]
        folder.mkdir(parents=True, exist_ok=True)
        to_pil((image / 2 + 0.5).clamp(0, 1)).save(folder / f"{place}.png")
    return root


def rows_of(file):
    return list(csv.DictReader(file.read_text().splitlines()))


def run(command, places, out, *more):
    words = [*command.split(), "--model", places / "model", "--data", f"folder:{places / 'images'}"]
    return invoke(*words, "--device", "cpu", "--out", out, *more)


def test_an_audit_writes_a_page_a_table_and_a_verdict(places, tmp_path):
    out, masks = tmp_path / "audit", tmp_path / "masks"
    option = ("--option", "per_image=2", "--option", f"cache={masks}")
    option += ("--option", "fills=grey,mean")
    done = run("audit", places, out, "--masks-from", "own", *option)
    assert done.exit_code == 0, done.output
    assert any(path.is_file() for path in masks.rglob("*"))
    assert not (tmp_path / "audit.work").exists()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["verdict"] in ("cannot tell", "too few")  # the masks are its own
    page = (out / "index.html").read_text()
    assert "Verdict" in page and "Where does it happen?" in page
    rows = rows_of(out / "audit.csv")
    assert len(rows) == 60 and {"image", "prediction", "label", "flips"} <= set(rows[0])
    facts = json.loads(run("audit", places, out, "--masks-from", "own", *option, "--json").stdout)
    assert facts["numbers"] == manifest["numbers"]


def test_a_limit_that_is_not_met_leaves_with_three(places, tmp_path):
    few = ("--masks-from", "own", "--option", "per_image=1", "--limit", "24", "--quiet")
    met = run("audit", places, tmp_path / "a", *few, "--min-accuracy", "0")
    assert met.exit_code == 0 and met.output == "", met.output
    missed = run("audit", places, tmp_path / "b", *few, "--min-accuracy", "1", "--max-flips", "0")
    assert missed.exit_code == 3
    record = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert record["limits"] == {"min_accuracy": 1.0, "max_flips": 0.0}
    assert len(record["limits not met"]) >= 1
    assert "Limit not met" in (tmp_path / "b" / "index.html").read_text()


def test_an_audit_needs_masks_or_pairs_and_skipped_images_leave_with_one(places, tmp_path):
    refused = run("audit", places, tmp_path / "out")
    assert refused.exit_code == 2 and "neither masks nor" in refused.stderr
    broken = places / "images" / CLASSES[0] / "broken.png"
    broken.write_bytes(b"no image")
    try:
        few = ("--masks-from", "own", "--option", "per_image=1")
        done = run("audit", places, tmp_path / "out", *few)
    finally:
        broken.unlink()
    assert done.exit_code == 1, done.output
    (skipped,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["skipped"]
    assert "broken.png" in skipped["name"]


def test_a_vision_language_model_is_audited_when_it_is_asked_for_classes(tmp_path):
    words = ("--model", "builtin:critters-llava", "--classify", "name_ll", "--device", "cpu")
    done = invoke("audit", *words, "--limit", 4, "--option", "per_image=1", "--out", tmp_path / "a")
    assert done.exit_code == 0 and 'can only be "too few"' in done.stderr, done.output
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["verdict"] == "too few" and manifest["numbers"]["accuracy"] == 1.0
    refused = invoke("repair", "--model", "builtin:critters-llava", "--out", tmp_path / "no")
    assert refused.exit_code == 2 and not (tmp_path / "no").exists()


def test_a_repair_writes_a_checkpoint_that_loads(places, tmp_path):
    out = tmp_path / "repaired"
    words = ("--masks-from", "own", "--remedies", "last-layer,fine-tune", "--force")
    options = ("--option", "per_image=2", "--option", "fine-tune.epochs=1", "--limit", "40")
    done = run("repair", places, out, *words, *options, "--test", f"folder:{places / 'images'}")
    assert done.exit_code == 0, done.output
    record = json.loads((out / "manifest.json").read_text())["run"]
    assert (record["train"] + record["validation"], record["test"]) == (40, 40)
    assert "last-layer" in done.stdout
    native = ViTForImageClassification.from_pretrained(out / "model")
    assert native.config.num_labels == 2
    assert not (tmp_path / "repaired.work").exists()
    assert "The same images, before and after" in (out / "index.html").read_text()


SMALL = ("--option", "masks.steps=2", "--option", "sample.share=1", "--limit", "12")


def test_heads_are_scored(places, tmp_path):
    out = tmp_path / "scores"
    done = run("heads score", places, out, *SMALL, "--option", "temperature=2")
    assert done.exit_code == 0, done.output
    rows = rows_of(out / "scores.csv")
    assert len(rows) == 8 and {"layer", "head", "score"} <= set(rows[0])
    assert 'class="head-grid"' in (out / "index.html").read_text()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["command"] == "heads score" and "highest (layer, head)" in done.stdout


def test_pruned_heads_leave_a_checkpoint_that_predicts_like_the_ablated_model(places, tmp_path):
    out, options = tmp_path / "pruned", ("--option", "draws=1")
    words = ("--by", "random", "--top", "2", "--test", f"folder:{places / 'images'}")
    done = run("heads prune", places, out, *words, *SMALL, *options)
    assert done.exit_code == 0, done.output
    removed = [tuple(head) for head in json.loads((out / "manifest.json").read_text())["removed"]]
    assert 1 <= len(removed) <= 2
    model, pruned = sc.load(str(places / "model")), sc.load(str(out / "model"))
    images = torch.randn(2, 3, SIDE, SIDE)
    with sc.background.ablate(model, removed):
        expected = model(images)
    torch.testing.assert_close(pruned(images), expected, atol=1e-4, rtol=1e-4)
    assert "What changed?" in (out / "index.html").read_text()
    assert len(rows_of(out / "curve.csv")) >= 2
