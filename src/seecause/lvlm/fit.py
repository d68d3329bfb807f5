"""The elastic net, scikit-learn's, in Gram form.

    1 / (2n) |y - Xw - b|^2 + alpha l1_ratio |w|_1 + alpha (1 - l1_ratio) / 2 |w|^2

The data enter only through X'X and X'y, which a GPU makes at once: X is 0 and 1, so X'X is a count
and exact in any precision that holds it. scikit-learn's coordinate descent then runs on the Gram
matrix, which is small. Its rules of convergence are kept.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import enet_path
from torch import Tensor

from seecause.errors import BadOption


@dataclass(frozen=True, eq=False)
class Penalty:
    """scikit-learn's names and defaults, with the paper's alpha."""

    alpha: float = 5e-4
    l1_ratio: float = 0.5
    max_iter: int = 1000
    tol: float = 1e-4


@dataclass(frozen=True, eq=False)
class Fit:
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

    def fit(self, penalty: Penalty | None = None) -> Fit:
        """The elastic net on everything added so far."""
        penalty = penalty or Penalty()
        if self.count == 0:
            raise BadOption("masks", 0, "at least one")
        mean_x, mean_y = self.x / self.count, self.y / self.count
        gram = (self.xx - self.count * torch.outer(mean_x, mean_x)).cpu().numpy()
        products = (self.xy - mean_x * self.y).cpu().numpy()
        squares = self.yy - self.count * mean_y**2
        weights, sweeps, converged = _descend(gram, products, squares, self.count, penalty)
        coefficients = torch.from_numpy(weights)
        return Fit(coefficients, mean_y - float(mean_x.cpu() @ coefficients), sweeps, converged)


def elastic_net(x: Tensor, y: Tensor, penalty: Penalty | None = None) -> Fit:
    """Fit responses y [n] to masks x [n, P] (0 and 1)."""
    return Moments(x.shape[1], x.device).add(x, y).fit(penalty)


def _descend(
    gram: np.ndarray, products: np.ndarray, squares: float, count: int, penalty: Penalty
) -> tuple[np.ndarray, int, bool]:
    """scikit-learn's coordinate descent on X'X and X'y. Of X itself it would read the number of
    rows, of y its length: one row stands in for both."""
    stand_in, length = np.zeros((1, len(products)), order="F"), np.array([max(squares, 0.0) ** 0.5])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        _, weights, _, sweeps = enet_path(
            stand_in, length, l1_ratio=penalty.l1_ratio, alphas=[penalty.alpha * count],
            precompute=np.ascontiguousarray(gram), Xy=products,
            check_input=False, return_n_iter=True, tol=penalty.tol, max_iter=penalty.max_iter,
        )  # fmt: skip
    return (
        np.ascontiguousarray(weights[:, 0]),
        int(sweeps[0]),
        not any(issubclass(w.category, ConvergenceWarning) for w in caught),
    )
