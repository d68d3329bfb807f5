"""Fine-tuning on versions of images: all weights learn, and the best epoch on held-out versions
wins.

Each version has the label of its object. AdamW with a low learning rate, balanced classes, half of
the images mirrored, bfloat16 on a GPU. After each epoch `score` judges the model; training stops
when it has not risen for `PATIENCE` epochs. With a checkpoint file, a killed training continues
from its last whole epoch and ends with the same weights. Under `torchrun` processes share each
batch and add their gradients; the first process decides and writes.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.background.last_layer import class_weights
from seecause.background.transplant import Versions
from seecause.errors import BadInput
from seecause.faithful.training import joined_processes
from seecause.files import write_atomic
from seecause.loading import rewrap
from seecause.models.view import VisionModel
from seecause.types import wide

DECAY, CLIP, PATIENCE = 0.05, 1.0, 2


def fine_tune(
    model: VisionModel,
    versions: Versions,
    score: Callable[[VisionModel], float],
    *,
    epochs: int = 5,
    rate: float = 5e-5,
    batch: int = 64,
    seed: int = 0,
    checkpoint: Path | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[VisionModel, list[float]]:
    """Train a copy of the model on versions.

    Args:
        model: The model to start from; it is not changed.
        versions: What to learn from.
        score: Judges the model after each epoch; higher is better.
        epochs: At most so many passes over all versions.
        rate: The highest learning rate.
        batch: Versions per step.
        seed: Of the order of versions and of mirroring.
        checkpoint: A file from which a killed training continues.
        progress: Is called with the number of versions of each finished step.

    Returns:
        The model of the best epoch, and the score of every epoch.
    """
    view = rewrap(model, copy.deepcopy(model.module), check=False)
    module = nn.ModuleList([view.module] if view.extra is None else [view.module, view.extra])
    module.requires_grad_(True)
    fused = view.device.type == "cuda"
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=DECAY, fused=fused)
    processes, curve, best = joined_processes(model.device), list[float](), dict[str, Tensor]()
    content = None
    if checkpoint is not None and checkpoint.is_file():
        content = checkpoint.read_bytes()
    if (content := processes.from_first(content)) is not None:
        state: dict[str, Any] = torch.load(
            io.BytesIO(content), map_location=model.device, weights_only=True
        )
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        curve, best = state["curve"], state["best"]
        progress(len(curve) * len(versions))
    while len(curve) < epochs and not (curve and len(curve) - 1 - _best(curve) >= PATIENCE):
        _epoch(view, module, optimizer, versions, len(curve), epochs, rate, batch, seed, progress)
        curve.append(processes.from_first(score(view)))
        if _best(curve) == len(curve) - 1:
            best = {name: value.detach().clone() for name, value in module.state_dict().items()}
        if checkpoint is not None and processes.first:
            state = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
            buffer = io.BytesIO()
            torch.save({**state, "curve": curve, "best": best}, buffer)
            write_atomic(checkpoint, buffer.getvalue())
    module.load_state_dict(best)
    module.requires_grad_(False)
    return rewrap(model, view.module, head=view.extra), curve


def _best(curve: list[float]) -> int:
    """The first epoch with the highest score."""
    return curve.index(max(curve))


def _epoch(
    view: VisionModel,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    versions: Versions,
    epoch: int,
    epochs: int,
    rate: float,
    batch: int,
    seed: int,
    progress: Callable[[int], None],
) -> None:
    """Each version once, in an order drawn from (seed, epoch)."""
    device, processes = view.device, joined_processes(view.device)
    draw = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(len(versions), generator=draw).split(batch)
    weights = class_weights(versions.labels.cpu(), view.n_classes).to(device)
    for number, rows in enumerate(order):
        done = (epoch + number / len(order)) / epochs
        for group in optimizer.param_groups:  # a short warm-up, then linearly to 0
            group["lr"] = rate * min(1.0, 20 * done + 0.05) * (1 - done)
        mirrored = torch.rand(len(rows), generator=draw, dtype=torch.float32) < 0.5
        mine = torch.arange(processes.rank, len(rows), processes.world)
        share = weights[rows[mine].to(device)] / len(rows)
        if len(mine) == 0:  # a small last batch: this process adds a gradient of 0
            mine, share = mine.new_zeros(1), weights.new_zeros(1)
        own = rows[mine].to(versions.labels.device)
        images, labels = versions[own], versions.labels[own].to(device)
        turned = mirrored[mine].to(images.device)[:, None, None, None]
        images = torch.where(turned, images.flip(-1), images).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = wide(view.native(images))
        nll = F.cross_entropy(logits, labels, reduction="none")
        optimizer.zero_grad()
        (share.to(nll) * nll).sum().backward()
        processes.add_gradients(module.parameters())
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        progress(len(rows))
    if not all(bool(value.isfinite().all()) for value in module.parameters()):
        raise BadInput("fine-tuning", "weights are not finite any more", "give a lower rate")
