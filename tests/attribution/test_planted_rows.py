"""A world whose causes are known: a coloured mark decides the class of a box, a yellow square where
it lies, and both may be anywhere in the image. Weights are set by hand, so that nothing else can be
the cause; the maps must find the mark.

A white picture is split into cells of inks (1 - colour): cyan is the first ink, magenta the second,
yellow the third.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import seecause as sc
from tests.families.dense import LABELS, WIDTHS, _backbone

INKS = {"cat": (0.0, 1.0, 1.0), "frog": (1.0, 0.0, 1.0)}  # the colour of each class's mark
SQUARE = (1.0, 1.0, 0.0)
FRAME = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def inks(images: Tensor, cell: int) -> Tensor:
    return F.avg_pool2d((1 - images) / 2, cell)


class Inks(nn.Module):
    """Four channels for each cell of 16 pixels: three inks, and how far right it is."""

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        ink = inks(pixel_values, 16)
        across = torch.linspace(-1, 1, ink.shape[-1]).to(ink).expand_as(ink[:, :1])
        return [(torch.cat([ink, across], dim=1), torch.ones_like(ink[:, 0], dtype=torch.bool))]


@torch.no_grad()
def planted_detector() -> nn.Module:
    """DETR whose queries look with one head for a mark and read which it is, with the other for the
    square and read how far right it is."""
    widths = {**WIDTHS, "decoder_layers": 1, "position_embedding_type": "learned"}
    config = hf.DetrConfig(backbone_config=_backbone(3), **widths, **LABELS)
    module = hf.DetrForObjectDetection(config).double().eval()
    for name, parameter in module.named_parameters():
        if "layer_norm" not in name and "layernorm" not in name:
            parameter.zero_()
    model, attention = module.model, module.model.decoder.layers[0].encoder_attn
    model.backbone, model.input_projection = Inks(), nn.Conv2d(4, 16, 1).double()
    model.input_projection.weight.zero_()
    model.input_projection.bias.zero_()
    for channel in range(4):  # in pairs of both signs, which norms leave alone
        for place, sign in ((2 * channel, 1), (2 * channel + 1, -1)):
            model.input_projection.weight[place, channel] = sign
    for bias in (model.input_projection.bias, attention.o_proj.bias):
        bias[8], bias[9] = 2, -2
    attention.q_proj.bias[0] = attention.q_proj.bias[8] = 6
    attention.k_proj.weight[0, 0] = attention.k_proj.weight[0, 2] = 6  # the mark
    attention.k_proj.weight[8, 4] = 6  # the square
    for head, channel in ((0, 0), (1, 2), (8, 6)):  # which mark, how far right
        attention.v_proj.weight[head, channel] = 1
        attention.o_proj.weight[channel, head] = 3
        attention.o_proj.weight[channel + 1, head] = -3
    module.class_labels_classifier.weight[0, 0] = module.class_labels_classifier.weight[1, 2] = 4
    module.class_labels_classifier.bias[2:] = torch.tensor([-4.0, 2.0])
    first, second, third = module.bbox_predictor.layers
    for unit, sign in ((0, 1), (1, -1)):
        first.weight[unit, 6], second.weight[unit, unit], third.weight[0, unit] = sign, 1, sign
    third.bias[2:] = -2
    return module.requires_grad_(False)


def scene(mark: str, at: tuple[int, int], square: tuple[int, int], cell: int = 16) -> Tensor:
    """A white picture of 4 x 6 cells with a mark and a square, normalised."""
    picture = torch.ones(1, 3, 4 * cell, 6 * cell, dtype=torch.float64)
    for colour, (row, column) in ((INKS[mark], at), (SQUARE, square)):
        patch = torch.tensor(colour, dtype=torch.float64)[:, None, None]
        picture[0, :, row * cell : (row + 1) * cell, column * cell : (column + 1) * cell] = patch
    return 2 * picture - 1


SCENES = [("cat", (0, 1), (3, 5)), ("frog", (2, 4), (1, 0)), ("cat", (3, 0), (0, 3))]


@pytest.fixture(scope="module")
def detector():
    return sc.wrap(planted_detector(), size=(64, 96), **FRAME)


@pytest.mark.parametrize("method", ["caap", "mosaic"])
@pytest.mark.parametrize(("mark", "at", "square"), SCENES)
def test_the_mark_causes_the_class_and_the_square_does_not(detector, method, mark, at, square):
    picture = scene(mark, at, square)
    options = {"select": "none"} if method == "caap" else {"masks": 24, "cells": 4}
    found = sc.attribute(detector, picture, "box:1", method, score="logit", **options)
    assert found.labels == [f"{mark} of box 1"]
    assert strongest(found.maps[0]) == at


def strongest(heat: Tensor) -> tuple[int, int]:
    """The cell that is furthest from what most cells have; it must be so by far."""
    far = (heat - heat.median()).abs().flatten()
    first, second = far.topk(2).values
    assert first > 3 * second
    return divmod(int(far.argmax()), heat.shape[1])


class Pyramid(nn.Module):
    """Inks of four levels, as the stages of a SegFormer."""

    def forward(self, pixel_values: Tensor, **named: object) -> BaseModelOutput:
        levels = tuple(inks(pixel_values, cell) for cell in (4, 8, 16, 32))
        return BaseModelOutput(last_hidden_state=levels[-1], hidden_states=levels)


@torch.no_grad()
def planted_pixels() -> nn.Module:
    """A SegFormer whose pixels answer with the inks that lie there, of all levels."""
    config = hf.SegformerConfig(hidden_sizes=[3] * 4, decoder_hidden_size=3, depths=[1] * 4,
                                num_attention_heads=[1] * 4, **LABELS)  # fmt: skip
    module = hf.SegformerForSemanticSegmentation(config).double().eval()
    module.segformer, head = Pyramid(), module.decode_head
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.zero_()
            same = torch.eye(3, dtype=parameter.dtype).repeat(1, parameter.shape[1] // 3)
            parameter.copy_(same.view(parameter.shape))
        else:
            parameter.fill_(1.0 if parameter is head.batch_norm.weight else 0.0)
    return module.requires_grad_(False)


@pytest.mark.parametrize("method", ["caap", "mosaic"])
def test_only_the_mark_inside_a_region_causes_its_class(method):
    model = sc.wrap(planted_pixels(), size=(128, 192), **FRAME)
    picture = scene("cat", (1, 1), (3, 3), cell=32)
    picture[..., 64:96, 128:160] = scene("cat", (2, 4), (3, 3), cell=32)[..., 64:96, 128:160]
    options = {"select": "none"} if method == "caap" else {"masks": 24, "cells": 4}
    asked = sc.Region((96, 48, 192, 112), label="cat")  # around the second mark
    heat = sc.attribute(model, picture, asked, method, score="logit", **options).maps[0]
    assert strongest(heat) == (2, 4)
