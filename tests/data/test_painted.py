"""Animals on painted textures: the shortcut is in the training set, and in nothing else."""

import pytest
import torch

import seecause as sc
from tests.painted import drawn_pets
from tools import painted_pets
from tools.painted_pets import SPLITS, painted_split, read_cutouts


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    return drawn_pets(tmp_path_factory.mktemp("pets"))


def test_splits_share_no_photo_and_validation_has_every_breed(pets):
    names = {split: read_cutouts(pets, split, size=48)[0] for split in SPLITS}
    assert [len(names[split]) for split in SPLITS] == [24, 8, 11]  # one trimap has no animal
    assert len(set().union(*names.values())) == 43 and "breed3_test2" not in names["test"]
    assert {name.partition("_")[0] for name in names["val"]} == {f"breed{b}" for b in range(4)}


def test_what_is_written_is_a_folder_with_masks_and_groups(pets, tmp_path):
    painted_pets.main([str(pets), str(tmp_path), "--size", "48"])
    test = painted_split(pets, "test", size=48)
    data = sc.data.open_data(f"folder:{tmp_path}/test")
    assert data.classes == ("cat", "dog") and data.places == ("boards", "leaves")
    by_id = dict(zip(data.ids, data, strict=True))
    for place, (species, texture) in enumerate(test.groups):
        sample = by_id[f"{data.classes[species]}/{test.ids[place]}.png"]
        assert sample.group == (species, texture) and torch.equal(sample.mask, test.masks[place])
        assert torch.equal((255 * sample.image).round().byte(), test.images[place])
    assert len(sc.data.open_data(f"folder:{tmp_path}/train")) == 24
