"""When a recording is made, kept and thrown away, with stand-ins for CUDA."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from seecause.engine import graphs
from seecause.engine.graphs import captured
from tests.helpers import view
from tests.tiny import pictures, tiny


@pytest.fixture
def stand_ins(monkeypatch):
    """What CUDA does, on a CPU: a recording runs the function, a replay runs it again."""
    pool, spoiled = graphs._Pool(torch.device("cpu")), []

    def record(graph):
        graph.outputs = graph.function(*graph.inputs)
        if spoiled:
            raise RuntimeError(spoiled.pop())
        return 1

    def launch(graph, tensors):
        return graph.function(*tensors)

    class Event:
        wait = record = lambda self: None

    card = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(pool, "_capture", record)
    monkeypatch.setattr(graphs._Graph, "launch", launch)
    monkeypatch.setattr(graphs, "_pool", lambda device: pool)
    monkeypatch.setattr(graphs, "usable", lambda tensors: not graphs._off.get())
    for name, value in {
        "device": lambda device: nullcontext(),
        "current_stream": lambda: None,
        "set_stream": lambda stream: None,
        "get_device_properties": lambda device: card,
        "Event": Event,
        "CUDAGraph": object,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return pool, spoiled


def test_recordings_are_made_once_kept_while_nothing_changes_and_bounded(stand_ins, monkeypatch):
    pool, spoiled = stand_ins
    native = tiny("timm_deit3")
    model, images = view(native), pictures(native)
    prepared = []

    def run(key):
        def prepare():
            prepared.append(key)
            return model

        with torch.no_grad():
            got = captured(model, key, prepare, images)
        assert torch.equal(got, model(images))

    for _ in range(5):
        run("a")
    assert prepared == ["a", "a"] and len(pool.living()) == 1 and pool.bytes == 1
    with torch.no_grad():
        model.module.head.weight.mul_(2)
    for _ in range(4):
        run("a")
    assert prepared == ["a"] * 4 and len(pool.living()) == 1
    spoiled += ["first", "second"]
    for _ in range(6):
        run("b")
    assert prepared[4:] == ["b"] * 6 and [why for _, why in pool.failures] == ["second", "first"]
    monkeypatch.setattr(graphs, "MOST", 2)
    for key in "cdefg":
        run(key), run(key)
    assert len(pool.living()) == 2
    model.forget()
    assert not pool.living() and pool.bytes == 0
