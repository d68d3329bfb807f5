"""Libra IxG+ (LibraGrad, Mehri et al., CVPR 2025): IxG+ with gradients that balance.

    map = sum_{l = start}^{L-1} r^l,   r^l_j = sum_c h^l_jc dh^l_jc,   dh by Libra's rules

Plain gradients of attention, norms and gates make input x gradient add up to anything. Libra's
rules make every block locally linear:

    attention       softmax(q k^T) is constant: the gradient flows through v
    LayerNorm, RMS  the standard deviation is constant; the mean is not
    GELU, SiLU      x * constant gate; QuickGELU and sigmoid gates the same (tanh, as in pre-logit
                    layers, is plain)
    gated MLP       gradient of the product of its two branches, halved
    L2 norm         of cosine heads: plain, or the norm constant (`unit="constant"`)

Then sum_j h^l_j dh^l_j + bias terms (b db for every bias from block l on) = logit at every depth l.
Dissent suppression, the paper's rule for patch embeddings, touches only pixel maps and is left out.
The bias terms belong to no patch and are not part of the map. Softmax or sigmoid of the score keep
their plain gradient. Other options and the usual score are those of `ixg+`.
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

from seecause.attribution.gradients import every_block, over_images
from seecause.attribution.input_gradients import USUAL_SCORE, Mixer, Start, first_layer, relevances
from seecause.attribution.registry import Maps, method
from seecause.models.block import Block
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.target import Score, Target

Unit = Literal["plain", "constant"]


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
    """Input x gradient of the tokens entering every block, with balanced gradients."""
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
