"""Gradient methods, and their common functions.

Gradients are taken with respect to activations and pixels, never parameters. A run with a graph
holds the activations of every block, so it is done on as many images at a time as memory allows.

Input x gradient (Shrikumar et al. 2016) of the tokens that enter blocks:

    r_j = sum_c x_jc g_jc,   g = d score / dx

is a linear estimate of what is lost when the input j becomes 0. Sums are complete only where the
network is linear or its gradients are made to balance (Libra). The score is the probability for
classifiers and the logit for cosine heads (CLIP), as in the presets of LibraGrad's authors.

Integrated gradients and SmoothGrad average gradients of pixels over copies of the image; pixels are
summed over colours and patches. Grad-CAM (Selvaraju et al. 2017) weighs activations by their mean
gradient; libraries scale its maps to 0..1, this package does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce, wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, one_hot
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from seecause.attribution.registry import EVERY_VIEW, BlankLike, Maps, Run, join, method, size_of
from seecause.engine.chunks import fit, in_chunks, plain_logits
from seecause.engine.trace import blank_image, need_gradients, probabilities, record
from seecause.engine.walk import walk
from seecause.errors import BadOption, NotDefined
from seecause.models.base import ImageModel
from seecause.models.block import TokenLayout, pixel_cells
from seecause.models.parts import CosineHead
from seecause.models.view import VisionModel
from seecause.options import Count, NotNegative
from seecause.target import Score, Target


def over_images(
    bytes_each: Callable[[Any, TokenLayout], int], *, times: float = 1
) -> Callable[[Run], Run]:
    """Call a method, under gradients, on as many images at a time as fit, given what one image
    holds; its maps come back without a graph."""

    def decorate(run: Run) -> Run:
        @wraps(run)
        @torch.enable_grad()
        def by_chunks(model: ImageModel, images: Tensor, target: Target, **options: object) -> Maps:
            def run_chunk(a: int, b: int) -> Maps:
                return run(model, images[a:b].detach(), target.take(slice(a, b)), **options)

            each = int(times * bytes_each(model, model.check(images)))
            size = fit(len(images), each, images.device)
            return join(list(in_chunks(run_chunk, len(images), size, what="images")))

        return by_chunks

    return decorate


def whole_graph(model: ImageModel, layout: TokenLayout) -> int:
    """Bytes of a graph through the whole model, with fused attention."""
    depth = model.n_layers if isinstance(model, VisionModel) else 15
    return (depth + 1) * model.forward_bytes(layout)


def every_attention(model: VisionModel, layout: TokenLayout) -> int:
    """Bytes of a graph through the whole model, with explicit attention."""
    return whole_graph(model, layout) + model.n_layers * one_attention(model, layout)


def one_block(model: VisionModel, layout: TokenLayout) -> int:
    """Bytes of a graph through one block, with explicit attention."""
    return 2 * model.forward_bytes(layout) + one_attention(model, layout)


def one_attention(model: VisionModel, layout: TokenLayout) -> int:
    """Bytes of scores, probabilities and the gradients of both, in float32 or better."""
    wide = max(4, torch.finfo(model.dtype).bits // 8)
    return 4 * model.blocks[0].heads * layout.tokens**2 * wide


def differentiate(
    model: ImageModel,
    logits: Tensor,
    target: Target,
    score: Score,
    of: Sequence[Tensor],
    *,
    start: int = 0,
) -> tuple[Target, tuple[Tensor, ...]]:
    """The target, with the predicted class filled in, and the gradients of its score with respect
    to tensors `of` the same run, which lie behind the input of block `start`."""
    need_gradients(model, "a gradient")  # a residual connection may hide a detached layer
    bound = target.bind(logits.detach())
    total = bound.score(logits, score).sum()  # images do not see each other
    gradients: tuple[Tensor | None, ...] = (None,)
    if all(tensor.requires_grad for tensor in (total, *of)):
        gradients = torch.autograd.grad(total, list(of), allow_unused=True)
    if any(gradient is None for gradient in gradients):
        raise NotDefined(
            "a gradient", f"none passes {model.name}, as in quantised layers",
            "Use method='caap', which takes no gradient",
        )  # fmt: skip
    return bound, tuple(gradient for gradient in gradients if gradient is not None)


def bind_target(model: ImageModel, images: Tensor, target: Target) -> Target:
    """Fill in the predicted class by a plain run, for methods that make none."""
    return target.bind(plain_logits(model, images)) if target.open else target


def on_cells(values: Tensor, layout: TokenLayout) -> Tensor:
    """Features [B, h, w] -> means over cells [B, N]; where features are larger than cells, each
    cell has the value of those it lies in."""
    return adaptive_avg_pool2d(values[:, None], layout.grid).flatten(1)


def over_copies(
    copies: Callable[[int, int], Tensor],
    weights: Tensor,
    target: Target,
    slope: Callable[[Tensor, Target], Tensor],
    *,
    bytes_each: int,
) -> Tensor:
    """sum_k weights_k * slope(copy k) for every image [B, ...], on as many copies at a time as fit.

    `copies(a, b)` makes copies a to b of every image, [B, b - a, 3, H, W]; `slope` gets them in one
    batch, with the target of each.
    """

    def run_chunk(a: int, b: int) -> Tensor:
        made = copies(a, b)
        rows = torch.arange(len(made), device=made.device).repeat_interleave(b - a)
        slopes = slope(made.flatten(0, 1), target.take(rows)).unflatten(0, (len(made), b - a))
        slopes = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
        return torch.einsum("n,bn...->b...", weights[a:b].to(slopes), slopes)

    together = fit(len(weights), bytes_each, weights.device)
    return reduce(torch.add, in_chunks(run_chunk, len(weights), together, what="copies"))


def patch_sums(model: ImageModel, pixels: Tensor) -> Tensor:
    """Pixel maps [B, H, W] -> sums over each patch [B, N]."""
    size = size_of(pixels)
    down, across = (  # [side, cells]: which patch each pixel belongs to
        one_hot(pixel_cells(side, cells, pixels.device), cells).to(pixels)
        for side, cells in zip(size, model.layout_at(*size).grid, strict=True)
    )
    return torch.einsum("bhw,hr,wc->brc", pixels, down, across).flatten(1)


@method("ixg", forwards="1 + 1 backward", needs="gradients", signed=True)
@over_images(whole_graph)
def ixg(model: VisionModel, images: Tensor, target: Target, *, score: Score | None = None) -> Maps:
    """Input x gradient of the first tokens, positions included.

    `score` is the probability by default, the logit for a cosine head (CLIP).
    """
    return summed(model, images, target, score, last=1)


@method("ixg+", forwards="1 + 1 backward", needs="activations, gradients", signed=True)
@over_images(whole_graph)
def ixg_plus(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: int = 0,
    score: Score | None = None,
) -> Maps:
    """Input x gradient of the tokens entering every block.

    map = sum_{l = start}^{L-1} r^l of h^l (SkipPLUS, Mehri et al. 2024): h^0 is the embedding with
    its positions, and the last block's output h^L is never included. SkipPLUS itself starts at
    floor(L/2). Attention takes part through the gradient only. `score` is the probability by
    default, the logit for a cosine head (CLIP).
    """
    return summed(model, images, target, score, first=start)


@method("attcat", forwards="1 + 1 backward", needs="attention, activations, gradients", signed=True)
@over_images(whole_graph)
def attcat(model: VisionModel, images: Tensor, target: Target, *, score: Score = "logit") -> Maps:
    """Input x gradient of every block's tokens, weighted by the attention they receive.

    map_j = sum_l a^l_j r^l_j, a^l_j the mean over heads and query rows of A^l_ij (AttCAT, Qiang et
    al., NeurIPS 2022). A^l is paired with the states entering its block, as in the authors' code.
    Attention is a weight here, not a path: it has no gradient of its own, and all query rows count
    alike, whichever tokens the model reads. A latent pool's attention is not used.
    """
    bound, states, terms = relevances(model, images, target, score)
    total = torch.zeros_like(terms[0])  # [B, T]
    with torch.no_grad():
        for step in walk(model, states[0], model.at(images)):
            step.h = step.out = states[step.index]  # recorded: nothing runs again
            total = total + probabilities(step).mean(dim=(1, 2)) * terms[step.index]
    return Maps(total[:, model.check(images).patches], bound)


def summed(
    model: VisionModel, images: Tensor, target: Target, score: Score | None, **blocks: int
) -> Maps:
    """The sum of `relevances` over the blocks `first` to `last`."""
    bound, _, terms = relevances(model, images, target, score, **blocks)
    return Maps(torch.stack(terms).sum(dim=0)[:, model.check(images).patches], bound)


def relevances(
    model: VisionModel,
    images: Tensor,
    target: Target,
    score: Score | None = None,
    *,
    first: int = 0,
    last: int | None = None,
) -> tuple[Target, list[Tensor], list[Tensor]]:
    """The bound target, the states entering blocks `first` to `last` [B, T, D], and input x
    gradient of each [B, T]."""
    if not 0 <= first < model.n_layers:
        raise BadOption("start", first, f"a block, 0-{model.n_layers - 1}")
    steps = walk(model, model.embed(images.detach().requires_grad_()), model.at(images))
    states = [step.h for step in steps][first:last]
    logits, score = model.readout(steps.h, model.check(images)), score or usual_score(model)
    bound, slopes = differentiate(model, logits, target, score, states, start=first)
    terms = [(h * slope).detach().sum(dim=-1) for h, slope in zip(states, slopes, strict=True)]
    return bound, states, terms


def usual_score(model: VisionModel) -> Score:
    """The probability; the logit for cosine heads, whose softmax depends on the choice of texts."""
    return "logit" if isinstance(model.extra, CosineHead) else "prob"


@method("libra-ixg+", forwards="1 + 1 backward", needs="activations, gradients", signed=True)
@over_images(whole_graph, times=1.5)  # norms and gates keep their value and their rule
def libra_ixg_plus(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: int = 0,
    score: Score | None = None,
) -> Maps:
    """Input x gradient of the tokens entering every block, with balanced gradients.

    Libra IxG+ (LibraGrad, Mehri et al., CVPR 2025): IxG+ with gradients that balance.

        map = sum_{l = start}^{L-1} r^l,   r^l_j = sum_c h^l_jc dh^l_jc,   dh by Libra's rules

    Plain gradients of attention, norms and gates make input x gradient add up to anything. Libra's
    rules make every block locally linear:

        attention       softmax(q k^T) is constant: the gradient flows through v
        LayerNorm, RMS  the standard deviation is constant; the mean is not
        GELU, SiLU      x * constant gate; QuickGELU and sigmoid gates the same (tanh, as in
                        pre-logit layers, is plain)
        gated MLP       gradient of the product of its two branches, halved

    Then sum_j h^l_j dh^l_j + bias terms (b db for every bias from block l on) = logit at every
    depth l, but for cosine heads, whose L2 norm keeps its plain gradient. Dissent suppression, the
    paper's rule for patch embeddings, touches only pixel maps and is not implemented. The bias
    terms belong to no patch and are not part of the map. Softmax or sigmoid of the score keep their
    plain gradient. The default of `score` is that of `ixg+`.
    """
    with LibraRules():
        return summed(model, images, target, score, first=start)


class LibraRules(TorchFunctionMode):
    """Inside this context, graphs are built by Libra's rules; values do not change.

    Functions are intercepted where they are called, in this thread: no module is changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gated = WeakTensorKeyDictionary()  # outputs of activations: a product is a gated MLP
        self.rules = {
            **RULES,
            **dict.fromkeys((F.gelu, F.silu), self._constant_gate),
            **dict.fromkeys((torch.Tensor.mul, torch.Tensor.__mul__, torch.mul), self._half),
        }

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rule = self.rules.get(function)
        call = function if rule is None else partial(rule, function)
        return call(*args, **kwargs or {})

    def _constant_gate(self, activation: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """f(x) = x * g(x) for a gate g with g(0) = 1/2."""
        kwargs.pop("inplace", None)
        with torch.no_grad():
            value = activation(x.detach(), *args, **kwargs)
            gate = torch.where(x == 0, 0.5, value / x)
        gated = _through(value, x * gate)
        self.gated[gated] = True
        return gated

    def _half(self, multiply: Any, a: Any, b: Any, **kwargs: Any) -> Tensor:
        product = multiply(a, b, **kwargs)
        both = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape
        gated = both and (a in self.gated or b in self.gated)
        return _through(product, product / 2) if gated else product


def _through(value: Tensor, path: Tensor) -> Tensor:
    """The value of one tensor, bit for bit, with the gradient of another."""
    return value.detach() + (path - path.detach())


def _constant_weights(attend: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attend(q.detach(), k.detach(), v, **options)


def _constant_deviation(
    norm: Any,
    x: Tensor,
    shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **options: Any,
) -> Tensor:
    path = _scaled(x - x.mean(dim=tuple(range(-len(shape), 0)), keepdim=True), shape, weight, eps)
    value = norm(x, shape, weight, bias, eps, **options)
    return _through(value, path if bias is None else path + bias)


def _scaled(x: Tensor, shape: list[int], weight: Tensor | None, eps: float) -> Tensor:
    """x over its root mean square, which is constant, times the weight."""
    square = x.square().mean(dim=tuple(range(-len(shape), 0)), keepdim=True)
    path = x * (square + eps).rsqrt().detach()
    return path if weight is None else path * weight


def _constant_rms(
    norm: Any, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    floor = torch.finfo(x.dtype).eps if eps is None else eps
    return _through(norm(x, shape, weight, eps), _scaled(x, shape, weight, floor))


def _constant(gate: Any, x: Tensor) -> Tensor:
    return gate(x.detach())


RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: _constant_weights,
    F.layer_norm: _constant_deviation,
    F.rms_norm: _constant_rms,
    torch.rsqrt: _constant,  # norms written out by hand
    torch.sigmoid: _constant,
    torch.Tensor.sigmoid: _constant,
}


@method(
    "integrated-gradients",
    forwards="steps + steps backward",
    needs="gradients",
    architectures=EVERY_VIEW,
    signed=True,
)
@over_images(whole_graph)
def integrated_gradients(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    baseline: BlankLike = "mean",
    steps: Count = 50,
    score: Score = "logit",
    seed: int = 0,
) -> Maps:
    """Gradients along the straight path from a baseline to the image, times the difference.

        phi = (x - b) * integral_0^1 grad f(b + t (x - b)) dt,   sum phi = f(x) - f(b)

    (Sundararajan, Taly & Yan 2017). The integral is a Gauss-Legendre sum (captum's default), exact
    for polynomials of degree 2 * steps - 1; completeness holds up to its error. The baseline b is
    the mean colour, which is 0 after normalisation, unless another blank or a normalised image is
    given.
    """
    target = bind_target(model, images, target)
    base = blank_image(model, size_of(images), baseline, seed=seed)
    nodes, weights = np.polynomial.legendre.leggauss(steps)  # on [-1, 1]
    t, weight = (torch.from_numpy(x / 2).to(images) for x in (1 + nodes, weights))

    def faded(a: int, b: int) -> Tensor:  # [B, n, 3, H, W]
        return base[:, None] + t[a:b, None, None, None] * (images - base)[:, None]

    slope = _mean_slope(model, images, target, score, faded, weight)
    pixels = ((images - base) * slope).sum(dim=1)  # [B, H, W]
    return Maps(patch_sums(model, pixels), target, native=pixels)


@method(
    "smoothgrad", forwards="samples + samples backward", needs="gradients", architectures=EVERY_VIEW
)
@over_images(whole_graph)
def smoothgrad(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    samples: Count = 50,
    noise: NotNegative = 0.15,
    score: Score = "logit",
    seed: int = 0,
) -> Maps:
    """The gradient of pixels, averaged over noisy copies of the image.

        g = mean_k d score / dx (x + sigma n_k),   n_k ~ N(0, 1),   sigma = noise (max x - min x)

    (Smilkov et al. 2017), and the map sums |g|, as the paper's images do. A gradient is the effect
    of a small change, not of the whole patch. Noise is drawn once from `seed` and is the same for
    every image, so a map does not depend on the batch. It is drawn on the device: millions of
    numbers from a CPU would take longer than the passes.
    """
    target = bind_target(model, images, target)
    generator = torch.Generator(images.device).manual_seed(seed)
    shape, device = (samples, *images.shape[1:]), images.device
    drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    sigma = noise * (images.amax(dim=(1, 2, 3)) - images.amin(dim=(1, 2, 3)))  # [B]

    def noisy(a: int, b: int) -> Tensor:  # [B, n, 3, H, W]
        return images[:, None] + sigma[:, None, None, None, None] * drawn[a:b].to(images)

    equal = torch.full((samples,), 1 / samples, dtype=torch.float64, device=images.device)
    pixels = _mean_slope(model, images, target, score, noisy, equal).abs().sum(dim=1)  # [B, H, W]
    return Maps(patch_sums(model, pixels), target, native=pixels)


def _mean_slope(
    model: ImageModel,
    images: Tensor,
    target: Target,
    score: Score,
    copies: Callable[[int, int], Tensor],
    weights: Tensor,
) -> Tensor:
    """The weighted sum over copies of every image of the gradient of pixels, [B, 3, H, W]."""

    def slope_at(made: Tensor, aims: Target) -> Tensor:
        made = made.detach().requires_grad_()
        return differentiate(model, model(made), aims, score, [made])[1][0]

    each = len(images) * whole_graph(model, model.check(images))
    return over_copies(copies, weights, target, slope_at, bytes_each=each)


@method("grad-cam", forwards="1, backward through the last block", needs="activations, gradients")
@over_images(one_block)
def grad_cam(model: VisionModel, images: Tensor, target: Target, *, score: Score = "logit") -> Maps:
    """Activations of the last block, weighted by their mean gradient.

    As in pytorch-grad-cam, X is the normed input of the last attention and G = d score / dX:

        map_p = ReLU(sum_c w_c X_pc),   w_c = mean_p G_pc     (p over patches, c over channels)

    Whatever follows the last attention has no patch gradient in class-token models. In post-norm
    blocks the normed input is the input. Nothing before the last block is held in memory.
    """
    layout, last, block = model.check(images), model.n_layers - 1, model.blocks[-1]
    with torch.no_grad():
        h = record(model, images, states={last}, until=last).states[last]
        x = block.norm(h).detach()  # [B, T, D]
    x.requires_grad_()
    steps = walk(model, h, model.at(images), start=last)
    for step in steps:  # the residual path keeps h: only the attention reads x
        step.block = replace(block, norm=lambda _: x)
    logits = model.readout(steps.h, layout)
    bound, (slope,) = differentiate(model, logits, target, score, [x], start=last)
    weight = slope[:, layout.patches].mean(dim=1)  # [B, D]
    return Maps((x[:, layout.patches] @ weight[..., None])[..., 0].relu(), bound)
