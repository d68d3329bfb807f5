"""Side-by-side timing: contenders interleaved, warmed up, medians; launch-bound runs are named.
With one thread on a CPU processor seconds are measured, else seconds of the clock."""

from __future__ import annotations

import ctypes
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seecause.engine.chunks import machine
from seecause.models.block import At, Block

WARM_UPS, REPEATS = 3, 10


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call, the relative spread (max - min) / median, peak memory, whether
    launching was the limit, and how many calls."""

    seconds: float
    spread: float
    peak_bytes: int
    launch_bound: bool
    runs: int

    @property
    def about(self) -> list[str]:
        """GiB and spread, as tables have them."""
        return [f"{self.peak_bytes / 2**30:.2f}", f"{self.spread:.0%}"]


def race(
    contenders: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    warm_ups: int = WARM_UPS,
    repeats: int = REPEATS,
    patience: float = float("inf"),
) -> dict[str, Timing]:
    """Time every contender `repeats` times, one after the other in turn; fewer times those that
    would take longer than `patience` seconds.

    A call that outlasts `patience` by itself is its own warm-up: it is timed once.
    """
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    queued: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, int] = {}
    rounds: dict[str, int] = {}
    for name, run in contenders.items():
        for _ in range(warm_ups):
            seconds, launching, peaks[name] = _measured(run, device)
            if seconds > patience:
                taken[name].append(seconds)
                queued[name].append(launching)
                break
        rounds[name] = (
            0
            if taken[name]
            else max(
                1, min(repeats, int(patience / seconds)) if patience < float("inf") else repeats
            )
        )
    for turn in range(repeats):
        for name, run in contenders.items():
            if turn < rounds[name]:
                seconds, launching = _once(run, device)
                taken[name].append(seconds)
                queued[name].append(launching)
    return {name: _summary(taken[name], queued[name], peaks[name], device) for name in contenders}


def fastest(
    make: Callable[[int], Callable[[], object]], sizes: list[int], device: torch.device
) -> int:
    """The size whose second call is the fastest: a library gets the batch that suits it best."""

    def second(size: int) -> float:
        run = make(size)
        run()
        return _once(run, device)[0]

    return min(sizes, key=second) if len(sizes) > 1 else sizes[0]


def _once(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    if device.type != "cuda":
        # one thread's own time: other work on the machine moves it little
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        run()
        return clock() - start, 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    begin.record()
    run()
    end.record()
    launching = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3, launching


def _measured(run: Callable[[], object], device: torch.device) -> tuple[float, float, int]:
    """One call with its peak memory: on a GPU all that torch held, on a CPU what the process grew
    by (Linux; 0 elsewhere)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds, launching = _once(run, device)
        return seconds, launching, torch.cuda.max_memory_allocated(device)
    before = _forget_peak()
    seconds, launching = _once(run, device)
    return seconds, launching, max(0, _status("VmHWM") - before)


def _forget_peak() -> int:
    """Give freed memory back, start the high-water mark anew, and say what is held now."""
    if platform.system() != "Linux":
        return 0
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _status(field: str) -> int:
    """A size of this process in bytes."""
    file = Path("/proc/self/status")
    lines = file.read_text(encoding="ascii").splitlines() if file.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)


def _summary(taken: list[float], queued: list[float], peak: int, device: torch.device) -> Timing:
    middle = statistics.median(taken)
    bound = device.type == "cuda" and statistics.median(queued) > 0.9 * middle
    return Timing(middle, (max(taken) - min(taken)) / middle, peak, bound, len(taken))


def clock(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What `run` returns, and the seconds it took, the GPU's work included."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    made = run()
    if cuda:
        torch.cuda.synchronize(device)
    return made, time.perf_counter() - start


def title(device: torch.device, *more: str) -> None:
    """Print what the figures were measured on, and how."""
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    on = f"{machine(device)}{threads}; torch {torch.__version__}"
    print(f"# {'; '.join([on, *more])}\n")


def heading(*names: str) -> None:
    """Print the head of a table."""
    row(*names)
    print("|" + "---|" * len(names))


def row(*cells: object) -> None:
    """Print a row of a table, at once."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def usual_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(eq=False)
class CompiledBlock(Block):
    """The same block with both halves compiled; attention itself stays the fused kernel it was."""

    def qkv(self, h: Tensor, at: At) -> tuple[Tensor, Tensor, Tensor]:
        return _compiled(Block.qkv)(self, h, at)

    def finish(self, h: Tensor, o: Tensor, gate: Tensor | None = None) -> Tensor:
        return _compiled(Block.finish)(self, h, o, gate)


@cache
def _compiled(half: Callable[..., Any]) -> Callable[..., Any]:
    """One graph serves all blocks of a model that are built alike; the second shape makes it
    general."""
    return torch.compile(half)
