"""What a training run is asked to do, as data: one flat table that a TOML or JSON file can hold."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from seecause.errors import BadOption, UnknownName
from seecause.faithful.net import IFAM
from seecause.faithful.objective import LossWeights
from seecause.faithful.rates import cosine, stepped
from seecause.faithful.settings import fits, in_words

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Augment = Literal["birds", "birds_no_jitter", "plain", "imagenet", "none"]
Schedule = Literal["cosine", "step"]
Select = Literal["average", "worst", "auc"]
_COUNTS = (
    "parts",
    "epochs",
    "batch",
    "accumulate",
    "hear_every",
    "limit",
    "val_limit",
    "size",
    "step_epochs",
)
_LEAST = {name: 1 for name in _COUNTS} | {"snapshot_every": 0, "workers": 0}
_NOT_OPTIONS = (
    "return",
    "backbone",
    "parts",
    "classes",
    "preprocess",
    "architecture",
)  # of IFAM: settings of their own, or known from the data
_WHERE = (
    "out",
    "device",
    "workers",
    "hear_every",
    "tensorboard",
    "snapshot_every",
    "grid",
)  # may differ when a run is continued: they change no weight
_TABLES = ("options", "losses")
CHANNELS = 3


@dataclass(frozen=True)
class TrainConfig:
    """The defaults are the paper's for CUB and Waterbirds, at batch 128 (arXiv 2506.08915).

    `data` is a dataset without its split: `waterbirds:PATH`. Training reads its train split and
    picks the best epoch on its validation split; the test split is never opened. `learning_rate` is
    that of a batch of 16 and is scaled by the square root of `batch`, which counts the pictures of
    one step of the optimiser over all processes and `accumulate` passes. `options` go to `IFAM`,
    `losses` to `LossWeights`.
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
    mean: tuple[float, ...] | None = (
        None  # of pixels in [0, 1], one for each channel or one for all; the backbone's own
    )
    std: tuple[float, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    epochs: int = 90
    batch: int = 128
    accumulate: int = 1
    learning_rate: float = 1e-6
    prototype_factor: float = 1e3
    head_factor: float = 1e4
    schedule: Schedule = "cosine"  # "step" is PDiscoFormer's
    step_epochs: int = 4  # of schedule="step": after so many epochs ...
    step_factor: float = 0.5  # ... the rate is multiplied by this
    weight_decay: float = 0.05  # normalised by the number of steps; AdamW without it is Adam
    clip: float = 2.0
    precision: Precision = (
        "auto"  # bfloat16 on a GPU that has it, float16 on others, float32 elsewhere
    )
    ema: bool = False  # the paper averages weights on ImageNet only
    select: Select = "average"  # what "best" means, on validation; "auc" for SIIM
    augment: Augment = "birds"
    seed: int = 0
    device: str = "auto"
    workers: int = 4  # processes that read pictures, for each process that trains
    hear_every: int = 10  # steps between rows of the log
    snapshot_every: int = 0  # steps between snapshots; 0: at the end of an epoch only
    grid: int = 8  # validation pictures whose parts are drawn after every epoch
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, _channels(getattr(self, name)))
        for name, kind in get_type_hints(TrainConfig).items():
            if not fits(getattr(self, name), kind):
                raise BadOption(name, getattr(self, name), in_words(kind))
        for name, least in _LEAST.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise BadOption(name, getattr(self, name), f"at least {least}")
        for name in ("learning_rate", "prototype_factor", "head_factor", "clip", "step_factor"):
            if not getattr(self, name) > 0:
                raise BadOption(name, getattr(self, name), "more than 0")
        if self.std is not None and not all(value > 0 for value in self.std):
            raise BadOption("std", self.std, "more than 0")
        _check_table("loss", self.losses, get_type_hints(LossWeights))
        _check_table(
            "option",
            self.options,
            {
                name: kind
                for name, kind in get_type_hints(IFAM.__init__).items()
                if name not in _NOT_OPTIONS
            },
        )

    @property
    def loss_weights(self) -> LossWeights:
        return LossWeights(**self.losses)

    def pace(self, epoch: int) -> float:
        """Share of the learning rate in an epoch, counted from 0."""
        return (
            cosine(epoch, self.epochs)
            if self.schedule == "cosine"
            else stepped(epoch, every=self.step_epochs, factor=self.step_factor)
        )

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def differs(self, other: TrainConfig) -> list[str]:
        """Names of what would make another run of it."""
        return [
            known.name
            for known in fields(self)
            if known.name not in _WHERE and getattr(self, known.name) != getattr(other, known.name)
        ]

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        draft = path.with_suffix(".partial")
        draft.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        draft.replace(path)


def read_config(path: str | Path | None, **told: Any) -> TrainConfig:
    """A configuration from a TOML or JSON file; what is told besides (and is not None) wins, name
    by name in `options` and `losses`."""
    found: dict[str, Any] = {}
    if path is not None:
        path = Path(path)
        if not path.is_file():
            raise BadOption("config", str(path), "a TOML or JSON file")
        try:
            text = path.read_text(encoding="utf-8")
            found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
            if not isinstance(found, dict):
                raise ValueError("not a table of settings")
        except ValueError as broken:
            raise BadOption(
                "config", str(path), f"valid TOML, or JSON in a file that ends so ({broken})"
            ) from broken
    for name, value in told.items():
        if value is not None:
            merged = (
                name in _TABLES and isinstance(value, dict) and isinstance(found.get(name), dict)
            )
            found[name] = {**found[name], **value} if merged else value
    known = [one.name for one in fields(TrainConfig)]
    for name in found:
        if name not in known:
            raise UnknownName("setting", name, known)
    for name in ("data", "backbone", "out"):
        if name not in found:
            raise BadOption(
                name,
                None,
                f"a value, on the command line or in the configuration: {name} has no default",
            )
    return TrainConfig(**found)


def _channels(value: Any) -> Any:
    """One number for all channels, or a list as JSON and TOML have it -> a tuple."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,) * CHANNELS
    return (
        tuple(value)
        if isinstance(value, list | tuple) and len(value) == CHANNELS
        else value
        if value is None
        else str(value)
    )


def _check_table(what: str, given: dict[str, Any], kinds: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in kinds:
            raise UnknownName(what, name, kinds)
        if not fits(value, kinds[name]):
            raise BadOption(f"{what} {name}", value, in_words(kinds[name]))
