"""A slow machine prints no line of progress between those that a test reads."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr("seecause.cli.shared.EVERY", float("inf"))
