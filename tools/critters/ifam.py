"""Train critters-ifam from its recipe: a backbone that learns to see, then parts, mask and
classifier together; and how well it answers and selects.

    python -m tools.critters critters-ifam --out weights --device cuda

Writes NAME.safetensors (float16), NAME.json and NAME.log.csv. The log grows while it trains, and
weights are written before they are evaluated. Measured are accuracy by group, the mask against the
creature, and interventions chosen on validation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seecause import critters
from seecause.critters.world import CLASSES, find_regime
from seecause.engine.chunks import machine
from seecause.faithful import IFAM, calibrate, intervene, load
from seecause.faithful.evaluation import mask_pixels
from seecause.faithful.interventions import best_of, try_interventions
from seecause.faithful.losses import LossWeights, TrainingLosses, parameter_groups
from seecause.faithful.net import Intervention
from seecause.faithful.parts import IFAMOutput
from seecause.faithful.training import cosine, set_pace
from seecause.metrics.annotations import Overlap, overlap
from seecause.metrics.statistics import GroupAccuracy, group_accuracy
from tools.critters import (
    LogRow,
    RunningMeans,
    TrainingLog,
    descend,
    evaluate,
    half,
    move_average,
    seeded,
)
from tools.critters.ifam_backbone import (
    RECIPES as RECIPES,
    IfamRecipe,
    Scenes,
    batches,
    draw_scenes,
    pretrain,
)

_NUMBERS = ("loss", "accuracy", "patch_accuracy", "kept")
_LOSSES = tuple(loss.name for loss in fields(LossWeights))
COLUMNS = ("phase", "step", "seconds", "learning_rate", *_NUMBERS, *_LOSSES)
_LOG_LINES = 60
_CALIBRATION, _VALIDATION = 2048, 4096  # pictures, at most


def train(
    recipe: IfamRecipe, *, out: Path, device: torch.device | str = "cpu", test_samples: int = 8192
) -> dict[str, Any]:
    """Run the recipe and write its three files into `out`; returns the evaluation of what was
    written."""
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device(device)
    steps, path = recipe.pretraining_steps + recipe.steps, out / f"{recipe.stem}.log.csv"
    with TrainingLog(recipe.name, steps, path, COLUMNS) as log:
        every = max(1, recipe.pretraining_steps // _LOG_LINES)
        backbone = pretrain(recipe, device=device, write_row=log.write_row, every=every)
        net = fit(recipe, backbone, device=device, write_row=log.write_row)
    card = {
        "data": f"critters:{find_regime(recipe.regime).name}",
        "val": "critters:balanced:val",
        "test": "critters:balanced:test",
        "recipe": asdict(recipe),
        "storage": "float16",
        "versions": {"torch": torch.__version__, "timm": timm.__version__},
        "device": machine(device),
    }
    _save(net, out, recipe, card)

    shipped = load(out, recipe.stem).to(device)
    evaluation = evaluated(shipped, recipe, device=device, samples=test_samples)
    net.thresholds = shipped.thresholds
    _save(net, out, recipe, {**card, "evaluation": evaluation})
    return evaluation


def _save(net: IFAM, out: Path, recipe: IfamRecipe, card: dict[str, Any]) -> None:
    copy.deepcopy(net).half().save(out, recipe.stem, **card)


def evaluated(
    net: IFAM, recipe: IfamRecipe, *, device: torch.device, samples: int
) -> dict[str, Any]:
    """Every number of the card; thresholds that are calibrated on the way stay in the network."""
    numbers = evaluate(
        lambda images: _all_tokens(net, images).logits,
        recipe.regime,
        preprocess=recipe.preprocess,
        samples=samples,
        device=device,
    )
    options: dict[str, Any] = {"seed": recipe.seed, "size": recipe.size, "device": device}
    val = balanced("val", min(samples, _VALIDATION), **options)
    chosen, tried = choose(
        net, recipe, seen_in_training(recipe, min(samples, _CALIBRATION), device), val
    )
    test = balanced("test", samples, **options)
    return numbers | {
        "mask": measure(net, recipe, test).row(),
        "intervention": asdict(chosen),
        "after_intervention": measure_changed(net, recipe, test, chosen).row(),
        "validation": tried,
    }


def seen_in_training(recipe: IfamRecipe, count: int, device: torch.device) -> Scenes:
    """Training pictures, for calibration."""
    return draw_scenes(
        critters.draw(recipe.regime, "train", count, seed=recipe.seed, device=device),
        torch.arange(count, device=device),
        recipe.size,
    )


def fit(
    recipe: IfamRecipe,
    backbone: nn.Module,
    *,
    device: torch.device,
    write_row: LogRow = lambda row: None,
) -> IFAM:
    """The averaged network after the last step, in eval mode. The global random state is left as it
    was."""
    with seeded(recipe.seed, device):
        net = new_net(recipe, backbone).to(device).train()
        objective = TrainingLosses(net, recipe.weights)
        average = copy.deepcopy(net).eval().requires_grad_(False)
        rate, decay, factor = recipe.learning_rate, recipe.weight_decay, recipe.head_factor
        groups = parameter_groups(net, rate, decay, prototype_factor=factor, head_factor=factor)
        optimizer = torch.optim.AdamW(groups, fused=device.type == "cuda")
        means = RunningMeans(write_row, max(1, recipe.steps // _LOG_LINES))
        round_steps = max(1, recipe.steps // recipe.epochs)
        options: dict[str, Any] = {"seed": recipe.seed, "size": recipe.size, "device": device}
        drawn = batches(recipe.regime, recipe.batch, recipe.steps, **options)
        for step, scenes in enumerate(drawn):
            epoch = min(step // round_steps, recipe.epochs - 1)
            set_pace(optimizer.param_groups, cosine(epoch, recipe.epochs))
            with half(device):
                total, losses = _losses(objective, recipe, scenes.mirrored(), step)
            descend(optimizer, total, net.parameters(), recipe.clip)
            move_average(average, net, step, recipe.average)
            means.add(step, losses, rate=optimizer.param_groups[0]["lr"], phase=recipe.reads)
    return average


def _losses(
    objective: TrainingLosses, recipe: IfamRecipe, scenes: Scenes, step: int
) -> tuple[Tensor, dict[str, Tensor]]:
    images, labels = recipe.preprocess.normalise(scenes.images), scenes.latents.label
    if recipe.reads == "parts":
        total, losses, logits = objective(images, labels, scenes.ids, recipe.seed, step)
        losses["loss"] = losses.pop("total")
    else:
        logits, _ = read(objective.net, recipe, images, scenes)
        total = F.cross_entropy(logits.float(), labels)
        losses = {"class2": total.detach(), "loss": total.detach()}
    return total, {**losses, "accuracy": (logits.argmax(dim=1) == labels).float().mean()}


def new_net(recipe: IfamRecipe, backbone: nn.Module) -> IFAM:
    """The untrained network on a trained backbone."""
    architecture = {
        "library": "timm",
        "class": "VisionTransformer",
        "arguments": recipe.architecture,
    }
    return IFAM(
        backbone,
        recipe.parts,
        CLASSES,
        preprocess=recipe.preprocess,
        architecture=architecture,
        **recipe.options,
    )


_ROWS = 512


def _all_tokens(net: IFAM, images: Tensor) -> IFAMOutput:
    """A GPU runs all of them faster in float32 than it packs the selected ones."""
    return net(images, packed=False if net.stage2 is not None else None)


@dataclass(frozen=True)
class SceneScores:
    """Of a set of pictures, against the creature in them."""

    groups: GroupAccuracy
    # of selected patches and creature; of nothing where no patch is selected by the network
    overlap: Overlap
    kept: float  # share of patches that the classifier may read

    def row(self) -> dict[str, float]:
        row = {"average": self.groups.average, "worst": self.groups.worst, "kept": self.kept}
        return row if self.overlap.either == 0 else {**row, "iou": self.overlap.iou}


def balanced(split: str, count: int, *, seed: int, size: int, device: torch.device) -> Scenes:
    """Every creature on every background equally often."""
    latents = critters.draw("balanced", split, count, seed=seed, device=device)
    return draw_scenes(latents, torch.arange(count, device=device), size)


@torch.no_grad()
def measure(net: IFAM, recipe: IfamRecipe, scenes: Scenes) -> SceneScores:
    """Groups are (creature, background)."""
    right, shared, kept = [], Overlap(), 0.0
    for images, part in _slices(scenes, recipe):
        logits, mask = read(net, recipe, images, part)
        right.append(logits.argmax(dim=1) == part.latents.creature)
        kept += mask.float().mean(dim=(1, 2)).sum().item()
        if recipe.reads == "parts":
            pixels = mask_pixels(mask, (recipe.size, recipe.size))
            shared = shared + overlap(pixels, part.masks)
    groups = torch.stack([scenes.latents.creature, scenes.latents.background], dim=1)
    return SceneScores(group_accuracy(torch.cat(right), groups), shared, kept / len(scenes))


def read(net: IFAM, recipe: IfamRecipe, images: Tensor, scenes: Scenes) -> tuple[Tensor, Tensor]:
    """Answers [B, C] of normalised images, and the patches [B, gh, gw] they may come from."""
    if recipe.reads == "parts":
        out = _all_tokens(net, images)
        return out.logits, out.mask
    mask = scenes.patches(recipe.size // recipe.architecture["patch_size"], covered=recipe.covered)
    mask = mask if recipe.reads == "creature" else torch.ones_like(mask)
    return net(images, mask=mask, packed=False).logits, mask


@torch.no_grad()
def choose(
    net: IFAM, recipe: IfamRecipe, train: Scenes, val: Scenes
) -> tuple[Intervention, list[dict[str, Any]]]:
    """The intervention with the best worst-group accuracy on validation pictures: one part left
    out, a quantile, both or neither.

    Thresholds are calibrated on training pictures and stay with the network. All of it in the
    precision in which `measure` applies them.
    """
    calibrate(net, (images for images, _ in _slices(train, recipe)), list(recipe.quantiles))
    tried = try_interventions(net, lambda: _labelled(val, recipe), recipe.quantiles, by="distance")
    return best_of(tried).intervention, [asdict(trial) for trial in tried]


def measure_changed(
    net: IFAM, recipe: IfamRecipe, scenes: Scenes, chosen: Intervention
) -> SceneScores:
    """With the intervention that `choose` found."""
    with intervene(net, **asdict(chosen)):
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
