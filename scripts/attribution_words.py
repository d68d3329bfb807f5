"""What the numbers of the attribution study say, by rules that are stated with each sentence. "Clearly" is by more than two standard errors of the
paired difference over ten photos or more, everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts.attribution_parts import PIXELS
from scripts.attribution_tables import ON_PATCHES, ON_PIXELS, cell_text, missing, plain
from scripts.tables import REFERENCE, Values
from seecause.bench.ablate import Agreement
from seecause.bench.measures import higher_is_better
from seecause.bench.plan import Request
from seecause.bench.table import Table
from seecause.metrics import Summary, paired_difference

CONTROLS = ("random", "center", "sobel")
ENOUGH = 10  # photos, for a difference to be called clear
CHANCE = 0.0455  # of a normal variable beyond two standard errors, either way
ALIKE = 0.5  # rank correlation of maps that stay alike
Tables = Mapping[tuple[str, str], Table]  # by set and target


def standing(tables: Tables) -> str:
    """CAAP's place in every column of every table."""
    head = ["photos, target (how many)", "metric", "CAAP", "place", "best", "clearly better than CAAP", "clearly worse", "on fewer photos, less CAAP"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (name, target), table in tables.items():
        for metric in table.metrics:
            mine, order = table.cells[REFERENCE][metric], ranked(table, metric)
            if not mine.n or not order:
                continue
            worse = [m for m in clearly_better(table, metric, than_reference=False) if m in order]
            cells = [
                f"{name}, {target} ({mine.n})",
                metric,
                cell_text(mine),
                f"{order.index(REFERENCE) + 1} of {len(order)}",
                f"{order[0]}, {cell_text(table.cells[order[0]][metric])}",
                ", ".join(clearly_better(table, metric)) or "none",
                str(len(worse)),
                _beside(table, metric) or "no value",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    said = (
        "Place among the methods that saw all photos, the best mean first; the controls (random, center, sobel) are not counted, and *clearly worse* counts "
        "the same methods. Methods with * saw fewer photos and have no place: they are listed beside.\n\n"
    )
    return said + "\n".join(lines) + "\n"


def conclusions(
    tables: Tables,
    found: Mapping[tuple[str, str], Values],
    ablations: Mapping[str, Table],
    alike: Mapping[str, Agreement],
    coarse: Mapping[str, Table | None],
    sane: Table | None,
    asked: Sequence[str],
    request: Request,
) -> str:
    """The paper's claims on this model, and what to use."""
    label = {name: table for (name, target), table in tables.items() if target == "label"}
    lines = [
        _rule(tables),
        *(_claim(table, name, "ins-del", "CAAP is the most faithful") for name, table in label.items()),
        *(_claim(table, name, metric, what) for name, table in label.items() for metric, what in _PLACE.items() if metric in table.metrics),
        *(_coarser(name, table, metric) for name, table in coarse.items() if table is not None for metric in ("ins-del", "aupr1") if metric in table.metrics),
        *(_settings(study, ablations[study], alike[study]) for study in ablations),
        *_sane(sane, asked),
        *(_no_better(found[name, "label"], name, metric) for name, table in label.items() for metric in ("ins-del", "aupr1") if metric in table.metrics),
        *_advice(label, request),
    ]
    return "\n".join(line for line in lines if line) + "\n"


_PLACE = {"aupr1": "CAAP finds the object best (AUPR_1)", "pointing": "CAAP points at the object best (pointing game)"}


def ranked(table: Table, metric: str) -> list[str]:
    """Methods that saw all photos, the best mean first; controls and those without a value are left out."""
    known = {m: table.cells[m][metric].mean for m in table.methods if not m.endswith("*") and m not in CONTROLS and table.cells[m][metric].n}
    return sorted(known, key=lambda m: known[m], reverse=higher_is_better(metric))


def clear(gap: Summary | None, sign: int) -> bool:
    """Whether a paired difference is clearly on the side of `sign`."""
    return gap is not None and gap.n >= ENOUGH and sign * gap.mean > 2 * gap.standard_error


def clearly_better(table: Table, metric: str, *, than_reference: bool = True) -> list[str]:
    """The methods that are clearly better than the reference, or clearly worse."""
    sign = (1 if higher_is_better(metric) else -1) * (1 if than_reference else -1)
    return [m for m in table.methods if clear(table.cells[m][metric].difference, sign)]


def losses(table: Table) -> str:
    """Which methods beat the reference clearly, metric by metric."""
    lines = [f"Methods clearly better than {table.reference}:\n"]
    lines += [f"- {metric}: {', '.join(clearly_better(table, metric)) or 'none'}" for metric in table.metrics]
    return "\n".join(lines) + "\n"


def _rule(tables: Tables) -> str:
    compared = sum(cell.difference is not None and cell.n > 0 for table in tables.values() for row in table.cells.values() for cell in row.values())
    return (
        f'"Clearly" is by more than two standard errors of the paired difference, over {ENOUGH} photos or more. Among the {compared} comparisons with CAAP '
        f"on this page about {CHANCE * compared:.0f} would be clear by chance if no method differed from it. "
        '"Held": CAAP is first and no method is clearly better; "not contradicted": another is first, and none is clearly better.\n'
    )


def _claim(table: Table, name: str, metric: str, what: str) -> str:
    better, order = clearly_better(table, metric), ranked(table, metric)
    place = order.index(REFERENCE) + 1
    verdict = "held" if place == 1 else f"not contradicted ({order[0]} has the best mean, and no method is clearly better)"
    if better:
        verdict = f"did not hold: {', '.join(better)} {'is' if len(better) == 1 else 'are'} clearly better"
    beside = _beside(table, metric)
    return (
        f"- *{what}*, {name}: {verdict}. CAAP has place {place} of {len(order)} methods ({metric} {cell_text(table.cells[REFERENCE][metric])})."
        + f" Beside them, on fewer photos, less CAAP: {beside}." * bool(beside)
    )


def _beside(table: Table, metric: str) -> str:
    """The methods that saw fewer photos: their paired difference from CAAP."""
    gaps = {m: table.cells[m][metric].difference for m in table.methods if m.endswith("*")}
    return ", ".join(f"{m} {gap.mean:+.3f} (n {gap.n})" for m, gap in gaps.items() if gap is not None and gap.n)


def _coarser(name: str, table: Table, metric: str) -> str:
    """What becomes of methods that explain pixels when they are scored on patches."""
    twice = [m.removesuffix(ON_PATCHES) for m in table.methods if m.endswith(ON_PATCHES)]
    means = [f"{m} {table.cells[m + ON_PIXELS][metric].mean:.3f} → {table.cells[m + ON_PATCHES][metric].mean:.3f}" for m in twice]
    better = [m.removesuffix(ON_PATCHES) for m in clearly_better(table, metric) if m.endswith(ON_PATCHES)]
    return f"- *Scored on patches instead of pixels*, {name}, {metric}: {', '.join(means)}. Clearly better than CAAP then: {', '.join(better) or 'none'}."


def _settings(study: str, table: Table, alike: Agreement) -> str:
    gaps = {m: table.cells[m]["ins-del"].difference for m in table.methods if m != table.reference}
    known = {m: gap for m, gap in gaps.items() if gap is not None and gap.n}
    if not known or not alike.images:
        return ""
    many = [m for m, gap in known.items() if clear(gap, 1) or clear(gap, -1)]
    far = max(known, key=lambda m: abs(known[m].mean))
    least = min(((float(alike.mean[0, place]), other) for place, other in enumerate(alike.names) if place), default=(1.0, ""))
    return (
        f"- *Setting {study}*: {len(many)} of {len(known)} others than {table.reference} change Ins-Del clearly; "
        f"the largest change is that of {far} ({known[far].mean:+.3f}); "
        f"the maps agree with the default's at a rank correlation of at least {least[0]:.3f} ({least[1]})."
    )


def _sane(table: Table | None, asked: Sequence[str]) -> list[str]:
    if table is None or not table.cells[REFERENCE]["mprt"].n:
        return []
    means = {m: table.cells[m]["mprt"].mean for m in table.methods if m not in CONTROLS and table.cells[m]["mprt"].n}
    high = [f"{m} {mean:.3f}" for m, mean in means.items() if mean > ALIKE]
    top = max(means, key=lambda m: means[m])
    mine = ", ".join(f"{metric} {cell_text(table.cells[REFERENCE][metric])}" for metric in ("mprt", "random-logit"))
    left = missing(asked, table)
    return [
        f"- *Sanity checks*: CAAP {mine}. Maps that stay alike (mprt above {ALIKE}) when the model is randomised: "
        + (", ".join(high) if high else f"none of {len(means)}; the highest is {top} with {means[top]:.3f}")
        + (f". Not checked yet: {', '.join(left)}." if left else ".")
    ]


def _no_better(values: Values, name: str, metric: str) -> str:
    """Methods that do not beat every control clearly."""
    sign = 1 if higher_is_better(metric) else -1
    controls = [c for c in CONTROLS if c in values]
    weak = [
        method
        for method, columns in values.items()
        if method not in CONTROLS and not all(clear(paired_difference(columns[metric], values[c][metric]), sign) for c in controls)
    ]
    return f"- *Not clearly better than every control* ({', '.join(controls)}) in {metric}, {name}: {', '.join(weak) or 'none'}." if controls else ""


def _advice(tables: Mapping[str, Table], request: Request) -> list[str]:
    """The best means among methods that saw all photos, and among those of them that are scored on patches."""
    lines = []
    for metric, use in (("ins-del", "To see what the answer depends on"), ("aupr1", "To find the object")):
        best = {name: order for name, table in tables.items() if metric in table.metrics and (order := ranked(table, metric))}
        if best:
            first = "; ".join(f"{order[0]} on {name}" for name, order in best.items())
            coarse = "; ".join(f"{next(m for m in order if plain(m) not in PIXELS)} on {name}" for name, order in best.items())
            lines.append(f"- *{use}* (best mean {metric}): {first}." + f" Of the methods that are scored on patches: {coarse}." * (coarse != first))
            if metric == "ins-del" and any(order[0] == "integrated-gradients" for order in best.values()):
                lines[-1] += _matched(request)
    return lines


def _matched(request: Request) -> str:
    """A caveat where integrated gradients starts from the very picture that deletion ends at: the mean colour, 0 in normalised units."""
    same = request.methods.get("integrated-gradients", {}).get("baseline") == "mean" and request.measures["insertion-deletion"]["fill"] == 0
    said = " The baseline of integrated-gradients is the mean colour, which deletion fills in too, so deletion rewards the match; and it is scored on pixels."
    return said if same else ""
