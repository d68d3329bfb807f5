"""AtMan (Deiseroth et al. 2023): turn a patch's attention down in every block and see what the
answer loses.

For patch i the scores of all heads and rows towards it are suppressed by a factor f; with the class
log-probability,

    A_i = log p(x) - log p(x | i suppressed)

`suppress="add"` adds log f to the scores before softmax: attention weights shrink by f, then rows
are normalised again. `suppress="multiply"` is the original: scores less their row's minimum, times
f, which depends on the range of each row and needs attention in its explicit form. Patches whose
embedding (position included) is like i's are suppressed too, less so the less they are alike:

    f_ij = (1 - f) (1 - cos_ij) + f   where cos_ij >= kappa and cos_ij >= 0,   else 1

A `kappa` above 1 suppresses i alone. No gradient is used, and nothing is removed: a suppressed
patch still lives in its own row.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.registry import Maps, method
from seecause.engine.chunks import plain_logits, run_in_chunks
from seecause.engine.trace import enter
from seecause.engine.walk import Step, walk
from seecause.models.view import VisionModel
from seecause.options import Count, Positive
from seecause.target import Score, Target

Suppress = Literal["add", "multiply"]


@method("atman", forwards="N + 1", needs="attention", unset={"most": "no limit"}, signed=True)
@torch.no_grad()
def atman(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    factor: Positive = 0.1,
    suppress: Suppress = "add",
    kappa: float = 0.6,
    most: Count | None = None,
    score: Score = "logprob",
) -> Maps:
    """What the class score loses when a patch's attention is turned down in every block."""
    layout = model.check(images)
    h0, at = enter(model, images)
    n, prefix = layout.n_patches, layout.prefix
    factors = neighbours(h0[:, layout.patches], factor, kappa=kappa, most=most)  # [B, N, N]
    explicit = model.blocks[0].heads * layout.tokens**2 * 4 * 4 if suppress == "multiply" else 0

    def run_chunk(a: int, b: int) -> Tensor:
        item = torch.arange(a, b, device=images.device)  # of B * N
        image, patch = item // n, item % n
        columns = F.pad(factors[image, patch], (prefix, 0), value=1)[:, None, None]  # [m, 1, 1, T]
        steps = walk(model, h0[image], at.of(image))
        for step in steps:
            turn_down(step, columns, suppress)
        return model.readout(steps.h, layout)

    each = model.forward_bytes(layout) + explicit
    logits = run_in_chunks(run_chunk, len(images) * n, each, images.device, what="patches")
    plain = plain_logits(model, images)
    bound = target.bind(plain)
    lost = bound.score(logits.unflatten(0, (-1, n)), score, sigmoid=model.sigmoid)  # [B, N]
    return Maps(bound.score(plain, score, sigmoid=model.sigmoid)[:, None] - lost, bound)


def neighbours(tokens: Tensor, factor: float, *, kappa: float, most: int | None = None) -> Tensor:
    """What the scores towards each patch are multiplied by when patch i is suppressed, [B, N, N]
    (row i), from tokens [B, N, D].

    `most` limits how many patches go down together; i itself always does.
    """
    unit = F.normalize(tokens, dim=-1)
    own = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
    alike = (unit @ unit.transpose(1, 2)).masked_fill(own, 1)
    near = own | (alike >= max(kappa, 0))
    if most is not None:
        order = alike.masked_fill(own, 2).argsort(dim=-1, descending=True, stable=True)
        near = near & (order.argsort(dim=-1) < most)
    return torch.where(near, (1 - factor) * (1 - alike) + factor, 1)


def turn_down(step: Step, columns: Tensor, suppress: Suppress) -> None:
    """Turn down a block's scores towards each key by columns [m, 1, 1, T]."""
    q, block, bias = step.q, step.block, step.bias
    if suppress == "add":
        down = columns.log().to(q.dtype)
        step.bias = down if bias is None else down + bias
        return
    k, v = (t.repeat_interleave(block.heads // block.kv_heads, dim=1) for t in (step.k, step.v))
    scores = q @ k.transpose(-1, -2) * block.scale  # [m, H, T, T]
    scores = scores if bias is None else scores + bias
    scores = (scores - scores.amin(dim=-1, keepdim=True)) * columns.to(q.dtype)
    step.o = (scores.softmax(dim=-1) @ v).transpose(1, 2)
