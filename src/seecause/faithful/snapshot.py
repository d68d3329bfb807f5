"""A run on disk that survives kill -9: files appear whole or not at all.

RUN/config.json       what was asked
RUN/last.pt           everything needed to go on: weights, average, optimiser, scaler, generators,
place in the run
RUN/best/             the network of the best epoch on validation, as `sc.load("RUN/best")` and
`sc.faithful.load("RUN/best")` read it
RUN/log.csv           losses, a row every few steps          RUN/epochs.csv   validation, a row
every epoch
RUN/parts/*.png       parts of some validation pictures, after every epoch
RUN/evaluation.json   what `faithful evaluate` found, by the name of the dataset it was tested on
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from seecause.errors import BadOption, MissingWeights, SeecauseError
from seecause.faithful.config import TrainConfig, read_config
from seecause.faithful.net import IFAM
from seecause.faithful.save import load

CONFIG, LAST, BEST, EVALUATION = "config.json", "last.pt", "best", "evaluation.json"


@dataclass
class Place:
    """How far a run has come: `step` steps in all, `within` of them in this epoch."""

    epoch: int = 0
    within: int = 0
    step: int = 0
    best: float = -1.0
    best_epoch: int = -1


@dataclass
class Snapshot:
    """What `last.pt` holds. All state dicts are those of torch."""

    config: dict[str, Any]
    place: dict[str, Any]
    net: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    ema: dict[str, Any] | None = None
    generators: dict[str, Any] = field(default_factory=dict)


def write_snapshot(folder: Path, snapshot: Snapshot) -> None:
    path = folder / LAST
    draft = path.with_suffix(".partial")
    with draft.open("wb") as file:
        torch.save({known.name: getattr(snapshot, known.name) for known in fields(snapshot)}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_snapshot(folder: Path, config: TrainConfig) -> Snapshot | None:
    """The last snapshot of this very run, on the CPU; None where there is none. A folder of another
    run is refused."""
    path = folder / LAST
    if not path.is_file():
        return None
    try:
        found = Snapshot(**torch.load(path, map_location="cpu", weights_only=True))
        told = TrainConfig(**found.config)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        EOFError,
        OSError,
        pickle.UnpicklingError,
        SeecauseError,
    ) as broken:
        raise MissingWeights(
            str(path),
            f"not a snapshot that can be read ({broken})",
            "Delete it to begin anew, or give another folder",
        ) from broken
    different = told.differs(config)
    if different:
        raise BadOption(
            "out", str(folder), f"a new folder: the run there differs in {', '.join(different)}"
        )
    return found


def write_best(folder: Path, net: IFAM, **told: Any) -> None:
    """Replace RUN/best."""
    draft, old = folder / f"{BEST}.partial", folder / f"{BEST}.old"
    shutil.rmtree(draft, ignore_errors=True)
    net.save(draft, **told)
    _mend(folder)
    if (folder / BEST).exists():
        (folder / BEST).rename(old)
    draft.rename(folder / BEST)
    shutil.rmtree(old, ignore_errors=True)


def keep_thresholds(folder: Path, net: IFAM) -> None:
    """Write RUN/best again, with what was calibrated since; what its card tells of the training
    stays."""
    card = json.loads((folder / BEST / "ifam.json").read_text(encoding="utf-8"))
    write_best(
        folder, net, **{name: card[name] for name in ("epoch", "validation") if name in card}
    )


def read_evaluations(folder: Path) -> dict[str, Any]:
    """By the name of the dataset; a file of one evaluation alone, as there was before, is that of
    its own dataset."""
    path = folder / EVALUATION
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not a table")
    except ValueError as broken:
        raise BadOption(
            EVALUATION,
            str(path),
            f"what `faithful evaluate` wrote ({broken}); move it away to begin anew",
        ) from broken
    return {found["data"]: found} if isinstance(found.get("data"), str) else found


def keep_evaluation(folder: Path, found: dict[str, Any]) -> None:
    """Add what was found on `found["data"]`, instead of what is there of the same dataset."""
    path = folder / EVALUATION
    draft = path.with_suffix(".partial")
    draft.write_text(
        json.dumps({**read_evaluations(folder), found["data"]: found}, indent=2) + "\n",
        encoding="utf-8",
    )
    draft.replace(path)


def _mend(folder: Path) -> None:
    """Undo a replacement that was killed between its two renames."""
    old = folder / f"{BEST}.old"
    if old.is_dir():
        if (folder / BEST).is_dir():
            shutil.rmtree(old)
        else:
            old.rename(folder / BEST)


def open_run(folder: str | Path) -> tuple[TrainConfig, IFAM]:
    """The configuration of a run and its best network, in eval mode."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise MissingWeights(
            str(folder),
            f"no {CONFIG} there",
            "Give the folder that `seecause faithful train --out` wrote",
        )
    _mend(folder)
    if not (folder / BEST).is_dir():
        raise MissingWeights(
            str(folder),
            "no epoch of this run is finished",
            "Run `seecause faithful train` again to go on",
        )
    return read_config(folder / CONFIG), load(folder / BEST).eval()
