"""T-Attr, transformer attribution (Chefer et al. CVPR 2021): attention weighed by its gradient and
its relevance.

Relevance R starts as one at the class logit and is handed down operator by operator; with the
probabilities A of block l,
    Abar_l = mean over heads of ReLU(dA_l * R_A_l)                            (eq. 13)
    C = (I + Abar_L) ... (I + Abar_1),   map = C[class, patches]              (eq. 14)
without normalising rows. `start` leaves out the first blocks (0 in the authors' notebooks, 1 in
their evaluation). The residual rule is applied per sample, where the authors' code sums over the
batch. Beyond the paper: a mean readout takes the mean of rows, a latent pool is one more attention
on top, LayerScale and rotations pass relevance on. Not done: what prefix tokens get is not shown,
and an MLP with an operator that has no rule is refused.

Inside `Rules` what flows back is relevance instead of gradient. Every operator that meets an
activation gets its rule (alpha = 1), whoever wrote the module around it:

    norm, activation, softmax,      R unchanged
    constant factor or summand
    linear, constant matrix         x+ (S W+) + x- (S W-),   S = R / (x+ W+ + x- W-)
    a @ b                           half to each: a * (S b') / 2,  b * (a' S) / 2,   S = R / (a @ b)
    mean                            in proportion to the values
    a * b (gated MLPs)              half to each
    a + b (residual)                shares a R / (a + b), then rescaled so that each SAMPLE's sums
                                    are split by |sum|
    choosing, cutting, joining      as a gradient would; a value used twice adds up what comes back

Values are those of the plain run. Constants are tensors without gradient, so parameters must be
frozen. Relevance can grow where a sum is near zero: use float32 or better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from seecause.attribution.gradients import differentiate, every_attention, over_images
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import explicit_run, walk_back
from seecause.errors import NotDefined
from seecause.models.block import Block
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.target import Score, Target

TINY = 1e-9
SUMS, PRODUCTS = {"add", "__add__", "__radd__"}, {"mul", "__mul__", "__rmul__"}
UNCHANGED = {
    "layer_norm", "rms_norm", "normalize", "gelu", "silu", "relu", "sigmoid", "tanh", "softmax",
    "dropout", "div", "__truediv__", *SUMS, *PRODUCTS,
}  # fmt: skip
MOVES = {
    "__get__", "__getitem__", "__len__", "size", "dim", "numel", "to", "type_as", "float",
    "double", "contiguous", "clone", "detach", "is_floating_point",
    "transpose", "permute", "movedim", "reshape", "view", "view_as", "flatten", "unflatten",
    "unbind", "chunk", "split", "cat", "stack", "squeeze",
    "unsqueeze", "expand", "repeat_interleave", "pad",
}  # fmt: skip


def _both_graphs(model: VisionModel, layout: TokenLayout) -> int:
    """Gradients first, then relevance, with what its rules hold."""
    return 3 * every_attention(model, layout)


@method("t-attr", forwards="2 + 2 backward", needs="attention, gradients, relevance")
@over_images(_both_graphs)
def t_attr(
    model: VisionModel, images: Tensor, target: Target, *, start: int = 0, score: Score = "logit"
) -> Maps:
    """Attention weighed by its gradient and its relevance, multiplied over blocks."""
    layout = model.check(images)
    plain = explicit_run(model, images, start=start)
    bound, (seed, *slopes) = differentiate(
        model, plain.logits, target, score, [plain.logits, *plain.probs], start=start
    )
    relevances = relevance(model, images, seed, start=start)
    steps = [
        (slope * own).relu().mean(dim=1) for slope, own in zip(slopes, relevances, strict=True)
    ]  # each [B, T, T]
    return Maps(walk_back(model, layout, steps)[:, layout.patches], bound)


def relevance(
    model: VisionModel, images: Tensor, seed: Tensor, *, start: int = 0
) -> tuple[Tensor, ...]:
    """Relevance of the probabilities, [B, H, T, T] each, from relevance `seed` [B, C] at the
    logits."""
    rules = Rules("t-attr")
    with rules:
        blocks = [_relevant(block, rules) for block in model.blocks]
        run = explicit_run(replace(model, blocks=blocks), images, start=start)
    return torch.autograd.grad(run.logits, run.probs, seed)


def _relevant(block: Block, rules: Rules) -> Block:
    """The same block; what only scales or turns its rows passes relevance on unchanged."""
    turned = ("norm", "q_norm", "k_norm", "sub_norm", "branch")
    fields: dict[str, Any] = {name: unchanged(getattr(block, name)) for name in turned}
    for name in ("project", "mix", "feed"):
        fields[name] = rules.inside(f"{block.name}.{name}", getattr(block, name))
    if block.rotate is not None:
        fields["rotate"] = unchanged(block.rotate)
    return Block(**{**vars(block), **fields})


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
            return _share(_linear(args[0], args[1].T), y, args[0])
        if name in ("matmul", "__matmul__"):
            a, b = args
            if both:
                return _share(_matmul(a, b), y, a, b)
            if a.requires_grad:
                return _share(_linear(a, b), y, a)
            return _share(_linear(b.mT, a.mT), y.mT, b.mT).mT
        if name == "mean" and isinstance(kwargs.get("dim"), int) and y.ndim < args[0].ndim:
            return _share(_mean(args[0], y, kwargs["dim"]), y, args[0])
        if both and name in (SUMS | PRODUCTS) and live[0].shape == live[1].shape == y.shape:
            return _share(_add(*live) if name in SUMS else _halves, y, *live)
        if not both and name in UNCHANGED and live[0].shape == y.shape:
            return _share(_whole, y, live[0])
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
        return _share(_whole, y, x)

    return run


def divide(relevance: Tensor, by: Tensor) -> Tensor:
    """relevance / by, and 0 where there is nothing to divide by."""
    safe = by + TINY
    return torch.where(by == 0, 0, relevance / safe.masked_fill(safe == 0, TINY))


Rule = Callable[[Tensor], tuple[Tensor, ...]]  # relevance of a value -> that of its inputs


class _Shared(Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, y: Tensor, *inputs: Tensor) -> Tensor:
        ctx.rule = rule
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> Any:
        return None, None, *ctx.rule(relevance)


def _share(rule: Rule, y: Tensor, *inputs: Tensor) -> Tensor:
    """The value y, whose relevance goes to the inputs by a rule."""
    return _Shared.apply(rule, y, *inputs)  # pyright: ignore[reportReturnType]


def _whole(relevance: Tensor) -> tuple[Tensor]:
    return (relevance,)


def _halves(relevance: Tensor) -> tuple[Tensor, Tensor]:
    return relevance / 2, relevance / 2


def _linear(x: Tensor, w: Tensor) -> Rule:
    """y = x @ w (+ bias, which takes no relevance)."""
    x = x.detach()

    def rule(relevance: Tensor) -> tuple[Tensor]:
        up, w_up, down, w_down = x.clamp(min=0), w.clamp(min=0), x.clamp(max=0), w.clamp(max=0)
        share = divide(relevance, up @ w_up + down @ w_down)
        return (up * (share @ w_up.mT) + down * (share @ w_down.mT),)

    return rule


def _matmul(a: Tensor, b: Tensor) -> Rule:
    a, b = a.detach(), b.detach()

    def rule(relevance: Tensor) -> tuple[Tensor, Tensor]:
        share = divide(relevance, a @ b)
        return a * (share @ b.mT) / 2, b * (a.mT @ share) / 2

    return rule


def _mean(x: Tensor, y: Tensor, dim: int) -> Rule:
    x = x.detach()

    def rule(relevance: Tensor) -> tuple[Tensor]:
        return (x * divide(relevance, y * x.shape[dim]).unsqueeze(dim),)

    return rule


def _add(a: Tensor, b: Tensor) -> Rule:
    a, b = a.detach(), b.detach()

    def rule(relevance: Tensor) -> tuple[Tensor, Tensor]:
        share = divide(relevance, a + b)
        parts = [a * share, b * share]
        sums, whole = [_sample_sum(part) for part in parts], _sample_sum(relevance)
        total = sums[0].abs() + sums[1].abs()
        first, second = (
            part * divide(divide(own.abs(), total) * whole, own)
            for part, own in zip(parts, sums, strict=True)
        )
        return first, second

    return rule


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
