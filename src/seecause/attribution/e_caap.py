"""E-CAAP (CAAP, appendix B.1): the blank context read through its own class token, once, instead of
by every copy.

The blank's part of the softmax is taken with the *blank's* class query, so it does not depend on
the picture:

    z_i = [Z_0 v_0 + sum_{S(i)} e^{s_ij} v_j + e^{s_self} v_self] / [Z_0 + sum_{S(i)} e^{s_ij} +
    e^{s_self}]

`e-caap` keeps Z_0 per patch (S(i) left out) and weights v_0 by the blank's attention: an empty
selection gives back f(blank) exactly. `e-caap-printed` is the paper's formula, with the plain mean
of the blank's values; it does not have that property.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from seecause.engine.attend import attend
from seecause.engine.sweep import BlankSummary, SweepPlan
from seecause.engine.token_sets import TokenSets
from seecause.engine.trace import Trace
from seecause.engine.walk import walk
from seecause.errors import BadOption
from seecause.models.layout import span
from seecause.models.view import VisionModel

Approx = Literal["none", "e-caap", "e-caap-printed"]
_KEPT = 4


def summarise(
    model: VisionModel,
    blank: Trace,
    sets: TokenSets,
    plan: SweepPlan,
    approx: Approx,
    direction: str,
) -> Callable[[int, int], BlankSummary] | None:
    """The blank's parts for any range of patches, or None for exact CAAP. No picture changes them:
    they stay in the model's memo."""
    if approx not in get_args(Approx):
        raise BadOption("approx", approx, f"one of {', '.join(get_args(Approx))}")
    if approx == "none":
        return None
    if plan.tail not in ("source", "blank") or direction != "insert" or not plan.live:
        raise BadOption(
            "approx",
            approx,
            "'none': E-CAAP exists for direction=insert, tail=source or blank, and a class token",
        )
    known: list[_HeldTerms] = model.memo.setdefault("blank summaries", [])

    def summary(start: int, stop: int) -> BlankSummary:
        key = (plan, approx, start, stop)
        for held in known:
            if held.blank is blank and held.sets is sets and held.key == key:
                return held.summary
        printed = approx == "e-caap-printed"
        made = _parts(model, blank, sets.part(start, stop), plan, printed=printed)
        known[:] = [*known[1 - _KEPT :], _HeldTerms(blank, sets, key, made)]
        return made

    return summary


@dataclass(frozen=True, eq=False)
class _HeldTerms:
    blank: Trace
    sets: TokenSets
    key: tuple[object, ...]
    summary: BlankSummary


def _parts(
    model: VisionModel, blank: Trace, sets: TokenSets, plan: SweepPlan, *, printed: bool
) -> BlankSummary:
    special, n = span(plan.live), len(sets)
    at = blank.at.take(blank.at.index[special])
    donor_blocks = plan.donor_blocks(model.n_layers)
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    layers = plan.context_blocks(model.n_layers)
    start = blank.states[layers.start][:, special]
    for step in walk(model, start, at, start=layers.start, stop=layers.stop):
        index = step.index
        step.h = step.out = blank.states[index][:, special]  # recorded: nothing runs again
        keep = sets.context_mask if index in donor_blocks else sets.whole_mask
        queries = step.q.repeat(1, 1, n, 1)  # the blank's own class query
        bias = step.block.bias(at, blank.at)
        bias = None if bias is None else bias.repeat(1, 1, n, 1)
        o, lse = attend(queries, [blank.bank(index, keep, bias)], scale=step.block.scale)
        if printed:
            o = blank.kv[index][1][:, :, ~sets.is_special].mean(dim=2)[:, None].expand_as(o)
        parts[index] = (o.to(lse.dtype), lse)
    return BlankSummary(parts)
