"""Photos taken apart and put together again: what is filled, whose background, and what names
say."""

from __future__ import annotations

import pytest
import torch

from seecause.data import backgrounds as composites
from seecause.errors import BadOption


def test_filling_keeps_what_is_known_and_takes_the_rest_from_around_it():
    pixels = torch.rand(
        2, 3, 37, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    holes = torch.zeros(2, 37, 24, dtype=torch.bool)
    holes[0, 10:20, 8:16] = True
    filled = composites.fill_holes(pixels, holes, margin=2)
    wide = torch.zeros(37, 24, dtype=torch.bool)
    wide[8:22, 6:18] = True
    assert torch.equal(filled[0][:, ~wide], pixels[0][:, ~wide]) and torch.equal(
        filled[1], pixels[1]
    )
    other = pixels.clone()
    other[0][:, wide] = 7.0  # nothing of the object is left in it
    assert torch.allclose(composites.fill_holes(other, holes, margin=2), filled)
    flat = torch.full_like(pixels, 0.3)
    assert torch.allclose(composites.fill_holes(flat, holes), flat)


def test_backgrounds_come_from_the_right_class_and_half():
    classes, parts = (
        torch.tensor([0] * 6 + [1] * 4 + [2] * 6),
        composites.halves(torch.tensor([0] * 6 + [1] * 4 + [2] * 6), seed=0),
    )
    assert [int(parts[classes == c].sum()) for c in range(3)] == [3, 2, 3]
    same, other = (
        pick(classes, parts, draws=3, seed=1)
        for pick in (composites.same_class, composites.other_class)
    )
    places = torch.arange(16)
    for rows in (*same, *other):
        assert torch.equal(rows.sort().values, places) and torch.equal(
            parts[rows], parts
        )  # each background once, of the same half
    assert (
        (classes[same] == classes).all()
        and (same != places).all()
        and (classes[other] != classes).all()
    )
    assert not torch.equal(other[0], other[1])
    with pytest.raises(BadOption, match="at least two of each class"):
        composites.same_class(
            torch.tensor([0, 0, 1]), torch.zeros(3, dtype=torch.long), draws=1, seed=0
        )


def test_composites_are_what_their_names_say():
    pixels = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    shapes = torch.zeros(4, 32, 32, dtype=torch.bool)
    shapes[:, 12:20, 12:20] = True
    shapes[:, 12, 12] = False  # the box is larger than the shape
    shapes[3] = True
    classes, parts = torch.tensor([0, 0, 1, 1]), torch.zeros(4, dtype=torch.long)
    made = composites.compose(pixels, shapes, classes, parts, draws=1, seed=0)
    shown, inside = shapes[0], torch.zeros(32, 32, dtype=torch.bool)
    inside[12:20, 12:20] = True
    assert (made.alone["only_fg"][0][:, ~shown] == 0).all() and torch.equal(
        made.alone["only_fg"][0][:, shown], pixels[0][:, shown]
    )
    for kind in ("only_bg_b", "only_bg_t"):
        assert torch.equal(made.alone[kind][0][:, ~inside], pixels[0][:, ~inside])
    assert (made.alone["only_bg_b"][0][:, inside] == 0).all()
    assert torch.equal(
        made.alone["only_bg_t"][0][:, 12:20, 12:20], pixels[0][:, 0:8, 12:20]
    )  # the first strip, above: 12 rows, and again from the 13th
    assert made.untiled == 1 and made.boxes.tolist() == pytest.approx([1 / 16] * 3 + [1])
    for kind in composites.MIXED:
        donor = made.donors[kind][0, 0]
        assert torch.equal(made.mixed[kind][0, 0][:, shown], pixels[0][:, shown])
        assert torch.equal(
            made.mixed[kind][0, 0][:, ~shown], made.alone["only_bg_f"][donor][:, ~shown]
        )
