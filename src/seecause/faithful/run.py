"""What surrounds training: the processes of a run, networks in a folder, and the folder of a run,
which survives kill -9 (files appear whole or not at all).

RUN/config.json      what was asked
RUN/last.pt          all that is needed to go on: weights, average, optimiser, scaler, generators,
                     position in the run
RUN/best/            the network of the best epoch on validation, as `sc.load("RUN/best")` and
                     `sc.faithful.load("RUN/best")` read it
RUN/log.csv          losses, a row every few steps
RUN/epochs.csv       validation, a row every epoch
RUN/parts/*.png      parts of some validation pictures, after every epoch
RUN/evaluation.json  what `faithful evaluate` found, by the name of the dataset it was tested on

Of a network, NAME.json (its card) says how it is built and NAME.safetensors holds its weights. The
backbone is described as its library builds it:

    {"library": "timm", "name": NAME, "options": {...}}                    timm.create_model
    {"library": "timm", "class": "VisionTransformer", "arguments": {...}}  the class itself
    {"library": "transformers", "class": NAME, "config": {...}}            with its configuration
    {"library": "torchvision", "name": NAME, "options": {...}}             models.get_model
"""

from __future__ import annotations

import csv
import json
import os
import pickle
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from seecause.errors import BadOption, DataMissing, SeecauseError
from seecause.faithful.config import TrainConfig, read_config, read_table
from seecause.faithful.losses import LossWeights
from seecause.faithful.net import IFAM, Thresholds
from seecause.files import (
    atomic_file,
    atomic_folder,
    csv_text,
    mend_folder,
    write_atomic,
    write_json,
)
from seecause.models.load import Source, build_native, fill, saved
from seecause.models.preprocess import Preprocess

CONFIG, LAST, BEST, EVALUATION = "config.json", "last.pt", "best", "evaluation.json"
LOSSES = ("total", *(loss.name for loss in fields(LossWeights)))
STEP_COLUMNS = ("epoch", "step", "learning_rate", *LOSSES, "accuracy", "seconds")
_MEASURED = ("average", "worst", "stage1_average", "auc", "miou", "miou_pictures", "mask_iou")
_UNREADABLE = (
    *(RuntimeError, TypeError, ValueError, EOFError, OSError, LookupError, AttributeError),
    *(AssertionError, MemoryError, pickle.UnpicklingError, struct.error, SeecauseError),
)
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
        yield joined_processes(where)
    finally:
        dist.destroy_process_group()


def joined_processes(device: torch.device) -> Processes:
    """Those that were joined already; else this one alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return Processes(0, 1, device)
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def save_network(net: IFAM, folder: Path, name: str, metadata: dict[str, Any]) -> Path:
    """Write the card and the weights; `metadata` is added to the card. Returns the card's path."""
    # where heads of stage 1 are gone, distances are no longer those that were calibrated
    stale = net.options.stages == 1 and metadata.get("removed")
    thresholds = [] if stale else [asdict(each) for each in net.thresholds.values()]
    card = {
        "name": name,
        "architecture": {
            "library": "seecause",
            "class": "IFAM",
            "arguments": net.arguments,
            "backbone": description(net),
        },
        "classes": list(net.class_names),
        "preprocess": None if net.preprocess is None else asdict(net.preprocess),
        "thresholds": thresholds,
        **metadata,
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.detach().cpu().contiguous() for key, value in net.state_dict().items()}
    write_atomic(folder / f"{name}.safetensors", save(weights))
    write_json(folder / f"{name}.json", card)
    return folder / f"{name}.json"


def load(folder: str | Path, name: str = "ifam") -> IFAM:
    """The network that `net.save` wrote, to train or to intervene on; `sc.load(folder)` gives a
    view of it."""
    net = saved(Path(folder), name).module
    assert isinstance(net, IFAM)
    return net


def from_card(card: dict[str, Any], state: dict[str, Tensor], source: str) -> Source:
    """A network from its card and its weights (`models/load.py` calls this)."""
    architecture, frame = card["architecture"], card["preprocess"]
    backbone, arguments = architecture["backbone"], dict(architecture["arguments"])
    if card["classes"]:
        arguments["classes"] = card["classes"]
    preprocess = Preprocess(**_with_tuples(frame)) if frame else None
    net = IFAM(build_native(backbone), **arguments, preprocess=preprocess, architecture=backbone)
    fill(net, state, source)
    for values in card["thresholds"]:
        thresholds = Thresholds(**_with_tuples(values))
        net.thresholds[thresholds.quantile, thresholds.by] = thresholds
    return Source(net.eval(), {}, architecture)


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}


def description(net: IFAM) -> dict[str, Any]:
    """How the backbone is built, checked: a card that builds another network would only be noticed
    when it is loaded."""
    native = net.stage1.tower.native
    described = net.architecture or describe(native)
    with torch.device("meta"):
        again = IFAM(build_native(described), **net.arguments)
    shapes, built = (
        {key: tuple(value.shape) for key, value in each.state_dict().items()}
        for each in (net, again)
    )
    for key in sorted(shapes.keys() | built.keys()):
        if shapes.get(key) != built.get(key):
            difference = f"another {key}: {built.get(key)} instead of {shapes.get(key)}"
            raise _undescribed(native, f"building it so gives {difference}")
    return described


def describe(native: Any) -> dict[str, Any]:
    """How the library builds this backbone, where the module itself tells."""
    library = type(native).__module__.split(".")[0]
    if library == "transformers":
        config = native.config.to_dict()
        return {"library": library, "class": type(native).__name__, "config": config}
    pretrained = getattr(native, "pretrained_cfg", None) or {}
    if library == "timm" and pretrained.get("architecture"):
        options = {"img_size": list(native.patch_embed.img_size), "num_classes": 0}
        return {"library": library, "name": pretrained["architecture"], "options": options}
    raise _undescribed(native, "the module does not tell how it was built")


def _undescribed(native: nn.Module, reason: str) -> BadOption:
    example = "{'library': 'timm', 'class': 'VisionTransformer', 'arguments': {...}}"
    expected = f"how {type(native).__name__} is built, as IFAM(..., architecture={example})"
    return BadOption("architecture", None, f"{expected}: {reason}")


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
    with atomic_file(folder / LAST) as file:
        torch.save(contents, file)


def read_snapshot(folder: Path, config: TrainConfig) -> Snapshot | None:
    """The last snapshot of this very run, on the CPU; None where there is none. A folder of another
    run is refused, and so is a snapshot that cannot be read."""
    path = folder / LAST
    if not path.is_file():
        return None
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
        snapshot = Snapshot(**contents)
        before = TrainConfig(**snapshot.config)
    except _UNREADABLE as broken:
        reason = f"not a snapshot that can be read ({broken})"
        remedy = "Delete it to begin anew, or give another folder"
        raise DataMissing(str(path), reason, remedy) from broken
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
        raise DataMissing(str(folder), f"no {CONFIG} there", remedy)
    mend_folder(folder / BEST)
    if not (folder / BEST).is_dir():
        remedy = "Run `seecause faithful train` again to go on"
        raise DataMissing(str(folder), "no epoch of this run is finished", remedy)
    return read_config(folder / CONFIG), load(folder / BEST).eval()


def read_evaluations(folder: Path) -> dict[str, Any]:
    """By the name of the dataset; a file of one evaluation alone, as there was before, is that of
    its own dataset."""
    path = folder / EVALUATION
    if not path.is_file():
        return {}
    expected = "what `faithful evaluate` wrote ({}); move it away to begin anew"
    evaluations = read_table(path, EVALUATION, expected)
    name = evaluations.get("data")
    return {name: evaluations} if isinstance(name, str) else evaluations


def keep_evaluation(folder: Path, evaluation: dict[str, Any]) -> None:
    """Add what was found on `evaluation["data"]`, instead of what is there of the same dataset."""
    write_json(folder / EVALUATION, {**read_evaluations(folder), evaluation["data"]: evaluation})


class CsvLog:
    """A CSV file that grows. Opening it again drops rows after `step`, which a continued run will
    write anew."""

    def __init__(self, path: Path, columns: Sequence[str], *, step: int = 0):
        self.path, self.columns = path, columns
        rows = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if _is_upto(row, step)]
        write_atomic(path, csv_text([columns, *map(self._cells, rows)]))

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(csv_text([self._cells(row)]))

    def _cells(self, row: dict[str, Any]) -> list[Any]:
        values = (row.get(column, "") for column in self.columns)
        return [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]


def _is_upto(row: dict[str, str], step: int) -> bool:
    """A row that was cut short in the middle is none."""
    number = row.get("step") or ""
    return None not in row.values() and number.isdigit() and int(number) <= step
