"""A dataset is what follows the protocol, wherever its class comes from."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import seecause as sc
from seecause.data import registry
from seecause.data.dataset import part_of_train
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
    monkeypatch.setattr(registry._REGISTRY, "entries", {})


def test_capabilities_are_seen_in_the_samples_where_a_dataset_does_not_say():
    assert sc.data.capabilities(Squares()) == {"labels", "masks"}  # sample 0 is broken
    assert sc.data.capabilities(Squares(masks=False)) == {"labels"}


def test_our_datasets_say_what_they_have_without_reading(tmp_path):
    photo(tmp_path / "images" / "Abyssinian_1.jpg")
    lines(tmp_path / "annotations" / "test.txt", "Abyssinian_1 1 1 1")
    pets = sc.data.open(f"pets:{tmp_path}")
    assert sc.data.capabilities(pets) == {"labels", "masks"}  # the trimap is not there yet
    grey(tmp_path / "annotations" / "trimaps" / "Abyssinian_1.png", np.ones((4, 6)))
    before = sc.data.sample_digests(pets)
    photo(tmp_path / "images" / "Abyssinian_1.jpg", seed=1)
    assert sc.data.sample_digests(pets) != before and sc.data.sample_ids(pets) == ("Abyssinian_1",)
    critters = sc.data.open("critters:clean:test", limit=3)
    assert {"counterfactuals", "masks"} < sc.data.capabilities(critters)
    assert sc.data.capabilities(critters) <= set(sc.data.CAPABILITIES)
    assert len(set(sc.data.sample_digests(critters))) == 3


def test_ids_labels_and_digests_of_a_dataset_that_only_has_samples():
    data = Squares()
    assert sc.data.sample_ids(data)[1] == "squares:all:1"
    digests = sc.data.sample_digests(data)
    assert len(set(digests)) == 6  # also of the one that cannot be read
    assert sc.data.sample_labels(sc.data.Subset("some", data, (1, 2))) == (1, 0)


def test_a_subset_keeps_what_its_dataset_knows():
    data = sc.data.open("critters:clean:test", limit=4)
    subset = sc.data.Subset("two", data, (3, 1))
    assert torch.equal(subset[0].image, data[3].image) and len(subset) == 2
    assert sc.data.sample_digests(subset) == [*data.digests(3, 4), *data.digests(1, 2)]
    assert subset.ids == (sc.data.sample_ids(data)[3], sc.data.sample_ids(data)[1])
    assert subset.fingerprint not in (
        data.fingerprint,
        sc.data.Subset("two", data, (1, 3)).fingerprint,
    )
    latents = subset.latents(0, 2)
    assert sc.data.capabilities(subset) == sc.data.capabilities(data)
    assert torch.equal(latents.centre, data.latents(0, 4).centre[[3, 1]])
    rows = part_of_train(range(20), [0] * 20, "val")
    assert rows == [9, 19]


def test_a_slice_of_a_dataset_is_a_dataset(tmp_path):
    for name in ("a", "b", "c"):
        photo(tmp_path / "one" / f"{name}.png")
        photo(tmp_path / "two" / f"{name}.png", seed=9)
    critters = sc.data.open("critters:clean:test", limit=4)
    pairs = sc.data.open(f"pairs:{tmp_path}/one:{tmp_path}/two")
    for data in (critters, sc.data.open(f"folder:{tmp_path}/one"), pairs):
        part = data[1:3]
        assert len(part) == 2 and len(part[:1]) == 1
        assert part.ids == tuple(sc.data.sample_ids(data)[1:3])
        assert torch.equal(part[1].image, data[2].image)
        assert len(data[:0]) == 0 and data[::-1].ids == sc.data.sample_ids(data)[::-1]
    assert torch.equal(pairs[2:].other(0).image, pairs.other(2).image)
    backwards = critters[::-1]  # with the same counterfactuals
    assert torch.equal(backwards.latents(0, 2).centre, critters.latents(2, 4).centre.flip(0))
    assert len(backwards.latents(1, 1)) == 0


def test_an_unknown_dataset_is_answered_by_what_was_meant():
    with pytest.raises(UnknownName, match=r"Did you mean folder.*folder:PATH"):
        sc.data.open("foldr:/photos")
    with pytest.raises(UnknownName, match=r"celeba.*waterbirds"):
        sc.data.open("/nowhere/at/all")


def test_a_registered_dataset_opens_by_name(registered):
    sc.data.register("squares", lambda rest: Squares(f"squares:{rest}"), form="KIND")
    assert sc.data.open("squares:all").name == "squares:all"
    subset = sc.data.open("squares:all", limit=2)  # the opener knows no limit
    assert len(subset) == 2 and subset.ids == ("squares:all:0", "squares:all:3")
    assert "squares:KIND" in sc.data.datasets()
    with pytest.raises(UnknownName, match="squares:KIND"):
        sc.data.open("squares")
    with pytest.raises(BadOption, match="limit"):
        sc.data.open("squares:all", limit=0)


def test_an_opener_may_take_the_limit_itself(registered):
    sc.data.register("squares", lambda rest, *, limit=None: Squares(rest, count=limit or 6))
    assert len(sc.data.open("squares:all", limit=4)) == 4


@pytest.mark.parametrize("name", ["pets", "", "a:b", "a#b"])
def test_names_that_are_taken_or_cannot_be_typed_are_refused(registered, name):
    with pytest.raises(BadOption, match="a new word"):
        sc.data.register(name, Squares)


@pytest.mark.parametrize("limit", [0, 2.5, "3"])
def test_a_limit_is_a_whole_number(limit):
    with pytest.raises(BadOption, match="a whole number"):
        sc.data.open("critters:clean:test", limit=limit)


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadOption, match="give folder:"):
        sc.data.open(tmp_path)
    with pytest.raises(BadOption, match="samples is not set"):
        sc.data.to_batch(sc.load("builtin:critters-vit"), [])


def test_what_is_no_dataset_is_refused(registered):
    sc.data.register("odd", lambda rest: ["a picture"])
    with pytest.raises(BadOption, match="a dataset with `name`"):
        sc.data.open("odd:x")


def test_every_dataset_that_the_docs_name_is_known():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    specs = re.findall(r"^\| `([a-z0-9-]+):", page, re.M)
    assert len(specs) > 10
    for spec in specs:
        assert any(known.startswith(f"{spec}:") for known in sc.data.datasets()), spec
