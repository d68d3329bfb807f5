"""How well an iFAM network answers and selects, on Critters: accuracy by group, the mask against
the creature, and interventions chosen on validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seecause import critters
from seecause.critters.train.ifam_pictures import Scenes, drawn
from seecause.critters.train.ifam_recipe import IfamRecipe
from seecause.faithful import IFAM, calibrate, intervene
from seecause.faithful.evaluate import best_of, try_interventions
from seecause.metrics.groups import GroupAccuracy, group_accuracy
from seecause.metrics.segmentation import Overlap, overlap

_ROWS = 512


class Answering(nn.Module):
    """A network as a plain classifier: images to logits, all tokens run, which a GPU does faster in
    float32 than packing."""

    def __init__(self, net: IFAM):
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images, packed=False if self.net.stage2 is not None else None).logits


@dataclass(frozen=True)
class Measured:
    """Of a set of pictures, against the creature in them."""

    groups: GroupAccuracy
    # of selected patches and creature; of nothing where no patch is selected by the network
    overlap: Overlap
    kept: float  # share of patches that the classifier may read

    def row(self) -> dict[str, float]:
        found = {"average": self.groups.average, "worst": self.groups.worst, "kept": self.kept}
        return found if self.overlap.either == 0 else {**found, "iou": self.overlap.iou}


def balanced(split: str, count: int, *, seed: int, size: int, device: torch.device) -> Scenes:
    """Every creature on every background equally often."""
    latents = critters.draw("balanced", split, count, seed=seed, device=device)
    return drawn(latents, torch.arange(count, device=device), size)


@torch.no_grad()
def measure(net: IFAM, recipe: IfamRecipe, scenes: Scenes) -> Measured:
    """Groups are (creature, background)."""
    right, found, kept = [], Overlap(), 0.0
    for images, part in _slices(scenes, recipe):
        logits, mask = read(net, recipe, images, part)
        right.append(logits.argmax(dim=1) == part.latents.creature)
        kept += mask.float().mean(dim=(1, 2)).sum().item()
        if recipe.reads == "parts":
            pixels = mask.repeat_interleave(recipe.size // mask.shape[1], dim=1).repeat_interleave(
                recipe.size // mask.shape[2], dim=2
            )
            found = found + overlap(pixels, part.masks)
    groups = torch.stack([scenes.latents.creature, scenes.latents.background], dim=1)
    return Measured(group_accuracy(torch.cat(right), groups), found, kept / len(scenes))


def read(net: IFAM, recipe: IfamRecipe, images: Tensor, scenes: Scenes) -> tuple[Tensor, Tensor]:
    """Answers [B, C] of normalised images, and the patches [B, gh, gw] they may come from."""
    if recipe.reads == "parts":
        out = net(images, packed=False if net.stage2 is not None else None)
        return out.logits, out.mask
    mask = scenes.patches(recipe.size // recipe.architecture["patch_size"], covered=recipe.covered)
    mask = mask if recipe.reads == "creature" else torch.ones_like(mask)
    return net.classify(images, mask, packed=False), mask


@torch.no_grad()
def choose(net: IFAM, recipe: IfamRecipe, train: Scenes, val: Scenes) -> dict[str, Any]:
    """The intervention with the best worst-group accuracy on validation pictures: one part left
    out, a quantile, both or neither.

    Thresholds are calibrated on training pictures and stay with the network. All of it in the
    precision in which `measure` applies them.
    """
    calibrate(net, (images for images, _ in _slices(train, recipe)), list(recipe.quantiles))
    tried = try_interventions(net, lambda: _labelled(val, recipe), recipe.quantiles)
    return {**asdict(best_of(tried)), "tried": [asdict(one) for one in tried]}


def measure_changed(
    net: IFAM, recipe: IfamRecipe, scenes: Scenes, chosen: dict[str, Any]
) -> Measured:
    """With the intervention that `choose` found."""
    with intervene(net, drop_parts=chosen["drop"], quantile=chosen["quantile"]):
        return measure(net, recipe, scenes)


def _slices(scenes: Scenes, recipe: IfamRecipe) -> Iterator[tuple[Tensor, Scenes]]:
    for start in range(0, len(scenes), _ROWS):
        part = scenes.take(slice(start, start + _ROWS))
        yield recipe.preprocess.normalise(part.images), part


def _labelled(scenes: Scenes, recipe: IfamRecipe) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for images, part in _slices(scenes, recipe):
        yield (
            images,
            part.latents.creature,
            torch.stack([part.latents.creature, part.latents.background], dim=1),
        )
