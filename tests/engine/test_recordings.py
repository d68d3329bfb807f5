"""When a recording is made, kept and thrown away, with stand-ins for CUDA."""

from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace

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
    pool, spoiled, turns, handles, reserved = graphs._Pool(CPU), [], [], [], count(10)
    streams: list[str] = []
    capture = graphs._Pool._capture

    @contextmanager
    def recording(graph, **options):
        handles.append(options["pool"])
        assert options["stream"] is pool._stream is not None
        yield
        if spoiled:
            raise RuntimeError(spoiled.pop())

    def captured_by(pool, graph):
        grown = capture(pool, graph)
        function, inputs, outputs = graph.function, graph.inputs, graph.outputs
        graph.graph.replay = lambda: outputs.copy_(function(*inputs))
        return grown

    class Event:
        def wait(self):
            turns.append("wait")

        def record(self):
            turns.append("record")

    monkeypatch.setattr(graphs._Pool, "_capture", captured_by)
    monkeypatch.setattr(graphs, "_pools", {CPU: pool})
    monkeypatch.setattr(graphs, "usable", lambda tensors: not graphs._off.get())
    for name, value in {
        "device": lambda device: nullcontext(),
        "current_stream": lambda: "the caller's",
        "set_stream": streams.append,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=100),
        "memory_reserved": lambda device: next(reserved),
        "graph_pool_handle": object,
        "Stream": object,
        "graph": recording,
        "Event": Event,
        "CUDAGraph": SimpleNamespace,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    made = {"pool": pool, "spoiled": spoiled, "turns": turns, "handles": handles}
    return SimpleNamespace(**made, streams=streams)


class Runs:
    """A model's logits by recordings; `prepared` says which calls were prepared anew."""

    def __init__(self):
        self.native, self.prepared = tiny("timm_deit3"), []
        self.model = view(self.native)
        self.images = pictures(self.native)

    def __call__(self, key, images=None):
        images = self.images if images is None else images

        def prepare():
            self.prepared.append(key)
            return self.model

        with torch.no_grad():
            got = captured(self.model, key, prepare, images)
        assert torch.equal(got, self.model(images))
        return got

    @property
    def held(self):
        return [x for x in self.model.memo["graphs"].values() if isinstance(x, graphs._Graph)]


def test_recordings_are_made_once_kept_while_nothing_changes_and_bounded(stand_ins, monkeypatch):
    pool, spoiled = stand_ins.pool, stand_ins.spoiled
    run = Runs()
    prepared = run.prepared
    for _ in range(5):
        run("a")
    assert prepared == ["a", "a"] and len(pool.living()) == 1 and pool.bytes == 1
    (old,) = run.held
    with torch.no_grad():
        run.model.module.head.weight.mul_(2)
    for _ in range(4):
        run("a")
    assert prepared == ["a"] * 4 and len(pool.living()) == 1
    assert old.graph is old.outputs is old.function is old.watch is None and not old.inputs
    spoiled += ["first", "second"]
    for _ in range(6):
        run("b")
    assert prepared[4:] == ["b"] * 6 and [why for _, why in pool.failures] == ["second", "first"]
    assert graphs.report() == [
        "cpu: 1 graphs, 0 MiB",
        "cpu: plain runs of b: second",
        "cpu: plain runs of b: first",
    ]
    pool.bytes = 3 << 20
    assert graphs.report()[0] == "cpu: 1 graphs, 3 MiB"
    monkeypatch.setattr(graphs, "MOST", 2)
    monkeypatch.setattr(graphs, "SHARE", 1 << 20)
    for key in "cdefg":
        run(key), run(key)
    assert len(pool.living()) == 2
    run.model.forget()
    assert not pool.living() and pool.bytes == graphs.pool_bytes(CPU) == 0


def test_only_a_call_that_ran_in_this_state_of_the_model_is_recorded(stand_ins):
    run, recorded = Runs(), []
    for factor in (1, 2, 1, 1):
        with torch.no_grad():
            if factor > 1:
                run.model.module.head.weight.mul_(factor)
        run("a")
        recorded.append(len(stand_ins.pool.living()))
    assert recorded == [0, 0, 1, 1]


def test_results_stay_and_replays_take_turns(stand_ins):
    run = Runs()
    others = [pictures(run.native, seed=seed) for seed in range(5)]
    results = [run("a", images) for images in others]
    assert run.prepared == ["a", "a"]
    for images, logits in zip(others, results, strict=True):
        assert torch.equal(logits, run.model(images))
    assert stand_ins.turns == ["record", "wait", "record", "wait", "record"]


def test_a_model_on_several_devices_runs_plainly(stand_ins):
    run = Runs()
    run.model.apart = True
    for _ in range(4):
        run("a")
    assert run.prepared == ["a"] * 4 and "graphs" not in run.model.memo


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
        monkeypatch.setattr(graphs, "recording", lambda: True)
        assert not graphs.usable((there,))
        monkeypatch.undo()
        monkeypatch.setenv(graphs.SWITCH, "0")
        assert not graphs.usable((there,))
        monkeypatch.undo()
    assert not graphs.usable((there,))
    with torch.inference_mode():
        assert not graphs.usable((there,))


def test_a_recording_is_good_for_one_key_shape_order_and_setting():
    model, x = SimpleNamespace(gates=None, blocks=[]), torch.zeros(2, 2)
    first = graphs._place(model, "a", (x,))
    assert first == graphs._place(model, "a", (x + 1,))
    others = [(model, "b", (x,)), (SimpleNamespace(**vars(model)), "a", (x,))]
    others += [(model, "a", (y,)) for y in (x[:1], x.mT, x.double(), x.to("meta"))]
    assert all(graphs._place(*other) != first for other in others)
    model.gates = torch.zeros(1)
    assert graphs._place(model, "a", (x,)) != first
    model.gates, model.blocks = None, []
    assert graphs._place(model, "a", (x,)) != first
    before = graphs._settings()
    cuda = torch.backends.cuda
    switches = {
        torch.set_float32_matmul_precision: ("medium", torch.get_float32_matmul_precision()),
        torch.use_deterministic_algorithms: (True, False),
        cuda.enable_flash_sdp: (False, True),
        cuda.enable_mem_efficient_sdp: (False, True),
        cuda.enable_math_sdp: (False, True),
    }
    for switch, (other, usual) in switches.items():
        switch(other)
        changed = graphs._settings()
        switch(usual)
        assert changed != before and graphs._settings() == before, switch
    with torch.backends.cudnn.flags(allow_tf32=not torch.backends.cudnn.allow_tf32):
        assert graphs._settings() != before
