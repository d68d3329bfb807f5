"""The network against its slow twin, and the guarantee: what is not selected cannot matter."""

import pytest
import timm
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadOption, UnsupportedModel
from seecause.faithful import IFAM
from seecause.faithful.parts import Noise, Purpose
from tests.faithful.nets import SQUARE, random_images, tiny_net
from tests.reference import ifam as reference

EXACT = {"atol": 1e-10, "rtol": 0}


@pytest.mark.parametrize("modulation", ["joint", "per_part"])
@torch.no_grad()
def test_both_stages_equal_the_slow_twin(modulation):
    net, images = tiny_net(modulation=modulation), random_images()
    out = net(images)
    assert 0 < out.mask.double().mean() < 1
    assert len(set(out.maps.argmax(dim=1).flatten().tolist())) == net.parts + 1
    for i, image in enumerate(images):
        z = reference.features(net.stage1.tower.native, image)
        maps = reference.maps(z, net.stage1.prototypes)
        assert_close(out.maps[i].flatten(1), maps, **EXACT)
        assert_close(
            out.distances[i].flatten(1), torch.cdist(net.stage1.prototypes, z) ** 2, **EXACT
        )
        assert_close(out.dots[i].flatten(1), net.stage1.prototypes @ z.T, **EXACT)
        affine = net.stage1.modulation
        v, votes = reference.votes(
            maps, z, affine.weight, affine.bias, net.stage1.classifier.weight, modulation == "joint"
        )
        assert_close(out.embeddings[i], v, **EXACT)
        assert_close(out.part_logits[i], votes, **EXACT)
        assert_close(out.stage1_logits[i], votes.mean(dim=1), **EXACT)
        mask = reference.selected(maps)
        assert torch.equal(out.mask[i].flatten(), mask)
        stage = net.stage2
        assert_close(
            out.logits[i],
            reference.on_selected(stage.tower.native, stage.fc_norm, stage.head, image, mask),
            **EXACT,
        )


@pytest.mark.parametrize(
    ("options", "of_mask"),
    [
        ({}, Purpose.MASK),
        ({"mask_noise": "own"}, Purpose.MASK),
        ({"mask_noise": "maps"}, Purpose.MAPS),
    ],
)
@torch.no_grad()
def test_training_draws_noise_for_the_mask_apart_or_takes_that_of_the_maps(options, of_mask):
    net, images = tiny_net(part_dropout=0.0, part_dropout2=0.0, **options).train(), random_images()
    noise = Noise(3, 5, torch.tensor([11, 4, 7]))
    out = net(images, noise=noise)
    like, stage = out.maps.flatten(2), net.stage2
    for i, image in enumerate(images):
        z = reference.features(net.stage1.tower.native, image)
        for_maps, for_mask = (noise.gumbel(purpose, like)[i] for purpose in (Purpose.MAPS, of_mask))
        assert_close(
            out.maps[i].flatten(1), reference.maps(z, net.stage1.prototypes, for_maps), **EXACT
        )
        mask = reference.selected(reference.maps(z, net.stage1.prototypes, for_mask))
        assert torch.equal(out.mask[i].flatten(), mask)
        assert_close(
            out.logits[i],
            reference.on_selected(stage.tower.native, stage.fc_norm, stage.head, image, mask),
            **EXACT,
        )
    same = torch.equal(out.mask, out.maps.argmax(dim=1) < net.parts)
    assert same == (of_mask is Purpose.MAPS)
    assert not torch.equal(out.mask, net.eval()(images).mask)


@torch.no_grad()
def test_warped_images_have_noise_of_their_own():
    net, images = tiny_net(part_dropout=0.0, part_dropout2=0.0).train(), random_images()
    noise, warped = Noise(3, 5, torch.tensor([11, 4, 7])), random_images(seed=2)
    out = net(images, noise=noise, warped=warped)
    for i, image in enumerate(warped):
        z, own = (
            reference.features(net.stage1.tower.native, image),
            noise.gumbel(Purpose.WARPED, out.maps.flatten(2))[i],
        )
        assert_close(
            out.warped_maps[i].flatten(1), reference.maps(z, net.stage1.prototypes, own), **EXACT
        )
    assert_close(out.maps, net(images, noise=noise).maps, **EXACT)
    quiet = net.eval()(images, warped=warped)  # without noise too
    assert_close(quiet.warped_maps, net.maps(warped), **EXACT)
    assert_close(quiet.maps, net.maps(images), **EXACT)


def test_parameter_count_of_the_published_checkpoint():
    with torch.device("meta"):
        net = IFAM(
            timm.create_model("vit_base_patch14_reg4_dinov2", num_classes=0), parts=8, classes=200
        )
    assert sum(value.numel() for value in net.state_dict().values()) == 173_493_509
    assert net.stage1.prototypes.shape == (9, 768) and net.stage1.modulation.weight.shape == (
        768,
        9,
    )


@torch.no_grad()
def test_a_samples_noise_is_its_own():
    net, images = tiny_net().train(), random_images(4)
    ids = torch.tensor([5, 9, 2, 2**40])
    out = net(images, noise=Noise(1, 2, ids))
    order = torch.tensor([2, 0])
    subset = net(images[order], noise=Noise(1, 2, ids[order]))
    for name in ("logits", "maps", "part_logits"):
        assert_close(getattr(subset, name), getattr(out, name)[order], **EXACT)
    for other in (Noise(1, 3, ids), Noise(2, 2, ids), Noise(1, 2, ids + 1)):
        assert not torch.equal(net(images, noise=other).maps, out.maps)


@torch.no_grad()
def test_stage_1_part_dropout():
    """A part that is left out votes for nothing, and the others make up for it."""
    images, noise = random_images(), Noise(0, 0, torch.arange(3))
    whole, subset = (
        tiny_net(part_dropout=share).train()(images, noise=noise).part_logits
        for share in (0.0, 0.6)
    )
    kept = noise.kept(Purpose.DROP_EMBEDDINGS, 3, 0.6, whole)
    assert 0 < kept.sum() < kept.numel()
    assert_close(subset, torch.where(kept[:, None], whole / 0.4, 0.0), **EXACT)
    assert torch.equal(
        tiny_net(part_dropout=0.6)(images).part_logits,
        tiny_net(part_dropout=0.0)(images).part_logits,
    )


@torch.no_grad()
def test_stage_2_part_dropout():
    images, noise = random_images(), Noise(0, 0, torch.arange(3))
    plain = tiny_net(part_dropout2=0.0, eval_noise=True)
    as_in_eval = plain(images, noise=noise).mask
    assert torch.equal(plain.train()(images, noise=noise).mask, as_in_eval) and as_in_eval.any()
    assert tiny_net(part_dropout2=1.0).train()(images, noise=noise).empty.all()
    subset = tiny_net(part_dropout2=0.5).train()(images, noise=noise).mask
    assert subset.sum() < as_in_eval.sum() and not (subset & ~as_in_eval).any()


@torch.no_grad()
def test_eval_noise_is_off_by_default_and_each_images_own():
    images = random_images()
    quiet, noisy = tiny_net(), tiny_net(eval_noise=True)
    assert torch.equal(quiet(images, noise=Noise(0, 0, torch.arange(3))).maps, quiet(images).maps)
    assert not torch.equal(noisy(images).maps, quiet(images).maps)
    assert_close(
        noisy(images[2:]).maps, noisy(images).maps[2:], **EXACT
    )  # wherever it is in a batch
    first, other, again = Noise.of(images[[0, 1, 0]]).gumbel(Purpose.MAPS, torch.zeros(3, 4, 30))
    assert torch.equal(first, again) and not torch.equal(first, other)


@torch.no_grad()
def test_part_maps_are_wide_under_autocast_and_in_half_precision():
    net, images = tiny_net().float(), random_images().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(images)
    assert out.maps.dtype == out.distances.dtype == out.embeddings.dtype == torch.float32
    half = net.bfloat16()(images.bfloat16())
    assert half.maps.dtype == torch.float32 and half.logits.dtype == torch.bfloat16
    assert_close(half.maps.sum(dim=1), torch.ones_like(half.maps[:, 0]))


def test_pdiscoformer_is_the_parts_alone():
    net, images = tiny_net(stages=1), random_images()
    out = net(images)
    assert net.stage2 is None and torch.equal(out.logits, out.stage1_logits)
    with pytest.raises(BadOption, match="no stage that reads"):
        net(images, mask=out.mask)


def test_bad_input_is_named():
    net, images = tiny_net(), random_images()
    net.train()
    with pytest.raises(BadOption, match="hidden tokens"):
        net(images, packed=True)
    with pytest.raises(UnsupportedModel, match="class token"):
        IFAM(timm.models.VisionTransformer(**SQUARE, class_token=False, global_pool="avg"), 2, 2)


@pytest.mark.parametrize("training", [True, False])
def test_a_mask_from_outside_is_a_constant_in_every_mode(training):
    net, images = tiny_net(eval_noise=True).train(training), random_images()
    mask = random_images(seed=4)[:, 0, ::8, ::8] > 0  # [3, 5, 6]
    noise, warped = Noise(3, 5, torch.tensor([11, 4, 7])), random_images(seed=2)
    plain = net(images, noise=noise, warped=warped)
    out = net(images, noise=noise, warped=warped, mask=mask)
    assert torch.equal(out.mask, mask) and not torch.equal(plain.mask, mask)
    assert torch.equal(out.maps, plain.maps) and torch.equal(out.warped_maps, plain.warped_maps)
    best = torch.stack([out.maps[:, :-1].amax(dim=1), out.maps[:, -1]], dim=1)
    assert_close(out.pair, best, **EXACT)
    assert_close(out.logits, net(images, mask=mask, packed=False).logits, **EXACT)
    out.logits.sum().backward()
    assert net.stage1.prototypes.grad is None and net.stage2.head.weight.grad is not None
    for wrong in (mask.double(), mask[:2], mask[:, :4]):
        with pytest.raises(BadOption, match="mask"):
            net(images, mask=wrong)


@pytest.mark.parametrize("noisy", [True, False])
@torch.no_grad()
def test_stage_1_alone_selects_and_maps_what_the_network_does(noisy):
    """Also under an intervention, whose mask is that of the maps, of their own draw."""
    net, images = tiny_net(eval_noise=noisy), random_images()
    sc.faithful.calibrate(net, images, 0.5, by="dot")
    trusted = {"quantile": 0.5, "by": "dot"}
    for change in ({}, {"drop_parts": [1]}, trusted, {**trusted, "drop_parts": [0]}):
        with sc.faithful.intervene(net, **change):
            out = net(images)
            assert torch.equal(net.select(images), out.mask.flatten(1))
            assert_close(net.maps(images), out.maps, **EXACT)
        if change:
            winner = out.maps.argmax(dim=1)
            dropped = torch.tensor([*change.get("drop_parts", ()), net.parts])
            assert torch.equal(out.mask, ~torch.isin(winner, dropped))
    assert torch.equal(net(images).mask, net(images).maps.argmax(dim=1) < net.parts) != noisy
