"""The demo: jobs on the embedded models, each a file here with `run(setting) -> Shown`, listed in `JOBS`."""

from __future__ import annotations

from seecause.demo import compare, explain
from seecause.demo.job import Job, Setting, Shown

JOBS: tuple[Job, ...] = (explain, compare)

__all__ = ["JOBS", "Job", "Setting", "Shown"]
