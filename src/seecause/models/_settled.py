"""Runs as the view was verified: eval mode, the model's own dtype, gradients possible.

Dropout makes maps random and autocast shifts them, both silently. `settled` undoes them for the
time of a run and gives them back; what runs outside of it asks `need_settled` first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_

import torch
from torch import Tensor, nn

from seecause.errors import BadOption

_lock = threading.Lock()
# by module: how many runs hold it in eval mode, and which of its parts were training before
_held: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = (
    weakref.WeakKeyDictionary()
)


@contextmanager
def settled(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Eval mode, without autocast and outside of inference mode; what the caller had set comes
    back. Several threads may share a module."""
    with ExitStack() as stack:
        for module in modules:
            _hold(module)
            stack.callback(_let_go, module)
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


def need_settled(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Refuse a model that would not compute what was verified."""
    if any(module not in _held and _training(module) for module in modules):
        raise BadOption(
            "training mode", True, "eval mode: dropout makes results random, so call module.eval()"
        )
    if torch.is_autocast_enabled(device.type):
        raise BadOption(
            "autocast",
            True,
            "none: it shifts results, so leave its block; to compute in half precision load the"
            " model with dtype='bfloat16'",
        )


def _training(module: nn.Module) -> list[nn.Module]:
    return [part for part in parts_of(module) if part.training]


def parts_of(module: nn.Module) -> list[nn.Module]:
    """`module.modules()`, ten times as fast: it is asked for before every run."""
    parts, seen = [module], {id(module)}
    for part in parts:  # grows meanwhile
        for child in part._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                parts.append(child)
    return parts


def tensors_of(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers, as they are now."""
    tensors: list[Tensor] = []
    for part in parts_of(module):
        tensors += [t for t in part._parameters.values() if t is not None]
        tensors += [t for t in part._buffers.values() if t is not None]
    return tensors


class Watch:
    """Modules, and tensors beside them, as they are now. Notices in microseconds whether a part, a
    parameter or a buffer was replaced, moved or changed (edits through `.data` leave no trace), and
    keeps the memory of all tensors alive."""

    def __init__(self, modules: Sequence[nn.Module], tensors: Sequence[Tensor] = ()):
        parts = [part for module in modules for part in parts_of(module)]
        named = [d for part in parts for d in (part._modules, part._parameters, part._buffers)]
        self._full = [(entries, tuple(entries.values())) for entries in named if entries]
        self._empty = [entries for entries in named if not entries]
        self._tensors = [t for module in modules for t in tensors_of(module)] + list(tensors)
        self._marks = self._mark()
        self._memory = [tensor.detach() for tensor in self._tensors]

    def unchanged(self) -> bool:
        if any(map(len, self._empty)):
            return False
        for entries, before in self._full:
            if len(entries) != len(before) or not all(map(is_, entries.values(), before)):
                return False
        return self._marks == self._mark()

    def _mark(self) -> list[tuple[int, int]]:
        return [
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for tensor in self._tensors
        ]


def tensor_key(tensor: Tensor) -> tuple[int, int, torch.dtype, torch.device]:
    """Changes whenever a tensor is changed, moved or replaced; edits through `.data` leave no
    trace."""
    version = 0 if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), version, tensor.dtype, tensor.device)


def _hold(module: nn.Module) -> None:
    with _lock:
        count, parts = _held.get(module, (0, []))
        if not count:
            parts = _training(module)
            for part in parts:
                part.training = False
        _held[module] = (count + 1, parts)


def _let_go(module: nn.Module) -> None:
    with _lock:
        count, parts = _held[module]
        if count > 1:
            _held[module] = (count - 1, parts)
            return
        del _held[module]
        for part in parts:
            part.training = True
