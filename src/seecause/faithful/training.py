"""Train iFAM on a dataset (arXiv 2506.08915): on a CPU, a GPU, or many under `torchrun`.

Both stages learn together in one run. What is random depends on (seed, epoch, step, sample) alone,
so one process and many with the same batch end with the same weights, and so does a run that was
killed and continued.

RUN/config.json      the configuration
RUN/last.pt          the state from which a run continues
RUN/best/            the network of the best epoch on validation, for `sc.load("RUN/best")` and
                     `sc.faithful.load("RUN/best")`
RUN/log.csv          losses, a row every few steps
RUN/epochs.csv       validation, a row every epoch
RUN/evaluation.json  the results of `faithful evaluate`, by dataset
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

from seecause.data.dataset import Names, open_data
from seecause.errors import BadOption, SeecauseError
from seecause.faithful.data import (
    Augment,
    TrainingImages,
    epoch_order,
    open_split,
    pass_rows,
    read_batches,
)
from seecause.faithful.evaluation import BEST, CONFIG, Examination, examine, merge
from seecause.faithful.losses import LossWeights, TrainingLosses, parameter_groups
from seecause.faithful.net import IFAM, IFAMOptions
from seecause.files import atomic_file, atomic_folder, write_atomic, write_json
from seecause.loading import load
from seecause.models.block import Named
from seecause.models.preprocess import Preprocess
from seecause.options import Count, NotNegative, Positive, Whole, check_options

LAST = "last.pt"
LOSSES = ("total", *(loss.name for loss in dataclasses.fields(LossWeights)))
STEP_COLUMNS = ("epoch", "step", "learning_rate", *LOSSES, "accuracy", "seconds")
_MEASURED = ("average", "worst", "stage1_average", "auc", "miou", "kept", "empty")
EPOCH_COLUMNS = ("epoch", "step", *_MEASURED, "best")
# settings that change no weight and may differ when a run is continued
_FREE = ("out", "device", "workers", "log_every", "snapshot_every")
_REMEDY = "lower learning_rate or head_factor, or use precision='float32', in a new folder."
LARGE = 384  # ImageNet test images of this side (pixels) or larger are not cropped
# called with the finished steps, all steps, and a line if a row was logged
OnStep = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run; the defaults are the paper's for CUB and Waterbirds.

    Attributes:
        data: A dataset without its split, such as `waterbirds:PATH`. The best epoch is chosen on
            its validation split; the test split is never opened.
        backbone: A plain vision transformer, as `sc.load` takes it.
        out: The folder of the run.
        parts: The number of parts.
        val: Another dataset to validate on, with its split.
        limit: The number of training images, spread evenly.
        val_limit: The number of validation images.
        weights: Weights of the backbone: a file, or "random".
        size: Pixels of a side of an image; by default the backbone's own.
        mean: Of each channel of pixels in [0, 1]; by default the backbone's own.
        std: Likewise.
        options: Fields of `IFAMOptions`.
        losses: Weights of losses: fields of `LossWeights`.
        epochs: The number of epochs.
        batch: Images in a step, over all processes and passes.
        accumulate: Forward passes in a step.
        learning_rate: For a batch of 16; it is scaled by the square root of the batch.
        prototype_factor: Learning rate of prototypes, relative to backbones.
        head_factor: Learning rate of classifiers and norms, relative to backbones.
        schedule: "cosine", or "step" (PDiscoFormer), which halves the rate every four epochs.
        weight_decay: Is normalised by the number of steps.
        clip: The largest norm of the gradients.
        precision: "auto" is bfloat16 on GPUs that compute in it, else float32.
        ema: Average the weights, as the paper does on ImageNet.
        select: Metric of the best epoch: "average" or "worst" accuracy, or "auc".
        augment: See `seecause.faithful.data`.
        seed: Of everything random.
        device: "auto" is a GPU if there is one.
        workers: Processes that read images, for each process that trains.
        log_every: Steps between rows of the log.
        snapshot_every: Steps between snapshots; 0: at the end of each epoch only.

    Example:
        >>> import seecause as sc
        >>> settings = {"data": "critters:simplicity", "backbone": "builtin:critters-vit"}
        >>> sc.faithful.TrainConfig(**settings, out="run", parts=4).epochs
        90
    """

    data: str
    backbone: str
    out: str
    parts: Count = 8
    val: str | None = None
    limit: Count | None = None
    val_limit: Count | None = None
    weights: str | None = None
    size: Count | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, Any] = field(default_factory=dict)
    epochs: Count = 90
    batch: Count = 128
    accumulate: Count = 1
    learning_rate: Positive = 1e-6
    prototype_factor: Positive = 1e3
    head_factor: Positive = 1e4
    schedule: Literal["cosine", "step"] = "cosine"
    weight_decay: NotNegative = 0.05
    clip: Positive = 2.0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    ema: bool = False
    select: Literal["average", "worst", "auc"] = "average"
    augment: Augment = "birds"
    seed: Whole = 0
    device: str = "auto"
    workers: Whole = 4
    log_every: Count = 10
    snapshot_every: Whole = 0

    def __post_init__(self) -> None:
        check_options("TrainConfig", TrainConfig, dataclasses.asdict(self))
        check_options("losses", LossWeights, self.losses)
        check_options("options", IFAMOptions, self.options)
        for name in ("mean", "std"):  # JSON and TOML have lists
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(values))

    def pace(self, epoch: int) -> float:
        """Share of the learning rate in an epoch, counted from 0."""
        return cosine(epoch, self.epochs) if self.schedule == "cosine" else 0.5 ** (epoch // 4)


def read_config(path: str | Path | None, **settings: Any) -> TrainConfig:
    """A configuration from a TOML or JSON file; `settings` that are not None win, name by name in
    `options` and `losses`."""
    merged: Named = {}
    if path is not None:
        text = Path(path).read_text(encoding="utf-8")
        try:
            merged = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
        except ValueError as broken:
            raise BadOption("config", str(path), f"valid TOML or JSON ({broken})") from broken
    for name, value in settings.items():
        if name in ("options", "losses"):
            merged[name] = {**merged.get(name, {}), **(value or {})}
        elif value is not None:
            merged[name] = value
    check_options("TrainConfig", TrainConfig, merged)
    for name in ("data", "backbone", "out"):
        if name not in merged:
            raise BadOption(name, None, "a value, on the command line or in the configuration")
    return TrainConfig(**merged)


def cosine(epoch: int, epochs: int) -> float:
    """Share of the learning rate in an epoch counted from 0: half a cosine to zero, constant inside
    an epoch, without warm-up."""
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


def set_pace(groups: Iterable[Named], share: float) -> None:
    """Give every group of an optimiser this share of its first learning rate."""
    for group in groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * share


@dataclass(frozen=True)
class Processes:
    """`world` processes, of which this is `rank`."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """The values of all processes, by rank."""
        values: list[Any] = [mine] * self.world
        if self.world > 1:
            dist.all_gather_object(values, mine)
        return values

    def from_first(self, mine: Any) -> Any:
        """The value of the first process, for a common decision."""
        return self.gather(mine)[0]

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of all processes, each of which ran its share of a batch."""
        if self.world > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values / self.world


@contextmanager
def join_processes(device: str = "auto") -> Iterator[Processes]:
    """Join the other processes where `torchrun` started some; NCCL between GPUs, gloo between
    CPUs."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    joins = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if joins and where.type == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
        dist.init_process_group("nccl", device_id=where)
    elif joins:
        dist.init_process_group("gloo")
    try:
        yield joined_processes(where)
        if joins:
            dist.barrier()  # in torch 2.6 the last process waits forever if others left before it
    finally:
        if joins:
            dist.destroy_process_group()


def joined_processes(device: torch.device) -> Processes:
    """The processes that were joined already, or this one alone."""
    if not dist.is_initialized():
        return Processes(0, 1, device)
    return Processes(dist.get_rank(), dist.get_world_size(), device)


@dataclass(frozen=True)
class TrainResult:
    """A finished run: `RUN/best` holds the network."""

    out: str
    steps: int
    best_epoch: int
    best: float  # of `select`, on validation


def train(config: TrainConfig, *, on_step: OnStep = lambda done, total, line: None) -> TrainResult:
    """Train a network, or continue a run that was stopped.

    Under `torchrun` each process calls this with the same configuration.

    Args:
        config: The configuration; `config.out` is the folder of the run.
        on_step: Called after each step with the steps done, the steps in all, and a line where the
            log got a row.

    Returns:
        A `TrainResult`, when all processes are done.

    Example:
        >>> import seecause as sc
        >>> config = sc.faithful.TrainConfig(
        ...     data="critters:simplicity", backbone="builtin:critters-vit", parts=4, batch=4,
        ...     out="/tmp/seecause-run", epochs=1, limit=4, val_limit=8, workers=0, device="cpu",
        ... )
        >>> sc.faithful.train(config).steps
        1
    """
    with join_processes(config.device) as processes:
        return Run(config, processes).go(on_step)


@dataclass
class Position:
    """The position of a run: `step` steps in total, `within` of them in this epoch."""

    epoch: int = 0
    within: int = 0
    step: int = 0
    best: float = -1.0
    best_epoch: int = -1


class Run:
    """The state of a training run."""

    def __init__(self, config: TrainConfig, processes: Processes):
        self.config, self.processes, self.folder = config, processes, Path(config.out)
        images = open_split(config.data, "train", limit=config.limit)
        if config.val is None:
            self.val = open_split(config.data, "val", limit=config.val_limit)
        else:
            self.val = open_data(config.val, limit=config.val_limit)
        if self.val.classes != images.classes:
            expected = f"a dataset with the classes of {config.data}"
            raise BadOption("val", self.val.name, expected)
        self.net = new_net(config, images.classes).to(processes.device).train()
        self.data = TrainingImages(images, config.augment, self.net.preprocess, config.seed)
        self.data.masks = self.net.options.selects == "given"
        shares = config.accumulate * processes.world
        if config.batch % shares or config.batch > len(images):
            passes = f"{processes.world} processes of {config.accumulate} passes"
            expected = f"a multiple of {shares} ({passes}), and at most {len(images)} images"
            raise BadOption("batch", config.batch, expected)
        self.epoch_steps = len(images) // config.batch
        self.steps = self.epoch_steps * config.epochs
        self.optimizer = new_optimizer(config, self.net, self.steps)
        precision, cuda = config.precision, processes.device.type == "cuda"
        if precision == "auto":
            native = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
            precision = "bfloat16" if native else "float32"
        self.precision: torch.dtype = getattr(torch, precision)
        self.ema: Any = None
        if config.ema:
            from timm.utils import ModelEmaV3

            # decay min(0.9999, 1 - (1 + t)^(-2/3)); the first update copies
            self.ema = ModelEmaV3(self.net, decay=0.9999, use_warmup=True)
        self.position = Position()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._restore()
        self.losses = TrainingLosses(self.net, LossWeights(**config.losses))
        processes.gather(None)  # all have read the snapshot before the first writes
        if processes.first:
            write_json(self.folder / CONFIG, dataclasses.asdict(config))
            step = self.position.step
            self.log = CsvLog(self.folder / "log.csv", STEP_COLUMNS, step=step)
            self.epochs = CsvLog(self.folder / "epochs.csv", EPOCH_COLUMNS, step=step)

    @property
    def validated(self) -> IFAM:
        """The network that is validated and kept: the average where there is one."""
        return self.net if self.ema is None else self.ema.module

    def go(self, on_step: OnStep) -> TrainResult:
        position = self.position
        while position.epoch < self.config.epochs:
            self._epoch(on_step)
            self._check_finite()
            self._validate()
            position.epoch, position.within = position.epoch + 1, 0
            self._keep()
        self.processes.gather(None)  # the first has written
        return TrainResult(self.config.out, position.step, position.best_epoch, position.best)

    def _epoch(self, on_step: OnStep) -> None:
        config, position, processes = self.config, self.position, self.processes
        set_pace(self.optimizer.param_groups, config.pace(position.epoch))
        self.data.epoch = position.epoch
        rows = pass_rows(
            epoch_order(len(self.data.data), config.seed, position.epoch),
            config.batch,
            accumulate=config.accumulate,
            rank=processes.rank,
            world=processes.world,
            first=position.within,
        )
        device, workers = processes.device, config.workers
        stream = read_batches(self.data, rows, default_collate, workers=workers, device=device)
        began, passes = time.perf_counter(), list[dict[str, Tensor]]()
        while position.within < self.epoch_steps:
            passes += self._step([next(stream) for _ in range(config.accumulate)])
            position.within, position.step = position.within + 1, position.step + 1
            over, line = position.within == self.epoch_steps, ""
            if over or position.step % config.log_every == 0:
                line = self._log(passes, time.perf_counter() - began)
                passes = []
            on_step(position.step, self.steps, line)
            due = config.snapshot_every and position.step % config.snapshot_every == 0
            if due and not over:
                self._keep()

    def _step(self, passes: list[tuple[Tensor, Tensor, Tensor]]) -> list[dict[str, Tensor]]:
        """One step of the optimiser, over `accumulate` passes; returns the losses of each."""
        device, step, every = self.processes.device, self.position.step, []
        low = self.precision is not torch.float32
        for batch in passes:
            images, labels, ids = (tensor.to(device, non_blocking=True) for tensor in batch)
            with torch.autocast(device.type, dtype=self.precision, enabled=low):
                total, losses, logits = self.losses(images, labels, ids, self.config.seed, step)
            (total / (len(passes) * self.processes.world)).backward()
            every.append({**losses, "accuracy": (logits.argmax(dim=1) == labels).float().mean()})
        self.processes.add_gradients(self.net.parameters())
        nn.utils.clip_grad_norm_(self.net.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.net, step=step + 1)
        return every

    def _log(self, passes: list[dict[str, Tensor]], seconds: float) -> str:
        epoch, step = self.position.epoch, self.position.step
        values = torch.stack([torch.stack([*losses.values()]).double() for losses in passes])
        means = self.processes.mean(values.mean(dim=0)).tolist()
        means = dict(zip(passes[0], means, strict=True))
        if not math.isfinite(means["total"]):
            raise SeecauseError(f"the loss is {means['total']} at step {step}; {_REMEDY}")
        rate = min(group["lr"] for group in self.optimizer.param_groups)  # of the backbones
        row = {"epoch": epoch, "step": step, "learning_rate": rate, **means, "seconds": seconds}
        if self.processes.first:
            self.log.add(row)
        return f"epoch {epoch + 1}: loss {means['total']:.3f}  accuracy {means['accuracy']:.3f}"

    def _validate(self) -> None:
        """Every process examines its share. The best epoch, by validation alone, is kept."""
        config, processes, position = self.config, self.processes, self.position
        mine = examine(
            self.validated,
            self.val,
            rows=range(processes.rank, len(self.val), processes.world),
            autocast=None if self.precision is torch.float32 else self.precision,
            workers=config.workers,
        )
        everyones: list[Examination] = processes.gather(mine)
        numbers = merge(everyones).table()
        if config.select not in numbers:
            expected = f"average or worst: {self.val.name} lacks images of some class"
            raise BadOption("select", config.select, expected)
        better = numbers[config.select] > position.best
        if better:
            position.best, position.best_epoch = numbers[config.select], position.epoch
        if not processes.first:
            return
        if better:
            card = {"data": config.data, "val": config.val}
            with atomic_folder(self.folder / BEST) as draft:
                self.validated.save(draft, epoch=position.epoch, validation=numbers, **card)
        at = {"epoch": position.epoch, "step": position.step}
        self.epochs.add({**at, **numbers, "best": int(better)})

    def _keep(self) -> None:
        self._check_finite()
        if self.processes.first:
            snapshot = {
                "config": dataclasses.asdict(self.config),
                "position": dataclasses.asdict(self.position),
                "net": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "ema": None if self.ema is None else self.ema.module.state_dict(),
            }
            with atomic_file(self.folder / LAST) as file:
                torch.save(snapshot, file)

    def _restore(self) -> None:
        """Continue from the snapshot of this run, if there is one."""
        path = self.folder / LAST
        if not path.is_file():
            return
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        before, now = snapshot["config"], dataclasses.asdict(self.config)
        if different := [name for name in now if name not in _FREE and before[name] != now[name]]:
            expected = f"a new folder: the run there differs in {', '.join(different)}"
            raise BadOption("out", self.config.out, expected)
        self.position = Position(**snapshot["position"])
        self.net.load_state_dict(snapshot["net"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        if self.ema is not None:
            self.ema.module.load_state_dict(snapshot["ema"])

    def _check_finite(self) -> None:
        """Weights that are not finite are never kept, because a run could not recover from them."""
        for module in (self.net, self.validated):
            for name, value in module.state_dict().items():
                if value.is_floating_point() and not bool(value.isfinite().all()):
                    step = self.position.step
                    raise SeecauseError(f"{name} is not finite at step {step}; {_REMEDY}")


class CsvLog:
    """A CSV file that grows. Opening it again drops rows after `step`, which a continued run writes
    anew, and a row that a kill cut short."""

    def __init__(self, path: Path, columns: Names, *, step: int = 0):
        self.path, self.columns = path, columns
        lines = path.read_text().splitlines(keepends=True)[1:] if path.is_file() else []
        place = columns.index("step")
        whole = (line for line in lines if line.endswith("\n"))
        kept = (line for line in whole if int(line.split(",")[place]) <= step)
        write_atomic(path, ",".join(columns) + "\n" + "".join(kept))

    def add(self, row: Named) -> None:
        short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
        with self.path.open("a", newline="", encoding="utf-8") as file:
            options: Any = {"extrasaction": "ignore", "lineterminator": "\n"}
            csv.DictWriter(file, self.columns, **options).writerow(short)


def new_net(config: TrainConfig, classes: Names) -> IFAM:
    """The untrained network, on the CPU. The seed decides heads and prototypes; the global random
    state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # DINOv2 has no classifier of its own
        how: Named = {"weights": config.weights, "size": config.size}
        model = load(config.backbone, **how, head=nn.Identity(), pool="cls")
        return IFAM(
            model.module,
            config.parts,
            classes,
            preprocess=frame_for(config, model.preprocess),
            architecture=model.origin,
            **config.options,
        )


def frame_for(config: TrainConfig, backbone: Preprocess) -> Preprocess:
    """How test images are prepared: the whole short side (SIIM: both sides; ImageNet below 384
    pixels: 1 / 0.875 of the side), the centre."""
    imagenet = config.augment == "imagenet"
    return dataclasses.replace(
        backbone,
        mean=config.mean or backbone.mean,
        std=config.std or backbone.std,
        crop=0.875 if imagenet and min(backbone.size) < LARGE else 1.0,
        squash=config.augment == "plain",
        filter="bicubic" if imagenet else "bilinear",
    )


def new_optimizer(config: TrainConfig, net: IFAM, steps: int) -> torch.optim.AdamW:
    """AdamW at the paper's rates: a batch of 128 learns at sqrt(128 / 16) times the base rate, and
    weight decay is divided by the square root of the number of steps."""
    groups = parameter_groups(
        net,
        config.learning_rate * math.sqrt(config.batch / 16),
        config.weight_decay * math.sqrt(1 / steps),
        prototype_factor=config.prototype_factor,
        head_factor=config.head_factor,
    )
    return torch.optim.AdamW(groups, betas=(0.9, 0.999))
