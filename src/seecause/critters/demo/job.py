"""What a demo job gets and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from seecause.report.page import Section


@dataclass(frozen=True)
class Setting:
    """Where and with which seed all jobs run."""

    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class Shown:
    """Sections of the page, and the manifests of what they show."""

    sections: Sequence[Section]
    manifests: Sequence[dict[str, Any]]


class Job(Protocol):
    """A module with a `run`, and the word for it in the page's navigation."""

    CHAPTER: str

    def run(self, setting: Setting) -> Shown: ...


def chapter(job: Job, setting: Setting) -> Shown:
    """What a job shows, its first section opening a chapter."""
    found = job.run(setting)
    first = [replace(section, chapter=job.CHAPTER) for section in found.sections[:1]]
    return replace(found, sections=[*first, *found.sections[1:]])
