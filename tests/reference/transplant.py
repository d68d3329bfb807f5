"""Transplants and Otsu's threshold by definition: one picture, one patch, one threshold at a time.
Nothing of the package is used."""

import math

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def scramble(x: int) -> int:
    """A 32-bit integer mixer (lowbias32)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def hashed(key: int, purpose: int) -> int:
    """32 random bits for a number of 62 bits."""
    return scramble(key & WORD ^ scramble(key >> 32 ^ scramble(purpose)))


def mixed(key: int, other: int) -> int:
    """One number of 62 bits for two."""
    return (key + 0x9E3779B1 * other) % 2**62


def grown(mask: Tensor) -> Tensor:
    """A mask [gh, gw] with every neighbour of its patches."""
    new = torch.zeros_like(mask)
    for row in range(mask.shape[0]):
        for column in range(mask.shape[1]):
            top, left = max(0, row - 1), max(0, column - 1)
            new[row, column] = mask[top : row + 2, left : column + 2].any()
    return new


def hole(mask: Tensor, side: int) -> Tensor:
    """What is filled of a background [gh, gw]."""
    rows, columns = mask.shape[0] // side, mask.shape[1] // side
    share = mask.double().reshape(rows, side, columns, side).mean(dim=(1, 3))
    whole = grown(share >= 0.5) | (share > 0)
    return share > 0 if whole.all() else whole


def transplant(
    images: Tensor, masks: Tensor, labels: list[int], per_image: int, donors: str, seed: int,
    *, side: int, keys: list[int],
) -> list[tuple[int, int, Tensor]]:  # fmt: skip
    """(i, j, picture) of all transplants; `side` is the patch's in pixels, `keys`
    identify pictures."""
    holes = [hole(mask, side) for mask in masks]
    results = []
    for i, label in enumerate(labels):
        if not masks[i].any() or masks[i].all():
            continue
        allowed = {"any": set(labels), "same-class": {label}, "other-class": set(labels) - {label}}
        pool = [
            j for j, other in enumerate(labels)
            if j != i and other in allowed[donors] and not holes[j].all()
        ]  # fmt: skip
        pool.sort(key=lambda j: hashed(mixed(keys[j], keys[i]), 4 * seed + 1))
        for number in range(per_image if pool else 0):
            j = pool[number % len(pool)]
            behind = filled(images[j], holes[j], mixed(keys[i], number), seed, side)
            share = blurred(masks[i].to(images.dtype))
            results.append((i, j, share * images[i] + (1 - share) * behind))
    return results


def filled(picture: Tensor, holes: Tensor, key: int, seed: int, side: int) -> Tensor:
    rows, columns = holes.shape
    free = [cell for cell in range(rows * columns) if not holes[cell // columns, cell % columns]]
    base, new = hashed(key, 4 * seed + 2), picture.clone()
    for cell in range(rows * columns):
        if not holes[cell // columns, cell % columns]:
            continue
        chance = scramble(base ^ scramble(cell + 1)) >> 8
        other = free[chance * len(free) // 2**24]
        new[block(cell, columns, side)] = picture[block(other, columns, side)]
    return new


def block(cell: int, columns: int, side: int) -> tuple[slice, slice, slice]:
    row, column = divmod(cell, columns)
    down, across = row * side, column * side
    return slice(None), slice(down, down + side), slice(across, across + side)


def blurred(mask: Tensor) -> Tensor:
    """A Gaussian of 1/150 of the longer side, half a pixel at least, over reflected edges."""
    height, width = mask.shape
    sigma = max(0.5, max(height, width) / 150)
    reach = round(3 * sigma)
    weights = [math.exp(-((step / sigma) ** 2) / 2) for step in range(-reach, reach + 1)]
    total, new = sum(weights) ** 2, torch.zeros_like(mask)

    def reflected(place: int, size: int) -> int:
        place = abs(place)
        return 2 * (size - 1) - place if place >= size else place

    for row in range(height):
        for column in range(width):
            value = 0.0
            for down, by_row in enumerate(weights, -reach):
                for across, by_column in enumerate(weights, -reach):
                    y, x = reflected(row + down, height), reflected(column + across, width)
                    value += by_row * by_column * float(mask[y, x])
            new[row, column] = value / total
    return new


def otsu(scores: Tensor) -> Tensor:
    """Of a map [gh, gw], what lies above the best of all thresholds."""
    values = scores.flatten().tolist()
    best, threshold = 0.0, max(values)
    for level in sorted(set(values))[:-1]:
        low, high = [v for v in values if v <= level], [v for v in values if v > level]
        gap = sum(high) / len(high) - sum(low) / len(low)
        between = len(low) * len(high) * gap**2
        if between > best:
            best, threshold = between, level
    return scores > threshold
