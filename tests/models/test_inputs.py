"""One door for pictures: what people have is taken, and what is no picture is refused in words."""

import logging
import pickle
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from torch.utils.data import DataLoader

import seecause as sc
from seecause.errors import BadImage
from seecause.models.preprocess import as_images

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@cache
def view():
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    module = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5
    )
    return sc.wrap(module, **IMAGENET)


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


PHOTO = pixels(40, 50, 3)


def forms(folder):
    """One photo as everything people have."""
    Image.fromarray(PHOTO).save(folder / "photo.png")
    return {
        "PIL": Image.fromarray(PHOTO),
        "path": folder / "photo.png",
        "text": str(folder / "photo.png"),
        "bytes": (folder / "photo.png").read_bytes(),
        "HWC": PHOTO,
        "NHWC": PHOTO[None],
        "CHW tensor": torch.from_numpy(PHOTO).permute(2, 0, 1),
        "NCHW": np.moveaxis(PHOTO, 2, 0)[None],
        "whole numbers": PHOTO.astype(np.int64),
        "floating point": PHOTO / 255,
        "list": [Image.fromarray(PHOTO)],
        "normalised": view().preprocess(Image.fromarray(PHOTO)),
        "one of a loader": view().preprocess(Image.fromarray(PHOTO))[None],
        "of a processor": {"pixel_values": view().preprocess(Image.fromarray(PHOTO))},
    }


def test_one_photo_has_one_map_in_every_form(tmp_path):
    expected = sc.attribute(view(), view().preprocess(Image.fromarray(PHOTO)), 1).maps
    for form, picture in forms(tmp_path).items():
        got = sc.attribute(view(), picture, 1).maps
        assert_close(got, expected, msg=lambda text, form=form: f"{form}: {text}")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, "NoneType"),
        ([], "nothing"),
        ("missing.png", "no such file"),
        (b"no picture", "not an image"),
        (torch.zeros(2, 2), "expected"),
        (torch.zeros(1, 7, 32, 32), "normalised"),
        (np.zeros((5, 5, 9), np.uint8), "axes"),
        (np.full((8, 8, 3), 7.0), "0-1"),
        (np.full((8, 8, 3), -1), "0-255"),
        (np.array([["a"]]), "axes"),
        (torch.full((1, 3, 32, 32), 200.0), "0-255"),
        (torch.full((1, 3, 32, 32), float("nan")), "NaN"),
        ([torch.zeros(3, 32, 32), torch.zeros(3, 16, 16)], "one size"),
        ([object()], "object"),
    ],
)
def test_what_is_no_picture_is_refused_in_words(wrong, words):
    with pytest.raises(BadImage, match=words):
        as_images(view(), wrong)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda frame, x: frame.normalise(x), "twice"),
        (lambda frame, x: frame.raw(x), "at all"),
        (lambda frame, x: x, ""),
        (lambda frame, x: 0 * x, ""),
    ],
)
def test_odd_ranges_are_warned_of_once(spoil, words, caplog):
    model = view()
    model.forget()
    images = spoil(model.preprocess, model.preprocess(PHOTO))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            as_images(model, images)
    assert len(caplog.records) == bool(words)
    assert words in caplog.text


def test_gradients_pass_the_door():
    images = view().preprocess(PHOTO).requires_grad_()
    sc.run(view(), images)[0].sum().backward()
    assert images.grad is not None and images.grad.abs().sum() > 0


class Photos:
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.transform(Image.fromarray(np.roll(PHOTO, index, axis=0)))


@pytest.mark.parametrize("workers", [0, 2])
def test_preprocessing_composes_with_a_data_loader(workers):
    frame = view().preprocess
    assert pickle.loads(pickle.dumps(frame)) == frame
    loader = DataLoader(Photos(frame.transform), batch_size=2, num_workers=workers)
    batches = list(loader)
    assert [tuple(batch.shape) for batch in batches] == [(2, 3, 32, 32)] * 2
    assert len(sc.attribute(view(), batches[0], 1)) == 2
    (single,) = DataLoader(Photos(frame), batch_size=4)
    assert_close(as_images(view(), single), torch.cat(batches))
