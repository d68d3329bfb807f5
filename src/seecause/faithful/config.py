"""What a training run is asked to do, as data: one flat table that a TOML or JSON file can hold,
and the rates and precision that follow from it."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from seecause.errors import BadOption
from seecause.faithful.losses import LossWeights
from seecause.faithful.net import IFAMOptions
from seecause.files import write_json
from seecause.options import Count, Limit, NotNegative, Positive, check_options

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Augment = Literal["birds", "birds_no_jitter", "plain", "imagenet", "none"]
Whole = Annotated[int, Limit(lambda value: value >= 0, "a whole number, at least 0")]
# may differ when a run is continued: they change no weight
_WHERE = ("out", "device", "workers", "log_every", "snapshot_every", "grid")
_TABLES = ("options", "losses")
CHANNELS = 3
BASE_BATCH = 16  # the batch that base rates are given for


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The defaults are the paper's for CUB and Waterbirds, at batch 128 (arXiv 2506.08915).

    `data` is a dataset without its split: `waterbirds:PATH`. Training reads its train split and
    picks the best epoch on its validation split; the test split is never opened. `learning_rate` is
    that of a batch of 16 and is scaled by the square root of `batch`, which counts the pictures of
    one step of the optimiser over all processes and `accumulate` passes. `options` are those of
    `IFAMOptions`, `losses` those of `LossWeights`.
    """

    data: str
    backbone: str
    out: str
    parts: Count = 8
    val: str | None = None  # another dataset to validate on
    limit: Count | None = None  # training pictures
    val_limit: Count | None = None
    weights: str | None = None  # of the backbone: a file, or "random"
    size: Count | None = None  # pixels a side; the backbone's own
    # of pixels in [0, 1], one for each channel or one for all; the backbone's own
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
    schedule: Literal["cosine", "step"] = "cosine"  # "step" is PDiscoFormer's
    step_epochs: Count = 4  # of schedule="step": after so many epochs ...
    step_factor: Positive = 0.5  # ... the rate is multiplied by this
    weight_decay: NotNegative = 0.05  # normalised by the number of steps; AdamW without it is Adam
    clip: Positive = 2.0
    precision: Precision = "auto"  # bfloat16 on a GPU that has it, float16 on others, else float32
    ema: bool = False  # the paper averages weights on ImageNet only
    select: Literal["average", "worst", "auc"] = "average"  # what "best" means, on validation
    augment: Augment = "birds"
    seed: Whole = 0
    device: str = "auto"
    workers: Whole = 4  # processes that read pictures, for each process that trains
    log_every: Count = 10  # steps between rows of the log
    snapshot_every: Whole = 0  # steps between snapshots; 0: at the end of an epoch only
    grid: Whole = 8  # validation pictures whose parts are drawn after every epoch

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, _channels(getattr(self, name)))
        check_options("TrainConfig", TrainConfig, dataclasses.asdict(self))
        if self.std is not None and not all(value > 0 for value in self.std):
            raise BadOption("std", self.std, "more than 0")
        check_options("losses", LossWeights, self.losses)
        check_options("options", IFAMOptions, self.options)

    @property
    def loss_weights(self) -> LossWeights:
        return LossWeights(**self.losses)

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def pace(self, epoch: int) -> float:
        """Share of the learning rate in an epoch, counted from 0."""
        if self.schedule == "cosine":
            return cosine(epoch, self.epochs)
        return stepped(epoch, every=self.step_epochs, factor=self.step_factor)

    def differs(self, other: TrainConfig) -> list[str]:
        """Names of what would make another run of it."""
        names = [setting.name for setting in fields(self) if setting.name not in _WHERE]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        write_json(path, dataclasses.asdict(self))


def read_config(path: str | Path | None, **settings: Any) -> TrainConfig:
    """A configuration from a TOML or JSON file; `settings` that are not None win, name by name in
    `options` and `losses`."""
    merged: dict[str, Any] = {}
    if path is not None:
        if not Path(path).is_file():
            raise BadOption("config", str(path), "a TOML or JSON file")
        expected = "valid TOML, or JSON in a file that ends so ({})"
        merged = read_table(Path(path), "config", expected)
    for name, value in settings.items():
        if value is None:
            continue
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = {**merged[name], **value} if both and name in _TABLES else value
    check_options("TrainConfig", TrainConfig, {**merged, "mean": None, "std": None})
    for name in ("data", "backbone", "out"):
        if name not in merged:
            expected = "a value, on the command line or in the configuration"
            raise BadOption(name, None, f"{expected}: {name} has no default")
    return TrainConfig(**merged)


def read_table(path: Path, name: str, expected: str) -> dict[str, Any]:
    """A TOML or JSON file that the user knows by `name`; `expected` has a place for what is wrong
    with it."""
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        if not isinstance(table, dict):
            raise ValueError("not a table")
    except (ValueError, RecursionError) as broken:
        raise BadOption(name, str(path), expected.format(broken)) from broken
    return table


def _channels(value: Any) -> Any:
    """One number for all channels, or a list as JSON and TOML have it -> a tuple; what is neither
    stays, to be refused."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,) * CHANNELS
    if isinstance(value, list | tuple):
        return tuple(value) if len(value) == CHANNELS else str(value)
    return value


def scaled_rate(base: float, batch: int) -> float:
    """The square-root rule: a batch of 128 learns at 2.8 times the rate of a batch of 16."""
    return base * math.sqrt(batch / BASE_BATCH)


def normalised_decay(decay: float, steps: int) -> float:
    """Weight decay of a run of `steps`: 0.05 over 4,140 steps becomes 7.8e-4, which AdamW
    multiplies by each group's rate."""
    return decay * math.sqrt(1 / max(1, steps))


def cosine(epoch: int, epochs: int) -> float:
    """Share of the rate in an epoch counted from 0: half a cosine to zero, constant inside an
    epoch, no warm-up."""
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


def stepped(epoch: int, *, every: int, factor: float) -> float:
    """Share of the rate in an epoch counted from 0, multiplied by `factor` after every so many
    epochs: PDiscoFormer halves it after every 4 of 28."""
    return factor ** (epoch // every)


def set_pace(groups: Iterable[dict[str, Any]], share: float) -> None:
    """Give every group of an optimiser this share of the rate it started with."""
    for group in groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * share


def precision_for(precision: Precision, device: str, *, native: bool) -> torch.dtype:
    """`auto` on a GPU: bfloat16 where its arithmetic is `native`, else float16, which needs a loss
    scaler; float32 elsewhere."""
    if precision != "auto":
        return getattr(torch, precision)
    if device != "cuda":
        return torch.float32
    return torch.bfloat16 if native else torch.float16


def native_bfloat16(device: torch.device) -> bool:
    """Whether a GPU computes in bfloat16 itself; older ones emulate it, slowly."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)
