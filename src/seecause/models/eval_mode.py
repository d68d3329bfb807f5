"""Runs under the conditions of the verified wrap, and a key of a module's weights.

Dropout makes maps random and autocast shifts them, both silently. `eval_mode` switches them off for
the time of a run and then restores what was set, so that a view can be made of a model that is
being trained, though not while another thread trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
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
    parts = parts_of(modules)
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
    if any(part.training for part in parts_of(modules)):
        raise BadOption(
            "training mode", True, "eval mode: dropout makes results random, so call module.eval()"
        )
    if torch.is_autocast_enabled(device.type):
        raise BadOption(
            "autocast", True, "none: to compute in half precision, load with dtype='bfloat16'"
        )


def parts_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules inside of some modules, and these themselves."""
    return [part for module in modules for part in module.modules()]


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """All parameters and buffers of some modules, as they are now."""
    tensors: list[Tensor | None] = []
    for part in parts_of(modules):
        tensors += part._parameters.values()
        tensors += part._buffers.values()
    return [tensor for tensor in tensors if tensor is not None]


def weights_key(tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """A key that differs when a tensor was changed, moved or replaced. It takes 0.2 ms for a
    ViT-B. Edits through `.data` leave no trace."""
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)
