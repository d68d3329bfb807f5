"""A slow machine prints no line of progress between those that a test reads; commands that do not
get beyond the function that does their work."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import seecause
from seecause.cli import app
from tests.cli.spies import MODEL, Reached, reach

# what `opened` puts something else for, and the modules that take it by name: none of them may be
# imported for the first time while it does
PATCHED = {"load", "open_data", "model_for"}
SOURCE = Path(seecause.__file__).parent


def _takers():
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and PATCHED & {name.name for name in node.names}:
                yield ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)


for _module in dict.fromkeys(_takers()):
    importlib.import_module(_module)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr("seecause.cli.progress.EVERY", float("inf"))


@pytest.fixture
def opened(monkeypatch):
    """What was loaded, by which options: no weights are read."""
    loads = []

    def load(name, **options):
        loads.append((name, options))
        return MODEL

    def open_data(name, *, limit=None):
        return f"{name}, {limit}"

    monkeypatch.setattr("seecause.loading.load", load)
    monkeypatch.setattr("seecause.data.registry.open_data", open_data)
    monkeypatch.setattr("seecause.background.images.model_for", lambda model, data: model)
    return loads


@pytest.fixture
def called(monkeypatch, tmp_path):
    """Call a command, and hand out what `place` got."""

    def call(line, place):
        out = [] if " --out " in line else ["--out", str(tmp_path / "out")]
        module, _, name = place.rpartition(".")
        with monkeypatch.context() as patch:  # not by its name: `sc.repair` is a function, too
            patch.setattr(importlib.import_module(module), name, reach)
            done = CliRunner().invoke(app, [*line.split(), *out])
        assert isinstance(done.exception, Reached), (done.output, done.exception)
        return done.exception

    return call
