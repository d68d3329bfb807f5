"""Perturbation metrics by definition: one picture, one set of patches, one forward at a time."""

from collections.abc import Callable, Sequence

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


def softmax_answer(forward: Callable[[Tensor], Tensor], label: int) -> Answer:
    return lambda image: torch.softmax(forward(image[None]), dim=-1)[0, label].item()
