"""Each loss against its slow twin, and the values it must have by construction."""

import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from seecause.faithful import losses
from seecause.faithful.losses import (
    Affine,
    LossWeights,
    TrainingLosses,
    background_loss,
    entropy_loss,
    equivariance_loss,
    objective,
    orthogonality_loss,
    parameter_groups,
    presence_loss,
    total_variation_loss,
)
from seecause.faithful.parts import Noise
from tests.faithful.nets import SIZE, random_images, tiny_net
from tests.helpers import noise
from tests.reference import ifam as reference

EXACT = {"atol": 1e-10, "rtol": 0}
MAPS = torch.softmax(2 * noise(2, 4, 5, 6), dim=1)


@pytest.mark.parametrize("name", ["presence", "background", "total_variation"])
def test_losses_equal_their_slow_twins(name):
    fast = {
        "presence": presence_loss,
        "background": background_loss,
        "total_variation": total_variation_loss,
    }[name]
    assert_close(fast(MAPS), getattr(reference, name)(MAPS), **EXACT)
    assert torch.autograd.gradcheck(fast, (MAPS.clone().requires_grad_(),), fast_mode=True)


def test_entropy_of_doubt_and_certainty():
    assert_close(entropy_loss(torch.full((2, 4, 3, 3), 0.25)), torch.tensor(math.log(4)))
    sure = torch.zeros(1, 4, 3, 3)
    sure[:, 1] = 1
    assert entropy_loss(sure).abs() < 1e-6
    each = torch.distributions.Categorical(probs=MAPS.movedim(1, -1)).entropy()
    assert_close(entropy_loss(MAPS), each.mean(), **EXACT)


def test_orthogonality_in_both_forms():
    v = noise(2, 10, 4)
    assert_close(orthogonality_loss(v), reference.orthogonality(v), **EXACT)
    assert_close(
        orthogonality_loss(v, form="ifam_code"), reference.orthogonality(v.transpose(1, 2)), **EXACT
    )
    apart = torch.eye(10, dtype=torch.float64)[None, :, :4]
    assert orthogonality_loss(apart) == 0
    assert orthogonality_loss(v, form="ifam_code") >= 1 / 4 - 1 / 10


def test_equivariance():
    still = Affine(0.0, (0, 0), 1.0)
    assert equivariance_loss(MAPS, MAPS, still, (40, 48)).abs() < 1e-12
    others = torch.softmax(2 * noise(2, 4, 5, 6, seed=1), dim=1)
    a, b = (maps[:, :-1].flatten(2) for maps in (MAPS, others))  # parts, not the background
    cosines = (a * b).sum(dim=2) / (a.norm(dim=2) * b.norm(dim=2))
    expected = 1 - cosines.mean()
    assert_close(equivariance_loss(MAPS, others, still, (40, 48)), expected, **EXACT)
    blob = torch.zeros(1, 2, 37, 37)
    y, x = torch.meshgrid(torch.arange(37.0), torch.arange(37.0), indexing="ij")
    blob[0, 0] = torch.exp(-((y - 20) ** 2 + (x - 16) ** 2) / 30)
    blob[0, 1] = 1 - blob[0, 0]
    for step in range(5):
        drawn = Affine.draw(0, step, (518, 518))
        pixels = blob.repeat_interleave(14, dim=2).repeat_interleave(14, dim=3)
        warped = torch.nn.functional.avg_pool2d(drawn.warp(pixels), 14)
        assert equivariance_loss(blob, warped, drawn, (518, 518)) < 0.2
        assert equivariance_loss(blob, warped, still, (518, 518)) > equivariance_loss(
            blob, warped, drawn, (518, 518)
        )
    assert (
        Affine.draw(0, 3, (518, 518))
        == Affine.draw(0, 3, (518, 518))
        != Affine.draw(1, 3, (518, 518))
    )


def test_maps_of_an_image_that_is_not_square_come_back_by_its_own_sides():
    """10 of 40 pixels across are 1 of 4 patches; 10 of 20 down are 2 of 4."""
    maps = torch.zeros(1, 1, 4, 4)
    maps[0, 0, 3, 3] = 1
    back = Affine(0.0, (10, 0), 1.0).unwarp(maps, (20, 40))
    assert back[0, 0].nonzero().tolist() == [[3, 2]]
    back = Affine(0.0, (0, 10), 1.0).unwarp(maps, (20, 40))
    assert back[0, 0].nonzero().tolist() == [[1, 3]]


def test_every_loss_counts_by_its_weight():
    net, images, labels = tiny_net(), random_images(2), torch.tensor([0, 1])
    moved = Affine(30.0, (2, -3), 1.1)
    out = net(images, warped=moved.warp(images), noise=Noise(0, 0, torch.arange(2)))
    losses = objective(net, out, labels, size=SIZE, moved=moved)
    assert_close(losses["class1"], F.cross_entropy(out.part_logits.mean(dim=-1), labels), **EXACT)
    assert_close(losses["class2"], F.cross_entropy(out.logits, labels), **EXACT)
    assert_close(losses["background"], background_loss(out.maps), **EXACT)
    for name in asdict(LossWeights()):
        alone = LossWeights(**{other: 3.0 * (other == name) for other in asdict(LossWeights())})
        own = objective(net, out, labels, size=SIZE, moved=moved, weights=alone)
        assert_close(own["total"], 3 * losses[name], **EXACT)
        assert_close(own[name], losses[name], **EXACT)


@pytest.mark.parametrize("across", ["global", "local"])
def test_a_part_may_be_present_in_the_batch_of_another_process(across, monkeypatch):
    net, images, labels = tiny_net(presence=across), random_images(2), torch.tensor([0, 1])
    out = net(images)
    monkeypatch.setattr(losses.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(losses, "all_gather", lambda mine: [mine, torch.ones_like(mine)])
    found = objective(net, out, labels, size=SIZE)["presence"]
    mine = reference.presence(out.maps)
    assert mine > 0.01
    assert_close(found, 0 * mine if across == "global" else mine, **EXACT)


@pytest.mark.parametrize("form", ["parts", "ifam_code", "prototypes"])
def test_what_is_decorrelated_is_an_option(form):
    """Part embeddings of every image, in two ways, or the prototypes."""
    net, images, labels = tiny_net(orthogonality=form), random_images(2), torch.tensor([0, 1])
    out = net(images)
    decorrelated = {
        "parts": out.embeddings,
        "ifam_code": out.embeddings.transpose(1, 2),
        "prototypes": net.stage1.prototypes.T[None],
    }
    found = objective(net, out, labels, size=SIZE)["orthogonality"]
    for name, value in decorrelated.items():
        assert (abs(found - reference.orthogonality(value)) < 1e-10) == (name == form)


def rates(net, base=1e-6):
    """The rate, relative to the base, and the decay of every parameter that learns."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    grouped = [
        (names[id(parameter)], (round(group["lr"] / base), group["weight_decay"]))
        for group in parameter_groups(net, base, 0.05)
        for parameter in group["params"]
    ]
    found = dict(grouped)
    assert len(found) == len(grouped)
    assert set(found) == {n for n, p in net.named_parameters() if p.requires_grad}
    return found


def test_parameters_learn_at_the_rates_of_the_paper():
    found = rates(tiny_net())
    first, second = "stage1.tower.native.", "stage2.tower.native."
    expected = {
        "stage1.prototypes": (1000, 0), "stage1.classifier.weight": (10_000, 0.05),
        "stage1.modulation.weight": (10_000, 0), "stage1.modulation.bias": (10_000, 0),
        "stage2.fc_norm.weight": (10_000, 0), "stage2.fc_norm.bias": (10_000, 0),
        "stage2.head.weight": (10_000, 0.05),
    }  # fmt: skip
    tokens = ("cls_token", "reg_token", "pos_embed")
    expected |= {stage + name: (1, 0) for stage in (first, second) for name in tokens}
    assert {name: found[name] for name in expected} == expected
    others = {name: rate for name, rate in found.items() if name not in expected}
    assert others and all(name.startswith(second) for name in others)  # stage 1 is frozen
    parameters = dict(tiny_net().named_parameters())
    assert all(rate == (1, 0.05 * (parameters[n].ndim >= 2)) for n, rate in others.items())
    assert rates(tiny_net(freeze="both")).keys() == expected.keys()
    assert first + "blocks.0.attn.qkv.weight" in rates(tiny_net(freeze="none"))
    assert not any(name.startswith("stage2") for name in rates(tiny_net(stages=1)))


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_a_step_learns_from_its_images_moved_and_noised_by_seed_step_and_id(weight):
    net, images = tiny_net().train(), random_images(2)
    labels, ids = torch.tensor([2, 0]), torch.tensor([7, 3])
    weights = LossWeights(equivariance=weight, class1=0.25, background=3.0)
    total, losses, logits = TrainingLosses(net, weights)(images, labels, ids, 4, 9)
    moved = Affine.draw(4, 9, SIZE)
    warped = moved.warp(images) if weight else None
    out = net(images, noise=Noise(4, 9, ids), warped=warped)
    expected = objective(
        net, out, labels, size=SIZE, moved=moved if weight else None, weights=weights
    )
    assert losses.keys() == expected.keys() and ("equivariance" in losses) == (weight > 0)
    for name, value in losses.items():
        assert_close(value, expected[name].detach(), **EXACT)
        assert not value.requires_grad
    assert torch.equal(total.detach(), losses["total"]) and total.requires_grad
    assert_close(logits, out.logits.detach(), **EXACT)
    assert not logits.requires_grad
