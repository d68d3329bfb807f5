"""The verified wrap: probes that a view computes what its native model computes. A wrong token
grid, a missed register or a skipped LayerScale must never produce a plausible map.

    logits     the view's logits equal the native ones
    blocks     so does every block's output
    attention  a random subset of rows, attending to the recorded keys of all rows, gives the native
               rows
    locality   changing the pixels of patch (r, c) changes token prefix + r * columns + c of the
               embedding

A network of stages has `stages` in place of blocks, and `resume` in place of attention: native
feature maps, put in after their stage, give the native logits. A model of many rows (boxes, pixels)
has two others:

    answers    rows that read the native places, put in again, give the native outputs: all classes,
               boxes and pixels. A row that reads the image in another way is detected
               here, since the modules before return dummy values
    aimed      a view that is aimed at a row gives that row's native output

Deep networks and encoders spread a change, and their zero padding pushes it away from the border:
in ResNet-152 with random weights a corner moves the cells three away from it most. Some mix all
places (ConvNeXt V2's norm, linear attention). So the locality of feature maps (`places` where rows
read them) compares, over many changes, where features move more than they do for other changes with
where the pixels changed: rows and columns must go together, and lie in the same third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.engine.attend import attend
from seecause.engine.trace import Trace, record
from seecause.engine.walk import walk
from seecause.errors import ViewMismatch
from seecause.models.base import ImageModel, in_eval_mode
from seecause.models.block import Size
from seecause.models.view import VisionModel

if TYPE_CHECKING:
    from seecause.models.dense import DenseModel
    from seecause.models.staged import StagedModel

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class Probe:
    """One passed probe: the largest relative difference, and what was compared."""

    name: str
    worst: float
    compared: str


@in_eval_mode
@torch.no_grad()
def verify(model: ImageModel) -> list[Probe]:
    """Run the probes of a view; raises `ViewMismatch` with the probe and the block, stage or
    output."""
    generator = torch.Generator().manual_seed(0)
    images, near = random_images(model, generator), tolerance_of(model.dtype)
    if isinstance(model, VisionModel):
        return _verify_tokens(model, images, near, generator)
    probes = _verify_stages if model.architecture == "staged" else _verify_rows
    return probes(cast(Any, model), images, near, generator)


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative difference that is accepted as rounding."""
    return TOLERANCE.get(dtype, 2e-4)


def random_images(model: ImageModel, generator: torch.Generator | None = None) -> Tensor:
    """Two images of noise, the same for every model of a size."""
    shape = (2, len(model.preprocess.mean), *model.preprocess.size)
    generator = generator or torch.Generator().manual_seed(0)
    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    return noise.to(model.device, model.dtype)


def _verify_tokens(
    model: VisionModel, images: Tensor, near: float, generator: torch.Generator
) -> list[Probe]:
    try:
        tokens = model.embed(images[:1]).shape[1]
    except RuntimeError as failure:
        reason = f"it takes no images {list(images.shape)}"
        remedy = "Give mean= and std= with one number for each channel, and the size= it takes"
        raise ViewMismatch("locality", "the embedding", reason, remedy) from failure
    if tokens != model.layout.tokens:
        counted = f"{tokens} tokens, but the layout counts {model.layout.tokens}"
        raise ViewMismatch("locality", "the embedding", counted)
    native, heard = _native_run(model, images, "blocks", [b.native for b in model.blocks])
    depth, outputs = range(model.n_layers), [output.to(model.device) for output in heard]
    trace = record(model, images, states={0, *(i + 1 for i in depth)}, kv=depth)
    assert trace.logits is not None
    read = f"{model.readout.kind} readout, {native.shape[-1]} classes"
    blocks = max(
        compare("blocks", block.name, trace.states[index + 1], outputs[index], near).worst
        for index, block in enumerate(model.blocks)
    )
    attention = _attention(model, trace, outputs, near, generator)
    return [
        compare("logits", "the readout", trace.logits, native, near, read),
        Probe("blocks", blocks, f"{model.n_layers} block outputs"),
        attention,
        _locality(model, images, generator),
    ]


def _native_run(
    model: ImageModel, images: Tensor, what: str, modules: Sequence[nn.Module]
) -> tuple[Tensor, list[Tensor]]:
    """The native logits, and the outputs of blocks or stages on the way to them."""
    with listening(modules, what) as outputs:
        native = model.native(images)
    model.memo["n_classes"] = native.shape[-1]
    need_finite(native)
    return native, outputs


@contextmanager
def listening(modules: Sequence[nn.Module], what: str = "blocks") -> Iterator[list[Tensor]]:
    """Collect the outputs of native blocks during one run, in which each is called once; no hook is
    left behind."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: object, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
    if len(seen) != len(modules):
        called = f"{len(seen)} of {len(modules)} {what} were called"
        raise ViewMismatch(what, "the native run", called)


def need_finite(native: Tensor, probe: str = "logits", where: str = "the native model") -> None:
    """Refuse a module whose own output holds NaN or infinity: nothing can be compared with it."""
    if not torch.isfinite(native).all():
        reason = "its output is not finite (NaN or infinite weights)"
        raise ViewMismatch(probe, where, reason, "Give intact weights")


def compare(
    probe: str, where: str, got: Tensor, expected: Tensor, tolerance: float, compared: str = ""
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


def _attention(
    model: VisionModel,
    trace: Trace,
    outputs: list[Tensor],
    near: float,
    generator: torch.Generator,
) -> Probe:
    tokens = trace.layout.tokens
    rows = torch.randperm(tokens, generator=generator)[: max(2, tokens // 3)].to(model.device)
    worst = 0.0
    for step in walk(model, trace.states[0][:, rows], trace.at.take(rows)):
        step.h, native = trace.states[step.index][:, rows], outputs[step.index][:, rows]
        bank = trace.bank(step.index, bias=step.block.bias(step.at, trace.at))
        step.o, _ = attend(step.q, [bank], scale=step.block.scale)
        worst = max(worst, compare("attention", step.block.name, step.out, native, 2 * near).worst)
    seen = f"{len(rows)} of {tokens} rows against recorded keys, every block"
    return Probe("attention", worst, seen)


def _locality(model: VisionModel, images: Tensor, generator: torch.Generator) -> Probe:
    layout, (height, width) = model.layout, model.preprocess.size
    rows, columns = layout.grid
    before, share = model.embed(images[:1]), 1.0
    for r, c in probe_places(layout.grid, generator):
        changed = _nudged(images[:1], (r, c), (height // rows, width // columns), 1)
        moved = (model.embed(changed) - before).float().abs().sum(dim=(0, 2))
        expected, most = layout.prefix + r * columns + c, int(moved.argmax())
        if most != expected:
            reason = f"patch ({r}, {c}) moved token {most}, the layout says {expected}"
            raise ViewMismatch("locality", "the embedding", reason)
        share = min(share, float(moved[expected] / moved.sum()))
    grid = f"{rows} x {columns} patches after {layout.prefix} special tokens"
    return Probe("locality", 1 - share, grid)


def probe_places(grid: Size, generator: torch.Generator, *, inside: int = 4) -> list[Size]:
    """The corners of the grid and a few random places."""
    rows, columns = grid
    places = [(0, 0), (0, columns - 1), (rows - 1, 0), (rows - 1, columns - 1)]
    for _ in range(inside):
        row, column = (int(torch.randint(side, (), generator=generator)) for side in grid)
        places.append((row, column))
    return list(dict.fromkeys(places))


def _nudged(image: Tensor, place: Size, cell: Size, by: float) -> Tensor:
    """The image with all pixels of one cell moved."""
    rows, columns = (slice(i * n, (i + 1) * n) for i, n in zip(place, cell, strict=True))
    changed = image.clone()
    changed[:, :, rows, columns] += by
    return changed


def _verify_stages(
    model: StagedModel, images: Tensor, near: float, generator: torch.Generator
) -> list[Probe]:
    listened = [stage.listened for stage in model.stages]
    native, heard = _native_run(model, images, "stages", listened)
    got, native_maps = model.stage_outputs(images), {}
    for stage, output in zip(model.stages, heard, strict=True):
        native_maps[stage.name] = stage.leave(output)
    stages = max(compare("stages", n, got[n], native_maps[n], near).worst for n in got)
    resume = max(
        compare("resume", name, model.run_from(name, native_maps[name]), native, near).worst
        for name in reversed(got)
    )
    classes = f"{native.shape[-1]} classes"

    def features(image: Tensor) -> list[Tensor]:
        return [model.run_to(model.cells, image)]

    return [
        compare("logits", "the whole network", model(images), native, near, classes),
        Probe("stages", stages, f"{len(heard)} feature maps"),
        Probe("resume", resume, f"logits from {len(heard)} native feature maps"),
        _feature_locality(model, images[:1], generator, features, "locality"),
    ]


def _feature_locality(
    model: StagedModel | DenseModel,
    image: Tensor,
    generator: torch.Generator,
    levels: Callable[[Tensor], Sequence[Tensor]],
    probe: str,
) -> Probe:
    """Checks that feature maps `levels(image)` change near the pixels that changed."""
    grid, (high, wide) = model.layout.grid, model.patch
    before, places = levels(image), probe_places(grid, generator, inside=12)
    rows, columns = before[0].shape[-2:]
    if probe == "locality" and (rows, columns) != grid:
        features = f"{rows} x {columns} features, but the layout has {grid[0]} x {grid[1]} cells"
        raise ViewMismatch(probe, model.cells, features)
    little = 0.05 if model.dtype in (torch.float32, torch.float64) else 1.0  # above rounding
    moved = []
    for place in places:
        after = levels(_nudged(image, place, model.patch, little))
        each = [_moved(*both, grid) for both in zip(after, before, strict=True)]
        moved.append(torch.stack(each).sum(dim=0).cpu())
    shares = torch.stack(moved)  # [K, gh, gw]
    excess = (shares / shares.mean(dim=0).clamp_min(1e-12) - 1).clamp_min(0)
    worst = 0.0
    for axis, name in enumerate(("row", "column")):
        if grid[axis] < 3:
            continue  # too few changes to compare
        along = excess.sum(dim=2 - axis)  # [K, side]
        at = (along * torch.arange(grid[axis])).sum(dim=1) / along.sum(dim=1)
        expected = torch.tensor(places)[:, axis].double()
        agreement = float(torch.corrcoef(torch.stack([at, expected]))[0, 1])
        offset = float((at - expected).mean())
        worst = max(worst, 1 - agreement)
        if not agreement > 0.5 or abs(offset) > max(1, grid[axis] // 3):
            reason = (
                f"the {name} where features move has a correlation of {agreement:.2f} with that of"
                f" the changed pixels, and is {offset:+.1f} off"
            )
            raise ViewMismatch(probe, model.cells, reason)
    cells = f"{grid[0]} x {grid[1]} cells of {high} x {wide} pixels at {model.cells}"
    return Probe(probe, worst, f"{cells}; 1 - correlation of their places with the changed pixels")


def _moved(after: Tensor, before: Tensor, grid: Size) -> Tensor:
    """How far features [1, C, h, w] moved, by cell [gh, gw]; every level has the same weight."""
    distance = (after - before).double().abs().sum(dim=1, keepdim=True)
    cells = F.interpolate(distance, size=grid, mode="area")[0, 0]
    return cells / cells.sum().clamp_min(1e-30)


def _verify_rows(
    model: DenseModel, images: Tensor, near: float, generator: torch.Generator
) -> list[Probe]:
    native = model.outputs(images)
    answers = model.reading.compared(native)
    model.memo["n_classes"] = model.reading.unaimed(native).shape[-1]
    for name, values in answers.items():
        need_finite(values, "answers", name)
    places = model.run_to(model.cells, images)
    again = model.reading.compared(model.outputs_from(places))
    worst = max(compare("answers", n, again[n], answers[n], near).worst for n in answers)
    sizes = " and ".join(f"{x.shape[-2]} x {x.shape[-1]}" for x in places.maps)
    aim = model.aim(images[:1])
    row = aim.read(model.outputs(images[:1]))
    got = aim.model.run_from(model.cells, aim.model.run_to(model.cells, images[:1]))

    def levels(image: Tensor) -> Sequence[Tensor]:
        return model.run_to(model.cells, image).maps

    return [
        Probe("answers", worst, f"{', '.join(answers)} from places {sizes} at {model.cells}"),
        compare("aimed", aim.name, got, row, near, f"{aim.name}: {row.shape[-1]} answers"),
        _feature_locality(model, images[:1], generator, levels, "places"),
    ]
