"""Train iFAM on a dataset (arXiv 2506.08915): on a CPU, a GPU, or many under `torchrun`.

Both stages learn together in one run. What is random depends on (seed, epoch, step, sample) alone,
so the same weights come out of one process or many with the same batch, and of a run that was
killed and continued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from seecause.data.dataset import Dataset
from seecause.errors import BadOption, SeecauseError
from seecause.faithful.config import (
    TrainConfig,
    native_bfloat16,
    normalised_decay,
    precision_for,
    scaled_rate,
    set_pace,
)
from seecause.faithful.data import (
    StepShares,
    TrainingPictures,
    batches_of,
    frame_of,
    open_train,
    open_validation,
    read_batches,
)
from seecause.faithful.evaluation import check_select, examine, merge, part_sheet
from seecause.faithful.interventions import evaluating
from seecause.faithful.losses import TrainingLosses, check_grid, parameter_groups
from seecause.faithful.net import IFAM
from seecause.faithful.run import (
    CONFIG,
    EPOCH_COLUMNS,
    STEP_COLUMNS,
    CsvLog,
    Position,
    Processes,
    Snapshot,
    description,
    join_processes,
    read_snapshot,
    write_best,
    write_snapshot,
)
from seecause.loading import load
from seecause.models.preprocess import Preprocess

_LOWER = "lower learning_rate or head_factor, or use precision='float32', in a new folder."
LARGE = 384  # pixels a side from which ImageNet's test pictures are not cut
# steps done, steps in all, what the log says where it got a row
OnStep = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TrainResult:
    """A finished run: `RUN/best` holds the network."""

    out: str
    steps: int
    best_epoch: int
    best: float  # of `select`, on validation


def train(config: TrainConfig, *, on_step: OnStep = lambda done, total, line: None) -> TrainResult:
    """Run it, or go on where `RUN/last.pt` stopped. Returns in every process when all are done."""
    with join_processes(config.device) as processes:
        return Run(config, processes).go(on_step)


class Run:
    """Everything that changes while training."""

    def __init__(self, config: TrainConfig, processes: Processes):
        self.config, self.processes, device = config, processes, processes.device
        pictures, self.val = _open_splits(config)
        self.net = new_net(config, pictures.classes).to(device).train()
        frame = frame_of(self.net).preprocess
        check_grid(self.net.stage1.tower.parts.layout_at(*frame.size).grid)
        self.data = TrainingPictures(pictures, config.augment, frame, config.seed)
        self.shares = StepShares(config.batch, config.accumulate, processes.rank, processes.world)
        self.shares.check(len(pictures))
        self.epoch_steps = len(pictures) // config.batch
        self.steps = self.epoch_steps * config.epochs
        self.optimizer = new_optimizer(config, self.net, self.steps)
        native = native_bfloat16(device)
        self.precision = precision_for(config.precision, device.type, native=native)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision is torch.float16)
        self.ema = _average(self.net) if config.ema else None
        self.position = Position()
        config.folder.mkdir(parents=True, exist_ok=True)
        self._restore(read_snapshot(config.folder, config))
        self.losses: nn.Module = TrainingLosses(self.net, config.loss_weights)
        if processes.world > 1:
            # a loss of weight 0 may leave parameters without a gradient
            idle = not all(dataclasses.asdict(config.loss_weights).values())
            self.losses = DistributedDataParallel(
                self.losses, broadcast_buffers=False, find_unused_parameters=idle
            )
        processes.wait()
        if processes.first:
            folder, step = config.folder, self.position.step
            config.save(folder / CONFIG)
            self.log = CsvLog(folder / "log.csv", STEP_COLUMNS, step=step)
            self.epochs = CsvLog(folder / "epochs.csv", EPOCH_COLUMNS, step=step)

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
        self.processes.wait()
        return TrainResult(self.config.out, position.step, position.best_epoch, position.best)

    def _epoch(self, on_step: OnStep) -> None:
        config, position = self.config, self.position
        set_pace(self.optimizer.param_groups, config.pace(position.epoch))
        keys = self.shares.keys(
            len(self.data), seed=config.seed, epoch=position.epoch, first=position.within
        )
        pin = self.processes.device.type == "cuda"
        stream = read_batches(self.data, keys, default_collate, workers=config.workers, pin=pin)
        began, means = time.perf_counter(), _Means()
        while position.within < self.epoch_steps:
            self._step([next(stream) for _ in range(config.accumulate)], means)
            position.within, position.step = position.within + 1, position.step + 1
            over, line = position.within == self.epoch_steps, ""
            if over or position.step % config.log_every == 0:
                line = self._log(means.take(self.processes), time.perf_counter() - began)
            on_step(position.step, self.steps, line)
            due = config.snapshot_every and position.step % config.snapshot_every == 0
            if due and not over:
                self._keep()

    def _step(self, passes: list[tuple[Tensor, Tensor, Tensor]], means: _Means) -> None:
        """One step of the optimiser, over `accumulate` passes."""
        for turn, batch in enumerate(passes, start=1):
            self._backward(batch, len(passes), means, last=turn == len(passes))
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), self.config.clip)
        before = _steps_taken(self.optimizer)
        self.scaler.step(self.optimizer)  # or not: float16 that overflows is skipped
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None and (taken := _steps_taken(self.optimizer)) > before:
            self.ema.update(self.net, step=taken)

    def _backward(
        self, batch: tuple[Tensor, Tensor, Tensor], passes: int, means: _Means, *, last: bool
    ) -> None:
        """Add one pass to the gradients; processes exchange them in the last one."""
        device, low = self.processes.device, self.precision is not torch.float32
        images, labels, ids = (tensor.to(device, non_blocking=True) for tensor in batch)
        sync = contextlib.nullcontext()
        if isinstance(self.losses, DistributedDataParallel) and not last:
            sync = self.losses.no_sync()
        with sync:
            with torch.autocast(device.type, dtype=self.precision, enabled=low):
                total, losses, logits = self.losses(
                    images, labels, ids, self.config.seed, self.position.step
                )
            self.scaler.scale(total / passes).backward()
        means.add({**losses, "accuracy": (logits.argmax(dim=1) == labels).float().mean()})

    def _log(self, means: dict[str, float], seconds: float) -> str:
        epoch, step = self.position.epoch, self.position.step
        if not math.isfinite(means["total"]):
            raise SeecauseError(f"the loss is {means['total']} at step {step}; {_LOWER}")
        rate = self.optimizer.param_groups[0]["lr"]
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
            places=range(processes.rank, len(self.val), processes.world),
            autocast=None if self.precision is torch.float32 else self.precision,
            workers=config.workers,
        )
        numbers = merge(processes.gather(mine)).table()
        better = numbers[config.select] > position.best
        if better:
            position.best, position.best_epoch = numbers[config.select], position.epoch
        if processes.first:
            epoch = position.epoch
            if better:
                write_best(config.folder, self.validated, epoch=epoch, validation=numbers)
            row = {"epoch": epoch, "step": position.step, **numbers, "best": int(better)}
            self.epochs.add(row)
            self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        """The parts of a few validation pictures, always the same, spread over the split."""
        count = min(self.config.grid, len(self.val))
        if not count:
            return
        places = [index * len(self.val) // count for index in range(count)]
        images = next(batches_of(self.validated, self.val, batch=count, places=places))[0]
        with evaluating(self.validated):
            maps = self.validated(images).maps
        folder = self.config.folder / "parts"
        folder.mkdir(exist_ok=True)
        raw = frame_of(self.validated).preprocess.raw(images)
        part_sheet(raw, maps).save(folder / f"epoch-{self.position.epoch + 1:04d}.png")

    def _keep(self) -> None:
        self._check_finite()
        if not self.processes.first:
            return
        generators: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if self.processes.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.processes.device)
        snapshot = Snapshot(
            config=dataclasses.asdict(self.config),
            position=dataclasses.asdict(self.position),
            net=self.net.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scaler=self.scaler.state_dict(),
            ema=None if self.ema is None else self.ema.module.state_dict(),
            generators=generators,
        )
        write_snapshot(self.config.folder, snapshot)

    def _restore(self, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            return
        self.position = Position(**snapshot.position)
        self.net.load_state_dict(snapshot.net)
        self.optimizer.load_state_dict(snapshot.optimizer)
        self.scaler.load_state_dict(snapshot.scaler)
        if self.ema is not None and snapshot.ema is not None:
            self.ema.module.load_state_dict(snapshot.ema)
        torch.set_rng_state(snapshot.generators["cpu"].cpu())
        device = self.processes.device
        if device.type == "cuda" and "cuda" in snapshot.generators:
            torch.cuda.set_rng_state(snapshot.generators["cuda"].cpu(), device)

    def _check_finite(self) -> None:
        """Weights that are no numbers are never kept: a run could not recover from them. The same
        in every process, since weights are."""
        for module in (self.net, self.validated):
            for name, value in module.state_dict().items():
                if value.is_floating_point() and not bool(value.isfinite().all()):
                    raise SeecauseError(
                        f"{name} is not finite at step {self.position.step}; {_LOWER}"
                    )


class _Means:
    """Sums that stay on the device until they are read."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.sums[name] = value.double() + self.sums.get(name, 0.0)
        self.count += 1

    def take(self, processes: Processes) -> dict[str, float]:
        means = processes.mean(torch.stack(list(self.sums.values())) / self.count).tolist()
        named = dict(zip(self.sums, means, strict=True))
        self.sums, self.count = {}, 0
        return named


def _open_splits(config: TrainConfig) -> tuple[Dataset, Dataset]:
    """Training and validation pictures, of the same classes."""
    pictures = open_train(config.data, limit=config.limit)
    val = open_validation(config.data, config.val, limit=config.val_limit)
    if val.classes != pictures.classes:
        other = ", ".join(sorted(set(val.classes) ^ set(pictures.classes))) or "this order"
        expected = f"a dataset with the classes of {config.data}; only one of them has {other}"
        raise BadOption("val", val.name, expected)
    check_select(config.select, val)
    return pictures, val


def new_net(config: TrainConfig, classes: tuple[str, ...]) -> IFAM:
    """The untrained network, on the CPU. The seed decides heads and prototypes; the global random
    state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        # DINOv2 has no classifier of its own
        how: dict[str, Any] = {"weights": config.weights, "size": config.size}
        model = load(config.backbone, **how, head=nn.Identity(), pool="cls")
        net = IFAM(
            model.module,
            config.parts,
            classes,
            preprocess=frame_for(config, model.preprocess),
            architecture=model.origin or None,
            **config.options,
        )
        description(net)  # what cannot be saved is refused before it is trained
        return net


def new_optimizer(config: TrainConfig, net: IFAM, steps: int) -> torch.optim.AdamW:
    """AdamW at the paper's rates, scaled for the batch; weight decay is normalised by the length of
    the run."""
    groups = parameter_groups(
        net,
        scaled_rate(config.learning_rate, config.batch),
        normalised_decay(config.weight_decay, steps),
        prototype_factor=config.prototype_factor,
        head_factor=config.head_factor,
    )
    return torch.optim.AdamW(groups, betas=(0.9, 0.999))


def _steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """By its own count, which a snapshot keeps."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def _average(net: IFAM) -> Any:
    """Weights averaged with decay min(0.9999, 1 - (1 + t)^(-2/3)); the first update copies."""
    from timm.utils import ModelEmaV3

    return ModelEmaV3(net, decay=0.9999, use_warmup=True)


def frame_for(config: TrainConfig, backbone: Preprocess) -> Preprocess:
    """How test pictures are prepared: the whole short side (SIIM: both sides; ImageNet below 384
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
