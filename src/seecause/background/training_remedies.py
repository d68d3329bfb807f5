"""Remedies that train on: all weights of the model, or a network that cannot look elsewhere.

    fine-tune  the model goes on learning from versions, each labelled as its object is. AdamW at a
               low rate, classes balanced. After each epoch, transplant-worst of held-out versions
               decides whether it is the best yet; training stops when it has not risen for
               `patience` epochs. With a work folder, a run that was killed goes on from its last
               whole epoch and ends as if it had not been; one whose file is damaged begins again.
               Under `torchrun` processes share each batch and add their gradients: the steps are
               those of one. The first process decides and writes
    ifam       where it is asked for: a second transformer answers from the patches of parts that
               the first one discovers (see `faithful`). It starts from the model's own backbone,
               learns from plain pictures, and needs no group label here: its setting is the one
               given, or the best of some by transplant-worst

Both mirror half of the pictures and use bfloat16 on a GPU. Each epoch draws its own order.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.background._remedies import EPOCH, Lesson, Mended, remedy
from seecause.background.last_layer import class_weights
from seecause.background.versions import Versions
from seecause.errors import SeecauseError
from seecause.faithful.config import set_pace
from seecause.faithful.losses import LossWeights, TrainingLosses, parameter_groups
from seecause.faithful.net import IFAM
from seecause.faithful.run import joined_processes
from seecause.files import read_sealed, write_sealed
from seecause.loading import rewrap, wrap
from seecause.models.view import VisionModel
from seecause.types import wide

DECAY, CLIP = 0.05, 1.0
IFAM_CLIP, PROTOTYPE_RATE, HEADS_RATE = 2.0, 3e-2, 1e-2
_STATEFUL, _PROGRESS = ("module", "optimizer"), ("epoch", "best", "best_state", "curve")
Setting = tuple[float, float, bool]  # background, total variation, whether stage 1 learns whole


@dataclass
class _Run:
    """How far a training is: a view of a copy, all of whose weights learn."""

    view: VisionModel
    module: nn.Module  # with the head, where that is not part of the native one
    optimizer: torch.optim.Optimizer
    epoch: int = 0
    best: float = -1.0
    best_state: dict[str, Tensor] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)

    def save(self, file: Path) -> None:
        state = {name: getattr(self, name) for name in _PROGRESS}
        state |= {name: getattr(self, name).state_dict() for name in _STATEFUL}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_sealed(file, buffer.getvalue())

    def load(self, content: bytes, device: torch.device) -> None:
        file = io.BytesIO(content)
        state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        for name in _PROGRESS:
            setattr(self, name, state[name])


@remedy("fine-tune", cost="about 15 forwards of each version")
def fine_tune(
    model: VisionModel,
    lesson: Lesson,
    *,
    epochs: int = 5,
    rate: float = 5e-5,
    batch: int = 64,
    patience: int = 2,
) -> Mended:
    """All weights trained on, on versions; stopped early by transplant-worst."""
    view = rewrap(model, copy.deepcopy(model.module), check=False)
    module = nn.ModuleList([view.module] if view.extra is None else [view.module, view.extra])
    module.requires_grad_(True)
    fused = view.device.type == "cuda"
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=DECAY, fused=fused)
    run, processes = _Run(view, module, optimizer), joined_processes(model.device)
    file = None if lesson.work is None else lesson.work / EPOCH
    content = None if file is None else read_sealed(file)
    if (content := processes.from_first(content)) is not None:
        run.load(content, model.device)
    total = epochs * len(lesson.learn.moved)
    with lesson.progress("fine-tuning", total) as advance:
        advance(run.epoch * len(lesson.learn.moved))
        while run.epoch < epochs and not _stale(run.curve, patience):
            _epoch(run, lesson, batch, rate, epochs, advance)
            worst = processes.from_first(lesson.worst(lesson.choose.logits(view)))
            run.curve.append(worst)
            if worst > run.best:
                run.best = worst
                run.best_state = {k: v.detach().clone() for k, v in module.state_dict().items()}
            if file is not None and processes.first:
                run.save(file)
    module.load_state_dict(run.best_state)
    details = {
        "epochs": len(run.curve),
        "rate": rate,
        "versions": len(lesson.learn.moved),
        "transplant-worst by epoch": [round(value, 4) for value in run.curve],
    }
    done = (
        f"Fine-tuned on {len(lesson.learn.moved)} versions: epoch"
        f" {1 + run.curve.index(run.best)} of {len(run.curve)} (rate {rate:g})."
    )
    module.requires_grad_(False)
    return Mended(rewrap(model, view.module, head=view.extra), done, details)


@dataclass(frozen=True, eq=False)
class _Share:
    """Versions of a batch, whether each is mirrored, and what it weighs."""

    rows: Tensor  # [m]
    turned: Tensor  # [m] bool
    weights: Tensor  # [m] float64


def _loss(view: VisionModel, versions: Versions, share: _Share) -> Tensor:
    """Their part of the batch's loss."""
    rows, device = share.rows.to(versions.labels.device), view.device
    images, labels = versions[rows], versions.labels[rows].to(device)
    images = _mirrored(images, share.turned).to(device)
    with _half_on_gpu(device):
        logits = wide(view.native(images))
    nll = F.cross_entropy(logits, labels, reduction="none")
    return (share.weights.to(nll) * nll).sum()


def _stale(curve: list[float], patience: int) -> bool:
    """Whether the best epoch is `patience` epochs ago."""
    return bool(curve) and len(curve) - 1 - curve.index(max(curve)) >= patience


def _epoch(
    run: _Run, lesson: Lesson, batch: int, rate: float, epochs: int, advance: Callable[[int], None]
) -> None:
    """Each version once, in an order drawn from (seed, epoch)."""
    versions, device = lesson.learn.moved, run.view.device
    processes = joined_processes(device)
    draw = torch.Generator().manual_seed(1000 * lesson.seed + run.epoch)
    order = torch.randperm(len(versions), generator=draw)
    weights = class_weights(versions.labels.cpu(), run.view.n_classes).to(device)
    rows_of = order.split(batch)
    for number, rows in enumerate(rows_of):
        done = (run.epoch + number / len(rows_of)) / epochs
        for group in run.optimizer.param_groups:
            group["lr"] = rate * min(1.0, 20 * done + 0.05) * (1 - done)
        turned = torch.rand(len(rows), generator=draw, dtype=torch.float32) < 0.5
        mine = torch.arange(processes.rank, len(rows), processes.world)
        share = _Share(rows[mine], turned[mine], weights[rows[mine].to(device)] / len(rows))
        if len(mine) == 0:  # the last batch is small: nothing of a version, for all add something
            share = _Share(rows[:1], turned[:1], weights.new_zeros(1))
        run.optimizer.zero_grad()
        _loss(run.view, versions, share).backward()
        processes.add_gradients(run.module.parameters())
        nn.utils.clip_grad_norm_(run.module.parameters(), CLIP)
        run.optimizer.step()
        advance(len(rows))
    run.epoch += 1
    if not all(bool(value.isfinite().all()) for value in run.module.parameters()):
        raise SeecauseError(
            f"weights of fine-tuning are not finite after {run.epoch * len(rows_of)} steps; lower"
            " the learning rate."
        )


@remedy("ifam", cost="about 200 forwards of each picture and setting", needs="labels")
def train_ifam(
    model: VisionModel,
    lesson: Lesson,
    *,
    parts: int = 4,
    epochs: int = 15,
    rate: float = 1e-4,
    batch: int = 64,
    settings: tuple[Setting, ...] = ((2.0, 1.0, True), (2.0, 0.3, True), (5.0, 0.3, True)),
) -> Mended:
    """A classifier that answers from discovered parts alone, the setting by transplant-worst."""
    with lesson.progress("training iFAM", len(settings) * epochs) as advance:
        options = (parts, epochs, rate, batch, advance)
        views = ((setting, _trained(model, lesson, setting, *options)) for setting in settings)
        setting, view, tried = lesson.best(views)
    done = f"iFAM with {parts} parts, trained for {epochs} epochs from the model's backbone."
    details = {"setting": list(setting), "transplant-worst by setting": tried}
    return Mended(view, done, details)


def _trained(
    model: VisionModel,
    lesson: Lesson,
    setting: Setting,
    parts: int,
    epochs: int,
    rate: float,
    batch: int,
    advance: Callable[[int], None],
) -> VisionModel:
    """AdamW, half a cosine down, bfloat16 on a GPU; chance starts from the lesson's seed."""
    background, variation, whole = setting
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lesson.seed)
        net = IFAM(
            model.module,
            parts,
            model.classes or model.n_classes,
            preprocess=model.preprocess,
            freeze="none" if whole else "stage1",
        )
    net = net.to(model.device).train()
    losses = TrainingLosses(net, LossWeights(background=background, total_variation=variation))
    factors = {"prototype_factor": PROTOTYPE_RATE / rate, "head_factor": HEADS_RATE / rate}
    groups = parameter_groups(net, rate, DECAY, **factors)
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY)
    images, labels = lesson.learn.data.images, lesson.learn.labels
    draw = torch.Generator().manual_seed(lesson.seed)
    step, steps = 0, epochs * -(-len(images) // batch)
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=draw).split(batch):
            set_pace(optimizer.param_groups, 0.5 * (1 + math.cos(math.pi * step / steps)))
            rows = rows.to(images.device)
            turned = torch.rand(len(rows), generator=draw, dtype=torch.float32) < 0.5
            shown = _mirrored(images[rows], turned)
            with _half_on_gpu(model.device):
                total = losses(shown, labels[rows], rows, lesson.seed, step)[0]
            optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(net.parameters(), IFAM_CLIP)
            optimizer.step()
            step += 1
        advance(1)
    view = wrap(net.eval(), name=f"iFAM of {model.name}")
    assert isinstance(view, VisionModel)
    return view


def _mirrored(images: Tensor, turned: Tensor) -> Tensor:
    """Images [b, 3, H, W], those that are `turned` [b] (bool) mirrored."""
    return torch.where(turned.to(images.device)[:, None, None, None], images.flip(-1), images)


def _half_on_gpu(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
