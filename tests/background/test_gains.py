"""FIG, BIG and BIR, by every baseline."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.background import Gains, Masks, Swapped, gains as gains_file, information_gains
from seecause.background.erase import ErasedViews, erase, fill
from seecause.background.gains import jensen_shannon, log_probs
from seecause.data.dataset import IGNORE
from seecause.errors import BadImage, BadOption, NotDefined
from tests.helpers import noise, view
from tests.reference import cigma as reference
from tests.tiny import pictures, tiny


def case(batch=3, family="timm_registers"):
    native = tiny(family)
    masks = torch.rand(batch, *native.size, generator=torch.Generator().manual_seed(3)) < 0.4
    return native, view(native, check=False), pictures(native, batch), masks


@pytest.mark.parametrize(("temperature", "fill"), [(1.0, "grey"), (2.0, "grey"), (1.0, "mean")])
def test_gains_are_those_of_native_forwards(temperature, fill):
    native, model, images, masks = case()
    result = information_gains(model, images, masks, temperature=temperature, baseline=fill)
    expected = torch.tensor(
        [
            reference.gains(native.forward, x, m, temperature, fill)
            for x, m in zip(images, masks, strict=True)
        ],
        dtype=torch.float64,
    )
    assert_close(torch.stack([result.fig, result.big], dim=1), expected, atol=1e-10, rtol=0)
    assert_close(result.bir, result.big / (result.fig + result.big))
    assert result.protocol["masks"] == {"source": "oracle"} and result.noise_floor < 1e-12
    with sc.budget(1):
        assert_close(
            information_gains(model, images, masks, temperature=temperature, baseline=fill).big,
            result.big,
            atol=1e-12,
            rtol=0,
        )


def test_pieces_do_not_matter(monkeypatch):
    _, model, images, masks = case()
    options = {"baseline": noise(*images.shape), "temperature": 2.0}
    whole = information_gains(model, images, masks, **options)
    monkeypatch.setattr(gains_file, "PIECE", 2)
    parts = information_gains(model, images, masks, **options)
    assert_close(parts.fig, whole.fig, atol=1e-12, rtol=0)
    assert_close(parts.big, whole.big, atol=1e-12, rtol=0)
    assert whole.protocol["temperature"] == 2.0
    assert whole.protocol["baseline"] == "tensor [3, 3, 32, 48]"


def test_what_is_neither_object_nor_background_stays_in_both_versions():
    _, model, images, masks = case()
    truth = masks.int()
    truth[1, :, :8] = IGNORE
    views = ErasedViews(model, images, Masks.oracle(truth), "grey")
    for shown, known in zip(views.erased(slice(1, 3)), (1, 0), strict=True):
        keep = (truth[1:] == known) | (truth[1:] == IGNORE)
        assert torch.equal(shown, torch.where(keep[:, None], images[1:], 0.0))
    inside = truth[1] != IGNORE
    colour = images[1][:, inside].mean(dim=1)  # of the rest alone
    mean = ErasedViews(model, images, Masks.oracle(truth), "mean").erased(slice(1, 2))[1][0]
    assert_close(mean[:, truth[1] == 1], colour[:, None].expand(-1, int(masks[1, :, 8:].sum())))


def test_three_versions_of_as_many_pictures_as_fit_run_at_once(monkeypatch):
    _, model, images, masks = case()
    rows, honest = [], log_probs

    def counted(logits, temperature):
        rows.append(len(logits))
        return honest(logits, temperature)

    monkeypatch.setattr(gains_file, "log_probs", counted)
    with sc.budget(6 * model.forward_bytes(model.layout)):
        information_gains(model, images, masks)
    assert rows == [6, 2, 3, 1]  # two pictures and again in another packing, then one


def test_the_noise_floor_is_what_another_place_in_the_batch_changes(monkeypatch):
    """Answers that depend on their place, as rounding does: the middle one of three stays."""
    _, model, images, masks = case()
    honest = log_probs

    def placed(logits, temperature):
        logits = logits.clone()
        logits[:, 0] += torch.arange(len(logits)) % 3
        return honest(logits, temperature)

    monkeypatch.setattr(gains_file, "log_probs", placed)
    floor = information_gains(model, images, masks).noise_floor
    here, there = model(images), model(images)
    here[:, 0] += torch.arange(3)
    there[:, 0] += torch.arange(3).flip(0)
    expected = jensen_shannon(honest(here), honest(there))
    assert expected[1] == 0 and floor == pytest.approx(float(expected.mean()))


def test_both_ratios_and_degenerate_images():
    gains = Gains(
        fig=torch.tensor([0.3, 0.0, 0.1]).double(),
        big=torch.tensor([0.1, 0.0, 0.0]).double(),
        noise_floor=0.0,
    )
    assert gains.bir.tolist() == pytest.approx([0.25, 0.5, 0.0])
    assert gains.degenerate.tolist() == [False, True, False]
    assert gains.bir_mean_of_ratios == pytest.approx(0.25)
    assert gains.bir_ratio_of_means == gains.bir_or_zero == pytest.approx(0.2)
    assert gains.take(torch.tensor([True, False, True])).bir.tolist() == pytest.approx([0.25, 0.0])
    said = "FIG 0.1333, BIG 0.0333, BIR 0.200 (ratio of means, which gates judge), 0.250 (mean"
    assert said in repr(gains) and "1 degenerate" in repr(gains)
    faint = Gains(torch.tensor([3e-8]).double(), torch.tensor([1e-8]).double(), 0.0)
    assert faint.bir.tolist() == pytest.approx([0.25]) and not faint.degenerate.any()
    nothing = Gains(torch.zeros(2).double(), torch.zeros(2).double(), 0.0)
    assert nothing.bir_ratio_of_means != nothing.bir_ratio_of_means and nothing.bir_or_zero == 0.0


@pytest.mark.parametrize(
    ("fig", "big", "text"),
    [
        ([0.3] * 4, [0.1] * 4, "too few for an interval (4)"),
        ([0.0] * 5, [0.0] * 5, "not defined"),
        ([0.3] * 5, [0.0] * 5, "below 0.001"),
        ([0.3] * 5, [0.1] * 5, "no spread over 5 pictures"),
    ],
)
def test_an_interval_that_would_look_certain_is_put_in_words(fig, big, text):
    gains = Gains(torch.tensor(fig).double(), torch.tensor(big).double(), 0.0)
    assert gains.interval_text() == text


def test_an_interval_is_that_of_the_ratio_of_means():
    fig, big = (
        torch.tensor([0.3, 0.2, 0.5, 0.1, 0.3, 0.4]),
        torch.tensor([0.1, 0, 0, 0.3, 0.2, 0.1]),
    )
    gains = Gains(fig.double(), big.double(), 0.0)
    low, high = gains.interval
    assert 0 < low < gains.bir_ratio_of_means < high < 1
    assert gains.interval_text() == f"{low:.3f} to {high:.3f}"
    assert gains.interval_text(1) == f"{low:.1f} to {high:.1f}"
    alone = gains.take(torch.tensor([0]))
    assert alone.interval[0] != alone.interval[0]
    low, high = gains.take(torch.tensor([0, 3])).interval  # two tell something: 0.25 and 0.75
    assert (low, high) == pytest.approx((0.25, 0.75))


def test_an_empty_mask_makes_the_background_everything():
    _, model, images, masks = case()
    gains = information_gains(model, images, torch.zeros_like(masks))
    assert gains.fig.max() == 0 and gains.big.min() > 0 and gains.bir.tolist() == [1, 1, 1]


def test_bfloat16_has_a_noise_floor_and_float64_has_none():
    native = tiny("timm_registers", dtype=torch.bfloat16)
    model, images = view(native, check=False), pictures(native, 5)
    masks = torch.rand(5, *native.size) < 0.4
    result = information_gains(model, images, masks)
    here, there = (log_probs(model(x)) for x in (images, images.flip(0)))
    floor = jensen_shannon(here, there.flip(0)).double().mean()
    assert 0 <= result.noise_floor < 1e-2 and result.big.dtype == torch.float64
    assert result.noise_floor == pytest.approx(float(floor), abs=1e-3)


def test_counterfactual_pictures_are_used_as_they_are():
    native, model, images, _ = case()
    elsewhere, others = images + noise(*images.shape, seed=5), images.flip(0)
    gains = information_gains(model, images, baseline=Swapped(elsewhere, others))
    for i in range(3):
        whole, moved, changed = (
            reference.answer(native.forward, x[i]) for x in (images, elsewhere, others)
        )
        assert gains.big[i].item() == pytest.approx(reference.js(whole, moved), abs=1e-10)
        assert gains.fig[i].item() == pytest.approx(reference.js(whole, changed), abs=1e-10)
    assert gains.protocol["baseline"] == "swapped"
    with pytest.raises(BadOption, match="without a foreground"):
        information_gains(model, images, baseline=Swapped(elsewhere))
    with pytest.raises(BadOption, match="one picture for each image"):
        information_gains(model, images, baseline=Swapped(elsewhere[:2], others))


@pytest.mark.parametrize(
    "baseline",
    ["mean", "grey", "blur", "noise", torch.full((1, 3, 32, 48), 0.3), noise(2, 3, 32, 48)],
)
def test_erased_pictures_keep_what_the_mask_says(baseline):
    _, model, images, masks = case(2)
    inside = torch.ones_like(masks)
    inside[:, -8:] = False
    no_background, no_foreground = erase(model, images, masks, baseline, inside=inside)
    base = fill(model, images, baseline, inside=inside).expand_as(images)
    for i in range(2):
        for picture, kept in (
            (no_background, masks[i] | ~inside[i]),
            (no_foreground, ~masks[i] | ~inside[i]),
        ):
            assert torch.equal(picture[i][:, kept], images[i][:, kept])
            assert_close(picture[i][:, ~kept], base[i][:, ~kept])


def test_fills_are_what_they_are_called():
    _, model, images, _ = case(2)
    blurred, sigma = fill(model, images, "blur"), 10 / 224 * 48
    x = torch.arange(-4, 5, dtype=torch.float64)  # two deviations to each side
    bell = (-0.5 * (x / sigma).square()).exp()
    kernel = (bell[:, None] * bell / bell.sum() ** 2).expand(3, 1, 9, 9)
    padded = torch.nn.functional.pad(images, [4] * 4, mode="reflect")
    assert_close(blurred, torch.nn.functional.conv2d(padded, kernel, groups=3))
    narrow = fill(model, images[:, :, :4], "blur")  # no wider than can be reflected
    assert narrow.shape == (2, 3, 4, 48) and narrow.isfinite().all()
    noisy = fill(model, images, "noise")
    assert noisy.shape == (1, 3, 32, 48) and 0.5 < noisy.std() < 1.5 and noisy.dtype == images.dtype
    assert (fill(model, images, "grey") == 0).all() and fill(model, images).shape == (1, 3, 1, 1)


def test_baselines_go_with_their_pictures():
    """Of more pictures than a piece holds, each has its own baseline and mask."""
    _, model, images, masks = case(3)
    baseline = noise(3, 3, 32, 48)
    views = ErasedViews(model, images, masks, baseline)
    for rows in (slice(0, 2), slice(2, 3)):
        no_background, no_foreground = views.erased(rows)
        keep = masks[rows, None]
        assert_close(no_background, torch.where(keep, images[rows], baseline[rows]))
        assert_close(no_foreground, torch.where(keep, baseline[rows], images[rows]))
    (only,) = views.erased(slice(1, 2), ("no_foreground",))
    assert_close(only, torch.where(masks[1:2, None], baseline[1:2], images[1:2]))
    swapped = Swapped(baseline, -baseline)
    both = ErasedViews(model, images, None, swapped).erased(slice(1, 3))
    assert torch.equal(both[0], baseline[1:]) and torch.equal(both[1], -baseline[1:])
    assert swapped.take(torch.tensor([2])).foreground.equal(-baseline[2:])


def test_the_mean_colour_is_that_of_the_picture_without_padding():
    _, model, images, masks = case(2)
    inside = torch.ones_like(masks)
    inside[:, -8:] = False
    assert_close(
        fill(model, images, "mean", inside=inside), images[:, :, :-8].mean(dim=(2, 3), keepdim=True)
    )


def test_bad_input_is_refused():
    _, model, images, masks = case()
    with pytest.raises(BadOption, match=r"at its size: \[3, 32, 48\]"):
        information_gains(model, images, masks[:, :16])
    with pytest.raises(BadOption, match="one for each image"):
        information_gains(model, images, Masks.oracle(masks[:2]))
    with pytest.raises(BadOption, match="masks of the images"):
        information_gains(model, images)
    with pytest.raises(BadImage, match="empty batch"):
        information_gains(model, images[:0], masks[:0])
    model.sigmoid = True
    with pytest.raises(NotDefined, match="answer independently"):
        information_gains(model, images, masks)


@pytest.mark.parametrize("temperature", [0, -1.0])
def test_a_temperature_is_above_zero(temperature, model, cases):
    """Zero gives no number, and one below turns answers round."""
    swapped = cases.swapped
    for run in (
        lambda: information_gains(model, cases.images, baseline=swapped, temperature=temperature),
        lambda: sc.background.discover_masks(model, cases.images, steps=1, temperature=temperature),
        lambda: sc.background.interchange(model, cases.images, swapped, temperature=temperature),
        lambda: sc.background.score(model, cases.images, cases.oracle, temperature=temperature),
    ):
        with pytest.raises(BadOption, match="a number above 0"):
            run()
