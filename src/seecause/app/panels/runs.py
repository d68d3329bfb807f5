"""Runs: results in the folders that the server was started with, and their pages."""

from __future__ import annotations

from seecause.app.jobs import Reply
from seecause.app.panels import Name, Panel, Request
from seecause.app.panels.replies import as_script
from seecause.app.run_folders import RunFolder
from seecause.app.state import ActionContext
from seecause.errors import BadOption


class Everything(Request):
    """A request without fields."""


class Opened(Request):
    """One result, by the id of the list."""

    run: Name


def listed(context: ActionContext, request: Everything) -> Reply:
    """All results, the newest first."""
    return {"runs": [run_facts(run) for run in context.state.results.values()]}


def run_facts(run: RunFolder) -> Reply:
    """What the page shows of a result; its folder stays here."""
    return {
        "id": run.id,
        "name": run.name,
        "kind": run.kind,
        "date": run.date,
        "facts": [list(fact) for fact in run.facts],
        "pages": [{"id": page.id, "name": page.name} for page in run.pages],
    }


def copy(context: ActionContext, request: Opened) -> Reply:
    """What opens the same page without this one, from the folder that holds the results."""
    runs = context.state.results
    if request.run not in runs:
        raise BadOption("run", request.run, "a result of the list")
    run = runs[request.run]
    if not run.pages:
        raise BadOption("run", run.name, "a result with a page")
    place = f"{run.name}/{run.pages[0].name}"
    opening = f"webbrowser.open(Path({place!r}).resolve().as_uri())"
    return as_script(["import webbrowser", "from pathlib import Path", "", opening])


PANEL = Panel(
    "runs",
    "Runs",
    "What did earlier runs find?",
    actions=(listed,),
    copy=copy,
    kinds=(),
)
