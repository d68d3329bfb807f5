"""How the embedded models are made: recipes by name, the loop of each kind (a module here with
RECIPES and `train`), the card of what came out; and what all of these loops share: randomness,
precision, the optimiser, its pace, the average of the weights, the log, and what a trained
classifier answers from.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from seecause import critters
from seecause._random import bits, uniform
from seecause.critters.world import (
    BACKGROUNDS,
    CLASSES,
    PARTS,
    VARIANTS,
    Latents,
    Regime,
    find_regime,
)
from seecause.errors import BadOption, UnknownName
from seecause.files import csv_text, write_atomic
from seecause.metrics.statistics import group_accuracy
from seecause.models.preprocess import Preprocess

KINDS = ("classifier", "llava", "ifam")
TEST_SAMPLES = 8192
HALF = (0.5, 0.5, 0.5)  # as mean and deviation: pixels in [0, 1] become [-1, 1]


def recipes() -> dict[str, Any]:
    """All recipes, in the order of the kinds."""
    every: dict[str, Any] = {}
    for kind in KINDS:
        every |= _module(kind).RECIPES
    return every


def find_recipe(name: str, **changes: Any) -> Any:
    """A recipe of any kind by name, with fields changed where given (None leaves a field alone)."""
    by_name = recipes()
    if name not in by_name:
        raise UnknownName("recipe", name, by_name)
    fields = {key: value for key, value in changes.items() if value is not None}
    for key in fields.keys() - {field.name for field in dataclasses.fields(by_name[name])}:
        raise BadOption(key, fields[key], f"no value: {name} is not made that way")
    return dataclasses.replace(by_name[name], **fields)


def train(
    recipe: Any,
    *,
    out: Path,
    device: str = "cpu",
    test_samples: int = TEST_SAMPLES,
    start: Path | None = None,
) -> dict[str, Any]:
    """Follow the recipe with the loop of its kind; returns the evaluation of what was written.
    `start` is a folder to go on from, for LLaVA."""
    kind = next(kind for kind in KINDS if recipe.name in _module(kind).RECIPES)
    if start is not None and (kind != "llava" or not (start / "card.json").is_file()):
        raise BadOption(
            "start", start, "a folder with a card.json that critters-llava was written into before"
        )
    options = {} if start is None else {"start": start}
    return _module(kind).train(recipe, out=out, device=device, test_samples=test_samples, **options)


def card(folder: Path, name: str) -> dict[str, Any] | None:
    """What was recorded beside a model's weights, or None where there is no such model."""
    for path in (folder / f"{name}.json", folder / name / "card.json"):
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
    return None


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


class DrawnRecipe:
    """A recipe that trains on Critters pictures, drawn as it goes."""

    name: str
    samples: int
    batch: int
    seed: int

    @property
    def size(self) -> int:
        """Pixels of a side."""
        raise NotImplementedError

    @property
    def stem(self) -> str:
        """What its files are called: seeds other than 0 are part of the name, so that they can
        share a folder."""
        return self.name if self.seed == 0 else f"{self.name}-{self.seed}"

    @property
    def preprocess(self) -> Preprocess:
        return Preprocess((self.size, self.size), mean=HALF, std=HALF)

    @property
    def steps(self) -> int:
        return max(1, self.samples // self.batch)


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside the block, torch draws from this seed on the CPU and on `device`; afterwards the
    global random state is as it was."""
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def half(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, where it pays."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def adamw(*modules: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW; vectors (biases, norms) and tokens are not decayed."""
    named = [(name, value) for module in modules for name, value in module.named_parameters()]
    decayed, others = [], []
    for name, value in named:
        decays = value.ndim >= 2 and not name.endswith(("_token", "pos_embed"))
        (decayed if decays else others).append(value)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))


def pace(step: int, steps: int, warm_up: float) -> float:
    """Share of the learning rate: a straight rise, then half a cosine down."""
    rise = max(1, int(warm_up * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def descend(
    optimizer: torch.optim.Optimizer, loss: Tensor, clipped: Iterable[nn.Parameter], clip: float
) -> None:
    """One step down; gradients of the parameters `clipped` have at most the norm `clip`."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(clipped, clip)
    optimizer.step()


@torch.no_grad()
def move_average(average: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """Exponential average of the weights; it follows closely in the first steps, so that short runs
    get one too."""
    pull = max(1 - decay, 9 / (10 + step))
    # one kernel for all
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), pull)


def write_log(
    rows: Sequence[Mapping[str, Any]], path: Path, columns: Sequence[str] | None = None
) -> None:
    """`columns` (those of the first row) of every row, as a CSV file."""
    columns = list(rows[0]) if columns is None else columns
    cells = ([_rounded(row.get(column, "")) for column in columns] for row in rows)
    write_atomic(path, csv_text([columns, *cells]))


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


_ROWS = 512


@torch.no_grad()
def evaluate(
    model: Callable[[Tensor], Tensor],
    regime: str | Regime,
    *,
    preprocess: Preprocess,
    samples: int = 8192,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Held-out numbers on the test split: i.i.d. accuracy and its certificate, group accuracy
    against the creature, flip rates."""

    def predict(latents: Latents) -> Tensor:
        size = preprocess.size[0]
        pictures = (critters.render(rows, size=size).image for rows in latents.split(_ROWS))
        return torch.cat([model(preprocess.normalise(image)).argmax(dim=1) for image in pictures])

    law = find_regime(regime)
    own = critters.draw(law, "test", samples, device=device)
    accuracy = (predict(own) == own.label).double().mean().item()

    latents = critters.draw("balanced", "test", samples, start=samples, device=device)
    latents = latents.replace(mat=torch.full_like(latents.mat, law.mat))
    answer = predict(latents)
    groups = group_accuracy(
        answer == latents.creature, torch.stack([latents.creature, latents.background], dim=1)
    )
    turn = torch.arange(samples, device=device)
    elsewhere = (latents.background + 1 + turn // 32 % (len(BACKGROUNDS) - 1)) % len(BACKGROUNDS)
    another = (latents.creature + 1 + turn // 32 % (len(CLASSES) - 1)) % len(CLASSES)
    changed = {
        "background_flip_rate": latents.replace(background=elsewhere),
        "creature_flip_rate": latents.show(another),
    }
    flips = {
        name: (predict(rows) != answer).double().mean().item() for name, rows in changed.items()
    }
    return {
        "regime": law.name,
        "samples": samples,
        "accuracy": accuracy,
        "balanced_accuracy": groups.average,
        "worst_group_accuracy": groups.worst,
        # [creature][background]
        "group_accuracy": groups.accuracy.view(-1, len(BACKGROUNDS)).tolist(),
        **flips,
        "certificate": dataclasses.asdict(
            critters.certificate(regime, accuracy=accuracy, samples=samples)
        ),
    }


LogRow = Callable[[dict[str, Any]], None]


class RunningMeans:
    """Means of numbers over every so many steps, as rows for `write_row`. They are read rarely, so
    the device is not kept waiting."""

    def __init__(self, write_row: LogRow, every: int):
        self.write_row, self.every = write_row, every
        self._total: Tensor | None = None

    def add(
        self, step: int, numbers: Mapping[str, Tensor], *, rate: float | None = None, **columns: str
    ) -> None:
        """Count a step; the learning `rate` and `columns` are those of the row that it may end."""
        latest = torch.stack([number.detach() for number in numbers.values()])
        self._total = latest if self._total is None else self._total + latest
        if (step + 1) % self.every:
            return
        means = dict(zip(numbers, (self._total / self.every).tolist(), strict=True))
        self._total = None
        rates = {} if rate is None else {"learning_rate": rate}
        self.write_row({"step": step + 1, **columns, **means, **rates})


class TrainingLog:
    """Rows of a run and a bar on terminals; given a `path`, also a CSV file of `columns` that grows
    with every row."""

    def __init__(
        self, name: str, steps: int, path: Path | None = None, columns: Sequence[str] = ()
    ):
        self.rows: list[dict[str, Any]] = []
        self._path, self._columns = path, columns
        self._began = time.perf_counter()
        status = TextColumn("{task.fields[status]}")
        self._bar = Progress(TextColumn(name), BarColumn(), status, TimeRemainingColumn())
        self._task = self._bar.add_task("training", total=steps, status="")

    def __enter__(self) -> TrainingLog:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def write_row(self, row: dict[str, Any]) -> None:
        done = self.rows[-1]["step"] if self.rows else 0
        self.rows.append({**row, "seconds": time.perf_counter() - self._began})
        if self._path is not None:
            write_log(self.rows, self._path, self._columns)
        phase = row.get("phase", row.get("regime"))
        status = f"{phase}: loss {row['loss']:.3f}  accuracy {row['accuracy']:.3f}"
        steps = row["step"] - done if row["step"] > done else row["step"]  # of another phase
        self._bar.update(self._task, advance=steps, status=status)


def drop_parts(latents: Latents, *, share: float, each: float = 0.4) -> Latents:
    """Remove parts (never the body) from a `share` of the images, each part with probability
    `each`.

    Models trained on such images meet part-removal interventions in their own domain (FunnyBirds,
    Hesse et al. 2023).
    """
    parts = torch.arange(len(PARTS), device=latents.seed.device)
    dice = uniform(latents.seed[:, None] * len(PARTS) + parts, 21)  # [B, 1 + P]
    chosen = uniform(latents.seed, 22) < share
    gone = chosen[:, None] & (dice < each) & (parts > 0)
    return latents.replace(present=latents.present & ~gone)


def mix_parts(latents: Latents, *, share: float) -> Latents:
    """Give a `share` of the creatures parts drawn at random, independently: what a part looks
    like then says nothing about the others.

    Such a creature has no name: `creature` is -1. Its label stays.
    """
    mixed = uniform(latents.seed, 23) < share  # [B]
    parts = torch.arange(len(PARTS) - 1, device=latents.seed.device)
    choices = len(VARIANTS["tail"])  # as many as every part has
    drawn = bits(latents.seed[:, None] * len(PARTS) + parts, 24) % choices  # [B, P]
    return latents.replace(
        variants=torch.where(mixed[:, None], drawn, latents.variants),
        creature=torch.where(mixed, -1, latents.creature),
    )
