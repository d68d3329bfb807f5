"""Object masks: from the data, from another network, from the model itself."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import seecause as sc
from seecause.background import LabelledImages, Masks, iou, object_masks, objects, otsu
from seecause.background.objects import find_masks, network_maps
from seecause.data.dataset import IGNORE
from tests.background.repair_toys import CLASSES, fitted, plain_vit, scenes, wrapped
from tests.reference import transplant as twin


@pytest.fixture(scope="module")
def biased():
    return sc.load("builtin:critters-biased")


@pytest.fixture(scope="module")
def data(biased):
    return sc.background.read_images(biased, sc.data.open_data("critters:certified:test", limit=6))


@pytest.fixture(scope="module")
def toy():
    return fitted(scenes(64))


def test_otsu_equals_the_slow_twin():
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(20, 5, 7, generator=generator, dtype=torch.float64).exp()
    maps[10:] = maps[10:].round()  # ties
    maps[19] = 2.5  # constant
    masks = otsu(maps)
    for own, scores in zip(masks, maps, strict=True):
        assert own.equal(twin.otsu(scores))
    assert not masks[19].any() and masks[:19].flatten(1).any(dim=1).all()


def test_given_masks_come_with_the_data_or_as_a_tensor(biased, data, caplog):
    found = object_masks(biased, data, "given")
    share = data.truth.hard.float().unflatten(2, (12, 8)).unflatten(1, (12, 8)).mean(dim=(2, 4))
    assert found.on_patches((12, 12)).equal(share >= 0.5) and found.hard.equal(data.truth.hard)
    assert found.confidence.eq(1).all() and found.kind == "given"
    truth = data.truth.hard.clone()
    truth[2] = False
    found = object_masks(biased, data, truth)
    assert found.confidence.tolist() == [1, 1, 0, 1, 1, 1]
    assert "1 of 6 masks are empty" in found.notes[0] and found.notes[0] in caplog.text


def test_another_network_is_compared_with_given_masks(biased, data):
    found = object_masks(biased, data, "builtin:critters-vit")
    truth = data.truth.on_patches((12, 12))
    assert found.kind == "network" and "critters-vit" in found.source and not found.notes
    assert torch.equal(found.overlap, iou(found.hard, truth)) and found.overlap.mean() > 0.3
    assert found.confidence.gt(0.5).all() and found.hard.shape == (6, 12, 12)
    truth = data.truth.hard.int()
    truth[3:] = IGNORE  # of images without a mask, the overlap is not known
    some = object_masks(biased, replace(data, truth=Masks.given(truth)), "builtin:critters-vit")
    assert some.overlap[3:].isnan().all() and not some.overlap[:3].isnan().any()
    half = partial(object_masks, biased, source="builtin:critters-vit", method="rollout")
    assert "rollout" in find_masks(biased, data, half).masks.source


def test_the_models_own_maps_come_with_a_warning(biased, data, caplog):
    for source in ("own", biased, "builtin:critters-biased"):  # the same weights, read again
        found = object_masks(biased, data.images, source)
        assert found.kind == "own" and "marks the background" in found.notes[0]
    assert "marks the background" in caplog.text and found.overlap is None


def test_the_same_weights_under_another_name_are_the_model_itself(toy):
    images, trained = scenes(4).images, copy.deepcopy(toy.module)
    with torch.no_grad():
        next(trained.parameters()).add_(0.1)
    again = wrapped(copy.deepcopy(toy.module), name="another name")
    kinds = [
        object_masks(toy, images, network, method="rollout").kind
        for network in (wrapped(toy.module), again, wrapped(trained))
    ]
    assert kinds == ["own", "own", "network"]


def test_discovered_masks_are_a_source_too(biased, data):
    found = object_masks(biased, data, "discovered", steps=2, grid=8)
    assert found.kind == "discovered" and torch.equal(found.overlap, iou(found, data.truth).cpu())
    expected = sc.background.discover_masks(biased, data.images, steps=2, grid=8)
    assert torch.equal(found.hard, expected.hard)


@pytest.mark.parametrize("side", [16, 32])
def test_a_network_gets_the_images_in_its_own_frame(toy, side, monkeypatch):
    module = timm.models.VisionTransformer(
        img_size=side, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=2
    ).eval()
    network = sc.wrap(module, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    images, seen, real = 1.5 * scenes(3).images, [], objects.attribute
    monkeypatch.setattr(objects, "attribute", lambda m, x, **o: seen.append(x) or real(m, x, **o))
    found = network_maps(toy, network, images, (2, 4), "rollout", {})
    raw = (0.5 + 0.5 * images).clamp(0, 1)
    smooth = {"mode": "bilinear", "antialias": True, "align_corners": False}
    raw = raw if side == 32 else F.interpolate(raw, (16, 16), **smooth)
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    assert_close(seen[0], (raw - mean) / std)
    maps = sc.attribute(network, seen[0], method="rollout").maps
    assert_close(found["maps"], F.interpolate(maps[:, None], (2, 4), **smooth)[:, 0])
    assert_close(found["confidence"], network(seen[0]).softmax(dim=1).amax(dim=1))


def test_maps_are_kept_by_content(biased, data, tmp_path, monkeypatch):
    def find(**options):
        return object_masks(biased, data, "builtin:critters-vit", cache=tmp_path, **options)

    first = find()
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr("seecause.background.objects.attribute", None)  # computing would fail
    again = find()
    assert again.hard.equal(first.hard) and again.confidence.equal(first.confidence)
    monkeypatch.undo()
    content = file.read_bytes()
    file.write_bytes(content[:50])
    assert find().hard.equal(first.hard) and file.read_bytes() == content
    for changes in ({"score": "prob"}, {"method": "rollout"}):
        find(**changes)
    object_masks(biased, data.images + 0.1, "builtin:critters-vit", cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_only_maps_that_are_not_kept_are_computed(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "TOGETHER", 2)
    network, images, done = wrapped(plain_vit(1).eval()), scenes(5).images, []
    options = {"cache": tmp_path, "method": "rollout"}
    first = object_masks(toy, images, network, progress=done.append, **options)
    files = sorted(tmp_path.iterdir())
    assert done == [2, 2, 1] and len(files) == 3
    files[1].unlink()
    again = object_masks(toy, images, network, **options)
    assert again.hard.equal(first.hard) and sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize(
    ("known", "wanted", "strange"),
    [
        (("dark", "other"), CLASSES, False),  # one that both know
        (("this", "that"), CLASSES, True),
        ((), CLASSES, False),  # without names nothing can be compared
    ],
)
def test_a_network_that_knows_no_class_of_the_model_comes_with_a_note(known, wanted, strange):
    model, network = wrapped(plain_vit().eval()), wrapped(plain_vit(1).eval())
    model.classes, network.classes = wanted, known
    notes = object_masks(model, scenes(3).images, network, method="rollout").notes
    assert bool(notes) is strange and (not notes or "knows none of the 2 classes" in notes[0])


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (None, {}, r"has none.*another network"),
        (torch.ones(6, 40, 40), {}, "one for each image"),
        (torch.ones(2, 96, 96), {}, "one for each image"),
        ("given", {"score": "prob"}, "no method"),
        ("given", {"method": "rollout"}, "no method"),
        ("own", {"nonsense": 1}, "option 'nonsense' of caap"),
        ("own", {"weights": "elsewhere.safetensors"}, "loaded by name"),
        ("discovered", {"nonsense": 1}, "option 'nonsense' of the mask search"),
        ("nonsense", {}, "'nonsense' not found"),
    ],
)
def test_bad_sources_are_refused(biased, data, source, options, message):
    with pytest.raises(sc.SeecauseError, match=message):
        object_masks(biased, LabelledImages(data.images), source, **options)
