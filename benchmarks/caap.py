"""How much does CAAP cost, in plain forward passes of the same model?

    python benchmarks/caap.py --device cuda          # ViT-B/16 and ViT-L/16, bf16, batches 32 and
    128, eager and compiled
    python benchmarks/caap.py --device cpu           # float32, batch 1

Prints images/s, ratio to a plain forward, ratio to the slow twin (native model, one forward per
patch, patches batched as largely), and peak memory. Weights are random: the arithmetic is the same.
Attributions are read as logits of one class; transfers are excluded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm
import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timing import Timing, measured_on, race
from seecause.attribution.caap import make_plan, sweep
from seecause.attribution.select import selection
from seecause.engine.blanks import blank_image
from seecause.loading import wrap
from seecause.models.view import VisionModel
from tests.reference import caap as reference

SIZES = {"ViT-B/16": "vit_base_patch16_224", "ViT-L/16": "vit_large_patch16_224"}


def main(
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    models: str = "ViT-B/16,ViT-L/16",
    batches: str = "",
    tails: str = "source,blank,patched",
    compiled: bool = True,
    slow: bool = True,
    repeats: int = 10,
) -> None:
    """Measure and print one table per model and batch."""
    where = torch.device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    sizes = [int(b) for b in (batches or ("32,128" if where.type == "cuda" else "1")).split(",")]
    print(
        f"# {measured_on(where)}; {str(dtype).removeprefix('torch.')}; medians of {repeats},"
        " contenders interleaved, 3 warm-ups\n"
    )
    for name in models.split(","):
        module = timm.create_model(SIZES[name], num_classes=1000).to(where, dtype)
        model = wrap(module, name=name)
        for batch in sizes:
            images = torch.randn(batch, 3, 224, 224, device=where, dtype=dtype)
            print(f"## {name}, batch {batch}\n\n{HEAD}")
            report(
                race(
                    contenders(model, images, tails.split(","), slow=slow), where, repeats=repeats
                ),
                batch,
                "eager",
                where,
            )
            if compiled and where.type == "cuda":
                eager_blocks = list(model.blocks)
                model.compile()
                entries = contenders(
                    model,
                    images,
                    [t for t in tails.split(",") if t != "all"],
                    slow=False,
                    plain=partial(model, images),
                )
                report(race(entries, where, repeats=repeats), batch, "compiled", where)
                model.blocks = eager_blocks
            print()


HEAD = (
    "| mode | contender | images/s | x plain forward | x faster than slow twin | peak GiB | spread"
    " | |\n|---|---|---|---|---|---|---|---|"
)


def contenders(
    model: VisionModel,
    images: Tensor,
    tails: list[str],
    *,
    slow: bool,
    plain: Callable[[], object] | None = None,
) -> dict[str, Callable[[], object]]:
    """Everything that is timed on one batch."""
    layout = model.check(images)
    chosen = selection(layout.grid)
    blank = blank_image(model, (images.shape[-2], images.shape[-1]))

    def caap(tail: str, approx: str = "none") -> Callable[[], object]:
        plan = make_plan(model, layout, tail=tail, layers=None)  # type: ignore[arg-type]
        return torch.no_grad()(lambda: sweep(model, images, blank, chosen, plan, approx=approx))  # type: ignore[arg-type]

    found: dict[str, Callable[[], object]] = {
        "plain forward": torch.no_grad()(plain or (lambda: model.module(images)))
    }
    found |= {f"CAAP {tail}": caap(tail) for tail in tails}
    found["E-CAAP source"] = caap("source", "e-caap")
    if slow:
        found["slow twin (1 image)"] = torch.no_grad()(lambda: slow_twin(model, images, blank))
    return found


def slow_twin(model: VisionModel, images: Tensor, blank: Tensor) -> Tensor:
    """One image by the reference definition, with as many sequences per native forward as the batch
    has images (at least 32 on a GPU)."""
    layout = model.check(images)
    together = max(len(images), 32) if images.is_cuda else 4
    sets = reference.box(layout.grid)
    if not images.is_cuda:
        sets = sets[::16]  # every sixteenth patch; scaled up in the table
    return reference.caap(
        model.module, [b.native for b in model.blocks], blank, images[:1], sets,
        tail="patched", first=1, last=-(-2 * model.n_layers // 3), prefix=layout.prefix, live=[0],
        together=together,
    )  # fmt: skip


def report(timings: dict[str, Timing], batch: int, mode: str, device: torch.device) -> None:
    base = "plain forward"
    per_image = {name: t.seconds / batch for name, t in timings.items()}
    slow = next((n for n in timings if n.startswith("slow twin")), None)
    if slow is not None:
        per_image[slow] = timings[slow].seconds * (
            1 if device.type == "cuda" else 196 / len(range(0, 196, 16))
        )
    for name, timing in timings.items():
        gain = (
            f"{per_image[slow] / per_image[name]:.0f}"
            if slow is not None and name not in (base, slow)
            else ""
        )
        print(
            f"| {mode} | {name} | {1 / per_image[name]:,.1f} |"
            f" {per_image[name] / per_image[base]:.2f} | {gain} | {timing.peak_bytes / 2**30:.1f} |"
            f" {timing.spread:.0%} | {'launch-bound' if timing.launch_bound else ''} |"
        )


if __name__ == "__main__":
    typer.run(main)
