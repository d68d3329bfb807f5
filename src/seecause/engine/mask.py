"""Which keys each row sees, with what a tiled kernel wants to know about it."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, KEYS = (
    64,
    32,
)  # a tile of rows, a block of keys: the fastest of those tried (docs/benchmarks.md)


class Mask:
    """keep [1|B, 1|H, R, K] (bool). Made once and used by every block of a run."""

    def __init__(self, keep: Tensor):
        self.keep = keep

    @cached_property
    def bytes(self) -> Tensor:
        return self.keep.contiguous().view(torch.uint8)

    @cached_property
    def worklist(self) -> Tensor:
        """For each tile of rows: how many key blocks any of its rows sees (in any image and head),
        then which. int32 [tiles, 1 + blocks]."""
        flat = self.keep.flatten(0, 1).any(dim=0)  # [R, K]
        rows, keys = flat.shape
        padded = F.pad(flat, (0, -keys % KEYS, 0, -rows % ROWS))
        seen = (
            padded.unflatten(0, (-1, ROWS)).unflatten(2, (-1, KEYS)).any(dim=3).any(dim=1)
        )  # [tiles, blocks]
        order = seen.int().argsort(dim=1, descending=True, stable=True)
        return torch.cat([seen.sum(dim=1, keepdim=True), order], dim=1).int().contiguous()
