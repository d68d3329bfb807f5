"""Runs under the conditions of the verified wrap, and the state of a module's weights.

Dropout makes maps random and autocast shifts them, both silently. `eval_mode` switches them off for
the time of a run and then restores what was set, so that a view can be made of a model that is
being trained, though not while another thread trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from operator import is_
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from seecause.errors import BadOption

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def eval_mode(
    modules: Sequence[nn.Module], device: torch.device, *, frozen: bool = False
) -> Iterator[None]:
    """Run in eval mode, without autocast and outside of inference mode; afterwards all flags are
    restored. With `frozen`, no parameter requires gradients: runs keep less, and parameters
    receive no gradient."""
    parts = [part for module in modules for part in parts_of(module)]
    training = [part for part in parts if part.training]
    learning = [
        w
        for part in (parts if frozen else ())
        for w in part._parameters.values()
        if w is not None and w.requires_grad and not w.is_inference()
    ]
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        _set(training, "training", False)
        stack.callback(_set, training, "training", True)
        _set(learning, "requires_grad", False)
        stack.callback(_set, learning, "requires_grad", True)
        yield


def _set(owners: Sequence[Any], flag: str, value: bool) -> None:
    for owner in owners:
        setattr(owner, flag, value)


def in_eval_mode(function: F) -> F:
    """Decorate `function(model, ...)` so that the model is frozen and in eval mode in it."""

    @wraps(function)
    def run(model: Any, *args: Any, **options: Any) -> Any:
        if not hasattr(model, "eval_mode"):
            expected = "a model returned by sc.load or sc.wrap(module)"
            raise BadOption("model", type(model).__name__, expected)
        with model.eval_mode(frozen=True):
            return function(model, *args, **options)

    return cast(F, run)


def check_eval_mode(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Refuse a model that would not compute what was verified."""
    if any(part.training for module in modules for part in parts_of(module)):
        raise BadOption(
            "training mode", True, "eval mode: dropout makes results random, so call module.eval()"
        )
    if torch.is_autocast_enabled(device.type):
        raise BadOption(
            "autocast",
            True,
            "none: it changes results. To compute in half precision load the model with"
            " dtype='bfloat16'",
        )


def parts_of(module: nn.Module) -> list[nn.Module]:
    """`list(module.modules())`, ten times as fast: every run needs it."""
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
    """Detects in microseconds whether a part, a parameter or a buffer of modules was replaced,
    moved or changed since the watch was made (edits through `.data` leave no trace). Keeps the
    memory of all tensors alive."""

    def __init__(self, modules: Sequence[nn.Module], tensors: Sequence[Tensor] = ()):
        parts = [part for module in modules for part in parts_of(module)]
        named = [d for part in parts for d in (part._modules, part._parameters, part._buffers)]
        self._full = [(entries, tuple(entries.values())) for entries in named if entries]
        self._empty = [entries for entries in named if not entries]
        self._tensors = [t for module in modules for t in tensors_of(module)] + list(tensors)
        self._marks = self._mark()
        self._memory = [tensor.detach() for tensor in self._tensors]

    def unchanged(self) -> bool:
        """Whether nothing has changed since the watch was made."""
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
    """A key that changes when a tensor is changed, moved or replaced (edits through `.data` leave
    no trace)."""
    version = 0 if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), version, tensor.dtype, tensor.device)
