"""Train critters-ifam from its recipe: a backbone that learns to see, then parts, mask and
classifier together.

    seecause zoo train critters-ifam --out weights --device cuda

Writes NAME.safetensors (float16), NAME.json and NAME.log.csv. The log grows while it trains, and
weights are written before they are evaluated.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import timm
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F

from seecause import critters
from seecause.critters import CLASSES
from seecause.critters.train.evaluate import evaluate
from seecause.critters.train.ifam_backbone import pretrain
from seecause.critters.train.ifam_evaluate import (
    Answering,
    balanced,
    choose,
    measure,
    measure_changed,
    read,
)
from seecause.critters.train.ifam_pictures import Scenes, batches, drawn
from seecause.critters.train.ifam_recipe import IfamRecipe
from seecause.critters.train.steps import half, move_average, seeded
from seecause.engine.machine import machine
from seecause.faithful import IFAM, parameter_groups
from seecause.faithful.lesson import Lesson
from seecause.faithful.rates import cosine, set_pace
from seecause.faithful.save import load

Heard = Callable[[dict[str, Any]], None]
LOSSES = (
    "class1",
    "class2",
    "presence",
    "background",
    "total_variation",
    "entropy",
    "equivariance",
    "orthogonality",
)
COLUMNS = (
    "phase",
    "step",
    "seconds",
    "learning_rate",
    "loss",
    "accuracy",
    "patch_accuracy",
    "kept",
    *LOSSES,
)
_LOG_LINES = 60
_CALIBRATION, _VALIDATION = 2048, 4096  # pictures, at most


def train(
    recipe: IfamRecipe, *, out: Path, device: torch.device | str = "cpu", test_samples: int = 8192
) -> dict[str, Any]:
    """Run the recipe and write its three files into `out`; returns the evaluation of what was
    written."""
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device(device)
    with Log(out / f"{recipe.stem}.log.csv", recipe) as log:
        backbone = pretrain(
            recipe,
            device=device,
            hear=log.hear,
            every=max(1, recipe.pretraining_steps // _LOG_LINES),
        )
        net = fit(recipe, backbone, device=device, hear=log.hear)
    told = {
        "recipe": dataclasses.asdict(recipe),
        "storage": "float16",
        "versions": {"torch": torch.__version__, "timm": timm.__version__},
    }
    told["device"] = machine(device)
    _save(net, out, recipe, told)

    shipped = load(out, recipe.stem).to(device)
    evaluation, shipped_thresholds = evaluated(shipped, recipe, device=device, samples=test_samples)
    net.thresholds = shipped_thresholds
    _save(net, out, recipe, {**told, "evaluation": evaluation})
    return evaluation


def fit(
    recipe: IfamRecipe, backbone: nn.Module, *, device: torch.device, hear: Heard = lambda row: None
) -> IFAM:
    """The averaged network after the last step, in eval mode. The global random state is left as it
    was."""
    with seeded(recipe.seed, device):
        return _fit(recipe, backbone, device, hear)


def evaluated(
    net: IFAM, recipe: IfamRecipe, *, device: torch.device, samples: int
) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Every number of the card, and the thresholds that were calibrated on the way."""
    found = evaluate(
        Answering(net), recipe.regime, preprocess=recipe.preprocess, samples=samples, device=device
    )
    val = balanced(
        "val", min(samples, _VALIDATION), seed=recipe.seed, size=recipe.size, device=device
    )
    chosen = choose(net, recipe, seen_in_training(recipe, min(samples, _CALIBRATION), device), val)
    test = balanced("test", samples, seed=recipe.seed, size=recipe.size, device=device)
    masks = measure(net, recipe, test)
    changed = measure_changed(net, recipe, test, chosen)
    found |= {
        "mask": masks.row(),
        "intervention": {key: chosen[key] for key in ("drop", "quantile")},
        "after_intervention": changed.row(),
    }
    return {**found, "validation": chosen["tried"]}, net.thresholds


def seen_in_training(recipe: IfamRecipe, count: int, device: torch.device) -> Scenes:
    """Training pictures, for calibration."""
    return drawn(
        critters.draw(recipe.regime, "train", count, seed=recipe.seed, device=device),
        torch.arange(count, device=device),
        recipe.size,
    )


def _fit(recipe: IfamRecipe, backbone: nn.Module, device: torch.device, hear: Heard) -> IFAM:
    net = new_net(recipe, backbone).to(device).train()
    lesson = Lesson(net, recipe.weights)
    average = copy.deepcopy(net).eval().requires_grad_(False)
    factor = recipe.head_factor
    groups = parameter_groups(
        net, recipe.learning_rate, recipe.weight_decay, prototype_factor=factor, head_factor=factor
    )
    optimizer = torch.optim.AdamW(groups, fused=device.type == "cuda")
    every, round_steps = max(1, recipe.steps // _LOG_LINES), max(1, recipe.steps // recipe.epochs)
    running: Tensor | None = None
    for step, scenes in enumerate(
        batches(
            recipe.regime,
            recipe.batch,
            recipe.steps,
            seed=recipe.seed,
            size=recipe.size,
            device=device,
        )
    ):
        set_pace(
            optimizer.param_groups,
            cosine(min(step // round_steps, recipe.epochs - 1), recipe.epochs),
        )
        scenes = scenes.mirrored()
        with half(device):
            total, said = _losses(lesson, recipe, scenes, step)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
        optimizer.step()
        move_average(average, net, step, recipe.average)
        latest = torch.stack(list(said.values()))
        running = latest if running is None else running + latest
        if (step + 1) % every == 0:
            means = dict(
                zip(said, (running / every).tolist(), strict=True)
            )  # read rarely, so the device is not kept waiting
            running = None
            hear(
                {
                    "phase": recipe.reads,
                    "step": step + 1,
                    "learning_rate": optimizer.param_groups[0]["lr"],
                    **means,
                }
            )
    return average


def _losses(
    lesson: Lesson, recipe: IfamRecipe, scenes: Scenes, step: int
) -> tuple[Tensor, dict[str, Tensor]]:
    images, labels = recipe.preprocess.normalise(scenes.images), scenes.latents.label
    if recipe.reads == "parts":
        total, found, logits = lesson(images, labels, scenes.ids, recipe.seed, step)
        found = {**found, "loss": found["total"]}
        del found["total"]
    else:
        logits, _ = read(lesson.net, recipe, images, scenes)
        total = F.cross_entropy(logits.float(), labels)
        found = {"class2": total.detach(), "loss": total.detach()}
    return total, {**found, "accuracy": (logits.argmax(dim=1) == labels).float().mean()}


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


def _save(net: IFAM, out: Path, recipe: IfamRecipe, told: dict[str, Any]) -> None:
    copy.deepcopy(net).half().save(out, recipe.stem, **told)


class Log:
    """A CSV file that grows a row at a time, and a bar on terminals."""

    def __init__(self, path: Path, recipe: IfamRecipe):
        self.path, self.recipe = path, recipe
        self.began = time.perf_counter()

    def __enter__(self) -> Log:
        self.file = self.path.open("w", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, COLUMNS, restval="", extrasaction="ignore")
        self.writer.writeheader()
        self.bar = Progress(
            TextColumn(self.recipe.name),
            BarColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        self.bar.start()
        self.task = self.bar.add_task(
            "training", total=self.recipe.steps + self.recipe.pretraining_steps, said=""
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()
        self.file.close()

    def hear(self, row: dict[str, Any]) -> None:
        row = {**row, "seconds": time.perf_counter() - self.began}
        self.writer.writerow(
            {
                key: round(value, 6) if isinstance(value, float) else value
                for key, value in row.items()
            }
        )
        self.file.flush()
        done = row["step"] + (0 if row["phase"] == "seeing" else self.recipe.pretraining_steps)
        self.bar.update(
            self.task,
            completed=done,
            said=f"{row['phase']}: loss {row['loss']:.3f}  accuracy {row.get('accuracy', 0.0):.3f}",
        )
