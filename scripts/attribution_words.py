"""What the numbers of the attribution study say, by rules that are stated with each sentence. "Clearly" is by more than two standard errors of the
paired difference everywhere."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.tables import REFERENCE, Values, clearly_better
from seecause.bench.ablate import Agreement
from seecause.bench.measures import higher_is_better
from seecause.bench.table import Cell, Table
from seecause.metrics import paired_difference

CONTROLS = ("random", "center", "sobel")
Tables = Mapping[tuple[str, str], Table]  # by set and target


def standing(tables: Tables) -> str:
    """CAAP's place in every column of every table."""
    lines = ["| photos, target (how many) | metric | CAAP | place | best | clearly better than CAAP | clearly worse |", "|---|---|---|---|---|---|---|"]
    for (name, target), table in tables.items():
        for metric in table.metrics:
            mine, order = table.cells[REFERENCE][metric], ranked(table, metric)
            if not mine.n or not order:
                continue
            better, worse = clearly_better(table, metric), clearly_better(table, metric, than_reference=False)
            place = f"{order.index(REFERENCE) + 1} of {len(order)}"
            best = f"{order[0]}, {_cell(table.cells[order[0]][metric])}"
            lines.append(f"| {name}, {target} ({mine.n}) | {metric} | {_cell(mine)} | {place} | {best} | {', '.join(better) or 'none'} | {len(worse)} |")
    return "Place among the methods that saw all photos, the best first; methods with * saw fewer and have no place.\n\n" + "\n".join(lines) + "\n"


def conclusions(
    tables: Tables, found: Mapping[tuple[str, str], Values], ablations: Mapping[str, Table], alike: Mapping[str, Agreement], sane: Table | None
) -> str:
    """The paper's claims on this model, and what to use. "Clearly": by more than two standard errors of the paired difference."""
    lines = [
        '"Clearly" is by more than two standard errors of the paired difference; "held" means that no method is clearly better than CAAP.\n',
        *(_claim(table, name, "ins-del", "CAAP is the most faithful") for (name, target), table in tables.items() if target == "label"),
        *(
            _claim(table, name, metric, what)
            for (name, target), table in tables.items()
            if target == "label"
            for metric, what in _PLACE.items()
            if metric in table.metrics
        ),
        *(_settings(study, ablations[study], alike[study]) for study in ablations if ablations[study].cells[ablations[study].reference]["ins-del"].n),
        *_sane(sane),
        *(
            _no_better(found[key], key[0], metric)
            for key in found
            if key[1] == "label" and found[key]
            for metric in ("ins-del", "aupr1")
            if metric in tables[key].metrics
        ),
        *_advice(tables),
    ]
    return "\n".join(line for line in lines if line) + "\n"


_PLACE = {"aupr1": "CAAP finds the object best (AUPR_1)", "pointing": "CAAP points at the object best (pointing game)"}


def ranked(table: Table, metric: str) -> list[str]:
    """Methods that saw all photos, the best mean first; those without a value are left out."""
    known = {m: table.cells[m][metric].mean for m in table.methods if not m.endswith("*") and table.cells[m][metric].n}
    return sorted(known, key=lambda m: known[m], reverse=higher_is_better(metric))


def _claim(table: Table, name: str, metric: str, what: str) -> str:
    if not table.cells[REFERENCE][metric].n:
        return f"- *{what}*, {name}: not measured yet."
    better, order = clearly_better(table, metric), ranked(table, metric)
    verdict = "held" if not better else f"did not hold: {', '.join(better)} {'is' if len(better) == 1 else 'are'} clearly better"
    return f"- *{what}*, {name}: {verdict}. CAAP has place {order.index(REFERENCE) + 1} of {len(order)} ({metric} {_cell(table.cells[REFERENCE][metric])})."


def _settings(study: str, table: Table, alike: Agreement) -> str:
    gaps = {m: table.cells[m]["ins-del"].difference for m in table.methods if m != table.reference}
    clear = [m for m, gap in gaps.items() if gap is not None and gap.n and abs(gap.mean) > 2 * gap.standard_error]
    known = {m: gap.mean for m, gap in gaps.items() if gap is not None and gap.n}
    if not known or not alike.images:
        return ""
    far = max(known, key=lambda m: abs(known[m]))
    least = min(((float(alike.mean[0, place]), other) for place, other in enumerate(alike.names) if place), default=(1.0, ""))
    return (
        f"- *Setting {study}*: {len(clear)} of {len(known)} others than {table.reference} change Ins-Del clearly; "
        f"the largest change is that of {far} ({known[far]:+.3f}); "
        f"the maps agree with the default's at a rank correlation of at least {least[0]:.3f} ({least[1]})."
    )


def _sane(table: Table | None) -> list[str]:
    if table is None or not table.cells[REFERENCE]["mprt"].n:
        return []
    high = [m for m in table.methods if m not in CONTROLS and table.cells[m]["mprt"].n and table.cells[m]["mprt"].mean > 0.5]
    mine = ", ".join(f"{metric} {_cell(table.cells[REFERENCE][metric])}" for metric in ("mprt", "random-logit"))
    return [f"- *Sanity checks*: CAAP {mine}. Maps that stay alike (mprt above 0.5) when the model is randomised: {', '.join(high) or 'none'}."]


def _no_better(values: Values, name: str, metric: str) -> str:
    """Methods that do not beat every control clearly."""
    sign = 1 if higher_is_better(metric) else -1
    controls = [c for c in CONTROLS if c in values]
    weak = []
    for method, columns in values.items():
        gaps = [paired_difference(columns[metric], values[c][metric]) for c in controls if c != method]
        if method not in CONTROLS and any(gap.n and sign * gap.mean <= 2 * gap.standard_error for gap in gaps):
            weak.append(method)
    return f"- *Not clearly better than every control* ({', '.join(controls)}) in {metric}, {name}: {', '.join(weak) or 'none'}." if controls else ""


def _advice(tables: Tables) -> list[str]:
    """The best means among methods that saw all photos."""
    lines = []
    for metric, use in (("ins-del", "To see what the answer depends on"), ("aupr1", "To find the object")):
        best = [
            (name, order[0]) for (name, target), table in tables.items() if target == "label" and metric in table.metrics and (order := ranked(table, metric))
        ]
        if best:
            lines.append(f"- *{use}* (best mean {metric}): " + "; ".join(f"{method} on {name}" for name, method in best) + ".")
    return lines


def _cell(cell: Cell) -> str:
    return f"{cell.mean:.3f} ± {cell.error:.3f}"
