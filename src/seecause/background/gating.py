"""Causal Head Gating (Nam et al. 2025, 2505.13737): soft gates on all heads at once, fitted under
opposite pressures.

    G = sigmoid(theta),   loss = NLL(G) - strength * mean(clip(theta, -4, 4))

Three fits: strength 0 from uniform gates, then +strength (G+, gates are pushed up) and -strength
(G-, pushed down), both from the first and on the same batches.

    facilitating   stays open under either pressure         soft: G-
    irrelevant     follows the pressure                     soft: G+ (1 - G-)
    interfering    shut even when pushed open               soft: 1 - G+
"Open" is a mean over fits above 0.5. As scores, only heads called interfering are above 0: 1 - G+
for them, -G+ for all others.

Contrastive form: keep one task and suppress another, loss = NLL(keep) - min(NLL(suppress), log C):
the second is pushed to chance, not beyond, where it has no lower bound. Written from the equations.
It learns from labels: on biased data a head that reads the background *facilitates*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.background.erase import Erased, Fill
from seecause.background.heads import HeadScores, absent, need_heads, selector
from seecause.background.images import LabelledImages, checked_labels
from seecause.engine.chunks import run_in_chunks
from seecause.engine.forks import gated_logits
from seecause.engine.mixture import need_gradients
from seecause.metrics.statistics import standard_error
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel
from seecause.options import Count, Positive, check_options
from seecause.types import wide, wide_dtype

ROLES = ("facilitating", "irrelevant", "interfering", "unclear")
OPEN = 0.5  # a gate above this is open
CLIP = 4.0  # of logits of gates
NORM = 1.0  # of each mask's gradient
Task = tuple[Tensor, Tensor]  # images [N, 3, H, W] and labels [N]


@dataclass(frozen=True, eq=False)
class Gating:
    """Gates [M, L, H] of M fits each: without pressure, pushed open (G+), pushed shut (G-). NaN
    where a block has no such head."""

    free: Tensor
    opened: Tensor
    shut: Tensor

    @property
    def facilitation(self) -> Tensor:
        """[L, H], like the other two."""
        return self.shut.mean(dim=0)

    @property
    def irrelevance(self) -> Tensor:
        return (self.opened * (1 - self.shut)).mean(dim=0)

    @property
    def interference(self) -> Tensor:
        return (1 - self.opened).mean(dim=0)

    def scores(self, threshold: float = OPEN) -> Tensor:
        """[L, H]: interference of heads that are called interfering, and interference less 1, which
        is 0 or less, of all others."""
        opened, shut = self.opened.mean(dim=0), self.shut.mean(dim=0)
        return torch.where((opened <= threshold) & (shut <= threshold), 1 - opened, -opened)

    def roles(self, threshold: float = OPEN) -> list[list[str | None]]:
        """The role of every head, layer by layer; None where there is no such head. "unclear" is
        shut when pushed open and open when pushed shut."""
        opened, shut = self.opened.mean(dim=0), self.shut.mean(dim=0)
        code = torch.where(
            opened > threshold,
            torch.where(shut > threshold, 0, 1),
            torch.where(shut > threshold, 3, 2),
        )
        code = code.masked_fill(opened.isnan(), -1)
        return [[None if role < 0 else ROLES[role] for role in layer] for layer in code.tolist()]


@selector(
    "gating", cost="3 * steps * fits forwards and backwards of a batch, in all", needs="labels"
)
def gating(
    model: VisionModel,
    data: LabelledImages,
    *,
    fits: Count = 10,
    steps: Count = 500,
    strength: Positive = 0.1,
    rate: Positive = 1.0,
    batch: Count = 32,
    seed: int = 0,
) -> HeadScores:
    """Interference under Causal Head Gating. Only heads that it calls interfering are above 0: shut
    even when all are pushed open."""
    options: dict[str, Any] = {"fits": fits, "steps": steps, "strength": strength, "rate": rate}
    options |= {"batch": batch, "seed": seed}
    return _gating_scores(model, (data.images, data.need_labels()), None, options)


@selector(
    "contrastive-gating",
    cost="6 * steps * fits forwards and backwards of a batch, in all",
    needs="labels, and masks or other versions",
)
def contrastive_gating(
    model: VisionModel,
    data: LabelledImages,
    *,
    fill: Fill | Tensor = "grey",
    fits: Count = 10,
    steps: Count = 500,
    strength: Positive = 0.1,
    rate: Positive = 1.0,
    batch: Count = 32,
    seed: int = 0,
) -> HeadScores:
    """Interference where the class must be predicted from the object alone, and must not be
    predicted from the background alone."""
    options: dict[str, Any] = {"fits": fits, "steps": steps, "strength": strength, "rate": rate}
    options |= {"batch": batch, "seed": seed}
    labels = data.need_labels()
    shown, hidden = Erased(model, data, fill).versions(slice(None))
    return _gating_scores(model, (shown, labels), (hidden, labels), options)


def _gating_scores(
    model: VisionModel, keep: Task, suppress: Task | None, options: dict[str, Any]
) -> HeadScores:
    gates = head_gates(model, keep, suppress=suppress, **options)
    roles = {
        "facilitation": gates.facilitation,
        "irrelevance": gates.irrelevance,
        "interference": gates.interference,
    }
    return HeadScores(
        gates.scores().double().cpu(),
        standard_error(gates.opened.double().cpu()),  # over fits
        after={name: share.double().cpu() for name, share in roles.items()},
        protocol={"contrastive": suppress is not None, "open": OPEN, **options},
    )


@in_eval_mode
def head_gates(
    model: VisionModel,
    keep: Task,
    *,
    suppress: Task | None = None,
    fits: Count = 10,
    steps: Count = 500,
    strength: Positive = 0.1,
    rate: Positive = 1.0,
    batch: Count = 32,
    seed: int = 0,
) -> Gating:
    """Fit gates of all heads under opposite pressures.

    Args:
        model: A vision transformer.
        keep: Images [N, 3, H, W] and labels [N] of the task that the gates keep.
        suppress: A task that they are to bring to chance.
        fits: Sets of gates that are fitted at once, each from its own start: (1) free, (2) pushed
            open, (3) pushed shut.
        steps: Updates of Adam in each of the three.
        strength: Of the pressure.
        rate: Learning rate.
        batch: Images of a step.
        seed: Draws starts and batches.
    """
    sizes = {"fits": fits, "steps": steps, "batch": batch, "strength": strength, "rate": rate}
    check_options("head_gates", head_gates, sizes)
    need_heads(model, "gating")
    need_gradients(model, "gating", remedy="Measure every head: sc.background.score")
    tasks = []
    for images, labels in [keep] if suppress is None else [keep, suppress]:
        images = images.to(model.device, model.dtype)
        tasks.append((images, checked_labels(model, images, labels)))
    generator = torch.Generator().manual_seed(seed)
    missing = absent(model).to(model.device)
    uniform = torch.rand(fits, *missing.shape, generator=generator, dtype=torch.float64)
    start = uniform.logit().clamp(-CLIP, CLIP).to(model.device, wide_dtype(model.dtype))
    schedule: dict[str, Any] = {"steps": steps, "rate": rate, "batch": batch}
    schedule |= {"generator": generator, "missing": missing}
    free = _fit(model, tasks, start, start.new_zeros(fits), **schedule)
    pressure = start.new_tensor([strength, -strength]).repeat_interleave(fits)
    pushed = _fit(model, tasks, free.repeat(2, 1, 1), pressure, **schedule)
    opened, shut = pushed.chunk(2)  # side by side, on the same batches
    return Gating(
        *(theta.sigmoid().masked_fill(missing, torch.nan) for theta in (free, opened, shut))
    )


def _fit(
    model: VisionModel,
    tasks: list[Task],
    start: Tensor,
    strengths: Tensor,
    *,
    steps: int,
    rate: float,
    batch: int,
    generator: torch.Generator,
    missing: Tensor,
) -> Tensor:
    """Logits of gates [M, L, H] after `steps` updates on random batches, the same ones for every
    mask; `strengths` [M] push them open."""
    theta = start.clone().requires_grad_()
    adam = torch.optim.Adam([theta], lr=rate)
    # [M, L, H]: the slope of the pressure where it is not clipped
    push = (~missing).to(theta.dtype) / (~missing).sum() * strengths[:, None, None]
    for _ in range(steps):
        batches = [torch.randperm(len(labels), generator=generator)[:batch] for _, labels in tasks]
        picked = [
            (images[rows.to(images.device)], labels[rows.to(labels.device)])
            for (images, labels), rows in zip(tasks, batches, strict=True)
        ]
        adam.zero_grad()
        within = (theta.detach().abs() <= CLIP).to(theta.dtype)
        theta.grad = _slopes(model, picked, theta) - within * push
        norm = theta.grad.flatten(1).norm(dim=1).clamp_min(1e-12)
        theta.grad *= (NORM / norm).clamp(max=1.0)[:, None, None]
        adam.step()
    return theta.detach()


def _slopes(model: VisionModel, tasks: list[Task], theta: Tensor) -> Tensor:
    """The gradient of the loss in `theta` [M, L, H]; as many masks at once as fit."""
    x, y = (torch.cat(parts) for parts in zip(*tasks, strict=True))  # all tasks in one pass
    each = len(x) * model.forward_bytes(model.check(x)) * model.n_layers * 2

    def run_chunk(start: int, stop: int) -> Tensor:
        part = theta[start:stop].detach().requires_grad_()
        gates = part.sigmoid().to(x.dtype).repeat_interleave(len(x), dim=0)  # [m * B, L, H]
        logits = gated_logits(model, x.repeat(stop - start, 1, 1, 1), gates)
        nll = F.cross_entropy(wide(logits), y.repeat(stop - start), reduction="none")
        keep, *suppress = nll.unflatten(0, (stop - start, len(x))).split(
            [len(labels) for _, labels in tasks], dim=1
        )  # each [m, B]
        loss = keep.mean(dim=1) - sum(
            other.clamp(max=math.log(logits.shape[-1])).mean(dim=1) for other in suppress
        )
        return torch.autograd.grad(loss.sum(), part)[0]

    return run_in_chunks(run_chunk, len(theta), each, x.device, what="masks")
