"""Layer-wise relevance propagation as a backward pass: inside `Rules`, what flows back is relevance
instead of gradient.

Every operator that meets an activation gets the rule of Chefer et al. (CVPR 2021, alpha = 1),
whoever wrote the module around it:

    norm, activation, softmax, constant factor or summand    R unchanged
    linear, product with a constant matrix                   x+ (S W+) + x- (S W-),   S = R / (x+ W+
    + x- W-)     (one denominator)
    a @ b                                                    half to each: a * (S b') / 2,  b * (a'
    S) / 2,   S = R / (a @ b)
    mean                                                     in proportion to the values
    a * b (gated MLPs)                                       half to each
    a + b (residual)                                         shares a R / (a + b), then rescaled so
    that each SAMPLE's sums are split by |sum|
    choosing, cutting, joining, moving                       as a gradient would; a value used twice
    adds up what comes back

Values are those of the plain run. An operator without a rule is refused by name. Constants are
tensors without gradient, so parameters must be frozen. Relevance can grow where a sum is near zero:
use float32 or better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from seecause.errors import NotDefined

TINY = 1e-9
SUMS, PRODUCTS = {"add", "__add__", "__radd__"}, {"mul", "__mul__", "__rmul__"}
UNCHANGED = {
    "layer_norm",
    "rms_norm",
    "gelu",
    "silu",
    "relu",
    "sigmoid",
    "tanh",
    "softmax",
    "normalize",
    "dropout",
    "div",
    "__truediv__",
    *SUMS,
    *PRODUCTS,
}
MOVES = {
    "__get__", "__getitem__", "__len__", "size", "dim", "numel", "to", "type_as", "float",
    "double", "contiguous", "clone", "detach", "is_floating_point",
    "transpose", "permute", "movedim", "reshape", "view", "view_as", "flatten", "unflatten",
    "unbind", "chunk", "split", "cat", "stack", "squeeze",
    "unsqueeze", "expand", "repeat_interleave", "pad",
}  # fmt: skip


class Rules(TorchFunctionMode):
    """Inside the block, operators on tensors that require a gradient record a rule of relevance.
    `method` is named when one has none."""

    def __init__(self, method: str):
        super().__init__()
        self.method, self.part = method, "readout"

    def inside(self, part: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, named in complaints about its operators."""

        def run(*args: Any) -> Any:
            outside, self.part = self.part, part
            result = step(*args)
            self.part = outside
            return result

        return run

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        live = [x for x in _tensors([*args, *kwargs.values()]) if x.requires_grad]
        if not live or not torch.is_grad_enabled() or name in MOVES:
            return func(*args, **kwargs)
        with torch.no_grad():
            y = func(*args, **kwargs)
        both = len(live) == 2
        if name == "linear":
            return _Linear.apply(args[0], args[1].T, y)
        if name in ("matmul", "__matmul__"):
            a, b = args
            return (
                _Matmul.apply(a, b, y)
                if both
                else (
                    _Linear.apply(a, b, y)
                    if a.requires_grad
                    else _Linear.apply(b.mT, a.mT, y.mT).mT
                )
            )
        if name == "mean" and isinstance(kwargs.get("dim"), int) and y.ndim < args[0].ndim:
            return _Mean.apply(args[0], y, kwargs["dim"])
        if both and name in (SUMS | PRODUCTS) and live[0].shape == live[1].shape == y.shape:
            return (_Add if name in SUMS else _Halves).apply(*live, y)
        if not both and name in UNCHANGED and live[0].shape == y.shape:
            return _Unchanged.apply(live[0], y)
        shapes = ", ".join(str(list(x.shape)) for x in live)
        raise NotDefined(
            self.method,
            f"relevance has no rule for `{name}` of {shapes} in {self.part}",
            "Use a method without relevance, such as gae",
        )


def unchanged(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`step`, a map of x to its own shape, with relevance passed on as it is."""

    def run(x: Tensor, *others: Any) -> Tensor:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            y = step(x, *others)
        return _Unchanged.apply(x, y)

    return run


def divide(relevance: Tensor, by: Tensor) -> Tensor:
    """relevance / by, and 0 where there is nothing to divide by."""
    safe = by + TINY
    return torch.where(by == 0, 0, relevance / safe.masked_fill(safe == 0, TINY))


class _Unchanged(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> Any:
        return relevance, None


class _Linear(Function):
    """y = x @ w (+ bias, which takes no relevance)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> Any:
        x, w = ctx.saved_tensors
        up, w_up, down, w_down = x.clamp(min=0), w.clamp(min=0), x.clamp(max=0), w.clamp(max=0)
        share = divide(relevance, up @ w_up + down @ w_down)
        return up * (share @ w_up.mT) + down * (share @ w_down.mT), None, None


class _Matmul(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> Any:
        a, b = ctx.saved_tensors
        share = divide(relevance, a @ b)
        return a * (share @ b.mT) / 2, b * (a.mT @ share) / 2, None


class _Mean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.dim = dim
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return x * divide(relevance, y * x.shape[ctx.dim]).unsqueeze(ctx.dim), None, None


class _Halves(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> Any:
        return relevance / 2, relevance / 2, None


class _Add(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> Any:
        a, b = ctx.saved_tensors
        share = divide(relevance, a + b)
        first, second = a * share, b * share
        first_sum, second_sum, whole = (_sample_sum(x) for x in (first, second, relevance))
        total = first_sum.abs() + second_sum.abs()
        return (
            first * divide(divide(first_sum.abs(), total) * whole, first_sum),
            second * divide(divide(second_sum.abs(), total) * whole, second_sum),
            None,
        )


def _sample_sum(x: Tensor) -> Tensor:
    return x.sum(dim=tuple(range(1, x.ndim)), keepdim=True)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among the arguments, and in lists among them."""
    return [
        x
        for value in values
        for x in (value if isinstance(value, list | tuple) else [value])
        if isinstance(x, Tensor)
    ]
