"""The page of `evidence_background.py`: tables with intervals, and conclusions that follow from the numbers by rules that are stated."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.background.composites import ALONE, MIXED
from scripts.background.numbers import ACCURACIES, BACKGROUND, MAY_COST, MEASURES, Effect, Estimate, Lots, Removals, beyond, effects, falls, mean, ratio, tensor
from scripts.head_methods import GREY, GUARD, PRINTED
from scripts.kept_pieces import Pieces
from seecause import __version__

Row = dict[str, Any]
NAME = "evidence-background"
SMALL_GAP = 0.05  # a BG-gap below it is small
KINDS = {
    "original": "original", "only_fg": "only the animal, on black", "only_bg_b": "only background, the animal's box black (only-bg-b)",
    "only_bg_t": "only background, the box tiled (only-bg-t)", "only_bg_f": "only background, the animal's shape filled from around it",
    "mixed_same": "the animal on another photo of its breed (mixed-same)", "mixed_rand": "the animal on a photo of another breed (mixed-rand)",
}  # fmt: skip
HOLE = "*Not there yet: run the same command again.*\n"


def write(pieces: Pieces, about: Row, removals: Removals, lots: Lots, out: Path) -> None:
    """evidence-background.md and .csv in `out`; what is not finished is a hole."""
    out.mkdir(parents=True, exist_ok=True)
    found = pieces.found
    page = [
        "# Does a real ViT answer from the background, and does removing heads change that?\n",
        f"![Accuracy on composites, BIR by every look, and what removing heads does]({NAME}.png)\n",
        "Bars and thin lines: 95 % intervals. Grey bars: controls. Grey band: from the lowest to the highest of the random sets.\n",
        *warnings(about),
        "## In short\n",
        "\n".join(f"- {line}" for line in short(found, about, removals, lots)) or HOLE,
        "\n## How it was made\n",
        protocol(pieces, about),
        "\n## How good is the model?\n",
        accuracy_table(found, about) if "plain" in found else HOLE,
        "\n## The animal elsewhere: composites in the manner of ImageNet-9\n",
        composites_text(found["composites"], about) if "composites" in found else HOLE,
        "\n## The audit: FIG, BIG and BIR\n",
        audit_text(found, about) if "audit" in found else HOLE,
        "\n## Which heads?\n",
        heads_text(found, about) if any(name.startswith("scores, ") for name in found) else HOLE,
        "\n## What if they go?\n",
        removal_text(found, about, removals, lots) if removals else HOLE,
        "\n## Seconds\n",
        "\n".join(f"- {name}: {total:.1f}" for name, total in seconds(pieces).items()),
    ]
    (out / f"{NAME}.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    with (out / f"{NAME}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["table", "row", "K", "removed", "draw", "measure", "value", "low", "high"])
        writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in line] for line in lines(found, removals, lots))


def seconds(pieces: Pieces) -> dict[str, float]:
    """By kind of piece, and in all; reading photos and drawing is not in it."""
    kinds = {"masks": "masks", "scores,": "scores", "removed": "removals", "random": "random removals"}
    found: dict[str, float] = {}
    for name, taken in pieces.seconds.items():
        kind = kinds.get(name.split()[0], name)
        found[kind] = found.get(kind, 0.0) + taken
    return {**found, "all": sum(found.values())}


def warnings(about: Row) -> Iterator[str]:
    if about["limit"] is not None:
        yield f"**A small run (--limit {about['limit']}): its numbers mean little.**\n"
    if about["missing"]:
        yield f"**Not finished: it stopped before {about['missing']!r}.**\n"


def protocol(pieces: Pieces, about: Row) -> str:
    precision = "float32" + (", TF32 in mask search, gating, removals and (cuDNN's own choice) the patch embedding" if about["tf32"] else "")
    tested = about["pets"] - about["chosen on"]
    return (
        f"Written by `{about['command']}` (seecause {__version__}, {' and '.join(sorted(pieces.machines))}, "
        f"{precision}, seed {about['seed']}). Every number with its interval: `{NAME}.csv`.\n\n"
        f"- Model: {about['model']}, {about['heads']} heads. Photos: {about['pets']} of Oxford-IIIT Pet, of {about['breeds']} breeds that ImageNet has, "
        f"with trimaps; {about['imagenet']} of ImageNet's validation set. An answer is right if it is the top one of {about['classes']}.\n"
        f"- Heads are scored on {about['chosen on']} pets, each breed cut in two at random, all of them that are answered right (the paper takes 0.4); all "
        f"about removals is measured on the other {tested} pets and on ImageNet. K is not chosen: every K is shown.\n"
        "- A trimap's border shows fur and outline. It belongs to the animal wherever pictures are made or erased, and counts for neither side in IoU.\n"
        f"- Masks: {about['mask_steps']} steps, the paper's settings. Composites: for each animal {about['mixes']} of either kind of background, photos of "
        f"the same half. Random heads: {about['draws']} sets of each size. Causal Head Gating: {about['gating_masks']} masks, {about['gating_steps']} updates "
        f"in each of its three fits (its authors take 10 and 500). Regression: {about['regression_draws']} removals of each photo.\n"
        "- In brackets: 95 % bootstrap intervals over photos; of changes, paired."
    )


def short(found: Row, about: Row, removals: Removals, lots: Lots) -> Iterator[str]:
    """Conclusions by rule."""
    if "plain" in found:
        right = {name: mean(tensor(found["plain"][name]["top 1"])) for name in ("pets", "imagenet")}
        yield f"The model answers {right['pets']} of the pets and {right['imagenet']} of ImageNet's photos right."
    if "composites" in found:
        gap, kinds = gap_of(found["composites"], "right"), found["composites"]["kinds"]
        alone = max(("only_bg_b", "only_bg_t", "only_bg_f"), key=lambda kind: statistics.fmean(kinds[kind]["right"]))
        verdict = (
            "**Nothing to repair that these photos could show**: the interval has 0 in it"
            if gap.low <= 0 <= gap.high
            else "**Little to repair**" if 0 < gap.value < SMALL_GAP else "**Something to repair**" if gap.value > 0 else "**Nothing to repair**"
        )  # fmt: skip
        yield (
            f"BG-gap: {gap}. {verdict} (rule: nothing if the interval has 0 in it or the gap is negative, little below {SMALL_GAP}). Backgrounds alone are "
            f"answered right in {mean(tensor(kinds[alone]['right']))} at most ({alone.replace('_', '-')})."
        )
    if "audit" in found:
        ratios = {name: bir(one, right_ones(found)) for name, one in found["audit"]["gains"].items() if not name.startswith("control")}
        least, most = (pick(ratios, key=lambda name: ratios[name].value) for pick in (min, max))
        overlap, centre = (mean(tensor(found["audit"]["iou"][name])) for name in ("discovered masks", "control: centre"))
        yield f"BIR depends on how the background is taken away: {ratios[least]} ({least}) to {ratios[most]} ({most}). One BIR alone says little."
        yield f"Discovered masks meet the animal with an IoU of {overlap}; a box in the centre does with {centre}."
        yield f"`seecause heads audit` says: {found['audit']['verdict'][0]} It believes the look that finds most; composites are the better witness."
    scored = scores(found)
    if PRINTED in scored:
        yield f"CIGMA as printed: {positive(scored[PRINTED])}. {GREY}{GUARD}: {positive(scored.get(GREY + GUARD))}."
    if removals:
        yield from helped(removals, lots, complete=not about["missing"])


def helped(removals: Removals, lots: Lots, *, complete: bool) -> Iterator[str]:
    """Which removals help, how often random ones do, and what CIGMA as printed costs."""
    real = {key: one for key, one in removals.items() if one.heads}
    distinct = {one.heads: one for one in real.values()}
    good = []
    for measure in BACKGROUND:
        passed = {key: one for key, one in real.items() if falls(one.effects, measure)}
        names = {
            f"{method}, K = {k} ({one.effects[measure].change.signed})"
            for (method, k), one in passed.items()
            if beyond(one.effects, lots.get(len(one.heads), []), measure)
        }
        good += [f"{measure}: {'; '.join(sorted(names))}"] if names else []
    by_lot = [lot for drawn in lots.values() for lot in drawn]
    rates = "; ".join(
        f"{measure}: {sum(falls(one.effects, measure) for one in distinct.values())} of {len(distinct)} chosen, "
        f"{sum(falls(lot, measure) for lot in by_lot)} of {len(by_lot)} random"
        for measure in BACKGROUND
    )
    told = ". ".join(good) if good else "none"
    yield (
        f"Removals that help: {told}. Rule: the measure falls by more than its interval, and further than with any random set of as many heads, and accuracy "
        f"falls by {MAY_COST} at most on both sets of photos. Many sets are tried, so some pass by luck; sets that pass without the comparison: {rates}."
    )
    if complete and not good:
        yield "**So remove no head of this model for its background.**"
    costs = [
        f"K = {k} ({len(one.heads)} removed): ImageNet {one.effects[ACCURACIES[0]].change.signed}, pets {one.effects[ACCURACIES[1]].change.signed}"
        for (method, k), one in real.items()
        if method == PRINTED
    ]
    yield f"What CIGMA as printed costs in accuracy: {'; '.join(dict.fromkeys(costs)) or 'nothing: it removes no head'}."
    for measure in ACCURACIES if real else ():
        worst = min(real, key=lambda key: real[key].effects[measure].change.value)
        yield f"The largest cost, {measure}: {worst[0]} at K = {worst[1]}, {real[worst].effects[measure].change.signed}."


def accuracy_table(found: Row, about: Row) -> str:
    rows = [
        (name, str(len(one["top 1"])), str(mean(tensor(one["top 1"]))), str(mean(tensor(one["top 5"]))))
        for name, one in (("pets", found["plain"]["pets"]), ("ImageNet", found["plain"]["imagenet"]))
    ]
    chance = ("control: chance", "", f"{1 / about['classes']:.3f}", f"{min(1.0, 5 / about['classes']):.3f}")
    return table(("photos", "count", "top 1", "top 5"), [*rows, chance])


def composites_text(found: Row, about: Row) -> str:
    columns = {"right": "accuracy", "right among breeds": "accuracy among the breeds", "probability": "probability of the label", "another's": "control"}
    rows = [(KINDS[kind], *(str(mean(tensor(found["kinds"][kind][key]))) for key in columns)) for kind in (*ALONE, *MIXED)]
    chance = ("control: chance", f"{1 / about['classes']:.3f}", f"{1 / about['breeds']:.3f}", f"{1 / about['classes']:.3f}", f"{1 / about['classes']:.3f}")
    gaps = "; ".join(f"{columns[key]} {gap_of(found, key)}" for key in list(columns)[:3])
    box, animal = (statistics.fmean(found[key]) for key in ("box", "animal"))
    return (
        f"The script writes some photos and what was made of them beside this page, as `{NAME}-photos.png`; it is not in the repository because it shows "
        "photos. Photos: Oxford-IIIT Pet (Parkhi et al. 2012), CC BY-SA 4.0; cut out, filled and recombined here.\n\n"
        f"Animals take {animal:.2f} of the frame and their boxes {box:.2f}. To paste on another photo, its own animal must be gone: its shape, "
        "three pixels wider, is filled with smooth colour from around it (a pyramid of means). ImageNet-9 tiles the box instead, which here would "
        f"leave less of the photo (boxes without a strip of eight pixels beside them: {found['untiled']}; filled in only-bg-t too). A rim of its own "
        f"background comes with an animal, since trimaps draw borders wide. All {len(found['box'])} pets; mixed photos count with the "
        "mean over their backgrounds. *Among the breeds*: the top one of these classes only. *Control*: answers that are the breed of another photo, which for "
        "mixed-rand is the (first) background's.\n\n"
        + table(("kind of photo", *columns.values()), [*rows, chance])
        + f"\n\nBG-gap (mixed-same less mixed-rand): {gaps}. Pasting alone, from original to mixed-same: accuracy "
        + mean(tensor(found["kinds"]["mixed_same"]["right"]) - tensor(found["kinds"]["original"]["right"])).signed
        + "."
    )


def gap_of(composites: Row, key: str) -> Estimate:
    """BG-gap of one measure."""
    return mean(tensor(composites["kinds"]["mixed_same"][key]) - tensor(composites["kinds"]["mixed_rand"][key]))


def right_ones(found: Row) -> torch.Tensor:
    return tensor(found["plain"]["pets"]["top 1"]).bool()


def bir(gains: Row, rows: torch.Tensor) -> Estimate:
    """Ratio of means."""
    fig, big = (tensor(gains[key])[rows] for key in ("fig", "big"))
    return ratio(big, fig + big)


def bir_by_photo(gains: Row, rows: torch.Tensor) -> Estimate:
    """Mean of ratios (equation 41); one half where nothing matters."""
    fig, big = (tensor(gains[key])[rows] for key in ("fig", "big"))
    return mean(torch.where(fig + big < 1e-8, 0.5, big / (fig + big).clamp_min(1e-8)))


def audit_text(found: Row, about: Row) -> str:
    told, rows = found["audit"], right_ones(found)
    overlap = [(name, str(mean(tensor(values)))) for name, values in told["iou"].items()]
    looks = [
        (name, *(str(mean(tensor(one[key])[rows])) for key in ("fig", "big")), str(bir(one, rows)), str(bir_by_photo(one, rows)))
        for name, one in told["gains"].items()
    ]
    noise = max(one["noise"] for one in told["gains"].values())
    return (
        f"FIG: how far the answer moves without the animal (Jensen-Shannon, nats). BIG: without the background. BIR = BIG / (FIG + BIG). Means over the "
        f"{int(rows.sum())} pets that are answered right. `mean` is the paper's fill. *The animal on another breed's photo*: BIG by mixed-rand; FIG by another "
        f"breed's animal on the same background, filled. Controls erase what has nothing to do with the animal. Noise floor {noise:.1e}.\n\n"
        + table(("the background is taken away by", "FIG", "BIG", "BIR, ratio of means", "BIR, mean of ratios"), looks)
        + f"\n\nHow well do discovered masks meet the animal? All pets; the border ({told['border']:.2f} of the pixels) is ignored. Masks keep 0.35 of the "
        "pixels whatever the animal's size.\n\n" + table(("mask", "IoU with the animal"), overlap) + "\n\nWhat `seecause heads audit` says with discovered and "
        "true masks:\n\n" + "\n".join(f"> {line}" for line in told["verdict"])
    )  # fmt: skip


def scores(found: Row) -> dict[str, Row]:
    return {method: one for name, kept in found.items() if name.startswith("scores, ") for method, one in kept.items()}


def positive(record: Row | None) -> str:
    if record is None:
        return "not there yet"
    value = torch.tensor(record["value"], dtype=torch.float64)
    return f"{int((value > 0).sum())} of {value.numel()} heads have a positive score, {_sure(record)} above two standard errors"


def _sure(record: Row) -> int:
    return int((torch.tensor(record["value"], dtype=torch.float64) > 2 * torch.tensor(record["error"], dtype=torch.float64)).sum())


def heads_text(found: Row, about: Row) -> str:
    """The best head of each method. Only CIGMA and what is like it has a zero that means something."""
    rows = []
    for method, one in scores(found).items():
        value = torch.tensor(one["value"], dtype=torch.float64)
        layer, head = divmod(int(value.flatten().nan_to_num(nan=-torch.inf).argmax()), value.shape[1])
        error = float("nan") if one["error"] is None else one["error"][layer][head]  # weights have none
        cigma = "cigma" in method or method.startswith(("regression", "loss gain"))
        count = (str(int((value > 0).sum())), str(_sure(one))) if cigma else ("-", "-")
        alone = "-" if one["accuracy"] is None else f"{one['accuracy'][layer][head]:.3f}"
        rows.append((method, *count, f"{layer}.{head}", f"{value[layer, head]:.3g}" + (f" ± {error:.2g}" if error == error else ""), alone))
    chance = ("control: chance", "-", f"{0.0228 * about['heads']:.1f}", "-", "-", "-")
    return (
        "Higher scores are removed first; heads with scores of 0 or less stay. A head is layer.head, both from 0. Accuracy: on the photos that scored, all "
        "answered right by the whole model, without that head. Chance: heads above two standard errors if every score were noise.\n\n"
        + table(("method", "positive", "above two errors", "best head", "its score", "accuracy without it"), [*rows, chance])
    )  # fmt: skip


def removal_text(found: Row, about: Row, removals: Removals, lots: Lots) -> str:
    """One table for each K."""
    whole = effects(found["nothing removed"][0], found["nothing removed"][0])
    parts = [
        "The model without the K best heads of each method, and the change from the whole model. BG-gap and BIR: lower is better. BIR is that of pets which "
        "the whole model answers right, with the same erased pictures for every model. *Random*: mean over sets, in brackets the lowest and the highest set.\n",
        table(("the whole model", *MEASURES), [("as it is", *(f"{whole[m].value:.3f}" for m in MEASURES))]),
    ]
    for k in about["ks"]:
        rows = []
        for (method, at), one in removals.items():
            if at == k:
                cells = [f"{one.effects[m].value:.3f}, {one.effects[m].change.signed}" for m in MEASURES] if one.heads else ["-"] * len(MEASURES)
                rows.append((method, str(len(one.heads)), *cells))
        for size in sorted({len(one.heads) for (_, at), one in removals.items() if at == k} & set(lots)):
            rows.append((f"random, {size} head{'s' * (size > 1)}", str(size), *(spread(lots[size], m) for m in MEASURES)))
        parts.append(f"\n### K = {k}\n\n" + table(("heads removed by", "removed", *MEASURES), rows))
    return "\n".join(parts)


def spread(drawn: list[dict[str, Effect]], measure: str) -> str:
    changes = [lot[measure].change.value for lot in drawn]
    value = statistics.fmean(lot[measure].value for lot in drawn)
    return f"{value:.3f}, {Estimate(statistics.fmean(changes), min(changes), max(changes)).signed}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *("| " + " | ".join(row) + " |" for row in rows)])


def lines(found: Row, removals: Removals, lots: Lots) -> Iterator[list[Any]]:
    """Of the CSV."""

    def line(name: str, row: str, measure: str, one: Estimate, k: Any = "", gone: Any = "", draw: Any = "") -> list[Any]:
        return [name, row, k, gone, draw, measure, one.value, one.low, one.high]

    for photos, one in found.get("plain", {}).items():
        yield from (line("plain", photos, key, mean(tensor(values))) for key, values in one.items())
    if "composites" in found:
        for kind, one in found["composites"]["kinds"].items():
            yield from (line("composites", kind, key, mean(tensor(values))) for key, values in one.items())
        yield from (line("composites", "BG-gap", key, gap_of(found["composites"], key)) for key in ("right", "right among breeds", "probability"))
    if "audit" in found:
        rows = right_ones(found)
        yield from (line("audit", name, "IoU", mean(tensor(values))) for name, values in found["audit"]["iou"].items())
        for name, one in found["audit"]["gains"].items():
            yield from (line("audit", name, key.upper(), mean(tensor(one[key])[rows])) for key in ("fig", "big"))
            yield line("audit", name, "BIR, ratio of means", bir(one, rows))
            yield line("audit", name, "BIR, mean of ratios", bir_by_photo(one, rows))
    for (method, k), row in removals.items():
        for measure, effect in row.effects.items():
            yield ["removal", method, k, len(row.heads), "", measure, effect.value, "", ""]
            yield line("removal", method, f"change of {measure}", effect.change, k, len(row.heads))
    for size, drawn in lots.items():
        for draw, lot in enumerate(drawn):
            for measure, effect in lot.items():
                yield ["removal", "random", size, size, draw, measure, effect.value, "", ""]
                yield line("removal", "random", f"change of {measure}", effect.change, size, size, draw)
