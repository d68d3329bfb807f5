"""What of the stage-2 loss reaches stage 1, and the kernel for sequences of different lengths:
where there is one, and that it is given the same rows as attention image by image."""

from dataclasses import asdict

import pytest
import torch
from torch.testing import assert_close

from seecause.engine.chunks import budget
from seecause.faithful.losses import Affine, LossWeights, objective
from seecause.faithful.parts import Noise, Purpose, select
from seecause.faithful.stages import reads_only, reads_straight_through
from tests.faithful.nets import random_images, tiny_net
from tests.helpers import noise
from tests.reference import ifam as reference

EXACT = {"atol": 1e-10, "rtol": 0}


def _slope(net, images, **options):
    """Gradient of a stage-2 loss with respect to the prototypes."""
    out = net(images, **options)
    (out.logits * noise(*out.logits.shape, seed=5)).sum().backward()
    return net.stage1.prototypes.grad


def test_without_a_path_nothing_of_stage_2_reaches_stage_1():
    net, draws = tiny_net(gradient="none").train(), Noise(0, 0, torch.arange(3))
    assert _slope(net, random_images(), noise=draws) is None
    assert all(p.grad is None for p in net.stage1.parameters())
    assert all(p.grad is not None for p in net.stage2.parameters() if p.requires_grad)


@torch.no_grad()
def test_all_three_answer_from_the_mask_they_decided():
    images, draws = random_images(), Noise(0, 0, torch.arange(3))
    outs = {g: tiny_net(gradient=g).train()(images, noise=draws) for g in ("ste", "none", "soft")}
    assert torch.equal(outs["ste"].mask, outs["none"].mask)
    assert_close(outs["ste"].logits, outs["none"].logits, **EXACT)
    assert not torch.allclose(outs["soft"].logits, outs["none"].logits)


@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_a_soft_network_reads_every_patch_by_its_best_part(training):
    net, images = tiny_net(gradient="soft", part_dropout2=0.5).train(training), random_images()
    out = net(images, noise=Noise(0, 0, torch.arange(3)))
    stage = (net.stage2.tower.native, net.stage2.fc_norm, net.stage2.head)
    for image, pair, logits in zip(images, out.pair.flatten(2), out.logits, strict=True):
        assert_close(logits, reference.relaxed(*stage, image, pair[0]), atol=1e-7, rtol=0)
    if not training:
        assert_close(out.pair[:, 0], out.maps[:, :-1].amax(dim=1), **EXACT)


def test_straight_through_is_the_gradient_of_the_relaxed_mask():
    """Against finite differences of the slow twin, for selected and hidden patches alike."""
    net, image = tiny_net(), random_images(1)
    stage = net.stage2
    mask = net(image).mask.flatten(1)
    assert mask.any() and not mask.all()
    weights = mask.double().requires_grad_()
    visible = torch.cat([torch.ones(1, len(stage.prefix), dtype=torch.float64), weights], dim=1)
    mix = noise(4, seed=2)
    (slope,) = torch.autograd.grad(
        (stage.masked(image, reads_straight_through(visible)) * mix).sum(), weights
    )
    step = 1e-6
    with torch.no_grad():
        for n in range(mask.shape[1]):
            ends = [reference.relaxed(stage.tower.native, stage.fc_norm, stage.head, image[0],
            mask[0].double().index_fill(0, torch.tensor(n), at))
                    for at in (float(mask[0, n]) - step, float(mask[0, n]) + step)]  # fmt: skip
            assert_close(
                slope[0, n], ((ends[1] - ends[0]) * mix).sum() / (2 * step), atol=1e-8, rtol=1e-5
            )
    assert (slope[~mask] != 0).all() and (slope[mask] != 0).all()


def test_stage_1_gets_the_relaxed_gradient_through_the_sum_of_parts():
    net, images = tiny_net(part_dropout2=0.0).train(), random_images()
    draws = Noise(0, 0, torch.arange(3))
    (net(images, noise=draws).logits * noise(3, 4, seed=5)).sum().backward()
    whole = net.stage1.prototypes.grad.clone()

    net.zero_grad()
    features = net.stage1.tower.features(images)
    _, maps = net.assign(features, draws, Purpose.MASK)
    chosen = select(maps)
    weights = chosen.hard.double().requires_grad_()
    seen = torch.cat([torch.ones(3, 3, dtype=torch.float64), weights], dim=1)
    (slope,) = torch.autograd.grad(
        (net.stage2.masked(images, reads_straight_through(seen)) * noise(3, 4, seed=5)).sum(),
        weights,
    )
    maps[:, :-1].sum(dim=1).backward(slope)
    assert_close(net.stage1.prototypes.grad, whole, **EXACT)


def test_the_attention_itself_has_the_masked_gradients():
    """At a scale that is not the one of the width."""
    q, k, v = (noise(2, 3, 7, 4, seed=s).requires_grad_() for s in range(3))
    visible = noise(2, 7, seed=4) > -0.5
    slope = noise(2, 7, 3, 4, seed=6)
    expected = torch.autograd.grad(reads_only(visible)(q, k, v, 0.3), (q, k, v), slope)
    weights = visible.double().requires_grad_()
    with budget(1):  # one image at a time
        got = torch.autograd.grad(
            reads_straight_through(weights)(q, k, v, 0.3), (q, k, v, weights), slope
        )
    for a, b in zip(got, expected, strict=False):
        assert_close(a, b, **EXACT)
    together = torch.autograd.grad(reads_straight_through(weights)(q, k, v, 0.3), weights, slope)[0]
    assert_close(together, got[3], **EXACT)


def test_one_backward_trains_everything_that_is_to_be_trained():
    net, images = tiny_net().train(), random_images()
    moved = Affine.draw(0, 0, images.shape[-2:])
    out = net(images, noise=Noise(0, 0, torch.arange(3)), warped=moved.warp(images))
    result = objective(net, out, torch.tensor([0, 1, 3]), size=images.shape[-2:], moved=moved)
    assert set(result) == {*asdict(LossWeights()), "total"}
    result["total"].backward()
    for name, parameter in net.named_parameters():
        assert (
            parameter.grad is not None and parameter.grad.isfinite().all()
        ) == parameter.requires_grad, name


@pytest.mark.parametrize("packed", [True, False])
@torch.no_grad()
def test_unselected_pixels_cannot_change_one_bit(packed):
    net, images = tiny_net(), random_images()
    mask = net(images).mask
    hidden = ~mask.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)[:, None]
    noisy = torch.where(hidden, 100 * torch.randn_like(images), images)
    assert torch.equal(
        net(noisy, mask=mask, packed=packed).logits, net(images, mask=mask, packed=packed).logits
    )
    assert not torch.equal(
        net(noisy, mask=~mask, packed=packed).logits, net(images, mask=~mask, packed=packed).logits
    )


@torch.no_grad()
def test_empty_and_full_masks():
    net, images = tiny_net(), random_images(2)
    grid = net(images).mask
    empty = net(images, mask=torch.zeros_like(grid))
    assert empty.logits.isfinite().all() and empty.empty.all()
    assert_close(empty.logits[0], empty.logits[1], **EXACT)  # nothing of either image is left
    assert_close(
        empty.logits, net(images, mask=torch.zeros_like(grid), packed=False).logits, **EXACT
    )
    stage = net.stage2
    plain = stage.head(stage.fc_norm(stage.tower.native.forward_features(images)[:, 0]))
    for packed in (True, False):
        assert_close(net(images, mask=torch.ones_like(grid), packed=packed).logits, plain, **EXACT)
