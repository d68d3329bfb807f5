"""A model whose answers are a known sum over pixels, so that the truth about every patch is known
too."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from seecause.models.base import ImageModel
from seecause.models.block import TokenLayout
from seecause.models.preprocess import Preprocess
from tests.helpers import noise

PATCH, GRID = 4, (3, 5)
SIZE = (PATCH * GRID[0], PATCH * GRID[1])


@dataclass(eq=False, kw_only=True)
class LinearModel(ImageModel):
    """logits = W x + b."""

    architecture: ClassVar = "transformer"

    def __call__(self, images: Tensor) -> Tensor:
        return self.module(images.flatten(1))

    def forward_bytes(self, layout: TokenLayout) -> int:
        return layout.n_patches * PATCH * PATCH * 3 * 8


def linear_view(module: nn.Module) -> LinearModel:
    return LinearModel(
        module=module,
        name="linear",
        family="tests",
        preprocess=Preprocess(size=SIZE, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
        layout_at=lambda height, width: TokenLayout(
            grid=(height // PATCH, width // PATCH), prefix=0
        ),
        patch=(PATCH, PATCH),
        native=module,
    )


def linear_model(classes: int = 4, seed: int = 0) -> LinearModel:
    layer = nn.Linear(3 * SIZE[0] * SIZE[1], classes, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(noise(*layer.weight.shape, seed=seed) / layer.weight.shape[1] ** 0.5)
        layer.bias.copy_(noise(classes, seed=seed + 1))
    return linear_view(layer.requires_grad_(False))


def contributions(model: LinearModel, images: Tensor, classes: Tensor | list[int]) -> Tensor:
    """[B, H, W]: what each pixel adds to the logit of its class, measured from a picture of
    zeros."""
    weight = model.module.weight[torch.as_tensor(classes)].view(-1, 3, *SIZE)
    return (weight * images).sum(dim=1)


def patch_sums(pixels: Tensor) -> Tensor:
    """[B, H, W] -> [B, gh, gw]."""
    return pixels.unflatten(1, (GRID[0], PATCH)).unflatten(3, (GRID[1], PATCH)).sum(dim=(2, 4))
