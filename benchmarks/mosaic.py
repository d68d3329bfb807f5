"""How much do mosaic and caap+mosaic cost, in plain forward passes of the same model?

    python benchmarks/mosaic.py --device cuda          # ViT-B and L, bf16, batches 1 to 128
    python benchmarks/mosaic.py --device cpu --models ViT-S/16

Both sides run alike: `captured` (the plain forward by a CUDA graph, too) or `eager`. Weights are
random: the arithmetic is the same. Prints milliseconds, the ratio to a plain forward, peak memory.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import timm
import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.caap import PLAIN, SIZES, Run
from benchmarks.timing import measured_on, race
from seecause.attribution.caap import caap
from seecause.attribution.mosaic import caap_mosaic, mosaic
from seecause.engine import graphs
from seecause.loading import wrap
from seecause.target import Target


def main(
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    models: str = "ViT-B/16,ViT-L/16",
    batches: str = "",
    ways: str = "",
    repeats: int = 10,
) -> None:
    """Measure and print one table for each model."""
    where = torch.device(device)
    gpu = where.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    sizes = [int(b) for b in (batches or ("1,8,32,128" if gpu else "1")).split(",")]
    print(f"# {measured_on(where)}; {str(dtype).removeprefix('torch.')}; medians of {repeats}\n")
    for name in models.split(","):
        with where:  # weights are drawn where they are used
            module = timm.create_model(SIZES[name], num_classes=1000).to(dtype).eval()
        model = wrap(module, name=name)
        print(f"## {name}\n\n{HEAD}", flush=True)
        for batch in sizes:
            images = torch.randn(batch, 3, 224, 224, device=where, dtype=dtype)
            target = Target(torch.zeros(batch, dtype=torch.long, device=where))
            for way in (ways or ("captured,eager" if gpu else "eager")).split(","):
                runs: dict[str, Run] = {
                    PLAIN: partial(
                        graphs.captured, model, PLAIN, partial(getattr, model, "module"), images
                    ),
                    "caap, logit": partial(caap, model, images, target, score="logit"),
                    "mosaic, 24 masks": partial(mosaic, model, images, target),
                    "mosaic, 6 masks": partial(mosaic, model, images, target, masks=6),
                    "caap+mosaic": partial(caap_mosaic, model, images, target),
                }
                quiet = nullcontext() if way == "captured" else graphs.without_graphs()
                with quiet, model.settled(), torch.no_grad():
                    timings = race(runs, where, repeats=repeats)
                for contender, timing in timings.items():
                    ratio = timing.seconds / timings[PLAIN].seconds
                    print(
                        f"| {batch} | {way} | {contender} | {timing.seconds * 1e3:.2f} |"
                        f" {ratio:.2f} | {timing.peak_bytes / 2**30:.2f} | {timing.spread:.0%} |",
                        flush=True,
                    )
                graphs.clear()
        print("\n".join(graphs.report()))


HEAD = (
    "| batch | way | contender | ms | x plain | peak GiB | spread |\n|---|---|---|---|---|---|---|"
)

if __name__ == "__main__":
    typer.run(main)
