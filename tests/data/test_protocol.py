"""A dataset is what follows the protocol, wherever its class comes from."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import seecause as sc
from seecause import critters
from seecause.data import dataset
from seecause.data.dataset import (
    part_of_train,
    path_and_split,
    sample_digests,
    sample_ids,
    sample_labels,
)
from seecause.errors import BadImage, BadOption, UnknownName
from tests.files import grey, lines, photo


class Squares:
    """A bright square on noise, with its mask; nothing of ours but `Sample`."""

    classes = ("left", "right")
    fingerprint = "squares-1"

    def __init__(self, name: str = "squares:all", count: int = 6, masks: bool = True):
        self.name, self.count, self.masks = name, count, masks

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> sc.data.Sample:
        if not 0 <= index < self.count:
            raise IndexError(index)
        if index == 0:
            raise BadImage("square 0", "cannot be read", "take another")
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index))
        mask = torch.zeros(8, 8, dtype=torch.bool)
        mask[2:4, 4 * (index % 2) : 4 * (index % 2) + 4] = True
        return sc.data.Sample(image, index % 2, mask=mask if self.masks else None, id=f"s{index}")


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(dataset._REGISTRY, "entries", {})
    monkeypatch.setattr(dataset, "_FORMS", dict(dataset._FORMS))


def test_critters_are_the_worlds_own_samples():
    data = sc.data.open_data("critters:certified:val", limit=5)
    expected = list(critters.samples("certified", "val", 5))
    assert len(data) == 5 and data.classes == tuple(critters.CLASSES)
    assert torch.equal(data[3].image, expected[3].image) and data[-1].id == expected[-1].id
    assert [sample.label for sample in data] == [sample.label for sample in expected]
    assert sc.data.open_data("critters:clean").name == "critters:clean:test"
    specs = [("clean", 3), ("clean", 4), ("clean:val", 3), ("certified", 3)]
    opened = [sc.data.open_data(f"critters:{spec}", limit=limit) for spec, limit in specs]
    assert len({data.fingerprint for data in opened}) == 4


def test_capabilities_are_seen_in_the_samples_where_a_dataset_does_not_say(tmp_path):
    assert sc.data.capabilities(Squares()) == {"masks"}  # sample 0 is broken
    assert sc.data.capabilities(Squares(masks=False)) == frozenset()
    photo(tmp_path / "images" / "Abyssinian_1.jpg")
    lines(tmp_path / "annotations" / "test.txt", "Abyssinian_1 1 1 1")
    pets = sc.data.open_data(f"pets:{tmp_path}")
    assert sc.data.capabilities(pets) == {"masks"}  # the trimap is not there yet
    grey(tmp_path / "annotations" / "trimaps" / "Abyssinian_1.png", np.ones((4, 6)))
    before = sample_digests(pets)
    photo(tmp_path / "images" / "Abyssinian_1.jpg", seed=1)
    assert sample_digests(pets) != before and sample_ids(pets) == ("Abyssinian_1",)


def test_ids_labels_and_digests_of_a_dataset_that_only_has_samples():
    data = Squares()
    assert sample_ids(data)[1] == "squares:all:1"
    assert len(set(sample_digests(data))) == 6  # also of the one that cannot be read
    assert sample_labels(sc.data.Subset("some", data, (1, 2))) == (1, 0)


def test_a_subset_keeps_what_its_dataset_knows():
    data = sc.data.open_data("critters:clean:test", limit=4)
    subset = sc.data.Subset("two", data, (3, 1))
    assert torch.equal(subset[0].image, data[3].image) and len(subset) == 2
    assert sample_digests(subset) == [*data.digests(3, 4), *data.digests(1, 2)]
    assert subset.ids == (sample_ids(data)[3], sample_ids(data)[1])
    other = sc.data.Subset("two", data, (1, 3)).fingerprint
    assert subset.fingerprint not in (data.fingerprint, other)
    assert sc.data.capabilities(subset) == sc.data.capabilities(data)
    assert torch.equal(subset.latents(0, 2).centre, data.latents(0, 4).centre[[3, 1]])
    assert len(subset.latents(1, 1)) == 0


def test_a_split_follows_the_last_colon(tmp_path):
    splits = ("train", "test")
    assert path_and_split("a:b:train", splits) == (Path("a:b"), "train")
    assert path_and_split("a", splits) == (Path("a"), "test")
    assert path_and_split("a:b", splits, "train") == (Path("a:b"), "train")
    (tmp_path / "x:y").mkdir()
    assert path_and_split(f"{tmp_path}/x:y", splits) == (tmp_path / "x:y", "test")
    with pytest.raises(UnknownName, match=r"'trian' not found. Did you mean train"):
        path_and_split(f"{tmp_path}/x:y:trian", splits)


def test_every_tenth_of_each_class_is_kept_back():
    items, classes = range(35), [0] * 5 + [1] * 10 + [0] * 20
    val = part_of_train(items, classes, "val")
    assert val == [14, 19, 29]  # the tenth of class 1, the tenth and twentieth of class 0
    whole = part_of_train(items, classes, "trainval")
    assert sorted([*part_of_train(items, classes, "train"), *val]) == whole == list(items)


def test_a_registered_dataset_opens_by_name(registered):
    sc.data.register("squares", lambda rest: Squares(f"squares:{rest}"), form="KIND")
    assert sc.data.open_data("squares:all").name == "squares:all"
    subset = sc.data.open_data("squares:all", limit=2)  # the opener knows no limit
    assert len(subset) == 2 and subset.ids == ("squares:all:0", "squares:all:3")
    assert "squares:KIND" in sc.data.datasets()
    with pytest.raises(UnknownName, match="squares:KIND"):
        sc.data.open_data("squares")
    sc.data.register("more", lambda rest, *, limit=None: Squares(rest, count=limit or 6))
    assert len(sc.data.open_data("more:all", limit=4)) == 4
    for name in ("pets", "", "a:b", "a#b"):
        with pytest.raises(BadOption, match="a new word"):
            sc.data.register(name, Squares)


def test_what_is_not_there_is_refused(tmp_path):
    for limit in (0, 2.5, "3"):
        with pytest.raises(BadOption, match="a whole number, at least 1"):
            sc.data.open_data("critters:clean:test", limit=limit)
    with pytest.raises(BadOption, match="give folder:"):
        sc.data.open_data(tmp_path)
    for spec in ("pets", "cats:here", "critters:", "/nowhere/at/all"):
        with pytest.raises(UnknownName, match="folder:PATH"):
            sc.data.open_data(spec)
    for spec, known in (("critters:certifed", "certified"), ("critters:clean:trian", "train")):
        with pytest.raises(UnknownName, match=known):
            sc.data.open_data(spec)


def test_every_dataset_that_the_docs_name_is_known():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    specs = re.findall(r"^\| `([a-z0-9-]+):", page, re.M)
    assert len(specs) > 10
    for spec in specs:
        assert any(known.startswith(f"{spec}:") for known in sc.data.datasets()), spec
