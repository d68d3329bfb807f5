"""What a user runs against the arithmetic in it: seconds of whole commands over many images.

    python benchmarks/commands.py FOLDER --images 60 --workers 0,2 --weights my.safetensors \\
        --model timm:vit_tiny_patch16_224 --input mean=0.5,0.5,0.5 --input std=0.5,0.5,0.5

Three things are timed, on the clock and in processor seconds with those of worker processes:

    command     `seecause explain FOLDER` in a process of its own, from start to end
    maps        the forwards and maps that it contains, of images that are in memory, in its batches
    plain loop  a DataLoader that decodes and prepares the images, and one forward of each

Start-up is the command on one image, less its maps.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from seecause.attribution.attribute import (
    attribute_batch,
    batch_size,
    default_methods,
    image_batches,
)
from seecause.cli.shared import Reading
from seecause.data.dataset import find_images
from seecause.engine.chunks import machine
from seecause.models.base import ImageModel


@dataclass
class Cost:
    """Seconds of the clock and of processors."""

    clock: float = 0.0
    processor: float = 0.0

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.clock - other.clock, self.processor - other.processor)

    def over(self, other: Cost) -> str:
        clock, processor = self.clock / other.clock, self.processor / other.processor
        return f"{clock:.2f}, {processor:.2f}"

    def __str__(self) -> str:
        return f"{self.clock:.2f}, {self.processor:.2f}"


def _processor() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def timed() -> Iterator[Cost]:
    """The cost of what the block does and of the processes that it waits for."""
    cost, clock, processor = Cost(), time.perf_counter(), _processor()
    yield cost
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    cost.clock, cost.processor = time.perf_counter() - clock, _processor() - processor


def maps(model: ImageModel, files: list[str]) -> Cost:
    """Maps of all images by the usual methods, after one batch that warms up."""
    methods = default_methods(model)
    read = image_batches(model, files, batch=batch_size(model), skipped=[])
    batches = [part.images.to(model.device, model.dtype) for part in read]

    def explain(images: torch.Tensor) -> None:
        for method in methods:
            attribute_batch(model, images, None, method, {})

    for size in {len(images): images for images in batches}.values():
        explain(size)
    with timed() as cost:
        for images in batches:
            explain(images)
    return cost


class Files(torch.utils.data.Dataset):
    """Images as anybody would read them."""

    def __init__(self, files: list[str], prepare: Callable[[str], torch.Tensor]):
        self.files, self.prepare = files, prepare

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.prepare(self.files[place])


def plain_loop(model: ImageModel, files: list[str], workers: int) -> Cost:
    """One forward of each image, decoded by the workers of a DataLoader."""
    data = Files(files, model.preprocess.transform)
    loader = DataLoader(data, batch_size=batch_size(model), num_workers=workers)
    with timed() as cost, torch.no_grad():
        for images in loader:
            model(images.to(model.device, model.dtype)).argmax(dim=1).cpu()
    return cost


def command(words: list[str], folder: Path, workers: int) -> Cost:
    """`seecause explain FOLDER` in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        tail = ["--workers", str(workers), "--out", f"{out}/explained", "--quiet"]
        with timed() as cost:
            subprocess.run(
                [sys.executable, "-m", "seecause", "explain", str(folder), *words, *tail],
                check=True,
            )
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--model", default="builtin:critters-vit")
    parser.add_argument("--weights")
    parser.add_argument("--input", action="append")
    asked = parser.parse_args()
    words = ["--model", asked.model, *(["--weights", asked.weights] if asked.weights else [])]
    words += [word for text in asked.input or () for word in ("--input", text)]
    model = Reading(weights=asked.weights, input=asked.input).load(asked.model)
    files = find_images([asked.folder])[: asked.images]
    print(f"{len(files)} images, {machine(model.device)}, {os.cpu_count()} cores,", end=" ")
    print(f"{torch.get_num_threads()} threads; seconds of the clock, of processors\n")
    titles = ("workers", "command", "start-up", "maps", "plain loop", "command / maps")
    print("|", " | ".join((*titles, "without start-up / maps")), "|\n|" + "---|" * 7)
    with tempfile.TemporaryDirectory() as place:
        for name, chosen in (("all", files), ("one", files[:1])):
            for number, file in enumerate(chosen):
                target = Path(place, name, f"{number:05d}{Path(file).suffix}")
                target.parent.mkdir(exist_ok=True)
                shutil.copy(file, target)
        every, alone = maps(model, files), maps(model, files[:1])
        for workers in map(int, asked.workers.split(",")):
            loop = plain_loop(model, files, workers)
            start = command(words, Path(place, "one"), 0) - alone
            whole = command(words, Path(place, "all"), workers)
            cells = (workers, whole, start, every, loop, whole.over(every))
            print("|", *map("{} |".format, (*cells, (whole - start).over(every))), flush=True)


if __name__ == "__main__":
    main()
