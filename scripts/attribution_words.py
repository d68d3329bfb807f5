"""What the numbers of the attribution study say, by rules that are stated with each sentence.
"Clearly" is by more than two standard errors of the paired difference over ten photos or more,
everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from scripts.attribution_changed import ABSOLUTE, PATCHES, SMOOTHED, WITHOUT
from scripts.attribution_parts import PIXELS
from scripts.attribution_tables import BESIDE, ON_PATCHES, ON_PIXELS, cell_text, missing, plain
from scripts.tables import REFERENCE, Values
from seecause.bench.ablate import Agreement
from seecause.bench.measures import higher_is_better
from seecause.bench.plan import Request
from seecause.bench.tables import Table
from seecause.metrics import Summary, paired_difference

CONTROLS = ("random", "center", "sobel")
ENOUGH = 10  # photos, for a difference to be called clear
CHANCE = 0.0455  # of a normal variable beyond two standard errors, either way
ALIKE = 0.5  # rank correlation of maps that stay alike
NAMED = 3  # settings of CAAP that are named for a metric
TARGETS = {"label": "the given label", "predicted": "the predicted class"}
Tables = Mapping[tuple[str, str], Table]  # by set and target


@dataclass(frozen=True)
class Findings:
    """Tables and values by set and target, and the studies of CAAP's settings. `changed` and
    `equal`: localization of maps of patches, as they are and changed."""

    tables: Tables
    values: Mapping[tuple[str, str], Values]
    changed: Mapping[tuple[str, str], Values]
    equal: Tables
    coarse: Mapping[str, Table | None]  # by set: maps of pixels on patches
    ablations: Mapping[str, Table]
    alike: Mapping[str, Agreement]
    sane: Table | None


def standing(tables: Tables) -> str:
    """CAAP's place in every column of every table."""
    head = [
        "photos, target (how many)",
        "metric",
        "CAAP",
        "place",
        "best",
        "clearly better than CAAP",
        "clearly worse",
        "on fewer photos, less CAAP",
        ", ".join(BESIDE),
    ]
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
                ", ".join(
                    f"{table.cells[m][metric].mean:.3f}" if m in table.cells else "no value"
                    for m in BESIDE
                ),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    said = (
        "Place among the methods that saw all photos, the best mean first; the controls (random,"
        " center, sobel) are not counted, and *clearly worse* counts the same methods. Methods with"
        " * saw fewer photos and have no place: they are listed beside.\n\n"
    )
    return said + "\n".join(lines) + "\n"


def conclusions(found: Findings, asked: Sequence[str], request: Request) -> str:
    """The paper's claims on this model, and what to use."""
    label = {name: table for (name, target), table in found.tables.items() if target == "label"}
    lines = [
        _rule(found.tables),
        *(
            _claim(t, key, metric, what, found.equal.get(key))
            for metric, what in _CLAIMS.items()
            for key, t in found.tables.items()
            if metric in t.metrics
        ),
        *(
            _coarser(name, t, metric)
            for name, t in found.coarse.items()
            if t is not None
            for metric in ("ins-del", "aupr1")
            if metric in t.metrics
        ),
        *(
            _smoothing(name, table)
            for (name, target), table in found.equal.items()
            if target == "label"
        ),
        *(_settings(study, table, found.alike[study]) for study, table in found.ablations.items()),
        *_sane(found.sane, asked),
        *(_no_better(found.values[name, "label"], name, "ins-del") for name in label),
        *(
            _no_better(found.values[name, "label"], name, "aupr1", found.changed[name, "label"])
            for name, t in label.items()
            if "aupr1" in t.metrics
        ),
        *_advice(label, request),
    ]
    return "\n".join(line for line in lines if line) + "\n"


_CLAIMS = {
    "ins-del": "CAAP is the most faithful",
    "aupr1": "CAAP finds the object best (AUPR_1)",
    "pointing": "CAAP points at the object best (pointing game)",
}


def ranked(table: Table, metric: str) -> list[str]:
    """Methods that saw all photos, the best mean first; controls and those without a value are left
    out."""
    known = {
        m: table.cells[m][metric].mean
        for m in table.methods
        if not m.endswith("*") and m not in CONTROLS and table.cells[m][metric].n
    }
    return sorted(known, key=lambda m: known[m], reverse=higher_is_better(metric))


def clear(gap: Summary | None, sign: int) -> bool:
    """Whether a paired difference is clearly on the side of `sign`."""
    return gap is not None and gap.n >= ENOUGH and sign * gap.mean > 2 * gap.standard_error


def clearly_better(table: Table, metric: str, *, than_reference: bool = True) -> list[str]:
    """The methods that are clearly better than the reference, or clearly worse."""
    sign = (1 if higher_is_better(metric) else -1) * (1 if than_reference else -1)
    return [m for m in table.methods if clear(table.cells[m][metric].difference, sign)]


def not_behind(table: Table, metric: str) -> list[str]:
    """The methods and controls that are not clearly worse than the reference."""
    behind = clearly_better(table, metric, than_reference=False)
    return [
        m
        for m in table.methods
        if m != table.reference and table.cells[m][metric].n and m not in behind
    ]


def losses(table: Table) -> str:
    """Which methods beat the reference clearly, metric by metric."""
    lines = [f"Methods clearly better than {table.reference}:\n"]
    lines += [
        f"- {metric}: {', '.join(clearly_better(table, metric)) or 'none'}"
        for metric in table.metrics
    ]
    return "\n".join(lines) + "\n"


def _rule(tables: Tables) -> str:
    compared = sum(
        cell.difference is not None and cell.n > 0
        for table in tables.values()
        for row in table.cells.values()
        for cell in row.values()
    )
    return (
        f'"Clearly" is by more than two standard errors of the paired difference, over {ENOUGH}'
        f" photos or more. Among the {compared} comparisons with CAAP in the tables of all methods"
        f" about {CHANCE * compared:.0f} would be clear by chance if no method differed from it."
        ' "Held": CAAP is first and clearly ahead of every other method and control, also of maps'
        ' without signs and of maps of pixels on patches; "first, not separated from X": CAAP is'
        ' first, but not clearly ahead of X; "not contradicted": another is first, and none is'
        " clearly better.\n"
    )


def _claim(
    table: Table, key: tuple[str, str], metric: str, what: str, equal: Table | None = None
) -> str:
    """A verdict on a claim. A method is scored as in the tables of all methods and, where `equal`
    has it, without signs and on patches."""
    equal = equal if equal and metric in equal.metrics else None
    fair = (
        {
            m: row[metric].difference
            for m, row in equal.cells.items()
            if m.endswith((PATCHES, ABSOLUTE))
        }
        if equal
        else {}
    )
    gaps = {
        m: row[metric].difference
        for m, row in table.cells.items()
        if m != REFERENCE and row[metric].n
    } | fair
    sign = 1 if higher_is_better(metric) else -1
    better = [m for m, gap in gaps.items() if clear(gap, sign)]
    level = [m for m, gap in gaps.items() if not clear(gap, -sign)]
    order = ranked(table, metric)
    place = order.index(REFERENCE) + 1
    if better:
        verdict = (
            f"did not hold: {_these(better)} {'is' if len(better) == 1 else 'are'} clearly better"
        )
    elif place > 1:
        verdict = (
            f"not contradicted ({order[0]} has the best mean, and no method is clearly better)"
        )
    else:
        verdict = f"first, not separated from {_these(level)}" if level else "held"
    beside = _beside(table, metric)
    return (
        f"- *{what}*, {key[0]}, {TARGETS[key[1]]}: {verdict}. CAAP has place {place} of"
        f" {len(order)} methods ({metric} {cell_text(table.cells[REFERENCE][metric])})."
        + f" Beside them, on fewer photos, less CAAP: {beside}." * bool(beside)
        + (_changed(equal, metric) if equal else "")
    )


def _changed(table: Table, metric: str) -> str:
    """How far other methods come without signs, and smoothed."""
    sign, said = 1 if higher_is_better(metric) else -1, ""
    for change, words in ((ABSOLUTE, "Without signs"), (SMOOTHED, "Smoothed")):
        rows = {
            _before(m): row[metric]
            for m, row in table.cells.items()
            if m.endswith(f", {change}") and not m.startswith(REFERENCE) and row[metric].n
        }
        if rows:
            top = max(rows, key=lambda m: sign * rows[m].mean)
            better = [m for m, cell in rows.items() if clear(cell.difference, sign)]
            level = [
                m
                for m, cell in rows.items()
                if not clear(cell.difference, -sign) and m not in better
            ]
            found = [f"clearly better than CAAP: {_these(better)}"] * bool(better) + [
                f"not separated from CAAP: {_these(level)}"
            ] * bool(level)
            said += (
                f" {words} the best other is {_these([top])} with {rows[top].mean:.3f};"
                f" {'; '.join(found) or 'all are clearly worse than CAAP'}."
            )
    return said


def _smoothing(name: str, table: Table) -> str:
    """Whether CAAP's neighbours do more than smooth its maps."""
    rows = (REFERENCE, WITHOUT, f"{WITHOUT}, {SMOOTHED}", f"{REFERENCE}, {SMOOTHED}")
    if any(row not in table.cells for row in rows):
        return ""
    with_box, alone, alone_box, twice = (table.cells[row]["aupr1"] for row in rows)
    ahead = "clearly less" if clear(alone_box.difference, -1) else "not clearly less"
    return (
        f"- *Is it the smoothing?* {name}, aupr1: CAAP without neighbours (select none) has"
        f" {alone.mean:.3f}, its maps smoothed over the same neighbours {alone_box.mean:.3f},"
        f" {ahead} than CAAP with them ({with_box.mean:.3f}); CAAP smoothed once more"
        f" {twice.mean:.3f}."
    )


def _before(name: str) -> str:
    return name.rpartition(", ")[0]


def _these(names: Sequence[str]) -> str:
    """Names, with the changes of a map in brackets: `ixg+ (absolute)`."""
    return (
        ", ".join(
            f"{m.partition(', ')[0]} ({m.partition(', ')[2]})" if ", " in m else m for m in names
        )
        or "none"
    )


def _beside(table: Table, metric: str) -> str:
    """The methods that saw fewer photos: their paired difference from CAAP."""
    gaps = {m: table.cells[m][metric].difference for m in table.methods if m.endswith("*")}
    return ", ".join(
        f"{m} {gap.mean:+.3f} (n {gap.n})" for m, gap in gaps.items() if gap is not None and gap.n
    )


def _coarser(name: str, table: Table, metric: str) -> str:
    """What becomes of methods that explain pixels when they are scored on patches."""
    twice = [m.removesuffix(ON_PATCHES) for m in table.methods if m.endswith(ON_PATCHES)]
    means = [
        f"{m} {table.cells[m + ON_PIXELS][metric].mean:.3f} →"
        f" {table.cells[m + ON_PATCHES][metric].mean:.3f}"
        for m in twice
    ]
    better = [
        m.removesuffix(ON_PATCHES) for m in clearly_better(table, metric) if m.endswith(ON_PATCHES)
    ]
    return (
        f"- *Scored on patches instead of pixels*, {name}, {metric}: {', '.join(means)}. Clearly"
        f" better than CAAP then: {', '.join(better) or 'none'}."
    )


def _settings(study: str, table: Table, alike: Agreement) -> str:
    if not alike.images:
        return ""
    said = [
        text
        for metric, name in (("ins-del", "Ins-Del"), ("aupr1", "AUPR_1"))
        if metric in table.metrics and (text := _moved(table, metric, name))
    ]
    least = min(
        ((float(alike.mean[0, place]), other) for place, other in enumerate(alike.names) if place),
        default=(1.0, ""),
    )
    said.append(
        f"the maps agree with the default's at a rank correlation of at least {least[0]:.3f}"
        f" ({least[1]})"
    )
    return (
        f"- *Setting {study}* (default {table.reference}): {'; '.join(said)}."
        if len(said) > 1
        else ""
    )


def _moved(table: Table, metric: str, name: str) -> str:
    """How many settings change a metric clearly, and those that change it most."""
    gaps = {m: table.cells[m][metric].difference for m in table.methods if m != table.reference}
    known = {m: gap for m, gap in gaps.items() if gap is not None and gap.n}
    moved = sorted(
        (m for m, gap in known.items() if clear(gap, 1) or clear(gap, -1)),
        key=lambda m: -abs(known[m].mean),
    )
    most = ", ".join(f"{m} {known[m].mean:+.3f}" for m in moved[:NAMED])
    named = f" ({'most: ' if len(moved) > NAMED else ''}{most})" if moved else ""
    return (
        f"{len(moved)} of {len(known)} other settings change {name} clearly{named}" if known else ""
    )


def _sane(table: Table | None, asked: Sequence[str]) -> list[str]:
    if table is None or not table.cells[REFERENCE]["mprt"].n:
        return []
    checked = {
        m: table.cells[m]["mprt"]
        for m in table.methods
        if m not in CONTROLS and table.cells[m]["mprt"].n
    }
    few = [f"{m} ({cell.n})" for m, cell in checked.items() if cell.n < ENOUGH]
    means = {m: cell.mean for m, cell in checked.items() if cell.n >= ENOUGH}
    high = [f"{m} {mean:.3f}" for m, mean in means.items() if mean > ALIKE]
    top = max(means, key=lambda m: means[m], default="")
    mine = ", ".join(
        f"{metric} {cell_text(table.cells[REFERENCE][metric])}"
        for metric in ("mprt", "random-logit")
    )
    left = missing(asked, table)
    return [
        f"- *Sanity checks*: CAAP {mine}. Maps that stay alike (mprt above {ALIKE}) when the model"
        " is randomised: "
        + (
            ", ".join(high)
            or f"none of {len(means)} methods"
            + (f"; the highest is {top} with {means[top]:.3f}" if top else "")
        )
        + (
            f". Values of fewer than {ENOUGH} photos, so nothing is said: {', '.join(few)}"
            if few
            else ""
        )
        + (f". Not checked yet: {', '.join(left)}." if left else ".")
    ]


def _no_better(values: Values, name: str, metric: str, changed: Values | None = None) -> str:
    """Methods that do not beat every control clearly, and those of them that do on patches or
    without signs."""
    controls = [c for c in CONTROLS if c in values]
    weak = [
        m
        for m in values
        if m not in CONTROLS and not _beats(values[m], [values[c] for c in controls], metric)
    ]
    said = (
        f"- *Not clearly better than every control* ({', '.join(controls)}) in {metric}, {name}:"
        f" {', '.join(weak) or 'none'}."
    )
    again = changed or {}
    same = [again[c] for c in (*BESIDE, f"sobel, {PATCHES}") if c in again]
    for change, words in (
        (PATCHES, "on patches instead of pixels"),
        (ABSOLUTE, "without their signs"),
    ):
        tried = [m for m in weak if f"{m}, {change}" in again]
        said += (
            f" Of these, better than the controls {words}:"
            f" {_these([m for m in tried if _beats(again[f'{m}, {change}'], same, metric)])}."
            if tried
            else ""
        )
    return said if controls else ""


def _beats(
    mine: Mapping[str, Tensor], controls: Sequence[Mapping[str, Tensor]], metric: str
) -> bool:
    sign = 1 if higher_is_better(metric) else -1
    return all(
        clear(paired_difference(mine[metric], control[metric]), sign) for control in controls
    )


def _advice(tables: Mapping[str, Table], request: Request) -> list[str]:
    """The best means among methods that saw all photos, and among those of them that are scored on
    patches."""
    lines = []
    for metric, use in (
        ("ins-del", "To see what the answer depends on"),
        ("aupr1", "To find the object"),
    ):
        best = {
            name: order
            for name, table in tables.items()
            if metric in table.metrics and (order := ranked(table, metric))
        }
        if best:
            first = "; ".join(f"{order[0]} on {name}" for name, order in best.items())
            coarse = "; ".join(
                f"{next(m for m in order if plain(m) not in PIXELS)} on {name}"
                for name, order in best.items()
            )
            lines.append(
                f"- *{use}* (best mean {metric}): {first}."
                + f" Of the methods that are scored on patches: {coarse}." * (coarse != first)
            )
            level = {
                name: level
                for name, order in best.items()
                if order[0] == REFERENCE and (level := not_behind(tables[name], metric))
            }
            lines[-1] += "".join(
                f" Not separated from it on {name}: {', '.join(level[name])}." for name in level
            )
            if metric == "ins-del" and any(
                order[0] == "integrated-gradients" for order in best.values()
            ):
                lines[-1] += _matched(request)
    return lines


def _matched(request: Request) -> str:
    """A caveat where integrated gradients starts from the very picture that deletion ends at: the
    mean colour, 0 in normalised units."""
    same = (
        request.methods.get("integrated-gradients", {}).get("baseline") == "mean"
        and request.measures["insertion-deletion"]["fill"] == 0
    )
    said = (
        " The baseline of integrated-gradients is the mean colour, which deletion fills in too, so"
        " deletion rewards the match; and it is scored on pixels."
    )
    return said if same else ""
