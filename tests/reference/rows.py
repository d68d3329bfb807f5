"""Rows that read a mixture of two pictures, by definition: one native forward for each mixture,
with hooks that overwrite what a module gives.

A mixture is a weight in [0, 1] for every cell of a grid over the picture; a place of the module's
output has the largest weight of the cells that its square of pixels overlaps. Nothing of the
package is used.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Grid = tuple[int, int]


def mixed_answers(
    forward: Callable[[Tensor], Any],
    module: nn.Module,
    fields: Sequence[str],
    levels: Sequence[Sequence[Grid]],
    context: Tensor,
    donor: Tensor,
    weights: Tensor,
    held: Sequence[nn.Module] = (),
    entering: str = "",
) -> Any:
    """Native outputs for one context picture, where `module` gives donor * w + context * (1 - w),
    w [gh, gw]. `levels` are the grids in each of its tensors; tokens of several are in a row, and
    what comes before them is the context's. Modules that are `held` answer as for the donor. With
    `entering`, tokens that the module is given under this name are mixed, not what it gives."""
    if entering:
        return _mixed_input(forward, module, entering, levels[0], context, donor, weights, held)
    donated = output_of(forward, module, donor)
    theirs = _tensors(donated, fields)
    fixed = [output_of(forward, part, donor) for part in held]
    size = (donor.shape[-2], donor.shape[-1])

    def put(output: Any) -> Any:
        if not fields:  # a map, alone
            return output + place_weights(weights, levels[0][0], size) * (donated - output)
        mine = _tensors(output, fields)
        for (place, tensor), (_, other), grids in zip(mine, theirs, levels, strict=True):
            shares = [place_weights(weights, grid, size) for grid in grids]
            if tensor.ndim == 4:
                share = shares[0]
            else:
                flat = torch.cat([share.flatten() for share in shares])
                first = tensor.shape[1] - len(flat)
                share = torch.cat([flat.new_zeros(first), flat])[:, None]
            place(tensor + share * (other - tensor))
        return output

    with ExitStack() as stack:
        stack.enter_context(Whole())
        stack.enter_context(overwritten(module, put))
        for part, answer in zip(held, fixed, strict=True):
            stack.enter_context(overwritten(part, lambda output, answer=answer: answer))
        return forward(context)


def _mixed_input(
    forward: Callable[[Tensor], Any],
    module: nn.Module,
    name: str,
    grids: Sequence[Grid],
    context: Tensor,
    donor: Tensor,
    weights: Tensor,
    held: Sequence[nn.Module],
) -> Any:
    given: list[Tensor] = []
    size = (donor.shape[-2], donor.shape[-1])
    share = torch.cat([place_weights(weights, grid, size).flatten() for grid in grids])[:, None]

    def watch(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given.append(named[name])

    def put(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return args, {**named, name: named[name] + share * (given[0] - named[name])}

    handle = module.register_forward_pre_hook(watch, with_kwargs=True)
    fixed = [output_of(forward, part, donor) for part in held]
    handle.remove()
    with ExitStack() as stack:
        stack.enter_context(Whole())
        stack.callback(module.register_forward_pre_hook(put, with_kwargs=True).remove)
        for part, answer in zip(held, fixed, strict=True):
            stack.enter_context(overwritten(part, lambda output, answer=answer: answer))
        return forward(context)


class Whole(TorchFunctionMode):
    """Gradients of the whole answer: `detach`, which detectors call for their training, does
    nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.detach else func(*args, **(kwargs or {}))


def place_weights(weights: Tensor, grid: Grid, size: Grid) -> Tensor:
    """The largest weight [h, w] of the cells [gh, gw] that each place's pixels overlap."""
    high, wide = size[0] // weights.shape[0], size[1] // weights.shape[1]
    rows = []
    for r in range(grid[0]):
        top, bottom = r * size[0] // grid[0], (r + 1) * size[0] // grid[0]
        row = []
        for c in range(grid[1]):
            left, right = c * size[1] // grid[1], (c + 1) * size[1] // grid[1]
            over = weights[top // high : -(-bottom // high), left // wide : -(-right // wide)]
            row.append(over.amax())
        rows.append(torch.stack(row))
    return torch.stack(rows)


def output_of(forward: Callable[[Tensor], Any], module: nn.Module, images: Tensor) -> Any:
    """What `module` gives first in a plain native run."""
    seen: list[Any] = []

    def watch(output: Any) -> Any:
        seen.append(copy.copy(output))  # SAM 2 puts other things into it later
        return output

    with overwritten(module, watch):
        forward(images)
    return seen[0]


def _tensors(output: Any, fields: Sequence[str]) -> list[tuple[Callable[[Tensor], None], Tensor]]:
    """The tensors in fields of an output, each with what puts another in its place."""
    found: list[tuple[Callable[[Tensor], None], Tensor]] = []
    for field in fields:
        value = getattr(output, field)
        if isinstance(value, Tensor):

            def put(new: Tensor, field: str = field) -> None:
                output[field] = new

            found.append((put, value))
            continue
        output[field] = entries = list(value)
        for index, tensor in enumerate(entries):

            def put_entry(new: Tensor, entries: list = entries, index: int = index) -> None:
                entries[index] = new

            found.append((put_entry, tensor))
    return found


@contextmanager
def overwritten(module: nn.Module, put: Callable[[Any], Any]) -> Iterator[None]:
    """Pass what `module` gives through `put`."""
    handle = module.register_forward_hook(lambda module, args, output: put(output))
    try:
        yield
    finally:
        handle.remove()
