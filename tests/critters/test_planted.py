"""critters-planted: the view is the network, and background heads are the only way for the
background."""

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause import critters
from seecause.critters.planted import PlantedViT, vivid_patches
from seecause.critters.rendering import Do, render
from seecause.critters.world import BACKGROUNDS, PARTS
from tests.tiny import scramble

HALF = (0.5, 0.5, 0.5)
ROUTERS = [
    {"block": 1, "background": [0], "object": [2]},
    {"block": 2, "background": [1, 3], "object": [0]},
]
SHAPE = {"img_size": 48, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
SMALL = {**SHAPE, "num_classes": 8, "mean": HALF, "std": HALF, "routers": ROUTERS}


@pytest.fixture(scope="module")
def module():
    return scramble(PlantedViT(**SMALL)).double().eval()


@pytest.fixture(scope="module")
def model(module):
    return sc.wrap(module, mean=HALF, std=HALF, size=48, classes=critters.CLASSES)


def drawn(count: int = 4, **do) -> torch.Tensor:
    image = render(critters.draw("matted", "test", count), size=48, do=Do(**do)).image
    return ((image - 0.5) / 0.5).double()


def test_the_view_is_the_network_on_images_too(module, model):
    """`wrap` verified it on noise, where every patch is vivid; here regions differ, and one image
    has no creature."""
    images = torch.cat([drawn(), drawn(1, without=PARTS)])
    assert not module.kinds(images[-1:]).eq(1).any()
    with torch.no_grad():
        assert_close(model(images), module(images), atol=1e-10, rtol=0)
        assert_close(
            model.to(torch.float32)(images.float()), module(images.float()), atol=1e-4, rtol=1e-4
        )
        model.to(torch.float64)


@torch.no_grad()
def test_without_background_heads_every_background_gives_the_same_answer(model, module):
    gates = torch.ones(3, 4, dtype=torch.float64)
    for (block, head), role in module.roles.items():
        gates[block, head] = role != "background"
    plain = [model(drawn(background=code)) for code in range(len(BACKGROUNDS))]
    with model.gated(gates):
        blind = [model(drawn(background=code)) for code in range(len(BACKGROUNDS))]
    for other in range(1, len(BACKGROUNDS)):
        assert (plain[other] - plain[0]).abs().max() > 1e-2
        assert_close(blind[other], blind[0], atol=1e-10, rtol=0)
    with model.gated(gates):
        assert (
            model(drawn().roll(1, dims=0)) - model(drawn())
        ).abs().max() > 1e-2  # it still sees creatures


@torch.no_grad()
def test_without_object_heads_the_colours_of_the_creature_do_not_matter(model, module):
    """Its outline still does: background patches know where they end."""
    only_background = torch.ones(3, 4, dtype=torch.float64)
    for (block, head), role in module.roles.items():
        only_background[block, head] = role != "object"
    latents = critters.draw("matted", "test", 2)
    repainted = latents.replace(coat=(latents.coat + 1) % 3)
    one, other = (
        ((render(scene, size=48).image - 0.5) / 0.5).double() for scene in (latents, repainted)
    )
    with model.gated(only_background):
        assert_close(model(one), model(other), atol=1e-10, rtol=0)
    assert (model(one) - model(other)).abs().max() > 1e-3


@torch.no_grad()
def test_masks_say_who_sees_whom(module):
    kinds = torch.tensor([[0, 1, 2, 2]])
    local, router = module.visible(kinds, 0)[0, 0], module.visible(kinds, 2)[0]
    assert local.int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert (router[:, 1:] == torch.eye(4, dtype=torch.bool)[1:]).all()
    assert router[:, 0].int().tolist() == [
        [0, 1, 0, 0],
        [0, 0, 1, 1],
        [1, 0, 0, 0],
        [0, 0, 1, 1],
    ]  # object, background, itself, background
    assert module.visible(torch.tensor([[0, 1, 1, 1]]), 2)[0, 1, 0].int().tolist() == [
        1,
        0,
        0,
        0,
    ]  # nothing to read: itself


def test_regions_are_read_from_pixels_exactly():
    drawn = render(critters.draw("matted", "test", 64))
    touched = torch.nn.functional.max_pool2d(drawn.mask[:, None].float(), 8).flatten(1) > 0
    for image in (drawn.image, (drawn.image * 255).round() / 255):
        assert torch.equal(vivid_patches(image, (8, 8)), touched)
    mean = drawn.image.mean(dim=(2, 3), keepdim=True)
    assert not vivid_patches(torch.where(drawn.mask[:, None], mean, drawn.image), (8, 8)).any()


def test_a_mat_leaves_no_patch_with_both():
    latents = critters.draw("matted", "test", 8)
    here, there = (render(latents, do=Do(background=code)) for code in (0, 3))
    touched = (
        (torch.nn.functional.max_pool2d(here.mask[:, None].float(), 8) > 0)
        .repeat_interleave(8, 2)
        .repeat_interleave(8, 3)
        .expand_as(here.image)
    )
    assert torch.equal(here.image[touched], there.image[touched])
    plain = render(latents.replace(mat=torch.zeros_like(latents.mat)))
    assert torch.equal(plain.image[:, :, here.mask[0]][0], here.image[:, :, here.mask[0]][0])
    assert torch.equal(render(latents).image[~touched], plain.image[~touched])
