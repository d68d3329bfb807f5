"""Joints of a block: native parts by name, packed attention."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from seecause.models.block import fused, mix_packed, packed, project_packed
from tests.helpers import noise


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_packed_attention_is_split_as_torch_runs_it(bias):
    attention = nn.MultiheadAttention(6, 2, bias=bias, batch_first=True, dtype=torch.float64)
    for weight in attention.parameters():
        weight.copy_(noise(*weight.shape, seed=weight.ndim))
    x, parts = noise(2, 5, 6), packed(attention)
    q, k, v = (rows.transpose(1, 2) for rows in parts["project"](x))
    o = fused(q, k, v, parts["scale"]).flatten(2)
    assert (parts["heads"], parts["head_dim"]) == (2, 3)
    assert_close(parts["mix"](o), attention(x, x, x)[0], atol=1e-12, rtol=0)
    assert_close(parts["mix"](o), mix_packed(attention, o), atol=0, rtol=0)
    only_v = project_packed(attention, 2, 3, x)
    assert len(only_v) == 1
    assert_close(only_v[0].transpose(1, 2), v, atol=1e-12, rtol=0)
