"""Masks by themselves: what a batch of them shares, and how many a fit needs."""

from __future__ import annotations

import pytest
import torch

from seecause.errors import BadOption
from seecause.lvlm import draw_masks
from seecause.lvlm.masks import (
    MaskBatch,
    MaskSampling,
    SoftMasks,
    check_masks,
    check_sampling,
    mask_count,
)
from tests.lvlm.toy import toy_engine

GRID = (3, 4)
HEADS = torch.tensor(  # [M, L * H]: the first layer is alike and blind in all, the last all see
    [
        [0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 1],
    ]
)


def batch(heads=HEADS, text=None, image=None, **soft) -> MaskBatch:
    return check_masks(heads, text, image, GRID, 5, 6, **soft)


def test_a_batch_knows_what_its_masks_share():
    masks = batch()
    assert len(masks) == 3 and masks.heads.shape == (3, *GRID)
    assert masks.order().tolist() == [1, 0, 2]  # alike beside alike, in the order they came
    assert masks.shared_layers() == 1 and batch(HEADS[::2]).shared_layers() == 3
    assert masks.sees_picture() == [False, True, True]
    assert masks.sees_average() == [True, True, False]
    text, image = torch.ones(3, 5), torch.ones(1, 6)
    seeing = batch(text=text)
    assert seeing.sees_average() == [True, True, False]
    text[1, 2] = 0
    assert batch(text=text).sees_average() == [True] * 3
    same = HEADS[:1]
    assert batch(same, text[:1], image).shared_layers() == 3  # one mask of each
    assert batch(same, text).shared_layers() == 1  # rows differ where a head sees
    assert batch(same, None, torch.eye(6)).shared_layers() == 1
    assert len(batch(same, None, torch.eye(6))) == 6
    assert batch(same, None, torch.eye(6)).order().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_block_is_filled_with_its_last_mask():
    text = torch.eye(5)[:3]
    part = batch(text=text, image=torch.ones(1, 6)).block(1, 3, 5)
    assert part.heads.flatten(1).int().tolist() == HEADS[[1, 2, 2, 2, 2]].tolist()
    assert part.text.int().tolist() == text[[1, 2, 2, 2, 2]].tolist()
    assert part.image.shape == (1, 6)  # what serves all stays one
    rows = batch(text=text).take(torch.tensor([2, 0]))
    assert rows.heads.flatten(1).int().tolist() == HEADS[[2, 0]].tolist()
    assert rows.text.int().tolist() == text[[2, 0]].tolist()


def test_soft_masks_share_nothing_and_leave_nothing_out():
    masks = batch(HEADS * 0.5, soft=torch.float64)
    assert isinstance(masks, SoftMasks) and masks.heads.dtype == torch.float64
    assert masks.order().tolist() == [0, 1, 2] and masks.shared_layers() == 0
    assert masks.sees_picture() == masks.sees_average() == [True] * 3


def test_masks_of_heads_may_have_the_shape_of_the_grid():
    engine = toy_engine()
    heads = draw_masks(3, 12, p=0.5)
    flat = engine.evaluate(heads)
    assert torch.equal(engine.evaluate(heads.reshape(3, 3, 4)), flat)
    with pytest.raises(BadOption, match=r"\[M, 12\]"):
        engine.evaluate(heads.reshape(3, 4, 3))
    assert batch(None).heads.all() and len(batch(None)) == 1
    with pytest.raises(BadOption, match=r"\[2, 3\].*one that serves all"):
        batch(HEADS, torch.ones(2, 5))
    with pytest.raises(BadOption, match=r"text=.*\[M, 5\]"):
        batch(HEADS, torch.ones(3, 6))
    with pytest.raises(BadOption, match=r"image=.*\[M, 6\]"):
        batch(HEADS, image=torch.ones(3, 5))
    with pytest.raises(BadOption, match=r"0 or 1; for those between, engine.slopes"):
        batch(HEADS * 0.5)
    for wrong in (-0.1, 1.1, torch.nan):
        with pytest.raises(BadOption, match="from 0 to 1"):
            batch(HEADS * 0.5 + wrong * (HEADS == 0), soft=torch.float32)


@pytest.mark.parametrize(("size", "split"), [(16, 0.8), (5, 0.5), (1, 0.9), (12, 0.98), (40, 0.3)])
def test_a_fit_needs_more_masks_than_coefficients_and_two_to_judge_it(size, split):
    def suffices(masks):
        fitted = round(split * masks)
        return fitted > size and masks - fitted >= 2

    least = next(masks for masks in range(1, 1000) if suffices(masks))
    check_sampling(MaskSampling(least, split=split), size)
    with pytest.raises(BadOption, match=f"at least {least}: {split:.0%} of them"):
        check_sampling(MaskSampling(least - 1, split=split), size)


@pytest.mark.parametrize(
    ("option", "fine", "wrong"),
    [
        ("masks", 10_000_000, 10_000_001),
        ("alpha", 0.0, float("inf")),
        ("alpha", 1e9, -1e-9),
        ("l1_ratio", 0.0, -0.1),
        ("l1_ratio", 1.0, 1.1),
        ("step", 10, 9),
        ("agreement", 0.01, 0.0),
        ("agreement", 0.99, 1.0),
        ("split", 0.5, 0.0),
        ("split", 0.9, 1.0),
        ("seed", (1 << 43) - 1, 1 << 43),
        ("p", 0.1, "half"),
        ("adaptive", True, "yes"),
    ],
)
def test_options_of_masks_have_their_ranges(option, fine, wrong):
    check_sampling(MaskSampling(**{"masks": 200, option: fine}), 6)
    with pytest.raises(BadOption, match=option):
        check_sampling(MaskSampling(**{"masks": 200, option: wrong}), 6)


def test_a_derivative_needs_four_masks_and_does_not_stop_by_itself():
    for how in ("derivative", "corrected"):
        check_sampling(MaskSampling(4, how=how), 100)
        with pytest.raises(BadOption, match="at least 4"):
            check_sampling(MaskSampling(3, how=how), 100)
        with pytest.raises(BadOption, match="only a fit stops"):
            check_sampling(MaskSampling(64, how=how, adaptive=True), 100)
    check_sampling(MaskSampling(8, how="derivative", slopes=4), 6)
    check_sampling(MaskSampling(8, how="derivative", slopes=8), 6)
    assert [mask_count(how, None) for how in ("derivative", "corrected", "fit")] == [
        *(64, 1000, 10_000)
    ]
    assert mask_count("fit", 7) == 7


def test_masks_are_those_of_their_numbers():
    whole = draw_masks(2100, 7, p=0.3, law="fixed", seed=5)
    assert (whole.sum(dim=1) == 5).all()  # 0.7 * 7, rounded
    for start, count in ((0, 1000), (999, 2), (1000, 0), (1500, 600)):
        part = draw_masks(count, 7, p=0.3, law="fixed", seed=5, start=start)
        assert torch.equal(part, whole[start : start + count])
    assert draw_masks(0, 7).shape == (0, 7)
    for p in (0.0, 1.0):
        with pytest.raises(BadOption, match="between 0 and 1"):
            draw_masks(4, 7, p=p)
