"""How long each slice of the study took by the clock, in one small file beside its trainings:
seconds of jobs that ran at once do not tell that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "slices.jsonl"  # a line for each slice that finished a job
Slice = dict[
    str, Any
]  # seconds, workers, jobs (None: not known), note (of who ran it, may be absent)


def remember(folder: Path, *, seconds: float, workers: int, jobs: int) -> None:
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(
            json.dumps({"seconds": round(seconds, 1), "workers": workers, "jobs": jobs}) + "\n"
        )


def kept(folder: Path) -> list[Slice]:
    path = folder / FILE
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        if path.is_file()
        else []
    )


def by_the_clock(slices: list[Slice], jobs: int) -> str:
    """A sentence. `jobs`: how many are done; if slices do not account for all of them, what they
    took is the least it took."""
    if not slices:
        return "By the clock: not known."
    whole = (
        all(one["jobs"] is not None for one in slices)
        and sum(one["jobs"] for one in slices) >= jobs
    )
    at_once = ", ".join(str(count) for count in sorted({max(1, one["workers"]) for one in slices}))
    notes = "".join(
        f", {note}" for note in dict.fromkeys(one["note"] for one in slices if one.get("note"))
    )
    seconds, many = (
        sum(one["seconds"] for one in slices),
        f"{len(slices)} slice{'s' * (len(slices) > 1)}",
    )
    unknown = "" if whole else "; earlier slices were not timed"
    return (
        f"By the clock: {'' if whole else 'at least '}{seconds:.0f} seconds ({many}, {at_once} jobs"
        f" at once{notes}{unknown})."
    )
