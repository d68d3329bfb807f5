"""The demo: jobs on the embedded models, each a file here with a `CHAPTER` and `run(setting) ->
Shown`, listed in `JOBS`."""

from __future__ import annotations

from seecause.critters.demo import audit, build, compare, explain, repair, trace
from seecause.critters.demo.job import Job, Setting, Shown, chapter

JOBS: tuple[Job, ...] = (explain, compare, audit, repair, build, trace)

__all__ = ["JOBS", "Job", "Setting", "Shown", "chapter"]
