"""What the results pages about attribution methods share: values of several runs put together, and
tables of differences from CAAP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from seecause.bench.measures import higher_is_better
from seecause.bench.plan import Plan, Store
from seecause.bench.runner import Status
from seecause.bench.tables import Table, values
from seecause.metrics import Summary

EXPENSIVE = ("mda", "rise", "tis")  # about a thousand forwards or more for one picture
REFERENCE = "caap"
ROUNDING = 1e-6  # of a difference; a standard error below it is none
Values = dict[str, dict[str, Tensor]]  # by method and metric, [pictures]


def with_reference(methods: Sequence[str]) -> list[str]:
    """CAAP is always among the methods, and first: the others are compared with it."""
    return list(dict.fromkeys([REFERENCE, *methods]))


def over(names: Sequence[str], store: Store, plan: Plan) -> Values:
    """Values of a run over the pictures called `names`; NaN where it did not see one, or has not
    done it yet."""
    places = {name: place for place, name in enumerate(names)}
    index = torch.tensor([places[name] for name in plan.samples], dtype=torch.long)
    blank = torch.full((len(names),), torch.nan, dtype=torch.float64)
    return {
        m: {k: blank.index_copy(0, index, v) for k, v in columns.items()}
        for m, columns in values(store.rows(plan), plan).items()
    }


def starred(method: str) -> str:
    """The name of a method that saw fewer pictures than the rest."""
    return f"{method} *" if method in EXPENSIVE else method


def differences(table: Table) -> str:
    """Every method less the reference, image by image."""
    lines = [
        "| method | " + " | ".join(table.metrics) + " |",
        "|---|" + "---|" * len(table.metrics),
    ]
    for method in table.methods:
        if method != table.reference:
            lines.append(
                f"| {method} | "
                + " | ".join(
                    gap(table.cells[method][metric].difference) for metric in table.metrics
                )
                + " |"
            )
    return "\n".join(lines) + "\n"


def gap(found: Summary | None) -> str:
    """A difference and how many standard errors it is; a dash where it is the same for every
    picture, or there is one picture only."""
    if found is None or not found.n:
        return "no value"
    errors = (
        f"{found.mean / found.standard_error:+.1f}"
        if found.standard_error > ROUNDING * abs(found.mean)
        else "-"
    )
    return f"{found.text(sign='+')} ({errors})"


def clearly_better(table: Table, metric: str, *, than_reference: bool = True) -> list[str]:
    """The methods whose difference to the reference is more than two of its standard errors, in
    their favour or in the reference's."""
    sign = (1 if higher_is_better(metric) else -1) * (1 if than_reference else -1)
    gaps = {m: table.cells[m][metric].difference for m in table.methods}
    return [
        m
        for m, found in gaps.items()
        if found is not None and found.n and sign * found.mean > 2 * found.standard_error
    ]


def losses(table: Table) -> str:
    """Which methods beat the reference clearly, metric by metric."""
    lines = [
        f"Methods better than {table.reference} by more than two standard errors of the"
        " difference:\n"
    ]
    lines += [
        f"- {metric}: {', '.join(clearly_better(table, metric)) or 'none'}"
        for metric in table.metrics
    ]
    return "\n".join(lines) + "\n"


def holes(statuses: Sequence[Status]) -> list[str]:
    """What is not there, and why; nothing if all is there."""
    waiting = sum((Counter(status.not_run()) for status in statuses), Counter[str]())
    alike = {
        count: [method for method, other in waiting.items() if other == count]
        for count in waiting.values()
    }
    lines = [
        f"- {', '.join(some)}: {count} maps are not made yet{', each' * (len(some) > 1)}; run the"
        " same command again"
        for count, some in alike.items()
    ]
    lines += [
        f"- a shard failed: {reason}" for status in statuses for reason in status.failed.values()
    ]
    lines += [
        f"- {hole.method} on {hole.image}, {hole.metric}: {hole.reason}"
        for status in statuses
        for hole in status.holes
    ]
    return ["## Holes\n", "\n".join(lines) + "\n"] if lines else []


def undefined(statuses: Sequence[Status]) -> list[str]:
    """Values that no run can fill in, such as the rank correlation with a map of zeros; nothing if
    there are none."""
    counts = sum((Counter(status.undefined) for status in statuses), Counter[str]())
    lines = [
        f"- {metric}: {count} values are not defined (the picture does not ask the question, or a"
        " map is constant)"
        for metric, count in counts.items()
    ]
    return ["## Not defined\n", "\n".join(lines) + "\n"] if lines else []
