"""Train an embedded Critters classifier from its recipe.

    python -m tools.critters critters-vit --out weights

Pictures are drawn fresh on the training device. A picture that lost parts keeps its label: given
what is still visible the label is a fair draw from the classes that remain possible, so the network
learns their odds, in any regime. Writes NAME.safetensors (float16), NAME.json and NAME.log.csv.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from seecause import critters
from seecause.critters.planted import PlantedViT
from seecause.critters.world import CLASSES, REGIMES, VARIANTS, Latents, Regime
from seecause.engine.chunks import machine
from seecause.errors import BadOption
from seecause.files import write_json
from tools.critters import (
    HALF,
    DrawnRecipe,
    RunningMeans,
    TrainingLog,
    adamw,
    descend,
    drop_parts,
    evaluate,
    half,
    move_average,
    pace,
    seeded,
    write_log,
)


def small_vit() -> dict[str, Any]:
    """Arguments of timm's VisionTransformer: 1.2 M parameters, 12 x 12 patches at 96 pixels.

    Four registers give the network a place for what it knows of the whole picture, and three in ten
    patches are left out in training, so that patch tokens keep speaking for their own place.
    """
    return {
        "img_size": 96,
        "patch_size": 8,
        "embed_dim": 128,
        "depth": 6,
        "num_heads": 8,
        "num_classes": len(CLASSES),
        "class_token": True,
        "reg_tokens": 4,
        "patch_drop_rate": 0.3,
        "global_pool": "token",
    }


def planted_vit() -> dict[str, Any]:
    """Arguments of `PlantedViT`: 1.0 M parameters, three local blocks, then two router blocks with
    5 background, 6 object and 5 idle heads."""
    return small_vit() | {
        "depth": 5,
        "reg_tokens": 0,
        "mean": HALF,
        "std": HALF,
        "routers": [
            {"block": 3, "background": [0, 5, 6], "object": [1, 2, 4]},
            {"block": 4, "background": [2, 7], "object": [0, 3, 5]},
        ],
    }


@dataclass(frozen=True)
class Recipe(DrawnRecipe):
    """Fresh pictures all the way. The first share is `clean` with a head for each part, so the
    network learns to see before it learns to guess."""

    name: str
    regime: str
    architecture: dict[str, Any] = field(default_factory=small_vit)
    network: Literal["VisionTransformer", "PlantedViT"] = "VisionTransformer"
    samples: int = 1_600_000
    batch: int = 1024
    learning_rate: float = 1e-3
    warm_up: float = 0.05  # share of the steps
    weight_decay: float = 0.05
    clip: float = 1.0
    average: float = 0.999  # decay of the weight average that is shipped
    seeing: float = 1 / 3  # share of the steps spent on `clean` with part heads
    part_drop: float = 0.5  # share of the pictures that lose some parts
    seed: int = 0
    background_reliability: float | None = None  # r_s; None: the regime's own

    def __post_init__(self) -> None:
        if self.background_reliability is not None and not 0 <= self.background_reliability <= 1:
            raise BadOption(
                "background_reliability",
                self.background_reliability,
                "a probability between 0 and 1, or None for the regime's own",
            )

    @property
    def size(self) -> int:
        return self.architecture["img_size"]

    @property
    def stem(self) -> str:
        """What its files are called; a reliability of its own is part of the name, before the seed:
        critters-biased-rs0.5-1."""
        own = self.background_reliability
        if own is None:
            return super().stem
        return f"{self.name}-rs{own:g}" + (f"-{self.seed}" if self.seed else "")

    @property
    def law(self) -> Regime:
        """How labels, creatures and backgrounds go together in its pictures."""
        regime, own = REGIMES[self.regime], self.background_reliability
        if own is None:
            return regime
        return replace(regime, name=f"{regime.name}, r_s {own:g}", background_reliability=own)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("critters-vit", regime="clean"),
        Recipe("critters-biased", regime="certified"),
        Recipe(
            "critters-planted", regime="matted", architecture=planted_vit(), network="PlantedViT"
        ),
    )
}


def build(
    architecture: dict[str, Any], *, network: str = "VisionTransformer", seed: int = 0
) -> VisionTransformer:
    """The untrained network, on the CPU; the global random state is left as it was."""
    kind = PlantedViT if network == "PlantedViT" else VisionTransformer
    with seeded(seed):
        return kind(**architecture)


_PART_CHOICES = 1 + max(len(names) for names in VARIANTS.values())  # every variant, or absent


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
    write_json(out / f"{recipe.stem}.json", card)
    return evaluation


def fit(
    recipe: Recipe, *, device: torch.device | str = "cpu"
) -> tuple[VisionTransformer, list[dict[str, Any]]]:
    """The averaged network after the last step, and one log row for every hundredth of the run. The
    global random state is left as it was."""
    model = build(recipe.architecture, network=recipe.network, seed=recipe.seed).to(device).train()
    part_heads = _part_heads(model.embed_dim, seed=recipe.seed).to(device)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = adamw(
        model, part_heads, learning_rate=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: pace(step, recipe.steps, recipe.warm_up)
    )
    seeing_steps = int(recipe.seeing * recipe.steps)
    # the seed decides which patches are left out
    with seeded(recipe.seed, device), TrainingLog(recipe.name, recipe.steps) as log:
        means = RunningMeans(log.write_row, max(1, recipe.steps // 100))
        for step in range(recipe.steps):
            seeing = step < seeing_steps
            law = REGIMES["clean"] if seeing else recipe.law
            latents = _fresh(recipe, law, step, device)
            image = recipe.preprocess.normalise(critters.render(latents, size=recipe.size).image)
            with half(image.device):
                loss, logits = _losses(model, image, latents, part_heads if seeing else None)
            descend(optimizer, loss, model.parameters(), recipe.clip)
            schedule.step()
            move_average(average, model, step, recipe.average)
            right = (logits.argmax(dim=1) == latents.label).float().mean()
            regime, rate = "clean + parts" if seeing else law.name, float(schedule.get_last_lr()[0])
            means.add(step, {"loss": loss, "accuracy": right}, rate=rate, regime=regime)
    return average, log.rows


def _fresh(recipe: Recipe, law: Regime, step: int, device: torch.device | str) -> Latents:
    """The latents of one step, some parts left out."""
    start = step * recipe.batch
    latents = critters.draw(
        law, "train", recipe.batch, seed=recipe.seed, start=start, device=device
    )
    latents = latents.replace(mat=torch.full_like(latents.mat, recipe.law.mat))
    return drop_parts(latents, share=recipe.part_drop)


def _losses(
    model: VisionTransformer, image: Tensor, latents: Latents, part_heads: nn.Module | None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the label, plus that of each part's variant while there are part heads; and
    the class logits [B, C]."""
    pooled = model.forward_head(model.forward_features(image), pre_logits=True)  # [B, D]
    logits = model.head(pooled)
    loss = F.cross_entropy(logits.float(), latents.label)
    if part_heads is not None:
        # [B, P, choices]
        guess = part_heads(pooled).float().unflatten(1, (len(VARIANTS), _PART_CHOICES))
        truth = torch.where(latents.present[:, 1:], latents.variants, _PART_CHOICES - 1)  # [B, P]
        loss = loss + F.cross_entropy(guess.flatten(0, 1), truth.flatten())
    return loss, logits


def _part_heads(width: int, *, seed: int) -> nn.Linear:
    """One linear guess of the variant for each part; dropped after the first phase."""
    with seeded(seed):
        return nn.Linear(width, len(VARIANTS) * _PART_CHOICES)
