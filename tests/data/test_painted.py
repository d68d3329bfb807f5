"""Animals on painted textures: the shortcut is in the training set, and in nothing else."""

from __future__ import annotations

import pytest
import torch

import seecause as sc
from seecause.data import painted
from seecause.data.painted import SPLITS, open_painted, paint, read_cutouts
from seecause.errors import DataMissing
from tests.painted import drawn_pets


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    return drawn_pets(tmp_path_factory.mktemp("pets"))


def test_splits_share_no_photo_and_validation_has_every_breed(pets):
    names = {split: read_cutouts(pets, split, size=48)[0] for split in SPLITS}
    assert [len(names[split]) for split in SPLITS] == [24, 8, 11]  # one trimap has no animal
    assert len(set().union(*names.values())) == 43 and "breed3_test2" not in names["test"]
    assert {name.partition("_")[0] for name in names["val"]} == {f"breed{b}" for b in range(4)}


def test_training_has_the_shortcut_and_the_test_pairs_have_not(pets, monkeypatch):
    monkeypatch.setattr(painted, "UNUSUAL", 0.25)
    train, others = (open_painted(f"{pets}:train", size=48, seed=seed) for seed in (1, 2))
    for species in range(2):
        assert sum(place != label for label, place in train.groups if label == species) == 3
    assert train.groups != others.groups
    test = open_painted(f"{pets}:test", size=48)
    boards, leaves = (test.images[rows] for rows in (slice(0, 11), slice(11, 22)))
    masks = test.masks[:11]
    assert torch.equal(masks, test.masks[11:])
    near = torch.nn.functional.avg_pool2d(masks[:, None].float(), 5, stride=1, padding=2)
    inside, change = near[:, 0] == 1, (boards.int() - leaves.int()).abs().amax(dim=1)
    assert inside.any() and change[inside].max() <= 1  # the same animal
    assert (change > 0)[~masks].float().mean() > 0.9  # elsewhere


def test_an_image_does_not_depend_on_its_neighbours_and_its_animal_is_whole(pets):
    test, (names, _, rgba) = (
        open_painted(f"{pets}:test", size=48),
        read_cutouts(pets, "test", size=48),
    )
    key = f"0 test {names[3]}"
    images, _ = paint(rgba, torch.tensor([3]), torch.tensor([1]), [key], size=48)
    assert torch.equal(images[0], test.images[len(names) + 3])
    area = test.masks.float().mean(dim=(1, 2))
    assert area.min() > 0.12 and area.max() < 0.5  # a disc or square of 50 to 70 % of the side
    sides = (test.masks[:, 0], test.masks[:, -1], test.masks[:, :, 0], test.masks[:, :, -1])
    assert torch.cat(sides, dim=1).float().mean() < 0.1


@pytest.mark.parametrize("line", ["../secret 1 1 1", "cat_1 1 3 1", "cat_1 1 1"])
def test_lists_that_lead_elsewhere_or_tell_nothing_are_refused(tmp_path, line):
    with pytest.raises(DataMissing, match=r"trainval\.txt"):
        sc.data.open_data(f"painted-pets:{tmp_path}:train")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "trainval.txt").write_text(f"# a comment\n{line}\n")
    with pytest.raises(DataMissing, match=r"trainval\.txt"):
        sc.data.open_data(f"painted-pets:{tmp_path}:train")


def test_leaves_are_darker():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(64, sum(painted.NUMBERS), generator=generator)
    boards, leaves = (painted.texture(i, numbers, 32).mean() for i in range(2))
    assert 0.45 < boards < 0.57 and 0.3 < leaves < 0.4


def test_a_split_is_a_dataset_with_masks_and_groups(pets):
    data = sc.data.open(f"painted-pets:{pets}:test", limit=4)
    assert len(data) == 8 and sc.data.capabilities(data) == {"labels", "groups", "masks"}
    first, again = data[0], data[4]
    assert first.image.shape == (3, 224, 224) and first.mask.any()
    assert (first.group, again.group) == ((0, 0), (0, 1)) and torch.equal(first.mask, again.mask)
    assert data.ids[4] == data.ids[0].replace("boards", "leaves")
    train = sc.data.open(f"painted-pets:{pets}:train")
    assert len(train) == 24 and train.fingerprint != data.fingerprint
