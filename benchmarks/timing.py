"""Side-by-side timing: contenders interleaved, warmed up, medians; launch-bound runs are named."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

WARM_UPS, REPEATS = 3, 10


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call, the relative spread (max - min) / median, peak memory, and whether launching was the limit."""

    seconds: float
    spread: float
    peak_bytes: int
    launch_bound: bool


def race(contenders: Mapping[str, Callable[[], object]], device: torch.device, *, warm_ups: int = WARM_UPS, repeats: int = REPEATS) -> dict[str, Timing]:
    """Time every contender `repeats` times, one after the other in turn."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    queued: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, int] = {}
    for name, run in contenders.items():
        for _ in range(warm_ups):
            run()
        peaks[name] = _peak(run, device)
    for _ in range(repeats):
        for name, run in contenders.items():
            seconds, launching = _once(run, device)
            taken[name].append(seconds)
            queued[name].append(launching)
    return {name: _summary(taken[name], queued[name], peaks[name], device) for name in contenders}


def _once(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start, 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    begin.record()
    run()
    end.record()
    launching = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3, launching


def _peak(run: Callable[[], object], device: torch.device) -> int:
    if device.type != "cuda":
        run()
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _summary(taken: list[float], queued: list[float], peak: int, device: torch.device) -> Timing:
    middle = statistics.median(taken)
    return Timing(middle, (max(taken) - min(taken)) / middle, peak, device.type == "cuda" and statistics.median(queued) > 0.9 * middle)


def machine(device: torch.device) -> str:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}"
