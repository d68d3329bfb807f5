"""How much of an answer hangs on the foreground, and how much on the background (CIGMA, phase 2).

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

With masks the model found itself, BIG measures evidence outside the model's own evidence, not
outside the object: see `masks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from seecause._pieces import PIECE, in_pieces
from seecause.engine.chunks import fit, in_chunks
from seecause.errors import BadOption, NotDefined
from seecause.heads.erase import Baseline, ErasedViews, Masks
from seecause.metrics.statistics import ratio_interval
from seecause.models._settled import settles
from seecause.models.base import ImageModel, protocol
from seecause.target import need_aimed
from seecause.types import wide

FEW = 5  # pictures: fewer give no interval, and no accuracy of a group, that could be believed
DEGENERATE = 1e-8  # FIG + BIG below this: nothing was lost either way, and BIR says nothing
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
class Gains:
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
        """The same, 0 where nothing matters anywhere."""
        ratio = self.bir_ratio_of_means
        return ratio if ratio == ratio else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the ratio of means, over images; NaN for one image, which
        says nothing of others."""
        return (
            (torch.nan, torch.nan)
            if len(self.big) < 2
            else ratio_interval(self.big, self.fig + self.big)
        )

    def interval_text(self, digits: int = 3) -> str:
        """The interval as it may be shown: none for few images or where nothing matters, and never
        one without width, which would look certain."""
        count, (low, high) = len(self.big), self.interval
        if count < FEW:
            return f"too few for an interval ({count})"
        if low != low:
            return "not defined"
        shown = [f"{end:.{digits}f}" for end in (low, high)]
        if shown[0] != shown[1]:
            return " to ".join(shown)
        return (
            f"below {10**-digits:.{digits}f}"
            if float(shown[1]) == 0
            else f"no spread over {count} pictures"
        )

    def take(self, rows: Tensor) -> Gains:
        """Of some images."""
        return replace(self, fig=self.fig[rows], big=self.big[rows])

    def __repr__(self) -> str:
        ratios = (
            f"BIR {self.bir_ratio_of_means:.3f} (ratio of means, which gates judge),"
            f" {self.bir_mean_of_ratios:.3f} (mean of ratios)"
        )
        return (
            f"Gains({len(self.fig)} images: FIG {self.fig.mean():.4f}, BIG {self.big.mean():.4f},"
            f" {ratios}, {int(self.degenerate.sum())} degenerate)"
        )


@settles
@torch.no_grad()
def information_gains(
    model: ImageModel,
    images: Tensor,
    masks: Masks | Tensor | None = None,
    *,
    temperature: float = 1.0,
    baseline: Baseline = "grey",
) -> Gains:
    """FIG and BIG of normalised images [B, 3, H, W], with masks (a tensor counts as true masks) and
    a baseline, or with `Swapped` pictures."""
    need_distribution(model, "information_gains")
    images = images.to(model.device, model.dtype)
    views = ErasedViews(model, images, masks, baseline)
    model.check(images)

    def piece(start: int) -> dict[str, Any]:
        rows = slice(start, start + PIECE)
        versions = torch.stack([images[rows], *views.erased(rows)])
        return {"images": versions, "temperature": temperature}

    pieces = map(piece, range(0, len(images), PIECE))
    parts = [part["gains"] for part in in_pieces(gains_piece, model, pieces)]
    fig, big, noise = torch.cat(parts).double().unbind(1)
    record = {"temperature": temperature, **views.record(), **protocol(model, images)}
    return Gains(fig, big, float(noise.mean()), record)


@settles
@torch.no_grad()
def gains_piece(model: ImageModel, images: Tensor, temperature: float) -> dict[str, Tensor]:
    """FIG, BIG and rounding [n, 3], on the CPU, of images [3, n, 3, H, W]: plain, without their
    background, without their foreground."""
    images = images.to(model.device)

    def answers(pictures: Tensor) -> Tensor:
        return log_probs(model(pictures), temperature)

    def run_chunk(a: int, b: int) -> Tensor:
        versions = images[:, a:b]
        plain, no_background, no_foreground = answers(versions.flatten(0, 1)).unflatten(
            0, (3, b - a)
        )
        again = answers(versions[0].flip(0)).flip(0)  # another packing
        return torch.stack(
            [jensen_shannon(plain, other) for other in (no_foreground, no_background, again)], dim=1
        )

    each = 3 * model.forward_bytes(model.check(images[0]))
    size = fit(images.shape[1], each, images.device)
    chunks = list(in_chunks(run_chunk, images.shape[1], size, what="images"))
    return {"gains": torch.cat(chunks).cpu()}


def need_distribution(model: ImageModel, what: str) -> None:
    """Refuse a model whose answers are no probabilities that sum to one."""
    need_aimed(model)
    if model.sigmoid:
        raise NotDefined(
            what,
            f"the classes of {model.name} answer independently, so there is no distribution to"
            " compare",
            "Wrap the model with sigmoid=False",
        )
