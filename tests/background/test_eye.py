"""Eyes: masks of objects from data, from another network, from the model itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import seecause as sc
from seecause.background import iou
from seecause.background.objects import by_patches, otsu
from seecause.data.dataset import IGNORE
from tests.reference import transplant as twin


@pytest.fixture(scope="module")
def biased():
    return sc.load("builtin:critters-biased")


@pytest.fixture(scope="module")
def pictures(biased):
    return sc.background.read_pictures(
        biased, sc.data.open_data("critters:certified:test", limit=6)
    )


def test_otsu_equals_the_slow_twin():
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(20, 5, 7, generator=generator, dtype=torch.float64).exp()
    maps[10:] = maps[10:].round()  # ties
    maps[19] = 2.5  # constant: nothing stands out
    masks = otsu(maps)
    for own, scores in zip(masks, maps, strict=True):
        assert own.equal(twin.otsu(scores))
    assert not masks[19].any() and masks[:19].flatten(1).any(dim=1).all()


def test_given_masks_count_patches_that_are_half_covered(biased, pictures):
    seen = sc.eye("given", model=biased).masks(pictures)
    share = pictures.truth.float().unflatten(2, (12, 8)).unflatten(1, (12, 8)).mean(dim=(2, 4))
    assert seen.masks.equal(share >= 0.5)
    assert seen.fine is not None and seen.fine.equal(pictures.truth == 1)
    assert seen.confidence.eq(1).all() and seen.kind == "given"


def test_pixels_that_are_neither_do_not_count():
    truth = torch.zeros(1, 4, 4, dtype=torch.int32)
    truth[0, 0, 0], truth[0, 0, 1], truth[0, 1] = 1, 255, 255  # one object pixel, one known
    assert by_patches(truth, (1, 1)).item() is False
    assert by_patches(truth, (2, 2))[0].tolist() == [[True, False], [False, False]]


def test_another_network_is_checked_against_given_masks(biased, pictures):
    seen = sc.eye("builtin:critters-vit", model=biased).masks(pictures)
    truth = by_patches(pictures.truth, (12, 12))
    assert seen.kind == "network" and "critters-vit" in seen.source
    assert seen.overlap is not None
    assert torch.equal(seen.overlap, iou(seen.masks, truth))
    assert seen.overlap.mean() > 0.3 and seen.confidence.gt(0.5).all()
    assert not seen.notes


def test_pictures_without_a_mask_are_not_counted_as_missed(biased, pictures):
    """Masks of some pictures only: the overlap of the others is not known."""
    truth = pictures.truth.int()
    truth[3:] = IGNORE
    some = dataclasses.replace(pictures, truth=truth)
    seen = sc.eye("builtin:critters-vit", model=biased).masks(some)
    assert seen.overlap[3:].isnan().all() and not seen.overlap[:3].isnan().any()


def test_the_models_own_maps_come_with_a_warning(biased, pictures, caplog):
    for source in ("own", biased, "builtin:critters-biased"):  # the same weights, read again
        seen = sc.eye(source, model=biased).masks(pictures.images)
        assert seen.kind == "own" and "shows the background" in seen.notes[0]
    assert "shows the background" in caplog.text and seen.overlap is None


def test_an_eye_that_knows_none_of_the_classes_says_so_with_its_confidence(
    biased, pictures, caplog
):
    stranger = sc.load("builtin:critters-vit")
    stranger.classes = tuple(f"thing {place}" for place in range(8))
    seen = sc.eye(stranger, model=biased).masks(pictures)
    assert "knows none of the 8 classes" in seen.notes[0]
    assert f"{seen.confidence.mean():.2f}" in seen.notes[0] and seen.notes[0] in caplog.text


def test_masks_are_on_the_patches_of_the_model_under_repair(biased, pictures):
    import timm

    small = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, num_classes=5, depth=1, embed_dim=24, num_heads=2
    )
    other = sc.wrap(small, mean=(0.5,) * 3, std=(0.5,) * 3)
    seen = sc.eye(other, model=biased).masks(pictures)
    assert seen.masks.shape == (6, 12, 12)  # the eye has 4 x 4


def test_maps_are_kept_by_content(biased, pictures, tmp_path, monkeypatch):
    first = sc.eye("builtin:critters-vit", model=biased, cache=tmp_path).masks(pictures)
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr("seecause.background.objects.attribute", None)  # looking again would fail
    again = sc.eye("builtin:critters-vit", model=biased, cache=tmp_path).masks(pictures)
    assert again.masks.equal(first.masks) and again.confidence.equal(first.confidence)
    monkeypatch.undo()
    content = file.read_bytes()
    for harmed in (content[:50], content[:-9] + b"X" + content[-8:]):  # cut, or changed
        file.write_bytes(harmed)
        whole = sc.eye("builtin:critters-vit", model=biased, cache=tmp_path).masks(pictures)
        assert whole.masks.equal(first.masks) and file.read_bytes() == content
    sc.eye("builtin:critters-vit", model=biased, cache=tmp_path, score="prob").masks(pictures)
    assert len(list(tmp_path.iterdir())) == 2


def test_bad_eyes_are_refused_in_words(biased, pictures, tmp_path):
    with pytest.raises(sc.SeecauseError, match=r"has none.*another network as eye"):
        sc.eye(model=biased).masks(pictures.images)
    with pytest.raises(sc.SeecauseError, match=r"one for each picture.*\[6, 96, 96\].*12, 12"):
        sc.eye(torch.ones(6, 40, 40), model=biased).masks(pictures)
    with pytest.raises(sc.SeecauseError, match="no method"):
        sc.eye("given", model=biased, score="prob")
    with pytest.raises(sc.SeecauseError, match="option 'nonsense' of caap"):
        sc.eye("own", model=biased, nonsense=1)
    with pytest.raises(sc.SeecauseError, match="'nonsense' not found"):
        sc.eye("nonsense", model=biased)
    (tmp_path / "file").write_text("")
    with pytest.raises(sc.SeecauseError, match="a folder; this is a file"):
        sc.eye("own", model=biased, cache=tmp_path / "file")


def test_empty_given_masks_are_told(biased, pictures, caplog):
    truth = pictures.truth.clone()
    truth[2] = 0
    seen = sc.eye(truth, model=biased).masks(pictures)
    assert seen.confidence.tolist() == [1, 1, 0, 1, 1, 1]
    assert "1 of 6 masks are empty" in seen.notes[0] and seen.notes[0] in caplog.text


def test_what_an_eye_would_ignore_is_refused(biased):
    with pytest.raises(sc.SeecauseError, match="given masks have no method"):
        sc.eye("given", model=biased, method="rollout")
    with pytest.raises(sc.SeecauseError, match="a network that is loaded by name"):
        sc.eye("own", model=biased, weights="elsewhere.safetensors")
