"""Cells that cost nothing, for tests of the runner."""

from __future__ import annotations

import time

CALLS: list[tuple[str, int]] = []


def scaled(context, *, method, seed, scale):
    if seed < 0:
        time.sleep(600)
    CALLS.append(("scaled", seed))
    if seed == 0:
        raise ValueError("nothing to scale")
    context.fingerprints["toy data"] = f"seed {seed}"
    return [{"value": scale * seed}]


def total(context, *, earlier):
    CALLS.append(("total", sum(row["value"] for row in earlier["first"])))
    return [{"value": CALLS[-1][1]}]
