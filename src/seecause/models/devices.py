"""Where a model computes: devices and dtypes by name, and models whose weights lie on several
devices, by accelerate's `device_map` or moved by hand.

Every part of a view of such a model computes where its weights are and returns its result to the
model's own device. So rows, keys, masks and caches are in one place, kernels run there, and methods
need no special case. The price: rows travel to each block that lies elsewhere, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from seecause.errors import BadOption, UnsupportedModel
from seecause.models.block import Block, is_silent, same

if TYPE_CHECKING:
    from seecause.models.view import Readout, VisionModel

Where = Callable[[], torch.device]
_WITH_WEIGHTS = (
    *("norm", "project", "q_norm", "k_norm", "sub_norm", "out_gate", "mix", "branch", "feed"),
)
_WITH_PLACES = ("rotate", "additive", "behind", "lanes")  # of rows and of tokens


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """A device that torch can use here, by name."""
    if device is None:
        return None
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError):
        expected = "cpu, or cuda or cuda:N where torch can use such a GPU"
        raise BadOption("device", str(device), expected) from None


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point dtype, by name."""
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise BadOption("dtype", dtype, "float32, bfloat16, float16 or float64")
    return kind


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first weight lies; refuses a module without weights."""
    weight = next(module.parameters(), None)
    if weight is None:
        reason = "it has no parameters, so there is no model in it"
        raise UnsupportedModel(type(module).__name__, reason)
    if weight.is_meta:
        reason = "its weights are not loaded: they are on the meta device"
        raise UnsupportedModel(type(module).__name__, reason, "load them first")
    return weight.device


def lie_apart(module: nn.Module) -> bool:
    """Whether weights lie on several devices; refuses those that are not in memory."""
    devices = {parameter.device for parameter in module.parameters()}
    if torch.device("meta") in devices:
        raise UnsupportedModel(
            type(module).__name__,
            "some of its weights are not in memory (offloaded to disk or a CPU, or not loaded)",
            "load it whole: onto one device, or with a device_map over devices that hold it",
        )
    return len(devices) > 1


class _Meeting(TorchFunctionMode):
    """In it, tensors of several devices meet at the weight among them, or else at the first."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if len({x.device for x in tensors}) > 1 and func not in (Tensor.to, Tensor.type_as):
            weights = (x for x in tensors if isinstance(x, nn.Parameter))
            there = next(weights, tensors[0]).device
            args, kwargs = _sent((args, kwargs), there)
        return func(*args, **kwargs)


def at_home(part: Callable[..., Any], home: Where, there: Where | None = None) -> Any:
    """`part` as a function of tensors on the device `home`, whose weights may lie elsewhere: all of
    them `there`, or wherever each of them is."""

    def run(*given: Any) -> Any:
        with _Meeting():
            return _sent(part(*(given if there is None else _sent(given, there()))), home())

    return run


def block_at_home(block: Block, home: Where, *, places: bool = True) -> Block:
    """A block that takes and returns tensors at `home`. Without `places`, its positions need no
    weights."""

    def there() -> torch.device:
        return next(block.owner.parameters()).device

    where = dict.fromkeys(_WITH_WEIGHTS, there) | dict.fromkeys(_WITH_PLACES if places else ())
    if is_silent(block):
        del where["project"]  # by which such a block is known
    parts = {name: getattr(block, name) for name in where}
    moved = {
        name: at_home(part, home, where[name])
        for name, part in parts.items()
        if part is not None and part is not same
    }
    return replace(block, **moved)


def gather_answers(model: VisionModel) -> None:
    """Make every part of a view return tensors on the model's own device. CUDA graphs are not
    recorded for such a model."""

    def home() -> torch.device:
        return model.device

    model.apart = True
    model.embed, model.native = (at_home(part, home) for part in (model.embed, model.native))
    model.facts = None if model.facts is None else at_home(model.facts, home)
    model.blocks = [block_at_home(block, home) for block in model.blocks]
    model.readout = _readout_at_home(model.readout, home)


def _readout_at_home(readout: Readout, home: Where) -> Readout:
    pool = readout.latent
    if pool is not None:
        parts = {name: at_home(getattr(pool, name), home) for name in ("query", "kv", "finish")}
        pool = replace(pool, **parts)
    norm, head = (at_home(part, home) for part in (readout.norm, readout.head))
    return replace(readout, norm=norm, head=head, latent=pool)


def _sent(values: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(device), values)
