"""A dataset of its own: one bright square on a dark picture, with its mask."""

import torch

from seecause.data import Sample


class Sparkles:
    classes = ("left", "right")
    fingerprint = "sparkles-1"

    def __init__(self, name: str, count: int):
        self.name, self.count = name, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.count:
            raise IndexError(index)
        label = index % 2
        image = 0.2 * torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index))
        mask = torch.zeros(32, 32, dtype=torch.bool)
        mask[8:16, 16 * label : 16 * label + 8] = True
        return Sample(image + 0.7 * mask, label, mask=mask, id=f"sparkle {index}")


def open_sparkles(rest: str) -> Sparkles:
    return Sparkles(f"sparkles:{rest}", int(rest))
