"""The experiments on a real ViT-Ti and photos, and the leaderboard, on one GPU in nine minutes.

    python benchmarks/experiments.py pack REAL carry/real         # what is needed of REAL, 39 MB
    PYTHONPATH=src python benchmarks/experiments.py run carry/real OUT --seconds 480
    PYTHONPATH=src python benchmarks/experiments.py run carry/real OUT --device cpu --limit 2
    PYTHONPATH=src python benchmarks/experiments.py quick - OUT    # every --quick, and its seconds
    python benchmarks/experiments.py show OUT docs/results         # tables in Markdown; copies CSVs

REAL holds vit_tiny_patch16_224.safetensors, pets/, pets_small/ and imagenet/. Three processes run a
list of experiments each, one after the other, within a budget of GPU memory. After `--seconds` the
one that runs writes the table of its finished cells, and the rest is left out. The same call with
the same OUT continues; OUT/tables/PART/EXPERIMENT has the tables, and OUT/PART.log what each took.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEMORY = 12 * 2**30  # bytes of activations of a process
WEIGHTS = "vit_tiny_patch16_224.safetensors"
PHOTOS = 120  # of ImageNet
TABLES = ("table.csv", "table.md", "rows.csv", "experiment.json", "figure-*.svg")
Entry = tuple[str, int | None, dict[str, str], dict[str, Any]]  # name, images, data, options
PETS, IMAGENET = "pets:{}/pets:test", "imagenet:{}/imagenet"
CIGMA = {"as_printed": True, "options": {"top": 4}}  # a tenth of the heads, as 16 of ViT-B's 144
LISTS: dict[str, Sequence[Entry]] = {
    "caap": [
        ("caap/table-1", 100, {"imagenet-s": PETS}, {}),
        ("caap/table-2", 100, {"imagenet-s": PETS}, {}),
        ("ours/mosaic", 100, {"pets": PETS, "imagenet": IMAGENET}, {}),
        ("caap/table-10", 100, {"imagenet-s": PETS}, {}),
        ("caap/table-11", 100, {"imagenet-s": PETS}, {}),
        ("caap/table-12", 100, {"imagenet-s": PETS}, {}),
    ],
    "leaderboard": [
        ("critters/leaderboard", 128, {}, {}),
        ("ours/words", 32, {}, {}),
        ("caap/figure-7", 100, {"imagenet-s": PETS}, {}),
    ],
    "cigma": [
        ("cigma/table-3", None, {"pets": PETS}, CIGMA),
        ("cigma/defaults", None, {"pets": PETS}, {}),
        ("cigma/table-4", None, {"pets": PETS}, CIGMA),
        ("ifam/pets", None, {"folder": "folder:{}/painted/test"}, {}),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The experiments on a real ViT-Ti and photos.")
    parser.add_argument("action", choices=("pack", "run", "quick", "show", *LISTS))
    parser.add_argument("real", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=int, default=480)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", help="these experiments, with commas between them")
    parser.add_argument("--limit", type=int, help="to try it: so few images, cheap settings")
    asked = parser.parse_args()
    if asked.action == "pack":
        pack(asked.real, asked.out)
    elif asked.action == "show":
        show(asked.real, asked.out)
    elif asked.action == "quick":
        run_quick(asked.out)
    elif asked.action == "run":
        run_all(asked)
    else:
        run_list(asked, LISTS[asked.action])


def pack(real: Path, out: Path) -> None:
    """Copy the weights, both sets of pets, and every so many-th photo of ImageNet."""
    out.mkdir(parents=True)
    shutil.copy(real / WEIGHTS, out)
    for name in ("pets", "pets_small"):
        shutil.copytree(real / name, out / name)
    photos = sorted((real / "imagenet" / "val").glob("*/*"))
    for photo in photos[:: max(1, len(photos) // PHOTOS)]:
        place = out / photo.relative_to(real)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photo, place)


def run_all(asked: argparse.Namespace) -> None:
    """Each list in a process of its own; on a CPU one after the other."""
    asked.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "4", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    running = list[subprocess.Popen[bytes]]()
    for name in LISTS:
        words = [sys.executable, __file__, name, str(asked.real), str(asked.out)]
        words += ["--seconds", str(asked.seconds), "--device", asked.device]
        words += ["--limit", str(asked.limit)] if asked.limit else []
        words += ["--only", asked.only] if asked.only else []
        with (asked.out / f"{name}.log").open("ab") as log:
            running.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT))
        if asked.device == "cpu":
            running[-1].wait()
    ends = time.monotonic() + asked.seconds + 30
    for name, process in zip(LISTS, running, strict=True):
        try:
            code = process.wait(max(1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        print(f"{name}: exit code {code}", (asked.out / f"{name}.log").read_text(), sep="\n")


def run_list(asked: argparse.Namespace, entries: Sequence[Entry]) -> None:
    """Run experiments until the time is over."""
    began = time.monotonic()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(asked.seconds)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import seecause as sc
    from seecause.engine.chunks import budget

    cells = asked.out / "cells" / asked.action
    for name, limit, data, more in entries:
        if asked.only and name not in asked.only.split(","):
            continue
        given = {key: spec.format(asked.real) for key, spec in data.items()}
        if data:
            more = more | {"models": ["vit-ti"], "weights": {"vit-ti": f"{asked.real / WEIGHTS}"}}
        if asked.limit:  # cheap settings too
            tried = sc.experiments.experiments()[name].quick
            tried = {key: tried[key] for key in tried.keys() - {"models", "data", "limit"}}
            more = more | {"options": {**tried, **more.get("options", {})}}
        about = f"of {asked.limit or limit or 'all'} images"
        try:
            if name == "ifam/pets":
                paint(asked.real)
            with budget(MEMORY if asked.device == "cuda" else None):
                status = sc.experiments.run(
                    name, cells, data=given, limit=asked.limit or limit, device=asked.device, **more
                )
            print(name, about, f"{status.done} of {status.total} cells", *status.failed.values())
        except KeyboardInterrupt:
            print(name, about, "stopped: the time is over")
            return
        except Exception as failure:  # the others go on
            print(name, about, repr(failure))
        finally:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"{time.monotonic() - began:.0f} s since the start, {memory:.1f} GiB", flush=True)
            home = asked.out / "tables" / asked.action / name.replace("/", "-")
            home.mkdir(parents=True, exist_ok=True)
            for pattern in TABLES:
                for file in (cells / name).glob(pattern):
                    shutil.copy(file, home)


def run_quick(out: Path) -> None:
    """Every experiment with --quick in this process, on generated images, the slowest first."""
    import seecause as sc

    spent = []
    for name in sc.experiments.experiments():
        wall, busy = time.perf_counter(), time.process_time()
        status = sc.experiments.run(name, out, quick=True)
        assert status.complete, status.failed
        spent.append((time.process_time() - busy, time.perf_counter() - wall, name))
    for busy, wall, name in sorted(spent, reverse=True):
        print(f"{busy:7.1f} s of a core, {wall:7.1f} s  {name}")
    busy, wall, _ = zip(*spent, strict=True)
    print(f"{sum(busy):7.1f} s of a core, {sum(wall):7.1f} s  all {len(spent)}")


def show(results: Path, docs: Path) -> None:
    """Each table of a run as Markdown: means and errors, and in brackets the paired difference to
    the line that others are compared with. Its CSV goes into `docs`."""
    for file in sorted(results.glob("tables/*/*/table.csv")):
        with file.open(encoding="utf-8", newline="") as opened:
            cells = list(csv.DictReader(opened))
        shutil.copy(file, docs / f"{file.parent.name}.csv")
        metrics = list(dict.fromkeys(cell["metric"] for cell in cells))
        print(f"\n{file.parent.name}\n\n| | {' | '.join(metrics)} |\n|---{'|---' * len(metrics)}|")
        lines = dict[str, dict[str, str]]()
        for cell in cells:
            text = _number(cell, "mean", "standard error")
            against = next((name for name in cell if name.startswith("difference")), "")
            change = _number(cell, against, "error of difference")
            text += f" ({change})" if change and "nan" not in change else ""
            lines.setdefault(cell["method"], {})[cell["metric"]] = text
        for line, texts in lines.items():
            print(f"| {line} | {' | '.join(texts.get(metric, '') for metric in metrics)} |")


def _number(cell: dict[str, str], mean: str, error: str) -> str:
    """A mean and its error with three significant digits; empty where there is none."""
    if not cell.get(mean):
        return ""
    value = f"{float(cell[mean]):.3g}"
    return f"{value} ± {float(cell[error]):.2g}" if cell.get(error) else value


def paint(real: Path) -> None:
    """Cats and dogs on painted backgrounds, once."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tools.painted_pets import SPLITS, painted_split, write_folder

    for split in SPLITS:
        if not (place := real / "painted" / split).is_dir():
            write_folder(painted_split(real / "pets_small", split), place)


if __name__ == "__main__":
    main()
