"""Input x gradient (Shrikumar et al. 2016), where the input is pixels, the tokens entering blocks,
or the feature map of a stage.

    r_j = sum_c x_jc g_jc,   g = d score / dx

is a linear estimate of what is lost when the input j becomes 0: one gradient, no baseline, and sums
that are complete only where the network is linear or its gradients are made to balance (Libra).
`mixer="relu"` cuts negative products before they are summed over channels. On pixels, positions and
biases of the embedding count for nothing; on tokens they do. The score of tokens is the probability
for classifiers and the logit for cosine heads (CLIP), as in the presets of LibraGrad's authors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from seecause.attribution.gradients import (
    differentiate,
    every_block,
    every_stage,
    feature_products,
    features_and_slope,
    on_cells,
    over_images,
    patch_sums,
    pixel_slope,
)
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import probabilities
from seecause.engine.walk import walk
from seecause.errors import BadOption
from seecause.models.block import Block
from seecause.models.heads import CosineHead, TextHead
from seecause.models.layout import TokenLayout
from seecause.models.staged_view import StagedModel
from seecause.models.view import VisionModel
from seecause.target import Score, Target

Mixer = Literal["sum", "relu"]
Start = int | Literal["all", "half"]
Unit = Literal["plain", "constant"]
USUAL_SCORE = "prob; logit for a cosine head (CLIP)"


@method(
    "ixg", forwards="1 + 1 backward", needs="gradients", unset={"score": USUAL_SCORE}, signed=True
)
@over_images(every_block)
def ixg(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    space: Literal["token", "pixel"] = "token",
    mixer: Mixer = "sum",
    score: Score | None = None,
) -> Maps:
    """Input x gradient of the first tokens, or of pixels."""
    if space == "pixel":
        return _of_pixels(model, images, target, score or usual_score(model), mixer)
    bound, _, (term,) = relevances(model, images, target, score, last=1, mixer=mixer)
    return Maps(term[:, model.check(images).patches], bound)


@method(
    "ixg+",
    forwards="1 + 1 backward",
    needs="activations, gradients",
    unset={"score": USUAL_SCORE},
    signed=True,
)
@over_images(every_block)
def ixg_plus(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: Start = "all",
    mixer: Mixer = "sum",
    score: Score | None = None,
) -> Maps:
    """Input x gradient of the tokens entering every block.

    map = sum_{l = start}^{L-1} r^l of h^l (SkipPLUS, Mehri et al. 2024): h^0 is the embedding with
    its positions, and the last block's output h^L is never included. `start="half"` is SkipPLUS
    itself, from floor(L/2); a number starts there. Attention takes part through the gradient only.
    """
    layout, first = model.check(images), first_layer(model, start)
    bound, _, terms = relevances(model, images, target, score, first=first, mixer=mixer)
    return Maps(torch.stack(terms).sum(dim=0)[:, layout.patches], bound)


@method("attcat", forwards="1 + 1 backward", needs="attention, activations, gradients", signed=True)
@over_images(every_block)
def attcat(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    pairing: Literal["input", "output"] = "input",
    score: Score = "logit",
) -> Maps:
    """Input x gradient of every block's tokens, weighted by the attention they receive.

    map_j = sum_l a^l_j r^l_j, a^l_j the mean over heads and query rows of A^l_ij (AttCAT, Qiang et
    al., NeurIPS 2022). The authors' code pairs A^l with the states entering its block
    (`pairing="input"`); LibraGrad's port pairs it with those leaving it and drops the last block
    (`pairing="output"`). Attention is a weight here, not a path: it has no gradient of its own, and
    query rows are all alike, whichever tokens the model reads. A latent pool's is not used.
    """
    bound, states, terms = relevances(model, images, target, score)
    if pairing == "output":
        states, terms = states[:-1], terms[1:]
    total = torch.zeros_like(terms[0])  # [B, T]
    with torch.no_grad():
        for step in walk(model, states[0], model.at(images), stop=len(states)):
            step.h = step.out = states[step.index]  # recorded: nothing runs again
            total = total + probabilities(step).mean(dim=(1, 2)) * terms[step.index]
    return Maps(total[:, model.check(images).patches], bound)


@method(
    "ixg",
    forwards="1 + 1 backward",
    needs="gradients",
    architectures=("staged",),
    unset={"stage": "the one at two thirds of the depth"},
    signed=True,
)
@over_images(every_stage)
def ixg_staged(
    model: StagedModel,
    images: Tensor,
    target: Target,
    *,
    space: Literal["stage", "pixel"] = "stage",
    stage: str | None = None,
    score: Score = "prob",
) -> Maps:
    """Input x gradient of a stage's features, or of pixels.

    A cell has the sum over the features it covers, or its share of the feature that it lies in.
    """
    if space == "pixel":
        return _of_pixels(model, images, target, score, "sum")
    stage = stage or model.cells
    bound, features, slope = features_and_slope(model, images, target, stage, score)
    product = feature_products(model, features, slope, stage)  # [B, h, w]
    layout = model.check(images)
    features_of_a_cell = product[0].numel() / layout.n_patches
    return Maps(on_cells(product, layout) * features_of_a_cell, bound, used={"stage": stage})


def _of_pixels(
    model: VisionModel | StagedModel, images: Tensor, target: Target, score: Score, mixer: Mixer
) -> Maps:
    """Input x gradient of the normalised picture."""
    bound, slope = pixel_slope(model, images, target, score)
    product = images * slope
    pixels = (product.relu() if mixer == "relu" else product).sum(dim=1)  # [B, H, W]
    return Maps(patch_sums(model, pixels), bound, native=pixels)


def relevances(
    model: VisionModel,
    images: Tensor,
    target: Target,
    score: Score | None = None,
    *,
    first: int = 0,
    last: int | None = None,
    mixer: Mixer = "sum",
) -> tuple[Target, list[Tensor], list[Tensor]]:
    """The bound target, the states entering blocks `first` to `last` [B, T, D], and input x
    gradient of each [B, T]."""
    steps = walk(model, model.embed(images.detach().requires_grad_()), model.at(images))
    states = [step.h for step in steps][first:last]
    logits, score = model.readout(steps.h, model.check(images)), score or usual_score(model)
    bound, slopes = differentiate(model, logits, target, score, states, start=first)
    products = [(h * slope).detach() for h, slope in zip(states, slopes, strict=True)]
    return bound, states, [(p.relu() if mixer == "relu" else p).sum(dim=-1) for p in products]


def first_layer(model: VisionModel, start: Start) -> int:
    """The first block whose input counts."""
    if isinstance(start, str):
        return 0 if start == "all" else model.n_layers // 2
    if not 0 <= start < model.n_layers:
        raise BadOption("start", start, f"'all', 'half' or a block 0-{model.n_layers - 1}")
    return start


def usual_score(model: VisionModel) -> Score:
    """Probability, but the logit where it is a cosine: its softmax depends on which texts were
    asked for."""
    return "logit" if isinstance(model.extra, CosineHead | TextHead) else "prob"


def _both_paths(model: VisionModel, layout: TokenLayout) -> int:
    """Norms and gates keep their value and their rule."""
    return every_block(model, layout) * 3 // 2


@method(
    "libra-ixg+",
    forwards="1 + 1 backward",
    needs="activations, gradients",
    unset={"score": USUAL_SCORE},
    signed=True,
)
@over_images(_both_paths)
def libra_ixg_plus(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: Start = "all",
    mixer: Mixer = "sum",
    unit: Unit = "plain",
    score: Score | None = None,
) -> Maps:
    """Input x gradient of the tokens entering every block, with balanced gradients.

    IxG+ by the rules of LibraGrad (Mehri et al., CVPR 2025):

        map = sum_{l = start}^{L-1} r^l,   r^l_j = sum_c h^l_jc dh^l_jc,   dh by Libra's rules

    Plain gradients of attention, norms and gates make input x gradient add up to anything. Libra's
    rules make every block locally linear:

        attention       softmax(q k^T) is constant: the gradient flows through v
        LayerNorm, RMS  the standard deviation is constant; the mean is not
        GELU, SiLU      x * constant gate; QuickGELU and sigmoid gates the same (tanh, as in
                        pre-logit layers, is plain)
        gated MLP       gradient of the product of its two branches, halved
        L2 norm         of cosine heads: plain, or the norm constant (`unit="constant"`)

    Then sum_j h^l_j dh^l_j + bias terms (b db for every bias from block l on) = logit at every
    depth l. Dissent suppression, the paper's rule for patch embeddings, touches only pixel maps
    and is left out. The bias terms belong to no patch and are not part of the map. Softmax or
    sigmoid of the score keep their plain gradient. Other options and the usual score are those of
    `ixg+`.
    """
    layout, first = model.check(images), first_layer(model, start)
    with libra_rules(model, unit=unit):
        bound, _, terms = relevances(model, images, target, score, first=first, mixer=mixer)
    return Maps(torch.stack(terms).sum(dim=0)[:, layout.patches], bound)


@contextmanager
def libra_rules(model: VisionModel, *, unit: Unit = "plain") -> Iterator[VisionModel]:
    """Inside the block, graphs of the view are built by Libra's rules; values are what they were.

    Functions are intercepted where they are called, in this thread: no module is changed. Compiled
    blocks run uncompiled meanwhile.
    """
    before = model.blocks
    model.blocks = [Block(**vars(block)) for block in before]
    try:
        with _Rules(unit):
            yield model
    finally:
        model.blocks = before


class _Rules(TorchFunctionMode):
    def __init__(self, unit: Unit):
        super().__init__()
        self.gated = WeakTensorKeyDictionary()  # outputs of activations: a product is a gated MLP
        self.rules = {
            **RULES,
            **dict.fromkeys((F.gelu, F.silu), self._constant_gate),
            **dict.fromkeys((torch.Tensor.mul, torch.Tensor.__mul__, torch.mul), self._half),
        }
        if unit == "constant":
            self.rules[F.normalize] = _constant_length

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
    axes = tuple(range(-len(shape), 0))
    centred = x - x.mean(dim=axes, keepdim=True)
    path = centred * (centred.square().mean(dim=axes, keepdim=True) + eps).rsqrt().detach()
    path = path if weight is None else path * weight
    path = path if bias is None else path + bias
    return _through(norm(x, shape, weight, bias, eps, **options), path)


def _constant_rms(
    norm: Any, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    floor = torch.finfo(x.dtype).eps if eps is None else eps
    square = x.square().mean(dim=tuple(range(-len(shape), 0)), keepdim=True)
    path = x * (square + floor).rsqrt().detach()
    return _through(norm(x, shape, weight, eps), path if weight is None else path * weight)


def _constant(gate: Any, x: Tensor) -> Tensor:
    return gate(x.detach())


def _constant_length(
    normalize: Any, x: Tensor, p: float = 2.0, dim: int = 1, **options: Any
) -> Tensor:
    value = normalize(x, p, dim, **options)
    return _through(value, x / x.norm(p, dim, keepdim=True).detach())


RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: _constant_weights,
    F.layer_norm: _constant_deviation,
    F.rms_norm: _constant_rms,
    torch.rsqrt: _constant,  # norms written out by hand
    torch.sigmoid: _constant,
    torch.Tensor.sigmoid: _constant,
}
