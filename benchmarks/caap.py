"""How much do CAAP and mosaic cost, in plain forward passes of the same model?

    python benchmarks/caap.py --device cuda          # ViT-S, B and L and ResNet-50, bf16, batches
    1 to 128
    python benchmarks/caap.py --device cpu           # float32, batch 1
    python benchmarks/caap.py --mosaic --no-slow     # mosaic and caap+mosaic instead
    python benchmarks/caap.py --overhead             # what a call of sc.attribute adds to them

Three ways to run, both sides alike: `eager`; `captured` (the plain forward by a CUDA graph too);
`compiled` (both halves of every block by torch.compile, of both sides, and captured). Beside each:
ratio to a plain forward of the same way, ratio to the slow twin (native model, one forward per
patch, patches batched as largely), peak memory. Weights are random: the arithmetic is the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import cyclopts
import timm
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timing import CompiledBlock, Timing, heading, race, row, short, title, usual_dtype
from seecause.attribution.attribute import attribute
from seecause.attribution.caap import caap, make_plan, sweep, sweep_features
from seecause.attribution.mosaic import caap_mosaic, mosaic as mosaic_maps
from seecause.engine import graphs
from seecause.engine.sweep import selection
from seecause.engine.trace import blank_image
from seecause.loading import wrap
from seecause.models.staged import StagedModel
from seecause.models.view import VisionModel
from seecause.target import Target
from tests.reference import caap as reference

SIZES = {
    "ViT-S/16": "vit_small_patch16_224",
    "ViT-B/16": "vit_base_patch16_224",
    "ViT-L/16": "vit_large_patch16_224",
    "ResNet-50": "resnet50",
}
PLAIN = "plain forward"
Run = Callable[[], object]


def main(
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    models: str = "",
    batches: str = "",
    tails: str = "source,patched",
    others: bool = True,
    mosaic: bool = False,
    ways: str = "",
    slow: bool = True,
    overhead: bool = False,
    repeats: int = 10,
) -> None:
    """Measure and print one table per model."""
    where = torch.device(device)
    if overhead:
        return public_call(where, repeats)
    gpu = where.type == "cuda"
    dtype = usual_dtype(where)
    sizes = [int(b) for b in (batches or ("1,8,32,128" if gpu else "1")).split(",")]
    chosen_ways = (ways or ("eager,captured,compiled" if gpu else "eager")).split(",")
    title(where, short(dtype), f"medians of {repeats}, contenders interleaved, 3 warm-ups")
    for name in (models or ",".join(SIZES if gpu else ["ViT-B/16"])).split(","):
        with where:  # weights are drawn where they are used
            module = timm.create_model(SIZES[name], num_classes=1000).to(dtype).eval()
        model = wrap(module, name=name)
        print(f"## {name}\n")
        heading(*HEAD)
        for batch in sizes:
            images = torch.randn(batch, 3, 224, 224, device=where, dtype=dtype)
            twin = twin_seconds(model, images) if slow and name != "ResNet-50" else None
            for way in chosen_ways:
                with running(model, way):
                    entries = plain_forward(model, images, way)
                    if mosaic:
                        entries |= mosaics(model, images)
                    else:
                        entries |= contenders(model, images, tails.split(","), way, others)
                    with model.eval_mode(), torch.no_grad():
                        timings = race(entries, where, repeats=repeats)
                report(timings, batch, way, twin)
                if gpu and way != "eager":
                    row(
                        batch, way, "memory of all graphs", "", "", "", f"{pool(where):.2f}", "", ""
                    )
                graphs.clear()
        print()


def public_call(device: torch.device, repeats: int) -> None:
    """What `sc.attribute` of one image takes beside its method, and what of it are checks."""
    title(device, f"medians of {repeats}, contenders interleaved, 3 warm-ups")
    heading("model", "parts", "tensors", "contender", "ms", "x the method", "spread")
    narrow = {"img_size": 64, "embed_dim": 32, "depth": 24, "num_heads": 2, "num_classes": 10}
    for name, options in {"ViT-Ti/16": {}, "24 narrow blocks": narrow}.items():
        with device:
            module = timm.create_model("vit_tiny_patch16_224", **options).eval()
        model = wrap(module, name=name)
        images = torch.zeros(1, 3, *model.preprocess.size, device=device)
        target = Target(torch.zeros(1, dtype=torch.long, device=device))

        def checks(model: VisionModel = model, images: Tensor = images) -> None:
            for _ in range(100):  # what a captured call of CAAP repeats
                with model.eval_mode(frozen=True):
                    model.check(images), model.check(images)
                    model.state_key(), model.state_key()

        def alone(way: Callable[..., object], model: VisionModel = model) -> None:
            with model.eval_mode(frozen=True), torch.no_grad():
                way(model, images, target)  # noqa: B023

        runs = {
            PLAIN: partial(model, images),
            "100 times the checks of a call": checks,
            "caap": partial(alone, caap),
            "sc.attribute, caap": partial(attribute, model, images, 0),
            "mosaic": partial(alone, mosaic_maps),
            "sc.attribute, mosaic": partial(attribute, model, images, 0, "mosaic"),
        }
        timings = race(runs, device, repeats=repeats)
        about = len([*module.modules()]), len(model.tensors())
        for contender, timing in timings.items():
            of = timings.get(contender.removeprefix("sc.attribute, "), timing)
            ratio = f"{timing.seconds / of.seconds:.2f}"
            row(
                name,
                *about,
                contender,
                f"{timing.seconds * 1e3:.2f}",
                ratio,
                f"{timing.spread:.0%}",
            )


def pool(device: torch.device) -> float:
    """GiB that recordings hold."""
    return graphs.pool_bytes(torch.device(device.type, device.index or 0)) / 2**30


HEAD = ("batch", "way", "contender", "ms", "x plain forward", "x faster than slow twin")
HEAD += ("peak GiB", "spread", "")


@contextmanager
def running(model: VisionModel | StagedModel, way: str) -> Iterator[None]:
    """Eager runs without graphs; captured ones with; compiled ones with compiled blocks, too."""
    eager_blocks = list(getattr(model, "blocks", ()))
    if way == "compiled" and eager_blocks:
        model.blocks = [CompiledBlock(**vars(block)) for block in model.blocks]
    try:
        with mock.patch.dict(os.environ, {graphs.SWITCH: "0"} if way == "eager" else {}):
            yield
    finally:
        if eager_blocks:
            model.blocks = eager_blocks


def plain_forward(model: VisionModel | StagedModel, images: Tensor, way: str) -> dict[str, Run]:
    """What all others are compared with."""
    forward = model if way == "compiled" else model.module
    return {PLAIN: lambda: graphs.captured(model, (PLAIN, way), lambda: forward, images)}


def mosaics(model: VisionModel, images: Tensor) -> dict[str, Run]:
    target = Target(torch.zeros(len(images), dtype=torch.long, device=images.device))
    return {
        "caap, logit": partial(caap, model, images, target, score="logit"),
        "mosaic, 24 masks": partial(mosaic_maps, model, images, target),
        "mosaic, 6 masks": partial(mosaic_maps, model, images, target, masks=6),
        "caap+mosaic": partial(caap_mosaic, model, images, target),
    }


def contenders(
    model: VisionModel | StagedModel, images: Tensor, tails: list[str], way: str, others: bool
) -> dict[str, Run]:
    """Everything about CAAP that is timed on one batch."""
    layout = model.check(images)
    blank = blank_image(model, (images.shape[-2], images.shape[-1]))
    runs: dict[str, Run] = {}
    if isinstance(model, StagedModel):
        cells = selection(layout.grid)
        for direction in ("insert", "delete"):
            runs[f"CAAP, {direction}"] = partial(
                sweep_features, model, images, blank, cells, model.cells, direction=direction
            )
        return runs

    def patched(tail: str, *, start: int = 0, **options: str) -> Run:
        layers = (start, None) if start else None
        plan = make_plan(model, layout, tail=tail, layers=layers)  # type: ignore[arg-type]
        chosen = selection(layout.grid)
        return partial(sweep, model, images, blank, chosen, plan, **options)  # type: ignore[arg-type]

    runs |= {f"CAAP {tail}": patched(tail) for tail in tails}
    if others and way == "captured":
        third = model.n_layers // 3
        runs["CAAP source, delete"] = patched("source", direction="delete")
        runs[f"CAAP source, from block {third}"] = patched("source", start=third)
        runs["E-CAAP source"] = patched("source", approx="e-caap")
    return runs


def twin_seconds(model: VisionModel, images: Tensor) -> float:
    """Seconds that the reference definition takes for one image, with as many sequences per native
    forward as the batch has images (at least 32 on a GPU); on a CPU timed on every sixteenth
    patch."""
    layout = model.check(images)
    sets = reference.box(layout.grid)
    some = sets if images.is_cuda else sets[::16]
    blank = blank_image(model, (images.shape[-2], images.shape[-1]))
    run = partial(
        reference.caap,
        model.module, [b.native for b in model.blocks], blank, images[:1], some,
        tail="patched", first=1, last=-(-2 * model.n_layers // 3), prefix=layout.prefix, live=[0],
        together=max(len(images), 32) if images.is_cuda else 4,
    )  # fmt: skip
    with torch.no_grad():
        timing = race({"twin": run}, images.device, warm_ups=1, repeats=3)["twin"]
    return timing.seconds * len(sets) / len(some)


def report(timings: dict[str, Timing], batch: int, way: str, twin: float | None) -> None:
    for name, timing in timings.items():
        ratio = timing.seconds / timings[PLAIN].seconds
        gain = "" if twin is None or name == PLAIN else f"{twin * batch / timing.seconds:,.0f}"
        bound = "launch-bound" if timing.launch_bound else ""
        ms = f"{timing.seconds * 1e3:.2f}"
        row(batch, way, name, ms, f"{ratio:.2f}", gain, *timing.about, bound)


if __name__ == "__main__":
    cyclopts.run(main)
