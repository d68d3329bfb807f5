"""Samples in a model's frame, labels among its classes, and draws from correct predictions."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.testing import assert_close

import seecause as sc
from seecause.data import IGNORE, Sample, open_data, to_batch
from seecause.data.batch import (
    _InFrame,
    class_places,
    framed_batch,
    read_samples,
    true_positives,
)
from seecause.data.imagenet import imagenet_wnids
from seecause.errors import BadImage, BadInput, BadOption, UnknownName
from seecause.models.base import ImageModel
from tests.helpers import view
from tests.tiny import tiny


@pytest.fixture
def model() -> ImageModel:
    return view(tiny("timm_deit3", torch.float32), check=False)  # 32 x 48 pixels


def test_images_of_the_models_size_keep_every_pixel(model):
    image, mask = torch.rand(3, 32, 48), torch.rand(32, 48) > 0.5
    batch = to_batch(model, [Sample(image, 3, mask=mask)])
    assert torch.equal(batch.images, model.preprocess.normalise(image[None]))
    assert torch.equal(batch.masks[0], mask.int()) and batch.labels.tolist() == [3]


def test_photos_and_masks_are_cut_alike(model, tmp_path):
    """The object is where the image is white; after resizing both, it still is."""
    pixels = np.zeros((90, 200, 3), np.uint8)
    pixels[20:70, 60:130] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    read = open_data(f"folder:{tmp_path}")[0]
    ids = torch.from_numpy((pixels[..., 0] == 255).astype(np.uint8))
    images, labels, masks = to_batch(model, [Sample(read.image, None, mask=ids)])
    assert images.shape == (1, 3, 32, 48) and labels is None
    assert_close(images, model.preprocess(Image.fromarray(pixels)), atol=0, rtol=0)
    white = model.preprocess.raw(images)[0, 0] > 0.5
    assert 0.2 < white.float().mean() < 0.8 and (white != masks[0].bool()).float().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_images_that_travel_in_8_bits_are_those_of_the_samples(model, tmp_path, dtype):
    draw = np.random.default_rng(0)
    for name, size in (("a", (90, 200)), ("b", (32, 48)), ("c", (64, 64))):
        pixels = draw.integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    model.module.to(dtype)
    data = open_data(f"folder:{tmp_path}")
    read = [sample for (sample,) in read_samples(model.preprocess, data, range(3))]
    assert {sample.image.dtype for sample in read} == {torch.uint8}
    found, expected = framed_batch(model, read).images, to_batch(model, data).images
    assert found.dtype == dtype and found.equal(expected)


def test_a_batch_may_mix_images_of_8_bits_with_others(model):
    fine, coarse = torch.rand(3, 32, 48), torch.randint(256, (3, 32, 48)) / 255
    data = [Sample(image, 0) for image in (fine, coarse)]
    read = [
        sample for (sample,) in map(_InFrame(model.preprocess, data, range(2), False), range(2))
    ]
    assert [sample.image.dtype for sample in read] == [torch.float32, torch.uint8]
    assert framed_batch(model, read).images.equal(to_batch(model, data).images)


def test_samples_without_masks_or_labels(model):
    plain = Sample(torch.rand(3, 32, 48), None, id="x")
    masked = Sample(torch.rand(3, 32, 48), None, mask=torch.ones(32, 48, dtype=torch.bool))
    assert to_batch(model, [plain]).masks is None
    assert (to_batch(model, [plain, masked]).masks[0] == IGNORE).all()
    with pytest.raises(BadOption, match="x without a label"):
        to_batch(model, [plain, Sample(torch.rand(3, 32, 48), 1)])
    with pytest.raises(BadOption, match="samples is not set"):
        to_batch(model, [])


def classifier(count: int, classes=None) -> ImageModel:
    native = timm.create_model("test_vit", num_classes=count).eval()
    return sc.wrap(native, mean=(0.5,) * 3, std=(0.5,) * 3, classes=classes)


def test_labels_are_matched_to_classes_by_name(caplog):
    nine = SimpleNamespace(name="imagenet9:bg_challenge:original", classes=tuple("abcdefghi"))
    assert class_places(classifier(9, list("ihgfedcba")), nine) == (8, 7, 6, 5, 4, 3, 2, 1, 0)
    with pytest.raises(UnknownName, match="'a' not found"):
        class_places(classifier(9, list("jklmnopqi")), nine)  # one known name among unknown ones
    assert not caplog.text
    assert class_places(classifier(9, list("jklmnopqr")), nine) == tuple(range(9))
    assert "matched to those of" in caplog.text
    with pytest.raises(BadOption, match="9 classes"):
        class_places(classifier(8), nine)


def test_imagenet_ids_are_names_of_imagenets_classes():
    folder = SimpleNamespace(name="folder:x", classes=("n02123045", "n01440764"))
    names = list(sc.load("timm:vit_tiny_patch16_224", weights="random").classes)
    assert class_places(classifier(1000, names), folder) == (281, 0)
    assert imagenet_wnids()[281] == "n02123045"
    with pytest.raises(UnknownName, match="n02123045"):
        class_places(classifier(3, list("abc")), folder)


LABELS = torch.tensor([0] * 90 + [1] * 10)
RIGHT = torch.ones(100).bool().index_fill(0, torch.tensor([0, 1, 95]), False)


def test_a_share_of_correct_predictions_without_replacement():
    chosen = true_positives(RIGHT, LABELS)
    assert len(chosen) == len(set(chosen.tolist())) == 39 and RIGHT[chosen].all()  # 40 % of 97
    assert torch.equal(chosen, chosen.sort().values)
    assert torch.equal(chosen, true_positives(RIGHT, LABELS))
    assert not torch.equal(chosen, true_positives(RIGHT, LABELS, seed=1))
    assert len(true_positives(RIGHT, LABELS, cap=7)) == 7
    assert len(true_positives(RIGHT, LABELS, share=1.0, cap=None)) == 97


@pytest.mark.parametrize(("cap", "counts"), [(8, [4, 4]), (20, [16, 4]), (None, [35, 4])])
def test_strata_keep_a_large_class_from_crowding_out_the_others(cap, counts):
    """40 % of nine are all that class 1 gives."""
    chosen = true_positives(RIGHT, LABELS, cap=cap, stratified=True)
    assert LABELS[chosen].bincount().tolist() == counts


def test_draws_that_cannot_be_made_are_refused():
    for options in ({"share": 0.0}, {"share": 1.1}, {"cap": 0}, {"cap": 1, "stratified": True}):
        with pytest.raises(BadOption, match=r"share|cap"):
            true_positives(RIGHT, LABELS, **options)
    with pytest.raises(BadInput, match="none of the 100 images correctly"):
        true_positives(torch.zeros(100).bool(), LABELS)
    with pytest.raises(BadInput, match="none of the 100 images of class owl"):
        true_positives(LABELS == 0, LABELS, stratified=True, classes=["cat", "owl"])
    assert len(true_positives(LABELS == 0, LABELS)) == 36


@pytest.mark.real
def test_a_real_model_knows_the_real_photos():
    """Wrong labels, a wrong crop or swapped channels would all show as accuracy near chance."""
    if not (folder := os.environ.get("SEECAUSE_REAL")):
        pytest.skip("set SEECAUSE_REAL to the folder with real weights and photos")
    real = Path(folder)
    model = sc.load("timm:vit_tiny_patch16_224", weights=real / "vit_tiny_patch16_224.safetensors")
    for spec in (f"imagenet:{real / 'imagenet'}", f"pets:{real / 'pets'}"):
        images, labels, masks = to_batch(model, open_data(spec, limit=40))
        with torch.no_grad():
            assert (model(images).argmax(dim=-1) == labels).float().mean() > 0.6, spec
    assert set(masks.unique().tolist()) == {0, 1, IGNORE}
    centre = sc.attribute(model, images, method="center").maps
    assert sc.metrics.localization(centre, masks).numbers()["pointing"] > 0.6


@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(3, 96, 96, dtype=torch.uint8),
        torch.full((3, 96, 96), 255.0),
        torch.zeros(96, 96),
        torch.full((3, 96, 96), torch.nan),
    ],
)
def test_pixels_that_are_not_raw_are_refused(image):
    model = sc.load("builtin:critters-vit")
    with pytest.raises(BadImage, match="from 0 to 1"):
        to_batch(model, [Sample(image, 0, id="a")])
