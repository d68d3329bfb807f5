"""The panels of the page, in the order of their tabs."""

from __future__ import annotations

import importlib

from seecause.app.panels.registry import Panel
from seecause.errors import UnknownName

PANELS = ("explain", "swap", "heads", "repair", "parts", "ask", "runs")


def panels() -> dict[str, Panel]:
    """All panels, by name."""
    return {name: importlib.import_module(f"{__name__}.{name}").PANEL for name in PANELS}


def find_panel(name: str) -> Panel:
    known = panels()
    if name not in known:
        raise UnknownName("panel", name, known)
    return known[name]
