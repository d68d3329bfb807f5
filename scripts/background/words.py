"""What the background study concludes, in words that follow from its numbers by rules that are
stated."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from scripts.background.numbers import (
    ACCURACIES,
    BACKGROUND,
    MAY_COST,
    Estimate,
    Removal,
    Removals,
    bir,
    bir_difference,
    falls,
    gap_of,
    mean,
    place,
    right_ones,
    surely_cheap,
    tensor,
)
from scripts.background.removal import ENDS, Heads, methods, spelled
from scripts.head_methods import GREY, GUARD, PRINTED

Row = dict[str, Any]
SMALL_GAP = 0.05  # a BG-gap below it is small
CONTROL_FILL = "grey"  # of the controls of an audit


def short(found: Row, about: Row, removals: Removals) -> Iterator[str]:
    """The conclusions, one a line."""
    if "plain" in found:
        right = {name: mean(tensor(found["plain"][name]["top 1"])) for name in ("pets", "imagenet")}
        yield (
            f"The model answers {right['pets']} of the pets and {right['imagenet']} of ImageNet's"
            " photos right."
        )
    if "composites" in found:
        gap, by_breed = (
            gap_of(found["composites"], "right", about["mixes"], groups)
            for groups in (None, about["labels"])
        )
        kinds = found["composites"]["kinds"]
        alone = max(
            ("only_bg_b", "only_bg_t", "only_bg_f"),
            key=lambda kind: statistics.fmean(kinds[kind]["right"]),
        )
        yield (
            f"BG-gap: {gap}; with breeds drawn instead of photos [{by_breed.low:.3f},"
            f" {by_breed.high:.3f}]. {repair(gap, by_breed)} Backgrounds alone are answered right"
            f" in {mean(tensor(kinds[alone]['right']))} at most ({alone.replace('_', '-')})."
        )
    if "audit" in found:
        ratios = {
            name: bir(one, right_ones(found))
            for name, one in found["audit"]["gains"].items()
            if not name.startswith("control")
        }
        least, most = (pick(ratios, key=lambda name: ratios[name].value) for pick in (min, max))
        overlap, centre = (
            mean(tensor(found["audit"]["iou"][name]))
            for name in ("discovered masks", "control: centre")
        )
        yield (
            f"BIR depends on how the background is taken away: {ratios[least]} ({least}) to"
            f" {ratios[most]} ({most}). One BIR alone says little."
        )
        yield from beside_controls(found)
        yield (
            f"Discovered masks meet the animal with an IoU of {overlap}; a box in the centre does"
            f" with {centre}."
        )
        yield (
            f"`seecause heads audit` says: {about['verdict']['words'][0]} The look it believes:"
            f" {about['verdict']['trusted']}."
        )
    scored = methods(found)
    if PRINTED in scored:
        yield (
            f"CIGMA as printed: {positive(scored[PRINTED])}. {GREY}{GUARD}:"
            f" {positive(scored.get(GREY + GUARD))}."
        )
    if removals.chosen:
        yield from helped(removals, complete=not about["missing"])


def beside_controls(found: Row) -> Iterator[str]:
    """BIR by discovered and by true masks, less that of masks which have nothing to do with the
    animal; same fill, same photos."""
    differences = {
        name: control_differences(found, f"{name} masks, {CONTROL_FILL}")
        for name in ("discovered", "true")
    }
    told = [
        f"BIR with {name} masks"
        f" {', and '.join(f'{standing_of(one)} BIR with {control} ({one.signed})' for control, one in some.items())}."
        for name, some in differences.items()
    ]
    blind = " or ".join(
        control for control, one in differences["discovered"].items() if one.printed[1] <= 0
    )
    so = (
        f" **So BIR with discovered masks is no evidence of background use here: {blind}, which"
        " knows nothing of the animal, gives as much.**"
        if blind
        else ""
    )
    rule = "(Rule: they cannot be told apart if 0 is inside the paired interval, as printed.)"
    yield f"Beside controls, all with the same fill ({CONTROL_FILL}): {' '.join(told)}{so} {rule}"


def control_differences(found: Row, look: str) -> dict[str, Estimate]:
    """BIR of a look less that of each control with its fill."""
    gains, rows, ending = found["audit"]["gains"], right_ones(found), f", {CONTROL_FILL}"
    controls = {
        name.removeprefix("control: ").removesuffix(ending): one
        for name, one in gains.items()
        if name.startswith("control: ")
    }
    return {
        control.replace("centre", "a box in the centre"): bir_difference(gains[look], one, rows)
        for control, one in controls.items()
    }


def standing_of(difference: Estimate) -> str:
    return (
        "is above"
        if difference.printed[1] > 0
        else "is below"
        if difference.printed[2] < 0
        else "cannot be told from"
    )


def repair(gap: Estimate, by_breed: Estimate) -> str:
    """The verdict on a BG-gap, as printed."""
    rule = (
        "(Rule, for numbers as printed: nothing if 0 is inside both intervals or the gap is not"
        f" above 0; borderline if 0 is inside or at the end of one; little below {SMALL_GAP}.)"
    )
    ends = [one.printed[1] for one in (gap, by_breed)]
    if gap.printed[0] <= 0 or max(ends) < 0:
        return f"**Nothing to repair that these photos could show.** {rule}"
    size = "little" if gap.printed[0] < SMALL_GAP else "something"
    return (
        f"**Borderline, and {size} to repair at most.** {rule}"
        if min(ends) <= 0
        else f"**{size.capitalize()} to repair.** {rule}"
    )


def positive(record: Row | None) -> str:
    if record is None:
        return "not there yet"
    value = torch.tensor(record["value"], dtype=torch.float64)
    return (
        f"{int((value > 0).sum())} of {value.numel()} heads have a positive score, {sure(record)}"
        " above two standard errors"
    )


def sure(record: Row) -> int:
    return int(
        (
            torch.tensor(record["value"], dtype=torch.float64)
            > 2 * torch.tensor(record["error"], dtype=torch.float64)
        ).sum()
    )


def helped(removals: Removals, *, complete: bool) -> Iterator[str]:
    """Which removals help, how often others do, and what CIGMA as printed costs."""
    chosen = {one.heads: one for one in removals.chosen.values() if one.heads}
    good = {
        measure: [
            one for one in chosen.values() if falls(one, measure) and first(one, removals, measure)
        ]
        for measure in BACKGROUND
    }
    told = [
        f"{measure}: {'; '.join(standing(one, removals, measure) for one in some)}"
        for measure, some in good.items()
        if some
    ]
    yield (
        f"Removals that lower a measure: {'. '.join(told) or 'none'}. Rule: it falls by more than"
        " its interval, and further than without any other single head (one head) or random set of"
        f" as many heads (more), and the point estimates of accuracy fall by {MAY_COST} at most on"
        " both sets of photos."
    )
    passing = {one.heads: one for some in good.values() for one in some}
    yield from (consequences(one, removals) for one in passing.values())
    others = {
        one.heads: one
        for some in (removals.singles, *removals.lots.values())
        for one in some
        if one.heads not in chosen
    }
    rates = "; ".join(
        f"{measure}: {sum(falls(one, measure) for one in chosen.values())} of {len(chosen)} chosen,"
        f" {sum(falls(one, measure) for one in others.values())} of {len(others)} others"
        for measure in BACKGROUND
    )
    yield (
        "Many sets are tried, so some pass by luck. Sets that pass without the comparison:"
        f" {rates}."
    )
    if complete or passing:
        yield advice(list(passing.values()), good["BG-gap"])
    printed = [
        one for (method, _), one in removals.chosen.items() if method == PRINTED and one.heads
    ]
    costs = [
        ", ".join(
            [
                f"without {spelled(one.heads)}",
                *(f"{name} {one.effects[name].change.signed}" for name in ACCURACIES),
            ]
        )
        for one in printed
    ]
    yield (
        "What CIGMA as printed costs:"
        f" {'; '.join(dict.fromkeys(costs)) or 'nothing, it removes no head'}."
    )


def first(one: Removal, removals: Removals, measure: str) -> bool:
    rivals = removals.rivals(one)
    return bool(rivals) and place(one, rivals, measure) == 1


def standing(one: Removal, removals: Removals, measure: str) -> str:
    """How far it falls, and beside how many."""
    effect, count = one.effects[measure], len(removals.rivals(one)) + 1
    among = (
        f"single heads{f', {len(removals.unseen)} are not measured yet' * bool(removals.unseen)}"
        if len(one.heads) == 1
        else "sets of as many heads"
    )
    return (
        f"without {spelled(one.heads)} to {effect.value:.3f}, {effect.change.signed}, the lowest of"
        f" {count} {among}"
    )


def consequences(one: Removal, removals: Removals) -> str:
    """What a removal that passes does to the direct question, and what it costs."""
    gap, by = one.effects["BG-gap"].change, choosers(one.heads, removals)
    moved = (
        "falls"
        if gap.printed[2] < 0
        else "rises"
        if gap.printed[1] > 0
        else "does not clearly change"
    )
    costs = ", ".join(f"{name} {one.effects[name].change.signed}" for name in ACCURACIES)
    excluded = (
        f"A cost of more than {MAY_COST} is {'excluded' if surely_cheap(one) else 'not excluded'}."
    )
    limit = [name for name in ACCURACIES if one.effects[name].change.printed[0] == -MAY_COST]
    at_limit = f" {' and '.join(limit)} passes the rule exactly at its limit." if limit else ""
    plain = [method for method in by if method in ENDS.values()]
    simple = (
        f" It takes no CIGMA to find it: {' and '.join(plain)}, a plain control, picks the same."
        if plain
        else ""
    )
    return (
        f"Without {spelled(one.heads)} (chosen by {'; '.join(by)}) BG-gap {moved}: {gap.signed}."
        f" The cost: {costs}. {excluded}{at_limit}{simple}"
    )


def choosers(heads: Heads, removals: Removals) -> list[str]:
    """Methods that choose just these heads at some K."""
    return list(
        dict.fromkeys(method for (method, _), one in removals.chosen.items() if one.heads == heads)
    )


def advice(passing: list[Removal], closing: list[Removal]) -> str:
    """A removal is worth it if it also narrows BG-gap, the direct question, and a cost is
    excluded."""
    if not passing:
        return "**So remove no head of this model for its background.**"
    worth = [one for one in closing if surely_cheap(one)]
    if worth:
        return (
            "**Worth trying: the model without"
            f" {'; without '.join(spelled(one.heads) for one in worth)}.** BG-gap falls, and a cost"
            " is excluded."
        )
    return (
        "**No removal is shown to be worth it.** (It would be if BG-gap fell too, and a cost of"
        f" more than {MAY_COST} were excluded.)"
    )
