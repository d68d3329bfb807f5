"""How the embedded Critters classifiers are made: one recipe each, as data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from timm.models import VisionTransformer

from seecause.critters import CLASSES, REGIMES, Regime
from seecause.critters.planted import PlantedViT
from seecause.critters.train.drawn import Drawn
from seecause.critters.train.steps import seeded
from seecause.errors import BadOption

_HALF = (0.5, 0.5, 0.5)  # as mean and deviation: pixels in [0, 1] become [-1, 1]


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
        "mean": _HALF,
        "std": _HALF,
        "routers": [
            {"block": 3, "background": [0, 5, 6], "object": [1, 2, 4]},
            {"block": 4, "background": [2, 7], "object": [0, 3, 5]},
        ],
    }


@dataclass(frozen=True)
class Recipe(Drawn):
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
        return (
            super().stem
            if own is None
            else f"{self.name}-rs{own:g}" + (f"-{self.seed}" if self.seed else "")
        )

    @property
    def law(self) -> Regime:
        """How labels, creatures and backgrounds go together in its pictures."""
        regime, own = REGIMES[self.regime], self.background_reliability
        return (
            regime
            if own is None
            else replace(regime, name=f"{regime.name}, r_s {own:g}", background_reliability=own)
        )


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
