"""A slow machine prints no line of progress between those that a test reads."""

import pytest


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr("seecause.cli.shared.EVERY", float("inf"))
