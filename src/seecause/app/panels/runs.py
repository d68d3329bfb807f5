"""Runs: folders of results that the server was started with, and their pages. They are listed once,
at the start: a request names a page by an id of that list, and nothing in a request becomes a path.

A page may hold a script. It is served into a sandbox of its own (no origin, no request anywhere),
so that no page can send requests to the server, whatever is in a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from seecause.app.jobs import Reply
from seecause.app.panels import Panel, PanelRequest
from seecause.app.state import ActionContext

FIRST = ("index.html", "report.html")  # a folder with one of them is a result; it is opened first


@dataclass(frozen=True)
class RunFolder:
    """One result: when it was made, and its pages by id with the main one first. An id is all that
    a client knows of a page."""

    name: str
    changed: float
    pages: dict[str, Path]


class Everything(PanelRequest):
    """A request without fields."""


def listed(context: ActionContext, request: Everything) -> Reply:
    """All results, the newest first."""
    return {
        "runs": [
            {
                "name": run.name,
                "date": datetime.fromtimestamp(run.changed, UTC).strftime("%Y-%m-%d %H:%M UTC"),
                "pages": [{"id": id, "name": path.name} for id, path in run.pages.items()],
            }
            for run in context.state.results
        ]
    }


def find_runs(folders: Mapping[str, Path]) -> list[RunFolder]:
    """Results in these folders and one level below them, the newest first. Links, which might lead
    elsewhere, are not followed."""
    places = [(name, folder.resolve()) for name, folder in folders.items()]
    for name, folder in list(places):
        below = [each for each in sorted(folder.iterdir()) if each.is_dir()]
        places += [(f"{name}/{each.name}", each) for each in below if not each.is_symlink()]
    found = []
    for name, folder in places:
        pages = [page for page in folder.glob("*.html") if page.is_file() and not page.is_symlink()]
        pages.sort(key=lambda page: (page.name not in FIRST, page.name))
        if pages and pages[0].name in FIRST:
            found.append((name, pages[0].stat().st_mtime, pages))
    found.sort(key=lambda result: result[1], reverse=True)
    return [
        RunFolder(name, changed, {f"r{at}p{place}": page for place, page in enumerate(pages)})
        for at, (name, changed, pages) in enumerate(found)
    ]


def find_pages(runs: list[RunFolder]) -> dict[str, Path]:
    """Every page that may be served, by id."""
    return {id: path for run in runs for id, path in run.pages.items()}


PANEL = Panel("runs", "Runs", "What did earlier runs find?", actions=(listed,), kinds=())
