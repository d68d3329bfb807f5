"""A backbone that has learnt to see: patch features that tell parts apart, from labels of whole
pictures alone.

On `clean`, where the background says nothing, the class token names the variant of every part (or
that it is gone) and the coat. So does the patch that speaks loudest: a score is the log-sum-exp
over patches, so that one patch that sees the part is enough and none need speak for others. No mask
is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from seecause import critters
from seecause.critters import VARIANTS, Latents
from seecause.critters.train.ifam_pictures import batches
from seecause.critters.train.ifam_recipe import IfamRecipe, build
from seecause.critters.train.steps import adamw, half, pace, seeded

_VARIANTS = max(len(names) for names in VARIANTS.values())
_CHOICES = _VARIANTS + 1  # and absent
_WARM_UP = 0.05
_PART_DROP, _MIXED = (
    0.5,
    0.5,
)  # shares of the pictures that lose parts, and whose parts are drawn by lot

Heard = Callable[[dict[str, Any]], None]


def pretrain(
    recipe: IfamRecipe, *, device: torch.device, hear: Heard = lambda row: None, every: int = 50
) -> VisionTransformer:
    """The backbone after `pretraining_steps`; `hear` gets a row for the log now and then. The
    global random state is left as it was."""
    if recipe.pretraining == "none":
        return build(recipe).to(device)
    with seeded(recipe.seed, device):
        if recipe.pretraining == "dino":
            from seecause.critters.train.ifam_dino import pretrain_dino

            return pretrain_dino(recipe, device=device, hear=hear, every=every)
        return _pretrain(recipe, device, hear, every)


def _pretrain(
    recipe: IfamRecipe, device: torch.device, hear: Heard, every: int
) -> VisionTransformer:
    model = build(recipe).to(device).train()
    heads = nn.ModuleList(
        nn.Linear(model.embed_dim, (len(VARIANTS) + 1) * _CHOICES) for _ in range(2)
    ).to(device)  # of class token, of patches
    optimizer = adamw(
        model, heads, learning_rate=recipe.pretraining_rate, weight_decay=recipe.weight_decay
    )
    running, steps = torch.zeros(3, device=device), recipe.pretraining_steps
    stream = batches(
        "clean",
        recipe.pretraining_batch,
        steps,
        seed=recipe.seed,
        size=recipe.size,
        device=device,
        change=_varied,
    )
    for step, scenes in enumerate(stream):
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
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], 1.0)
        optimizer.step()
        running += torch.stack(
            [loss.detach(), *((guess.argmax(dim=-1) == truth).float().mean() for guess in guesses)]
        )
        if (step + 1) % every == 0:
            total, right, right_each = (running / every).tolist()
            running.zero_()
            hear(
                {
                    "phase": "seeing",
                    "step": step + 1,
                    "loss": total,
                    "accuracy": right,
                    "patch_accuracy": right_each,
                }
            )
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
