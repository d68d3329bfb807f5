"""Does the sum of a map over some patches say how much the score falls without them? With S random
sets of patches and

    a(S) = sum_{j in S} A_j,      d(S) = f(x) - f(x without S)

mu_fidelity            correlation of a and d over sets of one size (Bhatt et al. 2020; higher is
                       better). xplique: 20 % of the cells, 200 sets, Spearman; Quantus calls it
                       faithfulness correlation: 100 sets, Pearson
sensitivity_n          the same by Pearson, averaged over set sizes up to 80 % (Ancona et al. 2018;
                       higher is better)
faithfulness_estimate  Pearson over single patches, S = {j} (Alvarez-Melis & Jaakkola 2018; higher
                       is better)
single_deletion        Spearman over the cells of a coarse grid, S = one cell, of logits (IDSDS:
                       Hesse et al. 2024, arXiv 2407.11910; higher is better). Their models were
                       fine-tuned on images without one cell; on others this is their plain
                       single deletion score
infidelity             mean (a - d)^2 (Yeh et al. 2019; lower is better), 10 sets as in captum;
                       `scaled` first multiplies the map by the best factor sum a d / sum a^2
saco                   are groups of patches as influential as the map says, by as much? (Wu et al.
                       2024; -1 to 1, higher is better). Patches in descending order are cut into K
                       groups of equal size, s_i is the mean of the map over the i-th:
                           w_ij = s_i - s_j if d_i >= d_j else -(s_i - s_j)          i < j
                           SaCo = sum_{i<j} w_ij / sum_{i<j} |w_ij|

Sets are drawn from the seed alone and are the same for every image. A map or score that never
varies has no correlation: NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics.curves import patch_counts
from seecause.metrics.pixels import (
    Fill,
    ImageScorer,
    Ties,
    image_scorer,
    importance_ranks,
    spread_out,
    to_pixels,
)
from seecause.metrics.registry import higher, lower, metric
from seecause.metrics.statistics import rank_correlation
from seecause.models.base import ImageModel
from seecause.target import Score, Spec

_correlation = partial(metric, family="correlation with the drop of the score")
SIZES = tuple(tenth / 10 for tenth in range(1, 9))  # as shares of the patches


@_correlation(
    "mu-fidelity",
    columns=higher(
        "rank correlation of the map's sum over random sets of patches with the drop of the "
        "score without them"
    ),
)
def mu_fidelity(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    share: float = 0.2,
    subsets: int = 200,
    correlation: Literal["spearman", "pearson"] = "spearman",
    fill: Fill = 0.0,
    score: Score = "prob",
    seed: int = 0,
) -> Tensor:
    """Do sums of the map over random sets of patches go with the drops without them?

    [B], -1 to 1: their correlation over `subsets` sets of `share` of the patches.
    """
    scorer = image_scorer(model, images, target, score=score)
    summed, drops = _sums_and_drops(scorer, scorer.cells(maps), [share], subsets, fill, seed)
    return rank_correlation(summed, drops) if correlation == "spearman" else pearson(summed, drops)


@_correlation(
    "sensitivity-n",
    columns=higher(
        "plain correlation of the map's sum over sets of patches, of many sizes, with the "
        "drop of the score without them"
    ),
)
def sensitivity_n(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    shares: Sequence[float] = SIZES,
    subsets: int = 100,
    fill: Fill = 0.0,
    score: Score = "prob",
    seed: int = 0,
) -> Tensor:
    """Do sums of the map over random sets of patches of many sizes go with the drops without them?

    [B], -1 to 1: Pearson's correlation at each of `shares`, averaged over them.
    """
    scorer = image_scorer(model, images, target, score=score)
    summed, drops = _sums_and_drops(scorer, scorer.cells(maps), shares, subsets, fill, seed)
    each = [
        pearson(a, d)
        for a, d in zip(summed.split(subsets, dim=1), drops.split(subsets, dim=1), strict=True)
    ]
    return torch.stack(each).mean(dim=0)


@_correlation(
    "faithfulness-estimate",
    columns=higher("correlation of the map with the drop of the score without each single patch"),
)
def faithfulness_estimate(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    fill: Fill = 0.0,
    score: Score = "prob",
) -> Tensor:
    """Does the map go with the drop without each single patch?

    [B], -1 to 1: Pearson's correlation over all patches.
    """
    scorer = image_scorer(model, images, target, score=score)
    cells = scorer.cells(maps)
    single = torch.eye(cells[0].numel(), dtype=torch.bool).unflatten(1, cells.shape[1:])
    return pearson(cells.flatten(1).cpu(), scorer.drops(single[None], fill))


@_correlation(
    "idsds",
    columns=higher(
        "rank correlation of the map's sum over each cell of a coarse grid with the drop of "
        "the logit without it"
    ),
)
def single_deletion(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    cells: int = 4,
    fill: Fill = 0.0,
    score: Score = "logit",
) -> Tensor:
    """Are the cells of a coarse grid ranked as the logit falls without them?

    [B], -1 to 1: Spearman's correlation over `cells` x `cells` cells.
    """
    scorer = image_scorer(model, images, target, score=score)
    if not 2 <= cells <= min(scorer.size):
        raise BadOption("cells", cells, f"2 to {min(scorer.size)}")
    pixels = to_pixels(maps.to(scorer.images.device), scorer.size)
    single = torch.eye(cells**2, dtype=torch.bool, device=pixels.device).unflatten(1, (cells, -1))
    covers = spread_out(single, scorer.size)  # [cells^2, H, W]
    sums = exact_sums(pixels.flatten(1), covers.flatten(1))
    return rank_correlation(sums.cpu(), scorer.drops(single[None], fill))


@_correlation(
    "infidelity",
    columns=lower(
        "squared error of the map's sums over sets of patches as forecasts of the drop "
        "without them, the map scaled as fits best"
    ),
)
def infidelity(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    share: float = 0.2,
    subsets: int = 10,
    scaled: bool = False,
    fill: Fill = 0.0,
    score: Score = "prob",
    seed: int = 0,
) -> Tensor:
    """How far are sums of the map from the drops without their patches?

    [B], from 0: the mean squared gap over `subsets` sets. The map is taken as contributions in
    units of the score, unless it is `scaled` to fit best; a pixel map is summed.
    """
    scorer = image_scorer(model, images, target, score=score)
    cells = scorer.cells(maps)
    if tuple(maps.shape[1:]) == scorer.size:  # `cells` averages over the pixels of a patch
        cells = cells * (maps[0].numel() / cells[0].numel())
    summed, drops = _sums_and_drops(scorer, cells, [share], subsets, fill, seed)
    if scaled:
        best = (summed * drops).sum(dim=1) / summed.square().sum(dim=1)
        summed = summed * best.nan_to_num(nan=0.0)[:, None]  # an empty map has no scale
    return (summed - drops).square().mean(dim=1)


@metric(
    "saco",
    family="removal",
    columns=higher(
        "do groups of patches matter in the order and proportion that the map claims? From -1 to 1"
    ),
)
def saco(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    groups: int = 10,
    fill: Fill = "mean",
    score: Score = "prob",
    ties: Ties = "raster",
) -> Tensor:
    """Do groups of patches matter in the order and proportion that the map claims?

    [B], -1 to 1. Where the number of patches is no multiple of `groups`, groups differ by one
    patch: salience is therefore their mean, not their sum. A constant map makes no claim: NaN.
    """
    scorer = image_scorer(model, images, target, score=score)
    cells = scorer.cells(maps)
    grid, count = (cells.shape[1], cells.shape[2]), cells[0].numel()
    if not 2 <= groups <= count:
        raise BadOption("groups", groups, f"2 to {count}, the number of patches")
    places, _ = importance_ranks(cells, grid, grid, order="patch", ties=ties)  # [B, gh, gw]
    numbers = torch.arange(groups, device=places.device)[:, None, None]
    member = (places[:, None] * groups // count) == numbers  # [B, K, gh, gw]
    salience = (cells[:, None] * member).sum(dim=(2, 3)) / member.sum(dim=(2, 3))
    flat = (cells == cells[:, :1, :1]).flatten(1).all(dim=1).cpu()
    return coefficient(salience.cpu(), scorer.drops(member, fill)).masked_fill(flat, torch.nan)


def coefficient(salience: Tensor, drops: Tensor) -> Tensor:
    """SaCo [B] of groups in descending order, from their salience and drops, both [B, K]."""
    first, second = torch.triu_indices(salience.shape[1], salience.shape[1], offset=1)
    gap = salience[:, first] - salience[:, second]
    weight = torch.where(drops[:, first] >= drops[:, second], gap, -gap)
    return weight.sum(dim=1) / weight.abs().sum(dim=1)


def random_subsets(
    shares: Sequence[float], subsets: int, grid: tuple[int, int], seed: int
) -> Tensor:
    """[K * subsets, gh, gw] bool: for each share, that many random sets of so many patches."""
    if subsets < 2:
        raise BadOption("subsets", subsets, "at least 2 sets")
    count = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(seed)
    shape = (len(shares), subsets, count)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float32)
    ranks = drawn.argsort(dim=2).argsort(dim=2)
    return (ranks < patch_counts(shares, count)[:, None, None]).view(-1, *grid)


def pearson(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's correlation of rows [B, M] and [B, M]; NaN for a row without variation."""
    x, y = (rows - rows.mean(dim=1, keepdim=True) for rows in (first.double(), second.double()))
    correlation = (x * y).sum(dim=1) / (x.square().sum(dim=1) * y.square().sum(dim=1)).sqrt()
    # rounding would correlate with rounding
    flat = (first == first[:, :1]).all(dim=1) | (second == second[:, :1]).all(dim=1)
    return correlation.masked_fill(flat, torch.nan)


def _sums_and_drops(
    scorer: ImageScorer,
    cells: Tensor,
    shares: Sequence[float],
    subsets: int,
    fill: Fill,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """a(S) and d(S), both [B, K * subsets] float64."""
    gone = random_subsets(shares, subsets, (cells.shape[1], cells.shape[2]), seed)
    summed = exact_sums(cells.flatten(1).cpu(), gone.flatten(1))
    return summed, scorer.drops(gone[None], fill)


def exact_sums(values: Tensor, sets: Tensor) -> Tensor:
    """Sums [B, M] of values [B, N] over sets [M, N] bool, of which equal ones are equal to the last
    bit: rounding would rank them. Values are taken as whole multiples of so small a part of the
    largest that float64 holds the sum of all N."""
    values = values.double()
    unit = values.abs().amax(dim=1, keepdim=True) / 2 ** (52 - sets.shape[1].bit_length())
    whole = (values / unit.where(unit > 0, 1)).round()
    return whole @ sets.to(whole.dtype).T * unit
