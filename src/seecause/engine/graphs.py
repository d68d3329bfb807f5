"""CUDA graphs: what repeats is recorded once and launched as one.

A small batch waits for the host, which launches hundreds of kernels one by one; a graph launches
them all at once and computes the same bits.

    logits = captured(model, ("caap", plan), prepare, images)

`prepare()` runs on the host and returns the function that runs on the device: tensors in, a tensor
or a tuple of tensors out. On a CPU, with gradients on, or switched off, that is all: the function
is called. On CUDA the first two calls of a kind run plainly, the second is then recorded (so that
whatever is made once has been made), and later ones copy their tensors in, replay, and copy the
results out; `prepare` is not called any more.

What a recorded function must keep to:
- no copy from or to the host, no waiting (`.item()`, `.cpu()`, an index by a list or by bools);
- `key` says everything that its result hangs on besides the model, shapes and dtypes; what it names
  by `id` is held by `prepare`, which the graph keeps, so that nothing else can take that id;
- whatever else it reads it closes over (the graph keeps it alive), or the model's memo holds.

It may differentiate inside: called under `no_grad`, it runs `with torch.enable_grad()` a forward
and `torch.autograd.grad` on tensors made inside, and returns what carries no gradient.

A graph is dropped when a weight, a gate or a device changed, when the model goes or forgets, and
when newer ones need its place. All graphs of a device share one memory pool, so they run one after
the other, whichever thread asks. Where recording fails, the plain run stays and `report` says why.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from seecause.models.eval_mode import Watch, tensor_key, tensors_of

log = logging.getLogger(__name__)
Out = TypeVar("Out", Tensor, tuple[Tensor, ...])

MOST = 32  # graphs of one device
SHARE = 0.25  # of a device's memory, for all of them
TRIES = 2  # recordings that may fail before a call is left alone
SWITCH = "SEECAUSE_GRAPHS"  # "0" in the environment turns graphs off

_off: ContextVar[bool] = ContextVar("seecause_graphs_off", default=False)
_capturing = threading.Lock()  # CUDA records one graph at a time in a process
_pools: dict[torch.device, _Pool] = {}


class Owner(Protocol):
    """A model: its graphs live in its memo and are good for one state of it."""

    memo: dict[Any, Any]

    def state_key(self) -> tuple[Any, ...]: ...

    def watch(self) -> Watch: ...


def captured(
    model: Owner, key: Hashable, prepare: Callable[[], Callable[..., Out]], *tensors: Tensor
) -> Out:
    """`prepare()(*tensors)`; from the second time on, the replay of its recording."""
    if not usable(tensors) or getattr(model, "apart", False):
        return prepare()(*tensors)
    return _pool(tensors[0].device).run(model, key, prepare, tensors)


def ready(model: Owner, key: Hashable, *tensors: Tensor) -> bool:
    """Whether a recording of this call exists (it may still turn out to be out of date)."""
    held = model.memo.get("graphs", {}).get(_place(model, key, tensors))
    return isinstance(held, _Graph) and held.graph is not None and usable(tensors)


def usable(tensors: tuple[Tensor, ...]) -> bool:
    """Whether graphs have a part in this call: on CUDA, nothing to differentiate, not inside
    another recording, and not switched off."""
    return (
        not _off.get()
        and os.environ.get(SWITCH) != "0"
        and bool(tensors)
        and all(tensor.is_cuda for tensor in tensors)
        and not torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not recording()
    )


def recording() -> bool:
    """Whether this call is being recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def without_graphs() -> Iterator[None]:
    """Plain runs inside the block, in this thread."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def clear(device: torch.device | None = None) -> None:
    """Let go of all graphs and their memory, of one device or of all."""
    for pool in list(_pools.values()):
        if device is None or pool.device == device:
            pool.clear()


def pool_bytes(device: torch.device) -> int:
    """Memory that graphs of a device hold beside the model's own."""
    pool = _pools.get(device)
    return 0 if pool is None else pool.bytes


def report() -> list[str]:
    """What is recorded and what could not be, a line each (for `doctor`)."""
    lines = []
    for pool in _pools.values():
        count = len(pool.living())
        lines.append(f"{pool.device}: {count} graphs, {pool.bytes / 2**20:.0f} MiB")
        lines += [f"{pool.device}: plain runs of {key}: {why}" for key, why in pool.failures]
    return lines


@dataclass(eq=False)
class ModuleOwner:
    """Any module as the owner of graphs; keep it beside the module."""

    module: nn.Module
    memo: dict[Any, Any] = field(default_factory=dict)

    def state_key(self) -> tuple[Any, ...]:
        return tuple(tensor_key(tensor) for tensor in tensors_of(self.module))

    def watch(self) -> Watch:
        return Watch([self.module])

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "memo": {}}  # copies make graphs of their own


@dataclass(eq=False)
class _Graph:
    """One recording. What it reads stays alive with it: inputs, the function and what that closes
    over, what it was prepared from, and (by the watch) the memory of weights that are replaced."""

    watch: Watch | None
    function: Callable[..., Any] | None
    inputs: list[Tensor]
    outputs: Any = None
    graph: torch.cuda.CUDAGraph | None = None
    prepare: Callable[[], Any] | None = None

    def launch(self, tensors: tuple[Tensor, ...]) -> Any:
        """New values in, replay, results out; nothing waits."""
        assert self.graph is not None
        for mine, given in zip(self.inputs, tensors, strict=True):
            mine.copy_(given)
        self.graph.replay()
        if isinstance(self.outputs, Tensor):
            return self.outputs.clone()
        return tuple(output.clone() for output in self.outputs)

    def release(self) -> None:
        self.watch = self.function = self.outputs = self.graph = self.prepare = None
        self.inputs = []


@dataclass(eq=False)
class _Seen:
    """A call that has run in this state of the model, and how often its recording failed."""

    state: int
    failures: int = 0


class _Pool:
    """All graphs of one device: the newest stay, within a bound of number and memory."""

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, 0
        self._lock = threading.RLock()
        self._order: OrderedDict[int, weakref.ref[_Graph]] = OrderedDict()  # by id, oldest first
        self.failures: dict[tuple[str, str], None] = {}  # what, and why; in their order
        self._handle: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def run(
        self,
        model: Owner,
        key: Hashable,
        prepare: Callable[[], Callable[..., Any]],
        tensors: tuple[Tensor, ...],
    ) -> Any:
        graphs: dict[Hashable, _Graph | _Seen] = model.memo.setdefault("graphs", {})
        place = _place(model, key, tensors)
        held = graphs.get(place)
        if isinstance(held, _Graph):
            results, watch = self._launch(held, tensors), held.watch
            if results is not None and watch is not None and watch.unchanged():  # beside the replay
                return results
            self.drop(held)
        state, function = hash(model.state_key()), prepare()
        results = function(*tensors)
        seen = held if isinstance(held, _Seen) and held.state == state else None
        graph = None
        if seen is not None and seen.failures < TRIES:
            graph = self._record(model, key, function, tensors, seen)
            if graph is not None:
                graph.prepare = prepare
        graphs[place] = graph or seen or _Seen(state)
        while len(graphs) > 4 * MOST:
            graphs.pop(next(iter(graphs)))
        return results

    def _launch(self, graph: _Graph, tensors: tuple[Tensor, ...]) -> Any:
        """None where the graph is gone. Streams take turns, as graphs share their memory."""
        with self._lock, torch.cuda.device(self.device):
            if graph.graph is None:
                return None
            self._order.move_to_end(id(graph))
            if self._done is not None:
                self._done.wait()
            results = graph.launch(tensors)
            self._done = self._done or torch.cuda.Event()
            self._done.record()
            return results

    def _record(
        self,
        model: Owner,
        key: Hashable,
        function: Callable[..., Any],
        tensors: tuple[Tensor, ...],
        seen: _Seen,
    ) -> _Graph | None:
        graph = _Graph(model.watch(), function, [tensor.clone() for tensor in tensors])
        graph.graph = torch.cuda.CUDAGraph()
        with _capturing, self._lock, torch.cuda.device(self.device):
            before = torch.cuda.current_stream()
            self.living()  # torch refuses a memory pool whose graphs all went with their models
            try:
                grown = self._capture(graph)
            except RuntimeError as failure:  # also CUDA's own, and out of memory
                torch.cuda.set_stream(before)
                self._fail(key, seen, str(failure).strip().splitlines()[0])
                self._handle = None  # torch may believe that it is still being recorded to
                return None
            self._order.pop(id(graph), None)  # of one that is gone
            self._order[id(graph)] = weakref.ref(graph)
            self.bytes += grown
            limit = int(SHARE * torch.cuda.get_device_properties(self.device).total_memory)
            if self.bytes > limit:
                self.clear()
                if grown > limit:
                    self._fail(key, seen, f"larger than {limit >> 20} MiB")
                return None
        for oldest in self.living()[:-MOST]:
            self.drop(oldest)
        return graph

    def _capture(self, graph: _Graph) -> int:
        """Record, and say by how many bytes the pool grew."""
        assert graph.function is not None and graph.graph is not None
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        options = {"pool": self._handle, "stream": self._stream}
        with (
            _no_collection(),  # to destroy an old graph would spoil the new one
            torch.cuda.graph(graph.graph, capture_error_mode="thread_local", **options),
        ):
            held = torch.cuda.memory_reserved(self.device)
            graph.outputs = graph.function(*graph.inputs)
            return torch.cuda.memory_reserved(self.device) - held

    def drop(self, graph: _Graph) -> None:
        with self._lock:
            self._order.pop(id(graph), None)
            graph.release()
            if not self._order:
                self.bytes, self._handle = 0, None

    def clear(self) -> None:
        with self._lock:
            for graph in self.living():
                self.drop(graph)

    def living(self) -> list[_Graph]:
        """Oldest first; those that went with their model are forgotten."""
        with self._lock:
            alive = [(number, held()) for number, held in self._order.items()]
            for number, graph in alive:
                if graph is None:
                    del self._order[number]
            if not self._order:
                self.bytes, self._handle = 0, None
            return [graph for _, graph in alive if graph is not None]

    def _fail(self, key: Hashable, seen: _Seen, why: str) -> None:
        log.info("no CUDA graph of %s: %s", key, why)
        seen.failures += 1
        self.failures[str(key)[:80], why] = None
        while len(self.failures) > MOST:
            self.failures.pop(next(iter(self.failures)))


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector waits."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _pool(device: torch.device) -> _Pool:
    return _pools.setdefault(device, _Pool(device)) if device not in _pools else _pools[device]


def _place(model: Any, key: Hashable, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What a recording is good for: parts of the model that are replaced as a whole count, too."""
    parts = (id(model), id(getattr(model, "gates", None)), id(getattr(model, "blocks", None)))
    shapes = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    return (key, *parts, *_settings(), *shapes)


def _settings() -> tuple[Any, ...]:
    """Switches of torch that choose other kernels."""
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
