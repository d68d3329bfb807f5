"""Does a benchmark of 50,000 pictures stay quick to plan and to read, in flat memory?

    python benchmarks/load.py --folder LOAD --figure docs/load.png

Draws critters of 32 pixels (one in 500 is cut off: holes are part of a large run) and a model of
one block, then plans, runs and reports as a user would, each in a process of its own. Prints
seconds of a processor and on the clock, the peak memory of each, and the size of what was written,
and draws the memory of the run and of its largest worker. Stopped and given again, it continues;
the memory of all parts is drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from seecause.critters.rendering import samples
from seecause.critters.world import CLASSES

SIZE, BROKEN, EVERY = 32, 500, 1.0  # pixels; one picture in so many; seconds between two looks
PART, CELL = 1000, 16  # images that a process draws at a time; images of a cell
METHODS = "gae,rollout,sobel,random"
OPTIONS = ("--metric", "insertion,deletion,ins-del", "--option", "insertion-deletion.order=patch")
OPTIONS += ("--option", "insertion-deletion.steps=4", "--device", "cpu", "--quiet")
PLANNING = """
import sys
from seecause import bench
request = bench.Request(
    sys.argv[1], sys.argv[2], methods={name: {} for name in sys.argv[3].split(",")},
    metrics=("insertion", "deletion", "ins-del"),
)
assert bench.prepare(request).plan.cells
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("out/load"))
    parser.add_argument("--pictures", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--figure", type=Path, help="where to draw the memory of the run")
    chosen = parser.parse_args()
    model, data, run = (chosen.folder / name for name in ("model", "pictures", "run"))
    draw_pictures(data, chosen.pictures, chosen.workers)
    write_model(model)
    command = [sys.executable, "-m", "seecause", "bench"]
    tell("plan", *watch([sys.executable, "-c", PLANNING, str(model), f"folder:{data}", METHODS]))
    words = ["run", "--model", str(model), "--data", f"folder:{data}", "--method", METHODS]
    words += [*OPTIONS, "--workers", str(chosen.workers), "--out", str(run)]
    memory = chosen.folder / "memory.csv"
    tell("run", *watch([*command, *words], log=memory, done=run / "cells"))
    tell("report", *watch([*command, "report", str(run)]))
    for name in ("index.html", "table.csv", "rows.csv"):
        if (run / name).is_file():
            content = (run / name).read_bytes()
            lines = len(content.splitlines())
            print(f"{name}: {len(content) / 1e6:.2f} MB, {lines} lines")
    if chosen.figure:
        draw_memory(memory, chosen.figure, chosen.pictures)


def draw_pictures(folder: Path, count: int, workers: int) -> None:
    """`count` pictures by class, each in a file, unless they are there."""
    if sum(1 for _ in folder.rglob("*.png")) >= count:
        return
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    parts = [(folder, start, min(start + PART, count)) for start in range(0, count, PART)]
    with get_context("spawn").Pool(workers) as pool:
        pool.starmap(draw_part, parts, chunksize=1)


def draw_part(folder: Path, start: int, stop: int) -> None:
    torch.set_num_threads(1)
    drawn = samples("clean", "test", stop - start, start=start, size=SIZE)
    for number, sample in enumerate(drawn, start=start):
        pixels = (sample.image.permute(1, 2, 0) * 255).round().byte().numpy()
        path = folder / CLASSES[sample.label] / f"{number:06d}.png"
        Image.fromarray(np.ascontiguousarray(pixels)).save(path)
        if number % BROKEN == BROKEN // 2:
            path.write_bytes(path.read_bytes()[:100])


def write_model(folder: Path) -> None:
    """One block, 16 patches: the time of a run is the time of everything else."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = {"img_size": SIZE, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    arguments |= {"num_classes": len(CLASSES)}
    torch.manual_seed(0)
    module = VisionTransformer(**arguments)
    save_file(module.state_dict(), folder / "small.safetensors")
    card = {
        "architecture": {"class": "VisionTransformer", "arguments": arguments},
        "classes": list(CLASSES),
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    (folder / "small.json").write_text(json.dumps(card))


def watch(
    words: list[str], *, log: Path | None = None, done: Path | None = None
) -> tuple[float, float, float, int]:
    """Seconds of a processor and on the clock, peak MiB (of the process and its workers together)
    and exit code of a command. The `log` gets a line at every look: the time, finished cells, MiB
    of all and MiB of the largest process."""
    began, peak, spent = time.monotonic(), 0.0, os.times()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = psutil.Popen(words, stdout=subprocess.DEVNULL, env=environment)
    while process.poll() is None:
        held = resident(process)
        peak = max(peak, sum(held))
        if log and done and held:
            cells = sum(1 for _ in done.glob("*.parquet"))
            with log.open("a") as file:
                file.write(f"{time.time():.1f},{cells},{sum(held):.1f},{max(held):.1f}\n")
        time.sleep(EVERY if log else 0.05)
    now = os.times()
    seconds = now.children_user + now.children_system - spent.children_user - spent.children_system
    return seconds, time.monotonic() - began, peak, process.returncode


def resident(process: psutil.Process) -> list[float]:
    """MiB of a process and of each of its children."""
    try:
        each = (process, *process.children(recursive=True))
        return [one.memory_info().rss / 2**20 for one in each]
    except psutil.NoSuchProcess:
        return []


def tell(what: str, seconds: float, clock: float, peak: float, code: int) -> None:
    text = f"{what}: {seconds:.1f} s of a processor, {clock:.1f} s on the clock, {peak:.0f} MiB"
    print(f"{text} at most, exit code {code}", flush=True)


def draw_memory(log: Path, figure: Path, pictures: int) -> None:
    """Memory of the run against pictures x methods that are done."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = np.loadtxt(log, delimiter=",", ndmin=2)  # [looks, 4]
    maps, total, largest = rows[:, 1] * CELL / 1000, rows[:, 2], rows[:, 3]
    axes = pyplot.figure(figsize=(6, 2.6), layout="constrained").gca()
    axes.plot(maps, total, lw=1, label="all processes")
    if (total > largest + 1).any():
        axes.plot(maps, largest, lw=1, label="the largest of them")
        axes.legend(frameon=False, fontsize=8)
    axes.set(xlabel="thousand maps done", ylabel="MiB", ylim=(0, None), xlim=(0, maps.max()))
    what = f"{pictures:,} pictures by {len(METHODS.split(','))} methods"
    axes.set_title(f"memory of a `bench run` of {what}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    pyplot.savefig(figure, dpi=110)
    for name, held in (("all processes", total), ("the largest of them", largest)):
        parts = np.array_split(held[maps > 0], 10)
        print(f"{name}, MiB by tenths of the run:", *(f"{np.median(part):.0f}" for part in parts))


if __name__ == "__main__":
    main()
