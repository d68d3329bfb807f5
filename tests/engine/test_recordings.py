"""When a recording is made, kept and thrown away, with stand-ins for CUDA."""

from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from seecause.engine import graphs
from seecause.engine.graphs import captured
from tests.helpers import view
from tests.tiny import pictures, tiny

CPU = torch.device("cpu")


@pytest.fixture
def stand_ins(monkeypatch):
    """What CUDA does, on a CPU: a recording runs the function, a replay runs it again and writes
    over its results. Every recording takes one byte of a hundred."""
    pool, spoiled, reserved = graphs._Pool(CPU), [], count(10)
    record = graphs._Pool.record

    @contextmanager
    def recording(graph, **options):
        yield
        if spoiled:
            raise RuntimeError(spoiled.pop())

    def recorded(pool, call, key, made, tensors):
        record(pool, call, key, made, tensors)
        if call.graph is not None:
            inputs, outputs = call.inputs, call.outputs
            call.graph.replay = lambda: outputs.copy_(made[1](*inputs))

    monkeypatch.setattr(graphs._Pool, "record", recorded)
    monkeypatch.setattr(graphs, "_pools", {CPU: pool})
    monkeypatch.setattr(graphs, "usable", lambda tensors: not graphs._off.get())
    for name, value in {
        "device": lambda device: nullcontext(),
        "current_stream": object,
        "set_stream": lambda stream: None,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=100),
        "memory_reserved": lambda device: next(reserved),
        "graph_pool_handle": object,
        "Stream": object,
        "graph": recording,
        "Event": MagicMock,
        "CUDAGraph": SimpleNamespace,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return SimpleNamespace(pool=pool, spoiled=spoiled)


class Runs:
    """A model's logits by recordings; `prepared` says which calls were prepared anew."""

    def __init__(self):
        self.native, self.prepared = tiny("timm_deit3"), []
        self.model = view(self.native)
        self.images = pictures(self.native)

    def __call__(self, key):
        def prepare():
            self.prepared.append(key)
            return self.model

        with torch.no_grad():
            got = captured(self.model, key, prepare, self.images)
        assert torch.equal(got, self.model(self.images))


def test_recordings_are_made_once_kept_while_nothing_changes_and_bounded(stand_ins, monkeypatch):
    pool, run = stand_ins.pool, Runs()
    prepared = run.prepared
    for _ in range(5):
        run("a")
    assert prepared == ["a", "a"] and len(pool.calls) == 1 and pool.bytes() == 1
    with torch.no_grad():
        run.model.module.head.weight.mul_(2)
    for _ in range(4):
        run("a")
    assert prepared == ["a"] * 4 and len(pool.calls) == 1
    stand_ins.spoiled.append("no room")
    for _ in range(4):
        run("b")
    assert prepared[4:] == ["b"] * 4
    monkeypatch.setattr(graphs, "MOST", 2)
    for key in "cdefg":
        run(key), run(key)
    assert len(pool.calls) == 2
    monkeypatch.setattr(graphs, "SHARE", 0.0)
    for _ in range(4):
        run("large")
    assert prepared[-4:] == ["large"] * 4 and not pool.calls
    monkeypatch.setattr(graphs, "SHARE", 1.0)
    run("h"), run("h")
    assert graphs.pool_bytes(CPU) == 1
    run.model.forget()
    assert not pool.calls and graphs.pool_bytes(CPU) == 0


def test_graphs_have_a_part_in_plain_runs_on_cuda_only(monkeypatch):
    there, here = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    with torch.no_grad():
        assert graphs.usable((there, there))
        assert not graphs.usable((there, here)) and not graphs.usable(())
        with graphs.without_graphs():
            with graphs.without_graphs():
                pass
            assert not graphs.usable((there,))
        assert graphs.usable((there,))  # and again behind it
        torch.set_autocast_enabled("cuda", True)
        assert not graphs.usable((there,))
        torch.set_autocast_enabled("cuda", False)
        monkeypatch.setattr(graphs, "is_recording", lambda: True)
        assert not graphs.usable((there,))
        monkeypatch.undo()
        monkeypatch.setenv(graphs.SWITCH, "0")
        assert not graphs.usable((there,))
        monkeypatch.undo()
    assert not graphs.usable((there,))
    with torch.inference_mode():
        assert not graphs.usable((there,))
