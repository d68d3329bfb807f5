"""CUDA graphs: repeated runs are recorded once and replayed.

A small batch waits for the host, which launches hundreds of kernels one by one; a graph launches
them all at once and computes the same bits.

    logits = captured(model, ("caap", plan), prepare, images)

`prepare()` runs on the host and returns the function that runs on the device: tensors in, a tensor
or a tuple of tensors out. On a CPU, with gradients on, or switched off, that is all: the function
is called. On CUDA the first two calls of a kind run plainly, the second is then recorded (so that
whatever is made once has been made), and later ones copy their tensors in, replay, and copy the
results out; `prepare` is not called any more.

Rules for a recorded function:
- no copy from or to the host, no waiting (`.item()`, `.cpu()`, an index by a list or by bools);
- `key` contains everything that its result depends on besides the model, shapes and dtypes; objects
  identified by `id` are referenced by `prepare`, which the graph keeps, so that no id is reused;
- other tensors that it reads are in its closure (the graph keeps it alive) or in the model's memo.

It may differentiate inside: called under `no_grad`, it runs `with torch.enable_grad()` a forward
and `torch.autograd.grad` on tensors made inside, and returns what carries no gradient.

A graph is dropped if a weight, a gate or a device changed, if the model is deleted or `forget` is
called, and if newer graphs exceed the limits. All graphs of a device share one memory pool, so they
run one after the other, whichever thread asks. If recording fails, the function runs plainly and
the reason is logged. The model is anything with a `memo`, in which its graphs live, `tensors()`,
and a `state_key()` that changes with them.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from seecause.engine.chunks import is_recording
from seecause.models.base import Contents, weights_key

log = logging.getLogger(__name__)
Out = TypeVar("Out", Tensor, tuple[Tensor, ...])

MOST = 32  # maximum number of graphs on one device
SHARE = 0.25  # share of a device's memory for all graphs
SWITCH = "SEECAUSE_GRAPHS"  # "0" in the environment turns graphs off

_lock = threading.RLock()  # CUDA records one graph at a time in a process
_pools: dict[torch.device, _Pool] = {}


def captured(
    model: Any, key: Hashable, prepare: Callable[[], Callable[..., Out]], *tensors: Tensor
) -> Out:
    """`prepare()(*tensors)`; from the third call on, the replay of its recording."""
    if not usable(tensors):
        return prepare()(*tensors)
    device = tensors[0].device
    pool = _pools.get(device) or _pools.setdefault(device, _Pool(device))
    calls: dict[Hashable, _Call] = model.memo.setdefault("graphs", {})
    place = _place(model, key, tensors)
    call = calls.get(place)
    if call is not None and call.graph is not None:
        results, state = pool.launch(call, tensors), call.state
        if results is not None and state == model.state_key():  # beside the replay
            return results
        pool.drop(call)
    function = prepare()
    results = function(*tensors)
    state = model.state_key()
    if call is None or call.state != state:
        calls[place] = _Call(state, [tensor.detach() for tensor in model.tensors()])
        while len(calls) > 4 * MOST:
            calls.pop(next(iter(calls)))
    elif not call.failed:
        pool.record(call, key, (prepare, function), tensors)
    return results


def ready(model: Any, key: Hashable, *tensors: Tensor) -> bool:
    """Whether a recording of this call exists (it may still turn out to be out of date)."""
    call = model.memo.get("graphs", {}).get(_place(model, key, tensors))
    return call is not None and call.graph is not None and usable(tensors)


def usable(tensors: tuple[Tensor, ...]) -> bool:
    """Whether graphs apply to this call: on CUDA, nothing to differentiate, not inside another
    recording, and not switched off."""
    return (
        os.environ.get(SWITCH) != "0"
        and bool(tensors)
        and all(tensor.is_cuda for tensor in tensors)
        and not torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not is_recording()
    )


def clear() -> None:
    """Drop all graphs and free their memory."""
    for pool in list(_pools.values()):
        for call in list(pool.calls.values()):
            pool.drop(call)


def pool_bytes(device: torch.device) -> int:
    """The memory that graphs of a device hold besides the model's own."""
    return _pools[device].bytes() if device in _pools else 0


@dataclass(eq=False)
class ModuleOwner:
    """The graphs of any module; keep it beside the module."""

    module: nn.Module
    memo: dict[Any, Any] = field(default_factory=dict)

    def state_key(self) -> tuple[Any, ...]:
        return weights_key(self.tensors())

    def tensors(self) -> list[Tensor]:
        if "contents" not in self.memo:
            self.memo["contents"] = Contents([self.module])
        return self.memo["contents"].now().tensors

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "memo": {}}  # copies make graphs of their own


@dataclass(eq=False)
class _Call:
    """A call that has run in one state of the model, and its recording, if there is one. What the
    recording reads stays alive with it: inputs, the function and what that closes over, what it
    was prepared from, and the weights, whose addresses no other tensor can have meanwhile."""

    state: tuple[Any, ...] | None
    weights: Sequence[Tensor]
    failed: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    inputs: tuple[Tensor, ...] = ()
    outputs: Any = None
    keeps: Any = None
    bytes: int = 0


class _Pool:
    """All graphs of one device: the newest stay, within a bound of number and memory."""

    def __init__(self, device: torch.device):
        self.device = device
        self.calls: WeakValueDictionary[int, _Call] = WeakValueDictionary()  # by id, oldest first
        self.handle: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None

    def bytes(self) -> int:
        return sum(call.bytes for call in self.calls.values())

    def launch(self, call: _Call, tensors: tuple[Tensor, ...]) -> Any:
        """New values in, replay, results out, without waiting; None where the graph is gone.
        Streams take turns, as graphs share their memory."""
        with _lock, torch.cuda.device(self.device):
            if call.graph is None:
                return None
            self.calls[id(call)] = self.calls.pop(id(call), call)  # the newest
            if self.done is not None:
                self.done.wait()
            for mine, given in zip(call.inputs, tensors, strict=True):
                mine.copy_(given)
            call.graph.replay()
            outputs = call.outputs
            one = isinstance(outputs, Tensor)
            results = outputs.clone() if one else tuple(output.clone() for output in outputs)
            self.done = self.done or torch.cuda.Event()
            self.done.record()
            return results

    def record(
        self, call: _Call, key: Hashable, made: tuple[Any, Callable[..., Any]], tensors: Any
    ) -> None:
        """Record the function that was prepared, `made` = (prepare, function)."""
        graph, inputs = torch.cuda.CUDAGraph(), tuple(tensor.clone() for tensor in tensors)
        with _lock, torch.cuda.device(self.device):
            before, collecting = torch.cuda.current_stream(), gc.isenabled()
            if self.handle is None or not len(self.calls):  # torch refuses that of graphs all gone
                self.handle = torch.cuda.graph_pool_handle()
            self.stream = self.stream or torch.cuda.Stream()
            options: Any = {"pool": self.handle, "stream": self.stream}
            gc.disable()  # destroying an old graph would invalidate the recording
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
                    held = torch.cuda.memory_reserved(self.device)
                    outputs = made[1](*inputs)
                    call.bytes = torch.cuda.memory_reserved(self.device) - held
            except RuntimeError as failure:  # also CUDA's own, and out of memory
                torch.cuda.set_stream(before)
                self._fail(call, key, str(failure).strip().splitlines()[0])
                self.handle = None  # torch may believe that it is still being recorded to
                return
            finally:
                if collecting:
                    gc.enable()
            call.graph, call.inputs, call.outputs, call.keeps = graph, inputs, outputs, made
            self.calls[id(call)] = call
            limit = int(SHARE * torch.cuda.get_device_properties(self.device).total_memory)
            state = call.state
            for oldest in list(self.calls.values())[: None if self.bytes() > limit else -MOST]:
                self.drop(oldest)
            if call.bytes > limit:
                call.state = state
                self._fail(call, key, f"larger than {limit >> 20} MiB")

    def drop(self, call: _Call) -> None:
        """Free a recording; the next call counts as the first."""
        with _lock:
            self.calls.pop(id(call), None)
            call.state = call.graph = call.outputs = call.keeps = None
            call.weights = ()
            call.inputs = ()

    def _fail(self, call: _Call, key: Hashable, why: str) -> None:
        log.info("no CUDA graph of %s: %s", key, why)
        call.failed = True


def _place(model: Any, key: Hashable, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """The identity of a recording: key, inputs, parts of the model that may be replaced,
    and settings of torch that select kernels."""
    parts = (id(model), id(getattr(model, "gates", None)), id(getattr(model, "blocks", None)))
    shapes = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    kernels = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    return (key, *parts, *kernels, *shapes)
