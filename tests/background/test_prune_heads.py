"""Ablated, zeroed and sliced models are one and the same function, in every library."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import seecause as sc
from seecause.background import ablate, prune_heads
from seecause.background.prune import zero
from seecause.errors import BadOption, NotDefined, UnsupportedModel
from seecause.models.slicing import columns, kept_groups, slice_heads
from tests.families.native import HALF, SIZE
from tests.helpers import noise, view
from tests.reference import ablation
from tests.tiny import FAMILIES, pictures, scramble, tiny

HEADS = [
    (0, 1),
    (1, 0),
    (1, 2),
    (3, 0),
    (3, 1),
    (3, 2),
]  # one, two, none, and all of a layer's three heads
UNSLICED = {
    "timm_clip": "a norm",
    "timm_parallel": "not a module of its own",
    "open_clip_norms": "a norm",
    "timm_beit": "relative position biases",
    "hf_beit": "relative position biases",
    "hf_data2vec": "relative position biases",
}
TWINS = ["timm_registers", "hf_vit", "hf_vit_other_size", "hf_dinov2", "hf_clip", "torchvision_vit"]


@pytest.mark.parametrize("family", FAMILIES)
def test_zeroed_and_sliced_answer_like_the_ablated_model(family):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native)
    before = model(images)
    with ablate(model, HEADS):
        expected = model(images)
    assert (expected - before).abs().max() > 1e-3
    for cut in (zero, prune_heads):
        if cut is prune_heads and family in UNSLICED:
            with pytest.raises(UnsupportedModel, match=f"{UNSLICED[family]}.*zeroed"):
                cut(model, HEADS)
            continue
        smaller = cut(model, HEADS)
        assert_close(smaller(images), expected, atol=1e-10, rtol=0)
        assert_close(
            smaller.native(images), expected, atol=1e-10, rtol=0
        )  # the library's own forward
        assert (
            sum(p.numel() for p in smaller.module.parameters())
            < sum(p.numel() for p in model.module.parameters())
            or cut is zero
        )
    assert_close(model(images), before, atol=0, rtol=0)  # the model that was given is untouched


def test_a_network_that_restricts_its_heads_is_zeroed_not_sliced():
    from seecause.critters.planted import PlantedViT

    size = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 5,
    }
    module = (
        scramble(
            PlantedViT(**size, **HALF, routers=[{"block": 1, "background": [0], "object": [1]}])
        )
        .double()
        .requires_grad_(False)
    )
    model, images = sc.wrap(module, **HALF, size=16), noise(2, 3, 16, 16)
    with ablate(model, [(1, 0)]):
        expected = model(images)
    assert_close(zero(model, [(1, 0)])(images), expected, atol=1e-10, rtol=0)
    with pytest.raises(UnsupportedModel, match=r"what each head sees.*zeroed"):
        prune_heads(model, [(1, 0)])


@pytest.mark.parametrize("family", TWINS)
@pytest.mark.parametrize("way", ["output", "value"])
def test_ablation_is_what_editing_native_weights_gives(family, way):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native)
    edited = ablation.edited(native.module, HEADS, model.blocks[0].head_dim, way=way)
    native.module.load_state_dict(edited.state_dict())
    expected = native.forward(images)
    again = view(tiny(family), check=False)
    with ablate(again, HEADS):
        assert_close(again(images), expected, atol=1e-10, rtol=0)
    assert_close(prune_heads(again, HEADS)(images), expected, atol=1e-10, rtol=0)


def test_the_output_bias_of_a_layer_without_heads_stays():
    native = tiny("timm_registers")
    model, images = view(native, check=False), pictures(native)
    whole = [(2, head) for head in range(3)]
    pruned = prune_heads(model, whole)
    with ablate(model, whole):
        assert_close(pruned(images), model(images), atol=1e-12, rtol=0)
    assert_close(pruned.module.blocks[2].attn.bias, native.module.blocks[2].attn.proj.bias)
    pruned.module.blocks[2].attn.bias.zero_()
    with ablate(model, whole):
        assert (pruned(images) - model(images)).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["timm_eva", "hf_dinov3", "hf_dinov2", "torchvision_vit"])
def test_a_pruned_model_is_a_model_like_any_other(family):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native)
    pruned = prune_heads(model, HEADS)
    assert [b.heads for b in pruned.blocks] == [
        2,
        1,
        3,
        1,
    ]  # a layer without heads keeps one that says nothing
    with ablate(model, HEADS):
        expected = sc.attribute(model, images, target=1).maps
    assert_close(sc.attribute(pruned, images, target=1).maps, expected, atol=1e-10, rtol=0)
    with ablate(pruned, [(0, 1), (2, 1), (3, 0)]), ablate(model, [*HEADS, (0, 2), (2, 1)]):
        assert_close(pruned(images), model(images), atol=1e-10, rtol=0)
    for cut in (zero, prune_heads):
        twice = cut(pruned, [(0, 1), (2, 1), (3, 0)])
        with ablate(model, [*HEADS, (0, 2), (2, 1)]):
            assert_close(twice(images), model(images), atol=1e-10, rtol=0)


def grouped_attention() -> tuple[nn.Module, torch.Tensor]:
    """A Llama block's attention: 6 query heads on 3 keys and values."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = LlamaConfig(
        hidden_size=24,
        num_attention_heads=6,
        num_key_value_heads=3,
        attention_bias=True,
        _attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    block = nn.Module()
    block.self_attn = LlamaAttention(config, layer_idx=0).double().eval().requires_grad_(False)
    return block, torch.randn(2, 5, 24, dtype=torch.float64)


@pytest.mark.parametrize("removed", [(0, 1), (0, 2, 4), (0, 1, 3, 5)])
def test_grouped_keys_and_values_go_with_their_whole_group(removed):
    block, x = grouped_attention()
    still = (torch.ones(1, 5, 4, dtype=torch.float64), torch.zeros(1, 5, 4, dtype=torch.float64))
    keep = [head for head in range(6) if head not in removed]
    attention = block.self_attn
    attention.o_proj.weight[:, columns(removed, 4)] = 0
    expected = attention(x, still, None)[0]
    slice_heads(block, keep)
    assert_close(attention(x, still, None)[0], expected, atol=1e-12, rtol=0)
    assert attention.k_proj.out_features == 4 * len(
        {head // 2 for head in keep}
    ) and attention.q_proj.out_features == 4 * len(keep)


def test_half_a_group_is_refused():
    with pytest.raises(UnsupportedModel, match=r"equally large.*zeroed"):
        kept_groups([0, 2, 3], heads=6, kv_heads=3)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([(4, 0)], "layers 0-3"),
        ([(0, 3)], "heads 0-2 in layer 0"),
        ([(-1, 0)], "layers 0-3"),
        ([3], "pairs"),
        ([(0, 1.0)], "pairs"),
    ],
)
@pytest.mark.parametrize(
    "cut", [prune_heads, lambda model, heads: ablate(model, heads).__enter__()]
)
def test_heads_that_are_not_there_are_named(heads, message, cut):
    with pytest.raises(BadOption, match=message):
        cut(view(tiny("hf_vit"), check=False), heads)


def test_pruning_inside_an_ablation_is_refused():
    model = view(tiny("hf_vit"), check=False)
    with ablate(model, [(0, 0)]), pytest.raises(NotDefined, match="ablate"):
        prune_heads(model, [(1, 1)])
    assert model.gates is None


def test_convolutional_networks_have_no_heads():
    from tests.families.conv import tiny_conv

    native = tiny_conv("torchvision_resnet")
    with (
        pytest.raises(NotDefined, match="not by heads"),
        ablate(sc.wrap(native.module, check=False, **native.options), [(0, 0)]),
    ):
        pass


def variant(kind: str) -> nn.Module:
    """Shapes of timm's attention that no family has: projections apart, an output gate, one output
    projection for attention and MLP."""
    from functools import partial

    from timm.models.eva import Eva
    from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

    size = dict(img_size=SIZE, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=7)
    if kind == "shared output":
        return VisionTransformer(**size, block_fn=partial(ParallelScalingBlock, fuse_out_proj=True))
    module = Eva(**size, qkv_fused=kind == "gated", attn_type="eva" if kind == "apart" else "rope")
    if kind == "gated":
        for block in module.blocks:
            block.attn.gate = nn.Linear(24, 24)
    return module


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        ("apart", (zero, prune_heads)),
        ("apart, rope", (zero, prune_heads)),
        ("gated", (zero, prune_heads)),
        ("shared output", (zero,)),
    ],
)
def test_rarer_attention_modules(kind, cuts):
    model = sc.wrap(scramble(variant(kind)).double(), **HALF, size=SIZE)
    images, heads = noise(2, 3, *SIZE), [(0, 1), (1, 0), (1, 2)]
    with ablate(model, heads):
        expected = model(images)
    for cut in cuts:
        assert_close(cut(model, heads).native(images), expected, atol=1e-10, rtol=0)
