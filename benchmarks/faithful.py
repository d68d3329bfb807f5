"""What does a classifier that cannot look elsewhere cost, next to a single vision transformer?

    python benchmarks/faithful.py --device cuda             # ViT-B/14 with 4 registers at 224 and
    518 pixels, bf16
    python benchmarks/faithful.py --device cpu --quick      # a tiny one in float32: that it runs,
    not how fast

Inference, eager and captured (both sides by CUDA graphs): stage 1 on the whole picture, then stage
2 on the patches it kept, masked (all tokens run) or packed (only the kept ones). The kept share is
drawn for each picture from 15-60 %, so that batches are as uneven as real ones. Training: one step
with all losses, the warped view and AdamW. Weights are random: the arithmetic is the same.
Transfers are excluded. Images/s, and time relative to a single ViT.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import cyclopts
import timm
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timing import Timing, heading, race, row, short, title, usual_dtype
from seecause.engine import graphs
from seecause.faithful import IFAM
from seecause.faithful.losses import Affine, objective, parameter_groups
from seecause.faithful.parts import Noise
from seecause.faithful.stages import packed_places, visible_tokens

LEAST, MOST = 0.15, 0.60  # share of patches that a picture keeps
PARTS, CLASSES = 8, 200
SINGLE = "single ViT"


def main(
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    quick: bool = False,
    sizes: str = "",
    batches: str = "",
    repeats: int = 10,
    training: bool = True,
) -> None:
    """Measure and print one table per size and job."""
    where = torch.device(device)
    dtype = usual_dtype(where)
    title(where, short(dtype), f"medians of {repeats}, contenders interleaved, 3 warm-ups")
    for size in [int(s) for s in (sizes or ("56" if quick else "224,518")).split(",")]:
        usual = "2" if quick else "1,8,32,128" if size <= 224 else "1,32,128"
        chosen = [int(batch) for batch in (batches or usual).split(",")]
        backbone = _backbone(size, quick)
        images = torch.randn(chosen[-1], 3, size, size, device=where)
        mask = _uneven_masks(len(images), size // 14).to(where)
        for batch in chosen:
            entries = inference(backbone, images[:batch].to(dtype), mask[:batch])
            share = f"{mask[:batch].float().mean():.0%} of patches kept"
            for way in ("eager", "captured") if where.type == "cuda" else ("eager",):
                print(f"## {size} pixels, batch {batch}: inference, {way}, {share}\n")
                switch = {graphs.SWITCH: "0"} if way == "eager" else {}
                with mock.patch.dict(os.environ, switch):
                    report(race(entries, where, repeats=repeats), batch)
            graphs.clear()
        if training:
            part = images[: 64 if size <= 224 else 16]
            print(f"## {size} pixels, batch {len(part)}: training steps\n")
            report(race(steps(backbone, part, dtype), where, repeats=repeats), len(part))


def inference(backbone: nn.Module, images: Tensor, mask: Tensor) -> dict[str, Callable[[], object]]:
    """One forward of each; the masks of both stages' runs are given, so that all keep the same
    patches."""
    single = nn.Sequential(backbone, nn.Linear(backbone.num_features, CLASSES))
    single = single.to(images.device, images.dtype).eval()
    net = IFAM(backbone, PARTS, CLASSES).to(images.device, images.dtype).eval()
    parts = IFAM(backbone, PARTS, CLASSES, stages=1).to(images.device, images.dtype).eval()
    owner = graphs.ModuleOwner(single)
    visible = visible_tokens(mask.flatten(1), net.stage2.prefix)
    found: dict[str, Callable[[], object]] = {
        SINGLE: lambda: graphs.captured(owner, SINGLE, lambda: single, images),
        "PDiscoFormer (stage 1)": lambda: parts(images),
        "two stages, masked": lambda: net(images, mask=mask, packed=False),
        "two stages, packed": lambda: net(images, mask=mask, packed=True),
        "stage 2 alone, packed": lambda: net.stage2.packed(images, *packed_places(visible)),
    }
    return {name: torch.no_grad()(run) for name, run in found.items()}


def steps(
    backbone: nn.Module, images: Tensor, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """One optimiser step of each, with the backbone's weights in float32 and autocast where the
    device has it."""
    labels = torch.arange(len(images), device=images.device) % CLASSES
    single = nn.Sequential(backbone, nn.Linear(backbone.num_features, CLASSES))
    single = single.to(images.device, torch.float32).train().requires_grad_(True)
    plain = torch.optim.AdamW(single.parameters(), lr=1e-6)
    found: dict[str, Callable[[], object]] = {
        SINGLE: _step(
            plain,
            lambda: single(images),
            lambda logits: nn.functional.cross_entropy(logits.float(), labels),
            images.device,
            dtype,
        )
    }
    for name, options, packed in (
        ("PDiscoFormer", {"stages": 1}, None),
        ("iFAM, gradient=ste", {"gradient": "ste"}, None),
        ("iFAM, gradient=none", {"gradient": "none"}, None),
        ("iFAM, gradient=none, packed", {"gradient": "none"}, True),
    ):
        net = IFAM(backbone, PARTS, CLASSES, **options).to(images.device, torch.float32).train()
        found[name] = _ifam_step(net, images, labels, dtype, packed)
    return found


def _ifam_step(
    net: IFAM, images: Tensor, labels: Tensor, dtype: torch.dtype, packed: bool | None
) -> Callable[[], object]:
    size, ids = (images.shape[-2], images.shape[-1]), torch.arange(len(images)).to(images.device)
    moved = Affine.draw(0, 0, size)
    return _step(
        torch.optim.AdamW(parameter_groups(net, 1e-6, 1e-3)),
        lambda: net(images, noise=Noise(0, 0, ids), warped=moved.warp(images), packed=packed),
        lambda out: objective(net, out, labels, size=size, moved=moved)["total"],
        images.device,
        dtype,
    )


def _step(
    optimizer: torch.optim.Optimizer,
    forward: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], object]:
    """One step, whose forward runs in `dtype`."""

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = forward()
        optimizer.zero_grad(set_to_none=True)
        loss(out).backward()
        optimizer.step()

    return step


def _backbone(size: int, quick: bool) -> nn.Module:
    tiny = {"embed_dim": 48, "depth": 3, "num_heads": 3} if quick else {}
    return timm.create_model("vit_base_patch14_reg4_dinov2", img_size=size, num_classes=0, **tiny)


def _uneven_masks(batch: int, side: int) -> Tensor:
    """[B, side, side]: every picture keeps a share of its own, at random places."""
    draw = torch.Generator().manual_seed(0)
    share = LEAST + (MOST - LEAST) * torch.rand(batch, generator=draw)
    order = torch.rand(batch, side * side, generator=draw).argsort(dim=1).argsort(dim=1)
    return (order < (share[:, None] * side * side).round().clamp_min(1)).view(batch, side, side)


def report(timings: dict[str, Timing], batch: int) -> None:
    heading("", "images/s", "time / single ViT", "peak GiB", "spread", "")
    for name, timing in timings.items():
        ratio = timing.seconds / timings[SINGLE].seconds
        bound = "launch-bound" if timing.launch_bound else ""
        row(name, f"{batch / timing.seconds:,.1f}", f"{ratio:.2f}", *timing.about, bound)
    print()


if __name__ == "__main__":
    cyclopts.run(main)
