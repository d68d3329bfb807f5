"""Tables of the attribution study. A table is made of complete parts only, so its methods saw the
same photos; the expensive methods, of parts of their own, come in when they are done."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from scripts import tables as shared
from scripts.attribution_parts import PIXELS, Done, Photoset
from scripts.attribution_patches import Patched
from scripts.tables import REFERENCE, Values, over, starred
from seecause.bench.measures import UNDEFINED, group_of, higher_is_better
from seecause.bench.tables import Cell, Table, table_of

BESIDE = (
    "random",
    "center",
)  # controls that stand in every table and picture; sobel in those of all methods
PIXEL_MARK = " †"
ON_PIXELS, ON_PATCHES = ", pixels", ", patches"  # after the name of a method that is scored twice
FLAT = {
    "parameter-randomisation": "a model with redrawn weights",
    "random-logit": "another class",
}  # whose map a map is compared with, by ranks
By = Mapping[str, Done]  # parts by name


def merged(photos: Photoset, target: str, by: By) -> Values:
    """Values of all methods over all photos of a set; nothing while the part of the many methods is
    not complete.

    For the predicted class the values of the label are taken where it is what the model answers.
    """
    found: Values = {}
    for few in ("", "-few"):
        values = _whole(photos.names, by.get(f"{photos.name}-label{few}"))
        if target == "predicted" and (other := by.get(f"{photos.name}-predicted{few}")) is not None:
            values = where(photos.predicted != photos.labels, _whole(photos.names, other), values)
        if not few and (
            REFERENCE not in values
            or not all(_ended(by.get(f"{photos.name}-{kind}")) for kind in {"label", target})
        ):
            return {}
        found |= {starred(method): columns for method, columns in values.items()}
    return found


def sanity(by: By) -> Table | None:
    """The checks of all methods that are done; those of the expensive ones over fewer photos."""
    first = by.get("sanity")
    if first is None or not _ended(first):
        return None
    found = {
        m: v
        for name in ("sanity", "sanity-few")
        for m, v in _whole(first.plan.samples, by.get(name)).items()
    }
    return (
        table_of({starred(method): columns for method, columns in found.items()}, unranked=fewer())
        if REFERENCE in found
        else None
    )


def on_patches(
    photos: Photoset, values: Values, by: By, patches: Mapping[str, Patched]
) -> Table | None:
    """CAAP, two controls, and each method that explains pixels twice: as in the table, and on
    patches. Metrics that are not taken on patches yet are left out."""
    found: Values = {REFERENCE: values[REFERENCE]} | {
        control: values[control] for control in BESIDE if control in values
    }
    for part in (f"{photos.name}-label", f"{photos.name}-label-few"):
        if part in by and part in patches:
            for method, columns in patches[part].values.items():
                if starred(method) in values:
                    found[starred(method) + ON_PIXELS] = values[starred(method)]
                    found[starred(method) + ON_PATCHES] = {
                        k: among(photos.names, by[part].plan.samples, v) for k, v in columns.items()
                    }
    twice = any(m.endswith(ON_PATCHES) for m in found)
    metrics = [k for k in values[REFERENCE] if all(k in columns for columns in found.values())]
    return (
        table_of(
            {m: {k: columns[k] for k in metrics} for m, columns in found.items()},
            unranked=list(found),
        )
        if twice and metrics
        else None
    )


def beside_controls(settings: Done, photos: Photoset, values: Values) -> Table:
    """Settings of CAAP, and two controls on the same photos, which are never the best."""
    names, found = settings.plan.samples, over(settings.plan.samples, settings.store, settings.plan)
    places = torch.tensor([photos.names.index(name) for name in names])
    controls = {
        m: {k: values[m][k][places] for k in settings.plan.request.metrics}
        for m in BESIDE
        if m in values
    }
    return table_of(found | controls, unranked=list(controls))


def fewer() -> list[str]:
    return [starred(method) for method in shared.EXPENSIVE]


def plain(method: str) -> str:
    """The method behind a name in a table."""
    return method.removesuffix(" *")


def missing(asked: Iterable[str], table: Table | None) -> list[str]:
    """The methods of a study that have no value in a table."""
    known = (
        set()
        if table is None
        else {plain(m) for m in table.methods if any(cell.n for cell in table.cells[m].values())}
    )
    return [method for method in asked if method not in known]


def marked(table: Table) -> Table:
    """The same, with a mark at methods whose maps of pixels were scored."""
    names = {m: m + PIXEL_MARK * (plain(m) in PIXELS) for m in table.methods}
    return replace(
        table,
        methods=list(names.values()),
        cells={names[m]: cells for m, cells in table.cells.items()},
    )


def counted(table: Table) -> str:
    """Mean, standard error and how many photos, cell by cell; nothing is best."""
    arrows = [f"{metric} {'↑' if higher_is_better(metric) else '↓'}" for metric in table.metrics]
    lines = ["| method | " + " | ".join(arrows) + " |", "|---|" + "---|" * len(arrows)]
    lines += [
        f"| {m} | " + " | ".join(_counted(table.cells[m][k]) for k in table.metrics) + " |"
        for m in table.methods
    ]
    return "\n".join(lines) + "\n"


def cell_text(cell: Cell) -> str:
    """0.603 ± 0.017; a dash for an error that one photo does not have."""
    return f"{cell.mean:.3f} ± {'-' if cell.error != cell.error else format(cell.error, '.3f')}"


def costs(done: Sequence[Done]) -> dict[str, tuple[float, int]]:
    """Milliseconds for one map, the median over shards, and how many shards, the cheapest first.
    The first shard of a process pays for starting: left out."""
    begun: dict[int, tuple[float, str]] = {}
    for one in done:
        for event in one.store.events():
            if event["event"] == "start":
                begun[event["process"]] = min(
                    begun.get(event["process"], (float("inf"), "")), (event["time"], event["shard"])
                )
    first, spent = {shard for _, shard in begun.values()}, {}
    for one in done:
        for shard in one.store.finished(one.plan):
            said = one.store.metadata(shard.id)
            if shard.id not in first and said["images"]:
                spent.setdefault(shard.method, []).append(
                    1000 * said["seconds"].get("attribute", 0.0) / said["images"]
                )
    found = {method: (statistics.median(each), len(each)) for method, each in spent.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def where(chosen: Tensor, these: Values, others: Values) -> Values:
    """`these` values at the chosen photos and `others` elsewhere, of methods that have both."""
    return {
        m: {k: torch.where(chosen, these[m][k], v) for k, v in columns.items()}
        for m, columns in others.items()
        if m in these
    }


def among(names: Sequence[str], samples: Sequence[str], values: Tensor) -> Tensor:
    """Values of some photos among all that are called `names`."""
    places = {name: place for place, name in enumerate(names)}
    whole = torch.full((len(names),), torch.nan, dtype=torch.float64)
    return whole.index_copy(0, torch.tensor([places[name] for name in samples]), values)


def undefined(done: Sequence[Done]) -> list[str]:
    """Values that no run can fill in, by metric and method, and why; nothing if there are none."""
    counts: dict[str, Counter[str]] = {}
    flat: Counter[str] = Counter()  # of them, those whose own map is constant
    for one in done:
        maps = one.store.maps(one.plan)
        for row in (
            one.store.rows(one.plan).select(["method", "metric", "index", "reason"]).to_pylist()
        ):
            if row["reason"] == UNDEFINED:
                counts.setdefault(row["metric"], Counter())[row["method"]] += 1
                own = maps[row["method"]].get(row["index"])
                flat[row["metric"]] += own is not None and bool((own == own.flatten()[0]).all())
    lines = [
        f"- {metric}: {found.total()} values are not"
        f" defined{_why(metric, found.total(), flat[metric])}: "
        + ", ".join(f"{method} {count}" for method, count in found.most_common())
        for metric, found in counts.items()
    ]
    return ["## Not defined\n", "\n".join(lines) + "\n"] if lines else []


def _why(metric: str, count: int, flat: int) -> str:
    """A correlation of ranks is not defined where a map is flat: the one that is checked, or, where
    that is not, the one it is compared with."""
    other = FLAT.get(group_of(metric))
    if other is None:
        return " (the picture does not ask the question)"
    own = f"the map itself in {flat}, " * bool(flat)
    return f" (a flat map has no ranks; flat is {own}the map of {other} in {count - flat})"


def _counted(cell: Cell) -> str:
    return f"{cell_text(cell)} ({cell.n})" if cell.n else "no value"


def _ended(part: Done | None) -> bool:
    """Whether nothing is waiting: a shard that failed is not waiting."""
    return part is None or not part.status.pending


def _whole(names: Sequence[str], part: Done | None) -> Values:
    """Values of the methods that were finished."""
    if part is None:
        return {}
    values = over(names, part.store, part.plan)
    return {method: values[method] for method in part.finished()}
