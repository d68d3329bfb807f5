"""Blocks whose keys can be hidden, token by token and head by head, by facts about the token.

`facts(images)` of a view says of each token what blocks may know about it, from pixels or anything
else; positions (`At`) carry that beside the states. Keys get one more lane that holds 0 or a large
negative number, and queries a 1 there, so hidden keys weigh exactly nothing:

    q' = [q, 1, 0 ...],    k' = [k, 0 or HIDDEN, 0 ...],    v' = [v, 0 ...]

So visibility goes with the keys wherever another run borrows them, and fused attention stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from seecause.models.block import Block, same

HIDDEN = -3e4  # the largest that float16 holds comfortably; exp(scale * HIDDEN) is exactly 0


def hiding(block: Block, hides: Callable[[Tensor], Tensor] = same) -> Block:
    """`block` without the keys that `hides` names: it turns facts [B, R, F] (bool) into hidden keys
    [B, R, 1 or Hkv]."""

    def lanes(facts: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hides(facts).float()[..., None] * HIDDEN  # [B, R, 1 or Hkv, 1]
        return torch.ones_like(hidden[..., :1, :]), hidden

    return replace(block, lanes=lanes)
