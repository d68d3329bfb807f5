"""What `seecause faithful` prints: a bar while it trains, and a table with a column for the network
as it is and one for what was changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from seecause.faithful import Evaluation, Intervention

LINE_EVERY = 30.0  # seconds between lines of progress where there is no terminal
_NAMES = {
    "average": "AA",
    "worst": "WGA",
    "worst_public": "WGA*",
    "background_gap": "BG-gap",
    "stage1_average": "stage 1",
    "auc": "AUC",
    "miou": "mIoU",
    "miou_public": "mIoU*",
    "miou_pictures": "IoU/picture",
    "mask_iou": "mask IoU",
    "keypoints": "Kp",
    "nmi": "NMI",
    "ari": "ARI",
    "kept": "kept",
    "empty": "empty",
}
_DIGITS = {"keypoints": ".2f", "empty": ".0f"}  # others have four
_NOTES = {
    "keypoints": (
        "Kp: mean distance of key points from where parts put them, in percent of the object's box;"
        " lower is better"
    ),
    "worst_public": "WGA*: as iFAM's public code has it, over some groups only (docs/faithful.md)",
    "miou_public": (
        "mIoU*: as iFAM's public code has it, on random cuts that hold some of the object"
        " (docs/faithful.md)"
    ),
}


def print_evaluation(evaluation: Evaluation) -> None:
    """A line for every number, so that all of them fit on a narrow terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = {"plain": evaluation.plain}
    if evaluation.changed is not None and evaluation.intervention is not None:
        columns[_in_words(evaluation.intervention)] = evaluation.changed
    title = f"{evaluation.data}, {evaluation.pictures} pictures"
    table = Table("", *columns, title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    shown = [key for key in _NAMES if any(key in column for column in columns.values())]
    for key in shown:
        digits = _DIGITS.get(key, ".4f")
        cells = [
            f"{numbers[key]:{digits}}" if key in numbers else "-" for numbers in columns.values()
        ]
        table.add_row(_NAMES[key], *cells)
    console = Console(highlight=False)
    console.print(table)
    for key, note in _NOTES.items():
        if key in shown:
            console.print(note)


def _in_words(change: Intervention) -> str:
    """What was changed."""
    gone = []
    if change.drop_parts:
        gone.append(f"part {', '.join(map(str, change.drop_parts))}")
    if change.quantile is not None:
        by = " by dot product" if change.by == "dot" else ""
        gone.append(f"tokens beyond {change.quantile:g}{by}")
    return f"without {' and '.join(gone)}" if gone else "no change: best on validation"


def is_first_process() -> bool:
    """Of those that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def training_bar(*, quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A bar with the last losses on a terminal, a line now and then elsewhere; in the first process
    only."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console, last = Console(stderr=True), time.monotonic()
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}"),
        TimeRemainingColumn(),
    )
    silent = quiet or not is_first_process()
    with Progress(
        *columns, console=console, transient=True, disable=silent or not console.is_terminal
    ) as bar:
        task = bar.add_task("training", total=None, line="")

        def on_step(done: int, total: int, line: str) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total)
            if line:
                bar.update(task, line=line)
            due = done == total or time.monotonic() - last >= LINE_EVERY
            if line and due and not silent and not console.is_terminal:
                last = time.monotonic()
                typer.echo(f"step {done} of {total}, {line}", err=True)

        yield on_step
