"""Masks are found alike alone and in a batch, have the size they should have, and are kept by what
decides them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save
from torch.testing import assert_close

import seecause as sc
from seecause.background import Masks, discover_masks, iou, masks
from seecause.background.gains import jensen_shannon, log_probs
from seecause.background.masks import harden
from seecause.data.dataset import IGNORE
from seecause.engine.chunks import budget
from seecause.errors import BadImage, BadOption, NotDefined
from tests.helpers import view
from tests.reference import cigma as reference
from tests.tiny import pictures, tiny

OPTIONS = {"steps": 6, "grid": 6, "rate": 0.05}


def case(batch=3, family="timm_registers"):
    native = tiny(family)
    return native, view(native, check=False), pictures(native, batch)


@pytest.mark.parametrize(("param", "init"), [("clamp", 0.5), ("clamp", 0.97), ("sigmoid", 0.5)])
def test_masks_are_those_of_a_plain_optimiser(param, init):
    native, model, images = case()
    weights = (1.0, 0.3, 0.1)
    result = discover_masks(model, images, weights=weights, param=param, init=init, **OPTIONS)
    for image, soft in zip(images, result.soft, strict=True):
        expected = reference.mask(
            native.forward, image, weights=weights, init=init, sigmoid=param == "sigmoid", **OPTIONS
        )
        assert_close(soft, expected, atol=1e-9, rtol=0)
    assert result.soft.std() > 0.01 and result.kind == "discovered"


def test_the_batch_does_not_matter():
    _, model, images = case()
    whole = discover_masks(model, images, **OPTIONS)
    with budget(1):  # one image at a time
        single = discover_masks(model, images, **OPTIONS)
    assert_close(whole.soft, single.soft, atol=1e-9, rtol=0)
    assert torch.equal(whole.hard, single.hard)


def test_the_answer_is_kept_and_less_is_shown():
    _, model, images = case(1)
    short, long = (
        discover_masks(model, images, steps=n, grid=6, rate=0.05, weights=(1.0, 0.01, 0.0))
        for n in (1, 25)
    )
    assert long.losses[0, 0] < short.losses[0, 0]
    half = images / 2 + images.mean(dim=(2, 3), keepdim=True) / 2  # what a mask of 0.5 shows
    first = jensen_shannon(log_probs(model(images)), log_probs(model(half)))
    assert_close(short.losses, torch.tensor([[first.item(), 0.5, 0.0]]).double())
    assert short.steps.tolist() == [1] and long.steps.tolist() == [25]
    assert long.protocol["rho"] == 0.35 and long.protocol["fill"] == "mean"


def test_a_mask_keeps_the_answers_at_its_temperature():
    _, model, images = case(1)
    warm = discover_masks(model, images, temperature=3.0, **OPTIONS)
    model.module.head.weight /= 3
    model.module.head.bias /= 3
    assert_close(warm.soft, discover_masks(model, images, **OPTIONS).soft, atol=1e-9, rtol=0)


@pytest.mark.parametrize("rho", [0.1, 0.35, 0.5])
@pytest.mark.parametrize(
    "soft",
    [
        torch.ones(1, 5, 5),
        torch.zeros(1, 5, 5),
        torch.rand(1, 5, 5, generator=torch.Generator().manual_seed(0)),
    ],
)
def test_topk_keeps_exactly_so_many_pixels(soft, rho):
    hard, ties = harden(soft, (32, 48), rho=rho)
    assert hard.sum() == round(rho * 32 * 48)
    assert ties[0] == 1 or soft.std() > 0


def test_ties_are_broken_by_the_neighbourhood_and_a_strict_percentile_keeps_none():
    soft = torch.zeros(1, 8, 8)
    soft[:, :, :4] = 1  # half of the pixels saturate
    kept, ties = harden(soft, (64, 64), rho=26 / 64)
    assert kept[0, :, :26].all()  # of 28 columns that are 1, the two with lower ones near come last
    assert ties[0] == 28 / 64
    none, _ = harden(soft, (64, 64), rho=0.25, rule="percentile")
    assert not none.any()
    ramp = torch.rand(1, 64, 64, generator=torch.Generator().manual_seed(1))
    kept, _ = harden(ramp, (64, 64), rho=0.25, rule="percentile")
    level = torch.quantile((ramp * 1e6).round().double() / 1e6, 0.75)
    assert torch.equal(kept, ramp > level) and kept.float().mean() == pytest.approx(0.25, abs=1e-3)


def test_pixels_are_kept_by_value_then_by_neighbourhood_then_row_by_row():
    """The rule written out, pixel by pixel, on a flat mask and on one with many ties."""
    high, wide, rho = 12, 18, 0.35
    steps = torch.randint(0, 3, (1, 4, 4), generator=torch.Generator().manual_seed(2)) / 2
    for soft in (torch.full((1, 4, 4), 0.3), steps):
        large = masks.enlarge(soft.double(), (high, wide))[0]
        values = [[round(float(x), 6) for x in row] for row in large]

        def near(row, column, values=values):
            rows = range(max(0, row - 2), min(high, row + 3))
            columns = range(max(0, column - 2), min(wide, column + 3))
            around = [values[r][c] for r in rows for c in columns]
            return round(sum(around) / len(around), 6)

        places = [(row, column) for row in range(high) for column in range(wide)]
        order = sorted(places, key=lambda at: (-values[at[0]][at[1]], -near(*at), at))
        expected = torch.zeros(high, wide, dtype=torch.bool)
        for row, column in order[: round(rho * high * wide)]:
            expected[row, column] = True
        assert torch.equal(harden(soft, (high, wide), rho=rho)[0][0], expected)


def test_padding_is_never_kept():
    _, model, images = case(2)
    inside = torch.ones(2, 32, 48, dtype=torch.bool)
    inside[:, :8] = False
    result = discover_masks(model, images, inside=inside, **OPTIONS)
    assert not result.hard[:, :8].any()
    assert result.hard.sum(dim=(1, 2)).tolist() == [round(0.35 * 24 * 48)] * 2
    colour = images[:, :, 8:].mean(dim=(2, 3), keepdim=True).expand_as(images)  # of the picture
    same = discover_masks(model, images, inside=inside, fill=colour, **OPTIONS)
    assert_close(result.soft, same.soft, atol=1e-9, rtol=0)


def test_padding_is_shown_as_it_is_while_masks_are_searched():
    _, model, images = case(1)
    inside = torch.ones(1, *images.shape[-2:], dtype=torch.bool)
    inside[:, :8] = False
    here = torch.zeros_like(images)
    elsewhere = here.masked_fill(~inside[:, None], 3.0)  # another baseline, on padding alone
    first, second = (
        discover_masks(model, images, inside=inside, fill=baseline, **OPTIONS)
        for baseline in (here, elsewhere)
    )
    assert torch.equal(first.soft, second.soft) and torch.equal(first.losses, second.losses)


def test_an_early_stop_finishes_images_one_by_one(monkeypatch):
    monkeypatch.setattr(masks, "CHECK_EVERY", 4)
    _, model, images = case()
    options = {"steps": 20, "grid": 6, "rate": 0.01, "early_stop": 0.03}
    early = discover_masks(model, images, **options)
    with budget(1):
        single = discover_masks(model, images, **options)
    assert early.steps.tolist() == single.steps.tolist()
    assert early.steps.min() < early.steps.max() and set(early.steps.tolist()) <= {8, 12, 16, 20}
    assert_close(early.soft, single.soft, atol=1e-9, rtol=0)
    stopped = int(early.steps.argmin())
    alone = discover_masks(
        model, images[stopped : stopped + 1], steps=int(early.steps.min()), grid=6, rate=0.01
    )
    assert_close(early.soft[stopped], alone.soft[0], atol=1e-9, rtol=0)


def test_masks_are_kept_by_weights_pixels_and_options(tmp_path, monkeypatch):
    native, model, images = case(2)
    done = []
    first = discover_masks(model, images, cache=tmp_path, progress=done.append, **OPTIONS)
    assert done == [2] and len(list(tmp_path.iterdir())) == 2

    def files_after(**changes):
        discover_masks(
            model, changes.pop("images", images), cache=tmp_path, **{**OPTIONS, **changes}
        )
        return len(list(tmp_path.iterdir()))

    again = discover_masks(
        model, images.flip(0), cache=tmp_path, rho=0.2, **OPTIONS
    )  # place and rho do not matter
    assert len(list(tmp_path.iterdir())) == 2 and torch.equal(again.soft.flip(0), first.soft)
    assert again.hard.sum() == 2 * round(0.2 * 32 * 48)
    rule = {"rho": 0.2, "binarise": "percentile"}
    strict = discover_masks(model, images, cache=tmp_path, **rule, **OPTIONS)
    hard, _ = harden(first.soft, tuple(images.shape[-2:]), rho=0.2, rule="percentile")
    assert torch.equal(strict.hard, hard) and strict.protocol["binarise"] == "percentile"
    assert len(list(tmp_path.iterdir())) == 2
    assert files_after(steps=3) == 4
    assert files_after(images=images + 0.1, steps=3) == 6
    inside = torch.ones(2, *images.shape[-2:], dtype=torch.bool)
    inside[:, :8] = False
    assert files_after(inside=inside, steps=3) == 8
    assert files_after(fill=torch.zeros(1, 3, 32, 48), steps=3) == 10
    assert files_after(fill=torch.ones(1, 3, 32, 48), steps=3) == 12
    with model.gated(torch.full((4, 3), 0.5)):
        assert files_after(steps=3) == 14
    with torch.no_grad():
        native.module.head.bias += torch.arange(7)
    assert files_after(steps=3) == 16
    assert files_after(fill="grey", steps=3) == 18
    assert files_after(early_stop=0.5, steps=3) == 20
    assert files_after(early_stop=0.5, rho=0.2, steps=3) == 22  # it decides when to stop
    monkeypatch.setattr(masks, "versions", lambda: {"torch": "another"})
    assert files_after(steps=3) == 24
    monkeypatch.setattr(masks, "arithmetic", lambda: "another")
    assert files_after(steps=3) == 26


def test_masks_work_without_gradients_and_for_convolutional_models():
    from tests.families.conv import OPTIONS as CONV, tiny_conv

    native = tiny_conv("timm_resnet")
    model = sc.wrap(native.module, check=False, **CONV)
    with torch.inference_mode():
        result = discover_masks(
            model, torch.randn(1, 3, *model.preprocess.size, dtype=torch.float64), steps=2, grid=4
        )
    assert result.hard.shape == (1, *model.preprocess.size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param": "tanh"}, "clamp, sigmoid"),
        ({"steps": 0}, "at least 1"),
        ({"init": 1.0, "param": "sigmoid"}, "inside it"),
        ({"weights": (1.0, -1.0, 0.0)}, "three numbers"),
        ({"rho": 0.0}, "between 0 and 1"),
        ({"rho": 1.0}, "between 0 and 1"),
        ({"grid": 1}, "at least 2 cells"),
        ({"rate": 0.0}, "a number above 0"),
        ({"init": 1.5}, "a value in"),
        ({"early_stop": 0.0}, "share of the pixels"),
        ({"binarise": "otsu"}, "topk, percentile"),
        ({"fill": "white"}, "mean, grey, blur, noise"),
        ({"fill": torch.zeros(2, 3, 8, 8)}, "one image"),
        ({"early_stop": 2.0}, "share of the pixels"),
        ({"inside": torch.ones(1, 2, 2, dtype=torch.bool)}, "True on the image"),
    ],
)
def test_impossible_options_are_refused(options, message):
    _, model, images = case(1)
    with pytest.raises(BadOption, match=message):
        discover_masks(model, images, **options)


def test_no_images_and_independent_classes_are_refused():
    _, model, images = case(1)
    with pytest.raises(BadImage, match="empty batch"):
        discover_masks(model, images[:0])
    model.sigmoid = True
    with pytest.raises(NotDefined, match="sigmoid=False"):
        discover_masks(model, images)


def test_a_damaged_file_of_the_cache_is_searched_again(tmp_path):
    folder = tmp_path / "kept" / "masks"  # made with what is above it
    _, model, images = case(3)
    first = discover_masks(model, images, cache=folder, **OPTIONS)
    others = {name: torch.zeros(1) for name in ("soft", "losses", "other")}
    damages = (b"", b"nonsense that is no header", save(others))
    for file, damage in zip(sorted(folder.iterdir()), damages, strict=True):
        file.write_bytes(damage)
    assert_close(discover_masks(model, images, cache=folder, **OPTIONS).soft, first.soft)
    assert all(file.stat().st_size > 100 for file in folder.iterdir())


def test_baselines_are_one_or_as_many_as_images():
    _, model, images = case(3)
    with pytest.raises(BadOption, match="one for each"):
        discover_masks(model, images, fill=images[:2], **OPTIONS)


def test_overlap_with_true_masks():
    hard = torch.zeros(2, 4, 4, dtype=torch.bool)
    hard[0, :2] = True
    truth = torch.zeros(2, 4, 4, dtype=torch.int32)
    truth[0, 1:3] = 1
    expected = torch.tensor([4 / 12, torch.nan], dtype=torch.float64)
    assert_close(iou(Masks.given(hard), truth), expected, equal_nan=True)
    truth[0, 0] = IGNORE
    assert iou(hard, truth)[0] == 0.5
    known = Masks.given(truth)
    assert known.kind == "given" and not known.inside[0, 0].any() and known.hard.sum() == 8
    inside = torch.ones(2, 4, 4, dtype=torch.bool)
    inside[1, :, 0] = False
    assert torch.equal(Masks.given(truth, inside=inside).inside, inside & known.inside)
    with pytest.raises(BadOption, match="same images"):
        iou(hard, truth[:, :2])
