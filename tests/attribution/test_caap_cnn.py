"""CAAP of convolutional networks: the batched sweep equals one native forward per cell, and the
methods that work on any image work here."""

import pytest
import torch

import seecause as sc
from seecause.engine.chunks import budget
from seecause.errors import BadOption, UnknownName
from tests.families.conv import CONV_FAMILIES, SIZE, tiny_conv
from tests.helpers import hooks, near, view
from tests.reference.caap import box
from tests.reference.caap_cnn import caap_cnn
from tests.tiny import pictures

GRID = (3, 5)


def overlapping(features, radius=1):
    """For every cell, the features whose square overlaps the cell or a neighbour of it, counted in
    pixels."""
    rows, columns = GRID
    size = (SIZE[0] / features[0], SIZE[1] / features[1])
    sets = []
    for nearby in box(GRID, radius):
        pixels = {
            (y, x)
            for cell in nearby
            for y in range(cell // columns * 16, cell // columns * 16 + 16)
            for x in range(cell % columns * 16, cell % columns * 16 + 16)
        }
        sets.append(sorted({(int(y / size[0]), int(x / size[1])) for y, x in pixels}))
    assert len(sets) == rows * columns
    return sets


def slow(native, block, contexts, donors, sets):
    return torch.stack(
        [
            caap_cnn(native.forward, block, c[None], d[None], sets)
            for c, d in zip(contexts, donors, strict=True)
        ]
    )


@pytest.fixture(scope="module")
def small():
    native = tiny_conv("timm_resnet")
    return native, view(native, check=False), pictures(native)


@pytest.mark.parametrize("family", CONV_FAMILIES)
@torch.no_grad()
def test_fast_caap_equals_the_slow_twin(family):
    native = tiny_conv(family)
    model, images = view(native, check=False), pictures(native)
    block = native.blocks[[stage.name for stage in model.stages].index(model.cells)]
    blank = model.preprocess.normalise(torch.ones_like(images))
    expected = slow(native, block, blank, images, overlapping(GRID))
    assert (
        expected.amax(dim=1) - expected.amin(dim=1)
    ).max() > 1e-3  # the comparison means something
    near(
        sc.attribute(model, images, target=3, score="logit").maps.flatten(1),
        expected[..., 3],
        1e-10,
    )
    every = sc.attribute(model, images, classes="all").class_maps
    near(every.flatten(1, 2), expected.softmax(dim=-1), 1e-10)
    assert hooks(native.module) == 0


@pytest.mark.parametrize("own", [False, True])  # a blank for each image
@torch.no_grad()
def test_deletion_is_the_drop_when_the_blank_is_put_in(small, own):
    native, model, images = small
    blank = images.flip(0) if own else model.preprocess.normalise(torch.zeros_like(images))
    gone = slow(native, native.module.layer3, images, blank, overlapping(GRID))
    options = {"score": "logprob", "direction": "delete", "blank": blank if own else "black"}
    got = sc.attribute(model, images, target=[1, 4], **options).maps.flatten(1)
    plain = native.forward(images).log_softmax(dim=-1)
    for i, target in enumerate((1, 4)):
        near(got[i], plain[i, target] - gone[i].log_softmax(dim=-1)[:, target], 1e-10)


@pytest.mark.parametrize(
    ("stage", "features"), [("layer1", (12, 20)), ("layer2", (6, 10)), ("layer4", (2, 3))]
)
@torch.no_grad()
def test_other_stages_take_the_features_that_overlap_the_cells(small, stage, features):
    native, model, images = small
    blank = model.preprocess.normalise(torch.ones_like(images))
    expected = slow(
        native, getattr(native.module, stage), blank, images, overlapping(features, radius=0)
    )
    found = sc.attribute(model, images, target=2, score="logit", stage=stage, select="none")
    near(found.maps.flatten(1), expected[..., 2], 1e-10)
    assert found.manifest["used"] == {"stage": stage} and found.maps.shape[1:] == GRID


def test_neither_the_batch_nor_the_memory_budget_changes_a_map(small):
    _, model, images = small
    together = sc.attribute(model, images, target=1).maps
    with budget(1):  # one image and one cell at a time
        near(sc.attribute(model, images, target=1).maps, together)
    near(sc.attribute(model, images[1:], target=1).maps, together[1:])


@torch.no_grad()
def test_simple_insertion_and_deletion_paste_pixels(small):
    native, model, images = small
    blank = model.preprocess.normalise(torch.ones_like(images))
    inserted, deleted = (
        sc.attribute(model, images, target=0, score="logit", method=f"simple-{name}").maps
        for name in ("insertion", "deletion")
    )
    below, above = blank.clone(), images.clone()
    below[:, :, :32, 16:64], above[:, :, :32, 16:64] = (
        images[:, :, :32, 16:64],
        blank[:, :, :32, 16:64],
    )  # around cell (0, 2)
    near(inserted[:, 0, 2], native.forward(below)[:, 0])
    near(deleted[:, 0, 2], (native.forward(images) - native.forward(above))[:, 0])


def test_options_of_transformers_and_unknown_stages_are_refused(small):
    _, model, images = small
    for option in ({"tail": "source"}, {"layers": (1, 2)}, {"approx": "e-caap"}):
        with pytest.raises(BadOption, match="stage"):
            sc.attribute(model, images, **option)
    with pytest.raises(UnknownName, match="layer4"):
        sc.attribute(model, images, stage="layer5")
