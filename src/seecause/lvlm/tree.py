"""Many continuations of one prompt as a single sequence.

    trunk | branch 1 | branch 2 | ...       rows of a branch see the trunk and what comes before
    them in their own branch

The picture, and whatever all continuations share, runs once. In a causal decoder this is exact:
positions of a branch go on where the trunk ends, and no row sees what stands behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from seecause.models.block import Block
from seecause.models.layout import At


@dataclass(frozen=True, eq=False)
class Tree:
    """Sequences that begin alike, side by side."""

    ids: Tensor  # [S]
    positions: Tensor  # [S], of each token in its own sequence
    branch: Tensor  # [S]: 0 in the trunk, then 1, 2, ... by sequence
    trunk: int  # how many tokens all share
    starts: tuple[int, ...]  # for each sequence, the row its branch begins at

    def row(self, sequence: int, place: int) -> int:
        """Which row the token at `place` of a sequence is."""
        return place if place < self.trunk else self.starts[sequence] + place - self.trunk

    def grown(self, blocks: Sequence[Block]) -> list[Block]:
        """A decoder's blocks for this tree: branches do not see each other."""
        if self.trunk == len(self.ids):
            return list(blocks)
        return [replace(block, additive=partial(self._bias, block)) for block in blocks]

    def _bias(self, block: Block, rows: At, keys: At) -> Tensor:
        """The block's own (causal) bias, and -inf between branches: [1, 1|H, R, K]. Blocks with the
        same bias share one table in each run."""
        kept = ("tree", block.additive)
        if kept not in keys.memo:
            every, branch = (
                keys.take(torch.arange(len(self.ids), device=keys.index.device)),
                self.branch.to(keys.index.device),
            )
            own = block.bias(every, every)
            assert own is not None
            keys.memo[kept] = own.masked_fill(
                (branch != 0) & (branch != branch[:, None]), -torch.inf
            )  # [1, 1|H, S, S]
        return keys.memo[kept][:, :, rows.index[:, None], keys.index]


def plant(sequences: Sequence[Sequence[int]]) -> Tree:
    """The tree of some sequences of token ids."""
    shortest = min(len(sequence) for sequence in sequences)
    trunk = next(
        (
            place
            for place in range(shortest)
            if len({sequence[place] for sequence in sequences}) > 1
        ),
        shortest,
    )
    ids, positions, branch, starts = list(sequences[0][:trunk]), list(range(trunk)), [0] * trunk, []
    for number, sequence in enumerate(sequences, start=1):
        rest = sequence[trunk:]
        starts.append(len(ids))
        ids += rest
        positions += range(trunk, trunk + len(rest))
        branch += [number] * len(rest)
    return Tree(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(branch), trunk, tuple(starts)
    )
