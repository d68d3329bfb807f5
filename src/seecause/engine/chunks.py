"""One memory budget decides how much runs at once.

Running out of memory halves the chunk, records it and goes on; results do not depend on chunk sizes
beyond rounding.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from seecause.errors import may_stop

if TYPE_CHECKING:
    from seecause.models.base import ImageModel

log = logging.getLogger(__name__)
T = TypeVar("T")
Tensors = TypeVar("Tensors", Tensor, tuple[Tensor, ...])

# bytes of activations; larger chunks exceed the CPU's caches and run slower
CPU_BUDGET = 64 << 20
GPU_SHARE = 0.5  # share of the free memory at the start of a run


@dataclass
class Memory:
    """A budget in bytes (None: by device) and every halving that happened under it."""

    limit: int | None = None
    halvings: list[str] = field(default_factory=list)

    def bytes(self, device: torch.device) -> int:
        if self.limit is not None:
            return self.limit
        if device.type != "cuda":
            return CPU_BUDGET
        from seecause.engine import graphs

        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        unused = max(0, unused - graphs.pool_bytes(device))
        return int((free + unused) * GPU_SHARE)


_current: ContextVar[Memory | None] = ContextVar("seecause_memory", default=None)


def memory() -> Memory:
    """The current budget."""
    current = _current.get()
    return Memory() if current is None else current


@contextmanager
def budget(limit: int | None = None) -> Iterator[Memory]:
    """Limit the activations of every method inside the block to about `limit` bytes."""
    held, outer = Memory(limit), _current.get()
    token = _current.set(held)
    try:
        yield held
    finally:
        _current.reset(token)
        if outer is not None:
            outer.halvings.extend(held.halvings)


def fit(total: int, bytes_each: int, device: torch.device, *, share: float = 1.0) -> int:
    """How many of `total` equal items run at once."""
    if total <= 1:  # asking a GPU for its free memory takes longer than launching a graph
        return 1
    return max(1, min(total, int(memory().bytes(device) * share) // max(1, bytes_each)))


def out_of_memory(failure: Exception) -> bool:
    """Whether an allocation failed, on a GPU or not: on a CPU torch raises a plain RuntimeError."""
    if isinstance(failure, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    words = str(failure)
    return "DefaultCPUAllocator" in words or "can't allocate memory" in words


def is_recording() -> bool:
    """Whether this call is being recorded as a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def in_chunks(
    run: Callable[[int, int], T], total: int, size: int, *, what: str = "chunk"
) -> Iterator[T]:
    """`run(start, stop)` over `total` items, `size` at a time; out of memory halves `size` and
    repeats the part."""
    start = 0
    while start < total:
        may_stop()
        stop = min(total, start + size)
        try:
            part = run(start, stop)
        except (RuntimeError, MemoryError) as failure:
            if size == 1 or not out_of_memory(failure) or is_recording():
                raise
        else:
            yield part
            start = stop
            continue
        size = max(1, size // 2)  # outside the handler: its traceback would keep the tensors alive
        memory().halvings.append(f"{what}: {size}")
        log.warning("out of memory; %s reduced to %d", what, size)
        if torch.cuda.is_available():
            from seecause.engine import graphs

            graphs.clear()
            torch.cuda.empty_cache()


def joined(parts: Sequence[Tensors], dim: int = 0) -> Tensors:
    """All parts, tensors or tuples of them, as one; a single one as it is."""
    if len(parts) == 1:
        return parts[0]
    pieces: Any = parts
    if isinstance(parts[0], Tensor):
        return torch.cat(list(pieces), dim=dim)
    return tuple(torch.cat(column, dim=dim) for column in zip(*pieces, strict=True))


def batched(
    run: Callable[[Tensor], Tensor], items: Tensor, size: int, *, what: str = "batch"
) -> Tensor:
    """`run` over `items` along the first axis, `size` at a time."""
    return torch.cat(list(in_chunks(lambda a, b: run(items[a:b]), len(items), size, what=what)))


def run_in_chunks(
    run: Callable[[int, int], Tensors],
    total: int,
    bytes_each: int,
    device: torch.device,
    *,
    what: str = "chunk",
    share: float = 1.0,
    dim: int = 0,
) -> Tensors:
    """`run(start, stop)` over `total` items, as many at a time as fit; all results as one."""
    size = fit(total, bytes_each, device, share=share)
    return joined(list(in_chunks(run, total, size, what=what)), dim)


def shared_run(model: ImageModel, images: Tensor, what: Hashable, make: Callable[[], T]) -> T:
    """`make()`, which depends on the model, these images and `what` only. Of the images that
    `model.memo["shared images"]` names it is made once, for all methods and metrics, until the
    model or the images change."""
    known = model.memo.get("shared images", {})
    if known.get("images") is not images:
        return make()
    key = (what, model.state_key(), images._version)
    if key not in known:
        known[key] = make()
    return known[key]


@torch.no_grad()
def plain_logits(model: ImageModel, images: Tensor, *, what: str = "batch") -> Tensor:
    """Logits [B, C] of plain runs, as many images at a time as fit."""
    each = model.forward_bytes(model.check(images))
    size = fit(len(images), each, images.device)
    return shared_run(model, images, "logits", lambda: batched(model, images, size, what=what))


def machine(device: torch.device | str) -> str:
    """The name of a GPU, or the kind of processor."""
    where = torch.device(device)
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return f"{platform.machine()} CPU"


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """What is launched inside the block waits for what was launched before this call, and not for
    what is launched in between: a copy to the CPU waits for nothing else."""
    if device.type != "cuda":
        return nullcontext()
    stream = _side_stream(device)
    stream.wait_event(torch.cuda.current_stream(device).record_event())
    return torch.cuda.stream(stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
