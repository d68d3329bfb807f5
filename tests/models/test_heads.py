"""Heads for backbones without a classifier."""

from __future__ import annotations

import torch
from torch.testing import assert_close

import seecause as sc
from seecause.models.parts import CosineHead, UnitLinear


def test_heads_on_unit_features_read_every_row_for_itself():
    rows = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = torch.eye(5, dtype=torch.float64)[:4]
    unit = rows / rows.norm(dim=-1, keepdim=True)
    assert_close(CosineHead(2 * matrix, scale=3.0)(rows), 3 * unit[..., :4])
    layer = UnitLinear(5, 4, bias=False, dtype=torch.float64)
    layer.load_state_dict({"weight": matrix})
    assert_close(layer(rows), unit[..., :4])
    scale, bias = (torch.nn.Parameter(torch.tensor(x).double()) for x in (1.0, 0.5))
    assert_close(CosineHead(matrix, scale=scale, bias=bias)(rows), torch.e * unit[..., :4] + 0.5)


def test_a_norm_between_pool_and_classifier_stays_in_front_of_a_given_head():
    from timm.models.vision_transformer import VisionTransformer

    from tests.tiny import scramble

    base = dict(img_size=(32, 48), patch_size=8, embed_dim=24, depth=2, num_heads=3)
    module = (
        scramble(
            VisionTransformer(
                **base, num_classes=0, class_token=False, global_pool="avg", fc_norm=True
            )
        )
        .double()
        .requires_grad_(False)
    )
    matrix = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = sc.wrap(module, head=matrix, mean=(0.5,) * 3, std=(0.5,) * 3)
    images = torch.randn(
        2, 3, 32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    assert_close(model(images), module(images) @ matrix.T, atol=1e-10, rtol=0)
