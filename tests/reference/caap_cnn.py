"""CAAP of a convolutional network by definition: one native forward per cell, with a hook that
overwrites a stage's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def caap_cnn(
    forward: Callable[[Tensor], Tensor],
    stage: nn.Module,
    context: Tensor,
    donor: Tensor,
    sets: Sequence[Sequence[tuple[int, int]]],
) -> Tensor:
    """Logits [n, C] of one context image whose features after `stage` are the donor's at each set
    of (row, column)."""
    theirs = features(forward, stage, donor)
    logits = []
    for places in sets:

        def put(out: Tensor, places: Sequence[tuple[int, int]] = places) -> Tensor:
            out = out.clone()
            for row, column in places:
                out[:, :, row, column] = theirs[:, :, row, column]
            return out

        with overwritten(stage, put):
            logits.append(forward(context))
    return torch.cat(logits)


def features(forward: Callable[[Tensor], Tensor], stage: nn.Module, images: Tensor) -> Tensor:
    """The output of `stage` in a plain native run."""
    seen: list[Tensor] = []

    def watch(out: Tensor) -> Tensor:
        seen.append(out.clone())
        return out

    with overwritten(stage, watch):
        forward(images)
    return seen[0]


@contextmanager
def overwritten(stage: nn.Module, put: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass what `stage` gives through `put`."""
    handle = stage.register_forward_hook(lambda module, args, output: put(output))
    try:
        yield
    finally:
        handle.remove()
