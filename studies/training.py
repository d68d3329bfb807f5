"""What trainings of several studies share: groups of weights, the descent, and weights that are
kept for other cells."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seecause.bench.study import StudyContext
from seecause.critters.train import pace
from seecause.faithful.config import set_pace
from seecause.files import digest_json

WARM_UP, DECAY = 0.1, 0.05


def with_faster_head(module: Any, rate: float, factor: float) -> list[dict[str, Any]]:
    """All weights at `rate`, those of the last layer `factor` times as fast."""
    head = list(module.get_classifier().parameters())
    others = [p for p in module.parameters() if all(p is not own for own in head)]
    return [{"params": others, "lr": rate}, {"params": head, "lr": factor * rate}]


def descend(
    groups: list[dict[str, Any]],
    steps: int,
    loss: Callable[[int], Tensor],
    *,
    share: Callable[[int, int], float] = lambda step, steps: pace(step, steps, WARM_UP),
    clip: float | None = None,
    **options: Any,
) -> None:
    """AdamW down the loss of each step, at a `share` of the rate: by default a tenth of the steps
    up and half a cosine down."""
    optimizer = torch.optim.AdamW(groups, **{"weight_decay": DECAY, **options})
    for step in range(steps):
        set_pace(optimizer.param_groups, share(step, steps))
        total = loss(step)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        if clip is not None:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(every, clip)
        optimizer.step()


class Epochs:
    """Rows of every step: an order for each epoch, and which of the pictures are mirrored, drawn
    by a seed."""

    def __init__(self, pictures: Any, batch: int, epochs: int, seed: int):
        self.pictures, self.batch = pictures, min(batch, len(pictures))
        self.each = len(pictures) // self.batch
        self.steps = self.each * epochs
        self.draw = torch.Generator().manual_seed(seed)

    def part(self, step: int) -> Any:
        place, device = step % self.each, self.pictures.labels.device
        if place == 0:
            self.order = torch.randperm(len(self.pictures), generator=self.draw)
        rows = self.order[place * self.batch :][: self.batch].to(device)
        turned = (torch.rand(self.batch, generator=self.draw) < 0.5).to(device)
        return self.pictures.take(rows).mirrored(turned)


def trained_once(
    context: StudyContext, name: str, key: Any, module: nn.Module, train: Callable[[Any], object]
) -> Any:
    """The module with the weights that `train` gives it, which the work folder keeps: cells of one
    run train it once, whichever process is first."""
    kind = context.device.partition(":")[0]
    file = context.work / f"{name}-{digest_json([key, context.limit, kind])}.pt"
    context.work.mkdir(parents=True, exist_ok=True)
    with (context.work / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.is_file():
            train(module.to(context.device).train().requires_grad_(True))
            torch.save(module.state_dict(), file.with_suffix(".partial"))
            file.with_suffix(".partial").rename(file)
    module.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return module.to(context.device).eval()
