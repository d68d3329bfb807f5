"""The page of `evidence_background.py`: conclusions (`words.py`), protocol, and tables with
intervals."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.background.audit import RHO
from scripts.background.composites import ALONE, MIXED
from scripts.background.numbers import (
    ACCURACIES,
    BACKGROUND,
    MEASURES,
    Estimate,
    Removal,
    Removals,
    bir,
    bir_by_photo,
    effects,
    gap_of,
    mean,
    right_ones,
    tensor,
)
from scripts.background.removal import methods, spelled
from scripts.background.words import CONTROL_FILL, control_differences, short, sure
from scripts.kept_pieces import Pieces
from seecause import __version__

Row = dict[str, Any]
NAME = "evidence-background"
SHOWN = 5  # single heads in the table
KINDS = {
    "original": "original", "only_fg": "only the animal, on black", "only_bg_b": "only background, the animal's box black (only-bg-b)",
    "only_bg_t": "only background, the box tiled (only-bg-t)", "only_bg_f": "only background, the animal's shape filled from around it",
    "mixed_same": "the animal on another photo of its breed (mixed-same)",
    "mixed_rand": "the animal on a photo of another breed (mixed-rand)",
}  # fmt: skip
HOLE = "*Not there yet: run the same command again.*\n"


def write(pieces: Pieces, about: Row, removals: Removals, out: Path) -> None:
    """evidence-background.md and .csv in `out`; what is not finished is a hole."""
    out.mkdir(parents=True, exist_ok=True)
    found = pieces.found
    page = [
        "# Does a real ViT answer from the background, and does removing heads change that?\n",
        f"![Accuracy on composites, BIR by every look, and what removing heads does]({NAME}.png)\n",
        (
            "Thin lines: 95 % intervals. Grey bars: controls. Below, a row for each of three ways"
            " to choose heads (the last is a plain control), a column for each measure; grey is"
            " what random heads do, cut off where they break the model. All other ways are in the"
            " tables.\n"
        ),
        *warnings(about),
        "## In short\n",
        "\n".join(f"- {line}" for line in short(found, about, removals)) or HOLE,
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
        removal_text(found, about, removals) if removals.chosen else HOLE,
        "\n## Every single head\n",
        singles_text(about, removals) if removals.singles else HOLE,
        "\n## Seconds\n",
        "\n".join(f"- {name}: {total:.1f}" for name, total in seconds(pieces).items()),
    ]
    (out / f"{NAME}.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    with (out / f"{NAME}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["table", "row", "K", "removed", "draw", "measure", "value", "low", "high"])
        writer.writerows(
            [f"{cell:.6g}" if isinstance(cell, float) else cell for cell in line]
            for line in lines(found, about, removals)
        )


def seconds(pieces: Pieces) -> dict[str, float]:
    """By kind of piece, and in all; reading photos and drawing is not in it."""
    kinds = {
        "masks": "masks",
        "scores,": "scores",
        "removed": "removals",
        "without": "removals",
        "random": "random removals",
    }
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
    precision = "float32" + (
        ", TF32 in mask search, gating, removals and (cuDNN's own choice) the patch embedding"
        if about["tf32"]
        else ""
    )
    tested = about["pets"] - about["chosen on"]
    return (
        f"Written by `{about['command']}` (seecause {__version__},"
        f" {' and '.join(sorted(pieces.machines))}, {precision}, seed {about['seed']}). Every"
        f" number with its interval: `{NAME}.csv`.\n\n- Model: {about['model']}, {about['heads']}"
        f" heads. Photos: {about['pets']} of Oxford-IIIT Pet, of {about['breeds']} breeds that"
        f" ImageNet has, with trimaps; {about['imagenet']} of ImageNet's validation set. An answer"
        f" is right if it is the top one of {about['classes']}.\n- Heads are scored on"
        f" {about['chosen on']} pets, each breed cut in two at random, all of them that are"
        " answered right (the paper takes 0.4); all about removals is measured on the other"
        f" {tested} pets and on ImageNet. K is not chosen: every K is shown.\n- A trimap's border"
        " shows fur and outline. It belongs to the animal wherever pictures are made or erased,"
        f" and counts for neither side in IoU.\n- Masks: {about['mask_steps']} steps, the paper's"
        f" settings. Composites: for each animal {about['mixes']} of either kind of background,"
        f" photos of the same half. Random heads: {about['draws']} sets of each size. Causal Head"
        f" Gating: {about['gating_masks']} masks, {about['gating_steps']} updates in each of its"
        " three fits (its authors take 10 and 500); only heads it calls interfering may go: both"
        " gates, pushed open (G+) and pushed shut (G-), at most 0.5 in the mean over"
        f" masks.{half_kept(pieces.found)} Regression: {about['regression_draws']} removals of each"
        " photo.\n- In brackets: 95 % bootstrap intervals over photos; of changes, paired."
    )


def accuracy_table(found: Row, about: Row) -> str:
    rows = [
        (
            name,
            str(len(one["top 1"])),
            str(mean(tensor(one["top 1"]))),
            str(mean(tensor(one["top 5"]))),
        )
        for name, one in (
            ("pets", found["plain"]["pets"]),
            ("ImageNet", found["plain"]["imagenet"]),
        )
    ]
    chance = (
        "control: chance",
        "",
        f"{1 / about['classes']:.3f}",
        f"{min(1.0, 5 / about['classes']):.3f}",
    )
    return table(("photos", "count", "top 1", "top 5"), [*rows, chance])


def composites_text(found: Row, about: Row) -> str:
    columns = {
        "right": "accuracy",
        "right among breeds": "accuracy among the breeds",
        "probability": "probability of the label",
        "another's": "control: another photo's breed",
    }
    rows = [
        (KINDS[kind], *(str(mean(tensor(found["kinds"][kind][key]))) for key in columns))
        for kind in (*ALONE, *MIXED)
    ]
    chance = (
        "control: chance",
        f"{1 / about['classes']:.3f}",
        f"{1 / about['breeds']:.3f}",
        f"{1 / about['classes']:.3f}",
        f"{1 / about['classes']:.3f}",
    )
    gaps = {
        key: [gap_of(found, key, about["mixes"], groups) for groups in (None, about["labels"])]
        for key in list(columns)[:3]
    }
    told = "; ".join(
        f"{columns[key]} {gap}, by breeds [{by_breed.low:.3f}, {by_breed.high:.3f}]"
        for key, (gap, by_breed) in gaps.items()
    )
    box, animal = (statistics.fmean(found[key]) for key in ("box", "animal"))
    return (
        "The script writes some photos and what was made of them beside this page, as"
        f" `{NAME}-photos.png`; it is not in the repository because it shows photos. Photos:"
        " Oxford-IIIT Pet (Parkhi et al. 2012), CC BY-SA 4.0; cut out, filled and recombined"
        f" here.\n\nAnimals take {animal:.2f} of the frame and their boxes {box:.2f}. To paste on"
        " another photo, its own animal must be gone: its shape, three pixels wider, is filled"
        " with smooth colour from around it (a pyramid of means). ImageNet-9 tiles the box"
        " instead, which here would leave less of the photo (boxes without a strip of eight pixels"
        f" beside them: {found['untiled']}; filled in only-bg-t too). A rim of its own background"
        f" comes with an animal, since trimaps draw borders wide. All {len(found['box'])} pets;"
        " mixed photos count with the mean over their backgrounds. *Among the breeds*: the top one"
        " of these classes only. *Control: another photo's breed*: answers that are the label of a"
        " photo of another breed instead, which for mixed-rand is the (first) background's: how"
        " often a label is met that has nothing to do with the animal. Shapes are those of"
        " trimaps, nothing is guessed, so masks in the centre or by lot have no place here.\n\n"
        + table(("kind of photo", *columns.values()), [*rows, chance])
        + "\n\nBG-gap (mixed-same less mixed-rand; *by breeds*: an interval from drawing whole"
        f" breeds): {told}. Pasting alone, from original to mixed-same: accuracy "
        + mean(
            tensor(found["kinds"]["mixed_same"]["right"])
            - tensor(found["kinds"]["original"]["right"])
        ).signed
        + "."
    )


def audit_text(found: Row, about: Row) -> str:
    told, rows = found["audit"], right_ones(found)
    apart = "; ".join(
        f"{name} masks less {control} {one.signed}"
        for name in ("discovered", "true")
        for control, one in control_differences(found, f"{name} masks, {CONTROL_FILL}").items()
    )
    overlap = [(name, str(mean(tensor(values)))) for name, values in told["iou"].items()]
    looks = [
        (
            name,
            *(str(mean(tensor(one[key])[rows])) for key in ("fig", "big")),
            str(bir(one, rows)),
            str(bir_by_photo(one, rows)),
        )
        for name, one in told["gains"].items()
    ]
    noise = max(one["noise"] for one in told["gains"].values())
    return (
        f"FIG: how far the answer moves without the animal (Jensen-Shannon, nats). BIG: without the background. BIR = BIG / (FIG + BIG). Means over the "
        f"{int(rows.sum())} pets that are answered right. `mean` is the paper's fill. *The animal on another breed's photo*: BIG by mixed-rand; FIG by another "
        f"breed's animal on the same background, filled. Controls erase what has nothing to do with the animal; "
        f"random pixels are a control of IoU only. Sizes differ: true masks, also another photo's, take "
        f"{statistics.fmean(found['composites']['animal']):.2f} of the frame, discovered ones and the centre {RHO}. Noise floor {noise:.1e}.\n\n"
        + table(("the background is taken away by", "FIG", "BIG", "BIR, ratio of means", "BIR, mean of ratios"), looks)
        + f"\n\nDifferences of BIR (ratio of means, {CONTROL_FILL}, same photos): {apart}."
        + f"\n\nHow well do discovered masks meet the animal? All pets; the border ({told['border']:.2f} of the pixels) is ignored. Masks keep {RHO} of the "
        "pixels whatever the animal's size.\n\n" + table(("mask", "IoU with the animal"),
        overlap) + "\n\nWhat `seecause heads audit` says with discovered and "
        "true masks and these fills, by its present rules (true masks before discovered ones, and of those the look that finds most):\n\n"
        + "\n".join(f"> {line}" for line in about["verdict"]["words"])
    )  # fmt: skip


def heads_text(found: Row, about: Row) -> str:
    """The best head of each method. Only CIGMA and what is like it, and gating, has a zero that
    means something."""
    rows = []
    for method, one in methods(found).items():
        value = torch.tensor(one["value"], dtype=torch.float64)
        layer, head = divmod(
            int(value.flatten().nan_to_num(nan=-torch.inf).argmax()), value.shape[1]
        )
        error = (
            float("nan") if one["error"] is None else one["error"][layer][head]
        )  # weights have none
        cigma = "cigma" in method or method.startswith(("regression", "loss gain"))
        count = (
            str(int((value > 0).sum())) if cigma or method.startswith("gating") else "-",
            str(sure(one)) if cigma else "-",
        )
        alone = "-" if one["accuracy"] is None else f"{one['accuracy'][layer][head]:.3f}"
        rows.append(
            (
                method,
                *count,
                f"{layer}.{head}",
                f"{value[layer, head]:.3g}" + (f" ± {error:.2g}" if error == error else ""),
                alone,
            )
        )
    chance = ("control: chance", "-", f"{0.0228 * about['heads']:.1f}", "-", "-", "-")
    return (
        "Higher scores are removed first; heads with scores of 0 or less stay. A head is layer.head, both from 0. Accuracy: on the photos that scored, all "
        "answered right by the whole model, without that head. Gating: 1 - G+ of heads it calls interfering, -G+ of all others. Taylor: the largest "
        "importance less the head's. Chance: heads above two standard errors if every score were noise.\n\n"
        + table(("method", "positive", "above two errors", "best head", "its score",
        "accuracy without it"), [*rows, chance])
        + gating_note(found, about)
    )  # fmt: skip


def removal_text(found: Row, about: Row, removals: Removals) -> str:
    """One table for each K."""
    whole = effects(found["nothing removed"][0], found["nothing removed"][0])
    parts = [
        (
            "The model without the K best heads of each method, and the change from the whole"
            " model. BG-gap and BIR: lower is better. BIR is that of pets which the whole model"
            " answers right, with the same erased pictures for every model. *Random*: mean over"
            " sets, in brackets the lowest and the highest set.\n"
        ),
        table(
            ("the whole model", *MEASURES),
            [("as it is", *(f"{whole[m].value:.3f}" for m in MEASURES))],
        ),
    ]
    for k in about["ks"]:
        rows = []
        for (method, at), one in removals.chosen.items():
            if at == k:
                cells = (
                    [
                        f"{one.effects[m].value:.3f}, {one.effects[m].change.signed}"
                        for m in MEASURES
                    ]
                    if one.heads
                    else ["-"] * len(MEASURES)
                )
                rows.append((method, str(len(one.heads)), *cells))
        for size in sorted(
            {len(one.heads) for (_, at), one in removals.chosen.items() if at == k}
            & set(removals.lots)
        ):
            rows.append(
                (
                    f"random, {size} head{'s' * (size > 1)}",
                    str(size),
                    *(spread(removals.lots[size], m) for m in MEASURES),
                )
            )
        parts.append(
            f"\n### K = {k}\n\n"
            + table(("heads removed by", "removed", *MEASURES), rows)
            + gating_note(found, about)
        )
    return "\n".join(parts)


def singles_text(about: Row, removals: Removals) -> str:
    """The heads whose removal lowers a BIR most, and what is missing."""
    parts = [
        f"Each head removed alone, whoever chose it or not: {len(removals.singles)} of"
        f" {about['heads']}; all of them are in the CSV. *Control*: the mean over them, in brackets"
        " the lowest and the highest, which is what a random head does."
    ]
    if removals.unseen:
        parts.append(
            "**Not measured yet:"
            f" {spelled(tuple(head for heads in removals.unseen for head in heads))}.** Places"
            " below are among the others."
        )
    for measure in BACKGROUND[1:]:
        order = sorted(removals.singles, key=lambda one: one.effects[measure].change.value)[:SHOWN]
        shown = (measure, "BG-gap", *ACCURACIES)
        rows = [
            (str(place), spelled(one.heads), *(one.effects[m].change.signed for m in shown))
            for place, one in enumerate(order, 1)
        ]
        rows.append(
            (
                "control",
                f"each of {len(removals.singles)}",
                *(spread(removals.singles, m).partition(", ")[2] for m in shown),
            )
        )
        parts.append(
            "\n"
            + table(
                (
                    "place",
                    "without",
                    f"change of {measure}",
                    "of BG-gap",
                    *(f"of {m}" for m in ACCURACIES),
                ),
                rows,
            )
        )
    return "\n".join(parts)


def gating_note(found: Row, about: Row) -> str:
    """What a reader of its rows must know, below the table they stand in."""
    there = any(method.startswith("gating") for method in methods(found))
    note = (
        f"\n\nRows of gating: {about['gating_masks']} masks and {about['gating_steps']} updates,"
        f" where its authors take 10 and 500.{half_kept(found)}"
    )
    return note * there


def half_kept(found: Row) -> str:
    """Runs of an earlier version did not keep G-."""
    lost = any(
        method.startswith("gating") and one.get("shut") is None
        for method, one in methods(found).items()
    )
    return " (Of this run G- was not kept: G+ alone decides here.)" * lost


def spread(drawn: list[Removal], measure: str) -> str:
    changes = [lot.effects[measure].change.value for lot in drawn]
    value = statistics.fmean(lot.effects[measure].value for lot in drawn)
    return f"{value:.3f}, {Estimate(statistics.fmean(changes), min(changes), max(changes)).signed}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    return "\n".join(
        [
            "| " + " | ".join(columns) + " |",
            "|" + "---|" * len(columns),
            *("| " + " | ".join(row) + " |" for row in rows),
        ]
    )


def lines(found: Row, about: Row, removals: Removals) -> Iterator[list[Any]]:
    """Of the CSV."""

    def line(
        name: str,
        row: str,
        measure: str,
        one: Estimate,
        k: Any = "",
        gone: Any = "",
        draw: Any = "",
    ) -> list[Any]:
        return [name, row, k, gone, draw, measure, one.value, one.low, one.high]

    for photos, one in found.get("plain", {}).items():
        yield from (line("plain", photos, key, mean(tensor(values))) for key, values in one.items())
    if "composites" in found:
        for kind, one in found["composites"]["kinds"].items():
            yield from (
                line("composites", kind, key, mean(tensor(values))) for key, values in one.items()
            )
        for name, groups in (("BG-gap", None), ("BG-gap, interval by breeds", about["labels"])):
            for key in ("right", "right among breeds", "probability"):
                yield line(
                    "composites",
                    name,
                    key,
                    gap_of(found["composites"], key, about["mixes"], groups),
                )
    if "audit" in found:
        rows = right_ones(found)
        yield from (
            line("audit", name, "IoU", mean(tensor(values)))
            for name, values in found["audit"]["iou"].items()
        )
        for name, one in found["audit"]["gains"].items():
            yield from (
                line("audit", name, key.upper(), mean(tensor(one[key])[rows]))
                for key in ("fig", "big")
            )
            yield line("audit", name, "BIR, ratio of means", bir(one, rows))
            yield line("audit", name, "BIR, mean of ratios", bir_by_photo(one, rows))
        for look in (f"{name} masks, {CONTROL_FILL}" for name in ("discovered", "true")):
            for control, one in control_differences(found, look).items():
                yield line(
                    "audit",
                    f"{look} less control: {control}",
                    "difference of BIR, ratio of means",
                    one,
                )
    sets = [(method, k, "", one) for (method, k), one in removals.chosen.items()]
    sets += [
        ("random", size, draw, one)
        for size, drawn in removals.lots.items()
        for draw, one in enumerate(drawn)
    ]
    sets += [(f"head {spelled(one.heads)}", 1, "", one) for one in removals.singles]
    for method, k, draw, one in sets:
        for measure, effect in one.effects.items():
            yield ["removal", method, k, len(one.heads), draw, measure, effect.value, "", ""]
            yield line(
                "removal", method, f"change of {measure}", effect.change, k, len(one.heads), draw
            )
