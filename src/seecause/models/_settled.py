"""Runs as the view was verified: eval mode, the model's own dtype, gradients possible.

Dropout makes maps random and autocast shifts them, both silently. `settled` undoes them for the
time of a run and gives them back, so that a view may be made of a model that is being trained; what
runs outside of it asks `need_settled` first.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from operator import is_
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from seecause.errors import BadOption

F = TypeVar("F", bound=Callable[..., Any])
_lock = threading.Lock()
# by flag and module: how many runs hold it down, and which parts had it up before
_Holds = weakref.WeakKeyDictionary[nn.Module, tuple[int, list[Any]]]
_held: dict[str, _Holds] = {"training": _Holds(), "requires_grad": _Holds()}
# by flag and part (its id: the lists above keep it alive): how many held modules share it
_shared: dict[str, Counter[int]] = {"training": Counter(), "requires_grad": Counter()}


@contextmanager
def settled(
    modules: Sequence[nn.Module], device: torch.device, *, frozen: bool = False
) -> Iterator[None]:
    """Eval mode, without autocast and outside of inference mode; what the caller had set comes
    back. Several threads may share a module. With `frozen`, no parameter takes part in gradients:
    runs keep less, and nothing of them reaches a parameter's own."""
    with ExitStack() as stack:
        for module in modules:
            for flag in ("training", "requires_grad") if frozen else ("training",):
                _hold(module, flag)
                stack.callback(_let_go, module, flag)
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


def settles(function: F) -> F:
    """`function(model, ...)` with the model settled and frozen."""

    @wraps(function)
    def run(model: Any, *args: Any, **options: Any) -> Any:
        if not hasattr(model, "settled"):
            raise BadOption("model", type(model).__name__, "what sc.load or sc.wrap(module) gives")
        with model.settled(frozen=True):
            return function(model, *args, **options)

    return cast(F, run)


def need_settled(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Refuse a model that would not compute what was verified."""
    held = _held["training"]
    if any(module not in held and _raised(module, "training") for module in modules):
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


def _raised(module: nn.Module, flag: str, held: Container[int] = ()) -> list[Any]:
    """Modules that are in training mode, or parameters that require gradients; also those that
    would be, were they not `held`."""
    parts = parts_of(module)
    if flag == "training":
        return [part for part in parts if part.training or id(part) in held]
    weights = [w for part in parts for w in part._parameters.values() if w is not None]
    learning = [w for w in weights if w.requires_grad or id(w) in held]
    # each once, however many layers it is tied to; those of inference mode are fixed for ever
    return list({id(w): w for w in learning if not w.is_inference()}.values())


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


def _hold(module: nn.Module, flag: str) -> None:
    with _lock:
        count, parts = _held[flag].get(module, (0, []))
        if not count:
            parts = _raised(module, flag, _shared[flag])
            _shared[flag].update(map(id, parts))
            for part in parts:
                setattr(part, flag, False)
        _held[flag][module] = (count + 1, parts)


def _let_go(module: nn.Module, flag: str) -> None:
    with _lock:
        count, parts = _held[flag][module]
        if count > 1:
            _held[flag][module] = (count - 1, parts)
            return
        del _held[flag][module]
        for part in parts:
            _shared[flag][id(part)] -= 1
            if not _shared[flag][id(part)]:
                del _shared[flag][id(part)]
                setattr(part, flag, True)
