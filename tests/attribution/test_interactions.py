"""Pairs of regions: exact, and they see what single places cannot."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import seecause as sc
from seecause.attribution.caap import make_plan
from seecause.attribution.evidence import pair_sets, region_of
from seecause.engine.chunks import budget
from seecause.engine.trace import blank_image
from seecause.errors import BadOption
from tests.families.conv import tiny_conv
from tests.helpers import near, ready, view
from tests.reference import evidence as reference
from tests.tiny import pictures


@pytest.mark.parametrize("family", ["timm_registers", "timm_map", "timm_distilled", "hf_dinov2"])
@torch.no_grad()
def test_all_pairs_equal_the_slow_twin(family):
    native, model, images = ready(family)
    layout = model.check(images)
    result = sc.interactions(model, images, 3, regions=2)
    plan = make_plan(model, layout, tail=None, layers=None)
    where = region_of(layout.grid, 2).flatten()
    regions = [(where == region).nonzero()[:, 0].tolist() for region in range(4)]
    settings = {"tail": plan.tail, "first": plan.start, "last": plan.stop}
    blank = blank_image(model, native.size)
    for index in range(2):
        slow = reference.pair_effects(
            native.forward, native.blocks, blank, images[index : index + 1], regions, 3,
            **settings, prefix=layout.prefix, live=plan.live,
        )  # fmt: skip
        near(result.joint[index], slow, 1e-10)
        alone = slow.diagonal()
        near(result.singles[index], alone, 1e-10)
        inner = (slow - alone[:, None] - alone[None]).fill_diagonal_(0)
        near(result.values[index], inner, 1e-10)
        assert inner.abs().max() > 1e-3


def evidence_in_two_places(redundant: bool) -> VisionTransformer:
    """Its class token sums the marks of all patches (red: a, blue: b). Logit 0 is 1 only if both
    are there, or (`redundant`) if one is."""
    module = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=4, depth=1, num_heads=1, num_classes=2, mlp_ratio=1,
        norm_layer=nn.Identity, act_layer=nn.ReLU,
    ).eval().requires_grad_(False)  # fmt: skip
    for parameter in module.parameters():
        parameter.zero_()
    block = module.blocks[0]
    module.patch_embed.proj.weight[0, 0] = module.patch_embed.proj.weight[1, 2] = 1 / 64
    block.attn.qkv.weight[8:] = torch.eye(4)  # even attention of everything
    block.attn.proj.weight.copy_(17 * torch.eye(4))
    block.mlp.fc1.weight[0, :2] = block.mlp.fc1.weight[1, :2] = 1
    block.mlp.fc1.bias[1] = -1
    block.mlp.fc2.weight[2, :2] = torch.tensor([1.0, -1.0] if redundant else [0.0, 1.0])
    module.head.weight[0, 2] = 1
    return module


@pytest.mark.parametrize("redundant", [False, True])
def test_evidence_that_needs_two_places_is_seen_where_caap_is_blind(redundant):
    model = sc.wrap(evidence_in_two_places(redundant), mean=(0.5,) * 3, std=(0.5,) * 3)
    picture = torch.zeros(1, 3, 32, 32)
    picture[0, 0, :8, :8] = picture[0, 2, 24:, 8:16] = 1  # patches (0, 0) and (3, 1)
    caap = sc.attribute(model, picture, 0, blank="mean", score="logit").maps
    result = sc.interactions(model, picture, 0, regions=4, blank="mean")
    pairs = result.pairs(0, count=2)
    expected = -1.0 if redundant else 1.0
    assert (pairs[0].first, pairs[0].second) == ((0, 0), (3, 1))
    assert pairs[0].interaction == pytest.approx(expected, abs=1e-5)
    assert pairs[0].joint == pytest.approx(1, abs=1e-5)
    assert abs(pairs[1].interaction) < 1e-5  # and nothing else
    assert (caap.abs().max() < 1e-5) != redundant


def test_regions_cover_the_grid_once_and_pairs_are_unions():
    where = region_of((12, 14), 7)
    assert where.shape == (12, 14) and sorted(set(where.flatten().tolist())) == list(range(49))
    sizes = where.flatten().bincount()
    assert sizes.min() == 2 and sizes.max() == 4
    sets = pair_sets((14, 14), 7)
    assert sets.shape == (1225, 196) and sorted(set(sets.sum(dim=1).tolist())) == [4, 8]
    assert sets.any(dim=0).all() and len(sets.unique(dim=0)) == 1225


def test_chunks_batches_and_targets_do_not_change_effects():
    _, model, images = ready("timm_registers", 3)
    whole = sc.interactions(model, images, regions=3, score="prob")
    classes = model(images).argmax(dim=-1)
    assert whole.labels == [model.class_name(c) for c in classes.tolist()]
    with budget(1):
        small = sc.interactions(model, images, classes, regions=3, score="prob")
    near(small.joint, whole.joint)
    assert whole.joint.shape == (3, 9, 9)
    conv = tiny_conv("timm_resnet")
    network = sc.interactions(view(conv, check=False), pictures(conv), 1, regions=2)
    assert network.values.shape == (2, 4, 4) and network.values.abs().max() > 0


def test_every_picture_keeps_its_own_blank_in_chunks():
    native, model, images = ready("timm_registers", 3)
    blanks = pictures(native, batch=3, seed=7)
    with budget(1):
        together = sc.interactions(model, images, 3, regions=2, blank=blanks).joint
    for index in range(3):
        row = slice(index, index + 1)
        alone = sc.interactions(model, images[row], 3, regions=2, blank=blanks[row]).joint
        near(together[row], alone, 1e-10)


def test_what_cannot_be_done_is_said():
    _, model, images = ready("timm_registers")
    for options, message in (
        ({"regions": 7}, "2 to 4: the grid has 4 x 6"),
        ({"regions": 1}, "2 to 4"),
        ({"score": "luck"}, "prob"),
    ):
        with pytest.raises(BadOption, match=message):
            sc.interactions(model, images, **{"regions": 2, **options})
