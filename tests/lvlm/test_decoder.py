"""Views of decoders: they compute what the native models compute, know where image tokens come
from, and refuse what they cannot split."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from seecause.errors import BadOption, UnsupportedModel, ViewMismatch
from seecause.lvlm import wrap
from seecause.lvlm.model import verify
from seecause.models.block import same
from seecause.models.decoder import find
from tests.families.lvlm import CLIP, FAMILIES, TEXT, photo, tiny_lvlm
from tests.helpers import hooks
from tests.lvlm.scenes import QUESTION, scene

PLACES = {
    "llava": "4 x 4",
    "llava_next": "4 x 4 + 6 x 8 with newlines",
    "internvl": " + ".join(["2 x 2"] * 5),
    "qwen2_vl": "2 x 4",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_equals_its_native_model(family):
    lvlm = scene(family).lvlm
    before = hooks(lvlm.decoder.native)  # transformers leaves some of its own
    probes = verify(lvlm)
    assert [probe.name for probe in probes] == ["logits", "blocks", "attention"]
    assert max(probe.worst for probe in probes) < 1e-12
    assert all(probe.compared for probe in probes)
    assert hooks(lvlm.decoder.native) == before


def _halved(scale: float) -> float:
    return scale / 2


INGREDIENTS = {
    "rotation": lambda block: {"rotate": lambda x, at: x},
    "query norm": lambda block: {"q_norm": same},
    "key norm": lambda block: {"k_norm": same},
    "norm": lambda block: {"norm": same},
    "scale": lambda block: {"scale": _halved(block.scale)},
    "input bias": lambda block: {
        "project": lambda x: tuple(
            a - b for a, b in zip(block.project(x), block.project(torch.zeros_like(x)), strict=True)
        )
    },
    "looking back only": lambda block: {"additive": lambda rows, keys: None},
    "MLP": lambda block: {"feed": torch.zeros_like},
}


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_a_block_without_one_of_its_ingredients_is_refused(ingredient):
    native = tiny_lvlm("qwen3_vl" if ingredient in ("query norm", "key norm") else "llava_grouped")
    lvlm = wrap(native.module, native.processor, check=False)
    lvlm.blocks[2] = replace(lvlm.blocks[2], **INGREDIENTS[ingredient](lvlm.blocks[2]))
    with pytest.raises(ViewMismatch) as refusal:
        verify(lvlm)
    assert refusal.value.where == "layers.2"


def test_a_model_whose_own_answer_has_no_numbers_is_refused_for_that():
    native = tiny_lvlm("llava")
    native.module.lm_head.weight[3] = torch.nan
    with pytest.raises(ViewMismatch, match=r"not finite .*Give intact weights"):
        wrap(native.module, native.processor)


def test_deepstack_features_belong_to_the_view():
    lvlm = scene("qwen3_vl").lvlm
    prompt = lvlm.prompt(photo((40, 56)), QUESTION)
    assert len(prompt.deepstack) == 2
    with pytest.raises(ViewMismatch):
        verify(lvlm, replace(prompt, deepstack=()))


@pytest.mark.parametrize("family", PLACES)
def test_image_tokens_know_their_place(family):
    """With attention between patches switched off, changing a spot of the picture changes the
    tokens whose boxes hold it, and no others."""
    native = tiny_lvlm(family)
    tower = getattr(native.module.model, "vision_tower", None) or native.module.model.visual
    for name, parameter in tower.named_parameters():
        if any(part in name for part in ("out_proj", "projection_layer", "attn.proj")):
            parameter.zero_()
    lvlm = wrap(native.module, native.processor, check=False)
    # no resampling: the shape that each processor leaves as it is
    size = {"llava": (32, 32), "llava_next": (64, 64), "internvl": (64, 64), "qwen2_vl": (32, 64)}[
        family
    ]
    picture = photo(size)
    changed = picture.copy()
    changed.putpixel((size[1] * 5 // 8 + 2, size[0] * 1 // 8 + 1), (0, 0, 0))
    changed.putpixel((size[1] * 5 // 8 + 3, size[0] * 1 // 8 + 1), (255, 255, 255))
    before, after = (lvlm.prompt(p, QUESTION) for p in (picture, changed))
    moved = (after.embeddings - before.embeddings)[0, before.image].abs().amax(dim=-1) > 1e-9
    boxes = boxes_of(before.tokens)
    x, y = (size[1] * 5 // 8 + 2.5) / size[1], (size[0] * 1 // 8 + 1.5) / size[0]
    inside = (boxes[:, 0] <= y) & (y < boxes[:, 2]) & (boxes[:, 1] <= x) & (x < boxes[:, 3])
    fine = _full_size(before.tokens, boxes)
    assert inside.any() and torch.equal(moved[fine], inside[fine])
    if family in ("llava", "qwen2_vl"):
        assert str(lvlm.prompt(photo((40, 56)), QUESTION).tokens) == PLACES[family]


def boxes_of(tokens) -> Tensor:
    """[N, 4]: the box of the picture that each token stands for; NaN where it stands for none."""
    boxes = torch.full((tokens.count, 4), torch.nan, dtype=torch.float64)
    for part, places in tokens.maps(torch.arange(tokens.count)):
        top, left, bottom, right = part.box
        high, wide = (bottom - top) / part.rows, (right - left) / part.columns
        for (row, column), place in zip(
            np.ndindex(part.rows, part.columns), places.flatten(), strict=True
        ):
            y, x = top + row * high, left + column * wide
            boxes[place] = torch.tensor([y, x, y + high, x + wide])
    return boxes


def _full_size(tokens, boxes: Tensor) -> Tensor:
    """Tokens of the finest grids: coarser ones see a shrunken picture, in which a spot spreads."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return areas <= areas[~areas.isnan()].min() + 1e-9


def test_hybrid_decoders_are_refused_by_name():
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 2}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    shape = {**TEXT, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    text = hf.Qwen3NextConfig(**shape, **linear, layer_types=["linear_attention", "full_attention"])
    module = hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=hf.CLIPVisionConfig(**CLIP), text_config=text)
    )
    with pytest.raises(UnsupportedModel, match="hybrid with linear attention"):
        find(module)


@pytest.mark.parametrize("text", [hf.PhiConfig, hf.Phi3Config, hf.GPTNeoXConfig])
def test_decoders_with_other_parts_are_refused_by_name(text):
    vision = hf.CLIPVisionConfig(**CLIP)
    config = hf.LlavaConfig(vision_config=vision, text_config=text(**TEXT))
    with pytest.raises(
        UnsupportedModel, match=r"LlavaForConditionalGeneration.*parts of its decoder"
    ):
        find(hf.LlavaForConditionalGeneration(config))


def test_a_window_holds_where_some_block_slides_or_none_says_how_it_attends():
    vision = hf.CLIPVisionConfig(**CLIP)
    text = hf.MistralConfig(**TEXT, num_key_value_heads=2, head_dim=8, sliding_window=12)
    module = hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=text)
    )
    windows = []
    for kinds in (None, ["full_attention"] * 4, ["full_attention", "sliding_attention"] * 2):
        module.get_decoder().config.layer_types = kinds
        windows.append(find(module).window)
    assert windows == [12, None, 12]


def test_other_models_are_refused_with_the_list_of_those_that_work():
    with pytest.raises(UnsupportedModel, match="LlavaForConditionalGeneration"):
        wrap(hf.CLIPVisionModel(hf.CLIPVisionConfig(**CLIP)))


def test_wrapping_says_what_it_lacks():
    native = tiny_lvlm("llava")
    with pytest.raises(BadOption, match="processor"):
        wrap(native.module)
    for template in ("no place for anything", "USER : {image}", "{question} ASSISTANT :"):
        with pytest.raises(BadOption, match="template"):
            wrap(native.module, native.processor, template=template)
    inputs = scene("llava").engine.prompt.inputs
    assert wrap(native.module, inputs=inputs).read(inputs).n_image == 16
