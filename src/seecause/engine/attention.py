"""Runs that form the attention probabilities, which fused kernels never do.

Attentions are numbered like blocks, 0 to L-1. A latent pool is one more, number L: its queries are
no tokens, so its matrix [B, H, Q, T] is not square and nothing is added to it by a residual path.
Every matrix has one column per token; tokens a pool does not read get 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.attend import Bank, attention_weights
from seecause.engine.walk import Step, walk
from seecause.errors import BadOption
from seecause.models.layout import At, TokenLayout
from seecause.models.view import VisionModel


@dataclass(frozen=True, eq=False)
class Explicit:
    """Logits [B, C] as a differentiable function of the probabilities, each [B, H, T, T] (of a pool
    [B, H, Q, T]), in order of depth."""

    logits: Tensor
    probs: list[Tensor]


def explicit_run(model: VisionModel, images: Tensor, *, start: int = 0) -> Explicit:
    """Run with explicit attention from number `start` on. Whatever comes before is fused, has no
    graph and holds no memory."""
    layout = model.check(images)
    at = model.at(images)
    with torch.no_grad():
        h = _run_to(model, images, at, start)
    h = h.detach().requires_grad_(torch.is_grad_enabled())
    probs: list[Tensor] = []
    steps = walk(model, h, at, start=start)
    for step in steps:
        probs.append(probabilities(step))
        step.o = weigh(probs[-1], step.v)
    if model.readout.latent is None:
        return Explicit(model.readout(steps.h, layout), probs)
    weights, v = pool_probabilities(model, steps.h, layout)
    return Explicit(pool_logits(model, weights, v), [*probs, weights])


@torch.no_grad()
def attention_probs(model: VisionModel, images: Tensor, *, start: int = 0) -> Iterator[Tensor]:
    """The probabilities of every attention from number `start` on, one at a time."""
    layout = model.check(images)
    at = model.at(images)
    steps = walk(model, _run_to(model, images, at, start), at, start=start)
    for step in steps:
        probs = probabilities(step)
        yield probs
        step.o = weigh(probs, step.v)
    if model.readout.latent is not None:
        yield pool_probabilities(model, steps.h, layout)[0]


def n_attentions(model: VisionModel) -> int:
    """Blocks, and a latent pool."""
    return model.n_layers + (model.readout.latent is not None)


def check_start(model: VisionModel, start: int) -> None:
    """Complain about an attention that the model does not have."""
    if not 0 <= start < n_attentions(model):
        raise BadOption(
            "start", start, f"0-{n_attentions(model) - 1}, the first attention that counts"
        )


def probabilities(step: Step) -> Tensor:
    """The attention probabilities of a block, [B, H, R, K]."""
    return attention_weights(step.q, Bank(step.k, step.v, bias=step.bias), scale=step.block.scale)


def weigh(probs: Tensor, v: Tensor) -> Tensor:
    """Probabilities [B, H, R, K] of values [B, Hkv, K, dh] -> head outputs [B, R, H, dh]."""
    shared = probs.shape[1] // v.shape[1]
    v = v if shared == 1 else v.repeat_interleave(shared, dim=1)
    return (probs.to(v.dtype) @ v).transpose(1, 2)


def pool_probabilities(model: VisionModel, h: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
    """Final states h [B, T, D] -> the latent pool's probabilities [B, H, Q, T] and values [B, H, T,
    dh]."""
    readout, pool = model.readout, model.readout.latent
    assert pool is not None
    k, v = pool.kv(readout.norm(h)[:, readout.averaged(layout)])
    q = pool.query().expand(len(h), -1, -1, -1)
    unread = layout.tokens - k.shape[-2]
    weights = attention_weights(q, Bank(k, v), scale=pool.scale)
    return F.pad(weights, (unread, 0)), F.pad(v, (0, 0, unread, 0))


def pool_logits(model: VisionModel, probs: Tensor, v: Tensor) -> Tensor:
    """What the latent pool's probabilities and values become: logits [B, C]."""
    assert model.readout.latent is not None
    return model.readout.head(model.readout.latent.finish(weigh(probs, v)))


def read_rows(model: VisionModel, layout: TokenLayout, attention: Tensor) -> Tensor:
    """The rows of attention [..., R, T] that the answer is read from, as one row [..., T].

    The class token's row; the mean of the class and distillation rows; the mean over averaged
    tokens; for class + mean, half of each. The heads may weigh these parts otherwise, which no
    attention row can tell. The rows of a latent pool (R = Q) are averaged.
    """
    if model.readout.latent is not None:
        return attention.mean(dim=-2)
    weights = attention.new_zeros(layout.tokens)
    special, mean = list(model.readout.read_prefix(layout)), model.readout.averaged(layout)
    parts = len(special) + model.readout.has_mean
    weights[special] = 1 / parts
    if model.readout.has_mean:
        weights[mean] += 1 / parts / (mean.stop - mean.start)
    return weights @ attention


def _run_to(model: VisionModel, images: Tensor, at: At, start: int) -> Tensor:
    """States that enter block `start`."""
    check_start(model, start)
    return walk(model, model.embed(images), at, stop=start).end()


def walk_back(model: VisionModel, layout: TokenLayout, steps: list[Tensor]) -> Tensor:
    """Row [B, T] of (I + S_L) ... (I + S_1) that is read out, for steps S [B, T, T] in order of
    depth: from the last to the first, a row at a time.

    A latent pool's step comes last and has no identity beside it: its query is no token.
    """
    if model.readout.latent is None:
        eye = torch.eye(layout.tokens, dtype=steps[0].dtype, device=steps[0].device)
        row = read_rows(model, layout, eye).expand(len(steps[0]), -1)
    else:
        *steps, pool = steps
        row = read_rows(model, layout, pool)
    for step in reversed(steps):
        row = row + (row[:, None] @ step)[:, 0]
    return row
