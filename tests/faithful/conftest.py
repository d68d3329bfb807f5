"""What tests of training share."""

import pytest

from tests.faithful.runs import tiny_backbone, tiny_config, tiny_images


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Images and a backbone, which tests read and do not change."""
    folder = tmp_path_factory.mktemp("steps")
    tiny_images(folder / "images")
    tiny_backbone(folder / "backbone")
    return folder


@pytest.fixture
def configure(place, tmp_path):
    """A configuration of one step of 4 images in an epoch, in a folder of its own."""
    return lambda **changes: tiny_config(
        place,
        **{"out": str(tmp_path / "run"), "epochs": 1, "limit": 4, "augment": "none", **changes},
    )
