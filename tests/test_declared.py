"""Defaults of what people call."""

from __future__ import annotations

from tests import declared


def test_every_default_is_as_promised():
    """`python -m tests.declared` writes them anew."""
    assert declared.declared() == declared.FILE.read_text(encoding="utf-8")
