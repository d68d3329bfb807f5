"""A run's numbers, row by row: CSV files that grow, and TensorBoard where it is asked for."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seecause.errors import MissingExtra

LOSSES = (
    "total",
    "class1",
    "class2",
    "presence",
    "background",
    "total_variation",
    "entropy",
    "equivariance",
    "orthogonality",
)
STEP_COLUMNS = ("epoch", "step", "learning_rate", *LOSSES, "accuracy", "seconds")
EPOCH_COLUMNS = (
    "epoch",
    "step",
    "average",
    "worst",
    "stage1_average",
    "auc",
    "miou",
    "miou_pictures",
    "mask_iou",
    "kept",
    "empty",
    "best",
)


class Rows:
    """A CSV file. Opening it again drops rows after `step`, which a continued run will write
    anew."""

    def __init__(self, path: Path, columns: Sequence[str], *, step: int = 0):
        self.path, self.columns = path, columns
        kept = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                kept = [
                    row
                    for row in csv.DictReader(file)
                    if (row.get("step") or "").isdigit() and int(row["step"]) <= step
                ]
        draft = path.with_suffix(".partial")
        with draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
        draft.replace(path)

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="", extrasaction="ignore")
            writer.writerow(
                {
                    key: float(f"{value:.6g}") if isinstance(value, float) else value
                    for key, value in row.items()
                }
            )


class Board:
    """TensorBoard, or nothing."""

    def __init__(self, folder: Path | None):
        self.writer: Any = None
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise MissingExtra("tensorboard", "logs") from None
            self.writer = SummaryWriter(str(folder))

    def add(self, kind: str, row: dict[str, Any]) -> None:
        if self.writer is not None:
            for name, value in row.items():
                if isinstance(value, float):
                    self.writer.add_scalar(f"{kind}/{name}", value, row["step"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
