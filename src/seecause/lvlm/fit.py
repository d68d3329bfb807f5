"""From masks and responses to one coefficient for each head or token (head attribution, section
3.3, after COAR).

    F(x) ~ x . beta + b,    elastic net on 80 % of the masks; R2 and Pearson's correlation on the
                            others

    1 / (2n) |y - Xw - b|^2 + alpha l1_ratio |w|_1 + alpha (1 - l1_ratio) / 2 |w|^2

The net is scikit-learn's, in Gram form. The data enter only through X'X and X'y, which a GPU makes
at once: X is 0 and 1, so X'X is a count and exact in any precision that holds it. scikit-learn's
coordinate descent then runs on the Gram matrix, which is small. Its rules of convergence are kept.

Training masks come in two halves. How far their coefficients agree tells how much of a coefficient
is noise, and when to stop asking.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from seecause._options import accepts
from seecause.errors import BadOption
from seecause.lvlm.masks import Law, check_seed, draw_masks


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

    stand_in, length = np.zeros((1, len(products)), order="F"), np.array([max(squares, 0.0) ** 0.5])
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


How = Literal["derivative", "corrected", "fit"]
MASKS: dict[How, int] = {"derivative": 64, "corrected": 1000, "fit": 10_000}
MOST_MASKS = 10_000_000
FEWEST = 4  # masks of a derivative: two halves, with a spread each
TOP = 50  # the largest coefficients that the halves are compared in; at most a quarter of all


@dataclass(frozen=True)
class MaskSampling:
    """How masks are drawn and what is made of them: a fit, the mean derivative, or that corrected
    by a fit (`derivative.py`). Of a fit, `adaptive` stops as soon as the halves' coefficients
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
    how: How = "fit"
    soften: float = 0.0  # of the masks that are differentiated at
    slopes: int | None = None  # how many are, the first ones; None: as `how` has it


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
    standard_error: Tensor  # [P] float64: by which other masks would change them
    # agreement after each step of an adaptive run
    history: list[dict[str, Any]] = field(default_factory=list)
    # [n, 2] float64: responses to masks that the coefficients have not seen, true and foretold
    unseen: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64))

    @property
    def reliability(self) -> float:
        """The correlation to expect between these coefficients and those of as many fresh masks
        (Spearman-Brown)."""
        return 2 * self.agreement / (1 + self.agreement)


def regress(
    respond: Callable[[Tensor], Tensor],
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
    rest = (truth - predicted).square().sum() / (truth - truth.mean()).square().sum()
    return Regression(
        fit.coefficients,
        fit.intercept,
        r2=float(1 - rest),
        pearson=correlation(truth, predicted),
        masks=total,
        agreement=agreement,
        converged=fit.converged,
        standard_error=both.standard_error(float((truth - predicted).square().mean())),
        history=history,
        unseen=torch.stack([truth, predicted], dim=1),
    )


def _ask(
    respond: Callable[[Tensor], Tensor], count: int, size: int, sampling: MaskSampling, start: int
) -> tuple[Tensor, Tensor]:
    """`count` masks from number `start` on, and the responses to them."""
    p, law, seed = sampling.p, sampling.law, sampling.seed
    masks = draw_masks(count, size, p=p, law=law, seed=seed, start=start)
    responses = respond(masks)
    if not torch.isfinite(responses).all():
        raise BadOption("responses", "NaN or infinite", "finite ones: the model's logits are not")
    return masks, responses


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


def check_sampling(sampling: MaskSampling, size: int) -> None:
    """Refuse what cannot be fitted for `size` coefficients, before any mask is asked."""
    if sampling.how not in get_args(How):
        raise BadOption("how", sampling.how, "derivative, corrected or fit")
    for name, hint in get_type_hints(MaskSampling).items():
        if not accepts(hint, getattr(sampling, name)):
            raise BadOption(name, getattr(sampling, name), f"of type {hint}")
    check_seed(sampling.seed)
    if sampling.masks > MOST_MASKS:
        raise BadOption("masks", sampling.masks, f"at most {MOST_MASKS:,}")
    if not 0 <= sampling.alpha < float("inf"):
        raise BadOption("alpha", sampling.alpha, "a penalty from 0 on")
    if not 0 <= sampling.l1_ratio <= 1:
        raise BadOption("l1_ratio", sampling.l1_ratio, "a share from 0 to 1")
    if not (sampling.step >= 10 and 0 < sampling.agreement < 1):
        raise BadOption(
            "step, agreement",
            (sampling.step, sampling.agreement),
            "at least 10 masks a step, and a correlation between 0 and 1",
        )
    if sampling.slopes is not None and not FEWEST <= sampling.slopes <= sampling.masks:
        raise BadOption("slopes", sampling.slopes, f"{FEWEST} to {sampling.masks}, the masks")
    if sampling.how != "fit":
        if sampling.adaptive:
            raise BadOption("adaptive", True, "how='fit': only a fit stops by itself")
        if sampling.masks < FEWEST:
            raise BadOption("masks", sampling.masks, f"at least {FEWEST}")
        return
    if not 0 < sampling.split < 1:
        raise BadOption("split", sampling.split, "the share of masks to fit, between 0 and 1")
    split = sampling.split
    least = max(2, int(size / split), int(1 / (1 - split)))
    while round(split * least) <= size or least - round(split * least) < 2:
        least += 1
    if sampling.masks < least:
        share = f"{split:.0%} of them must outnumber the {size} coefficients"
        remedy = f"at least {least}: {share}; how='derivative' needs fewer"
        raise BadOption("masks", sampling.masks, remedy)
