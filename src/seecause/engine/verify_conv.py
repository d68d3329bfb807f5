"""The verified wrap of a convolutional network: four probes that the split computes what the native
model computes.

    logits     the view's answer equals the native one
    stages     so does the feature map after every stage
    resume     the native feature maps, put in after their stage, give the native answer
    locality   changing the pixels of cell (r, c) moves the features most near (r, c)

Deep networks spread a change, and their zero padding pushes it away from the border: in ResNet-152
with random weights a corner moves the cells three away from it most. So near means within a third
of the grid, and never less than one cell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.engine.verify import TOLERANCE, Probe, compare, listening, probe_places
from seecause.errors import ViewMismatch
from seecause.models.conv_view import ConvModel


@torch.no_grad()
def verify_conv(model: ConvModel, *, seed: int = 0) -> list[Probe]:
    """Run the four probes; raises `ViewMismatch` with the probe and the stage."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, len(model.preprocess.mean), *model.preprocess.size)
    images = torch.randn(shape, generator=generator).to(model.device, model.dtype)
    with listening([stage.modules[-1] for stage in model.stages]) as outputs:
        native = model.native(images)
    if not torch.isfinite(native).all():
        raise ViewMismatch(
            "logits",
            "the native model",
            "its answer is not finite (NaN or infinite weights)",
            "Give intact weights",
        )
    if len(outputs) != len(model.stages):
        raise ViewMismatch(
            "stages", "the native run", f"{len(outputs)} of {len(model.stages)} stages were called"
        )
    tolerance = TOLERANCE.get(model.dtype, 2e-4)
    got = model.stage_outputs(images)
    native_maps = dict(zip(got, outputs, strict=True))
    stages = max(
        compare("stages", name, got[name], native_maps[name], tolerance, "").worst for name in got
    )
    resume = max(
        compare(
            "resume", name, model.run_from(name, native_maps[name]), native, tolerance, ""
        ).worst
        for name in reversed(got)
    )
    return [
        compare(
            "logits",
            "the whole network",
            model(images),
            native,
            tolerance,
            f"{native.shape[-1]} classes",
        ),
        Probe("stages", stages, f"{len(outputs)} feature maps"),
        Probe("resume", resume, f"logits from {len(outputs)} native feature maps"),
        _locality(model, images[:1], generator),
    ]


def _locality(model: ConvModel, images: Tensor, generator: torch.Generator) -> Probe:
    grid, (high, wide) = model.layout.grid, model.patch
    before = model.run_to(model.cells, images)
    if tuple(before.shape[-2:]) != grid:
        raise ViewMismatch(
            "locality",
            model.cells,
            f"{before.shape[-2]} x {before.shape[-1]} features, but the layout has {grid[0]} x"
            f" {grid[1]} cells",
        )
    share = 1.0
    for r, c in probe_places(grid, generator):
        changed = images.clone()
        changed[:, :, r * high : (r + 1) * high, c * wide : (c + 1) * wide] += 1
        moved = (
            (model.run_to(model.cells, changed) - before).double().abs().sum(dim=(0, 1))
        )  # [gh, gw]
        row, column = divmod(int(moved.argmax()), grid[1])
        if abs(row - r) > max(1, grid[0] // 3) or abs(column - c) > max(1, grid[1] // 3):
            raise ViewMismatch(
                "locality",
                model.cells,
                f"pixels of cell ({r}, {c}) moved cell ({row}, {column}) most",
            )
        near = moved[max(0, r - 1) : r + 2, max(0, c - 1) : c + 2].sum()
        share = min(share, float(near / moved.sum()))
    return Probe(
        "locality",
        1 - share,
        f"{grid[0]} x {grid[1]} cells of {high} x {wide} pixels at {model.cells}; the share that"
        " moved further than one cell",
    )
