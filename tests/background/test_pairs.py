"""Pairs: two versions of a picture that should be answered alike."""

from __future__ import annotations

import pytest
import torch

import seecause as sc
from seecause.background import pairs_of, transplant_pairs
from seecause.background.versions import origins
from tests.files import photo


@pytest.fixture
def folders(tmp_path):
    for version, first in (("with", 0), ("without", 50)):
        for seed, name in enumerate(("ant/a.png", "ant/b.png", "bee/c.png")):
            photo(tmp_path / version / name, size=(96, 96), seed=first + seed)
    return tmp_path


@pytest.fixture(scope="module")
def model():
    return sc.load("builtin:critters-vit")


def test_two_folders_of_equal_names_are_pairs(folders):
    data = sc.data.open_data(f"pairs:{folders}/with:{folders}/without")
    assert data.classes == ("ant", "bee") and data.labels == (0, 0, 1)
    assert data.ids == ("ant/a.png", "ant/b.png", "bee/c.png")
    for place in range(3):
        assert data.other(place).id == data[place].id
        assert not data.other(place).image.equal(data[place].image)
    assert sc.data.has_pairs(data) and "pairs" in sc.data.capabilities(data)
    before = data.fingerprint
    photo(folders / "without" / "ant" / "a.png", size=(90, 96), seed=99)
    other = sc.data.open_data(f"pairs:{folders}/with:{folders}/without")
    assert other.fingerprint != before


def test_a_limit_keeps_pairs_together(folders):
    data = sc.data.open_data(f"pairs:{folders}/with:{folders}/without", limit=2)
    assert [data.other(place).id for place in range(2)] == list(data.ids)


def test_folders_with_colons_in_their_names(folders):
    (folders / "with").rename(folders / "w:i:th")
    assert len(sc.data.open_data(f"pairs:{folders}/w:i:th:{folders}/without")) == 3


def test_bad_folders_are_refused_in_words(folders):
    with pytest.raises(sc.SeecauseError, match="one folder only"):
        sc.data.open_data(f"pairs:{folders}/with")
    with pytest.raises(sc.SeecauseError, match="nowhere: no such folder"):
        sc.data.open_data(f"pairs:{folders}/with:{folders}/nowhere")
    (folders / "without" / "ant" / "b.png").unlink()
    with pytest.raises(sc.SeecauseError, match="1 pictures have no second version here: ant"):
        sc.data.open_data(f"pairs:{folders}/with:{folders}/without")
    photo(folders / "without" / "ant" / "b.png")
    (folders / "without" / "ant" / "b.png").write_bytes(b"nonsense")
    data = sc.data.open_data(f"pairs:{folders}/with:{folders}/without")
    with pytest.raises(sc.SeecauseError, match="not an image"):
        data.other(1)


def test_a_function_of_a_picture_makes_the_second_version(model):
    data = sc.data.open_data("critters:clean:test", limit=3)
    pairs = pairs_of(model, sc.data.paired(data, lambda image: 1 - image))
    raw = model.preprocess.raw
    assert torch.allclose(raw(pairs.others), 1 - raw(pairs.images), atol=1e-6)
    assert pairs.labels is not None and pairs.labels.tolist() == [s.label for s in data]
    for change in (lambda image: image[:1], lambda image: 3, lambda image: image / 0):
        with pytest.raises(sc.SeecauseError, match="the changed version of"):
            pairs_of(model, sc.data.paired(data, change))


def test_a_subset_of_pairs_is_pairs(model):
    data = sc.data.paired(sc.data.open_data("critters:clean:test", limit=3), lambda x: x.flip(0))
    part = sc.data.Subset("part", data, (2, 0))
    assert part.other(0).image.equal(data.other(2).image)
    assert len(pairs_of(model, part)) == 2
    alone = sc.data.Subset("alone", data.data, (0,))
    with pytest.raises(sc.SeecauseError, match="a second version of each picture"):
        alone.other(0)


def test_critters_are_pairs_by_their_exact_swaps_and_others_are_not(model, folders):
    data = sc.data.open_data("critters:clean:test", limit=4)
    pairs = pairs_of(model, data)
    assert pairs.others.shape == pairs.images.shape and not pairs.flips(model).any()
    part = pairs.take(torch.tensor([2, 1]))
    assert part.ids == (pairs.ids[2], pairs.ids[1]) and part.others.equal(pairs.others[[2, 1]])
    pictures = sc.background.Pictures("plain", ("a",), pairs.images[:1])
    with pytest.raises(sc.SeecauseError, match="two versions of each picture"):
        pairs_of(model, pictures)


def test_transplants_are_pairs(model):
    pictures = sc.background.read_pictures(model, sc.data.open_data("critters:clean:test", limit=6))
    seen = sc.eye(model=model).masks(pictures)
    moved = sc.transplant(pictures.images, seen.cut, pictures.labels, per_picture=2)
    pairs = transplant_pairs(moved)
    assert len(pairs) == 12 and pairs.others.equal(moved[:])
    assert pairs.images[3].equal(pictures.images[1])
    ids = pairs.pictures.ids
    assert len(set(ids)) == 12
    assert origins(ids).tolist() == moved.source_index.tolist()  # no repair tears them apart
