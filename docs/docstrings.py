"""Docstrings as the reference shows them."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """The section `Example:` is read as one with examples, which is what griffe knows."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
