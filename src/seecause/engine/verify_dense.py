"""The verified wrap of models of many rows: three probes that a view computes what its native model
computes.

    answers   rows that read the native places, put in again, answer as in the native run: all
              classes, boxes and pixels. A row that reads the picture in another way is noticed
              here, since all that leads to the places is a stand-in then
    aimed     a view that is aimed at a row gives that row's native answer
    places    pixels of cell (r, c) move places near it more than other pixels do
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.verify import TOLERANCE, Probe, compare, probe_places, random_images
from seecause.errors import ViewMismatch
from seecause.models._settled import settles
from seecause.models.dense_view import DenseModel

FAR = 0.25  # of the probed changes: encoders mix their places


@settles
@torch.no_grad()
def verify_dense(model: DenseModel, *, seed: int = 0) -> list[Probe]:
    """Run the three probes; raises `ViewMismatch` with the probe and where it failed."""
    generator = torch.Generator().manual_seed(seed)
    images = random_images(model, generator)
    native, tolerance = model.outputs(images), TOLERANCE.get(model.dtype, 2e-4)
    answers = model.reading.compared(native)
    model.memo["n_classes"] = model.reading.unaimed(native).shape[-1]
    for name, values in answers.items():
        if not torch.isfinite(values).all():
            raise ViewMismatch(
                "answers",
                name,
                "the native answer is not finite (NaN or infinite weights)",
                "Give intact weights",
            )
    places = model.run_to(model.cells, images)
    again = model.reading.compared(model.outputs_from(places))
    worst = max(
        compare("answers", name, again[name], values, tolerance, "").worst
        for name, values in answers.items()
    )
    levels = " and ".join(f"{x.shape[-2]} x {x.shape[-1]}" for x in places.maps)
    return [
        Probe("answers", worst, f"{', '.join(answers)} from places {levels} at {model.cells}"),
        _aimed(model, images[:1], tolerance),
        _near(model, images[:1], generator),
    ]


def _aimed(model: DenseModel, image: Tensor, tolerance: float) -> Probe:
    aim = model.aim(image)
    row = aim.model.question.read(model.outputs(image))
    got = aim.model.run_from(model.cells, aim.model.run_to(model.cells, image))
    return compare("aimed", aim.name, got, row, tolerance, f"{aim.name}: {row.shape[-1]} answers")


def _near(model: DenseModel, image: Tensor, generator: torch.Generator) -> Probe:
    grid, (high, wide) = model.layout.grid, model.patch
    before, probes = model.run_to(model.cells, image).maps, probe_places(grid, generator)
    moved = []
    for r, c in probes:
        changed = image.clone()
        changed[:, :, r * high : (r + 1) * high, c * wide : (c + 1) * wide] += 1
        after = model.run_to(model.cells, changed).maps
        levels = [_moved(*both, grid) for both in zip(after, before, strict=True)]
        moved.append(torch.stack(levels).sum(dim=0))
    # places that every change moves tell nothing about where it was
    share = torch.stack(moved) / torch.stack(moved).sum(dim=0).clamp_min(1e-30)
    most = [divmod(int(cells.argmax()), grid[1]) for cells in share]
    far = [
        (place, other)
        for place, other in zip(probes, most, strict=True)
        if abs(place[0] - other[0]) > max(1, grid[0] // 3)
        or abs(place[1] - other[1]) > max(1, grid[1] // 3)
    ]
    if len(far) > FAR * len(probes):
        (r, c), (row, column) = far[0]
        raise ViewMismatch(
            "places",
            model.cells,
            f"{len(far)} of {len(probes)} changes moved places far from them; pixels of cell"
            f" ({r}, {c}) most those at cell ({row}, {column})",
        )
    return Probe(
        "places",
        len(far) / len(probes),
        f"{grid[0]} x {grid[1]} cells of {high} x {wide} pixels; the share of {len(probes)} changes"
        " that moved places far from them most",
    )


def _moved(after: Tensor, before: Tensor, grid: tuple[int, int]) -> Tensor:
    """How far features [1, C, h, w] moved, by cell [gh, gw]; every level counts alike."""
    distance = (after - before).double().abs().sum(dim=1, keepdim=True)
    cells = F.interpolate(distance, size=grid, mode="area")[0, 0]
    return cells / cells.sum().clamp_min(1e-30)
