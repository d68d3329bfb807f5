"""One name for a machine, wherever it is written."""

from __future__ import annotations

from pathlib import Path

import torch

from seecause.engine.chunks import machine

ROOT = Path(__file__).parents[2]


def test_a_gpu_has_its_name_and_a_processor_its_kind(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "m68k")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: f"card {where.index}")
    assert machine("cpu") == machine(torch.device("cpu")) == "m68k CPU"
    assert (
        machine("cuda:1") == machine(torch.device("cuda", 1)) == "card 1"
        and machine("cuda") == "card None"
    )


def test_nobody_else_asks_for_it():
    files = [path for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    asking = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if "get_device_name" in path.read_text(encoding="utf-8")
    }
    assert asking == {"src/seecause/engine/chunks.py"}
