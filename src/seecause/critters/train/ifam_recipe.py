"""How critters-ifam is made: its recipe as data, and the untrained backbone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from timm.models import VisionTransformer

from seecause.critters import Regime
from seecause.critters.train.drawn import Drawn
from seecause.critters.train.steps import seeded
from seecause.faithful.objective import LossWeights

_WEIGHTS = LossWeights(
    background=5.0
    # the paper's 2 let a part settle on a texture in small runs; the study finds 2 no worse:
    # docs/decisions.md
)

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
class IfamRecipe(Drawn):
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
    covered: float = (
        0.5  # share of a patch that the creature must cover to be read by its true mask
    )
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


def build(recipe: IfamRecipe) -> VisionTransformer:
    """The untrained backbone, on the CPU; the global random state is left as it was."""
    with seeded(recipe.seed):
        return VisionTransformer(**recipe.architecture)
