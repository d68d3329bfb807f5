"""The Jensen-Shannon divergence keeps its digits where single heads live."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from seecause.background.gains import jensen_shannon, log_probs
from tests.helpers import noise
from tests.reference import cigma as reference


def pair(classes, distance, seed=0, spread=2.0):
    """Two float64 logit vectors [64, C], about `distance` apart."""
    first = spread * noise(64, classes, seed=seed)
    return first, first + distance * noise(64, classes, seed=seed + 1)


@pytest.mark.parametrize("distance", [1e-3, 0.5, 3.0, 30.0])
def test_it_is_the_textbook_sum(distance):
    first, second = pair(10, distance)
    p, q = (torch.softmax(x, dim=-1) for x in (first, second))
    expected = [reference.js(a, b) for a, b in zip(p, q, strict=True)]
    found = jensen_shannon(log_probs(first), log_probs(second))
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-14, rtol=1e-9)


@pytest.mark.parametrize("distance", [1e-6, 1e-2, 1.0, 100.0])
def test_it_is_symmetric_never_negative_and_at_most_ln_2(distance):
    first, second = (log_probs(x) for x in pair(1000, distance))
    there, back = jensen_shannon(first, second), jensen_shannon(second, first)
    assert_close(there, back, atol=0, rtol=1e-9)
    assert (there > 0).all() and (there <= math.log(2) + 1e-12).all()
    assert torch.equal(jensen_shannon(first, first), torch.zeros(64, dtype=torch.float64))


@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize(
    ("distance", "allowed"), [(1.0, 1e-5), (1e-1, 1e-4), (3e-3, 1e-4), (1e-4, 1e-2)]
)
def test_float32_keeps_its_digits(classes, distance, allowed):
    first, second = (x.float() for x in pair(classes, distance))
    exact = jensen_shannon(log_probs(first.double()), log_probs(second.double()))
    result = jensen_shannon(log_probs(first), log_probs(second))
    assert result.dtype == torch.float32 and (result > 0).all()
    assert ((result.double() - exact).abs() / exact).median() < allowed


def test_its_gradient_is_right_and_zero_where_answers_agree():
    first, second = (x[:3] for x in pair(5, 1.0))
    fixed = log_probs(first)
    assert torch.autograd.gradcheck(
        lambda z: jensen_shannon(fixed, log_probs(z)), second.clone().requires_grad_()
    )
    same = first.clone().requires_grad_()
    (slope,) = torch.autograd.grad(jensen_shannon(fixed, log_probs(same)).sum(), same)
    assert slope.abs().max() < 1e-15
    far = torch.tensor([[300.0, 0.0, -300.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(
        jensen_shannon(log_probs(-far.detach()), log_probs(far)).sum(), far
    )
    assert slope.isfinite().all()
