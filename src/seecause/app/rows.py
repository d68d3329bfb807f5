"""A few mixtures of two recorded runs at once, as cheaply as they can be had.

`Sweep` is made for hundreds of sets of patches; who brushes asks for two. Here every mixture has
keys and values of its own, picked from the two runs, and one attention reads them: the rows of the
special tokens are all that is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.engine.sweep import SweepPlan
from seecause.engine.trace import Trace
from seecause.engine.walk import walk
from seecause.models.view import VisionModel


def few_rows(model: VisionModel, plan: SweepPlan) -> bool:
    """Whether `mixed_logits` computes what the plan says: patches stay the source's to the end, all
    special tokens are live, and only they are read."""
    prefix = tuple(range(model.layout.prefix))
    return plan.tail == "source" and plan.live == prefix and model.readout.reads_rows


def mixed_logits(
    model: VisionModel, trace: Trace, other: Trace, chosen: Tensor, begins: Tensor, start: int
) -> Tensor:
    """Logits [n, C] of mixtures that have the patches chosen [n, N] (bool) of one run, and those of
    another elsewhere. `begins` [n, p, D] are the special tokens that enter block `start`."""
    layout = trace.layout
    prefix, last = layout.prefix, model.n_layers - 1
    special = torch.arange(prefix, device=begins.device)
    pick = chosen.to(begins.device)[:, None, :, None]  # [n, 1, N, 1]
    rows = model.readout.rows(layout)
    assert rows is not None  # `few_rows`
    steps = walk(model, begins, trace.at.take(special), start=start)
    for step in steps:
        q, own = step.q, (step.k, step.v)  # before keys are those of all tokens
        step.keys_at = trace.at
        pairs = zip(own, trace.kv[step.index], other.kv[step.index], strict=True)
        step.k, step.v = (
            torch.cat([mine, torch.where(pick, x[:, :, prefix:], y[:, :, prefix:])], dim=2)
            for mine, x, y in pairs
        )
        step.q = q
        if step.index == last:
            step.take(rows)
    h = steps.h if start <= last else steps.h[:, rows]
    return model.readout.of_rows(h, layout)
