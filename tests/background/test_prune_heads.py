"""Ablated, zeroed and sliced models are one and the same function, in every library."""

import pytest
from torch.testing import assert_close

import seecause as sc
from seecause.background import ablate, prune_heads
from seecause.background._export import zero
from seecause.errors import BadOption, NotDefined, UnsupportedModel
from tests.families.native import HALF
from tests.helpers import noise, view
from tests.reference import ablation
from tests.tiny import FAMILIES, pictures, scramble, tiny

HEADS = [(0, 1), (1, 0), (1, 2), (3, 0), (3, 1), (3, 2)]  # one, two, none, and all of a layer
UNSLICED = {
    "timm_clip": "a norm",
    "timm_parallel": "not a module of its own",
    "open_clip_norms": "a norm",
    "timm_eva": "width of all heads",
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
            with pytest.raises(UnsupportedModel, match=f"{UNSLICED[family]}.*or export"):
                cut(model, HEADS)
            continue
        smaller = cut(model, HEADS)
        assert_close(smaller(images), expected, atol=1e-10, rtol=0)
        native_logits = smaller.native(images)  # the library's own forward
        assert_close(native_logits, expected, atol=1e-10, rtol=0)
        size, whole = (
            sum(p.numel() for p in each.module.parameters()) for each in (smaller, model)
        )
        assert size < whole or cut is zero
    assert_close(model(images), before, atol=0, rtol=0)  # the model that was given is untouched


def test_a_network_that_restricts_its_heads_is_zeroed_not_sliced():
    from seecause.critters.planted import PlantedViT

    size = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    routers = [{"block": 1, "background": [0], "object": [1]}]
    planted = PlantedViT(**size, num_classes=5, **HALF, routers=routers)
    module = scramble(planted).double().requires_grad_(False)
    model, images = sc.wrap(module, **HALF, size=16), noise(2, 3, 16, 16)
    with ablate(model, [(1, 0)]):
        expected = model(images)
    assert_close(zero(model, [(1, 0)])(images), expected, atol=1e-10, rtol=0)
    with pytest.raises(UnsupportedModel, match=r"what each head sees.*or export"):
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


@pytest.mark.parametrize("family", ["hf_vit", "hf_dinov3", "hf_dinov2", "torchvision_vit"])
def test_a_pruned_model_is_a_model_like_any_other(family):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native)
    pruned = prune_heads(model, HEADS)
    # a layer without heads keeps one that adds nothing
    assert [block.heads for block in pruned.blocks] == [2, 1, 3, 1]
    with ablate(model, HEADS):
        expected = sc.attribute(model, images, target=1).maps
    assert_close(sc.attribute(pruned, images, target=1).maps, expected, atol=1e-10, rtol=0)
    with ablate(pruned, [(0, 1), (2, 1), (3, 0)]), ablate(model, [*HEADS, (0, 2), (2, 1)]):
        assert_close(pruned(images), model(images), atol=1e-10, rtol=0)
    for cut in (zero, prune_heads):
        twice = cut(pruned, [(0, 1), (2, 1), (3, 0)])
        with ablate(model, [*HEADS, (0, 2), (2, 1)]):
            assert_close(twice(images), model(images), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([(4, 0)], "layers 0-3"),
        ([(0, 3)], "heads 0-2"),
        ([(-1, 0)], "layers 0-3"),
        ([3], "pairs"),
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
