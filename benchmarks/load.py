"""Does a benchmark of 50,000 pictures stay quick to plan, to ask about and to read, in flat memory?

    python benchmarks/load.py --folder LOAD --figure docs/load.png

Draws critters of 32 pixels (one in 500 is cut off: holes are part of a large run) and a model of
one block, then plans, runs, asks for the status and reports as a user would, each in a process of
its own. Prints seconds of a processor and peak memory of each, the size of what was written, and
draws the memory of the run. Stopped and given again, it goes on; the memory of all parts is drawn.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from seecause.critters import samples
from seecause.critters.latents import CLASSES

SIZE, BROKEN, EVERY = 32, 500, 2.0  # pixels; one picture in so many; seconds between two looks
METHODS = "gae,rollout,sobel,random"
OPTIONS = ("--metric", "insertion,deletion,ins-del", "--metric-option", "order=patch")
OPTIONS += ("--metric-option", "steps=4", "--device", "cpu", "--quiet")
PLANNING = """
import sys
from seecause import bench
request = bench.Request(
    sys.argv[1], sys.argv[2], methods={name: {} for name in sys.argv[3].split(",")},
    metrics=("insertion", "deletion", "ins-del"),
)
assert bench.prepare(request).plan.shards
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("out/load"))
    parser.add_argument("--pictures", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--figure", type=Path, help="where to draw the memory of the run")
    chosen = parser.parse_args()
    model, data, run = (chosen.folder / name for name in ("model", "pictures", "run"))
    draw_pictures(data, chosen.pictures)
    write_model(model)
    command = [sys.executable, "-m", "seecause", "bench"]
    tell("plan", *watch([sys.executable, "-c", PLANNING, str(model), f"folder:{data}", METHODS]))
    words = ["run", "--model", str(model), "--data", f"folder:{data}", "--method", METHODS]
    words += [*OPTIONS, "--workers", str(chosen.workers), "--out", str(run)]
    memory = chosen.folder / "memory.csv"
    tell("run", *watch([*command, *words], log=memory, done=run / "shards"))
    tell("status", *watch([*command, "status", str(run)]))
    tell("report", *watch([*command, "report", str(run)]))
    for name in ("index.html", "table.csv", "holes.csv"):
        if (run / name).is_file():
            print(f"{name}: {(run / name).stat().st_size / 1e6:.2f} MB")
    if chosen.figure:
        draw_memory(memory, chosen.figure)


def draw_pictures(folder: Path, count: int) -> None:
    """`count` pictures by class, each in a file; those that are there stay."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    there = sum(1 for _ in folder.rglob("*.png"))
    rest = samples("clean", "test", count - there, start=there, size=SIZE) if there < count else ()
    for number, sample in enumerate(rest, start=there):
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
) -> tuple[float, float, int]:
    """Seconds of a processor, peak MiB (of the process and its workers together) and exit code of
    a command. The `log` gets a line of memory and finished shards at every look."""
    began, peak, spent = time.monotonic(), 0.0, os.times()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = psutil.Popen(words, stdout=subprocess.DEVNULL, env=environment)
    while process.poll() is None:
        rest = EVERY if log and time.monotonic() - began > 30 else 0.05
        held = resident(process)
        peak = max(peak, held)
        if log and held:
            shards = sum(1 for _ in done.glob("*.json")) if done and done.is_dir() else 0
            with log.open("a") as file:
                file.write(f"{time.time():.1f},{shards},{held:.1f}\n")
        time.sleep(rest)
    now = os.times()
    seconds = now.children_user + now.children_system - spent.children_user - spent.children_system
    return seconds, peak, process.returncode


def resident(process: psutil.Process) -> float:
    """MiB of a process and its children."""
    total = 0
    try:
        for each in (process, *process.children(recursive=True)):
            total += each.memory_info().rss
    except psutil.NoSuchProcess:
        return 0.0
    return total / 2**20


def tell(what: str, seconds: float, peak: float, code: int) -> None:
    text = f"{what}: {seconds:.1f} s of a processor, {peak:.0f} MiB at most, exit code {code}"
    print(text, flush=True)


def draw_memory(log: Path, figure: Path) -> None:
    """Memory of the run against pictures x methods that are done."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with log.open(newline="") as file:
        rows = [(int(shards), float(held)) for _, shards, held in csv.reader(file)]
    most = max(shards for shards, _ in rows)
    axes = pyplot.figure(figsize=(6, 2.4), layout="constrained").gca()
    axes.plot([shards * 16 / 1000 for shards, _ in rows], [held for _, held in rows], lw=1)
    axes.set(xlabel="thousand maps done", ylabel="MiB", ylim=(0, None), xlim=(0, most * 16 / 1000))
    axes.set_title("memory of a `bench run` of 50,000 pictures by several methods", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    pyplot.savefig(figure, dpi=110)
    late = [held for shards, held in rows if shards > most / 2]
    early = [held for shards, held in rows if most / 10 < shards <= most / 2]
    print(f"run: {np.median(early):.0f} MiB in the first half, {np.median(late):.0f} in the second")


if __name__ == "__main__":
    main()
