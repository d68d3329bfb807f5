"""Pictures are cut as the libraries that trained the models cut them."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from seecause.errors import BadOption
from seecause.models.base import pixels_digest
from seecause.models.preprocess import Preprocess, from_timm, preprocess_from_processor

STATS = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}


def photo(height: int, width: int) -> Image.Image:
    ramp = np.random.default_rng(0).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(ramp).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("shape", [(96, 131), (77, 60), (64, 64)])
@pytest.mark.parametrize(
    "crop", [{"crop_pct": 0.9}, {"crop_pct": 0.875, "crop_mode": "squash"}, {"crop_pct": 1.0}]
)
def test_pixels_equal_those_of_timm(shape, crop):
    from timm.data import create_transform, resolve_data_config

    config = {
        "input_size": (3, 48, 48),
        "mean": (0.4, 0.5, 0.6),
        "std": (0.2, 0.3, 0.25),
        "interpolation": "bicubic",
        **crop,
    }
    expected = create_transform(**resolve_data_config(config))(photo(*shape))
    assert_close(from_timm(config)(photo(*shape))[0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("CLIP", {"size": {"shortest_edge": 56}, "crop_size": {"height": 48, "width": 48}}),
        ("ViT", {"size": {"height": 32, "width": 48}}),
        ("DeiT", {"size": {"height": 64, "width": 64}, "crop_size": {"height": 48, "width": 48}}),
        ("Siglip", {"size": {"height": 48, "width": 48}, "resample": 3}),
        ("ConvNext", {"size": {"shortest_edge": 48}, "crop_pct": 0.75}),
        ("ConvNext", {"size": {"shortest_edge": 48}}),
        ("ConvNext", {"size": {"shortest_edge": 384}}),
    ],
)
def test_pixels_are_those_of_transformers_up_to_its_resizing(kind, options):
    import transformers

    processor = getattr(transformers, f"{kind}ImageProcessor")(**options, **STATS)
    expected = processor(photo(96, 132), return_tensors="pt").pixel_values
    card = {**processor.to_dict(), **options}
    got = preprocess_from_processor(card)(photo(96, 132))
    assert got.shape == expected.shape
    assert (got - expected).abs().mean() < 0.02  # it resizes tensors, we resize pictures
    assert torch.corrcoef(torch.stack([got.flatten(), expected.flatten()]))[0, 1] > 0.999


@pytest.mark.parametrize("margin", range(8))
def test_the_middle_is_cut_out_as_torchvision_cuts_it(margin):
    """Odd margins are not divided alike by all: a pixel more or less."""
    from torchvision.transforms.functional import center_crop, to_tensor

    picture = photo(40, 40).resize((40 + margin, 40))
    frame = Preprocess(size=(40, 40), mean=(0.0,) * 3, std=(1.0,) * 3)
    assert_close(frame.pixels(picture), to_tensor(center_crop(picture, [40, 40])), atol=0, rtol=0)
    places = frame.points(torch.tensor([[20.0, 10.0]]), 40, 40 + margin)
    assert places.tolist() == [[20.0 - round(margin / 2), 10.0]]


@pytest.mark.parametrize(
    "config",
    [
        {"size": {"longest_edge": 64, "shortest_edge": 32}},
        {"size": {"shortest_edge": 64}, "rescale_factor": 1.0},
        {
            "size": {"height": 64, "width": 64},
            "crop_size": {"height": 48, "width": 32},
            "do_center_crop": True,
        },
    ],
)
def test_a_processor_that_cannot_be_followed_is_refused(config):
    with pytest.raises(BadOption):
        preprocess_from_processor({**config, **STATS})


def test_a_mask_is_cut_like_its_picture():
    steps = Preprocess(size=(32, 48), mean=(0.0,) * 3, std=(1.0,) * 3, crop=0.8, filter="nearest")
    ids = np.arange(90 * 70).reshape(90, 70) % 251
    picture = Image.fromarray(ids.astype(np.uint8)).convert("RGB")
    assert torch.equal(steps.mask(ids), (steps.pixels(picture)[0] * 255).round().int())


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0.5,) * 3, (0.2, 0.0, 0.2)),
        ((0.5,) * 3, (0.2, -0.1, 0.2)),
        ((0.5,) * 3, (0.2, float("nan"), 0.2)),
        ((0.5,) * 3, (float("inf"),) * 3),
        ((float("nan"),) * 3, (0.2,) * 3),
    ],
)
def test_statistics_that_cannot_normalise_are_refused(mean, std):
    with pytest.raises(BadOption, match="finite numbers"):
        Preprocess((8, 8), mean, std)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_pixels_have_one_name_in_any_packing_and_another_when_one_bit_differs(dtype):
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 8, 8), generator=draw).to(dtype)
    name = pixels_digest(images)
    strided = images.transpose(2, 3).contiguous().transpose(2, 3)
    assert name == pixels_digest(strided) == pixels_digest(images[7:], pixels_digest(images[:7]))
    names = {name, pixels_digest(images.flip(0)), pixels_digest(images.flip(3))}
    names |= {pixels_digest(images.view(40, 3, 4, 16)), pixels_digest(images.double() + 0.5)}
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[images.element_size()]
    for bit in (0, 5, 8 * images.element_size() - 1):
        other = images.clone()
        other.view(whole)[17, 1, 3, 4] ^= 1 << bit if bit < 7 else torch.iinfo(whole).min
        names.add(pixels_digest(other))
    assert len(names) == 8


def test_the_name_of_pixels_is_the_same_on_all_machines():
    images = torch.arange(3 * 3 * 64).view(3, 3, 8, 8).float()
    assert pixels_digest(images) == "1fcdc35e4af7c9f7"
    if torch.cuda.is_available():
        assert pixels_digest(images.cuda()) == "1fcdc35e4af7c9f7"
