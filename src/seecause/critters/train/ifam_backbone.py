"""A backbone that has learnt to see: patch features that tell parts apart, without any mask.

`parts`, from labels of whole pictures: on `clean`, where the background says nothing, the class
token names the variant of every part (or that it is gone) and the coat. So does the patch that
speaks loudest: a score is the log-sum-exp over patches, so that one patch that sees the part is
enough and none need speak for others.

`dino`, from no label at all: self-distillation (Caron et al. 2021) at toy size, to see how much the
naming of parts matters. Two views of each picture; a student says of one what a slow average of
itself, the teacher, says of the other. The teacher is centred and sharpened, so that neither
collapses. Class tokens only, two global views, no local crops.
"""

from __future__ import annotations

import copy
import math

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from seecause import critters
from seecause.critters import VARIANTS, Latents
from seecause.critters.train.common import (
    LogRow,
    RunningMeans,
    adamw,
    descend,
    half,
    pace,
    seeded,
)
from seecause.critters.train.ifam_recipe import IfamRecipe, build_backbone, clean_batches

_VARIANTS = max(len(names) for names in VARIANTS.values())
_CHOICES = _VARIANTS + 1  # and absent
_WARM_UP = 0.05
_PART_DROP, _MIXED = 0.5, 0.5  # of the pictures lose parts; have parts drawn by lot


def pretrain(
    recipe: IfamRecipe,
    *,
    device: torch.device,
    write_row: LogRow = lambda row: None,
    every: int = 50,
) -> VisionTransformer:
    """The backbone after `pretraining_steps`; `write_row` gets a row for the log now and then. The
    global random state is left as it was."""
    if recipe.pretraining == "none":
        return build_backbone(recipe).to(device)
    with seeded(recipe.seed, device):
        if recipe.pretraining == "dino":
            return pretrain_dino(recipe, device=device, write_row=write_row, every=every)
        return _pretrain(recipe, device, write_row, every)


def _pretrain(
    recipe: IfamRecipe, device: torch.device, write_row: LogRow, every: int
) -> VisionTransformer:
    model = build_backbone(recipe).to(device).train()
    heads = nn.ModuleList(
        nn.Linear(model.embed_dim, (len(VARIANTS) + 1) * _CHOICES) for _ in range(2)
    ).to(device)  # of class token, of patches
    optimizer = adamw(
        model, heads, learning_rate=recipe.pretraining_rate, weight_decay=recipe.weight_decay
    )
    means, steps = RunningMeans(write_row, "seeing", every), recipe.pretraining_steps
    for step, scenes in enumerate(clean_batches(recipe, device, _varied)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.pretraining_rate * pace(step, steps, _WARM_UP)
        truth = _truth(scenes.latents)  # [B, P + 1]
        with half(device):
            tokens = model.forward_features(recipe.preprocess.normalise(scenes.images))
            whole, each = heads[0](tokens[:, 0]), heads[1](tokens[:, model.num_prefix_tokens :])
        guesses = [
            guess.float().unflatten(1, (-1, _CHOICES)) for guess in (whole, loudest(each.float()))
        ]
        loss = sum(
            (F.cross_entropy(guess.flatten(0, 1), truth.flatten()) for guess in guesses),
            start=torch.zeros((), device=device),
        )
        descend(optimizer, loss, [*model.parameters(), *heads.parameters()], 1.0)
        right, right_each = ((guess.argmax(dim=-1) == truth).float().mean() for guess in guesses)
        means.add(step, {"loss": loss, "accuracy": right, "patch_accuracy": right_each})
    return model.eval()


def loudest(scores: Tensor) -> Tensor:
    """Scores of patches [B, N, S] -> of the picture [B, S]."""
    return scores.logsumexp(dim=1) - math.log(scores.shape[1])


def _varied(latents: Latents) -> Latents:
    return critters.drop_parts(critters.mix_parts(latents, share=_MIXED), share=_PART_DROP)


def _truth(latents: Latents) -> Tensor:
    """[B, P + 1]: the variant of every part, or that it is absent; and the coat."""
    shown = torch.where(latents.present[:, 1:], latents.variants, _CHOICES - 1)
    return torch.cat([shown, latents.coat[:, None]], dim=1)


_PROTOTYPES, _HIDDEN, _BOTTLENECK = 1024, 512, 64
_STUDENT_HEAT, _TEACHER_HEAT = 0.1, 0.04
_MOMENTUM, _CENTRE_MOMENTUM = 0.99, 0.9


class PrototypeNet(nn.Module):
    """A backbone, and the similarities of a picture to prototypes."""

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
    recipe: IfamRecipe, *, device: torch.device, write_row: LogRow, every: int
) -> VisionTransformer:
    """The teacher's backbone after `pretraining_steps` of `clean`; the caller keeps the global
    random state."""
    student = PrototypeNet(build_backbone(recipe)).to(device).train()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    optimizer = adamw(
        student, learning_rate=recipe.pretraining_rate, weight_decay=recipe.weight_decay
    )
    means, steps = RunningMeans(write_row, "seeing", every), recipe.pretraining_steps
    centre = torch.zeros(_PROTOTYPES, device=device)
    for step, scenes in enumerate(clean_batches(recipe, device)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.pretraining_rate * pace(step, steps, _WARM_UP)
        both = torch.cat([recipe.preprocess.normalise(view(scenes.images)) for _ in range(2)])
        with half(device):
            with torch.no_grad():
                target = teacher(both)
            guess = student(both)
        loss, agree = distillation(guess, target, centre)
        descend(optimizer, loss, student.parameters(), 1.0)
        with torch.no_grad():
            centre.lerp_(target.mean(dim=0), 1 - _CENTRE_MOMENTUM)
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 1 - _MOMENTUM)
        means.add(step, {"loss": loss, "accuracy": agree})
    return teacher.backbone


def distillation(guess: Tensor, target: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Two views' rows one above the other, [2 B, prototypes] of student and teacher -> the loss,
    and how often both name the same prototype."""
    # of the other view
    wanted = ((target - centre) / _TEACHER_HEAT).softmax(dim=-1).roll(len(target) // 2, dims=0)
    loss = -(wanted * (guess / _STUDENT_HEAT).log_softmax(dim=-1)).sum(dim=-1).mean()
    return loss, (wanted.argmax(dim=-1) == guess.argmax(dim=-1)).float().mean()


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
