"""Pairs: two versions of an image that should get the same prediction, and versions to test by."""

import pytest
import torch

import seecause as sc
from seecause.background import LabelledImages, read_images, transplant as module
from seecause.background.transplant import (
    transplant,
    versions_to_learn,
    versions_to_test,
)
from tests.background.toys import some_of
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
    assert "pairs" in sc.data.capabilities(data)
    before = data.fingerprint
    photo(folders / "without" / "ant" / "a.png", size=(90, 96), seed=99)
    other = sc.data.open_data(f"pairs:{folders}/with:{folders}/without")
    assert other.fingerprint != before


def test_bad_folders_are_refused_in_words(folders):
    with pytest.raises(sc.SeecauseError, match="one folder only"):
        sc.data.open_data(f"pairs:{folders}/with")
    with pytest.raises(sc.SeecauseError, match="nowhere: no such folder"):
        sc.data.open_data(f"pairs:{folders}/with:{folders}/nowhere")
    (folders / "without" / "ant" / "b.png").unlink()
    with pytest.raises(sc.SeecauseError, match=r"ant/b\.png has no second version here"):
        sc.data.open_data(f"pairs:{folders}/with:{folders}/without")
    photo(folders / "without" / "ant" / "b.png")
    (folders / "without" / "ant" / "b.png").write_bytes(b"nonsense")
    data = sc.data.open_data(f"pairs:{folders}/with:{folders}/without")
    with pytest.raises(sc.SeecauseError, match="not an image"):
        data.other(1)


def test_a_function_of_an_image_makes_the_second_version(model):
    data = sc.data.open_data("critters:clean:test", limit=3)
    pairs = read_images(model, sc.data.paired(data, lambda image: 1 - image))
    raw = model.preprocess.raw
    assert torch.allclose(raw(pairs.other_background), 1 - raw(pairs.images), atol=1e-6)
    assert pairs.labels is not None and pairs.labels.tolist() == [s.label for s in data]
    for change in (lambda image: image[:1], lambda image: 3, lambda image: image / 0):
        with pytest.raises(sc.SeecauseError, match="the changed version of"):
            read_images(model, sc.data.paired(data, change))


def test_pairs_are_learned_from_both_versions_and_tested_by_the_other():
    images = torch.arange(3.0)[:, None, None, None].expand(3, 3, 2, 2)
    labels = torch.tensor([0, 1, 0])
    pairs = LabelledImages(images, labels, ids=tuple("abc"), other_background=images + 10)

    def facts(made):
        columns = (made.labels, made.donor_labels, made.source, made.control.int())
        return [made[:][:, 0, 0, 0].tolist(), *(column.tolist() for column in columns)]

    train, test = versions_to_learn(pairs, 8, seed=0), versions_to_test(None, pairs, 8, seed=0)
    old, new = [0, 1, 2], [10, 11, 12]
    own, other = [0] * 3, [1] * 3
    assert facts(train) == [old + new, [0, 1, 0] * 2, own + other, [0, 1, 2] * 2, own * 2]
    assert facts(test) == [new + old, [0, 1, 0] * 2, other + own, [0, 1, 2] * 2, own + other]


@pytest.mark.parametrize(
    ("answers", "kinds", "control"),
    [
        ([0, 0, 0, 0, 2, 2, 2, 2], [0, 0, 0, 0, 2, 2, 2, 2], True),
        ([0, 0, 0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 0, 0, 2], True),  # 2 has no other
        ([5] * 8, [0, 1] * 4, True),  # one prediction tells no donors apart: labels do
        (list(range(8)), list(range(8)), False),  # no two predictions are the same
    ],
)
def test_backgrounds_are_told_apart_by_predictions_and_versions_by_labels(
    monkeypatch, answers, kinds, control
):
    images = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    masks, labels = torch.zeros(8, 4, 4, dtype=torch.bool), torch.arange(8) % 2
    masks[:, 1:3, 1] = True
    monkeypatch.setattr(module, "logits_of", lambda *_: torch.eye(8)[answers])
    data = LabelledImages(images, labels, masks)
    part = versions_to_test(None, data, 3, seed=5)
    assert bool(part.control.any()) is control
    for is_control, donors in ((False, "other-class"), (True, "same-class"))[: 1 + control]:
        made = some_of(part, part.control == is_control)
        options = {"per_image": 3, "donors": donors, "classes": torch.tensor(kinds), "seed": 5}
        expected = transplant(data, **options)
        assert made.donor.equal(expected.donor) and made[:].equal(expected[:])
        assert made.labels.equal(labels[expected.source])
        assert made.donor_labels.equal(labels[expected.donor])
