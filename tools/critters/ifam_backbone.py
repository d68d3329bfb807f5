"""How critters-ifam begins: its recipe as data, endless batches of pictures, and a backbone that
has learnt to see: patch features that tell parts apart, without any mask.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from seecause import critters
from seecause.critters.latents import VARIANTS, Latents, drop_parts, mix_parts
from seecause.critters.regimes import Regime, find_regime
from seecause.faithful.losses import LossWeights
from tools.critters import (
    DrawnRecipe,
    LogRow,
    RunningMeans,
    adamw,
    descend,
    half,
    pace,
    seeded,
)

# the paper's 2 let a part settle on a texture in small runs; the study finds 2 no worse:
# docs/decisions.md
_WEIGHTS = LossWeights(background=5.0)

Reads = Literal["parts", "everything", "creature"]
Pretraining = Literal["parts", "dino", "none"]


def backbone_shape() -> dict[str, Any]:
    """Arguments of timm's VisionTransformer: 1.0 M parameters, 16 x 16 patches of 6 pixels, so that
    every part of a critter covers 3 x 3."""
    return {
        "img_size": 96,
        "patch_size": 6,
        "embed_dim": 128,
        "depth": 5,
        "num_heads": 4,
        "num_classes": 0,
        "class_token": True,
        "reg_tokens": 4,
        "no_embed_class": True,
        "patch_drop_rate": 0.3,
        "global_pool": "token",
    }


@dataclass(frozen=True)
class IfamRecipe(DrawnRecipe):
    """First a backbone learns to see on `clean`, from labels of whole pictures; then both stages
    learn the regime together.

    `reads` is what the classifier may see: the patches its own stage 1 selects, everything (a plain
    vision transformer, ERM), or the creature by its true mask (a bound that no method can be
    expected to pass). `options` go to `IFAM`.
    """

    name: str
    regime: str | Regime = "simplicity"
    architecture: dict[str, Any] = field(default_factory=backbone_shape)
    parts: int = 4
    reads: Reads = "parts"
    covered: float = 0.5  # of a patch, by the creature, to be read by its true mask
    options: dict[str, Any] = field(default_factory=dict)
    weights: LossWeights = _WEIGHTS
    pretraining: Pretraining = "parts"
    pretraining_samples: int = 614_400
    pretraining_batch: int = 512
    pretraining_rate: float = 1e-3
    samples: int = 245_760  # 60 rounds of the 4,096 pictures of `simplicity`
    batch: int = 256
    epochs: int = 60  # in which the rate falls; of samples / epochs pictures each
    learning_rate: float = 5e-4  # of backbones
    head_factor: float = 40.0  # prototypes and heads: 2e-2
    weight_decay: float = 0.05
    clip: float = 2.0
    average: float = 0.99
    quantiles: tuple[float, ...] = (0.97, 0.99)  # thresholds that are kept with the network
    seed: int = 0

    @property
    def size(self) -> int:
        return self.architecture["img_size"]

    @property
    def pretraining_steps(self) -> int:
        return max(1, self.pretraining_samples // self.pretraining_batch)


RECIPES = {"critters-ifam": IfamRecipe("critters-ifam")}


def build_backbone(recipe: IfamRecipe) -> VisionTransformer:
    """The untrained backbone, on the CPU; the global random state is left as it was."""
    with seeded(recipe.seed):
        return VisionTransformer(**recipe.architecture)


_AHEAD = 6144  # pictures drawn at once


@dataclass(frozen=True, eq=False)
class Scenes:
    """Pictures with everything that is known about them."""

    images: Tensor  # [B, 3, H, W] in [0, 1]
    masks: Tensor  # [B, H, W] bool, True on the creature
    latents: Latents
    ids: Tensor  # [B] int64, which sample of the regime each is

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Tensor | slice) -> Scenes:
        return Scenes(self.images[rows], self.masks[rows], self.latents[rows], self.ids[rows])

    def mirrored(self) -> Scenes:
        """Half of them, by lot, as in a mirror; a creature may face either way."""
        turned = torch.rand(len(self), device=self.ids.device) < 0.5
        images = torch.where(turned[:, None, None, None], self.images.flip(-1), self.images)
        masks = torch.where(turned[:, None, None], self.masks.flip(-1), self.masks)
        return Scenes(images, masks, self.latents, self.ids)

    def patches(self, side: int, *, covered: float = 0.5) -> Tensor:
        """[B, side, side] bool: the patches of which the creature covers at least this share."""
        shares = F.adaptive_avg_pool2d(self.masks[:, None].float(), side)[:, 0]
        return shares >= covered - 1e-6


def draw_scenes(latents: Latents, ids: Tensor, size: int) -> Scenes:
    """The pictures of these latents, which are samples `ids` of their regime."""
    pictures = [critters.render(rows, size=size) for rows in latents.split(_AHEAD)]
    images, masks, _ = (torch.cat(tensors) for tensors in zip(*pictures, strict=True))
    return Scenes(images, masks, latents, ids)


def batches(
    regime: str | Regime,
    batch: int,
    steps: int,
    *,
    seed: int,
    size: int,
    device: torch.device,
    change: Callable[[Latents], Latents] = lambda latents: latents,
) -> Iterator[Scenes]:
    """Training batches: a finite regime's pictures in another order in every round, others fresh,
    drawn ahead: a GPU draws thousands at once hardly slower than hundreds. `change` is done to
    latents before they are drawn."""

    def drawn(start: int, count: int) -> Scenes:
        latents = critters.draw(regime, "train", count, seed=seed, start=start, device=device)
        return draw_scenes(change(latents), torch.arange(start, start + count, device=device), size)

    pool = find_regime(regime).train_pool
    if pool is None:
        ahead = max(1, _AHEAD // batch) if device.type != "cpu" else 1
        for first in range(0, steps, ahead):
            scenes = drawn(first * batch, min(ahead, steps - first) * batch)
            for start in range(0, len(scenes), batch):
                yield scenes.take(slice(start, start + batch))
        return
    whole = drawn(0, pool)
    left = torch.empty(0, dtype=torch.int64, device=device)
    for _ in range(steps):
        while len(left) < batch:
            left = torch.cat([left, torch.randperm(pool, device=device)])
        rows, left = left[:batch], left[batch:]
        yield whole.take(rows)


_CHOICES = max(len(names) for names in VARIANTS.values()) + 1  # every variant, or absent
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
    steps = {"parts": _name_parts, "dino": _distil}[recipe.pretraining]
    with seeded(recipe.seed, device):
        return steps(recipe, device, RunningMeans(write_row, every))


def _paced_batches(
    recipe: IfamRecipe,
    device: torch.device,
    optimizer: torch.optim.Optimizer,
    change: Callable[[Latents], Latents] = lambda latents: latents,
) -> Iterator[tuple[int, Scenes]]:
    """The pictures of every step, which the optimiser is to take at its rate."""
    steps, options = recipe.pretraining_steps, {"seed": recipe.seed, "size": recipe.size}
    drawn = batches(
        "clean", recipe.pretraining_batch, steps, device=device, change=change, **options
    )
    for step, scenes in enumerate(drawn):
        for group in optimizer.param_groups:
            group["lr"] = recipe.pretraining_rate * pace(step, steps, _WARM_UP)
        yield step, scenes


def _name_parts(recipe: IfamRecipe, device: torch.device, means: RunningMeans) -> VisionTransformer:
    model = build_backbone(recipe).to(device).train()
    heads = nn.ModuleList(
        nn.Linear(model.embed_dim, (len(VARIANTS) + 1) * _CHOICES) for _ in range(2)
    ).to(device)  # of class token, of patches
    optimizer = adamw(
        model, heads, learning_rate=recipe.pretraining_rate, weight_decay=recipe.weight_decay
    )
    for step, scenes in _paced_batches(recipe, device, optimizer, _varied):
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
        numbers = {"loss": loss, "accuracy": right, "patch_accuracy": right_each}
        means.add(step, numbers, phase="seeing")
    return model.eval()


def loudest(scores: Tensor) -> Tensor:
    """Scores of patches [B, N, S] -> of the picture [B, S]."""
    return scores.logsumexp(dim=1) - math.log(scores.shape[1])


def _varied(latents: Latents) -> Latents:
    return drop_parts(mix_parts(latents, share=_MIXED), share=_PART_DROP)


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


def _distil(recipe: IfamRecipe, device: torch.device, means: RunningMeans) -> VisionTransformer:
    """The teacher's backbone."""
    student = PrototypeNet(build_backbone(recipe)).to(device).train()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    optimizer = adamw(
        student, learning_rate=recipe.pretraining_rate, weight_decay=recipe.weight_decay
    )
    centre = torch.zeros(_PROTOTYPES, device=device)
    for step, scenes in _paced_batches(recipe, device, optimizer):
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
        means.add(step, {"loss": loss, "accuracy": agree}, phase="seeing")
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
