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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from seecause.errors import BadOption, Diverged
from seecause.faithful.config import TrainConfig
from seecause.faithful.data import Training, feed, open_train, open_validation, passes
from seecause.faithful.distributed import Crew, crew
from seecause.faithful.drawing import sheet
from seecause.faithful.evaluate import batches_of, check_select, examine, frame_of, together
from seecause.faithful.interventions import evaluating
from seecause.faithful.lesson import Lesson
from seecause.faithful.log import EPOCH_COLUMNS, STEP_COLUMNS, Board, Rows
from seecause.faithful.losses import check_grid
from seecause.faithful.net import IFAM
from seecause.faithful.objective import parameter_groups
from seecause.faithful.precision import native_bfloat16, precision_for
from seecause.faithful.rates import normalised_decay, scaled_rate, set_pace
from seecause.faithful.save import description
from seecause.faithful.snapshot import (
    CONFIG,
    Place,
    Snapshot,
    read_snapshot,
    write_best,
    write_snapshot,
)
from seecause.loading import load
from seecause.models.preprocess import Preprocess

LARGE = 384  # pixels a side from which ImageNet's test pictures are not cut
Hear = Callable[
    [int, int, str], None
]  # steps done, steps in all, what the last row of the log said


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run: `RUN/best` holds the network."""

    out: str
    steps: int
    best_epoch: int
    best: float  # of `select`, on validation


def train(config: TrainConfig, *, hear: Hear = lambda done, total, said: None) -> Trained:
    """Run it, or go on where `RUN/last.pt` stopped. Returns in every process when all are done."""
    with crew(config.device) as us:
        return Run(config, us).go(hear)


class Run:
    """Everything that changes while training."""

    def __init__(self, config: TrainConfig, us: Crew):
        self.config, self.us = config, us
        train_data = open_train(config.data, limit=config.limit)
        self.val = open_validation(config.data, config.val, limit=config.val_limit)
        if self.val.classes != train_data.classes:
            other = sorted(set(self.val.classes) ^ set(train_data.classes))
            raise BadOption(
                "val",
                self.val.name,
                f"a dataset with the classes of {config.data}; only one of them has"
                f" {', '.join(other) or 'this order'}",
            )
        check_select(config.select, self.val)
        self.net = new_net(config, train_data.classes).to(us.device).train()
        frame = frame_of(self.net).preprocess
        check_grid(self.net.stage1.tower.parts.layout_at(*frame.size).grid)
        self.data = Training(train_data, config.augment, frame, config.seed)
        self.epoch_steps = len(train_data) // config.batch
        passes(
            len(train_data),
            batch=config.batch,
            accumulate=config.accumulate,
            rank=us.rank,
            world=us.world,
            seed=0,
            epoch=0,
        )  # refuses a bad batch now
        self.steps = self.epoch_steps * config.epochs
        self.optimizer = new_optimizer(config, self.net, self.steps)
        self.precision = precision_for(
            config.precision, us.device.type, native=native_bfloat16(us.device)
        )
        self.scaler = torch.amp.GradScaler(us.device.type, enabled=self.precision is torch.float16)
        self.ema = _average(self.net) if config.ema else None
        self.place = Place()
        config.folder.mkdir(parents=True, exist_ok=True)
        self._go_on(read_snapshot(config.folder, config))
        self.lesson: nn.Module = Lesson(self.net, config.loss_weights)
        if us.world > 1:
            idle = not all(
                dataclasses.asdict(config.loss_weights).values()
            )  # a loss of weight 0 may leave parameters without a gradient
            self.lesson = DistributedDataParallel(
                self.lesson, broadcast_buffers=False, find_unused_parameters=idle
            )
        us.wait()
        if us.first:
            config.save(config.folder / CONFIG)
            self.log = Rows(config.folder / "log.csv", STEP_COLUMNS, step=self.place.step)
            self.epochs = Rows(config.folder / "epochs.csv", EPOCH_COLUMNS, step=self.place.step)
            self.board = Board(config.folder / "tensorboard" if config.tensorboard else None)

    @property
    def shown(self) -> IFAM:
        """The network that is validated and kept: the average where there is one."""
        return self.net if self.ema is None else self.ema.module

    def go(self, hear: Hear) -> Trained:
        while self.place.epoch < self.config.epochs:
            self._epoch(hear)
            self._check_finite()
            self._validate()
            self.place.epoch, self.place.within = self.place.epoch + 1, 0
            self._keep()
        if self.us.first:
            self.board.close()
        self.us.wait()
        return Trained(self.config.out, self.place.step, self.place.best_epoch, self.place.best)

    def _epoch(self, hear: Hear) -> None:
        config, place, us = self.config, self.place, self.us
        set_pace(self.optimizer.param_groups, config.pace(place.epoch))
        keys = passes(
            len(self.data),
            batch=config.batch,
            accumulate=config.accumulate,
            rank=us.rank,
            world=us.world,
            seed=config.seed,
            epoch=place.epoch,
            first=place.within,
        )
        stream = feed(self.data, keys, workers=config.workers, pin=us.device.type == "cuda")
        began, heard = time.perf_counter(), _Means()
        while place.within < self.epoch_steps:
            self._step([next(stream) for _ in range(config.accumulate)], heard)
            place.within, place.step = place.within + 1, place.step + 1
            said = ""
            if place.step % config.hear_every == 0 or place.within == self.epoch_steps:
                said = self._say(heard.take(us), time.perf_counter() - began)
            hear(place.step, self.steps, said)
            if (
                config.snapshot_every
                and place.step % config.snapshot_every == 0
                and place.within < self.epoch_steps
            ):
                self._keep()

    def _step(self, parts: list[tuple[Tensor, Tensor, Tensor]], heard: _Means) -> None:
        """One step of the optimiser, over `accumulate` passes."""
        config, device = self.config, self.us.device
        for turn, batch in enumerate(parts):
            images, labels, ids = (tensor.to(device, non_blocking=True) for tensor in batch)
            last = turn == len(parts) - 1
            wait = (
                contextlib.nullcontext()
                if last or not isinstance(self.lesson, DistributedDataParallel)
                else self.lesson.no_sync()
            )
            with wait:
                with torch.autocast(
                    device.type, dtype=self.precision, enabled=self.precision is not torch.float32
                ):
                    total, found, logits = self.lesson(
                        images, labels, ids, config.seed, self.place.step
                    )
                self.scaler.scale(total / len(parts)).backward()
            heard.add({**found, "accuracy": (logits.argmax(dim=1) == labels).float().mean()})
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), config.clip)
        before = 0 if self.ema is None else _steps_taken(self.optimizer)
        self.scaler.step(self.optimizer)  # or not: float16 that overflows is skipped
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None and (taken := _steps_taken(self.optimizer)) > before:
            self.ema.update(self.net, step=taken)

    def _say(self, means: dict[str, float], seconds: float) -> str:
        place = self.place
        if not math.isfinite(means["total"]):
            raise Diverged(place.step, f"the loss is {means['total']}")
        row = {
            "epoch": place.epoch,
            "step": place.step,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            **means,
            "seconds": seconds,
        }
        if self.us.first:
            self.log.add(row)
            self.board.add("train", row)
        return (
            f"epoch {place.epoch + 1}: loss {means['total']:.3f}  accuracy {means['accuracy']:.3f}"
        )

    def _validate(self) -> None:
        """Every process examines its share. The best epoch, by validation alone, is kept."""
        config, us, place = self.config, self.us, self.place
        autocast = None if self.precision is torch.float32 else self.precision
        mine = examine(
            self.shown,
            self.val,
            places=range(us.rank, len(self.val), us.world),
            autocast=autocast,
            workers=config.workers,
        )
        numbers = together(us.gather(mine)).table()
        better = numbers[config.select] > place.best
        if better:
            place.best, place.best_epoch = numbers[config.select], place.epoch
        if us.first:
            if better:
                write_best(config.folder, self.shown, epoch=place.epoch, validation=numbers)
            row = {"epoch": place.epoch, "step": place.step, **numbers, "best": int(better)}
            self.epochs.add(row)
            self.board.add("val", row)
            self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        """The parts of a few validation pictures, always the same, spread over the split."""
        count = min(self.config.grid, len(self.val))
        if count:
            places = [index * len(self.val) // count for index in range(count)]
            images = next(batches_of(self.shown, self.val, batch=count, places=places))[0]
            with evaluating(self.shown):
                maps = self.shown(images).maps
            folder = self.config.folder / "parts"
            folder.mkdir(exist_ok=True)
            sheet(frame_of(self.shown).preprocess.raw(images), maps).save(
                folder / f"epoch-{self.place.epoch + 1:04d}.png"
            )

    def _keep(self) -> None:
        self._check_finite()
        if self.us.first:
            generators: dict[str, Any] = {"cpu": torch.get_rng_state()}
            if self.us.device.type == "cuda":
                generators["cuda"] = torch.cuda.get_rng_state(self.us.device)
            write_snapshot(
                self.config.folder,
                Snapshot(
                    config=dataclasses.asdict(self.config),
                    place=dataclasses.asdict(self.place),
                    net=self.net.state_dict(),
                    optimizer=self.optimizer.state_dict(),
                    scaler=self.scaler.state_dict(),
                    ema=None if self.ema is None else self.ema.module.state_dict(),
                    generators=generators,
                ),
            )

    def _check_finite(self) -> None:
        """Weights that are no numbers are never kept: a run could not recover from them. The same
        in every process, since weights are."""
        kept = [self.net] if self.ema is None else [self.net, self.ema.module]
        for name, value in (pair for module in kept for pair in module.state_dict().items()):
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise Diverged(self.place.step, f"{name} is not finite")

    def _go_on(self, found: Snapshot | None) -> None:
        if found is None:
            return
        self.place = Place(**found.place)
        self.net.load_state_dict(found.net)
        self.optimizer.load_state_dict(found.optimizer)
        self.scaler.load_state_dict(found.scaler)
        if self.ema is not None and found.ema is not None:
            self.ema.module.load_state_dict(found.ema)
        torch.set_rng_state(found.generators["cpu"].cpu())
        if self.us.device.type == "cuda" and "cuda" in found.generators:
            torch.cuda.set_rng_state(found.generators["cuda"].cpu(), self.us.device)


class _Means:
    """Sums that stay on the device until they are read."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, values: dict[str, Tensor]) -> None:
        self.sums = {
            name: value.double() + self.sums.get(name, 0.0) for name, value in values.items()
        }
        self.count += 1

    def take(self, us: Crew) -> dict[str, float]:
        means = us.mean(torch.stack(list(self.sums.values())) / self.count).tolist()
        found = dict(zip(self.sums, means, strict=True))
        self.sums, self.count = {}, 0
        return found


def new_net(config: TrainConfig, classes: tuple[str, ...]) -> IFAM:
    """The untrained network, on the CPU. The seed decides heads and prototypes; the global random
    state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = load(
            config.backbone,
            weights=config.weights,
            size=config.size,
            head=nn.Identity(),
            pool="cls",
        )  # DINOv2 has no classifier of its own
        frame = _frame(config, model.preprocess)
        net = IFAM(
            model.module,
            config.parts,
            classes,
            preprocess=frame,
            architecture=model.origin or None,
            **config.options,
        )
        description(net)  # what cannot be saved is refused before it is trained
        return net


def new_optimizer(config: TrainConfig, net: IFAM, steps: int) -> torch.optim.AdamW:
    """AdamW at the paper's rates, scaled for the batch; weight decay is normalised by the length of
    the run."""
    rate, decay = (
        scaled_rate(config.learning_rate, config.batch),
        normalised_decay(config.weight_decay, steps),
    )
    groups = parameter_groups(
        net, rate, decay, prototype_factor=config.prototype_factor, head_factor=config.head_factor
    )
    return torch.optim.AdamW(groups, betas=(0.9, 0.999))


def _steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """By its own count, which a snapshot keeps."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def _average(net: IFAM) -> Any:
    """Weights averaged with decay min(0.9999, 1 - (1 + t)^(-2/3)); the first update copies."""
    from timm.utils import ModelEmaV3

    return ModelEmaV3(net, decay=0.9999, use_warmup=True)


def _frame(config: TrainConfig, known: Preprocess) -> Preprocess:
    """How test pictures are prepared: the whole short side (SIIM: both sides; ImageNet below 384
    pixels: 1 / 0.875 of the side), the centre."""
    imagenet = config.augment == "imagenet"
    return dataclasses.replace(
        known,
        mean=config.mean or known.mean,
        std=config.std or known.std,
        crop=0.875 if imagenet and min(known.size) < LARGE else 1.0,
        squash=config.augment == "plain",
        filter="bicubic" if imagenet else "bilinear",
    )
