"""The mean derivative of a response over random masks: one run back through the model tells of all
heads (or tokens) at once, where a fit needs more masks than there are heads.

    beta_n ~ mean over masks x of dF/dm_n at m = s + (1 - 2 s) x

Masks are softened a little for heads, s = 0.1: at its ends a head's curve is often flat. What is
left is off where F bends on the way from 0 to 1. `corrected` fits what it leaves unexplained, as a
control variate:

    beta = g + w,    w = argmin |F(x) - g . x - w . x - b|^2 + penalty |w|^2,    g that mean

with the penalty that foretells left-out masks best: few masks leave the derivative as it is, many
bring the coefficients of a fit, whatever the derivative says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.lvlm.fit import MaskSampling, Regression, check_sampling, correlation, regress
from seecause.lvlm.masks import draw_masks

Respond = Callable[[Tensor], Tensor]  # masks [M, P] -> responses [M]
Differentiate = Callable[[Tensor], Tensor]  # soft masks [M, P] -> slopes [M, P]
SLOPES = 64  # masks that a corrected derivative is differentiated at
SOFTEN = 0.1  # of heads, chosen on five pictures of Critters; image tokens do best without
_PENALTIES = torch.logspace(-4, 4, 33, dtype=torch.float64)  # in units of the largest square


def estimate(
    respond: Respond,
    differentiate: Differentiate,
    size: int,
    sampling: MaskSampling,
    device: torch.device | str = "cpu",
) -> Regression:
    """Coefficients [P] by the way that `sampling.how` names."""
    check_sampling(sampling, size)
    if sampling.how == "fit":
        return regress(respond, size, sampling, device)
    masks = draw_masks(sampling.masks, size, p=sampling.p, law=sampling.law, seed=sampling.seed)
    few = sampling.masks if sampling.how == "derivative" else min(SLOPES, sampling.masks)
    few = sampling.slopes or few
    soft = sampling.soften + (1 - 2 * sampling.soften) * masks[:few].double()
    responses, slopes = respond(masks).double().cpu(), differentiate(soft).double().cpu()
    if not (torch.isfinite(responses).all() and torch.isfinite(slopes).all()):
        raise BadOption("responses", "NaN or infinite", "finite ones: the model's logits are not")
    if sampling.how == "derivative":
        return mean_derivative(masks, responses, slopes)
    return corrected(masks, responses, slopes, device)


def mean_derivative(masks: Tensor, responses: Tensor, slopes: Tensor) -> Regression:
    """From masks [M, P], responses [M] and slopes [K, P] of the first masks. Each half of these
    foretells the responses to the other, both together those to the rest."""
    x, few = masks.double(), len(slopes)
    foretold = torch.empty_like(responses)
    averages = []
    for mine, other in (
        (slice(0, few, 2), slice(1, few, 2)),
        (slice(1, few, 2), slice(0, few, 2)),
        (slice(0, few), slice(few, None)),
    ):
        averages.append(slopes[mine].mean(dim=0))
        rest = x[other] - x[mine].mean(dim=0)
        foretold[other] = responses[mine].mean() + rest @ averages[-1]
    *halves, coefficients = averages
    return Regression(
        coefficients,
        intercept=float(responses.mean() - x.mean(dim=0) @ coefficients),
        r2=_explained(responses, responses - foretold),
        pearson=correlation(responses, foretold),
        masks=len(masks),
        agreement=correlation(*halves),
        converged=True,
        standard_error=slopes.std(dim=0) / few**0.5,
        unseen=torch.stack([responses, foretold], dim=1),
    )


def corrected(
    masks: Tensor, responses: Tensor, slopes: Tensor, device: torch.device | str = "cpu"
) -> Regression:
    """From masks [M, P] and responses [M], the first of them with slopes [K, P]."""
    whole = _correct(masks, responses, slopes, device)
    halves = [
        _correct(masks[start::2], responses[start::2], slopes[start::2], device).coefficients
        for start in (0, 1)
    ]
    foretold = responses - whole.left_out
    return Regression(
        whole.coefficients,
        intercept=float(responses.mean() - masks.double().mean(dim=0) @ whole.coefficients),
        r2=_explained(responses, whole.left_out),
        pearson=correlation(responses, foretold),
        masks=len(masks),
        agreement=correlation(*halves),
        converged=True,
        standard_error=whole.standard_error,
        unseen=torch.stack([responses, foretold], dim=1),
    )


@dataclass(frozen=True, eq=False)
class _Correction:
    coefficients: Tensor  # [P]
    standard_error: Tensor  # [P]
    left_out: Tensor  # [M]: how far each response is from what the others foretell


def _correct(
    masks: Tensor, responses: Tensor, slopes: Tensor, device: torch.device | str
) -> _Correction:
    """The ridge around the mean derivative, in the axes of the masks: x = u s v'."""
    masks, responses, slopes = (x.to(device).double() for x in (masks, responses, slopes))
    start = slopes.mean(dim=0)
    x = masks - masks.mean(dim=0)
    rest = responses - responses.mean() - x @ start
    squares, axes = torch.linalg.eigh(x.T @ x)
    real = squares > squares[-1] * 1e-10  # fewer than P where masks are few
    squares, axes = squares[real], axes[:, real]
    rows = (x @ axes) / squares.sqrt()  # u [M, A]
    along = rows.T @ rest
    best = (torch.inf, squares, rest)
    for penalty in (_PENALTIES.to(squares) * squares[-1]).unbind():
        share = squares / (squares + penalty)
        leverage = rows.square() @ share + 1 / len(x)
        left_out = (rest - rows @ (share * along)) / (1 - leverage).clamp_min(1e-9)
        error = float(left_out.square().mean())
        if error < best[0]:
            best = (error, share, left_out)
    error, share, left_out = best
    added = axes @ (share * along / squares.sqrt())
    spread = (slopes - start) / max(1, len(slopes) - 1) ** 0.5 / len(slopes) ** 0.5  # [K, P]
    kept = spread - ((spread @ axes) * share) @ axes.T  # what the fit leaves of the derivative
    noise = error * (axes * (share / squares.sqrt())).square().sum(dim=1)
    variance = kept.square().sum(dim=0) + noise
    return _Correction(*(t.cpu() for t in (start + added, variance.sqrt(), left_out)))


def _explained(responses: Tensor, errors: Tensor) -> float:
    """R2."""
    return float(1 - errors.square().sum() / (responses - responses.mean()).square().sum())
