"""What surrounds training: the processes of a run, and its folder, which survives kill -9 (files
appear whole or not at all).

RUN/config.json      what was asked
RUN/last.pt          all that is needed to go on: weights, average, optimiser, scaler, generators,
                     position in the run
RUN/best/            the network of the best epoch on validation, as `sc.load("RUN/best")` and
                     `sc.faithful.load("RUN/best")` read it
RUN/log.csv          losses, a row every few steps
RUN/epochs.csv       validation, a row every epoch
RUN/parts/*.png      parts of some validation pictures, after every epoch
RUN/evaluation.json  what `faithful evaluate` found, by the name of the dataset it was tested on
"""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seecause._files import (
    atomic_folder,
    mend_folder,
    unsealed,
    write_atomic,
    write_json,
    write_sealed,
)
from seecause.errors import BadOption, MissingExtra, MissingWeights, SeecauseError
from seecause.faithful.checkpoint import load
from seecause.faithful.config import TrainConfig, read_config
from seecause.faithful.losses import LossWeights
from seecause.faithful.net import IFAM

CONFIG, LAST, BEST, EVALUATION = "config.json", "last.pt", "best", "evaluation.json"
LOSSES = ("total", *(loss.name for loss in fields(LossWeights)))
STEP_COLUMNS = ("epoch", "step", "learning_rate", *LOSSES, "accuracy", "seconds")
_MEASURED = ("average", "worst", "stage1_average", "auc", "miou", "miou_pictures", "mask_iou")
_PLAIN = b"PK"  # how older snapshots begin, which have no checksum
EPOCH_COLUMNS = ("epoch", "step", *_MEASURED, "kept", "empty", "best")


@dataclass(frozen=True)
class Processes:
    """`world` processes, of which this is `rank`."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """What every process has, by rank."""
        if self.world == 1:
            return [mine]
        everyones: list[Any] = [None] * self.world
        dist.all_gather_object(everyones, mine)
        return everyones

    def from_first(self, mine: Any) -> Any:
        """What the first process has: of what is decided, all must decide alike."""
        if self.world == 1:
            return mine
        message = [mine]
        dist.broadcast_object_list(message, src=0, device=self.device)
        return message[0]

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of all processes, each of which ran its share of a batch."""
        if self.world == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        whole = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(whole)
        sums = whole.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))

    def mean(self, values: Tensor) -> Tensor:
        """Over processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values / self.world

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def join_processes(device: str = "auto") -> Iterator[Processes]:
    """Join the others, where `torchrun` started some and tells by the environment; NCCL between
    GPUs, gloo between CPUs."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind.startswith("cuda") and not torch.cuda.is_available():
        expected = "a GPU that torch can use; here there is none, so give 'cpu'"
        raise BadOption("device", device, expected)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(0, 1, torch.device(kind))
        return
    if dist.is_initialized():
        yield joined_processes(torch.device(kind))
        return
    if kind.startswith("cuda"):
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
        dist.init_process_group("nccl", device_id=where)
    else:
        where = torch.device(kind)
        dist.init_process_group("gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), where)
    finally:
        dist.destroy_process_group()


def joined_processes(device: torch.device) -> Processes:
    """Those that were joined already; else this one alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return Processes(0, 1, device)
    return Processes(dist.get_rank(), dist.get_world_size(), device)


@dataclass
class Position:
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
    position: dict[str, Any]
    net: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    ema: dict[str, Any] | None = None
    generators: dict[str, Any] = field(default_factory=dict)


def write_snapshot(folder: Path, snapshot: Snapshot) -> None:
    # not `asdict`: it would copy every weight
    contents = {each.name: getattr(snapshot, each.name) for each in fields(snapshot)}
    file = io.BytesIO()
    torch.save(contents, file)
    write_sealed(folder / LAST, file.getvalue())


def read_snapshot(folder: Path, config: TrainConfig) -> Snapshot | None:
    """The last snapshot of this very run, on the CPU; None where there is none. A folder of another
    run is refused, and a snapshot that is not what was written to the last bit."""
    path = folder / LAST
    if not path.is_file():
        return None
    unreadable = (
        *(RuntimeError, TypeError, ValueError, EOFError, OSError, LookupError, AttributeError),
        *(AssertionError, MemoryError, pickle.UnpicklingError, struct.error),
    )
    try:
        content = path.read_bytes()
        if not content.startswith(_PLAIN):
            content = unsealed(content)
        if content is None:
            raise ValueError("it does not fit its checksum")
        contents = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        snapshot = Snapshot(**contents)
        before = TrainConfig(**snapshot.config)
    except (*unreadable, SeecauseError) as broken:
        reason = f"not a snapshot that can be read ({broken})"
        remedy = "Delete it to begin anew, or give another folder"
        raise MissingWeights(str(path), reason, remedy) from broken
    different = before.differs(config)
    if different:
        expected = f"a new folder: the run there differs in {', '.join(different)}"
        raise BadOption("out", str(folder), expected)
    return snapshot


def write_best(folder: Path, net: IFAM, **metadata: Any) -> None:
    """Replace RUN/best."""
    with atomic_folder(folder / BEST) as draft:
        net.save(draft, **metadata)


def keep_thresholds(folder: Path, net: IFAM) -> None:
    """Write RUN/best again, with what was calibrated since; what its card tells of the training
    stays."""
    card = json.loads((folder / BEST / "ifam.json").read_text(encoding="utf-8"))
    metadata = {name: card[name] for name in ("epoch", "validation") if name in card}
    write_best(folder, net, **metadata)


def open_run(folder: str | Path) -> tuple[TrainConfig, IFAM]:
    """The configuration of a run and its best network, in eval mode."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        remedy = "Give the folder that `seecause faithful train --out` wrote"
        raise MissingWeights(str(folder), f"no {CONFIG} there", remedy)
    mend_folder(folder / BEST)
    if not (folder / BEST).is_dir():
        remedy = "Run `seecause faithful train` again to go on"
        raise MissingWeights(str(folder), "no epoch of this run is finished", remedy)
    return read_config(folder / CONFIG), load(folder / BEST).eval()


def read_evaluations(folder: Path) -> dict[str, Any]:
    """By the name of the dataset; a file of one evaluation alone, as there was before, is that of
    its own dataset."""
    path = folder / EVALUATION
    if not path.is_file():
        return {}
    try:
        evaluations = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(evaluations, dict):
            raise ValueError("not a table")
    except (ValueError, RecursionError) as broken:
        expected = f"what `faithful evaluate` wrote ({broken}); move it away to begin anew"
        raise BadOption(EVALUATION, str(path), expected) from broken
    name = evaluations.get("data")
    return {name: evaluations} if isinstance(name, str) else evaluations


def keep_evaluation(folder: Path, evaluation: dict[str, Any]) -> None:
    """Add what was found on `evaluation["data"]`, instead of what is there of the same dataset."""
    evaluations = {**read_evaluations(folder), evaluation["data"]: evaluation}
    write_json(folder / EVALUATION, evaluations)


class CsvLog:
    """A CSV file that grows. Opening it again drops rows after `step`, which a continued run will
    write anew."""

    def __init__(self, path: Path, columns: Sequence[str], *, step: int = 0):
        self.path, self.columns = path, columns
        rows = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if _is_upto(row, step)]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(path, text.getvalue())

    def add(self, row: dict[str, Any]) -> None:
        rounded = {
            key: float(f"{value:.6g}") if isinstance(value, float) else value
            for key, value in row.items()
        }
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="", extrasaction="ignore")
            writer.writerow(rounded)


def _is_upto(row: dict[str, str], step: int) -> bool:
    """A row that was cut short in the middle is none."""
    number = row.get("step") or ""
    return None not in row.values() and number.isdigit() and int(number) <= step


class ScalarBoard:
    """TensorBoard, or nothing."""

    def __init__(self, folder: Path | None):
        self.writer: Any = None
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise MissingExtra("tensorboard", "tools") from None
            self.writer = SummaryWriter(str(folder))

    def add(self, kind: str, row: dict[str, Any]) -> None:
        if self.writer is not None:
            for name, value in row.items():
                if isinstance(value, float):
                    self.writer.add_scalar(f"{kind}/{name}", value, row["step"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
