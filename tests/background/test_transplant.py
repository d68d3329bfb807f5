"""Transplants: objects of one picture on the background of another."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.background import LabelledImages, Masks
from seecause.background.transplant import (
    REFUSALS,
    check_cuts,
    transplant,
    versions_to_test,
)
from seecause.models.base import content_keys
from tests.background.toys import some_of
from tests.reference import transplant as twin


def scene(side: int = 24, grid: int = 6, n: int = 7, seed: int = 0):
    """Noisy pictures in float64 with masks on patches, and labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 3, side, side, generator=generator, dtype=torch.float64)
    masks = torch.rand(n, grid, grid, generator=generator) < 0.2
    masks[:, 2, 3] = True
    return images, masks, torch.arange(n) % 3


def moved_of(images, masks, labels, **options):
    return transplant(LabelledImages(images, labels, Masks.given(masks)), **options)


@pytest.mark.parametrize("donors", ["any", "same-class", "other-class"])
@pytest.mark.parametrize("fine", [False, True])
def test_transplants_equal_the_slow_twin(donors, fine):
    images, masks, labels = scene()
    masks[5] = False  # no object: a donor only
    masks[6] = True  # no background: neither
    large = masks.repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)
    if fine:  # on pixels, not on patches
        large[:5, 3:9, 1:6] = torch.rand(5, 6, 5, generator=torch.Generator().manual_seed(1)) < 0.6
        masks = large
    moved = moved_of(images, masks, labels, per_image=3, donors=donors, seed=5)
    keys = content_keys(images).tolist()
    slow = twin.transplant(images, large, labels.tolist(), 3, donors, 5, side=2, keys=keys)
    assert moved.source.tolist() == [i for i, _, _ in slow]
    assert moved.donor.tolist() == [j for _, j, _ in slow]
    assert_close(moved[:], torch.stack([picture for _, _, picture in slow]), atol=1e-10, rtol=0)


def test_the_first_transplants_do_not_depend_on_how_many_there_are():
    images, masks, labels = scene()
    few = moved_of(images, masks, labels, per_image=2, seed=3)
    many = moved_of(images, masks, labels, per_image=5, seed=3)
    first = some_of(many, many.number < 2)
    assert few.donor.equal(first.donor)
    assert few[:].equal(first[:])
    other = moved_of(images, masks, labels, per_image=5, seed=4)
    assert not other.donor.equal(many.donor)


def test_predictions_of_the_first_transplants_are_taken_over(model, cases):
    data = cases.with_masks(cases.truth)
    few, many = (versions_to_test(model, data, count, seed=0) for count in (1, 3))
    known = few.predict(model)
    marked = replace(known, moved=torch.arange(known.moved.numel()).view_as(known.moved).double())
    again, first = many.predict(model, marked), many.number < 1
    assert again.moved[first].equal(marked.moved)
    assert_close(again.moved[~first], many.predict(model).moved[~first], atol=1e-10, rtol=0)
    assert_close(again.plain, known.plain, atol=1e-10, rtol=0)


def test_neither_order_nor_names_decide_what_is_put_together():
    images, masks, labels = scene()
    turned = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    first = moved_of(images, masks, labels, per_image=3, donors="other-class")
    renamed = (labels + 1) % 3  # other folder names: other numbers of the same classes
    again = moved_of(
        images[turned], masks[turned], renamed[turned], per_image=3, donors="other-class"
    )

    def pairs(part, place):
        return {
            (place[i], place[j], n)
            for i, j, n in torch.stack([part.source, part.donor, part.number], dim=1).tolist()
        }

    assert pairs(again, turned.tolist()) == pairs(first, [*range(7)])
    for place in range(7):  # donors are drawn without repeats while there are others
        donors = moved_of(images, masks, labels, per_image=6)
        assert len(donors.donor[donors.source == place].unique()) == 6


def test_bad_cuts_are_refused_counted_and_lend_no_background(caplog):
    model = sc.load("builtin:critters-biased")
    opened = sc.data.open_data("critters:certified:test", limit=24)
    data = sc.background.read_images(model, opened)
    masks = data.truth.hard.clone()
    masks[0], masks[1] = False, True
    masks[2] = torch.eye(96, dtype=torch.bool) & (torch.arange(96) % 4 == 0)  # 24 loose pixels
    checked = check_cuts(model, data.with_masks(masks)).masks
    assert [REFUSALS[i] for i in checked.refused[:3]] == [
        "empty",
        "covering the image",
        "fragmented",
    ]
    assert int((checked.refused > 0).sum()) <= 5 and "1 fragmented" in checked.notes[-1]
    part = transplant(data.with_masks(checked), per_image=3)
    assert not {0, 1, 2} & {*part.source.tolist(), *part.donor.tolist()}
    sound = check_cuts(model, data.with_masks(data.truth)).masks
    assert sound.refused is None or int((sound.refused > 0).sum()) <= 2


@pytest.mark.parametrize(
    ("masks", "labels", "options", "line"),
    [
        ("none", "three", {}, "0 of 7 with an object"),
        ("some", "one", {"donors": "other-class"}, "donors='other-class'"),
        ("some", "three", {"donors": "nobody"}, "any, same-class, other-class"),
        ("some", "three", {"per_image": 0}, "at least 1"),
        ("some", "three", {"seed": -1}, "a whole number from 0"),
    ],
)
def test_bad_input_is_one_clear_line(masks, labels, options, line):
    images, known, classes = scene()
    known = known if masks == "some" else torch.zeros_like(known)
    classes = classes if labels == "three" else torch.zeros_like(classes)
    with pytest.raises(sc.SeecauseError, match=line):
        moved_of(images, known, classes, **options)
    with pytest.raises(sc.SeecauseError, match="object masks"):
        transplant(LabelledImages(images, classes))
