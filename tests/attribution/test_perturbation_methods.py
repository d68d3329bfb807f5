"""RISE, AtMan, TIS, MUTEX, ViT-CX: many altered images or token sets, one score for each."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.attribution import attention, perturbation
from seecause.engine.trace import kept_logits, record
from tests.helpers import near, noise, ready, view
from tests.tiny import tiny

# RISE


@torch.no_grad()
def test_rise_is_the_weighted_mean_of_its_masks():
    native, model, images = ready("timm_deit3")
    masks = perturbation.random_masks(5, 3, 0.4, native.size, seed=7)(0, 5)
    assert masks.shape == (5, 32, 48) and masks.min() >= 0 and masks.max() <= 1 + 1e-12
    expected = torch.zeros(2, 32, 48, dtype=torch.float64)
    for mask in masks:
        expected += model(images * mask).softmax(dim=-1)[:, 3, None, None] * mask / (5 * 0.4)
    found = sc.attribute(model, images, 3, "rise", masks=5, cells=3, p=0.4, seed=7)
    near(found.native, expected)
    cells = expected.unflatten(1, (4, 8)).unflatten(3, (6, 8)).mean(dim=(2, 4))
    near(found.maps, cells)


# AtMan


@torch.no_grad()
def test_atman_equals_a_native_run_with_biased_scores():
    native, model, images = ready("timm_registers", 1)
    found = sc.attribute(model, images, 3, "atman", kappa=0.2, factor=0.3).maps.flatten()
    module, patch, layout = native.module, 8, model.layout
    h = module._pos_embed(module.patch_embed(images))
    tokens = h[0, layout.prefix :]
    alike = torch.cosine_similarity(tokens, tokens[patch], dim=-1)
    down = torch.ones(layout.tokens, dtype=torch.float64)
    down[layout.prefix :] = torch.where(alike >= 0.2, 0.7 * (1 - alike) + 0.3, 1.0)
    assert (down < 1).sum() > 1
    for block in module.blocks:
        q, k, v = block.attn.qkv(block.norm1(h)).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / 8**0.5 + down.log()
        h = h + block.ls1(block.attn.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        h = h + block.ls2(block.mlp(block.norm2(h)))
    lost = (
        model(images).log_softmax(-1)[0, 3]
        - module.forward_head(module.norm(h)).log_softmax(-1)[0, 3]
    )
    near(found[patch], lost)


def test_atman_neighbours():
    tokens = torch.tensor([[[1.0, 0], [1, 0], [1, 1], [-1, 0]]], dtype=torch.float64)
    half = 0.5**0.5
    assert_close(
        attention.neighbours(tokens, 0.1, kappa=0.6)[0, 0],
        torch.tensor([0.1, 0.1, 0.9 * (1 - half) + 0.1, 1], dtype=torch.float64),
    )
    assert_close(
        attention.neighbours(tokens, 0.1, kappa=-1.0)[0, 0, 3],
        torch.tensor(1.0, dtype=torch.float64),
    )  # never the opposite
    alone = torch.full((4, 4), 1.0, dtype=torch.float64).fill_diagonal_(0.1)
    assert_close(attention.neighbours(tokens, 0.1, kappa=2.0)[0], alone)


# TIS


@torch.no_grad()
def test_tis_is_the_mean_score_over_choices_that_had_the_patch():
    _, model, images = ready("timm_mean", 1)
    layout = model.layout
    states = record(model, images, states=range(1, 5)).states
    channels = torch.cat([states[i][0, layout.patches].T for i in range(1, 5)])  # [4 * 24, 24]
    masks = perturbation.top(perturbation.centres(channels, 6, seed=0), 12)
    assert masks.shape == (6, 24) and (masks.sum(dim=1) == int(0.5 * 24)).all()
    total, count = torch.zeros(24, dtype=torch.float64), torch.zeros(24, dtype=torch.float64)
    for mask in masks:
        total += (
            mask
            * kept_logits(model, model.embed(images), mask[None], layout.at()).softmax(-1)[0, 2]
        )
        count += mask
    found = sc.attribute(model, images, 2, "tis", masks=6).maps.flatten()
    near(found, torch.where(count > 0, total / count, 0.0), 1e-10)


# MUTEX


def test_mutex_has_54_masks_and_keeps_99_of_196():
    table = noise(1, 3, 2, 5, 196).abs().numpy()
    values = torch.from_numpy(perturbation.statistics(table)).flatten(1, 3)
    kept = perturbation.upper(values, 0.5).sum(dim=-1)
    assert kept.shape == (1, 54) and (kept == 99).all()
    tied = torch.tensor([[1.0, 1, 1, 2]])
    assert perturbation.upper(tied, 0.5).all()


def test_mutex_statistics_of_a_node_by_hand():
    table = np.array([[1.0, 0.0], [2.0, 0.0], [4.0, 0.0], [1.0, 0.0]])
    found = perturbation.statistics(table)  # [9, 2 nodes]
    share, spread = np.array([1, 2, 4, 1]) / 8, np.sqrt(2.0)
    centred = np.array([-1.0, 0, 2, -1])
    skew, kurtosis = (centred**3).mean() / 1.5**1.5, (centred**4).mean() / 1.5**2 - 3
    expected = [
        -(share * np.log(share)).sum(), 4, 1, 8, spread, 8 / (spread + 1e-8), 1, skew, kurtosis
    ]  # fmt: skip
    np.testing.assert_allclose(found[:, 0], expected)
    assert (found[:, 1] == 0).all()  # what has no meaning is 0
    assert np.isfinite(perturbation.statistics(np.zeros((1, 4)))).all()


# ViT-CX


@pytest.mark.parametrize("faint", [0.0, 0.1])
@torch.no_grad()
def test_vit_cx_equals_its_equations(faint):
    native, model, images = ready("timm_deit3", 1)
    found = sc.attribute(model, images, 3, "vit-cx", noise=faint, threshold=0.3, seed=5)
    normed = (
        native.module.blocks[-1]
        .norm1(record(model, images, states=[3]).states[3])[0, 1:]
        .T.unflatten(1, (4, 6))
    )
    masks = perturbation.cluster(normed, native.size, threshold=0.3)
    assert found.manifest["used"]["masks"] == [len(masks)] and 1 < len(masks) < 24
    assert_close(masks.amax(dim=(1, 2)), torch.ones(len(masks), dtype=torch.float64))
    seeds = torch.randint(2**31, (24,), generator=torch.Generator().manual_seed(5)).tolist()
    behind = faint * (1 - masks[:, None]) * perturbation._noise(seeds[: len(masks)], images)
    shown, disturbed, plain = (
        model(x).softmax(-1)[:, 3]
        for x in (images * masks[:, None] + behind, images + behind, images)
    )
    cause = shown - disturbed + plain
    expected = (cause[:, None, None] * masks).sum(dim=0) / (len(masks) * masks.sum(dim=0))
    near(found.native[0], expected, 1e-10)


def test_vit_cx_clusters_are_sums_of_alike_channels():
    channels = noise(3, 4, 6)
    doubled = torch.cat(
        [channels, 2 * channels + 1, torch.ones(1, 4, 6, dtype=torch.float64)]
    )  # alike after scaling; the last is flat
    masks = perturbation.cluster(doubled, (8, 12), threshold=1e-6)
    assert len(masks) == 4
    large = torch.nn.functional.interpolate(channels[None], (8, 12), mode="bilinear")[0]
    for one in perturbation.scaled(large):
        assert (masks - one).abs().amax(dim=(1, 2)).min() < 1e-12


# Controls


def test_each_image_has_its_own_noise_whatever_its_place_and_precision():
    native = tiny("timm_registers")
    generator = torch.Generator().manual_seed(0)
    raw = torch.rand(3, 3, *native.size, generator=generator).mul(255).round() / 255
    together = []
    for dtype in (torch.float64, torch.float32):
        model = view(tiny("timm_registers", dtype=dtype), check=False)
        images = model.preprocess.normalise(raw.to(dtype))
        together.append(sc.attribute(model, images, 0, "random").maps.double())
    assert torch.equal(*together)
    alone = [sc.attribute(model, one[None], 0, "random").maps.double() for one in images.flip(0)]
    assert torch.equal(together[0], torch.cat(alone).flip(0))
    assert len(torch.unique(together[0])) == together[0].numel()
    other = sc.attribute(model, images, 0, "random", seed=1).maps
    assert not torch.equal(together[0], other.double())
