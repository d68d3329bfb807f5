"""CAAP and mosaic of a network of stages by definition: one native forward per cell or mask, with a
hook that overwrites what a stage gives.

`at(row, column)` is the index of one place of the grid into that output: networks keep features as
[B, C, h, w], as [B, h, w, C] or as a sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

At = Callable[[int, int], tuple[Any, ...]]


def planes(row: int, column: int) -> tuple[Any, ...]:
    """A place of features [B, C, h, w]."""
    return (slice(None), slice(None), row, column)


def caap_cnn(
    forward: Callable[[Tensor], Tensor],
    stage: nn.Module,
    context: Tensor,
    donor: Tensor,
    sets: Sequence[Sequence[tuple[int, int]]],
    at: At = planes,
) -> Tensor:
    """Logits [n, C] of one context image whose features after `stage` are the donor's at each set
    of (row, column)."""
    theirs = features(forward, stage, donor)
    logits = []
    for places in sets:

        def put(out: Tensor, places: Sequence[tuple[int, int]] = places) -> Tensor:
            out = out.clone()
            for row, column in places:
                out[at(row, column)] = theirs[at(row, column)]
            return out

        with overwritten(stage, put):
            logits.append(forward(context))
    return torch.cat(logits)


def mosaic_cnn(
    forward: Callable[[Tensor], Tensor],
    stage: nn.Module,
    blank: Tensor,
    picture: Tensor,
    masks: Sequence[Tensor],
    score: Callable[[Tensor], Tensor],
    at: At = planes,
) -> Tensor:
    """Slopes [n, gh, gw] of score(logits [1, C]) at masks [gh, gw] that mix the features of a blank
    and of one picture, place by place: blank + m (picture - blank)."""
    ends = [features(forward, stage, image) for image in (blank, picture)]
    slopes = []
    for mask in masks:
        leaf = mask.clone().requires_grad_()
        share = torch.zeros_like(ends[0])
        for row in range(mask.shape[0]):
            for column in range(mask.shape[1]):
                here = torch.zeros_like(ends[0])
                here[at(row, column)] = 1
                share = share + leaf[row, column] * here
        mixed = ends[0] + share * (ends[1] - ends[0])
        with overwritten(stage, lambda out, mixed=mixed: mixed):
            slopes.append(torch.autograd.grad(score(forward(picture)), leaf)[0])
    return torch.stack(slopes)


def features(forward: Callable[[Tensor], Tensor], stage: nn.Module, images: Tensor) -> Tensor:
    """The output of `stage` in a plain native run."""
    seen: list[Tensor] = []

    def watch(out: Tensor) -> Tensor:
        seen.append(out.clone())
        return out

    with overwritten(stage, watch), torch.no_grad():
        forward(images)
    return seen[0]


@contextmanager
def overwritten(stage: nn.Module, put: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass what `stage` gives (the first of several things) through `put`."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (put(output[0]), *output[1:]) if isinstance(output, tuple) else put(output)

    handle = stage.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
