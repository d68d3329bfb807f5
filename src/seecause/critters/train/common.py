"""What the training of every embedded model shares: recipes, randomness, precision, the optimiser,
its pace, the average of the weights, the log, and what a trained classifier answers from.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from seecause import critters
from seecause.critters import BACKGROUNDS, CLASSES, Latents, Regime, find_regime
from seecause.metrics.accuracy import group_accuracy
from seecause.models.preprocess import Preprocess

_HALF = (0.5, 0.5, 0.5)  # as mean and deviation: pixels in [0, 1] become [-1, 1]


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
        return Preprocess((self.size, self.size), mean=_HALF, std=_HALF)

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


def write_log(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(map(rounded, rows))


_ROWS = 512


@torch.no_grad()
def evaluate(
    model: nn.Module,
    regime: str | Regime,
    *,
    preprocess: Preprocess,
    samples: int = 8192,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Held-out numbers on the test split: i.i.d. accuracy and its certificate, group accuracy
    against the creature, flip rates."""
    predict = _predictor(model, preprocess)
    law = find_regime(regime)
    own = critters.draw(law, "test", samples, device=device)
    accuracy = (predict(own) == own.label).double().mean().item()

    latents = critters.draw("balanced", "test", samples, start=samples, device=device).on_mat(
        law.mat
    )
    answer = predict(latents)
    groups = group_accuracy(
        answer == latents.creature, torch.stack([latents.creature, latents.background], dim=1)
    )
    turn = torch.arange(samples, device=device)
    elsewhere = (latents.background + 1 + turn // 32 % (len(BACKGROUNDS) - 1)) % len(BACKGROUNDS)
    another = (latents.creature + 1 + turn // 32 % (len(CLASSES) - 1)) % len(CLASSES)
    background_flips = (
        (predict(latents.replace(background=elsewhere)) != answer).double().mean().item()
    )
    creature_flips = (predict(latents.show(another)) != answer).double().mean().item()
    return {
        "regime": law.name,
        "samples": samples,
        "accuracy": accuracy,
        "balanced_accuracy": groups.average,
        "worst_group_accuracy": groups.worst,
        # [creature][background]
        "group_accuracy": groups.accuracy.view(-1, len(BACKGROUNDS)).tolist(),
        "background_flip_rate": background_flips,
        "creature_flip_rate": creature_flips,
        "certificate": dataclasses.asdict(
            critters.certificate(regime, accuracy=accuracy, samples=samples)
        ),
    }


def _predictor(model: nn.Module, preprocess: Preprocess) -> Callable[[Latents], Tensor]:
    def predict(latents: Latents) -> Tensor:
        pictures = (
            critters.render(batch, size=preprocess.size[0]).image for batch in latents.split(_ROWS)
        )
        return torch.cat([model(preprocess.normalise(image)).argmax(dim=1) for image in pictures])

    return predict


LogRow = Callable[[dict[str, Any]], None]


class RunningMeans:
    """Means of numbers over every so many steps, as rows for `write_row`. They are read rarely, so
    the device is not kept waiting."""

    def __init__(self, write_row: LogRow, phase: str, every: int):
        self.write_row, self.phase, self.every = write_row, phase, every
        self._total: Tensor | None = None

    def add(self, step: int, numbers: Mapping[str, Tensor], **columns: float) -> None:
        """Count a step; `columns` stand in the row that it may end."""
        latest = torch.stack([number.detach() for number in numbers.values()])
        self._total = latest if self._total is None else self._total + latest
        if (step + 1) % self.every:
            return
        means = dict(zip(numbers, (self._total / self.every).tolist(), strict=True))
        self._total = None
        self.write_row({"phase": self.phase, "step": step + 1, **columns, **means})


class TrainingLog:
    """Loss and accuracy: a row for every hundredth of a run, and a bar on terminals."""

    def __init__(self, name: str, steps: int, device: torch.device | str, *, lines: int = 100):
        self.rows: list[dict[str, Any]] = []
        self.every = max(1, steps // lines)
        # since the last row: read rarely, so the device is not kept waiting
        self._running = torch.zeros(2, device=device)
        self._began = time.perf_counter()
        self._bar = progress_bar(name)
        self._task = self._bar.add_task("training", total=steps, status="")

    def __enter__(self) -> TrainingLog:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def add(
        self, step: int, loss: Tensor, accuracy: Tensor, *, rate: float, **columns: str
    ) -> None:
        """Count a step. `rate` is the learning rate of the row that it may end."""
        self._running += torch.stack([loss.detach(), accuracy])
        self._bar.advance(self._task)
        if (step + 1) % self.every:
            return
        mean_loss, mean_accuracy = (self._running / self.every).tolist()
        self._running.zero_()
        row = {"step": step + 1, **columns, "loss": mean_loss, "accuracy": mean_accuracy}
        seconds = time.perf_counter() - self._began
        self.rows.append(row | {"learning_rate": rate, "seconds": seconds})
        phase = " ".join(columns.values())
        status = f"{phase}: loss {mean_loss:.3f}  accuracy {mean_accuracy:.3f}"
        self._bar.update(self._task, status=status)


def progress_bar(name: str) -> Progress:
    """A bar with a `status` field."""
    status = TextColumn("{task.fields[status]}")
    return Progress(TextColumn(name), BarColumn(), status, TimeRemainingColumn())


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a log as it is written."""
    return {key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}
