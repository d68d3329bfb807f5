"""FIG, BIG and BIR by every baseline, and the Jensen-Shannon divergence, which keeps its digits
where single heads live."""

import pytest
import torch
from torch.testing import assert_close

from seecause.background import LabelledImages, information_gains
from seecause.background.gains import Erased, Gains, fill_images, jensen_shannon, log_probs
from seecause.data.dataset import IGNORE
from seecause.engine.chunks import budget
from seecause.errors import BadImage, BadOption, NotDefined
from tests.background.toys import masked_case as case
from tests.helpers import noise
from tests.reference import cigma as reference


@pytest.mark.parametrize(("temperature", "fill"), [(1.0, "grey"), (2.0, "grey"), (1.0, "mean")])
def test_gains_are_those_of_native_forwards(temperature, fill):
    native, model, data = case(batch=3)
    images, masks = data.images, data.masks.hard
    result = information_gains(model, data, temperature=temperature, fill=fill)
    pairs = zip(images, masks, strict=True)
    expected = [reference.gains(native.forward, x, m, temperature, fill) for x, m in pairs]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert_close(torch.stack([result.fig, result.big], dim=1), expected, atol=1e-10, rtol=0)
    assert_close(result.bir, result.big / (result.fig + result.big))
    assert result.protocol["masks"] == {"source": "given"} and result.noise_floor < 1e-12
    with budget(1):
        again = information_gains(model, data, temperature=temperature, fill=fill)
    assert_close(again.big, result.big, atol=1e-12, rtol=0)


def test_both_ratios_and_degenerate_images():
    gains = Gains(
        fig=torch.tensor([0.3, 0.0, 0.1]).double(),
        big=torch.tensor([0.1, 0.0, 0.0]).double(),
        noise_floor=0.0,
    )
    assert gains.bir.tolist() == pytest.approx([0.25, 0.5, 0.0])
    assert gains.degenerate.tolist() == [False, True, False]
    assert gains.bir_mean_of_ratios == pytest.approx(0.25)
    assert gains.bir_ratio_of_means == pytest.approx(0.2)
    faint = Gains(torch.tensor([3e-8]).double(), torch.tensor([1e-8]).double(), 0.0)
    assert faint.bir.tolist() == pytest.approx([0.25]) and not faint.degenerate.any()
    nothing = Gains(torch.zeros(2).double(), torch.zeros(2).double(), 0.0)
    assert nothing.bir_ratio_of_means == 0.5


def test_an_interval_is_that_of_the_ratio_of_means():
    fig = torch.tensor([0.3, 0.2, 0.5, 0.1, 0.3, 0.4])
    big = torch.tensor([0.1, 0, 0, 0.3, 0.2, 0.1])
    gains = Gains(fig.double(), big.double(), 0.0)
    low, high = gains.interval
    assert 0 < low < gains.bir_ratio_of_means < high < 1
    alone = Gains(gains.fig[:1], gains.big[:1], 0.0)
    assert alone.interval[0] != alone.interval[0]
    some = Gains(gains.fig[[0, 3]], gains.big[[0, 3]], 0.0)
    low, high = some.interval  # two tell something: 0.25 and 0.75
    assert (low, high) == pytest.approx((0.25, 0.75))


def test_fills_are_what_they_are_called():
    _, model, data = case(batch=2)
    images = data.images
    blurred, sigma = fill_images(model, images, "blur"), 10 / 224 * 48
    x = torch.arange(-4, 5, dtype=torch.float64)  # two deviations to each side
    bell = (-0.5 * (x / sigma).square()).exp()
    kernel = (bell[:, None] * bell / bell.sum() ** 2).expand(3, 1, 9, 9)
    padded = torch.nn.functional.pad(images, [4] * 4, mode="reflect")
    assert_close(blurred, torch.nn.functional.conv2d(padded, kernel, groups=3))
    narrow = fill_images(model, images[:, :, :4], "blur")  # no wider than can be reflected
    assert narrow.shape == (2, 3, 4, 48) and narrow.isfinite().all()
    noisy = fill_images(model, images, "noise")
    assert noisy.shape == (1, 3, 32, 48) and 0.5 < noisy.std() < 1.5 and noisy.dtype == images.dtype
    assert (fill_images(model, images, "grey") == 0).all()


def test_pixels_of_which_nothing_is_known_stay_in_both_versions():
    _, model, data = case(batch=3)
    images, masks = data.images, data.masks.hard
    truth = masks.int()
    truth[1, :, :8] = IGNORE
    data = LabelledImages(images, masks=truth)
    shown = Erased(model, data).versions(slice(1, 3))
    for erased, known in zip(shown, (1, 0), strict=True):
        keep = (truth[1:] == known) | (truth[1:] == IGNORE)
        assert torch.equal(erased, torch.where(keep[:, None], images[1:], 0.0))
    colour = images[1][:, truth[1] != IGNORE].mean(dim=1)  # of the rest alone
    mean = Erased(model, data, "mean").versions(slice(1, 2))[1][0]
    assert_close(mean[:, truth[1] == 1], colour[:, None].expand(-1, int(masks[1, :, 8:].sum())))


def test_each_image_has_its_own_mask():
    """In whichever part of the images it is; masks may be on patches."""
    _, model, data = case(batch=3)
    images, masks = data.images, data.masks.hard
    fill = torch.zeros_like(images)
    for given in (masks, masks[:, ::8, ::8]):
        erased = Erased(model, LabelledImages(images, masks=given))
        high, wide = 32 // given.shape[1], 48 // given.shape[2]
        pixels = given.repeat_interleave(high, 1).repeat_interleave(wide, 2)
        for rows in (slice(0, 2), slice(2, 3)):
            no_background, no_object = erased.versions(rows)
            keep = pixels[rows, None]
            assert_close(no_background, torch.where(keep, images[rows], fill[rows]))
            assert_close(no_object, torch.where(keep, fill[rows], images[rows]))
    data = LabelledImages(images, other_background=fill, other_object=-fill)
    both = Erased(model, data, "swap").versions(slice(1, 3))
    assert torch.equal(both[0], fill[1:]) and torch.equal(both[1], -fill[1:])


def test_bad_input_is_refused():
    _, model, data = case(batch=3)
    images, masks = data.images, data.masks.hard
    with pytest.raises(BadOption, match="masks of the images"):
        information_gains(model, LabelledImages(images))
    with pytest.raises(BadImage, match="at least one image"):
        information_gains(model, LabelledImages(images[:0], masks=masks[:0]))
    pairs = LabelledImages(images, other_background=images)
    with pytest.raises(BadOption, match="other objects on the same backgrounds"):
        information_gains(model, pairs, fill="swap")
    for temperature in (0, -1.0):
        with pytest.raises(BadOption, match="a number above 0"):
            information_gains(model, data, temperature=temperature)
    model.sigmoid = True
    with pytest.raises(NotDefined, match=r"classes of .* are independent"):
        information_gains(model, data)


def pair(classes, distance, seed=0, spread=2.0):
    """Two float64 logit vectors [64, C], about `distance` apart."""
    first = spread * noise(64, classes, seed=seed)
    return first, first + distance * noise(64, classes, seed=seed + 1)


@pytest.mark.parametrize("distance", [1e-3, 0.5, 3.0, 30.0])
def test_it_is_the_textbook_sum(distance):
    first, second = pair(10, distance)
    p, q = (torch.softmax(x, dim=-1) for x in (first, second))
    expected = [reference.js(a, b) for a, b in zip(p, q, strict=True)]
    found = jensen_shannon(log_probs(first), log_probs(second))
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-14, rtol=1e-9)


@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize(
    ("distance", "allowed"), [(1.0, 1e-5), (1e-1, 1e-4), (3e-3, 1e-4), (1e-4, 1e-2)]
)
def test_float32_keeps_its_digits(classes, distance, allowed):
    first, second = (x.float() for x in pair(classes, distance))
    exact = jensen_shannon(log_probs(first.double()), log_probs(second.double()))
    result = jensen_shannon(log_probs(first), log_probs(second))
    assert result.dtype == torch.float32 and (result > 0).all()
    assert ((result.double() - exact).abs() / exact).median() < allowed


def test_its_gradient_is_right_and_zero_where_answers_agree():
    first, second = (x[:3] for x in pair(5, 1.0))
    fixed = log_probs(first)
    assert torch.autograd.gradcheck(
        lambda z: jensen_shannon(fixed, log_probs(z)), second.clone().requires_grad_()
    )
    same = first.clone().requires_grad_()
    (slope,) = torch.autograd.grad(jensen_shannon(fixed, log_probs(same)).sum(), same)
    assert slope.abs().max() < 1e-15
    far = torch.tensor([[300.0, 0.0, -300.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(
        jensen_shannon(log_probs(-far.detach()), log_probs(far)).sum(), far
    )
    assert slope.isfinite().all()
