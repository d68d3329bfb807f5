"""RISE's insertion and deletion by definition: one picture, one pixel at a time, one forward a
step."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Answer = Callable[[Tensor], float]  # one picture [3, H, W] -> its score


def curve(
    answer: Answer, start: Tensor, goal: Tensor, order: Sequence[int], step: int
) -> list[float]:
    """Scores while the pixels of `start` become those of `goal`, `step` of them at a time."""
    width = start.shape[-1]
    current = start.clone()
    scores = [answer(current)]
    for first in range(0, len(order), step):
        for pixel in order[first : first + step]:
            current[:, pixel // width, pixel % width] = goal[:, pixel // width, pixel % width]
        scores.append(answer(current))
    return scores


def area(scores: Sequence[float]) -> float:
    return (sum(scores) - scores[0] / 2 - scores[-1] / 2) / (len(scores) - 1)


def pixel_order(values: Tensor) -> list[int]:
    """Pixels of a map [H, W], largest first; the first of equals goes first."""
    flat = values.flatten().tolist()
    return sorted(range(len(flat)), key=lambda pixel: -flat[pixel])


def patch_order(values: Tensor, size: tuple[int, int]) -> list[int]:
    """The same for whole patches of a map [gh, gw]: pixels patch by patch."""
    (height, width), (rows, columns) = size, values.shape
    high, wide = height // rows, width // columns
    order = []
    for patch in pixel_order(values):
        top, left = patch // columns * high, patch % columns * wide
        order += [y * width + x for y in range(top, top + high) for x in range(left, left + wide)]
    return order


def blur(image: Tensor) -> Tensor:
    """RISE's blur of [3, H, W]: the sum of its shifted copies, with nothing beyond the edge."""
    kernel = folded_kernel()
    height, width = image.shape[1:]
    wide = torch.zeros(3, height + 10, width + 10, dtype=image.dtype)
    wide[:, 5:-5, 5:-5] = image
    soft = torch.zeros_like(image)
    for down in range(11):
        for across in range(11):
            soft += (
                kernel[down]
                * kernel[across]
                * wide[:, down : down + height, across : across + width]
            )
    return soft


def folded_kernel(window: int = 11, sigma: float = 5.0) -> list[float]:
    """A Gaussian cut at four deviations whose mass folds back at both ends of the window."""
    reach = int(4 * sigma)
    weights = {j: math.exp(-(j**2) / (2 * sigma**2)) for j in range(-reach, reach + 1)}
    total = sum(weights.values())
    kernel = [0.0] * window
    for j, weight in weights.items():
        place = (window // 2 + j) % (2 * window)
        kernel[place if place < window else 2 * window - 1 - place] += weight / total
    return kernel
