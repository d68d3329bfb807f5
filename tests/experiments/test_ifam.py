"""iFAM's tables: printed values, the layouts of its datasets, its baselines, its interventions."""

import json
import tomllib

import pytest
import torch

import seecause as sc
from seecause.data.batch import to_batch
from seecause.errors import BadOption, DataMissing, NotDefined
from seecause.experiments import ifam
from seecause.experiments.base import MODELS, PRINTED, Part
from seecause.faithful.data import PlanckianJitter, TrainingImages
from seecause.faithful.evaluation import evaluate, example_parts, open_network
from seecause.faithful.net import IFAM, Intervention
from seecause.faithful.stages import found_objects
from seecause.faithful.training import read_config
from tests.data.test_imagenet import imagenet9  # noqa: F401
from tests.data.test_shortcuts import cub, metashift, siim  # noqa: F401
from tests.faithful.birds import tiny_cub
from tests.faithful.nets import random_images, tiny_net
from tests.faithful.runs import tiny_backbone
from tests.files import photo

MODEL = {"spec": "builtin:critters-vit", "folder": "unused"}
CRITTERS = Part(MODEL, "critters:simplicity:test", 16, 0, 16, "label", "cpu")
EMBEDDED = {"ifam, K = 4": "builtin:critters-ifam"}
SMALL = {"size": 24, "epochs": 1, "batch": 2, "accumulate": 1, "workers": 0, "ema": False}


def test_every_line_that_is_run_is_printed_and_its_recipe_can_be_read():
    for name, about in ((n, a) for n, a in PRINTED.items() if n.startswith("ifam/table")):
        count = len(about["values"]) * len(about["columns"])
        assert {len(row) for row in about["rows"].values()} == {count}
        for cell in about["cells"]:
            changes = cell.get("changes", [""])
            lines = {" + ".join(filter(None, (cell["network"], change))) for change in changes}
            assert lines <= set(about["rows"]), name
            assert set(cell.get("on", ())) <= set(about["data"])
            for data in cell.get("on", about["data"]):
                path = ifam.RECIPES / f"{data}.toml"
                assert tomllib.loads(path.read_text())["backbone"] in ifam.BACKBONES
                read_config(path, **cell["own"], data=data, out="")
    assert {MODELS[name]["spec"] for name in ("dinov2-b-reg", "rad-dino")} == set(ifam.BACKBONES)


def rows_on(data, network, tmp_path, *, more=(), **options):
    """The row of one network with a tiny backbone, trained for an epoch."""
    backbone = tmp_path / "backbone"
    if not backbone.exists():
        tiny_backbone(backbone)
    model = {"spec": str(backbone), "folder": str(tmp_path / "trained")}
    part = Part(model, data, None, 0, 1, "label", "cpu")
    cells = [cell for about in PRINTED.values() for cell in about.get("cells", ())]
    cell = next(cell for cell in cells if cell.get("network") == network)
    asked = {"network": network, "own": cell["own"], "training": {**SMALL, **dict(more)}}
    return ifam.measured(part, **{**asked, "shows": "numbers", **options})


def test_cub_is_tested_on_other_backgrounds_too(cub, tmp_path):  # noqa: F811
    data = f"cub:{cub}"
    (cub / "segmentations").rename(tmp_path / "elsewhere")
    (row,) = rows_on(data, "ifam, K = 4", tmp_path)
    network = open_network(str(next((tmp_path / "trained").iterdir())))
    for value, name in (("average", f"{data}:test"), ("robust", f"waterbird200:{cub}")):
        found = evaluate(network, data=name, intervention=None, keypoints=False)
        assert row[value] == pytest.approx(100 * found.plain["average"])
    assert rows_on(data, "ifam, K = 4", tmp_path, on=["siim"]) == []
    (early,) = rows_on(f"waterbirds:{cub}", "backbone, frozen", tmp_path)
    assert early["kept"] == 100 and 0 <= early["robust"] <= early["average"] <= 100
    with pytest.raises(BadOption, match="images with masks"):  # training birds have none here
        rows_on(data, "early mask, ground truth", tmp_path)


def test_metashift_is_tested_as_disc_or_as_printed(metashift, tmp_path):  # noqa: F811
    data = f"metashift:{metashift}"
    lines = [rows_on(data, "ifam, K = 4", tmp_path, chosen=how)[0] for how in ("val", "test")]
    part = Part({}, data, None, 0, 1, "label", "cpu")
    assert [len(ifam.test_sets(part, how)["average"]) for how in ("val", "test")] == [17, 20]
    configs = [json.loads(p.read_text()) for p in (tmp_path / "trained").glob("*/config.json")]
    assert {config["val"] for config in configs} == {None, f"{data}:test-all"}
    assert all(line["robust"] <= line["average"] for line in lines)


def test_siim_has_auc_of_all_and_of_images_that_mislead(siim, tmp_path):  # noqa: F811
    changes = ["", "LOO + q = 0.99"]
    for chosen in ("val", "test"):
        rows = rows_on(f"siim:{siim}", "ifam, K = 8", tmp_path, changes=changes, chosen=chosen)
        assert [row["method"] for row in rows] == [
            "ifam, K = 8",
            "ifam, K = 8 + LOO + q = 0.99",
        ]
        assert all(row[name] in (0, 25, 50, 75, 100) for row in rows for name in ("average",))
        assert rows[1]["intervention"].endswith("tokens beyond 0.99 by distance")
    configs = [json.loads(p.read_text()) for p in (tmp_path / "trained").glob("*/config.json")]
    assert {config["losses"]["background"] for config in configs} == {0.0}
    assert {config["data"] for config in configs} == {f"siim:{siim}", f"siim:{siim}:trainval"}


def test_imagenet_is_tested_on_imagenet9(imagenet9, tmp_path):  # noqa: F811
    root = tmp_path / "imagenet"
    with pytest.raises(DataMissing, match="val: no such folder"):
        sc.experiments.run("ifam/table-1b", tmp_path, data={"imagenet": str(root)})
    for split, count in (("train", 10), ("val", 1)):
        for n in range(count):
            for wnid in ("n02123045", "n01440764"):
                photo(root / split / wnid / f"{wnid}_{n}.JPEG", seed=n)
    with pytest.raises(DataMissing, match="bg_challenge"):
        sc.experiments.run("ifam/table-1b", tmp_path, data={"imagenet": str(root)})
    for part, stem in (("00_dog", "n02085620_1"), ("02_wheeled vehicle", "n02701002_7")):
        name = f"fg_{stem}_bg_n02536864_02721.JPEG"
        photo(imagenet9 / "mixed_same" / "val" / part / name, seed=3)
    mapping = {str(place): place % 10 - 1 for place in range(1000)}
    (imagenet9 / "in_to_in9.json").write_text(json.dumps(mapping))
    (root / "bg_challenge").symlink_to(imagenet9)
    (row,) = rows_on(f"imagenet:{root}", "ifam, K = 1", tmp_path)
    assert {"average", "IN-9O", "MS", "MR"} <= set(row)
    assert row["BG-GAP"] == row["MS"] - row["MR"]


def test_key_points_under_a_quantile(tmp_path):
    root, changes = tiny_cub(tmp_path / "cub"), ["", "q = 0.97"]
    how = {"shows": "key points", "changes": changes}
    rows = rows_on(f"cub:{root}", "ifam, K = 4", tmp_path, **how)
    assert [row["method"] for row in rows] == ["ifam, K = 4", "ifam, K = 4 + q = 0.97"]
    network = open_network(str(next((tmp_path / "trained").iterdir())))
    name, change = f"waterbird200:{root}", Intervention((), 0.97)
    found = evaluate(network, data=name, intervention=change)
    for row, expected in zip(rows, (found.plain, found.changed), strict=True):
        assert row["Kp"] == pytest.approx(expected["keypoints"])


def test_parts_are_left_out_on_the_test_images_in_one_call():
    asked = {"network": "ifam, K = 4", "own": {"parts": 4}, "networks": EMBEDDED}
    rows = ifam.measured(CRITTERS, **asked, shows="leave one out")
    assert [row["method"] for row in rows] == [
        "all parts",
        *(f"without part {k}" for k in range(4)),
    ]
    network = open_network("builtin:critters-ifam")
    for place, row in enumerate(rows):
        change = Intervention((place - 1,)) if place else None
        found = evaluate(network, data=CRITTERS.data, intervention=change, limit=16)
        expected = found.changed if place else found.plain
        assert row["average"] == pytest.approx(100 * expected["average"])
        assert row["robust"] == pytest.approx(100 * expected["worst"])


def test_parts_are_drawn_without_far_tokens():
    network = open_network("builtin:critters-ifam")
    images = to_batch(network.net, ifam.test_sets(CRITTERS)["average"]).images
    sc.faithful.calibrate(network.net, images, 0.5)
    (_, plain), (_, near) = (example_parts(network, limit=4, quantile=q) for q in (None, 0.5))
    assert near.output.mask.sum() < plain.output.mask.sum()
    assert not (near.output.mask & ~plain.output.mask).any()
    assert not (near.without[0].mask & ~near.output.mask).any()


# baselines


def baseline(**options) -> IFAM:
    return tiny_net(parts=1, stages=2, **options)


def test_an_early_mask_hides_pixels_and_a_late_one_does_not():
    images, mask = random_images(2), torch.zeros(2, 5, 6, dtype=torch.bool)
    mask[:, 1:3, 2:4] = True
    changed = images.clone()
    changed[:, :, :8] += 1  # the first row of patches
    early, late = (baseline(selects="given", masking=how) for how in ("early", "late"))
    assert torch.equal(early(images, mask=mask).logits, early(changed, mask=mask).logits)
    assert not torch.allclose(late(images, mask=mask).logits, late(changed, mask=mask).logits)
    tokens = late.stage2.tower.features(images)[:, mask[0].flatten()].mean(dim=1)
    torch.testing.assert_close(
        late(images, mask=mask).logits, late.stage2.head(late.stage2.fc_norm(tokens))
    )
    whole = baseline(selects="all")
    every = torch.ones_like(mask)
    torch.testing.assert_close(whole(images).logits, early(images, mask=every).logits)
    with pytest.raises(BadOption, match="masks"):
        early(images)
    with pytest.raises(NotDefined, match="no parts"):
        sc.wrap(whole)
    with pytest.raises(BadOption, match="with parts"), sc.faithful.intervene(whole, drop_parts=[0]):
        pass


def test_a_frozen_backbone_is_frozen():
    net = baseline(selects="all", freeze="all")
    learns = {name for name, weight in net.named_parameters() if weight.requires_grad}
    assert learns and not any(".tower." in name for name in learns)


def test_objects_are_found_without_labels():
    net = open_network("builtin:critters-ifam").net
    images, _, masks = to_batch(net, sc.data.open_data("critters:clean:test", limit=32))
    found, truth = found_objects(net.stage1.tower, images), net.on_patches((masks == 1).float())
    assert found.shape == truth.shape and 0 < found.float().mean() < 1
    inside, outside = found[truth].float().mean(), found[~truth].float().mean()
    assert inside > outside + 0.2, (inside, outside)


def test_masks_go_through_the_same_augmentation_as_images():
    data = sc.data.open_data("critters:clean:train", limit=4)
    frame = open_network("builtin:critters-ifam").net.preprocess

    class Painted:
        def __getitem__(self, index):
            sample = data[index]
            white = sample.mask.float().expand(3, -1, -1)
            return type(sample)(white, 0, mask=sample.mask, id="white where the object is")

    images = TrainingImages(Painted(), "birds_no_jitter", frame, seed=0, masks=True)
    for index in range(4):
        pixels, _, _ = images[index]
        raw = frame.raw(pixels[None, :3])[0]
        torch.testing.assert_close(raw[0], pixels[3], atol=1e-5, rtol=0)
    light = PlanckianJitter()(torch.full((4, 2, 2), 0.5))
    assert torch.equal(light[3], torch.full((2, 2), 0.5))
