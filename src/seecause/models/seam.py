"""Where the native run of a model of many rows is cut: the places that its rows read, taken out of
what a module gave and put into it again.

The rest of the native forward runs in a copy of the module that shares every weight (`spliced`), in
which some modules answer with what is given to them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seecause.errors import BadOption


@dataclass(frozen=True, eq=False)
class Places:
    """What rows read of pictures of `size`: maps [B, C, h, w], one for each level. `others` [B, ..]
    lie at no place (a class token): in mixtures they stay the context's."""

    maps: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.maps[0])

    def repeated(self, count: int) -> Places:
        """Those of one picture, `count` times."""
        maps, others = (
            tuple(x.expand(count, *x.shape[1:]) for x in part) for part in (self.maps, self.others)
        )
        return Places(maps, others, self.size)

    def over(self, context: Places, mix: Callable[[Tensor, Tensor], Tensor]) -> Places:
        """Mixtures with the places of another run: `mix` makes n of every picture's map and the
        context's, [B * n, C, h, w], for each level."""
        maps = tuple(mix(*both) for both in zip(self.maps, context.maps, strict=True))
        batch = max(len(self), len(context))
        count = len(maps[0]) // batch
        others = (x[:, None].expand(batch, count, *x.shape[1:]) for x in context.others)
        return Places(maps, tuple(x.flatten(0, 1) for x in others), self.size)


@dataclass(frozen=True, eq=False)
class Call:
    """What a native module was given by name, and what it gave."""

    output: Any
    named: Mapping[str, Any]


@dataclass(frozen=True)
class Seam:
    """Where a native run is cut: at the output of module `at`, whose `fields` hold the places: maps
    [B, C, h, w], tokens [B, prefix + places, D], or lists of these (only `entries` are read)."""

    at: str
    fields: tuple[str, ...]
    before: tuple[str, ...] = ()  # modules that only lead to it
    held: tuple[str, ...] = ()  # modules behind it that choose what is asked
    prefix: int = 0
    entries: tuple[int, ...] | None = None

    def take(self, call: Call, size: tuple[int, int]) -> Places:
        """The places in what `at` gave for pictures of `size`."""
        maps, others = [], []
        for tensor in self._tensors(call.output):
            if tensor.ndim == 4:
                maps.append(tensor)
                continue
            grids = call.named.get("spatial_shapes_list") or [self._grid(tensor, size)]
            others += [tensor[:, : self.prefix]] if self.prefix else []
            levels = tensor[:, self.prefix :].split([h * w for h, w in grids], dim=1)
            maps += [x.mT.unflatten(2, grid) for x, grid in zip(levels, grids, strict=True)]
        return Places(tuple(maps), tuple(others), size)

    def put(self, call: Call, places: Places) -> Any:
        """The same output with other places in it."""
        maps, others = iter(places.maps), iter(places.others)

        def tensor_like(tensor: Tensor) -> Tensor:
            if tensor.ndim == 4:
                return next(maps)
            parts, rows = [next(others)] if self.prefix else [], tensor.shape[1] - self.prefix
            while rows:
                parts.append(next(maps).flatten(2).mT)
                rows -= parts[-1].shape[1]
            return torch.cat(parts, dim=1)

        changed = {}
        for name in self.fields:
            value = getattr(call.output, name)
            if isinstance(value, Tensor):
                changed[name] = tensor_like(value)
            else:
                read = self._entries(value)
                changed[name] = [
                    tensor_like(x) if index in read else None for index, x in enumerate(value)
                ]
        return type(call.output)(**{**call.output, **changed})

    def _tensors(self, output: Any) -> Iterator[Tensor]:
        for name in self.fields:
            value = getattr(output, name)
            if isinstance(value, Tensor):
                yield value
            else:
                yield from (value[index] for index in self._entries(value))

    def _entries(self, value: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(range(len(value))) if self.entries is None else self.entries

    def _grid(self, tokens: Tensor, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of places that have the picture's shape."""
        count = tokens.shape[1] - self.prefix
        rows = max(1, round(math.sqrt(count * size[0] / size[1])))
        if count % rows:
            raise BadOption("size", size, f"pictures that {count} places of {self.at} can tile")
        return rows, count // rows


def spliced(module: nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> nn.Module:
    """A copy of `module` that shares every weight, in which modules run other functions. The module
    itself stays as it is, so that threads may share it."""
    top = _shell(module)
    for path, forward in forwards.items():
        *way, last = path.split(".")
        here = top
        for name in way:
            inner = _shell(here._modules[name])
            here._modules[name] = inner
            here = inner
        leaf = _shell(here._modules[last])
        leaf.forward = forward
        here._modules[last] = leaf
    return top


def _shell(module: nn.Module | None) -> nn.Module:
    assert module is not None
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    return shell


class Attached(TorchFunctionMode):
    """In it, `detach` cuts nothing. Detectors detach the boxes that one layer hands to the next,
    which steadies their training; the answer hangs on them all the same."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.detach else func(*args, **(kwargs or {}))


def answering(answer: Any) -> Callable[..., Any]:
    return lambda *args, **named: answer


def copies_of(value: Any, count: int) -> Any:
    """What a module gave for one picture, as for `count` of them; nothing is copied."""
    if isinstance(value, Tensor):
        return value.expand(count, *value.shape[1:]) if value.ndim and len(value) == 1 else value
    if isinstance(value, Mapping):
        return type(value)(**{name: copies_of(part, count) for name, part in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(copies_of(part, count) for part in value)
    return value
