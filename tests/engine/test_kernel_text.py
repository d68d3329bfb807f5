"""The kernels for text rows, interpreted where there is no GPU, against the plain functions."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from seecause.engine import kernel
from seecause.engine.attend import Bank, attend
from seecause.lvlm.cache import with_own_text
from seecause.models.block import At, TokenLayout
from seecause.models.decoder import rotate
from tests.helpers import noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
# Triton's interpreter has no bfloat16 products
DTYPES = list(CLOSE) if torch.cuda.is_available() else [torch.float32]
pytestmark = pytest.mark.skipif(kernel.triton_kernels() is None, reason="needs triton")


def rows_of(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    return noise(*shape, seed=seed).to(DEVICE, dtype)


def single(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In float32, which takes the plain way."""
    return [x.float() for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotating_rows_equals_the_plain_way(dtype):
    x = rows_of(dtype, 3, 5, 6, 32, seed=1).transpose(1, 2)  # heads are no power of two
    table = rows_of(dtype, 2, 9, 32, seed=2)
    rows = torch.tensor([2, 3, 5, 6, 8], device=DEVICE)
    at = At(rows, TokenLayout(grid=(0, 0), prefix=9), {"rope": table.float()})
    fast = kernel.rotate(x, table[:, rows])
    assert_close(fast.float(), rotate(x.float(), at), atol=CLOSE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("shared", ["nothing", "rows", "mask"])
def test_own_text_and_what_was_seen_equal_the_plain_way(dtype, share, shared):
    batch, heads, rows, width = 3, 4, 5, 32
    first = 1 if shared == "rows" else batch  # what serves all copies
    q = rows_of(dtype, first, rows, heads, width, seed=1).transpose(1, 2)
    k, v = (
        rows_of(dtype, first, rows, heads // share, width, seed=s).transpose(1, 2) for s in (2, 3)
    )
    picture, average = (
        (
            rows_of(dtype, first, rows, heads, width, seed=s),
            rows_of(torch.float32, first, heads, rows, seed=s + 1).mT,
        )
        for s in (4, 6)
    )
    choose = torch.rand(batch, rows, heads, generator=torch.Generator().manual_seed(0)) < 0.4
    choose = choose.to(DEVICE)[: 1 if shared == "mask" else batch]
    plain = (*single(q, k, v), tuple(single(*picture)), tuple(single(*average)), choose)
    expected = with_own_text(*plain, scale=0.3)
    fast = kernel.own_text(q, k, v, picture, average, choose, scale=0.3)
    assert_close(fast.float(), expected.expand_as(fast), atol=CLOSE[dtype], rtol=0)


def assert_same_slopes(fast, plain, leaves, dtype):
    """Of a kernel and of the plain way in float32: what comes out, and its slope in every leaf."""
    results = []
    for run, kind in ((fast, None), (plain, torch.float32)):
        inputs = [x.detach().to(kind).requires_grad_() for x in leaves]
        out = run(*inputs)
        towards = noise(*out.shape, seed=9).to(out)
        results.append((out, *torch.autograd.grad(out, inputs, towards)))
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        near = {"atol": (2 if number else 1) * CLOSE[dtype], "rtol": 2e-2}
        assert_close(ours.float(), theirs, **near, msg=lambda words, n=number: f"{n}: {words}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_of_a_rotation_equal_the_plain_ones(dtype):
    table = rows_of(dtype, 2, 5, 32, seed=2)  # no rotation at all: halves have sines of their own
    layout = TokenLayout(grid=(0, 0), prefix=5)
    at = At(torch.arange(5, device=DEVICE), layout, {"rope": table.float()})
    x = rows_of(dtype, 3, 5, 6, 32, seed=1).transpose(1, 2)
    assert_same_slopes(
        lambda x: kernel.rotate(x, table), lambda x: rotate(x, at), [x], dtype
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("shared", ["nothing", "rows", "mask"])
def test_soft_masks_of_own_text_have_the_plain_values_and_slopes(dtype, share, shared):
    batch, heads, rows, width = 3, 4, 5, 32
    first = 1 if shared == "rows" else batch  # what serves all copies
    rows_first = [rows_of(dtype, first, rows, heads, width, seed=s) for s in (1, 4, 6)]
    own = [rows_of(dtype, first, rows, heads // share, width, seed=s) for s in (2, 3)]
    lses = [rows_of(torch.float32, first, heads, rows, seed=s).mT for s in (5, 7)]
    choose = torch.rand(batch, rows, heads, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    choose = choose[: 1 if shared == "mask" else batch]

    def run(read, q, seen, blind, k, v, seen_lse, blind_lse, choose):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        picture, average = (seen, seen_lse), (blind, blind_lse)
        return read(q, k, v, picture, average, choose, scale=0.3)

    def fast(*leaves):
        return run(kernel.own_text, *leaves)

    def plain(*leaves):
        return run(with_own_text, *leaves)

    assert_same_slopes(fast, plain, [*rows_first, *own, *lses, choose], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1, 2])
def test_the_slope_of_rows_that_read_shared_keys_equals_the_explicit_one(dtype, share):
    heads, rows, keys, width = 4, 70, 83, 32  # a tile and a bit of each
    q = rows_of(dtype, 1, rows, heads, width, seed=1).transpose(1, 2)
    k, v = (rows_of(dtype, 1, heads // share, keys, width, seed=s) for s in (2, 3))
    leaf = q.float().requires_grad_()
    read = attend(leaf, [Bank(k.float(), v.float())], scale=0.3)
    slopes = tuple(noise(*x.shape, seed=4 + i).to(x) for i, x in enumerate(read))
    (expected,) = torch.autograd.grad(read, leaf, slopes)
    o, lse = (x.detach() for x in read)
    given = (o.to(dtype), lse), (slopes[0].to(dtype), slopes[1])
    fast = kernel.shared_read_slope(q, k, v, *given, scale=0.3)
    assert_close(fast.float(), expected, atol=2 * CLOSE[dtype], rtol=2e-2)


def test_only_half_precision_on_a_gpu():
    x = torch.zeros(1, 2, 3, 32)
    assert not kernel.fits_rows(x) and not kernel.fits_rows(x.bfloat16())

    def there(width, dtype=torch.bfloat16):
        return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 2, 3, width))

    assert [kernel.fits_rows(there(width)) for width in (16, 32, 48, 256, 512)] == [
        False, True, False, True, False,
    ]  # fmt: skip
    assert not kernel.fits_rows(there(32, torch.float32))
