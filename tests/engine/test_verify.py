"""What the probes of the verified wrap measure, and where each of them draws the line."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine import verify as probes
from seecause.engine.verify import Probe, compare
from seecause.errors import ViewMismatch
from seecause.models.block import TokenLayout

CELL = (2, 3)  # pixels of a cell
Places = list[tuple[int, int]]


def cells_of(image: Tensor) -> Tensor:
    """The mean of each cell, [B, 1, rows, columns]."""
    return F.avg_pool2d(image.mean(dim=1, keepdim=True), CELL)


def picture(grid: tuple[int, int]) -> Tensor:
    return torch.zeros(1, 3, grid[0] * CELL[0], grid[1] * CELL[1], dtype=torch.float64)


def moving(grid: tuple[int, int], rows: dict[int, int], columns: dict[int, int]):
    """Features of a cell appear in another row and column; a cell that is not named stays."""
    row = torch.tensor([rows.get(r, r) for r in range(grid[0])])
    column = torch.tensor([columns.get(c, c) for c in range(grid[1])])

    def features(image: Tensor) -> Tensor:
        cells = cells_of(image)
        moved = torch.zeros_like(cells).index_add(2, row, cells)
        return torch.zeros_like(cells).index_add(3, column, moved)

    return features


def test_a_difference_is_relative_to_the_largest_native_value():
    native, mine = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -4.4])
    probe = compare("blocks", "blocks.1", mine, native, 0.11, "two numbers")
    assert probe == Probe("blocks", pytest.approx(0.1), "two numbers")
    with pytest.raises(ViewMismatch, match=r"relative difference 0\.1, at most 0\.09 expected"):
        compare("blocks", "blocks.1", mine, native, 0.09)
    with pytest.raises(ViewMismatch, match=r"shape \[2\], native \[1, 2\]"):
        compare("blocks", "blocks.1", mine, native[None], 1.0)


@pytest.fixture
def places(monkeypatch):
    """Where the probes look."""

    def at(chosen: Places) -> None:
        monkeypatch.setattr(probes, "probe_places", lambda grid, generator, **more: chosen)

    return at


def near(grid: tuple[int, int], features, probe: str = "locality", large=None) -> Probe:
    """The probe of feature maps; those of `places` have a second, finer level, or one with other
    features that are a thousand times larger."""

    def levels(image: Tensor) -> list[Tensor]:
        maps = features(image)
        if probe == "locality":
            return [maps]
        if large is not None:
            return [maps, maps, 1000 * large(image)]
        maps[:, :, 0, 1] += 50 * image.sum()  # a place that every change moves
        return [maps, F.interpolate(maps, scale_factor=2) / 1000]  # levels count alike

    layout = TokenLayout(grid=grid, prefix=0)
    model = SimpleNamespace(layout=layout, patch=CELL, cells="stage2", dtype=torch.float64)
    return probes._feature_locality(model, picture(grid), torch.Generator(), levels, probe)


GRID = (12, 9)  # a third of it: four rows, three columns
ROWS = [(r, c) for r in range(6) for c in (0, 4)]
COLUMNS = [(r, c) for r in (0, 7) for c in range(5)]


@pytest.mark.parametrize(("axis", "name", "most"), [(0, "row", 4), (1, "column", 3)])
@pytest.mark.parametrize("sign", [1, -1])
def test_cells_may_be_a_third_of_the_side_away_and_no_more(places, axis, name, most, sign):
    side = GRID[axis]
    chosen = ROWS if axis == 0 else COLUMNS
    if sign < 0:
        chosen = [tuple(n - 1 - i for i, n in zip(p, GRID, strict=True)) for p in chosen]
    places(chosen)
    for by, refused in ((most, False), (most + 1, True)):
        to = {i: min(max(i + sign * by, 0), side - 1) for i in range(side)}
        features = moving(GRID, to if axis == 0 else {}, to if axis else {})
        if not refused:
            assert near(GRID, features).worst == pytest.approx(0)
            continue
        words = rf"the {name} where .* correlation of 1\.00 .* is \{'+-'[sign < 0]}{by}\.0 off"
        with pytest.raises(ViewMismatch, match=words) as refusal:
            near(GRID, features)
        assert (refusal.value.probe, refusal.value.where) == ("locality", "stage2")


@pytest.mark.parametrize(
    ("order", "correlation"), [([2, 1, 0, 5, 4, 3], 0.54), ([0, 4, 2, 3, 1, 5], 0.49)]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_and_columns_must_go_with_those_of_the_pixels(places, order, correlation, axis):
    places([(i, i) for i in range(6)])
    to = dict(enumerate(order))
    features = moving((9, 12), to if axis == 0 else {}, to if axis else {})
    if correlation > 0.5:
        near((9, 12), features)
        return
    with pytest.raises(ViewMismatch, match=f"correlation of {correlation}"):
        near((9, 12), features)


def test_levels_count_alike_and_what_every_change_moves_does_not(places):
    places([(r, c) for r in (1, 4, 7, 10) for c in (1, 4, 7)])
    probe = near(GRID, moving(GRID, {}, {}), "places")
    assert probe.worst < 0.2
    assert probe.compared.startswith("12 x 9 cells of 2 x 3 pixels at stage2; 1 - correlation")
    mirrored = {i: GRID[1] - 1 - i for i in range(GRID[1])}
    with pytest.raises(ViewMismatch, match="the column where features move") as refusal:
        near(GRID, moving(GRID, {}, mirrored), "places")
    assert refusal.value.probe == "places"
    minority = moving(GRID, {}, mirrored)
    assert near(GRID, moving(GRID, {}, {}), "places", large=minority).worst < 0.5
