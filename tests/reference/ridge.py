"""The correction of a mean derivative by definition: every fit is made anew without each of the
responses that it foretells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LeftOutRidge:
    """A ridge around the mean derivative g that fits what it leaves unexplained, with the penalty
    that foretells left-out responses best: everything is solved anew without each of them."""

    masks: Tensor  # [M, P]
    responses: Tensor  # [M]
    slopes: Tensor  # [K, P], of the first masks
    penalties: Tensor  # in units of the largest eigenvalue

    def __post_init__(self) -> None:
        x = self.masks - self.masks.mean(dim=0)
        self.gram, self.start = x.T @ x, self.slopes.mean(dim=0)
        self.rest = self.responses - self.masks @ self.start
        largest = torch.linalg.eigvalsh(self.gram)[-1]
        errors = [self._left_out(float(share * largest)) for share in self.penalties]
        best = min(range(len(errors)), key=lambda k: float(errors[k].square().mean()))
        self.left_out, self.penalty = errors[best], float(self.penalties[best] * largest)
        self.coefficients = self.start + _ridge(self.masks, self.rest, self.penalty)

    def _left_out(self, penalty: float) -> Tensor:
        errors = []
        for i in range(len(self.masks)):
            others = torch.arange(len(self.masks)) != i
            x, y = self.masks[others], self.rest[others]
            foretold = y.mean() + (self.masks[i] - x.mean(dim=0)) @ _ridge(x, y, penalty)
            errors.append(self.rest[i] - foretold)
        return torch.stack(errors)

    def standard_error(self) -> Tensor:
        """The derivative's own spread, less what the fit takes back of it, and the fit's noise."""
        size, count = self.masks.shape[1], len(self.slopes)
        inverse = torch.linalg.inv(self.gram + self.penalty * torch.eye(size).to(self.gram))
        left = torch.eye(size).to(self.gram) - inverse @ self.gram
        off = self.slopes - self.start
        spread = off.T @ off / (count - 1) / count
        noise = self.left_out.square().mean() * inverse @ self.gram @ inverse
        return (left @ spread @ left.T + noise).diagonal().sqrt()


def _ridge(masks: Tensor, responses: Tensor, penalty: float) -> Tensor:
    x, y = masks - masks.mean(dim=0), responses - responses.mean()
    return torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1]).to(x), x.T @ y)
