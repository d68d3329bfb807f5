"""How much a prediction depends on the object, and how much on the background (CIGMA, phase 2).

    FIG = JS(p(I), p(I_-fg)),   BIG = JS(p(I), p(I_-bg)),   BIR = BIG / (FIG + BIG)
    (eq. 41 averages BIR over images)

JS is the Jensen-Shannon divergence, in nats, from 0 to ln 2:
    JS(p, q) = KL(p | m) / 2 + KL(q | m) / 2,     m = (p + q) / 2
Textbook forms subtract numbers that are nearly equal: in float32 they lose every digit below 1e-7
and turn negative, which is where the effects of single heads live. With u = (log q - log p) / 2 and
s = sqrt(p q), so that p = s exp(-u) and q = s exp(u), each class adds
    s (u sinh u - cosh u log cosh u),   log cosh u = log1p(2 sinh(u/2)^2)             for small |u|
    u (q - p) / 2 - m log cosh u,       log cosh u = |u| + log1p(exp(-2|u|)) - ln 2   for large |u|
which is never negative and loses no digits; the same in exact arithmetic.

`Measure` computes these and other responses from logits, for every estimator of head scores:
    big, fig            as above (need masks)
    prob, logit, nll    of the target class
    callable            any function of logits [M, C] -> [M]

With discovered masks, BIG measures evidence outside the model's own evidence, not outside the
object: see `masks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from seecause.background.erase import Erased, ErasedView, Fill
from seecause.background.images import LabelledImages, PerImage, as_labelled
from seecause.engine.chunks import fit, in_chunks
from seecause.errors import BadOption, NotDefined
from seecause.metrics.statistics import ratio_interval
from seecause.models.base import ImageModel, protocol
from seecause.models.eval_mode import in_eval_mode
from seecause.options import Positive, check_options
from seecause.target import Target, need_aimed
from seecause.types import wide

Response = Literal["big", "fig", "prob", "logit", "nll"]
View = Literal["plain"] | ErasedView
# responses that compare predictions, and the version of an image that each compares with
COMPARED: Mapping[str, ErasedView] = {"big": "no_background", "fig": "no_object"}
OF_MASKS = tuple(COMPARED)  # compared by equality: a response may be a callable without a hash
AT_ONCE = 32  # images whose erased versions are made together
FEW = 5  # images: fewer give no useful interval, and no useful accuracy of a group
DEGENERATE = 1e-8  # FIG + BIG below this: nothing was lost either way, and BIR is undefined
SMALL = 1.0  # of |u|, where the two forms meet; both are good there


def log_probs(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """log softmax(logits / temperature) over the last axis, in float32 or better."""
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise BadOption("temperature", temperature, "a number above 0")
    return torch.log_softmax(wide(logits) / temperature, dim=-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Log-probabilities [..., C] and [..., C] -> divergence [...]. Differentiable in both; its
    gradient is 0 where they are equal."""
    u = (log_q - log_p) / 2
    p, q = log_p.exp(), log_q.exp()
    near = u.clamp(-SMALL, SMALL)  # both branches must be finite for the gradient
    small = ((log_p + log_q) / 2).exp() * (
        near * near.sinh() - near.cosh() * (2 * (near / 2).sinh().square()).log1p()
    )
    size = u.abs()
    large = u * (q - p) / 2 - (p + q) / 2 * (size + (-2 * size).exp().log1p() - math.log(2))
    return torch.where(size < SMALL, small, large).sum(dim=-1)


def entropy(log_p: Tensor) -> Tensor:
    """Log-probabilities [..., C] -> entropy [...], in nats."""
    return -(log_p.exp() * log_p).sum(dim=-1)


@dataclass(frozen=True, eq=False)
class Gains(PerImage):
    """Per image, float64 on the CPU."""

    fig: Tensor  # [B]
    big: Tensor  # [B]
    noise_floor: float  # mean JS of the same images in two packings: smaller effects are rounding
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def degenerate(self) -> Tensor:
        """[B] bool: neither region matters."""
        return self.fig + self.big < DEGENERATE

    @property
    def bir(self) -> Tensor:
        """[B]; one half where it is degenerate."""
        return torch.where(
            self.degenerate, 0.5, self.big / (self.fig + self.big).clamp_min(DEGENERATE)
        )

    @property
    def bir_mean_of_ratios(self) -> float:
        """The paper's equation 41."""
        return float(self.bir.mean())

    @property
    def bir_ratio_of_means(self) -> float:
        """What the paper's tables appear to hold. NaN if nothing matters anywhere."""
        return float(self.big.mean() / (self.fig.mean() + self.big.mean()))

    @property
    def bir_or_zero(self) -> float:
        """`bir_ratio_of_means`, 0 where nothing matters anywhere."""
        ratio = self.bir_ratio_of_means
        return ratio if ratio == ratio else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the ratio of means, over images; NaN for one image."""
        if len(self.big) < 2:
            return torch.nan, torch.nan
        return ratio_interval(self.big, self.fig + self.big)

    def __repr__(self) -> str:
        ratios = (
            f"BIR {self.bir_ratio_of_means:.3f} (ratio of means),"
            f" {self.bir_mean_of_ratios:.3f} (mean of ratios)"
        )
        return (
            f"Gains({len(self.fig)} images: FIG {self.fig.mean():.4f}, BIG {self.big.mean():.4f},"
            f" {ratios}, {int(self.degenerate.sum())} degenerate)"
        )


@in_eval_mode
@torch.no_grad()
def information_gains(
    model: ImageModel,
    data: LabelledImages,
    *,
    fill: Fill | Tensor = "grey",
    temperature: Positive = 1.0,
) -> Gains:
    """FIG and BIG of images, erased by their masks and a fill, or swapped.

    Args:
        model: A classifier whose classes exclude each other.
        data: Images with `masks`, or with both other versions for fill="swap".
        fill: What replaces the erased part ("mean", "grey", "blur", "noise", images), or "swap".
        temperature: Of the predictions that are compared.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=4)
        >>> data = sc.background.read_images(model, data)
        >>> sc.background.information_gains(model, data.with_masks(data.truth)).fig.shape
        torch.Size([4])
    """
    check_options("information_gains", information_gains, {"temperature": temperature})
    need_distribution(model, "information_gains")
    data = as_labelled(model, data)
    erased = Erased(model, data, fill)

    def run_chunk(a: int, b: int) -> Tensor:
        rows = slice(a, b)
        images = data.images[rows]
        versions = torch.cat([images, *erased.versions(rows)])
        plain, no_background, no_object = log_probs(model(versions), temperature).chunk(3)
        again = log_probs(model(images.flip(0)), temperature).flip(0)  # in another packing
        others = (no_object, no_background, again)
        return torch.stack([jensen_shannon(plain, other) for other in others], dim=1).cpu()

    each = 3 * model.forward_bytes(model.check(data.images))
    size = min(AT_ONCE, fit(len(data), each, data.images.device))
    parts = list(in_chunks(run_chunk, len(data), size, what="images"))
    fig, big, noise = torch.cat(parts).double().unbind(1)
    record = {"temperature": temperature, **erased.record(), **protocol(model, data.images)}
    return Gains(fig, big, float(noise.mean()), record)


def need_distribution(model: ImageModel, what: str) -> None:
    """Refuse a model whose predictions are no probabilities that sum to one."""
    need_aimed(model)
    if model.sigmoid:
        raise NotDefined(
            what,
            f"the classes of {model.name} are independent, so there is no distribution to compare",
            "Wrap the model with sigmoid=False",
        )


@dataclass(frozen=True, eq=False)
class Measure:
    """How logits become numbers; `erased` versions of each image run beside it."""

    response: Response | Callable[[Tensor], Tensor]
    erased: tuple[ErasedView, ...]
    target: Target
    labels: Tensor  # [B], for accuracy
    temperature: float | Tensor
    sigmoid: bool

    @property
    def views(self) -> tuple[View, ...]:
        return "plain", *self.erased

    def split(self, logits: Tensor) -> dict[View, Tensor]:
        """Logits [..., V * b, C] by version."""
        parts = logits.unflatten(-2, (len(self.views), -1)).unbind(-3)
        return dict(zip(self.views, parts, strict=True))

    def take(self, rows: slice) -> Measure:
        return replace(self, target=self.target.take(rows), labels=self.labels[rows])

    def __call__(self, logits: Mapping[View, Tensor]) -> dict[str, Tensor]:
        """Logits [..., B, C] of each view -> [..., B] of everything that is measured; the response
        under `response`."""
        plain = logits["plain"]
        by_image = plain.movedim(-2, 0)  # [B, ..., C]

        def of_target(kind: Literal["prob", "logprob", "logit"], target: Target) -> Tensor:
            return target.score(by_image, kind, sigmoid=self.sigmoid).movedim(0, -1)

        values = {
            "accuracy": (plain.argmax(dim=-1) == self.labels).to(wide(plain).dtype),
            "nll": -of_target("logprob", Target(classes=self.labels)),
        }
        if not self.sigmoid:
            log_p = {view: log_probs(value, self.temperature) for view, value in logits.items()}
            values["entropy"] = entropy(log_p["plain"])
            for name, view in COMPARED.items():
                if view in log_p:
                    values[name] = jensen_shannon(log_p["plain"], log_p[view])
        if callable(self.response):
            values["response"] = self.response(wide(plain).flatten(0, -2)).unflatten(
                0, plain.shape[:-1]
            )
        elif self.response in OF_MASKS:
            values["response"] = values[self.response]
        else:
            nll, target = self.response == "nll", self.target
            values["response"] = (
                -of_target("logprob", target) if nll else of_target(self.response, target)  # type: ignore[arg-type]
            )
        return values
