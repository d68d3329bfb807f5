"""What the training loops share: randomness, precision, the optimiser, its pace, the average of the
weights, the log."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn


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
    kept = [
        value for name, value in named if value.ndim < 2 or name.endswith(("_token", "pos_embed"))
    ]
    kept_ids = {id(value) for value in kept}
    decayed = [value for _, value in named if id(value) not in kept_ids]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))


def pace(step: int, steps: int, warm_up: float) -> float:
    """Share of the learning rate: a straight rise, then half a cosine down."""
    rise = max(1, int(warm_up * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


@torch.no_grad()
def move_average(average: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """Exponential average of the weights; it follows closely in the first steps, so that short runs
    get one too."""
    pull = max(1 - decay, 9 / (10 + step))
    torch._foreach_lerp_(
        list(average.parameters()), list(model.parameters()), pull
    )  # one kernel for all


def write_log(log: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(log[0]))
        writer.writeheader()
        writer.writerows(
            {
                key: round(value, 6) if isinstance(value, float) else value
                for key, value in row.items()
            }
            for row in log
        )
