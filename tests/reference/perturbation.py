"""Perturbation metrics by definition: one picture, one set of patches, one forward at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Answer = Callable[[Tensor], float]  # one picture [3, H, W] -> its score


def without(image: Tensor, patches: Sequence[int], grid: tuple[int, int], fill: Tensor) -> Tensor:
    """The picture with some patches (in raster order) replaced by those of `fill`."""
    high, wide = image.shape[1] // grid[0], image.shape[2] // grid[1]
    changed = image.clone()
    for patch in patches:
        top, left = patch // grid[1] * high, patch % grid[1] * wide
        changed[:, top : top + high, left : left + wide] = fill[
            :, top : top + high, left : left + wide
        ]
    return changed


def descending(values: Tensor) -> list[int]:
    flat = values.flatten().tolist()
    return sorted(range(len(flat)), key=lambda patch: -flat[patch])


def aopc(
    answer: Answer, image: Tensor, order: Sequence[int], grid: tuple[int, int], fill: Tensor
) -> float:
    whole = answer(image)
    return sum(
        whole - answer(without(image, order[:k], grid, fill)) for k in range(len(order) + 1)
    ) / (len(order) + 1)


def eraser(
    answer: Answer,
    image: Tensor,
    order: Sequence[int],
    grid: tuple[int, int],
    fill: Tensor,
    counts: Sequence[int],
) -> tuple[float, float, float]:
    """Comprehensiveness, sufficiency and log-odds."""
    whole = answer(image)
    cut = [answer(without(image, order[:k], grid, fill)) for k in counts]
    kept = [answer(without(image, order[k:], grid, fill)) for k in counts]
    n = len(counts)
    return (
        sum(whole - y for y in cut) / n,
        sum(whole - y for y in kept) / n,
        sum(math.log(y) - math.log(whole) for y in cut) / n,
    )


def saco(
    answer: Answer, image: Tensor, values: Tensor, grid: tuple[int, int], groups: int
) -> float:
    order, flat = descending(values), values.flatten().tolist()
    mean = image.mean(dim=(1, 2), keepdim=True).expand_as(image)
    size = len(order) // groups
    members = [order[g * size : (g + 1) * size] for g in range(groups)]
    salience = [sum(flat[patch] for patch in group) for group in members]
    drops = [answer(image) - answer(without(image, group, grid, mean)) for group in members]
    total = absolute = 0.0
    for i in range(groups):
        for j in range(i + 1, groups):
            weight = (
                salience[i] - salience[j] if drops[i] >= drops[j] else -(salience[i] - salience[j])
            )
            total, absolute = total + weight, absolute + abs(weight)
    return total / absolute


def impute(image: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """Missing pixels [H, W] of a picture [C, H, W] as weighted means of their neighbours, by a
    dense solve over all pixels."""
    channels, height, width = image.shape
    matrix = np.eye(height * width)
    known = image.reshape(channels, -1).T.copy()
    for y in range(height):
        for x in range(width):
            if not gone[y, x]:
                continue
            near = [
                (y + a, x + b, 1 / 6 if 0 in (a, b) else 1 / 12)
                for a in (-1, 0, 1)
                for b in (-1, 0, 1)
                if (a, b) != (0, 0)
            ]
            near = [(v, u, w) for v, u, w in near if 0 <= v < height and 0 <= u < width]
            total = sum(w for _, _, w in near)
            known[y * width + x] = 0
            for v, u, w in near:
                matrix[y * width + x, v * width + u] -= w / total
    return np.linalg.solve(matrix, known).T.reshape(image.shape)


def gini(values: Sequence[float]) -> float:
    """Half the relative mean difference of all pairs."""
    sizes = [abs(value) for value in values]
    n, mean = len(sizes), sum(sizes) / len(sizes)
    return sum(abs(a - b) for a in sizes for b in sizes) / (2 * n * n * mean)


def softmax_answer(forward: Callable[[Tensor], Tensor], label: int) -> Answer:
    return lambda image: torch.softmax(forward(image[None]), dim=-1)[0, label].item()
