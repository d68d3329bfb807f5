"""What a training run is asked to do, as data: one flat table that a TOML or JSON file can hold."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from seecause.errors import BadOption, UnknownName
from seecause.faithful.objective import LossWeights

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Augment = Literal["birds", "plain", "imagenet", "none"]
Select = Literal["average", "worst"]
_CHOICES = {"precision": get_args(Precision), "augment": get_args(Augment), "select": get_args(Select)}
_WHERE = ("out", "device", "workers", "hear_every", "tensorboard", "snapshot_every", "grid")  # may differ when a run is continued: they change no weight


@dataclass(frozen=True)
class TrainConfig:
    """The defaults are the paper's for CUB and Waterbirds, at batch 128 (arXiv 2506.08915).

    `data` is a dataset without its split: `waterbirds:PATH`. Training reads its train split and picks the best epoch on its validation split; the
    test split is never opened. `learning_rate` is that of a batch of 16 and is scaled by the square root of `batch`, which counts the pictures of one
    step of the optimiser over all processes and `accumulate` passes. `options` go to `IFAM`, `losses` to `LossWeights`.
    """

    data: str
    backbone: str
    out: str
    parts: int = 8
    val: str | None = None  # another dataset to validate on
    limit: int | None = None  # training pictures
    val_limit: int | None = None
    weights: str | None = None  # of the backbone: a file, or "random"
    size: int | None = None  # pixels a side; the backbone's own
    options: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    epochs: int = 90
    batch: int = 128
    accumulate: int = 1
    learning_rate: float = 1e-6
    prototype_factor: float = 1e3
    head_factor: float = 1e4
    weight_decay: float = 0.05  # normalised by the number of steps
    clip: float = 2.0
    precision: Precision = "auto"  # bfloat16 on a GPU, float32 elsewhere
    ema: bool = False  # the paper averages weights on ImageNet only
    select: Select = "average"  # what "best" means, on validation
    augment: Augment = "birds"
    seed: int = 0
    device: str = "auto"
    workers: int = 4  # processes that read pictures, for each process that trains
    hear_every: int = 10  # steps between rows of the log
    snapshot_every: int = 0  # steps between snapshots; 0: at the end of an epoch only
    grid: int = 8  # validation pictures whose parts are drawn after every epoch
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise BadOption(name, getattr(self, name), f"one of {', '.join(allowed)}")
        for name, least in (("parts", 1), ("epochs", 1), ("batch", 1), ("accumulate", 1), ("hear_every", 1), ("snapshot_every", 0), ("workers", 0)):
            if getattr(self, name) < least:
                raise BadOption(name, getattr(self, name), f"at least {least}")
        unknown = set(self.losses) - {known.name for known in fields(LossWeights)}
        if unknown:
            raise UnknownName("loss", min(unknown), [known.name for known in fields(LossWeights)])

    @property
    def loss_weights(self) -> LossWeights:
        return LossWeights(**self.losses)

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def differs(self, other: TrainConfig) -> list[str]:
        """Names of what would make another run of it."""
        return [known.name for known in fields(self) if known.name not in _WHERE and getattr(self, known.name) != getattr(other, known.name)]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


def read_config(path: str | Path | None, **told: Any) -> TrainConfig:
    """A configuration from a TOML or JSON file; what is told besides (and is not None) wins."""
    found: dict[str, Any] = {}
    if path is not None:
        path = Path(path)
        if not path.is_file():
            raise BadOption("config", str(path), "a TOML or JSON file")
        try:
            text = path.read_text(encoding="utf-8")
            found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except ValueError as broken:
            raise BadOption("config", str(path), f"valid TOML, or JSON in a file that ends so ({broken})") from broken
    found |= {name: value for name, value in told.items() if value is not None}
    known = [one.name for one in fields(TrainConfig)]
    for name in found:
        if name not in known:
            raise UnknownName("setting", name, known)
    for name in ("data", "backbone", "out"):
        if name not in found:
            raise BadOption(name, None, f"a value, on the command line or in the configuration: {name} has no default")
    return TrainConfig(**found)
