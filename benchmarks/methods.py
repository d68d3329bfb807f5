"""What does each method cost, in plain forward passes, and what do other libraries take for the
same work?

    python benchmarks/methods.py --device cuda                                 # ViT-B/16, bf16,
    batches 1, 8 and 128
    PYTHONPATH=carry/site python benchmarks/methods.py --device cuda           # with captum from a
    folder, where it is not installed
    python benchmarks/methods.py --device cpu                                  # float32, batches 1
    and 4
    python benchmarks/methods.py --device cpu --quick                          # batch 1, three
    runs, nothing over 100 forwards
    OMP_NUM_THREADS=1 python benchmarks/methods.py --device cpu --peers --name vit_small_patch16_224
    --batches 1 --patience 4                                                   # what others do, too

Prints images/s, ratio to a plain forward, peak memory and how many calls the median is of. Then:
how near do insertion and deletion come to the throughput of plain forwards, and how long does
Quantus take for the same curves? Weights are random, images are noise: the arithmetic is the same.
All in one dtype, with the same kernels. What repeats without a gradient is captured in CUDA graphs,
the plain forward too. A method whose call was long at a small batch is not repeated at a larger
one: its own forwards fill the machine already; a plain forward and CAAP, which the others are
compared with, always run. Where the column says so, only a part of the steps, samples or masks was
timed, and scaled.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cyclopts
import timm
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers import Entry, captum, grad_cam, quantus_regions
from benchmarks.timing import Timing, heading, race, row, short, title, usual_dtype
from seecause.attribution.registry import find, methods
from seecause.engine import graphs
from seecause.engine.chunks import budget, fit
from seecause.loading import load, wrap
from seecause.metrics.faithfulness import insertion_deletion, perturbation
from seecause.models.view import VisionModel
from seecause.target import parse

BUDGET = {"cuda": 16 << 30, "cpu": None}  # bytes of activations; None: the library's own
PERTURBATION = (
    "rise",
    "vit-cx",
    "tis",
    "mutex",
    "mda",
    "atman",
    "simple-insertion",
    "simple-deletion",
)
HEAVY = {
    "rise",
    "vit-cx",
    "tis",
    "mda",
    "atman",
    "simple-insertion",
    "simple-deletion",
    "simple-deletion (one patch)",
    "captum FeatureAblation",
}  # > 100 forwards
PARTS: dict[str, dict[str, int]] = {
    "rise": {"masks": 40},
    "tis": {"masks": 64},
    "integrated-gradients": {"steps": 5},
    "smoothgrad": {"samples": 5},
}  # on a CPU
LEFT_OUT = ("mda",)  # on a CPU: 5600 forwards, of which no part can be timed
ALWAYS = {"plain forward", "caap"}  # what the others are divided by
STEPS = 50  # of integrated gradients, samples of SmoothGrad
COMPARED = ALWAYS | {"mosaic", "caap+mosaic", "grad-cam", "integrated-gradients", "smoothgrad"}
COMPARED |= {"simple-deletion (one patch)"}  # with --peers, beside the peers


def main(
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    quick: bool = False,
    name: str = "vit_base_patch16_224",
    batches: str = "",
    patience: float = 0.0,
    peers: bool = False,
) -> None:
    """Measure and print one table of methods per batch, then the curves."""
    where = torch.device(device)
    dtype = usual_dtype(where)
    usual = "1" if quick else "1,8,128" if where.type == "cuda" else "1,4"
    sizes = [int(batch) for batch in (batches or usual).split(",")]
    rules: dict[str, Any] = {"warm_ups": 1, "repeats": 3} if quick else {}
    rules["patience"] = patience or (2.0 if where.type == "cuda" else 10.0)
    torch.manual_seed(0)
    module = timm.create_model(name, num_classes=1000).to(where, dtype).eval()
    model = wrap(module, name=name)
    # what pytorch-grad-cam's hooks differentiate, and no more
    module.blocks[-1].norm1.requires_grad_()
    title(where, short(dtype), name, "contenders interleaved")
    with budget(BUDGET[where.type]):
        seconds: dict[str, float] = {}  # for one image, at the last batch
        for batch in sizes:
            images = torch.rand(batch, 3, 224, 224, device=where, dtype=dtype) * 2 - 1
            long = {
                name
                for name, each in seconds.items()
                if batch > 1 and batch * each > rules["patience"] / 2
            }
            skip = long | (HEAVY if quick else set())
            skip |= set(methods()) - COMPARED if peers else set()
            entries = contenders(model, images, skip=skip)
            timings = race({name: entry.run for name, entry in entries.items()}, where, **rules)
            seconds |= {name: timing.seconds / batch for name, timing in timings.items()}
            print(f"## Batch {batch}\n")
            report(entries, timings, batch)
        if peers and where.type == "cuda":  # nobody else draws curves there
            return
        count = 32 if where.type == "cuda" else 1 if quick else 2
        images = torch.rand(count, 3, 224, 224, device=where, dtype=dtype) * 2 - 1
        curves(model, images, rules, sizes=[len(images)])
        if where.type == "cpu":
            curves(load("builtin:critters-vit"), torch.randn(8, 3, 96, 96), rules, sizes=[1, 4, 8])  # type: ignore[arg-type]


def contenders(model: VisionModel, images: Tensor, *, skip: set[str]) -> dict[str, Entry]:
    """A plain forward, every method, and what other libraries have of them."""
    cuda, classes = images.is_cuda, torch.zeros(len(images), dtype=torch.long, device=images.device)

    def ours(name: str, **options: Any) -> Entry:
        method, target = find(name), parse(model, classes, len(images))
        part = {} if cuda else PARTS.get(name, {})
        whole = math.prod(method.options[key] / value for key, value in part.items())
        return Entry(lambda: method.run(model, images, target, **part, **options), whole)

    @torch.no_grad()
    def plain() -> Tensor:
        return graphs.captured(model, "plain forward", lambda: model.module, images)

    found: dict[str, Callable[[], Entry]] = {"plain forward": lambda: Entry(plain)}
    found |= {name: partial(ours, name) for name in methods() if cuda or name not in LEFT_OUT}
    found["simple-deletion (one patch)"] = partial(ours, "simple-deletion", select="none")
    copies = STEPS if cuda else PARTS["smoothgrad"]["samples"]
    found |= captum(
        model.module,
        images,
        classes,
        copies=copies,
        usual=STEPS,
        sizes=[64, 256, 1024] if cuda else [1, 4],
    )
    found |= grad_cam(model.module, images, classes)
    return {name: make() for name, make in found.items() if name not in skip - ALWAYS}


def report(entries: dict[str, Entry], timings: dict[str, Timing], batch: int) -> None:
    """One row for each contender, then the two ratios that were asked for."""
    each = {name: timing.seconds * entries[name].whole / batch for name, timing in timings.items()}
    plain = each["plain forward"]
    heading("contender", "images/s", "x plain forward", "peak GiB", "spread", "calls", "")
    for name, timing in timings.items():
        whole, like = entries[name].whole, entries[name].like
        notes = [
            f"{each[name] / each[like]:.2f} x the time of {like}" if like in each else "",
            f"1/{whole:.0f} timed" if whole > 1 else "",
            "launch-bound" if timing.launch_bound else "",
        ]
        ratio = f"{each[name] / plain:.2f}"
        about = "; ".join(note for note in notes if note)
        row(name, f"{1 / each[name]:,.3g}", ratio, *timing.about, timing.runs, about)
    slower = sorted((each[name] / each["caap"], name) for name in PERTURBATION if name in each)
    ratios = ", ".join(f"{ratio:.1f} x faster than {name}" for ratio, name in slower)
    print(f"\nCAAP against perturbation methods: {ratios or 'none ran'}.\n")


def curves(model: VisionModel, images: Tensor, rules: dict[str, Any], *, sizes: list[int]) -> None:
    """Insertion and deletion against as many plain forwards in equal batches; region perturbation
    against Quantus at the best of `sizes`."""
    where, batch, side = images.device, len(images), images.shape[-1]
    classes = torch.zeros(batch, dtype=torch.long, device=where)
    maps, regions = (
        torch.randn(batch, *model.check(images).grid, device=where),
        torch.randn(batch, 4, 4, device=where),
    )
    steps = math.ceil(side / 8)  # of RISE
    chunk = fit(batch * (steps + 1), model.forward_bytes(model.check(images)), where)

    def plain(count: int, together: int) -> Callable[[], object]:
        pictures = images.repeat(math.ceil(together / batch), 1, 1, 1)[:together]
        return torch.no_grad()(
            lambda: [
                model.module(pictures[: min(together, count - start)])
                for start in range(0, count, together)
            ]
        )

    both, sixteen = (
        batch * (2 * steps) + 1,
        batch * 33,
    )  # picture, blurred and constant are run once for each image, or once
    runs = {
        "plain forwards": plain(both, chunk),
        f"insertion + deletion, {steps} steps": lambda: insertion_deletion(
            model, images, maps, classes
        ),
        "plain forwards, 33 an image": plain(sixteen, chunk),
        "MoRF + LeRF, 16 regions": lambda: perturbation(model, images, regions, classes, steps=16),
    }
    theirs = quantus_regions(model.module, images, regions, classes, sizes=sizes)
    if theirs is not None:
        runs["Quantus RegionPerturbation, both orders"] = theirs
    found = race(runs, where, **rules)
    print(f"## Curves: {model.name}, {batch} images, at most {chunk} pictures in one forward\n")
    heading("contender", "pictures/s", "share of plain throughput", "peak GiB", "spread", "calls")
    for (name, timing), count in zip(
        found.items(), (both, both, sixteen, sixteen, sixteen), strict=False
    ):
        base = found["plain forwards" if count == both else "plain forwards, 33 an image"].seconds
        share = f"{base / timing.seconds:.0%}"
        row(name, f"{count / timing.seconds:,.1f}", share, *timing.about, timing.runs)
    if theirs is not None:
        ratio = (
            found["Quantus RegionPerturbation, both orders"].seconds
            / found["MoRF + LeRF, 16 regions"].seconds
        )
        print(f"\nQuantus takes {ratio:.2f} x our time for the same curves.")
    print()


if __name__ == "__main__":
    cyclopts.run(main)
