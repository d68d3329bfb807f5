"""Methods against the truth, over all pictures of a run (FunnyBirds; `metrics.parts` says what each
score is).

Shards keep what each picture says (`parts.*`), and it is joined here: the threshold of completeness
is chosen over all pictures, so that no picture has a completeness of its own.
"""

from __future__ import annotations

import csv
import io
from dataclasses import fields

import torch

from seecause.bench.plan import Plan, Store
from seecause.metrics import PartScores

COLUMNS = ("completeness", "at threshold", "correctness", "contrastivity", "mean of the three")
Truth = dict[str, dict[str, float]]  # by method and column


def against_truth(store: Store, plan: Plan) -> Truth:
    """The scores of every method that has some. Empty if the run did not measure them."""
    return {
        method: _row(scores)
        for method in plan.request.methods
        if (scores := part_scores(store, plan, method)) is not None
    }


def part_scores(store: Store, plan: Plan, method: str) -> PartScores | None:
    """What the finished shards of a method hold, as one."""
    found = [
        tensors
        for shard in store.finished(plan)
        if shard.method == method and "parts.thresholds" in (tensors := store.tensors(shard.id))
    ]
    if not found:
        return None
    joined = {
        part.name: torch.cat([tensors[f"parts.{part.name}"] for tensors in found])
        for part in fields(PartScores)
        if part.name != "thresholds"
    }
    return PartScores(**joined, thresholds=found[0]["parts.thresholds"])


def truth_csv(found: Truth) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *COLUMNS])
    writer.writerows([method, *row.values()] for method, row in found.items())
    return text.getvalue()


def shown(row: dict[str, float]) -> list[str]:
    """Numbers as pages print them; a dash where no picture asks the question."""
    return ["-" if value != value else f"{value:.3f}" for value in row.values()]


def _row(scores: PartScores) -> dict[str, float]:
    numbers = (
        scores.completeness,
        scores.threshold,
        float(scores.correctness.nanmean()),
        float(scores.contrastivity.nanmean()),
        scores.overall,
    )
    return dict(zip(COLUMNS, numbers, strict=True))
