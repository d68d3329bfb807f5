"""A backbone that learns to see without any label: self-distillation (DINO, Caron et al. 2021) at
toy size.

Two views of each picture; a student says of one what a slow average of itself, the teacher, says of
the other. The teacher is centred and sharpened, so that neither collapses. Class tokens only, two
global views, no local crops. An alternative to naming parts, to see how much that matters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from seecause.critters.train.ifam_pictures import batches
from seecause.critters.train.ifam_recipe import IfamRecipe, build
from seecause.critters.train.steps import adamw, half, pace

_PROTOTYPES, _HIDDEN, _BOTTLENECK = 1024, 512, 64
_STUDENT_HEAT, _TEACHER_HEAT = 0.1, 0.04
_MOMENTUM, _CENTRE_MOMENTUM = 0.99, 0.9
_WARM_UP = 0.05


class Speaker(nn.Module):
    """A backbone and what it says of a picture: similarities to prototypes."""

    def __init__(self, backbone: VisionTransformer):
        super().__init__()
        self.backbone = backbone
        self.project = nn.Sequential(
            nn.Linear(backbone.embed_dim, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _BOTTLENECK)
        )
        self.prototypes = nn.Parameter(torch.randn(_PROTOTYPES, _BOTTLENECK))

    def forward(self, images: Tensor) -> Tensor:
        """[B, prototypes], cosines."""
        seen = self.project(self.backbone.forward_features(images)[:, 0]).float()
        with torch.autocast(images.device.type, enabled=False):  # cosines are divided by 0.04
            return F.normalize(seen, dim=-1) @ F.normalize(self.prototypes, dim=-1).T


def pretrain_dino(
    recipe: IfamRecipe, *, device: torch.device, hear: Callable[[dict[str, Any]], None], every: int
) -> VisionTransformer:
    """The teacher's backbone after `pretraining_steps` of `clean`; the caller keeps the global
    random state."""
    student = Speaker(build(recipe)).to(device).train()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    optimizer = adamw(
        student, learning_rate=recipe.pretraining_rate, weight_decay=recipe.weight_decay
    )
    centre, running, steps = (
        torch.zeros(_PROTOTYPES, device=device),
        torch.zeros(2, device=device),
        recipe.pretraining_steps,
    )
    for step, scenes in enumerate(
        batches(
            "clean",
            recipe.pretraining_batch,
            steps,
            seed=recipe.seed,
            size=recipe.size,
            device=device,
        )
    ):
        for group in optimizer.param_groups:
            group["lr"] = recipe.pretraining_rate * pace(step, steps, _WARM_UP)
        both = torch.cat([recipe.preprocess.normalise(view(scenes.images)) for _ in range(2)])
        with half(device):
            with torch.no_grad():
                told = teacher(both)
            said = student(both)
        loss, agree = distillation(said, told, centre)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            centre.lerp_(told.mean(dim=0), 1 - _CENTRE_MOMENTUM)
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 1 - _MOMENTUM)
        running += torch.stack([loss.detach(), agree])
        if (step + 1) % every == 0:
            total, right = (running / every).tolist()
            running.zero_()
            hear({"phase": "seeing", "step": step + 1, "loss": total, "accuracy": right})
    return teacher.backbone


def distillation(said: Tensor, told: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Two views' rows one above the other, [2 B, prototypes] of student and teacher -> the loss,
    and how often both name the same prototype."""
    wanted = (
        ((told - centre) / _TEACHER_HEAT).softmax(dim=-1).roll(len(told) // 2, dims=0)
    )  # of the other view
    loss = -(wanted * (said / _STUDENT_HEAT).log_softmax(dim=-1)).sum(dim=-1).mean()
    return loss, (wanted.argmax(dim=-1) == said.argmax(dim=-1)).float().mean()


def view(images: Tensor) -> Tensor:
    """A random cut of each picture [B, 3, H, W] (0.6 to 1 of its side, mirrored half of the time),
    with another light in each channel."""
    count, device = len(images), images.device
    scale = torch.empty(count, device=device).uniform_(0.6, 1.0)
    side = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    shift = torch.empty(count, 2, device=device).uniform_(-1, 1) * (1 - scale[:, None])
    grid = torch.zeros(count, 2, 3, device=device)
    grid[:, 0, 0], grid[:, 1, 1], grid[:, :, 2] = scale * side, scale, shift
    cut = F.grid_sample(
        images,
        F.affine_grid(grid, list(images.shape), align_corners=False),
        padding_mode="border",
        align_corners=False,
    )
    return (cut * torch.empty(count, 3, 1, 1, device=device).uniform_(0.7, 1.3)).clamp(0, 1)
