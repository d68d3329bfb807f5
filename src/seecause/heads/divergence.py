"""How far apart two answers are: the Jensen-Shannon divergence, in nats, from 0 to ln 2.

    JS(p, q) = KL(p | m) / 2 + KL(q | m) / 2,     m = (p + q) / 2

Textbook forms subtract numbers that are nearly equal: in float32 they lose every digit below 1e-7
and turn negative, which is where the effects of single heads live. With u = (log q - log p) / 2 and
s = sqrt(p q), so that p = s exp(-u) and q = s exp(u), each class adds

    s (u sinh u - cosh u log cosh u),      log cosh u = log1p(2 sinh(u/2)^2)           for small |u|
    u (q - p) / 2 - m log cosh u,          log cosh u = |u| + log1p(exp(-2|u|)) - ln 2   for large
    |u|

which is never negative and loses no digits; the same in exact arithmetic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seecause.types import wide

SMALL = 1.0  # where the two forms meet; both are good there


def log_probs(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """log softmax(logits / temperature) over the last axis, in float32 or better."""
    return torch.log_softmax(wide(logits) / temperature, dim=-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Log-probabilities [..., C] and [..., C] -> divergence [...]. Differentiable in both; its
    gradient is 0 where they are equal."""
    u = (log_q - log_p) / 2
    p, q = log_p.exp(), log_q.exp()
    near = u.clamp(-SMALL, SMALL)  # both branches must be finite for the gradient
    small = ((log_p + log_q) / 2).exp() * (
        near * near.sinh() - near.cosh() * (2 * (near / 2).sinh().square()).log1p()
    )
    size = u.abs()
    large = u * (q - p) / 2 - (p + q) / 2 * (size + (-2 * size).exp().log1p() - math.log(2))
    return torch.where(size < SMALL, small, large).sum(dim=-1)


def entropy(log_p: Tensor) -> Tensor:
    """Log-probabilities [..., C] -> entropy [...], in nats."""
    return -(log_p.exp() * log_p).sum(dim=-1)
