"""What the shortcut study's numbers say, by rules that are stated."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from scripts.seeds import percent, spread
from scripts.shortcut.choice import unchanged
from scripts.shortcut.data import GROUPS
from scripts.shortcut.plan import CONTROLS, SEEDS, Results
from scripts.shortcut.rows import CHANGED, NAMES, OF_PARTS, REPAIRS, Line

CLEAR = 0.02  # a gain in worst-group accuracy that is told as one, if every seed has the same sign
USUAL, OTHER = (
    (GROUPS.index((0, 0)), GROUPS.index((1, 1))),
    (
        GROUPS.index((0, 1)),
        GROUPS.index((1, 0)),
    ),
)
BY_LOT = REPAIRS["random, chosen"][0]
UNCLEAR = "makes no clear difference"


def conclusions(table: list[Line], results: Results, photos: Sequence[int]) -> list[str]:
    """One sentence a row, by the rule that stands first. `photos`: test photos of each species."""
    found = {line.title: line for line in table if line.seeds}
    erm = found.get(NAMES["erm"])
    if erm is None:
        return ["Nothing yet: no reported seed of ERM is done."]
    told = [
        (
            "Rule: accuracy of the worst group (WGA) is compared seed by seed: with ERM's, or with"
            " that of the row a line names. A method *helps* or *costs* (is *better* or *worse*)"
            f" if all seeds have the same sign and the mean is at least {100 * CLEAR:.0f} points;"
            " otherwise it makes no clear difference. There is no verdict before all seeds of both"
            f" are done and their settings are final. {len(SEEDS)} seeds describe; they do not"
            " prove.\n"
        ),
        shortcut(erm, photos),
        *beside_erm(found, erm),
        *(
            changed(method, found, results)
            for method in OF_PARTS
            if any(_is_of(method, title) for title in found)
        ),
    ]
    return [*told, f"- **The best worst group**, the true mask aside: {best_row(table)}"]


def shortcut(erm: Line, photos: Sequence[int]) -> str:
    usual, other = (
        statistics.fmean(over_photos(row["groups"], places, photos) for row in erm.seeds.values())
        for places in (USUAL, OTHER)
    )
    learnt = (
        "It has learnt the shortcut."
        if usual - other >= CLEAR
        else "It has hardly learnt the shortcut, so there is little to mend."
    )
    return (
        f"- **The shortcut.** ERM{erm.few} is right on {percent(usual)} % of the photos with the"
        f" animal on its usual texture and on {percent(other)} % with it on the other one;"
        f" {percent(statistics.fmean(erm.values('flips')))} % of its answers change with the"
        f" texture. {learnt}"
    )


def over_photos(accuracy: Sequence[float], places: Sequence[int], photos: Sequence[int]) -> float:
    """Accuracy over all photos of some groups: species have different numbers of them, so not the
    mean of the groups' accuracies."""
    counts = [photos[GROUPS[place][0]] for place in places]
    return sum(count * accuracy[place] for count, place in zip(counts, places, strict=True)) / sum(
        counts
    )


def beside_erm(found: dict[str, Line], erm: Line) -> Iterator[str]:
    """Every row but those with interventions, which are compared with the rows they change."""
    for line in found.values():
        if line is not erm and not line.title.endswith(CHANGED):
            yield f"- **{line.title}** {verdict(line, erm)}"
        if line.title == BY_LOT:
            yield from by_lot(found, line, erm)


def by_lot(found: dict[str, Line], lot: Line, erm: Line) -> Iterator[str]:
    """CIGMA beside what is chosen like it: the only fair comparison of the two."""
    for title in (REPAIRS[key][0] for key in ("printed", "guarded")):
        if title in found:
            yield (
                f"- **{title}**, beside a random order chosen alike,"
                f" {verdict(found[title], lot, good='is better', bad='is worse')}"
            )
    if each := gains(lot, erm):
        yield (
            "- **What the choice buys.** A random order knows nothing of the heads: its"
            f" {100 * statistics.fmean(each):+.1f} points over ERM are what choosing on validation"
            " pictures buys. Do not compare the verdicts beside ERM of random rows and of CIGMA:"
            " of each seed, the one is a mean over draws and so steady, the other a single"
            " outcome."
        )


def changed(method: str, found: dict[str, Line], results: Results) -> str:
    """Interventions beside the same net without them."""
    rows = [
        (line, found[line.title.removesuffix(CHANGED)])
        for title, line in found.items()
        if _is_of(method, title) and title.endswith(CHANGED)
    ]
    same, runs = unchanged(method, results)
    each = " ".join(f"**{line.title}** {verdict(line, plain)}" for line, plain in rows)
    words = [word(line, plain) for line, plain in rows]
    lost = (
        f" **A loss: interventions do not help {NAMES[method]} here.**"
        if words and all(one in (UNCLEAR, "costs") for one in words)
        else ""
    )
    kept = (
        f"Nothing was changed in {same} of {runs} runs."
        if same
        else f"Something was changed in each of {runs} runs."
    )
    return (
        f"- *Interventions on {NAMES[method]}, beside the same nets without them.* {kept}"
        f" {each}{lost}"
    )


def best_row(table: list[Line]) -> str:
    """Only rows with all their seeds can be the best. The next one is named too, and seeds on which
    it is not behind."""
    rivals = [
        line
        for line in table
        if line.title not in (NAMES[method] for method in ("mask", *CONTROLS))
    ]
    ready = sorted(
        (line for line in rivals if line.is_ready),
        key=lambda line: -statistics.fmean(line.values("worst")),
    )
    if not ready:
        return "not told before rows have all their seeds and a final setting."
    best = ready[0]
    told = f"{best.title}, {spread(best.values('worst'))} %. It uses {best.uses}."
    if len(ready) > 1:
        told += (
            f" Next: {ready[1].title}, {spread(ready[1].values('worst'))} %."
            f" {order(best, ready[1])}"
        )
    return told + (
        f" {len(rivals) - len(ready)} rows that are not finished are not compared."
        if len(ready) < len(rivals)
        else ""
    )


def order(best: Line, other: Line) -> str:
    """Whether the one is ahead of the other whatever the seed."""
    pairs = {
        seed: (row["worst"], other.seeds[seed]["worst"])
        for seed, row in best.seeds.items()
        if seed in other.seeds
    }
    turned = [
        f"seed {seed}, {percent(one)} against {percent(two)}"
        for seed, (one, two) in pairs.items()
        if one <= two
    ]
    return (
        f"**Their order changes between seeds** ({'; '.join(turned)}): these seeds do not tell"
        " which is better."
        if turned
        else "It is behind on every seed."
    )


def gains(line: Line, base: Line) -> list[float]:
    """In worst-group accuracy, of the seeds that both have."""
    return [
        row["worst"] - base.seeds[seed]["worst"]
        for seed, row in line.seeds.items()
        if seed in base.seeds
    ]


def word(line: Line, base: Line, *, good: str = "helps", bad: str = "costs") -> str:
    if not (line.is_ready and base.is_ready):
        return f"has no verdict yet{line.few or base.few}"
    each = gains(line, base)
    mean = statistics.fmean(each)
    return (
        good
        if min(each) > 0 and mean >= CLEAR
        else bad
        if max(each) < 0 and mean <= -CLEAR
        else UNCLEAR
    )


def verdict(line: Line, base: Line, *, good: str = "helps", bad: str = "costs") -> str:
    """What a row does to the worst group, beside another."""
    found = gains(line, base)
    if not found:
        return "cannot be compared yet."
    average = statistics.fmean(
        row["average"] - base.seeds[seed]["average"]
        for seed, row in line.seeds.items()
        if seed in base.seeds
    )
    each = ", ".join(f"{100 * gain:+.1f}" for gain in found)
    return (
        f"{word(line, base, good=good, bad=bad)}: WGA {100 * statistics.fmean(found):+.1f} points"
        f" ({each}), average accuracy {100 * average:+.1f}."
    )


def _is_of(method: str, title: str) -> bool:
    return title.startswith(f"{NAMES[method]}, K = ")
