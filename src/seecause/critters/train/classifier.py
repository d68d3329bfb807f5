"""Train an embedded Critters classifier from its recipe.

    seecause zoo train critters-vit --out weights

Pictures are drawn fresh on the training device. A picture that lost parts keeps its label: given
what is still visible the label is a fair draw from the classes that remain possible, so the network
learns their odds, in any regime. Writes NAME.safetensors (float16), NAME.json and NAME.log.csv.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import timm
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from seecause import critters
from seecause.critters import CLASSES, REGIMES, VARIANTS, Latents
from seecause.critters.train.evaluate import evaluate
from seecause.critters.train.recipes import Recipe, build
from seecause.critters.train.steps import adamw, half, move_average, pace, seeded, write_log
from seecause.engine.machine import machine

_PART_CHOICES = 1 + max(len(names) for names in VARIANTS.values())  # every variant, or absent
_LOG_LINES = 100


def train(
    recipe: Recipe, *, out: Path, device: torch.device | str = "cpu", test_samples: int = 8192
) -> dict[str, Any]:
    """Run the recipe and write its three files into `out`; returns the evaluation of what was
    written."""
    out.mkdir(parents=True, exist_ok=True)
    model, log = fit(recipe, device=device)
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(
        weights,
        out / f"{recipe.stem}.safetensors",
        metadata={"storage": "float16", "compute": "float32"},
    )
    write_log(log, out / f"{recipe.stem}.log.csv")

    shipped = build(recipe.architecture, network=recipe.network)
    shipped.load_state_dict(
        {
            name: value.float()
            for name, value in load_file(out / f"{recipe.stem}.safetensors").items()
        }
    )
    evaluation = evaluate(
        shipped.to(device).eval(),
        recipe.law,
        preprocess=recipe.preprocess,
        samples=test_samples,
        device=device,
    )
    card = {
        "name": recipe.stem,
        "architecture": {
            "library": "timm",
            "class": recipe.network,
            "arguments": recipe.architecture,
        },
        "classes": CLASSES,
        "mean": recipe.preprocess.mean,
        "std": recipe.preprocess.std,
        "size": recipe.size,
        "storage": "float16",
        "recipe": dataclasses.asdict(recipe),
        "versions": {"torch": torch.__version__, "timm": timm.__version__},
        "device": machine(device),
        "evaluation": evaluation,
    }
    (out / f"{recipe.stem}.json").write_text(json.dumps(card, indent=2) + "\n")
    return evaluation


def fit(
    recipe: Recipe, *, device: torch.device | str = "cpu"
) -> tuple[VisionTransformer, list[dict[str, Any]]]:
    """The averaged network after the last step, and one log row for every hundredth of the run. The
    global random state is left as it was."""
    with seeded(recipe.seed, device):  # which patches are left out
        return _fit(recipe, device)


def _fit(
    recipe: Recipe, device: torch.device | str
) -> tuple[VisionTransformer, list[dict[str, Any]]]:
    model = build(recipe.architecture, network=recipe.network, seed=recipe.seed).to(device).train()
    part_heads = _part_heads(model.embed_dim, seed=recipe.seed).to(device)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = adamw(
        model, part_heads, learning_rate=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: pace(step, recipe.steps, recipe.warm_up)
    )
    every = max(1, recipe.steps // _LOG_LINES)
    seeing_steps, matted = int(recipe.seeing * recipe.steps), recipe.law.mat
    running = torch.zeros(
        2, device=device
    )  # loss and accuracy since the last log row: read rarely, so the device is not kept waiting
    log: list[dict[str, Any]] = []
    began = time.perf_counter()

    with Progress(
        TextColumn(recipe.name),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
    ) as progress:
        bar = progress.add_task("training", total=recipe.steps, said="")
        for step in range(recipe.steps):
            seeing = step < seeing_steps
            law = REGIMES["clean"] if seeing else recipe.law
            latents = critters.draw(
                law,
                "train",
                recipe.batch,
                seed=recipe.seed,
                start=step * recipe.batch,
                device=device,
            ).on_mat(matted)
            latents = critters.drop_parts(latents, share=recipe.part_drop)
            image = recipe.preprocess.normalise(critters.render(latents, size=recipe.size).image)
            with half(image.device):
                loss, logits = _losses(model, image, latents, part_heads if seeing else None)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            schedule.step()
            move_average(average, model, step, recipe.average)

            running += torch.stack(
                [loss.detach(), (logits.argmax(dim=1) == latents.label).float().mean()]
            )
            progress.advance(bar)
            if (step + 1) % every == 0:
                mean_loss, accuracy = (running / every).tolist()
                running.zero_()
                row = {
                    "step": step + 1,
                    "regime": "clean + parts" if seeing else law.name,
                    "loss": mean_loss,
                    "accuracy": accuracy,
                }
                log.append(
                    row
                    | {
                        "learning_rate": schedule.get_last_lr()[0],
                        "seconds": time.perf_counter() - began,
                    }
                )
                progress.update(bar, said=f"loss {mean_loss:.3f}  accuracy {accuracy:.3f}")
    return average, log


def _losses(
    model: VisionTransformer, image: Tensor, latents: Latents, part_heads: nn.Module | None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the label, plus that of each part's variant while there are part heads; and
    the class logits [B, C]."""
    pooled = model.forward_head(model.forward_features(image), pre_logits=True)  # [B, D]
    logits = model.head(pooled)
    loss = F.cross_entropy(logits.float(), latents.label)
    if part_heads is not None:
        guess = (
            part_heads(pooled).float().unflatten(1, (len(VARIANTS), _PART_CHOICES))
        )  # [B, P, choices]
        truth = torch.where(latents.present[:, 1:], latents.variants, _PART_CHOICES - 1)  # [B, P]
        loss = loss + F.cross_entropy(guess.flatten(0, 1), truth.flatten())
    return loss, logits


def _part_heads(width: int, *, seed: int) -> nn.Linear:
    """One linear guess of the variant for each part; dropped after the first phase."""
    with seeded(seed):
        return nn.Linear(width, len(VARIANTS) * _PART_CHOICES)
