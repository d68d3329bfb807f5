"""ROAD, remove and debias (Rong et al. 2022): patches are removed by interpolating them from what
is left, so that the hole itself says little.

Each missing pixel is the weighted mean of its eight neighbours, 1/6 for those beside it and 1/12
for those across a corner (those beyond the edge of the picture are left out). That is one sparse
linear system for each picture, with i missing and j its neighbours,

    sum_j w_ij x_i - sum_{j missing} w_ij x_j = sum_{j known} w_ij x_j

solved for all channels, then Gaussian noise of deviation 0.01 is added to what was filled in. Of f
after removing a share of the patches, most important first (MoRF, lower is better) or least
important first (LeRF, higher is better), the mean over shares of 10 to 90 % is taken, and

    combined = (LeRF - MoRF) / 2     (higher is better; pytorch-grad-cam)

Noise is drawn from the seed alone, the same for every picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics._pixels import Ties, picture_scorer
from seecause.metrics.curves import TENTHS, patch_counts
from seecause.metrics.registry import higher, lower, metric
from seecause.models.base import ImageModel
from seecause.target import Score, Spec

if TYPE_CHECKING:
    from scipy.sparse import csc_matrix

LEAVE = "shares that leave at least one patch to interpolate from"
_SIDES, _CORNERS = ((-1, 0), (0, -1), (0, 1), (1, 0)), ((-1, -1), (-1, 1), (1, -1), (1, 1))
_NEIGHBOURS = sorted(  # in raster order, each with its weight
    [(*side, 1 / 6) for side in _SIDES] + [(*corner, 1 / 12) for corner in _CORNERS]
)


@dataclass(frozen=True, eq=False)
class Road:
    """Scores [B, K], float64, after the removal of each share."""

    morf: Tensor
    lerf: Tensor
    shares: tuple[float, ...]
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def morf_mean(self) -> Tensor:
        return self.morf.mean(dim=1)

    @property
    def lerf_mean(self) -> Tensor:
        return self.lerf.mean(dim=1)

    @property
    def combined(self) -> Tensor:
        return (self.lerf - self.morf).mean(dim=1) / 2


@metric(
    "road",
    family="removal",
    columns={
        "road-morf": lower(
            "score after patches are removed, most important first, and filled from what is "
            "around them",
            field="morf_mean",
        ),
        "road-lerf": higher(
            "score after patches are removed, least important first, and filled from what is "
            "around them",
            field="lerf_mean",
        ),
        "road": higher("half the difference of road-lerf and road-morf", field="combined"),
    },
)
def road(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    shares: Sequence[float] = TENTHS,
    noise: float = 0.01,
    score: Score = "prob",
    ties: Ties = "raster",
    seed: int = 0,
) -> Road:
    """The score after patches are removed and filled from what is around them.

    `noise` is in normalised units. Two sparse systems for each picture and share, on the CPU.
    """
    scorer = picture_scorer(model, images, target, score=score)
    ranks, count = scorer.ranks(maps, order="patch", ties=ties)
    taken = patch_counts(shares, count).to(ranks.device)
    if int(taken.max()) == count:
        raise BadOption("shares", list(shares), LEAVE)
    generator, shape = torch.Generator().manual_seed(seed), scorer.images.shape[1:]
    grain = noise * torch.randn(shape, generator=generator, dtype=torch.float64)

    def after(places: Tensor) -> Tensor:
        def picture(image: Tensor, step: Tensor) -> Tensor:
            gone = places[image] < taken[step][:, None, None]  # [m, H, W]
            pairs = zip(scorer.images[image], gone, strict=True)
            return torch.stack([impute(own, hole, grain) for own, hole in pairs])

        return scorer.each(len(taken), picture)

    protocol = scorer.protocol("road", shares=list(shares), noise=noise, ties=ties, seed=seed)
    return Road(after(ranks), after(count - 1 - ranks), tuple(shares), protocol)


def impute(image: Tensor, gone: Tensor, grain: Tensor | None = None) -> Tensor:
    """A picture [C, H, W] whose pixels `gone` [H, W] are interpolated from the others; `grain` [C,
    H, W] is added to them."""
    from scipy.sparse.linalg import splu

    hole = gone.cpu().numpy()
    if hole.all():
        raise BadOption("shares", "the whole picture", LEAVE)
    if not hole.any():
        return image
    pixels = image.detach().cpu().double().numpy()
    matrix, right_side = _system(pixels, hole)
    solver = splu(
        matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
    )  # w_ij = w_ji: no pivoting needed
    filled = solver.solve(right_side)  # [n, C]
    pixels[:, hole] = filled.T if grain is None else filled.T + grain.numpy()[:, hole]
    return torch.from_numpy(pixels).to(image)


def _system(pixels: np.ndarray, hole: np.ndarray) -> tuple[csc_matrix, np.ndarray]:
    """The matrix [n, n] and the right side [n, C] of the n missing pixels, in raster order."""
    from scipy.sparse import csc_matrix

    (rows, columns), (height, width) = np.nonzero(hole), hole.shape
    count = len(rows)
    unknown = np.full(hole.shape, -1)
    unknown[rows, columns] = np.arange(count)
    total, right_side = np.zeros(count), np.zeros((count, len(pixels)))
    entries, equations, variables = [], [], []
    for down, right, weight in _NEIGHBOURS:
        y, x = rows + down, columns + right
        inside = np.flatnonzero((y >= 0) & (y < height) & (x >= 0) & (x < width))
        y, x = y[inside], x[inside]
        missing = hole[y, x]
        total[inside] += weight
        right_side[inside[~missing]] += weight * pixels[:, y[~missing], x[~missing]].T
        entries.append(np.full(missing.sum(), -weight))
        equations.append(inside[missing])
        variables.append(unknown[y[missing], x[missing]])
    entries.append(total)
    equations.append(np.arange(count))
    variables.append(np.arange(count))
    where = (np.concatenate(equations), np.concatenate(variables))
    return csc_matrix((np.concatenate(entries), where), shape=(count, count)), right_side
