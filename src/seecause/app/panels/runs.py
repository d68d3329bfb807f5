"""Runs: folders of results that the server was started with, and their pages. They are listed once,
at the start: a request names a page by an id of that list, and nothing in a request becomes a path.

A page may hold a script. It is served into a sandbox of its own (no origin, no request anywhere),
so that whatever is in a folder, the page cannot speak to the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from seecause.app.jobs import Reply
from seecause.app.panels import Name, Panel, PanelRequest, as_script
from seecause.app.state import ActionContext
from seecause.errors import BadOption

FIRST = ("index.html", "report.html")  # the page that is opened first
MOST = 200  # folders that are listed
MOST_PAGES = 100  # of one folder


@dataclass(frozen=True)
class RunPage:
    """One page of a result; `id` is all that a client knows of it."""

    id: str
    name: str
    path: Path


@dataclass(frozen=True)
class RunFolder:
    """One result: its date, and its pages with the main one first."""

    id: str
    name: str
    date: str
    pages: tuple[RunPage, ...]


class Everything(PanelRequest):
    """A request without fields."""


class Opened(PanelRequest):
    """One result, by the id of the list."""

    run: Name


def listed(context: ActionContext, request: Everything) -> Reply:
    """All results, the newest first."""
    return {"runs": [run_facts(run) for run in context.state.results.values()]}


def run_facts(run: RunFolder) -> Reply:
    """What the page shows of a result; its folder stays here."""
    pages = [{"id": page.id, "name": page.name} for page in run.pages]
    return {"id": run.id, "name": run.name, "date": run.date, "pages": pages}


def copy(context: ActionContext, request: Opened) -> Reply:
    """What opens the same page without this one, from the folder that holds the results."""
    runs = context.state.results
    if request.run not in runs:
        raise BadOption("run", request.run, "a result of the list")
    run = runs[request.run]
    place = f"{run.name}/{run.pages[0].name}"
    opening = f"webbrowser.open(Path({place!r}).resolve().as_uri())"
    return as_script(["import webbrowser", "from pathlib import Path", "", opening])


def find_runs(folders: Mapping[str, Path]) -> dict[str, RunFolder]:
    """Results in these folders and one level below them, by id; the newest first."""
    places = [place for name, folder in folders.items() for place in _places(name, folder)]
    places.sort(key=lambda place: _changed(place[1]), reverse=True)
    ids = enumerate(places[:MOST])
    return {f"r{at}": _read_run(f"r{at}", name, folder) for at, (name, folder) in ids}


def find_pages(runs: Mapping[str, RunFolder]) -> dict[str, Path]:
    """Every page that may be served, by id."""
    return {page.id: page.path for run in runs.values() for page in run.pages}


def _places(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """A folder, and those in it that hold a result of their own."""
    root = folder.resolve()
    if _mark(root) is not None:
        yield name, root
    try:
        below = sorted(child for child in root.iterdir() if child.is_dir())
    except OSError:
        return
    for child in below:
        if not child.is_symlink() and _mark(child) is not None:
            yield f"{name}/{child.name}", child


def _mark(folder: Path) -> Path | None:
    """The file that makes a folder a result."""
    for name in FIRST:
        if _plain_file(folder / name):
            return folder / name
    return None


def _plain_file(path: Path) -> bool:
    """No link, which might lead elsewhere."""
    return path.is_file() and not path.is_symlink()


def _changed(folder: Path) -> float:
    mark = _mark(folder)
    return 0.0 if mark is None else mark.stat().st_mtime


def _read_run(id: str, name: str, folder: Path) -> RunFolder:
    html = sorted(path for path in folder.glob("*.html") if _plain_file(path))
    html.sort(key=lambda path: FIRST.index(path.name) if path.name in FIRST else len(FIRST))
    pages = [RunPage(f"{id}p{at}", p.name, p) for at, p in enumerate(html[:MOST_PAGES])]
    date = datetime.fromtimestamp(_changed(folder), UTC).strftime("%Y-%m-%d %H:%M UTC")
    return RunFolder(id, name, date, tuple(pages))


PANEL = Panel(
    "runs",
    "Runs",
    "What did earlier runs find?",
    actions=(listed,),
    copy=copy,
    kinds=(),
)
