"""Attention as the explanation, from the last block's row to gradient-weighted products of all.

A is a block's attention, mean_h a mean over its heads, dA = d score / dA, L the last block. A map
is read from the rows that the prediction is read from: the class token's, written [class] below, or
the mean of an averaging readout's. A latent pool is one more attention on top, without an identity
beside it: its query is no token. Values and MLPs have an effect through gradients only, or none at
all. Rollout and raw attention know no class: `target` is recorded, not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from seecause.attribution.gradients import (
    bind_target,
    differentiate,
    every_attention,
    one_block,
    over_copies,
    over_images,
)
from seecause.attribution.registry import Maps, method
from seecause.engine.chunks import plain_logits, run_in_chunks
from seecause.engine.trace import (
    attention_probs,
    enter,
    explicit_run,
    n_attentions,
    pool_logits,
    pool_probabilities,
    probabilities,
    read_rows,
    walk_back,
    weigh,
)
from seecause.engine.walk import Step, walk
from seecause.errors import NotDefined
from seecause.models.block import Block
from seecause.models.view import VisionModel
from seecause.options import Count, Positive
from seecause.target import Score, Target


@method("raw-attention", forwards="1", needs="attention", class_specific=False)
@over_images(one_block)
@torch.no_grad()
def raw_attention(model: VisionModel, images: Tensor, target: Target) -> Maps:
    """Mean attention of the last block from the tokens that are read out.

    map = mean_h A^L[class, patches]: the control every attention method must beat.
    """
    (probs,) = explicit_run(model, images, start=n_attentions(model) - 1).probs  # [B, H, T, T]
    return Maps(_read(model, images, probs.mean(dim=1)), target)


@method("rollout", forwards="1", needs="attention", class_specific=False)
@over_images(one_block)
@torch.no_grad()
def rollout(model: VisionModel, images: Tensor, target: Target, *, start: int = 0) -> Maps:
    """The product of the attention matrices of all blocks; values are ignored.

    Information that reaches the class token if every block mixed tokens by its mean attention and
    passed half of them on unchanged (Abnar & Zuidema 2020, eq. 1):

        A~ = (mean_h A + I) / 2,   R = A~_L ... A~_start,   map = R[class, patches]
    """
    reach: Tensor | None = (
        None  # [B, T, T], one block's matrix at a time; of a latent pool [B, Q, T]
    )
    for layer, probs in enumerate(attention_probs(model, images, start=start), start):
        step = probs.mean(dim=1)
        if layer < model.n_layers:
            step = (step + torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)) / 2
        reach = step if reach is None else step @ reach
    assert reach is not None
    return Maps(_read(model, images, reach), target)


@method("attn-grad", forwards="1, backward through the last block", needs="attention, gradients")
@over_images(one_block)
def attn_grad(
    model: VisionModel, images: Tensor, target: Target, *, score: Score = "logit"
) -> Maps:
    """The last block's attention, weighted by its gradient.

    map = mean_h ReLU(dA^L * A^L)[class, patches], the CLIP form of Chefer, Gur & Wolf (ICCV 2021).
    Backward stops there, so it costs little more than a forward; mixing in earlier blocks is
    ignored (see `gae`).
    """
    bound, ((probs, slope),) = with_slopes(model, images, target, score, n_attentions(model) - 1)
    return Maps(_read(model, images, (slope * probs).relu().mean(dim=1)), bound)


@method("gae", forwards="1 + 1 backward", needs="attention, gradients")
@over_images(every_attention)
def gae(
    model: VisionModel, images: Tensor, target: Target, *, start: int = 0, score: Score = "logit"
) -> Maps:
    """Gradient-weighted attention of all blocks, multiplied through.

    Generic attention explainability (Chefer, Gur & Wolf, ICCV 2021, eq. 5-6) for self-attention:

        R = I;   for every block:  R <- R + mean_h ReLU(dA * A) R;   map = R[class, patches]

    No LRP (see `t-attr`), no row normalisation, and negative evidence is cut off. `start` leaves
    out earlier blocks.
    """
    bound, pairs = with_slopes(model, images, target, score, start)
    steps = [(slope * probs).relu().mean(dim=1) for probs, slope in pairs]  # [B, T, T]
    return Maps(_walked(model, images, steps), bound)


def with_slopes(
    model: VisionModel, images: Tensor, target: Target, score: Score, start: int
) -> tuple[Target, list[tuple[Tensor, Tensor]]]:
    """The bound target, and the probabilities [B, H, T, T] of each attention from number `start`
    on, with the gradient of the score."""
    run = explicit_run(model, images, start=start)
    bound, slopes = differentiate(model, run.logits, target, score, run.probs, start=start)
    return bound, [(probs.detach(), own) for probs, own in zip(run.probs, slopes, strict=True)]


@method("tam", forwards="steps + 1, backward through the last block", needs="attention, gradients")
@over_images(one_block)
def tam(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: int = 0,
    steps: Count = 20,
    score: Score = "logit",
) -> Maps:
    """Attention walked back from the readout, times integrated gradients of the last attention.

    Transition attention maps (Yuan et al. 2021): a Markov chain that starts at the readout.

        state = mean_h A^L[class];   for l = L-1 .. start:  state <- state + state mean_h A^l
        map = (state * mean_h ReLU(mean_k dA^L(alpha_k x))[class])[patches]

    `start` = 0 as in the authors' deletion script; their tutorials use 4 of 12.
    """
    last, layout = n_attentions(model) - 1, model.check(images)
    wide = torch.promote_types(images.dtype, torch.float32)  # the dtype of probabilities
    reach = torch.eye(layout.tokens, dtype=wide, device=images.device)
    for layer, probs in enumerate(attention_probs(model, images, start=start), start):
        step = probs.mean(dim=1) @ reach  # [B, T, T]
        reach = step if layer == last else reach + step
    target = bind_target(model, images, target)
    weight = mean_slope(model, images, target, steps, score)
    return Maps(_read(model, images, reach) * _read(model, images, weight), target)


@method("bt", forwards="steps + 1 + 1 backward", needs="attention, gradients")
@over_images(every_attention)
def bt(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: int | None = None,
    steps: Count = 20,
    score: Score = "logit",
) -> Maps:
    """Attention with heads weighed by their gradient, times integrated gradients of the last
    attention.

    Bidirectional transformer attribution (Chen et al. 2023, "Beyond intuition", head-wise), the
    guide of MDA. Heads are weighted by the agreement of their attention and its gradient:

        I_h = mean |A_h^T dA_h|, scaled to sum to one;   R <- R + (sum_h I_h A_h) R from `start` on
        map = (R * mean_h ReLU(mean_k dA^L(alpha_k x)))[class, patches]

    `start` = a third of the depth (4 of 12 in MDA's code). Not done: the token-wise form, which
    also propagates through norms and projections.
    """
    start = model.n_layers // 3 if start is None else start
    bound, pairs = with_slopes(model, images, target, score, start)
    reach = _walked(model, images, [by_head(*pair) for pair in pairs])
    weight = mean_slope(model, images, bound, steps, score)
    return Maps(reach * _read(model, images, weight), bound)


def by_head(probs: Tensor, slope: Tensor) -> Tensor:
    """Attention [B, H, R, T] and its gradient -> the mean over heads by their agreement, [B, R,
    T]."""
    agree = (probs.transpose(-1, -2) @ slope).abs().mean(dim=(-1, -2))  # [B, H]
    share = agree / agree.sum(dim=1, keepdim=True).clamp_min(torch.finfo(agree.dtype).tiny)
    return (share[..., None, None] * probs).sum(dim=1)


def mean_slope(
    model: VisionModel, images: Tensor, target: Target, steps: int, score: Score
) -> Tensor:
    """mean_h ReLU(mean_k dA^L(alpha_k x)) [B, T, T], alpha = linspace(0, 1, steps). Both ends are
    used, and images are scaled towards 0 in normalised space, as in the code of TAM's authors."""
    alphas = torch.linspace(0, 1, steps, dtype=images.dtype, device=images.device)
    last = n_attentions(model) - 1

    def scaled(a: int, b: int) -> Tensor:
        return images[:, None] * alphas[a:b, None, None, None]  # [B, n, 3, H, W]

    def slope_at(made: Tensor, aims: Target) -> Tensor:
        return with_slopes(model, made, aims, score, last)[1][0][1]

    equal = torch.full_like(alphas, 1 / steps, dtype=torch.float64)
    each = len(images) * one_block(model, model.check(images))
    slope = over_copies(scaled, equal, target, slope_at, bytes_each=each)  # [B, H, T, T]
    return slope.relu().mean(dim=1)


@method(
    "legrad",
    forwards="1, backward through each block and readout by itself",
    needs="attention, gradients",
)
@over_images(one_block)
def legrad(model: VisionModel, images: Tensor, target: Target, *, score: Score = "logit") -> Maps:
    """Positive gradient of every block's own readout with respect to its attention.

    LeGrad (Bousselham et al., ICCV 2025), s^l the score of the readout applied to block l's output:

        map = mean_l E^l[patches],   E^l = mean over heads and rows of ReLU(d s^l / dA^l)

    Every block is read by the model's own final norm, pool and head; the authors' CLIP code reads
    the mean of all tokens instead of the class token. With a latent pool A^l is the pool's
    attention to block l's output, as in the paper. s^l depends on A^l through block l alone, so
    nothing is held but one block.
    """
    target, layout = bind_target(model, images, target), model.check(images)
    total = images.new_zeros(len(images), layout.tokens)
    for step in walk(model, model.embed(images), model.at(images)):
        step.h = step.h.detach().requires_grad_()
        probs, logits = _read_after(model, step)
        _, (slope,) = differentiate(model, logits, target, score, [probs])  # [B, H, T, T]
        total = total + slope.relu().mean(dim=(1, 2))
    return Maps(total[:, layout.patches] / model.n_layers, target)


def _read_after(model: VisionModel, step: Step) -> tuple[Tensor, Tensor]:
    """The probabilities that explain a block's output, and the logits read from it."""
    layout = step.at.layout
    if model.readout.latent is None:
        probs = probabilities(step)
        step.o = weigh(probs, step.v)
        return probs, model.readout(step.out, layout)
    probs, v = pool_probabilities(model, step.out, layout)
    return probs, pool_logits(model, probs, v)


def _walked(model: VisionModel, images: Tensor, steps: list[Tensor]) -> Tensor:
    """The entries of patches [B, N] in the row of `walk_back`."""
    layout = model.check(images)
    return walk_back(model, layout, steps)[:, layout.patches]


def _read(model: VisionModel, images: Tensor, attention: Tensor) -> Tensor:
    """The entries of patches [B, N] in the row of attention [B, T, T] that the readout uses."""
    layout = model.check(images)
    return read_rows(model, layout, attention)[:, layout.patches]


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


@method("t-attr", forwards="2 + 2 backward", needs="attention, gradients, relevance")
@over_images(every_attention, times=3)  # gradients, then relevance with what its rules hold
def t_attr(
    model: VisionModel, images: Tensor, target: Target, *, start: int = 0, score: Score = "logit"
) -> Maps:
    """Attention weighed by its gradient and its relevance, multiplied over blocks.

    T-Attr, transformer attribution (Chefer et al., CVPR 2021).

    Relevance R starts as one at the class logit and is handed down operator by operator; with the
    probabilities A of block l,
        Abar_l = mean over heads of ReLU(dA_l * R_A_l)                            (eq. 13)
        C = (I + Abar_L) ... (I + Abar_1),   map = C[class, patches]              (eq. 14)
    without normalising rows. `start` leaves out the first blocks (0 in the authors' notebooks, 1 in
    their evaluation). The residual rule is applied per sample, where the authors' code sums over
    the batch. Beyond the paper: a mean readout takes the mean of rows, a latent pool is one more
    attention on top, LayerScale and rotations pass relevance on. Not done: relevance of prefix
    tokens is not shown, and an MLP with an operator that has no rule is refused.

    Inside `Rules` what flows back is relevance instead of gradient. Every operator on an
    activation has a rule (alpha = 1), whatever module calls it:

        norm, activation, softmax,      R unchanged
        constant factor or summand
        linear, constant matrix         x+ (S W+) + x- (S W-),   S = R / (x+ W+ + x- W-)
        a @ b                           half to each: a * (S b') / 2,  b * (a' S) / 2,
                                        S = R / (a @ b)
        mean                            in proportion to the values
        a * b (gated MLPs)              half to each
        a + b (residual)                shares a R / (a + b), then rescaled so that each
                                        sample's sums are split by |sum|
        choosing, cutting, joining      as a gradient would; a value used twice adds up
                                        what comes back

    Values are those of the plain run. Constants are tensors without gradient, so parameters must be
    frozen. Relevance can grow where a sum is near zero: use float32 or better.
    """
    plain = explicit_run(model, images, start=start)
    bound, (seed, *slopes) = differentiate(
        model, plain.logits, target, score, [plain.logits, *plain.probs], start=start
    )
    relevances = relevance(model, images, seed, start=start)
    steps = [
        (slope * own).relu().mean(dim=1) for slope, own in zip(slopes, relevances, strict=True)
    ]  # each [B, T, T]
    return Maps(_walked(model, images, steps), bound)


def relevance(
    model: VisionModel, images: Tensor, seed: Tensor, *, start: int = 0
) -> tuple[Tensor, ...]:
    """Relevance of the probabilities, [B, H, T, T] each, from relevance `seed` [B, C] at the
    logits."""
    with Rules():
        blocks = [_relevant(block) for block in model.blocks]
        run = explicit_run(replace(model, blocks=blocks), images, start=start)
    return torch.autograd.grad(run.logits, run.probs, seed)


def _relevant(block: Block) -> Block:
    """The block with relevance: parts that only scale or rotate its rows pass it on unchanged."""
    turned = ("norm", "q_norm", "k_norm", "sub_norm", "branch")
    fields: dict[str, Any] = {name: unchanged(getattr(block, name)) for name in turned}
    if block.rotate is not None:
        fields["rotate"] = unchanged(block.rotate)
    return replace(block, **fields)


class Rules(TorchFunctionMode):
    """Inside this context, operators on tensors that require a gradient record a rule of relevance;
    an operator without one is an error."""

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
            return _share(partial(_linear, args[0], args[1].T), y, args[0])
        if name in ("matmul", "__matmul__"):
            a, b = args
            if both:
                return _share(partial(_matmul, a, b), y, a, b)
            if a.requires_grad:
                return _share(partial(_linear, a, b), y, a)
            return _share(partial(_linear, b.mT, a.mT), y.mT, b.mT).mT
        if name == "mean" and isinstance(kwargs.get("dim"), int) and y.ndim < args[0].ndim:
            return _share(partial(_mean, args[0], y, kwargs["dim"]), y, args[0])
        if both and name in (SUMS | PRODUCTS) and live[0].shape == live[1].shape == y.shape:
            return _share(partial(_add, *live) if name in SUMS else _halves, y, *live)
        if not both and name in UNCHANGED and live[0].shape == y.shape:
            return _share(_whole, y, live[0])
        shapes = ", ".join(str(list(x.shape)) for x in live)
        raise NotDefined(
            "t-attr",
            f"relevance has no rule for `{name}` of {shapes}",
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
    """relevance / by, and 0 where `by` is 0."""
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


def _linear(x: Tensor, w: Tensor, relevance: Tensor) -> tuple[Tensor]:
    """y = x @ w (+ bias, which takes no relevance)."""
    up, w_up, down, w_down = x.clamp(min=0), w.clamp(min=0), x.clamp(max=0), w.clamp(max=0)
    share = divide(relevance, up @ w_up + down @ w_down)
    return (up * (share @ w_up.mT) + down * (share @ w_down.mT),)


def _matmul(a: Tensor, b: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    share = divide(relevance, a @ b)
    return a * (share @ b.mT) / 2, b * (a.mT @ share) / 2


def _mean(x: Tensor, y: Tensor, dim: int, relevance: Tensor) -> tuple[Tensor]:
    return (x * divide(relevance, y * x.shape[dim]).unsqueeze(dim),)


def _add(a: Tensor, b: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    share = divide(relevance, a + b)
    parts = [a * share, b * share]
    sums, whole = [_sample_sum(part) for part in parts], _sample_sum(relevance)
    total = sums[0].abs() + sums[1].abs()
    first, second = (
        part * divide(divide(own.abs(), total) * whole, own)
        for part, own in zip(parts, sums, strict=True)
    )
    return first, second


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


@method("atman", forwards="N + 1", needs="attention", signed=True)
@torch.no_grad()
def atman(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    factor: Positive = 0.1,
    kappa: float = 0.6,
    score: Score = "logprob",
) -> Maps:
    """The drop of the class score when the attention to a patch is reduced in every block.

    AtMan (Deiseroth et al. 2023): for patch i the attention of all heads and rows towards it is
    multiplied by a factor f before rows are normalised (log f is added to the scores); with the
    class log-probability,

        A_i = log p(x) - log p(x | i suppressed)

    Patches whose embedding (position included) is like i's are suppressed too, less so the less
    they are alike:

        f_ij = (1 - f) (1 - cos_ij) + f   where cos_ij >= kappa and cos_ij >= 0,   else 1

    A `kappa` above 1 suppresses i alone. The authors multiply scores less their row's minimum
    instead, which depends on the range of each row. No gradient is used. The patch is not
    removed: its token is still computed, only attention to it is reduced.
    """
    layout = model.check(images)
    h0, at = enter(model, images)
    n = layout.n_patches
    factors = neighbours(h0[:, layout.patches], factor, kappa=kappa)  # [B, N, N]

    def run_chunk(a: int, b: int) -> Tensor:
        item = torch.arange(a, b, device=images.device)  # of B * N
        image, patch = item // n, item % n
        columns = F.pad(factors[image, patch], (layout.prefix, 0), value=1)[:, None, None]
        steps = walk(model, h0[image], at.of(image))
        for step in steps:
            down = columns.log().to(step.q.dtype)  # [m, 1, 1, T]
            step.bias = down if step.bias is None else down + step.bias
        return model.readout(steps.h, layout)

    each = model.forward_bytes(layout)
    logits = run_in_chunks(run_chunk, len(images) * n, each, images.device, what="patches")
    plain = plain_logits(model, images)
    bound = target.bind(plain)
    lost = bound.score(logits.unflatten(0, (-1, n)), score)  # [B, N]
    return Maps(bound.score(plain, score)[:, None] - lost, bound)


def neighbours(tokens: Tensor, factor: float, *, kappa: float) -> Tensor:
    """Factors [B, N, N] of the attention towards each patch when patch i (row i) is suppressed,
    from tokens [B, N, D]."""
    unit = F.normalize(tokens, dim=-1)
    own = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
    alike = (unit @ unit.transpose(1, 2)).masked_fill(own, 1)
    near = own | (alike >= max(kappa, 0))
    return torch.where(near, (1 - factor) * (1 - alike) + factor, 1)
