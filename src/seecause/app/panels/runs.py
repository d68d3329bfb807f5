"""Results: those of this session, and folders of results that the server was started with. Folders
are read anew for each list. A request names a page by a digest of its name: nothing in a request
becomes a path.

A page may hold a script. It is served into a sandbox of its own (no origin, no request anywhere),
so that no page can send requests to the server, whatever is in a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from seecause.app.jobs import Reply
from seecause.app.panels import Panel, PanelRequest
from seecause.app.state import ActionContext
from seecause.files import digest

FIRST = ("index.html", "report.html")  # a folder with one of them is a result; it is opened first


class RunFolder(NamedTuple):
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
        "kept": [
            {
                "id": record.id,
                "action": record.action,
                "request": record.request,
                "state": "done" if record.job.future.done() else "running",
                "date": _date(record.made),
            }
            for record in sorted(context.session.results.values(), key=lambda each: -each.made)
            if record.usable
        ],
        "runs": [
            {
                "name": run.name,
                "date": _date(run.changed),
                "pages": [{"id": id, "name": path.name} for id, path in run.pages.items()],
            }
            for run in find_runs(context.state.runs)
        ],
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


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
            ids = {digest(f"{name}/{page.name}", length=12): page for page in pages}
            found.append(RunFolder(name, pages[0].stat().st_mtime, ids))
    return sorted(found, key=lambda run: run.changed, reverse=True)


def find_pages(runs: list[RunFolder]) -> dict[str, Path]:
    """Every page that may be served, by id."""
    return {id: path for run in runs for id, path in run.pages.items()}


PANEL = Panel(
    "runs", "Results", "What did earlier audits, repairs and commands find?", (listed,), kinds=()
)
