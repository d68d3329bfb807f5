"""A toy model and the pictures that its heads are judged by."""

import pytest

import seecause as sc
from seecause import critters
from seecause.background.images import LabelledImages, critter_images
from tests.background.toys import toy


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sc.load(toy(tmp_path_factory.mktemp("toy")), dtype="float64")


@pytest.fixture(scope="module")
def cases(model) -> LabelledImages:
    return critter_images(
        model, critters.draw("balanced", "test", 64)[::11], name="critters:balanced:test"
    )
