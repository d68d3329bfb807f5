"""MDA searches like its slow twin, and reads the map off the order it found."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.attribution import perturbation as mda
from seecause.engine.trace import explicit_run
from tests.helpers import near, noise, ready


def slow_order(answer, guide, start, reach, tries):
    """The two searches for one image, one patch at a time. `answer(shown, inserting)` is the score
    of a set of patches."""
    order, goal = [], answer(range(len(guide)), True)
    left = set(range(len(guide)))
    while left:
        tried = sorted(left, key=lambda i: -guide[i])[:tries]
        values = [answer([*order, i], True) for i in tried]
        best = max(range(len(tried)), key=lambda i: values[i])
        order.append(tried[best])
        left.remove(tried[best])
        if values[best] - start >= reach * abs(goal - start):
            break
    tail = []
    while left:
        tried = sorted(left, key=lambda i: guide[i])[:tries]
        values = [answer([*tail, i], False) for i in tried]
        best = min(range(len(tried)), key=lambda i: values[i])
        tail.append(tried[best])
        left.remove(tried[best])
    return order + tail[::-1], len(order)


@pytest.mark.parametrize("reach", [0.3, 0.9, 9.0])  # the last is never reached
@torch.no_grad()
def test_mda_searches_like_the_slow_twin_and_drops_no_image(reach):
    _, model, images = ready("timm_deit3", 3)
    guide, soft = noise(3, 24), mda.box(images, 31)
    blurred = torch.nn.functional.avg_pool2d(images, 31, stride=1, padding=15)
    near(soft, blurred)
    for image, behind, hints in zip(images, soft, guide, strict=True):

        def scores(shown, back, image=image):
            pixels = shown.view(-1, 1, 4, 6).repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
            return model(torch.where(pixels, image, back)).softmax(-1)[:, 2]

        order, beginning = mda.search(scores, behind, hints, tries=3, reach=reach)
        assert sorted(order.tolist()) == list(range(24))  # every patch once
        assert reach < 9 or beginning == 24

        def answer(shown, inserting, image=image, behind=behind):
            picture = behind.clone() if inserting else torch.zeros_like(image)
            for i in shown:
                part = (..., slice(i // 6 * 8, i // 6 * 8 + 8), slice(i % 6 * 8, i % 6 * 8 + 8))
                picture[part] = image[part]
            return float(model(picture[None]).softmax(-1)[0, 2])

        slow = slow_order(answer, hints.tolist(), answer([], True), reach, 3)
        assert slow == (order.tolist(), beginning)


def test_the_guide_equals_its_equations():
    _, model, images = ready("timm_registers", 1)
    found = sc.attribute(model, images, 3, "bt", steps=2, start=1).maps.flatten()

    def attention(
        pictures,
    ):  # probabilities [3 heads, T, T] of the last three blocks, and their gradients
        run = explicit_run(model, pictures, start=1)
        return [p.detach()[0] for p in run.probs], [
            g[0] for g in torch.autograd.grad(run.logits[0, 3], run.probs)
        ]

    reach = torch.eye(28, dtype=torch.float64)
    for probs, slope in zip(*attention(images), strict=True):
        share = torch.stack([(a.T @ g).abs().mean() for a, g in zip(probs, slope, strict=True)])
        reach = reach + sum(s / share.sum() * a for s, a in zip(share, probs, strict=True)) @ reach
    weight = sum(attention(alpha * images)[1][-1] for alpha in (0, 1)) / 2
    assert_close(found, (reach[0] * weight.relu().mean(dim=0)[0])[4:], atol=1e-12, rtol=1e-9)


def test_mda_maps_follow_the_order_and_say_what_failed():
    _, model, images = ready("timm_registers")
    options = {"candidates": 2, "guide": "caap"}
    found = sc.attribute(model, images, 1, "mda", reach=9.0, faint=-1.0, **options)
    assert found.manifest["used"] == {"beginning": [24, 24], "blur is faint": [False, False]}
    assert (found.maps >= 0).all() and (found.maps.amax(dim=(1, 2)) > 0).all()
    faint = sc.attribute(model, images, 1, "mda", faint=1.0, **options)
    assert faint.manifest["used"]["blur is faint"] == [True, True]


def test_the_blur_is_the_narrowest_that_makes_the_score_faint():
    image = torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(0)).double()

    def spread(x):
        return (x - x.mean(dim=(-2, -1), keepdim=True)).abs().mean()

    limit = float(spread(mda.box(image, 61)))
    soft, is_faint = mda.blur(lambda shown, x: spread(x)[None], image, 4, limit)
    assert is_faint and torch.equal(soft, mda.box(image, 61))
    soft, is_faint = mda.blur(lambda shown, x: spread(x)[None], image, 4, -1.0)
    assert not is_faint and torch.equal(soft, mda.box(image, 101))


def test_mda_fits_the_best_convex_curve():
    falling = np.array([1, 0.5, 0.3, 0.2, 0.0])  # convex already
    assert np.allclose(mda.convex_drops(falling), [0.5, 0.2, 0.1, 0.2], atol=0.1) and np.allclose(
        mda.convex_drops(falling).sum(), 1
    )
    convex = np.array([1, 0.5, 0.25, 0.1, 0.0])
    assert np.allclose(mda.convex_drops(convex), -np.diff(convex), atol=1e-6)
    rough = np.clip(np.linspace(1, 0, 25) + 0.3 * noise(25).numpy(), 0, 1)
    drops = mda.convex_drops(rough)
    assert (drops >= -1e-12).all() and (np.diff(drops) <= 1e-9).all() and np.isclose(drops.sum(), 1)
    goal, best = np.minimum.accumulate(rough)[1:], 1 - np.cumsum(drops)
    for other in np.eye(24):  # no step towards another ramp is better
        ramp = 1 - np.minimum(np.arange(1, 25) / (other.argmax() + 1), 1)
        assert (best - goal) @ (ramp - best) > -1e-6
