"""Animals on painted textures: the shortcut is in the training set, and in nothing else."""

from __future__ import annotations

import pytest
import torch

import seecause as sc
from tests.painted import drawn_pets
from tools import painted_pets
from tools.painted_pets import SPLITS, paint, painted_split, read_cutouts


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    return drawn_pets(tmp_path_factory.mktemp("pets"))


def test_splits_share_no_photo_and_validation_has_every_breed(pets):
    names = {split: read_cutouts(pets, split, size=48)[0] for split in SPLITS}
    assert [len(names[split]) for split in SPLITS] == [24, 8, 11]  # one trimap has no animal
    assert len(set().union(*names.values())) == 43 and "breed3_test2" not in names["test"]
    assert {name.partition("_")[0] for name in names["val"]} == {f"breed{b}" for b in range(4)}


def test_training_has_the_shortcut_and_the_test_pairs_have_not(pets):
    train, others = (
        painted_split(pets, "train", size=48, unusual=0.25, seed=seed) for seed in (1, 2)
    )
    for species in range(2):
        assert sum(place != label for label, place in train.groups if label == species) == 3
    assert train.groups != others.groups
    test = painted_split(pets, "test", size=48)
    boards, leaves = (test.images[rows] for rows in (slice(0, 11), slice(11, 22)))
    masks = test.masks[:11]
    assert torch.equal(masks, test.masks[11:])
    near = torch.nn.functional.avg_pool2d(masks[:, None].float(), 5, stride=1, padding=2)
    inside, change = near[:, 0] == 1, (boards.int() - leaves.int()).abs().amax(dim=1)
    assert inside.any() and change[inside].max() <= 1  # the same animal
    assert (change > 0)[~masks].float().mean() > 0.9  # elsewhere
    names, _, rgba = read_cutouts(pets, "test", size=48)
    key = f"0 test {names[3]}"  # an image does not depend on its neighbours
    images, _ = paint(rgba, torch.tensor([3]), torch.tensor([1]), [key], size=48)
    assert torch.equal(images[0], leaves[3])
    area = test.masks.float().mean(dim=(1, 2))
    assert area.min() > 0.12 and area.max() < 0.5  # a disc or square of 50 to 70 % of the side


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
