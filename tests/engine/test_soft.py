"""The kernels for weighted banks equal the explicit form, forward and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from seecause.engine import kernel
from seecause.engine.attend import Bank, Groups, Mask, Own, explicit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # as in test_attend


def setting(each, count, dtype, width=24, keys=(37, 70)):
    """Two images, three heads; the first bank serves both images, as a blank's does."""
    generator = torch.Generator().manual_seed(each)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    rows = each * count
    q, ko, vo = (draw(2, 3, rows, width).requires_grad_() for _ in range(3))
    masks = torch.rand(2, 1, rows, max(keys), generator=generator).to(DEVICE) * 0.9 + 0.05
    weights = [
        torch.log1p(-masks[..., : keys[0]]).requires_grad_(),
        torch.log(masks[..., : keys[1]]).contiguous().requires_grad_(),
    ]
    banks = [
        Bank(draw(1, 3, keys[0] + 1, width)[:, :, 1:], draw(1, 3, keys[0], width), bias=weights[0]),
        Bank(draw(2, 3, keys[1], width), draw(2, keys[1], 3, width).transpose(1, 2),
             bias=weights[1]),
    ]  # fmt: skip
    groups = Groups.even(count, each, DEVICE)
    return q, banks, Own(ko, vo, groups, groups), [q, *weights, ko, vo]


@pytest.mark.parametrize(
    ("each", "count", "dtype"),
    [(1, 40, torch.float32), (2, 5, torch.float32), (5, 7, torch.float32), (2, 5, HALF)],
)  # a tile and a bit; less than one; groups that do not fill it
def test_values_and_gradients_equal_the_explicit_form(each, count, dtype):
    if kernel.triton_kernels() is None:
        pytest.skip("triton is not installed")
    q, banks, own, leaves = setting(each, count, dtype)
    assert kernel.soft_fits(q, banks, own)
    slow, slow_lse = explicit(q, banks, own, scale=0.3)
    fast, fast_lse = kernel.attend_soft(q, banks, own, 0.3)
    towards = torch.randn(slow.shape, generator=torch.Generator().manual_seed(1)).to(slow)
    expected = torch.autograd.grad((slow * towards).sum(), leaves)
    slopes = torch.autograd.grad((fast * towards).sum(), leaves)
    exact = dtype == torch.float32
    near = {"atol": 3e-5 if exact else 3e-2, "rtol": 1e-4 if exact else 3e-2}
    assert_close(fast, slow, **near)
    assert_close(fast_lse, slow_lse, **near)
    for name, ours, theirs in zip(("q", "w0", "w1", "k", "v"), slopes, expected, strict=True):
        assert_close(ours, theirs, **near, msg=lambda words, name=name: f"{name}: {words}")


def test_what_the_kernels_do_not_compute_is_left_to_the_explicit_form():
    q, banks, own, _ = setting(1, 3, torch.float32)
    uneven = Groups(torch.tensor([1, 1, 1]), DEVICE)
    assert not kernel.soft_fits(q, banks, None)
    assert not kernel.soft_fits(q, banks[:1], own)
    assert not kernel.soft_fits(q.double(), banks, own)
    assert not kernel.soft_fits(q, [banks[0], Bank(banks[1].k, banks[1].v)], own)
    assert not kernel.soft_fits(q, banks, Own(own.k, own.v, uneven, uneven))
    learning = Bank(banks[1].k.clone().requires_grad_(), banks[1].v, bias=banks[1].bias)
    assert not kernel.soft_fits(q, [banks[0], learning], own)
    with torch.no_grad():
        assert kernel.soft_fits(q, [banks[0], learning], own)
    bias, mask = banks[1].bias, torch.ones(1, 1, 3, 70, dtype=torch.bool)
    for other in (
        {"keep": Mask(mask)},
        {"bias": bias.double()},
        {"bias": bias[:1]},
        {"bias": bias.expand(-1, 3, -1, -1)},
        {"k": banks[1].k[:, :1], "v": banks[1].v[:, :1]},  # shared by all heads
    ):
        assert not kernel.soft_fits(q, [banks[0], replace(banks[1], **other)], own), other
    assert not kernel.soft_fits(q, banks, replace(own, bias=torch.zeros(1, 3, 3, 1)))
    assert not kernel.soft_fits(*setting(kernel.MOST_EACH + 1, 1, torch.float32)[:3])
    assert kernel.soft_fits(*setting(kernel.MOST_EACH, 1, torch.float32)[:3])
    assert kernel.soft_fits(*setting(1, 3, torch.float32, width=128)[:3])
    assert not kernel.soft_fits(*setting(1, 3, torch.float32, width=129)[:3])
