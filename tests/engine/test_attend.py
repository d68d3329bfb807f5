"""Banked attention: one softmax over every key that is kept, whatever bank it sits in; kernels,
those for weighted banks too, equal the explicit form, forward and back."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from seecause.engine import kernel
from seecause.engine.attend import (
    Bank,
    Groups,
    Mask,
    Own,
    attend,
    explicit,
    merge,
    merge_pair,
)
from tests.reference.attend import one_softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = (
    torch.bfloat16 if DEVICE == "cuda" else torch.float16
)  # Triton's interpreter has no bfloat16 products


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    ).to(DEVICE, dtype)


def some(*shape: int, share: float, seed: int = 0) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share).to(DEVICE)


def crosswise(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


CASES = {
    # name: batch, heads, kv heads, width, keys of bank 0 and 1, rows of each group, keys of each
    # group
    "own keys": (2, 3, 3, 16, 40, 90, [1] * 70, [1] * 70),
    "grouped queries": (2, 4, 2, 24, 40, 90, [1] * 70, []),
    "uneven groups": (2, 4, 2, 24, 40, 0, [10, 4, 40, 1, 15], [5, 0, 33, 70, 2]),
    "narrow heads": (2, 2, 2, 8, 40, 0, [1] * 12, [3] * 12),
    "only groups": (2, 2, 2, 32, 0, 0, [10] * 13, [9] * 13),
    "even groups": (2, 4, 2, 8, 40, 0, [3] * 5, [2] * 5),
}


def banks_of(case: str, dtype: torch.dtype) -> tuple[Tensor, list[Bank], Own | None]:
    batch, heads, kv, width, k0, k1, per_query, per_key = CASES[case]
    rows, total = sum(per_query), sum(per_key)
    banks = []
    if k0:  # shared by the whole batch, a mask per head, one row that sees nothing
        keep = some(1, heads, rows, k0, share=0.5)
        keep[:, :, 0] = False
        banks.append(
            Bank(
                draw(1, kv, k0, width, dtype=dtype),
                draw(1, kv, k0, width, dtype=dtype, seed=1),
                Mask(keep),
            )
        )
    if k1:
        keep = some(1, 1, rows, k1, share=0.03, seed=1)
        keep[:, :, 0] = False
        banks.append(
            Bank(
                draw(batch, kv, k1, width, dtype=dtype, seed=2),
                draw(batch, kv, k1, width, dtype=dtype, seed=3),
                Mask(keep),
            )
        )
    own = None
    if total:
        queries, keys = (Groups(torch.tensor(sizes), DEVICE) for sizes in (per_query, per_key))
        if case == "even groups":  # known to be, which has a way of its own
            queries, keys = (Groups.even(5, sizes[0], DEVICE) for sizes in (per_query, per_key))
        own = Own(
            draw(batch, kv, total, width, dtype=dtype, seed=4),
            draw(batch, kv, total, width, dtype=dtype, seed=5),
            queries,
            keys,
        )
    return draw(batch, heads, rows, width, dtype=dtype, seed=6), banks, own


@pytest.mark.parametrize("case", CASES)
def test_attend_equals_one_softmax_over_all_kept_keys(case):
    q, banks, own = banks_of(case, torch.float64)
    o, lse = attend(q, banks, own, scale=0.3)
    expected, total = one_softmax(
        q,
        [(b.k, b.v, b.keep.keep, None) for b in banks],
        own and (own.k, own.v, own.queries.sizes.tolist(), own.keys.sizes.tolist()),
        0.3,
    )
    assert_close(o, expected, atol=1e-12, rtol=0)
    assert_close(lse, total, atol=1e-12, rtol=0)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("case", ["uneven groups", "narrow heads", "even groups"])
def test_what_is_added_to_scores_of_groups_is_a_feature_more(case, copies):
    """A number of the row times one of the key's place in its group: one more product."""
    q, banks, own = banks_of(case, torch.float64)
    assert own is not None
    sizes, more = own.keys.sizes.tolist(), (0, 1)
    of_row = draw(copies, *q.shape[1:3], 1, seed=7)  # [1|B, H, R, 1]
    of_place = draw(max(sizes), seed=8)
    places = torch.cat([of_place[:size] for size in sizes])[:, None]  # [keys, 1]
    o, lse = attend(q, banks, replace(own, bias=of_row * of_place), scale=0.3)
    pad = torch.nn.functional.pad
    expected, total = one_softmax(
        torch.cat([q, (of_row / 0.3).expand(len(q), -1, -1, -1)], dim=-1),
        [(pad(b.k, more), pad(b.v, more), b.keep.keep, None) for b in banks],
        (
            torch.cat([own.k, places.expand(*own.k.shape[:3], 1)], dim=-1),
            pad(own.v, more),
            own.queries.sizes.tolist(),
            sizes,
        ),
        0.3,
    )
    assert_close(o, expected[..., :-1], atol=1e-12, rtol=0)
    assert_close(lse, total, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        ("grouped queries", HALF),
        ("uneven groups", HALF),
    ],
)
def test_the_kernel_equals_the_explicit_form(case, dtype):
    if kernel.triton_kernels() is None:
        pytest.skip("triton is not installed")
    q, banks, own = banks_of(case, dtype)
    if case == "narrow heads":  # lanes that do not lie side by side
        q, banks = crosswise(q), [replace(b, k=crosswise(b.k), v=crosswise(b.v)) for b in banks]
        assert own is not None
        own = replace(own, k=crosswise(own.k), v=crosswise(own.v))
    with torch.enable_grad():
        slow, slow_lse = attend(
            q.clone().requires_grad_(), banks, own, scale=0.3
        )  # a gradient keeps the kernel out
    fast, fast_lse = kernel.attend(q, banks, own, 0.3)
    assert_close(
        fast,
        slow.detach(),
        atol=2e-5 if dtype == torch.float32 else 3e-2,
        rtol=1e-2 if dtype == HALF else 1e-5,
    )
    assert_close(fast_lse, slow_lse.detach(), atol=2e-5 if dtype == torch.float32 else 3e-2, rtol=0)


def test_what_the_kernel_does_not_compute_is_left_to_the_explicit_form():
    def tensor(width=64, dtype=torch.float16, grad=False):
        return SimpleNamespace(shape=(1, 2, 5, width), dtype=dtype, requires_grad=grad)

    def fits(q, banks=1, own=None, **bank):
        return kernel.fits(q, [Bank(tensor(), tensor(), **bank)] * banks, own)

    groups = Groups.even(5, 1, "cpu")
    assert fits(tensor()) and fits(tensor(256), banks=2) and fits(tensor(), keep=Mask(None))
    assert fits(tensor(), own=Own(tensor(), tensor(), groups, groups))
    for q in (tensor(257), tensor(dtype=torch.float64), tensor(grad=True)):
        assert not fits(q)
    assert not fits(tensor(), banks=3) and not fits(tensor(), bias=tensor())
    for own in (
        Own(tensor(), tensor(grad=True), groups, groups),
        Own(tensor(), tensor(), groups, groups, bias=tensor()),
    ):
        assert not fits(tensor(), own=own)
    with torch.no_grad():
        assert fits(tensor(grad=True))
    assert not kernel.usable(torch.zeros(1))


def test_large_scores_do_not_overflow():
    q, banks, own = banks_of("narrow heads", torch.float64)
    o, lse = attend(q, banks, own, scale=1000.0)
    own_keys = (own.k, own.v, own.queries.sizes.tolist(), own.keys.sizes.tolist())
    kept = [(b.k, b.v, b.keep.keep, None) for b in banks]
    expected, total = one_softmax(q, kept, own_keys, 1000.0)
    assert lse.max() > 1000  # more than any exponential of a float64
    assert_close(o, expected, atol=1e-8, rtol=0)
    assert_close(lse, total, atol=1e-8, rtol=0)


def test_gradients_flow_through_an_empty_row():
    q = draw(1, 2, 3, 8).requires_grad_()
    k = draw(1, 2, 5, 8)
    keep = torch.ones(1, 1, 3, 5, dtype=torch.bool, device=DEVICE)
    keep[:, :, 1] = False
    o, _ = attend(q, [Bank(k, k, Mask(keep))], scale=1.0)
    o.sum().backward()
    assert torch.isfinite(q.grad).all()


def test_a_pair_is_merged_like_any_parts():
    outputs = [draw(2, 3, 5, 4, seed=seed) for seed in (1, 2)]
    lses = [3 * draw(2, 3, 5, seed=seed) for seed in (3, 4)]
    lses[1][0, 0] = -torch.inf  # nothing seen there
    pair = merge_pair((outputs[0], lses[0]), (outputs[1], lses[1]))
    assert_close(pair, merge(outputs, lses)[0], atol=1e-14, rtol=0)
    assert torch.equal(pair[0, 0], outputs[0][0, 0])


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
