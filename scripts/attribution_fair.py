"""Two tables that give other methods their best chance to find the object: signed maps without
their signs, and all maps smoothed as CAAP's are.

All maps are of patches here, those of methods that explain pixels too.
"""

from __future__ import annotations

from collections.abc import Mapping

from scripts.attribution_changed import ABSOLUTE, ALONE, PATCHES, PLACE, SMOOTHED, WITHOUT
from scripts.attribution_parts import PIXELS, Photoset
from scripts.attribution_patches import Patched
from scripts.attribution_tables import By, among, cell_text, plain, where
from scripts.tables import REFERENCE, Values, gap, over, starred
from seecause.bench.tables import Table

CONTROLS = ("random", "center", f"sobel, {PATCHES}")


def on_equal_terms(
    photos: Photoset, target: str, values: Values, by: By, changed: Mapping[str, Patched]
) -> Values:
    """Localization of every map of patches, as it is and changed: `method` and `method, change`.
    Nothing where there are no masks."""
    if not set(PLACE) <= set(values.get(REFERENCE, ())):
        return {}
    found = {
        m: {k: columns[k] for k in PLACE} for m, columns in values.items() if plain(m) not in PIXELS
    }
    for few in ("", "-few"):
        again = _again(photos, f"{photos.name}-label{few}", by, changed)
        if target == "predicted" and f"{photos.name}-predicted{few}" in by:
            again = where(
                photos.predicted != photos.labels,
                _again(photos, f"{photos.name}-predicted{few}", by, changed),
                again,
            )
        found |= again
    alone = by.get("ablate-select")
    if target == "label" and alone is not None and ALONE in alone.finished():
        found[WITHOUT] = {k: over(photos.names, alone.store, alone.plan)[ALONE][k] for k in PLACE}
        found |= {
            name.replace(ALONE, WITHOUT, 1): columns
            for name, columns in _again(photos, "ablate-select", by, changed).items()
        }
    return found


def before(table: Table, name: str) -> str:
    """The row of the map that was changed last: `rise *, absolute, smoothed` was `rise *,
    absolute`, and `rise *, absolute` was `rise *, patches`."""
    rest = name.rpartition(", ")[0]
    return rest if rest in table.cells else f"{rest}, {PATCHES}"


def changed_rows(table: Table, change: str) -> list[str]:
    """Rows whose last change is this, the best AUPR_1 first."""
    return sorted(
        (m for m in table.methods if m.endswith(f", {change}")),
        key=lambda m: -table.cells[m]["aupr1"].mean,
    )


def signs_section(table: Table) -> list[str]:
    rows = changed_rows(table, ABSOLUTE)
    lines = [
        (
            "| method | aupr1 ↑, signed | absolute | absolute less CAAP | pointing ↑, signed |"
            " absolute | absolute less CAAP |"
        ),
        "|---|---|---|---|---|---|---|",
        f"| {REFERENCE} | "
        + " | ".join(
            f"{cell_text(table.cells[REFERENCE][k])} | no signs | -" for k in ("aupr1", "pointing")
        )
        + " |",
    ]
    for name in rows:
        cells = [
            (table.cells[before(table, name)][k], table.cells[name][k])
            for k in ("aupr1", "pointing")
        ]
        lines.append(
            f"| {before(table, name)} | "
            + " | ".join(
                f"{cell_text(old)} | {cell_text(new)} | {gap(new.difference)}" for old, new in cells
            )
            + " |"
        )
    for name in CONTROLS:
        if name in table.cells:
            cells = [table.cells[name][k] for k in ("aupr1", "pointing")]
            lines.append(
                f"| {name} | "
                + " | ".join(
                    f"{cell_text(cell)} | no signs | {gap(cell.difference)}" for cell in cells
                )
                + " |"
            )
    return [
        "## Signed or absolute?\n",
        (
            "AUPR ranks signed values: patches that speak against the class come last, after"
            " patches that do not matter, so a method that finds the animal but holds a part of it"
            " against the class is marked down. Here are the maps of methods with both signs (in"
            " half of their maps or more) as they are and without signs (the size of each value),"
            " target = the given label; the controls, which have no signs, as they are. All maps"
            " are of patches; those of pixels are summed by patch first, so signs within a patch"
            " have cancelled. *Less CAAP* is image by image, with how many standard errors that"
            " is.\n"
        ),
        "\n".join(lines) + "\n",
    ]


def smoothing_section(table: Table) -> list[str]:
    lines = ["| method | aupr1 ↑ | smoothed | smoothed less CAAP |", "|---|---|---|---|"]
    for name in changed_rows(table, SMOOTHED):
        old, new = table.cells[before(table, name)]["aupr1"], table.cells[name]["aupr1"]
        lines.append(
            f"| {before(table, name)} | {cell_text(old)} | {cell_text(new)} |"
            f" {gap(new.difference)} |"
        )
    return [
        "## Is it the smoothing?\n",
        (
            "CAAP moves a patch together with its eight neighbours (box1), which smooths its maps,"
            " and smooth maps find large objects. Here every map of patches is replaced by the"
            " mean over the same neighbours, target = the given label, and compared with CAAP as"
            f" it is; the best first, controls among them. *{WITHOUT}* is CAAP with select none:"
            " smoothed it shows what box1 would be if it were smoothing alone.\n"
        ),
        "\n".join(lines) + "\n",
    ]


def _again(photos: Photoset, part: str, by: By, changed: Mapping[str, Patched]) -> Values:
    """Scores of changed maps of one part, over all photos of the set."""
    if part not in by or part not in changed:
        return {}
    found = changed[part].values.items()
    return {
        _starred(name): {
            k: among(photos.names, by[part].plan.samples, v) for k, v in columns.items()
        }
        for name, columns in found
    }


def _starred(name: str) -> str:
    method, _, change = name.partition(", ")
    return f"{starred(method)}, {change}"
