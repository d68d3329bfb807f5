"""What a model answers when its pictures are changed: the one question behind every perturbation
metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from seecause.engine.chunks import batched, fit, in_chunks
from seecause.errors import BadOption
from seecause.metrics._pixels import blurred, spread_out, to_grid
from seecause.models.base import ImageModel
from seecause.target import Score, Spec, Target, parse

Fill = float | Literal["mean", "blur"]
Explain = Callable[[Tensor, Spec], Tensor]  # images, target -> maps [B, gh, gw] or [B, H, W]
Attribute = Callable[[ImageModel, Tensor, Spec], Tensor]  # a method that can be given another model


@dataclass(frozen=True, eq=False)
class PictureScorer:
    """A model, its pictures [B, 3, H, W] and the bound target; `plain` [B] float64 is the score of
    the pictures as they are."""

    model: ImageModel
    images: Tensor
    target: Target
    score: Score
    plain: Tensor
    grid: tuple[int, int]
    chunk: int

    @property
    def size(self) -> tuple[int, int]:
        return self.images.shape[-2], self.images.shape[-1]

    def cells(self, maps: Tensor) -> Tensor:
        """Maps as patches [B, gh, gw], float64, on the pictures' device: one for each image, or an
        error."""
        if len(maps) != len(self.images):
            raise BadOption(
                "maps", list(maps.shape), f"one map for each of the {len(self.images)} images"
            )
        return to_grid(maps.to(self.images.device), self.size, self.grid)

    def each(self, variants: int, picture: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Scores [B, variants], float64: `picture(image, variant)` makes a batch [m, 3, H, W] from
        two index vectors [m]."""

        def run_chunk(a: int, b: int) -> Tensor:
            item = torch.arange(a, b, device=self.images.device)  # of B * variants
            image, variant = item // variants, item % variants
            logits = self.model(picture(image, variant))
            return self.target.take(image).score(logits, self.score, sigmoid=self.model.sigmoid)

        scores = torch.cat(
            list(
                in_chunks(
                    run_chunk, len(self.images) * variants, self.chunk, what="changed pictures"
                )
            )
        )
        return scores.double().cpu().view(len(self.images), variants)

    def without(self, gone: Tensor, fill: Fill = 0.0) -> Tensor:
        """Scores [B, M] with the patches `gone` [1|B, M, gh, gw] replaced by `fill`."""
        goal, gone = filled(self.images, fill), gone.to(self.images.device)

        def picture(image: Tensor, variant: Tensor) -> Tensor:
            patches = gone[image if len(gone) > 1 else 0, variant]
            return torch.where(
                spread_out(patches, self.size)[:, None], goal[image], self.images[image]
            )

        return self.each(gone.shape[1], picture)

    def drops(self, gone: Tensor, fill: Fill = 0.0) -> Tensor:
        """How much the score falls, [B, M]."""
        return self.plain[:, None] - self.without(gone, fill)

    def protocol(self, metric: str, **options: Any) -> dict[str, Any]:
        return {
            "metric": metric,
            **options,
            "score": self.score,
            "target": self.target.record(self.model),
        }


def picture_scorer(
    model: ImageModel, images: Tensor, target: Spec = None, *, score: Score = "prob"
) -> PictureScorer:
    """Run the pictures once and bind the target: the predicted class if none is given."""
    images = images.to(model.device, model.dtype)
    grid = model.check(images).grid
    chunk = fit(1 << 30, model.forward_bytes(model.check(images)), images.device)
    logits = batched(model, images, chunk)
    bound = parse(model, target, len(images)).bind(logits)
    plain = bound.score(logits, score, sigmoid=model.sigmoid).double().cpu()
    return PictureScorer(model, images, bound, score, plain, grid, chunk)


def filled(images: Tensor, fill: Fill) -> Tensor:
    """What takes the place of removed pixels, [B, 3, H, W]: a constant in normalised units (0 is
    the mean colour of the model's training data), each picture's own mean colour, or its RISE
    blur."""
    if fill == "blur":
        return blurred(images)
    if fill == "mean":
        return images.mean(dim=(-2, -1), keepdim=True).expand_as(images)
    if not isinstance(fill, int | float):
        raise BadOption("fill", fill, "a number, mean or blur")
    return torch.full_like(images[:1], fill).expand_as(images)


def bound_spec(target: Target, spec: Spec) -> Spec:
    """What a method is told when it explains changed pictures: the class the plain picture was
    given, never a new prediction."""
    return target.classes if spec is None else spec
