"""Evidence by definition: every length of the chain, one native forward each; every pair of
regions, one patched native forward each. Nothing of the package is used."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference.caap import caap


def scan(
    forward: Callable[[Tensor], Tensor],
    image: Tensor,
    blank: Tensor,
    order: Sequence[tuple[int, int]],
    cell: tuple[int, int],
    answer: int,
) -> tuple[list[bool], list[bool]]:
    """Whether the answer is kept with only the first k cells (row, column) of `order` shown, and
    with all but them, for k = 0 .. N. image, blank [3, H, W]; `cell` is the size in pixels."""
    alone, without = [], []
    for k in range(len(order) + 1):
        shown, hidden = blank.clone(), image.clone()
        for row, column in order[:k]:
            place = (
                slice(None),
                slice(row * cell[0], (row + 1) * cell[0]),
                slice(column * cell[1], (column + 1) * cell[1]),
            )
            shown[place], hidden[place] = image[place], blank[place]
        alone.append(int(forward(shown[None])[0].argmax()) == answer)
        without.append(int(forward(hidden[None])[0].argmax()) == answer)
    return alone, without


def pair_effects(
    forward: Callable[[Tensor], Tensor],
    blocks: Sequence[nn.Module],
    blank: Tensor,
    image: Tensor,
    regions: Sequence[Sequence[int]],
    answer: int,
    **plan: object,
) -> Tensor:
    """What each pair of regions adds to the logit of a blank, [R, R]; the diagonal has single
    ones. `plan` is that of the slow twin of CAAP."""
    empty = forward(blank)[0, answer]
    effects = torch.zeros(len(regions), len(regions), dtype=empty.dtype)
    for a, first in enumerate(regions):
        for b, second in enumerate(regions):
            both = sorted({*first, *second})
            logits = caap(forward, blocks, blank, image, [both], **plan)  # type: ignore[arg-type]
            effects[a, b] = logits[0, answer] - empty
    return effects
