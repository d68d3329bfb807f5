"""The verified wrap: four probes that a view computes what its native model computes.

    logits     the view's answer equals the native one
    blocks     so does every block's output
    attention  a random subset of rows, attending to the recorded keys of all rows, gives the native
    rows
    locality   changing the pixels of patch (r, c) changes token prefix + r * columns + c of the
    embedding

A wrong token grid, a missed register or a skipped LayerScale must never give a pretty picture.

A network of stages has those in place of blocks, and `resume` in place of attention: native
feature maps, put in after their stage, give the native answer. Deep networks spread a change, and
their zero padding pushes it away from the border: in ResNet-152 with random weights a corner moves
the cells three away from it most. Some mix all places (ConvNeXt V2's norm, linear attention). So
its locality compares, over many places, where features move more than they do for other places
with where the pixels changed: rows and columns must go together, and lie in the same third.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seecause.engine.attend import attend
from seecause.engine.trace import Trace, record
from seecause.engine.walk import walk
from seecause.errors import ViewMismatch
from seecause.models._settled import settles
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel

if TYPE_CHECKING:
    from seecause.models.staged_view import StagedModel

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class Probe:
    """One passed probe: the largest relative difference, and what was compared."""

    name: str
    worst: float
    compared: str


def need_finite(native: Tensor) -> None:
    """Refuse a module whose own answer holds NaN or infinity: nothing can be compared with it."""
    if not torch.isfinite(native).all():
        raise ViewMismatch(
            "logits",
            "the native model",
            "its answer is not finite (NaN or infinite weights)",
            "Give intact weights",
        )


@settles
@torch.no_grad()
def verify(model: VisionModel, *, seed: int = 0) -> list[Probe]:
    """Run the four probes; raises `ViewMismatch` with the probe and the block."""
    try:
        return _probes(model, seed)
    except ViewMismatch as mismatch:
        quantised = quantised_layers(model.module)
        if not quantised:
            raise
        raise ViewMismatch(
            mismatch.probe,
            mismatch.where,
            f"quantised layers ({', '.join(quantised[:2])}, ...) scale all rows that run together"
            " alike, so a row alone comes out as another one",
            "Wrap the model it was quantised from, or give check=False and take method='caap',"
            " which needs no gradient: its maps are then as rough as those scales",
        ) from mismatch


def quantised_layers(module: nn.Module) -> list[str]:
    """Names of layers that torch.ao made, which round what they read."""
    return [name for name, m in module.named_modules() if ".quantized." in type(m).__module__]


def _probes(model: VisionModel, seed: int) -> list[Probe]:
    generator = torch.Generator().manual_seed(seed)
    images = random_images(model, generator)
    tokens = model.embed(images[:1]).shape[1]
    if tokens != model.layout.tokens:
        raise ViewMismatch(
            "locality",
            "the embedding",
            f"{tokens} tokens, but the layout counts {model.layout.tokens}",
        )
    with listening([b.native for b in model.blocks]) as outputs:
        native = model.native(images)
    model.memo["n_classes"] = native.shape[-1]
    need_finite(native)
    depth = range(model.n_layers)
    if len(outputs) != model.n_layers:
        raise ViewMismatch(
            "blocks", "the native run", f"{len(outputs)} of {model.n_layers} blocks were called"
        )
    at = model.at(images)
    ordered = (model.native_order(output.to(model.device)) for output in outputs)
    outputs = [b.leave(output, at) for b, output in zip(model.blocks, ordered, strict=True)]
    trace = record(model, images, states={0, *(i + 1 for i in depth)}, kv=depth)
    tolerance = TOLERANCE.get(model.dtype, 2e-4)
    probes = [
        _blocks(model, trace.states, outputs, tolerance),
        _attention(model, trace, outputs, tolerance, generator),
    ]
    assert trace.logits is not None
    probes.insert(
        0,
        compare(
            "logits",
            "the readout",
            trace.logits,
            native,
            tolerance,
            f"{model.readout.kind} readout, {native.shape[-1]} classes",
        ),
    )
    return [*probes, _locality(model, images, generator)]


def random_images(model: ImageModel, generator: torch.Generator | None = None) -> Tensor:
    """Two pictures of noise, the same for every model of a size."""
    shape = (2, len(model.preprocess.mean), *model.preprocess.size)
    generator = generator or torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(model.device, model.dtype)


def _blocks(
    model: VisionModel, states: dict[int, Tensor], outputs: list[Tensor], tolerance: float
) -> Probe:
    worst = 0.0
    for index, native in enumerate(outputs):
        mine, name = states[index + 1], model.blocks[index].name
        worst = max(worst, compare("blocks", name, mine, native, tolerance, "").worst)
    return Probe("blocks", worst, f"{model.n_layers} block outputs")


def _attention(
    model: VisionModel,
    trace: Trace,
    outputs: list[Tensor],
    tolerance: float,
    generator: torch.Generator,
) -> Probe:
    layout = trace.layout
    rows = torch.randperm(layout.tokens, generator=generator)[: max(2, layout.tokens // 3)].to(
        model.device
    )
    worst = 0.0
    for step in walk(model, trace.states[0][:, rows], trace.at.take(rows)):
        step.h, native = trace.states[step.index][:, rows], outputs[step.index][:, rows]
        bank = trace.bank(step.index, bias=step.block.bias(step.at, trace.at))
        step.o, _ = attend(step.q, [bank], scale=step.block.scale)
        probe = compare("attention", step.block.name, step.out, native, 2 * tolerance, "")
        worst = max(worst, probe.worst)
    return Probe(
        "attention",
        worst,
        f"{len(rows)} of {layout.tokens} rows against recorded keys, every block",
    )


def _locality(model: VisionModel, images: Tensor, generator: torch.Generator) -> Probe:
    layout = model.layout
    rows, columns = layout.grid
    before = model.embed(images[:1])
    high, wide = model.preprocess.size[0] // rows, model.preprocess.size[1] // columns
    share = 1.0
    for r, c in probe_places(layout.grid, generator):
        changed = images[:1].clone()
        changed[:, :, r * high : (r + 1) * high, c * wide : (c + 1) * wide] += 1
        moved = (model.embed(changed) - before).float().abs().sum(dim=(0, 2))
        expected = layout.prefix + r * columns + c
        if int(moved.argmax()) != expected:
            raise ViewMismatch(
                "locality",
                "the embedding",
                f"patch ({r}, {c}) moved token {int(moved.argmax())}, the layout says {expected}",
            )
        share = min(share, float(moved[expected] / moved.sum()))
    return Probe(
        "locality",
        1 - share,
        f"{layout.grid[0]} x {layout.grid[1]} patches after {layout.prefix} special tokens",
    )


def probe_places(
    grid: tuple[int, int], generator: torch.Generator, *, inside: int = 4
) -> list[tuple[int, int]]:
    """The corners of the grid and a few random places."""
    rows, columns = grid
    corners = [(0, 0), (0, columns - 1), (rows - 1, 0), (rows - 1, columns - 1)]
    others = [
        (
            int(torch.randint(rows, (), generator=generator)),
            int(torch.randint(columns, (), generator=generator)),
        )
        for _ in range(inside)
    ]
    return list(dict.fromkeys(corners + others))


def compare(
    probe: str, where: str, got: Tensor, expected: Tensor, tolerance: float, compared: str
) -> Probe:
    """The largest difference relative to the largest native value, or a refusal."""
    if got.shape != expected.shape:
        raise ViewMismatch(probe, where, f"shape {list(got.shape)}, native {list(expected.shape)}")
    size = expected.double().abs().max().clamp_min(1e-12)
    worst = float((got.double() - expected.double()).abs().max() / size)
    if not worst <= tolerance:
        raise ViewMismatch(
            probe, where, f"relative difference {worst:.2g}, at most {tolerance:.2g} expected"
        )
    return Probe(probe, worst, compared)


@contextmanager
def listening(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the outputs of native blocks during one run; no hook is left behind."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: object, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@settles
@torch.no_grad()
def verify_staged(model: StagedModel, *, seed: int = 0) -> list[Probe]:
    """Run the four probes; raises `ViewMismatch` with the probe and the stage."""
    generator = torch.Generator().manual_seed(seed)
    images = random_images(model, generator)
    with listening([stage.listened for stage in model.stages]) as outputs:
        native = model.native(images)
    model.memo["n_classes"] = native.shape[-1]
    need_finite(native)
    if len(outputs) != len(model.stages):
        raise ViewMismatch(
            "stages", "the native run", f"{len(outputs)} of {len(model.stages)} stages were called"
        )
    tolerance = TOLERANCE.get(model.dtype, 2e-4)
    got = model.stage_outputs(images)
    native_maps = {
        stage.name: stage.heard(output, (got[stage.name].shape[-2], got[stage.name].shape[-1]))
        for stage, output in zip(model.stages, outputs, strict=True)
    }
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
        _near(model, images[:1], generator),
    ]


def _near(model: StagedModel, images: Tensor, generator: torch.Generator) -> Probe:
    grid, (high, wide) = model.layout.grid, model.patch
    before = model.run_to(model.cells, images)
    if tuple(before.shape[-2:]) != grid:
        raise ViewMismatch(
            "locality",
            model.cells,
            f"{before.shape[-2]} x {before.shape[-1]} features, but the layout has {grid[0]} x"
            f" {grid[1]} cells",
        )
    places = torch.tensor(probe_places(grid, generator, inside=12))  # [K, 2]
    shares = _moved(model, images, before, places, (high, wide))  # [K, gh, gw]
    near = torch.tensor(
        [
            float(moved[max(0, r - 1) : r + 2, max(0, c - 1) : c + 2].sum())
            for (r, c), moved in zip(places.tolist(), shares, strict=True)
        ]
    )
    for axis, name in enumerate(("row", "column")):
        at, expected = _centres(shares, axis), places[:, axis].double()
        if grid[axis] < 3:
            continue  # too few to tell
        agreement = float(torch.corrcoef(torch.stack([at, expected]))[0, 1])
        offset = float((at - expected).mean())
        if not agreement > 0.5 or abs(offset) > max(1, grid[axis] // 3):
            raise ViewMismatch(
                "locality",
                model.cells,
                f"cells that move are not those of the changed pixels: the {name} where features"
                f" move has a correlation of {agreement:.2f} with that of the pixels, and is"
                f" {offset:+.1f} off",
            )
    return Probe(
        "locality",
        1 - float(near.min()),
        f"{grid[0]} x {grid[1]} cells of {high} x {wide} pixels at {model.cells}; the share that"
        " moved further than one cell (stages spread it: no fault)",
    )


def _moved(
    model: StagedModel, images: Tensor, before: Tensor, places: Tensor, cell: tuple[int, int]
) -> Tensor:
    """How far features move when the pixels of each place do, as shares [K, gh, gw]."""
    little = 0.05 if model.dtype in (torch.float32, torch.float64) else 1.0  # above rounding
    shares = []
    for r, c in places.tolist():
        changed = images.clone()
        rows, columns = (slice(i * n, (i + 1) * n) for i, n in zip((r, c), cell, strict=True))
        changed[:, :, rows, columns] += little
        moved = (model.run_to(model.cells, changed) - before).double().abs().sum(dim=(0, 1)).cpu()
        shares.append(moved / moved.sum())
    return torch.stack(shares)


def _centres(shares: Tensor, axis: int) -> Tensor:
    """Where along an axis [K] cells move more than they do for other places."""
    usual = shares.mean(dim=0).clamp_min(1e-12)
    excess = (shares / usual - 1).clamp_min(0).sum(dim=2 - axis)  # [K, side]
    return (excess * torch.arange(excess.shape[1])).sum(dim=1) / excess.sum(dim=1)
