"""Do small changes of the picture change the map? Max- and average-sensitivity (Yeh et al. 2019,
Bhatt et al. 2020).

    sensitivity(x, e) = |A(x + e) - A(x)| / |A(x)|,      e uniform in [-radius, radius] for each
    pixel, in normalised units
Norms are Euclidean over the map; the maximum and the mean are over the draws of e; lower is better.
Defaults are captum's: radius 0.02, 10 draws. The class explained stays the one of the plain
picture. Draws come from the seed alone, the same for every image. An empty map has no sensitivity:
NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics._pixels import checked
from seecause.metrics._scorer import Explain, bound_spec, picture_scorer
from seecause.metrics.registry import lower, metric
from seecause.models.base import ImageModel
from seecause.target import Spec


@dataclass(frozen=True, eq=False)
class Stability:
    """Relative change of the map for each draw, float64 [B, draws]."""

    changes: Tensor
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def max_sensitivity(self) -> Tensor:
        return self.changes.amax(dim=1)

    @property
    def avg_sensitivity(self) -> Tensor:
        return self.changes.mean(dim=1)


@metric(
    "stability",
    family="the map itself",
    columns={
        "max-sensitivity": lower(
            "largest relative change of the map under small noise in the picture",
            field="max_sensitivity",
        ),
        "avg-sensitivity": lower(
            "mean relative change of the map under small noise in the picture",
            field="avg_sensitivity",
        ),
    },
)
def stability(
    model: ImageModel,
    images: Tensor,
    explain: Explain,
    target: Spec = None,
    *,
    radius: float = 0.02,
    draws: int = 10,
    seed: int = 0,
) -> Stability:
    """`explain` runs once on the images and once for each draw, on the whole batch."""
    if radius <= 0 or draws < 1:
        raise BadOption("radius, draws", (radius, draws), "a positive radius and at least one draw")
    with torch.no_grad():
        scorer = picture_scorer(model, images, target)
    spec, generator = bound_spec(scorer.target, target), torch.Generator().manual_seed(seed)
    plain = _flat(explain(scorer.images, spec))
    changes = []
    for _ in range(draws):
        shift = radius * (
            2 * torch.rand(scorer.images.shape[1:], generator=generator, dtype=torch.float64) - 1
        )
        moved = _flat(explain(scorer.images + shift.to(scorer.images), spec))
        changes.append((moved - plain).norm(dim=1) / plain.norm(dim=1))
    return Stability(
        torch.stack(changes, dim=1),
        scorer.protocol("stability", radius=radius, draws=draws, seed=seed),
    )


def _flat(maps: Tensor) -> Tensor:
    return checked(maps).flatten(1).cpu()
