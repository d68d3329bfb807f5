"""Joints of a block: native parts by name, packed attention, what stays where attention is gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from seecause.errors import UnsupportedModel
from seecause.models.block import (
    Block,
    Constant,
    chain,
    first_or_none,
    fused,
    is_silent,
    mix_packed,
    packed,
    project_packed,
    silent,
    times,
)
from seecause.models.layout import TokenLayout
from tests.helpers import noise


def test_parts_are_found_under_any_of_their_names():
    module = SimpleNamespace(a=None, b=SimpleNamespace(c=3, d=None), e=4)
    assert first_or_none(module, "a", "x", "b.d", "b.c", "e") == 3
    assert first_or_none(module, "e", "b.c") == 4 and first_or_none(module, "a", "b.x.y") is None


def test_steps_that_do_nothing_are_left_out_and_others_run_in_order():
    steps = chain(nn.Identity(), lambda x: x + 1, nn.Identity(), lambda x: 2 * x)
    assert steps(3) == 8


def test_a_factor_is_read_when_it_is_used():
    owner = SimpleNamespace(gamma=None)
    scale = times(owner, "gamma")
    assert scale(3.0) == 3.0
    owner.gamma = 2.0
    assert scale(3.0) == 6.0


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_packed_attention_is_split_as_torch_runs_it(bias):
    attention = nn.MultiheadAttention(6, 2, bias=bias, batch_first=True, dtype=torch.float64)
    for weight in attention.parameters():
        weight.copy_(noise(*weight.shape, seed=weight.ndim))
    x, parts = noise(2, 5, 6), packed(attention, "here")
    q, k, v = (rows.transpose(1, 2) for rows in parts["project"](x))
    o = fused(q, k, v, parts["scale"]).flatten(2)
    assert (parts["heads"], parts["head_dim"]) == (2, 3)
    assert_close(parts["mix"](o), attention(x, x, x)[0], atol=1e-12, rtol=0)
    assert_close(parts["mix"](o), mix_packed(attention, o), atol=0, rtol=0)
    only_v = project_packed(attention, 2, 3, x)
    assert len(only_v) == 1
    assert_close(only_v[0].transpose(1, 2), v, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "options",
    [{"batch_first": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 4}],
)
def test_attention_of_other_keys_or_axes_is_refused(options):
    attention = nn.MultiheadAttention(6, 2, **{"batch_first": True, **options})
    with pytest.raises(UnsupportedModel, match=r"MultiheadAttention \(here\).*without extra keys"):
        packed(attention, "here")


def test_in_place_of_attention_stands_its_bias():
    for pair in (False, True):
        constant = Constant(torch.tensor([1.0, 2.0]), pair=pair)
        assert not constant.bias.requires_grad
        for given in (constant(torch.zeros(3, 4, 2)), constant(hidden_states=torch.zeros(3, 4, 2))):
            rows = given[0] if pair else given
            assert rows.shape == (3, 4, 2) and rows[2, 3].tolist() == [1, 2]
            assert not pair or given[1] is None


def test_a_silent_block_adds_what_its_projection_adds_to_nothing():
    constant = Constant(torch.tensor([1.0, 2.0]), pair=False)
    block = Block("blocks.0", constant, **silent(constant.rows), feed=lambda x: 10 * x)
    h, at = torch.ones(1, 3, 2), TokenLayout(grid=(1, 3), prefix=0).at()
    assert is_silent(block) and block.owner is constant
    assert block(h, at)[0].tolist() == [[22.0, 33.0]] * 3  # 11 (1 + 1), 11 (1 + 2)
    beside = Block("b", constant, **silent(constant.rows), feed=lambda x: 10 * x, parallel=True)
    assert beside(h, at)[0].tolist() == [[12.0, 13.0]] * 3
    behind = Block(
        "b", constant, **silent(constant.rows), feed=lambda x: 0 * x,
        behind=lambda at: at.index[:, None].float(), holder=nn.Identity(),
    )  # fmt: skip
    assert behind(h, at)[0].tolist() == [[2.0, 3.0], [3.0, 4.0], [4.0, 5.0]]
    assert behind.owner is behind.holder
