"""What `seecause faithful` prints about a network: a column for what it is, and one for what was
changed."""

from __future__ import annotations

from collections.abc import Sequence

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


def in_words(drop: Sequence[int], quantile: float | None, by: str = "distance") -> str:
    """What was changed."""
    gone = [f"part {', '.join(str(part) for part in drop)}"] if drop else []
    if quantile is not None:
        gone.append(f"tokens beyond {quantile:g}" + (" by dot product" if by == "dot" else ""))
    return f"without {' and '.join(gone)}" if gone else "no change: best on validation"


def print_table(rows: dict[str, dict[str, float]], *, title: str) -> None:
    """A line for every number, so that all of them fit on a narrow terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    known = [key for key in _NAMES if any(key in row for row in rows.values())]
    table = Table("", *rows, title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for key in known:
        table.add_row(
            _NAMES[key],
            *(
                f"{row[key]:{_DIGITS.get(key, '.4f')}}" if key in row else "-"
                for row in rows.values()
            ),
        )
    console = Console(highlight=False)
    console.print(table)
    for key, note in _NOTES.items():
        if key in known:
            console.print(note)
