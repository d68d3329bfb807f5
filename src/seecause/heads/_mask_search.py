"""The optimisation behind `discover_masks` (CIGMA, phase 1; after Fong & Vedaldi 2017).

For each image a mask M in [0, 1] on a coarse grid is fitted so that what it shows keeps the answer,
and little is shown:
    L(M) = a JS(p(I), p(U(M) I + (1 - U(M)) B)) + b mean(M) + c TV(M),      TV = mean |M_{i+1,j} -
    M_{ij}| + mean |M_{i,j+1} - M_{ij}|
by Adam on M, clamped to [0, 1] after each step; U enlarges, B is the baseline picture. Then the rho
largest pixels are the foreground S. Area and TV are means: as sums they would outweigh JS, which is
at most ln 2, and the empty mask would win.

topk        keeps exactly round(rho H W) pixels, in order of their value, then of their 5 x 5
            neighbourhood's mean, then row by row
percentile  those above the (1 - rho) percentile, strictly: the paper's rule. It keeps none when
            more than rho of the pixels saturate at 1, and fewer when more than 1 - rho are 0
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.mixture import need_gradients
from seecause.errors import BadOption
from seecause.heads.gains import jensen_shannon, log_probs
from seecause.models.base import ImageModel
from seecause.types import wide_dtype

Param = Literal["clamp", "sigmoid"]


CHECK_EVERY = 25  # steps, for the early stop


BETAS, EPSILON = (0.9, 0.999), 1e-8  # Adam's own


@dataclass(frozen=True, kw_only=True)
class MaskSearch:
    """The optimisation of a batch of masks. Images do not see each other, so the batch does not
    matter. The defaults are the paper's.

    `weights` are those of JS, area and TV. `early_stop`: finish an image when less than this share
    of its pixels changed sides in 25 steps (0.005 is a good choice).
    """

    steps: int = 250
    grid: int = 32
    rate: float = 0.05
    weights: tuple[float, float, float] = (1.0, 0.01, 0.1)
    param: Param = "clamp"
    init: float = 0.5
    rho: float = 0.35
    binarise: Rule = "topk"
    temperature: float = 1.0
    early_stop: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.grid < 2 or self.rate <= 0:
            raise BadOption(
                "steps, grid, rate",
                (self.steps, self.grid, self.rate),
                "at least one step, a grid of 2 x 2 cells, and a rate above 0",
            )
        if not 0 <= self.init <= 1 or (self.param == "sigmoid" and self.init in (0, 1)):
            raise BadOption("init", self.init, "a value in [0, 1]; inside it for param='sigmoid'")
        if min(self.weights) < 0:
            raise BadOption(
                "weights", self.weights, "three numbers of at least 0: for JS, area and TV"
            )
        if self.early_stop is not None and not 0 < self.early_stop < 1:
            raise BadOption(
                "early_stop", self.early_stop, "None, or a share of the pixels between 0 and 1"
            )
        if not 0 < self.rho < 1:
            raise BadOption("rho", self.rho, "a share of the pixels between 0 and 1")

    def record(self) -> dict[str, Any]:
        """Everything that decides the soft masks."""
        options = asdict(self)
        if self.early_stop is None:
            del options["rho"], options["binarise"]
        return options

    @torch.inference_mode(False)
    @torch.enable_grad()
    def run(
        self, model: ImageModel, images: Tensor, base: Tensor, inside: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Images and their baselines -> soft masks [B, g, g], losses [B, 3], steps taken [B]."""
        need_gradients(model, "discover_masks", remedy="Give the model that it was quantised from")
        kind = wide_dtype(model.dtype)
        images, base = images.clone(), base.expand(len(images), -1, -1, -1).clone()
        with torch.no_grad():
            plain = log_probs(model(images), self.temperature)
        start = self.init
        if self.param == "sigmoid":
            start = torch.logit(torch.tensor(self.init, dtype=torch.float64)).item()
        shape = (len(images), self.grid, self.grid)
        raw = torch.full(shape, start, dtype=kind, device=images.device)
        moments = torch.zeros_like(raw), torch.zeros_like(raw)
        search = _Search(images, base, plain, raw, *moments, inside)
        live = torch.arange(len(images), device=images.device)
        soft, losses = torch.empty_like(raw), raw.new_empty(len(images), 3)
        taken = torch.full_like(live, self.steps)
        before: Tensor | None = None
        for step in range(1, self.steps + 1):
            losses[live], search = self._step(model, step, search)
            soft[live] = self._mask(search.raw)
            if self.early_stop is None or step % CHECK_EVERY or step == self.steps:
                continue
            size = (images.shape[-2], images.shape[-1])
            hard, _ = harden(
                soft[live], size, rho=self.rho, rule=self.binarise, inside=search.inside
            )
            moving = torch.ones_like(live, dtype=torch.bool)
            if before is not None:
                moving = self._moved(hard, before)
            taken[live[~moving]] = step
            search = search.take(moving)
            live, before = live[moving], hard[moving]
            if len(live) == 0:
                break
        return soft, losses, taken

    def _step(self, model: ImageModel, step: int, search: _Search) -> tuple[Tensor, _Search]:
        """One step of Adam -> the losses [B, 3] before it, and everything after it."""
        images, inside = search.images, search.inside
        raw = search.raw.detach().requires_grad_()
        mask = self._mask(raw)
        show = enlarge(mask, (images.shape[-2], images.shape[-1]))
        if inside is not None:
            show = torch.where(inside, show, 1)  # padding stays as it is
        shown = (show[:, None] * images + (1 - show[:, None]) * search.base).to(images.dtype)
        divergence = jensen_shannon(search.plain, log_probs(model(shown), self.temperature))
        losses = torch.stack([divergence, mask.mean(dim=(1, 2)), total_variation(mask)], dim=1)
        total = (losses @ losses.new_tensor(self.weights)).sum()  # each mask's gradient is its own
        (slope,) = torch.autograd.grad(total, raw)
        with torch.no_grad():
            first = BETAS[0] * search.first + (1 - BETAS[0]) * slope
            second = BETAS[1] * search.second + (1 - BETAS[1]) * slope.square()
            scale = (second / (1 - BETAS[1] ** step)).sqrt() + EPSILON
            raw = raw - self.rate * first / (1 - BETAS[0] ** step) / scale
            raw = raw.clamp(0, 1) if self.param == "clamp" else raw
        return losses.detach(), replace(search, raw=raw, first=first, second=second)

    def _mask(self, raw: Tensor) -> Tensor:
        return raw if self.param == "clamp" else raw.sigmoid()

    def _moved(self, hard: Tensor, before: Tensor) -> Tensor:
        assert self.early_stop is not None
        return (hard != before).flatten(1).double().mean(dim=1) >= self.early_stop


@dataclass(frozen=True, eq=False)
class _Search:
    """Everything that goes with an image while its mask is looked for."""

    images: Tensor
    base: Tensor
    plain: Tensor  # log-probabilities of the whole image
    raw: Tensor  # [B, g, g], the masks before `param`
    first: Tensor  # Adam's moments of it
    second: Tensor
    inside: Tensor | None

    def take(self, rows: Tensor) -> _Search:
        return _Search(
            self.images[rows],
            self.base[rows],
            self.plain[rows],
            self.raw[rows],
            self.first[rows],
            self.second[rows],
            None if self.inside is None else self.inside[rows],
        )


def total_variation(masks: Tensor) -> Tensor:
    """[B, g, g] -> [B]: the mean step between neighbours, down and across."""
    down, across = masks[:, 1:] - masks[:, :-1], masks[:, :, 1:] - masks[:, :, :-1]
    return down.abs().mean(dim=(1, 2)) + across.abs().mean(dim=(1, 2))


Rule = Literal["topk", "percentile"]


_DIGITS = 1e6  # values closer than this are ties: enlarging a flat mask must leave it flat


def enlarge(soft: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks [B, g, g] at picture size, [B, H, W]."""
    return F.interpolate(soft[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def harden(
    soft: Tensor,
    size: tuple[int, int],
    *,
    rho: float = 0.35,
    rule: Rule = "topk",
    inside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Soft masks [B, g, g] -> kept pixels [B, H, W] (bool) and, for each image, the share of pixels
    that tie with the last one kept [B].

    Padding (`inside` [B, H, W] is False there) is never kept and does not count.
    """
    large = (enlarge(soft.double(), size) * _DIGITS).round() / _DIGITS
    near = F.avg_pool2d(large[:, None], 5, stride=1, padding=2, count_include_pad=False)[:, 0]
    near = (near * _DIGITS).round()
    hard = torch.zeros_like(large, dtype=torch.bool)
    ties = soft.new_zeros(len(soft), dtype=torch.float64)
    for i in range(len(soft)):
        pixels = torch.arange(large[i].numel(), device=soft.device)
        if inside is not None:
            pixels = inside[i].flatten().nonzero()[:, 0]
        values = large[i].flatten()[pixels]
        foreground, level = _foreground(values, near[i].flatten()[pixels], rho, rule)
        hard[i].view(-1)[pixels[foreground]] = True
        ties[i] = (values == level).double().mean()
    return hard, ties


def _foreground(values: Tensor, near: Tensor, rho: float, rule: Rule) -> tuple[Tensor, Tensor]:
    """Which of values [P] are kept, as indices or a bool mask, and the value of the last one
    kept."""
    count = round(rho * len(values))
    if rule == "percentile":
        ordered, place = values.sort().values, (1 - rho) * (len(values) - 1)
        low = int(place)
        high = min(low + 1, len(values) - 1)
        level = torch.lerp(ordered[low], ordered[high], place - low)
        return values > level, level
    order = near.sort(descending=True, stable=True).indices
    order = order[values[order].sort(descending=True, stable=True).indices][:count]
    return order, values[order[-1]] if count else values.max()
