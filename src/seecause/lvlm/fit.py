"""From masks and responses to one coefficient for each head or image token (head attribution,
section 3.3).

A mask x leaves each entry on with probability 1 - p; F(x) is the response. Two estimators:

fit         F(x) ~ x . beta + b, the paper's elastic net on 80 % of the masks; R2 and Pearson's
            correlation on the others

    1 / (2n) |y - Xw - b|^2 + alpha l1_ratio |w|_1 + alpha (1 - l1_ratio) / 2 |w|^2

derivative  beta_n = mean over masks of dF/dm_n at m = s + (1 - 2 s) x. One backward pass gives the
            derivatives for all entries, so 64 masks suffice where a fit needs more masks than there
            are coefficients. For heads masks are softened a little, s = 0.1, because the response
            is often flat at the ends. The error that remains is the curvature of F.

Both compare the coefficients of two halves of the masks (`agreement`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.options import Limit

How = Literal["derivative", "fit"]
MaskCount = Annotated[int, Limit(lambda count: count >= 4, "at least 4 masks")]
Ablated = Annotated[float, Limit(lambda p: 0 < p < 1, "a share between 0 and 1")]

MASKS: dict[How, int] = {"derivative": 64, "fit": 10_000}
SOFTEN = 0.1  # of heads, chosen on five images of Critters; image tokens do best without
ALPHA, L1_RATIO, TRAIN = 5e-4, 0.5, 0.8  # the paper's elastic net and its share of training masks


@dataclass(frozen=True)
class Sampling:
    """Which masks are drawn and what is made of them."""

    how: How
    masks: int
    p: float
    seed: int
    soften: float = 0.0
    slopes: int = 0  # how many of the masks, the first ones, derivatives are taken at

    @classmethod
    def of(
        cls, how: How, masks: int | None, p: float, seed: int, *, soften: float = 0.0
    ) -> Sampling:
        """The usual number of masks where none is given, all of them differentiated."""
        count = MASKS[how] if masks is None else masks
        if how == "fit":
            return cls(how, count, p, seed)
        return cls(how, count, p, seed, soften, count)

    @property
    def runs(self) -> int:
        """Masked runs in all: a derivative runs its masks once more."""
        return self.masks + self.slopes

    def check(self, size: int) -> None:
        """Refuse too few masks for `size` coefficients."""
        if self.how == "fit" and round(TRAIN * self.masks) <= size:
            expected = f"more than {size / TRAIN:.0f}: {TRAIN:.0%} of the masks must outnumber the"
            expected += f" {size} coefficients; how='derivative' needs fewer"
            raise BadOption("masks", self.masks, expected)

    def draw(self, size: int) -> Tensor:
        """[masks, size] bool."""
        self.check(size)
        return draw_masks(self.masks, size, p=self.p, seed=self.seed)

    def softened(self, masks: Tensor) -> Tensor:
        """The masks at which derivatives are taken, [slopes, size] float64."""
        return self.soften + (1 - 2 * self.soften) * masks[: self.slopes].double()


def draw_masks(count: int, size: int, *, p: float = 0.75, seed: int = 0) -> Tensor:
    """Masks [count, size] bool that are False with probability p, each entry by itself. More masks
    of one seed begin with the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, size, generator=generator, dtype=torch.float32) >= p


@dataclass(frozen=True, eq=False)
class Coefficients:
    """One number for each head or image token (float64, on the CPU), and how far to trust it.

    Attributes:
        coefficients: The estimates.
        intercept: The predicted response where everything is ablated.
        r2: Explained variance of responses to masks that the coefficients were not estimated from.
        pearson: Correlation of these responses with their predictions.
        masks: How many masks were drawn.
        agreement: Correlation of the coefficients of two halves of the masks.
        standard_error: By how much other masks would change each coefficient.
        protocol: How the coefficients were computed.
        unseen: The responses [n, 2] behind `r2`, true and predicted.
    """

    coefficients: Tensor
    intercept: float
    r2: float
    pearson: float
    masks: int
    agreement: float
    standard_error: Tensor
    protocol: dict[str, Any] = field(default_factory=dict)
    unseen: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64))


def estimate(
    masks: Tensor,
    responses: Tensor,
    slopes: Tensor | None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Coefficients:
    """Coefficients [P] from masks [M, P] and responses [M]: by the mean derivative where the first
    masks have `slopes` [K, P], else by the elastic net."""
    if not all(bool(x.isfinite().all()) for x in (responses, slopes) if x is not None):
        raise BadOption("responses", "NaN or infinite", "finite ones: the model's logits are not")
    responses = responses.double().cpu()
    if slopes is None:
        return fit(masks, responses, seed=seed, device=device)
    return mean_derivative(masks, responses, slopes.double().cpu())


def mean_derivative(masks: Tensor, responses: Tensor, slopes: Tensor) -> Coefficients:
    """Each half of the `slopes` predicts the responses to the other half, both together those to
    the masks without slopes."""
    x, few = masks.double(), len(slopes)
    predicted = torch.empty_like(responses)
    averages = []
    for mine, other in (
        (slice(0, few, 2), slice(1, few, 2)),
        (slice(1, few, 2), slice(0, few, 2)),
        (slice(0, few), slice(few, None)),
    ):
        averages.append(slopes[mine].mean(dim=0))
        rest = x[other] - x[mine].mean(dim=0)
        predicted[other] = responses[mine].mean() + rest @ averages[-1]
    *halves, coefficients = averages
    return _judged(
        coefficients,
        float(responses.mean() - x.mean(dim=0) @ coefficients),
        (responses, predicted),
        masks=len(masks),
        agreement=correlation(*halves),
        standard_error=slopes.std(dim=0) / few**0.5,
    )


def fit(
    masks: Tensor, responses: Tensor, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Coefficients:
    """The elastic net on 80 % of the masks, drawn by `seed`; judged on the others."""
    generator = torch.Generator().manual_seed(seed)
    shuffled, fitted = torch.randperm(len(masks), generator=generator), round(TRAIN * len(masks))
    train, test = shuffled[:fitted], shuffled[fitted:]
    halves = [elastic_net(masks[i], responses[i], device)[0] for i in (train[::2], train[1::2])]
    coefficients, intercept, gram = elastic_net(masks[train], responses[train], device)
    predicted = masks[test].double() @ coefficients + intercept
    error = (responses[test] - predicted).square().mean().to(gram)
    variance = error * torch.linalg.pinv(gram, hermitian=True).diagonal()  # of least squares
    return _judged(
        coefficients,
        intercept,
        (responses[test], predicted),
        masks=len(masks),
        agreement=correlation(*halves),
        standard_error=variance.sqrt().cpu(),
    )


def elastic_net(
    x: Tensor, y: Tensor, device: torch.device | str = "cpu"
) -> tuple[Tensor, float, Tensor]:
    """scikit-learn's elastic net of y [n] on masks x [n, P]: coefficients [P], the intercept, and
    X'X of the centred masks [P, P].

    X'X is made on `device`: x holds zeros and ones, so its sums of products are whole numbers and
    exact in float32 (up to 2^24 masks).
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import ElasticNet

    counts = x.to(device).float()
    mean, mean_y = counts.mean(dim=0, dtype=torch.float64), float(y.mean())
    gram = (counts.T @ counts).double() - len(x) * torch.outer(mean, mean)
    net = ElasticNet(
        alpha=ALPHA, l1_ratio=L1_RATIO, fit_intercept=False, precompute=gram.cpu().numpy()
    )
    with warnings.catch_warnings():  # where masks are few; R2 and agreement tell
        warnings.simplefilter("ignore", ConvergenceWarning)
        net.fit((x.double() - mean.cpu()).numpy(), (y - mean_y).numpy())
    coefficients = torch.from_numpy(net.coef_)
    return coefficients, mean_y - float(mean.cpu() @ coefficients), gram


def _judged(
    coefficients: Tensor, intercept: float, unseen: tuple[Tensor, Tensor], **details: Any
) -> Coefficients:
    """Coefficients with R2 and correlation of `unseen` responses, true and predicted."""
    truth, predicted = unseen
    rest = (truth - predicted).square().sum() / (truth - truth.mean()).square().sum()
    quality: dict[str, Any] = {"r2": float(1 - rest), "pearson": correlation(truth, predicted)}
    both = torch.stack([truth, predicted], dim=1)
    return Coefficients(coefficients, intercept, **quality, **details, unseen=both)


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of two vectors; NaN if one is constant."""
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])
