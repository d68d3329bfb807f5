"""From masks and responses to one coefficient for each head or token (head attribution, section
3.3, after COAR), in three ways (`estimate`).

fit         F(x) ~ x . beta + b: elastic net on 80 % of the masks; R2 and Pearson's correlation on
            the others (the paper's)

    1 / (2n) |y - Xw - b|^2 + alpha l1_ratio |w|_1 + alpha (1 - l1_ratio) / 2 |w|^2

            The net is scikit-learn's, with its rules of convergence, on X'X and X'y alone, which a
            GPU makes at once: X is 0 and 1, so X'X is a count and exact in any precision that holds
            it. Training masks come in two halves. How far their coefficients agree tells how much
            of a coefficient is noise, and when to stop asking.

derivative  beta_n ~ mean over masks x of dF/dm_n at m = s + (1 - 2 s) x: one run back through the
            model tells of all heads (or tokens) at once, where a fit needs more masks than there
            are heads. Masks are softened a little for heads, s = 0.1: at its ends a head's curve is
            often flat. What is left is off where F bends on the way from 0 to 1.

corrected   fits what the mean derivative g leaves unexplained, as a control variate:

    beta = g + w,    w = argmin |F(x) - g . x - w . x - b|^2 + penalty |w|^2

            with the penalty that foretells left-out masks best: few masks leave the derivative as
            it is, many bring the coefficients of a fit, whatever the derivative says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.lvlm.masks import MaskSampling, check_sampling, draw_masks

Respond = Callable[[Tensor], Tensor]  # masks [M, P] -> responses [M]
Differentiate = Callable[[Tensor], Tensor]  # soft masks [M, P] -> slopes [M, P]
TOP = 50  # the largest coefficients that the halves are compared in; at most a quarter of all
SOFTEN = 0.1  # of heads, chosen on five pictures of Critters; image tokens do best without
_PENALTIES = torch.logspace(-4, 4, 33, dtype=torch.float64)  # in units of the largest square


@dataclass(frozen=True, eq=False)
class Penalty:
    """scikit-learn's names and defaults, with the paper's alpha."""

    alpha: float = 5e-4
    l1_ratio: float = 0.5
    max_iter: int = 1000
    tol: float = 1e-4


@dataclass(frozen=True, eq=False)
class ElasticNetFit:
    """y ~ x @ coefficients + intercept."""

    coefficients: Tensor  # [P] float64, on the CPU
    intercept: float
    sweeps: int
    converged: bool

    def predict(self, x: Tensor) -> Tensor:
        """x [n, P] -> [n] float64 on the CPU."""
        return x.cpu().double() @ self.coefficients + self.intercept


class Moments:
    """Sums over masks x [n, P] and responses y [n], which are all a fit needs; more can be added at
    any time."""

    def __init__(self, size: int, device: torch.device | str = "cpu"):
        self.count = 0
        self.x, self.xy = (torch.zeros(size, dtype=torch.float64, device=device) for _ in range(2))
        self.xx = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.y = self.yy = 0.0

    def add(self, x: Tensor, y: Tensor) -> Moments:
        x, y = x.to(self.xx.device), y.to(self.xx.device).double()
        counts = x.float()  # counts up to 2^24 are exact in float32
        self.count += len(x)
        self.xx += counts.T @ counts
        self.x += counts.double().sum(dim=0)
        self.xy += counts.double().T @ y
        self.y += float(y.sum())
        self.yy += float(y.square().sum())
        return self

    def plus(self, other: Moments) -> Moments:
        """Both together."""
        both = Moments(len(self.x), self.x.device)
        for name in ("count", "x", "xy", "xx", "y", "yy"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def fit(self, penalty: Penalty | None = None) -> ElasticNetFit:
        """The elastic net on everything added so far."""
        penalty = penalty or Penalty()
        if self.count == 0:
            raise BadOption("masks", 0, "at least one")
        mean_x, mean_y = self.x / self.count, self.y / self.count
        gram = self._gram().cpu().numpy()
        products = (self.xy - mean_x * self.y).cpu().numpy()
        squares = self.yy - self.count * mean_y**2
        weights, sweeps, converged = _descend(gram, products, squares, self.count, penalty)
        coefficients = torch.from_numpy(weights)
        intercept = mean_y - float(mean_x.cpu() @ coefficients)
        return ElasticNetFit(coefficients, intercept, sweeps, converged)

    def standard_error(self, error: float) -> Tensor:
        """[P] of least squares, where responses differ from what is fitted by `error` on average,
        squared. The penalty only makes it smaller."""
        return (error * torch.linalg.pinv(self._gram(), hermitian=True).diagonal()).sqrt().cpu()

    def _gram(self) -> Tensor:
        """X'X of centred masks."""
        mean = self.x / self.count
        return self.xx - self.count * torch.outer(mean, mean)


def elastic_net(x: Tensor, y: Tensor, penalty: Penalty | None = None) -> ElasticNetFit:
    """ElasticNetFit responses y [n] to masks x [n, P] (0 and 1)."""
    return Moments(x.shape[1], x.device).add(x, y).fit(penalty)


def _descend(
    gram: np.ndarray, products: np.ndarray, squares: float, count: int, penalty: Penalty
) -> tuple[np.ndarray, int, bool]:
    """scikit-learn's coordinate descent on X'X and X'y. Of X itself it would read the number of
    rows, of y its length: one row stands in for both."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import enet_path

    stand_in, length = np.zeros((1, len(products))), np.array([max(squares, 0.0) ** 0.5])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        descend: Callable[..., Any] = enet_path  # its types are guessed from its docstring
        _, weights, _, sweeps = descend(
            stand_in, length, l1_ratio=penalty.l1_ratio, alphas=[penalty.alpha * count],
            precompute=np.ascontiguousarray(gram), Xy=products,
            check_input=False, return_n_iter=True, tol=penalty.tol, max_iter=penalty.max_iter,
        )  # fmt: skip
    converged = not any(issubclass(w.category, ConvergenceWarning) for w in caught)
    return np.ascontiguousarray(weights[:, 0]), int(sweeps[0]), converged


@dataclass(frozen=True, eq=False)
class Coefficients:
    """One number for each head or token (float64, on the CPU), and how far to trust them."""

    coefficients: Tensor
    intercept: float
    r2: float  # on masks that the coefficients have not seen
    pearson: float
    masks: int  # asked in all
    agreement: float  # Pearson's correlation of the coefficients of two halves of the masks
    standard_error: Tensor  # by which other masks would change them


@dataclass(frozen=True, eq=False)
class Regression(Coefficients):
    """Coefficients [P] as they are estimated."""

    converged: bool = True
    # agreement after each step of an adaptive run
    history: list[dict[str, Any]] = field(default_factory=list)
    # [n, 2] float64: responses to masks that the coefficients have not seen, true and foretold
    unseen: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64))


def estimate(
    respond: Respond,
    differentiate: Differentiate,
    size: int,
    sampling: MaskSampling,
    device: torch.device | str = "cpu",
) -> Regression:
    """Coefficients [P] by the way that `sampling.how` names."""
    if sampling.how == "fit":
        return regress(respond, size, sampling, device)
    check_sampling(sampling, size)
    masks, responses = _ask(respond, sampling.masks, size, sampling)
    few = masks[: sampling.differentiated].double()
    slopes = _finite(differentiate(sampling.soften + (1 - 2 * sampling.soften) * few))
    if sampling.how == "derivative":
        return mean_derivative(masks, responses.double().cpu(), slopes.double().cpu())
    return corrected(masks, responses.double().cpu(), slopes.double().cpu(), device)


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
    return _judged(
        coefficients,
        float(responses.mean() - x.mean(dim=0) @ coefficients),
        (responses, foretold),
        masks=len(masks),
        agreement=correlation(*halves),
        standard_error=slopes.std(dim=0) / few**0.5,
    )


def corrected(
    masks: Tensor, responses: Tensor, slopes: Tensor, device: torch.device | str = "cpu"
) -> Regression:
    """From masks [M, P] and responses [M], the first of them with slopes [K, P]."""
    coefficients, standard_error, left_out = _correct(masks, responses, slopes, device)
    halves = [
        _correct(masks[start::2], responses[start::2], slopes[start::2], device)[0]
        for start in (0, 1)
    ]
    return _judged(
        coefficients,
        float(responses.mean() - masks.double().mean(dim=0) @ coefficients),
        (responses, responses - left_out),
        masks=len(masks),
        agreement=correlation(*halves),
        standard_error=standard_error,
    )


def _correct(
    masks: Tensor, responses: Tensor, slopes: Tensor, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """The ridge around the mean derivative, in the axes of the masks, x = u s v': coefficients [P],
    their standard errors, and how far each response [M] is from what the others foretell."""
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
    spread = (slopes - start) / (len(slopes) - 1) ** 0.5 / len(slopes) ** 0.5  # [K, P]
    kept = spread - ((spread @ axes) * share) @ axes.T  # what the fit leaves of the derivative
    noise = error * (axes * (share / squares.sqrt())).square().sum(dim=1)
    variance = kept.square().sum(dim=0) + noise
    return (start + added).cpu(), variance.sqrt().cpu(), left_out.cpu()


def regress(
    respond: Respond,
    size: int,
    sampling: MaskSampling,
    device: torch.device | str = "cpu",
) -> Regression:
    """Ask `respond` (masks [M, P] -> responses [M]) and fit."""
    check_sampling(sampling, size)
    halves = [Moments(size, device) for _ in range(2)]
    unseen, answers, history = list[Tensor](), list[Tensor](), list[dict[str, Any]]()
    total, step = 0, sampling.step if sampling.adaptive else sampling.masks
    agreement = torch.nan
    while total < sampling.masks:
        masks, responses = _ask(respond, min(step, sampling.masks - total), size, sampling, total)
        count = len(masks)
        generator = torch.Generator().manual_seed(sampling.seed + total)
        shuffled, fitted = torch.randperm(count, generator=generator), round(sampling.split * count)
        train, test = shuffled[:fitted], shuffled[fitted:]
        for half, rows in zip(halves, (train[::2], train[1::2]), strict=True):
            half.add(masks[rows], responses[rows.to(responses.device)])
        unseen.append(masks[test])
        answers.append(responses[test.to(responses.device)].cpu().double())
        total += count
        enough = halves[0].count + halves[1].count > size or total == sampling.masks
        if sampling.adaptive and enough:
            agreement, top, common = _agreement(halves, sampling)
            history.append({"masks": total, "agreement": agreement, "top": top, "in both": common})
            if agreement >= sampling.agreement:
                break
    if not sampling.adaptive:
        agreement, _, _ = _agreement(halves, sampling)
    both = halves[0].plus(halves[1])
    fit = both.fit(_penalty(sampling))
    truth, predicted = torch.cat(answers), fit.predict(torch.cat(unseen))
    return _judged(
        fit.coefficients,
        fit.intercept,
        (truth, predicted),
        masks=total,
        agreement=agreement,
        standard_error=both.standard_error(float((truth - predicted).square().mean())),
        converged=fit.converged,
        history=history,
    )


def _judged(
    coefficients: Tensor, intercept: float, unseen: tuple[Tensor, Tensor], **details: Any
) -> Regression:
    """Coefficients, and how well they foretell responses to masks that they have not seen: true
    ones [n] and foretold."""
    truth, foretold = unseen
    rest = (truth - foretold).square().sum() / (truth - truth.mean()).square().sum()
    quality: dict[str, Any] = {"r2": float(1 - rest), "pearson": correlation(truth, foretold)}
    both = torch.stack([truth, foretold], dim=1)
    return Regression(coefficients, intercept, **quality, **details, unseen=both)


def _ask(
    respond: Respond, count: int, size: int, sampling: MaskSampling, start: int = 0
) -> tuple[Tensor, Tensor]:
    """`count` masks from number `start` on, and the responses to them."""
    p, law, seed = sampling.p, sampling.law, sampling.seed
    masks = draw_masks(count, size, p=p, law=law, seed=seed, start=start)
    return masks, _finite(respond(masks))


def _finite(responses: Tensor) -> Tensor:
    if not torch.isfinite(responses).all():
        raise BadOption("responses", "NaN or infinite", "finite ones: the model's logits are not")
    return responses


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's, of two vectors; NaN if one is constant."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return float((x @ y) / (x.norm() * y.norm()))


def _agreement(halves: list[Moments], sampling: MaskSampling) -> tuple[float, int, int]:
    """Correlation of the halves' coefficients, and of so many of the largest, how many they have in
    common."""
    first, second = (half.fit(_penalty(sampling)).coefficients for half in halves)
    top = min(TOP, max(1, len(first) // 4))
    common = set(first.topk(top).indices.tolist()) & set(second.topk(top).indices.tolist())
    return correlation(first, second), top, len(common)


def _penalty(sampling: MaskSampling) -> Penalty:
    return Penalty(alpha=sampling.alpha, l1_ratio=sampling.l1_ratio)
