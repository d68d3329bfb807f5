"""Examples of docstrings as blocks of code: Markdown takes their `>>>` for quotations."""

from __future__ import annotations

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fences every run of lines from a `>>>` to the next empty line."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The docstring with its examples between fences."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith(">>> ") and not inside:
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
