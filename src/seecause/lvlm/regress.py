"""From masks and responses to one coefficient for each head or token (head attribution, section
3.3, after COAR).

    F(x) ~ x . beta + b,    elastic net on 80 % of the masks; R2 and Pearson's correlation on the
    others

Training masks come in two halves. How far their coefficients agree tells how much of a coefficient
is noise, and when to stop asking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.lvlm.fit import Moments, Penalty
from seecause.lvlm.masks import Law, check_seed, draw_masks

TOP = 50  # the largest coefficients that the halves are compared in; at most a quarter of all


@dataclass(frozen=True)
class Sampling:
    """How masks are drawn and fitted. `adaptive` stops as soon as the halves' coefficients
    correlate by `agreement`, asking `step` masks at a time."""

    masks: int = 10_000
    p: float = 0.75
    law: Law = "bernoulli"
    split: float = 0.8
    alpha: float = 5e-4
    l1_ratio: float = 0.5
    seed: int = 0
    adaptive: bool = False
    agreement: float = 0.9
    step: int = 1000


@dataclass(frozen=True, eq=False)
class Regression:
    """Coefficients [P] (float64, on the CPU) and how far to trust them."""

    coefficients: Tensor
    intercept: float
    r2: float
    pearson: float
    masks: int  # asked in all
    agreement: float  # Pearson's correlation of the two halves' coefficients
    converged: bool
    history: list[dict[str, Any]] = field(
        default_factory=list
    )  # agreement after each step of an adaptive run

    @property
    def reliability(self) -> float:
        """The correlation to expect between these coefficients and those of as many fresh masks
        (Spearman-Brown)."""
        return 2 * self.agreement / (1 + self.agreement)


def regress(
    respond: Callable[[Tensor], Tensor],
    size: int,
    how: Sampling,
    device: torch.device | str = "cpu",
) -> Regression:
    """Ask `respond` (masks [M, P] -> responses [M]) and fit."""
    check_sampling(how, size)
    halves = [Moments(size, device) for _ in range(2)]
    unseen, answers, history = [], [], []  # type: list[Tensor], list[Tensor], list[dict[str, Any]]
    asked, step = 0, how.step if how.adaptive else how.masks
    agreed = torch.nan
    while asked < how.masks:
        count = min(step, how.masks - asked)
        masks = draw_masks(count, size, p=how.p, law=how.law, seed=how.seed, start=asked)
        found = respond(masks)
        if not torch.isfinite(found).all():
            raise BadOption(
                "responses", "NaN or infinite", "finite ones: the model's logits are not"
            )
        shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(how.seed + asked))
        train, test = shuffled[: round(how.split * count)], shuffled[round(how.split * count) :]
        for half, rows in zip(halves, (train[::2], train[1::2]), strict=True):
            half.add(masks[rows], found[rows.to(found.device)])
        unseen.append(masks[test])
        answers.append(found[test.to(found.device)].cpu().double())
        asked += count
        if how.adaptive and (halves[0].count + halves[1].count > size or asked == how.masks):
            agreed, top, common = _agreement(halves, how)
            history.append({"masks": asked, "agreement": agreed, "top": top, "in both": common})
            if agreed >= how.agreement:
                break
    if not how.adaptive:
        agreed, _, _ = _agreement(halves, how)
    fit = halves[0].plus(halves[1]).fit(_penalty(how))
    truth, told = torch.cat(answers), fit.predict(torch.cat(unseen))
    rest = (truth - told).square().sum() / (truth - truth.mean()).square().sum()
    return Regression(
        fit.coefficients,
        fit.intercept,
        float(1 - rest),
        correlation(truth, told),
        asked,
        agreed,
        fit.converged,
        history,
    )


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's, of two vectors; NaN if one is constant."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return float((x @ y) / (x.norm() * y.norm()))


def _agreement(halves: list[Moments], how: Sampling) -> tuple[float, int, int]:
    """Correlation of the halves' coefficients, and of so many of the largest, how many they have in
    common."""
    first, second = (half.fit(_penalty(how)).coefficients for half in halves)
    top = min(TOP, max(1, len(first) // 4))
    common = set(first.topk(top).indices.tolist()) & set(second.topk(top).indices.tolist())
    return correlation(first, second), top, len(common)


def _penalty(how: Sampling) -> Penalty:
    return Penalty(alpha=how.alpha, l1_ratio=how.l1_ratio)


def check_sampling(how: Sampling, size: int) -> None:
    """Refuse what cannot be fitted for `size` coefficients, before any mask is asked."""
    check_seed(how.seed)
    if not 0 < how.split < 1:
        raise BadOption("split", how.split, "the share of masks to fit, between 0 and 1")
    least = next(
        m
        for m in range(2, 10 * size + 100)
        if round(how.split * m) > size and m - round(how.split * m) >= 2
    )
    if how.masks < least:
        raise BadOption(
            "masks",
            how.masks,
            f"at least {least}: {how.split:.0%} of them must outnumber the {size} coefficients",
        )
    if how.adaptive and not (how.step >= 10 and 0 < how.agreement < 1):
        raise BadOption(
            "step, agreement",
            (how.step, how.agreement),
            "at least 10 masks a step, and a correlation between 0 and 1",
        )
