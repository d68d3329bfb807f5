"""Which heads carry the image into the answer, from which image tokens, into which words (head
attribution, Kim et al. 2025).

beta_n   mean of F over masks with head n on, less the mean with it off, the other heads at random
         (a q-weighted Banzhaf value)

A mask x leaves each entry on with probability 1 - p; F(x) is the response. Two estimators
(sections 4.1 and A.3):

fit         F(x) ~ x . beta + b, the paper's elastic net on 80 % of the masks; R2 and Pearson's
            correlation on the others

    1 / (2n) |y - Xw - b|^2 + alpha l1_ratio |w|_1 + alpha (1 - l1_ratio) / 2 |w|^2

derivative  beta_n = mean over masks of dF/dm_n at m = s + (1 - 2 s) x. One backward pass gives the
            derivatives for all entries, so 64 masks suffice where a fit needs more masks than there
            are coefficients. For heads masks are softened a little, s = 0.1, because the response
            is often flat at the ends. The error that remains is the curvature of F.

Both compare the coefficients of two halves of the masks (`agreement`).

Whether a ranking of heads is valid (section 4.2): heads are switched on, or off, one by one,
highest first; x^(k) has the top k on:

faithfulness F(x^(k)) -> 1        k_faith = min {k : F(x^(k)) > 0.8}: the heads that are enough
completeness F(1 - x^(k)) -> 0    k_comp = min {k : F(1 - x^(k)) < 0.2}: the heads that are needed

The curves are not monotone, so both counts are the first crossing of a scan from k = 1 on. Other
rankings are compared with it:

attention   Img(l, h): attention on the image, averaged over text rows                     (eq. 10)
causal      Delta_n = 1 - F(all heads but n): what removing one head costs
random      any order

Given x* = x^(k_faith) (sections 5.1 and 5.2):

Delta_i  1 - F(x*, all but text row i) / F(x*): what blocking one text row costs          (eq. 11)
u*_i     Delta_i > 0.05,   sufficiency = F(x*, u*) / F(x*)
gamma    coefficients of F(x*, u*, v) / F(x*, u*) on image-token masks v                   (eq. 12)
w        sum_n x*_n beta_n sum_i u*_i Delta_i a^n_i: attention, weighted by what matters   (eq. 13)

`trace_answer` computes all of it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from seecause.errors import BadOption
from seecause.files import write_atomic, write_json
from seecause.lvlm.engine import MaskedRows, MaskEngine, weak
from seecause.lvlm.model import Head
from seecause.models.block import Named
from seecause.options import Limit, Seed, checked
from seecause.results import Result

How = Literal["derivative", "fit"]
MaskCount = Annotated[int, Limit(lambda count: count >= 4, "at least 4 masks")]
Ablated = Annotated[float, Limit(lambda p: 0 < p < 1, "a share between 0 and 1")]

MASKS: dict[How, int] = {"derivative": 64, "fit": 10_000}
SOFTEN = 0.1  # s for heads, tuned on five Critters images; image tokens are best with s = 0
ALPHA, L1_RATIO, TRAIN = 5e-4, 0.5, 0.8  # the paper's elastic net and its share of training masks
FAITHFUL, COMPLETE = 0.8, 0.2
KEPT = 0.05  # a text row is kept if blocking it reduces the response by more
LOW_R2, LOW_AGREEMENT = 0.5, 0.8  # lower values give a warning
ORDERS = 5  # number of random rankings
POINTS = 128  # counts of heads at which rankings other than head attribution's are measured
LENS_HEADS, LENS_WORDS = 5, 10
_LEAST = 0.05  # if F of the chosen heads is lower, shares of it are noise


@dataclass(frozen=True)
class Sampling:
    """Options of the masks and of the estimate."""

    how: How
    masks: int
    p: float
    seed: int
    soften: float = 0.0
    slopes: int = 0  # number of masks at which derivatives are computed: the first ones

    @classmethod
    def of(
        cls, how: How, masks: int | None, p: float, seed: int, *, soften: float = 0.0
    ) -> Sampling:
        """Default numbers of masks; with how="derivative" all masks are differentiated."""
        count = MASKS[how] if masks is None else masks
        if how == "fit":
            return cls(how, count, p, seed)
        return cls(how, count, p, seed, soften, count)

    @property
    def runs(self) -> int:
        """Total number of masked runs; masks with a derivative run twice."""
        return self.masks + self.slopes

    def check(self, size: int) -> None:
        """Raises if there are too few masks for `size` coefficients."""
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
    """One number for each head or image token (float64, on the CPU), with quality measures.

    Attributes:
        coefficients: The estimates.
        intercept: The predicted response where everything is ablated.
        r2: Explained variance of responses to masks that the coefficients were not estimated from.
        pearson: Correlation of these responses with their predictions.
        masks: How many masks were drawn.
        agreement: Correlation of the coefficients of two halves of the masks.
        standard_error: Standard error of each coefficient over draws of masks.
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
        raise BadOption("responses", "NaN or infinite", "finite values, which need finite logits")
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
    """The elastic net on 80 % of the masks, drawn by `seed`; evaluated on the others."""
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
    known: Any = gram.cpu().numpy()
    net = ElasticNet(alpha=ALPHA, l1_ratio=L1_RATIO, fit_intercept=False, precompute=known)
    with warnings.catch_warnings():  # few masks converge slowly; R2 and agreement show it
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
    quality: Named = {"r2": float(1 - rest), "pearson": correlation(truth, predicted)}
    both = torch.stack([truth, predicted], dim=1)
    return Coefficients(coefficients, intercept, **quality, **details, unseen=both)


def top_heads(values: Tensor, k: int) -> list[Head]:
    """The `k` heads with the largest values [L, H], highest first."""
    order = values.flatten().argsort(descending=True, stable=True)[:k]
    return [divmod(index, values.shape[1]) for index in order.tolist()]


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of two vectors; NaN if one is constant."""
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


@dataclass(frozen=True, eq=False)
class RankingCurves:
    """F along a ranking of P heads; one row for each order where there are several (random)."""

    faithfulness: Tensor  # [O, P + 1] float64; column k: only the top k on
    completeness: Tensor  # [O, P + 1] float64; column k: all but the top k on

    def enough(self, level: float = FAITHFUL) -> Tensor:
        """[O] k_faith: the number of heads that give more than `level` of the effect alone."""
        return _first(self.faithfulness > level)

    def needed(self, level: float = COMPLETE) -> Tensor:
        """[O] k_comp: the number of removed heads that leave less than `level` of the effect."""
        return _first(self.completeness < level)

    def rows(self, rows: slice) -> RankingCurves:
        return RankingCurves(self.faithfulness[rows], self.completeness[rows])


def scan(engine: MaskEngine, orders: Tensor, *, points: int | None = None) -> RankingCurves:
    """Both curves for orders [P] or [O, P] of component indices, highest first. In full, or with
    `points` at about so many counts (`curve_counts`) and interpolated between them."""
    orders = torch.atleast_2d(orders.cpu())
    counts = curve_counts(engine.n_components, points)
    ranks = orders.argsort(dim=1)  # of each head in each order
    on = ranks[:, None] < torch.tensor(counts)[:, None]  # [O, K, P]
    responses = engine.evaluate(heads=torch.cat([on, ~on]).flatten(0, 1)).double().cpu()
    every = np.arange(engine.n_components + 1)
    rows = [np.interp(every, counts, row) for row in responses.reshape(-1, len(counts)).numpy()]
    return RankingCurves(*torch.from_numpy(np.stack(rows)).reshape(2, len(orders), -1))


def curve_counts(size: int, points: int | None = None) -> list[int]:
    """Numbers of heads at the points of a curve, out of `size`: all, or about `points`, which are
    denser for few heads."""
    if points is None or points > size:
        return list(range(size + 1))
    return sorted({round(size * (place / (points - 1)) ** 2) for place in range(points)})


def _first(crossed: Tensor) -> Tensor:
    """The first True of each row [O, P + 1], from k = 1 on; the last k where there is none."""
    crossed = crossed[:, 1:]
    return torch.where(crossed.any(dim=1), crossed.int().argmax(dim=1) + 1, crossed.shape[1])


def attention_scores(engine: MaskEngine) -> Tensor:
    """[L, H] float64: attention of a head of the intact model on the image (eq. 10)."""
    return engine.activations().attention.sum(dim=-1).mean(dim=-1).double().cpu()


def causal_scores(engine: MaskEngine) -> Tensor:
    """[L, H] float64: the share of the image's effect that is lost without this head, all others
    seeing."""
    all_but_one = ~torch.eye(engine.n_components, dtype=torch.bool)
    lost = 1 - engine.evaluate(heads=all_but_one).double().cpu()
    return lost.reshape(engine.lvlm.n_layers, engine.lvlm.n_heads)


def random_orders(engine: MaskEngine, count: int, *, seed: int = 0) -> Tensor:
    """[count, L*H]: component indices in random orders."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(engine.n_components, generator=generator) for _ in range(count)]
    return torch.stack(orders)


@dataclass(frozen=True, eq=False)
class HeadAttribution(Coefficients):
    """One coefficient for each head: its share of the image's effect on the answer.

    A mean derivative may be further off than its standard error, because the response is curved.

    Attributes:
        coefficients: [L, H], the estimates.
        intercept: The predicted response where all heads are ablated.
        r2: Explained variance of responses to masks that the coefficients were not estimated from.
        pearson: Correlation of these responses with their predictions.
        masks: How many masks were drawn.
        agreement: Correlation of the coefficients of two halves of the masks.
        standard_error: [L, H], over draws of masks.
        protocol: How the coefficients were computed.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> image = sc.data.open_image("critters:clean:test#3")
        >>> bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3))
        >>> engine = sc.lvlm.MaskEngine(lvlm, image, "What is this creature?", bank)
        >>> heads = sc.lvlm.attribute_heads(engine, masks=8)
        >>> heads.coefficients.shape, len(heads.top(5))
        (torch.Size([6, 8]), 5)
    """

    def order(self) -> Tensor:
        """Component indices l * H + h by falling coefficient, [L*H]."""
        return self.coefficients.flatten().argsort(descending=True, stable=True)

    def top(self, k: int) -> list[Head]:
        """The `k` heads with the largest coefficients."""
        return top_heads(self.coefficients, k)

    def mask(self, k: int) -> Tensor:
        """[L*H] bool: the `k` heads with the largest coefficients."""
        on = torch.zeros(self.coefficients.numel(), dtype=torch.bool)
        on[self.order()[:k]] = True
        return on


@checked
def attribute_heads(
    engine: MaskEngine,
    *,
    how: How = "derivative",
    masks: MaskCount | None = None,
    p: Ablated = 0.75,
    seed: Seed = 0,
) -> HeadAttribution:
    """Estimate the share of each head in the image's effect on the answer.

    Args:
        engine: One image, one question and one token of the answer.
        how: "derivative" averages derivatives with respect to the heads over masks; "fit" is the
            elastic net of the paper.
        masks: How many masks; None: 64 for "derivative", 10,000 for "fit".
        p: The probability that a mask ablates a head.
        seed: Seed of the masks. Use another one for each image, because shared masks share their
            errors.

    Returns:
        A `HeadAttribution` with `coefficients` [L, H].

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> image = sc.data.open_image("critters:clean:test#3")
        >>> bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3))
        >>> engine = sc.lvlm.MaskEngine(lvlm, image, "What is this creature?", bank)
        >>> heads = sc.lvlm.attribute_heads(engine)
        >>> heads.coefficients.shape, heads.masks
        (torch.Size([6, 8]), 64)
    """
    sampling = Sampling.of(how, masks, p, seed, soften=SOFTEN)
    drawn = sampling.draw(engine.n_components)
    slopes = engine.slopes(sampling.softened(drawn))[1] if sampling.slopes else None
    device = engine.lvlm.device
    found = estimate(drawn, engine.evaluate(drawn), slopes, seed=seed, device=device)
    grid = (engine.lvlm.n_layers, engine.lvlm.n_heads)
    values: Named = {**vars(found), "protocol": _protocol(engine, sampling)}
    for name in ("coefficients", "standard_error"):
        values[name] = values[name].reshape(grid)
    return HeadAttribution(**values)


@checked
def attribute_tokens(
    engine: MaskEngine,
    heads: Tensor | None = None,
    text: Tensor | None = None,
    *,
    how: How = "derivative",
    masks: MaskCount | None = None,
    p: Ablated = 0.75,
    seed: Seed = 0,
) -> Coefficients:
    """Estimate the share of each image token in the image's effect on the answer (gamma).

    Args:
        engine: One image, one question and one token of the answer.
        heads: [L*H], the heads x* that may see the image; None: all.
        text: [T], the text rows u* that may see the image; None: all.
        how: "derivative" or "fit", as in `attribute_heads`.
        masks: How many masks; None: 64 for "derivative", 10,000 for "fit".
        p: The probability that a mask ablates an image token.
        seed: Seed of the masks.

    Returns:
        `Coefficients` [N]; `image_map` makes a map of them.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> image = sc.data.open_image("critters:clean:test#3")
        >>> bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3))
        >>> engine = sc.lvlm.MaskEngine(lvlm, image, "What is this creature?", bank)
        >>> found = sc.lvlm.attribute_tokens(engine)
        >>> sc.lvlm.image_map(engine.prompt.tokens, found.coefficients).shape
        torch.Size([12, 12])
    """
    sampling = Sampling.of(how, masks, p, seed)
    response = _substantial(engine, float(engine.evaluate(heads, text)[0]))
    drawn = sampling.draw(engine.n_image)
    slopes = None
    if sampling.slopes:
        slopes = engine.slopes(heads, text, sampling.softened(drawn), of="image")[1] / response
    responses = engine.evaluate(heads, text, drawn) / response
    found = estimate(drawn, responses, slopes, seed=seed, device=engine.lvlm.device)
    facts = {
        "heads": None if heads is None else int(heads.sum()),
        "text": None if text is None else text.int().tolist(),
    }
    protocol = _protocol(engine, sampling) | facts
    return dataclasses.replace(found, protocol=protocol)


def _protocol(engine: MaskedRows, sampling: Sampling) -> Named:
    return {**engine.protocol(), "sampling": dataclasses.asdict(sampling)}


def text_effects(engine: MaskEngine, heads: Tensor | None = None) -> Tensor:
    """Delta [T] float64 of every text row, given the heads [L*H] that may see (None: all)."""
    whole = torch.ones(1, engine.n_text, dtype=torch.bool)
    all_but_one = ~torch.eye(engine.n_text, dtype=torch.bool)
    masks = torch.cat([whole, all_but_one])
    responses = engine.evaluate(heads=heads, text=masks).double().cpu()
    return 1 - responses[1:] / _substantial(engine, float(responses[0]))


def kept_rows(deltas: Tensor) -> Tensor:
    """u* [T] from effects [T], of one answer or their mean over a dataset; where none costs more
    than the threshold, the row that costs most."""
    kept = deltas > KEPT
    return kept if bool(kept.any()) else deltas == deltas.max()


def sufficiency(engine: MaskEngine, heads: Tensor | None, text: Tensor) -> float:
    """F(x*, u*) / F(x*): how much of the effect the kept text rows [T] carry alone."""
    both = torch.stack([torch.ones_like(text, dtype=torch.bool), text.bool()])
    whole, part = engine.evaluate(heads=heads, text=both).double().tolist()
    return part / _substantial(engine, whole)


def weighted_attention(
    engine: MaskEngine, coefficients: Tensor, heads: Tensor, deltas: Tensor, rows: Tensor
) -> Tensor:
    """w [N] (eq. 13): the intact attention of heads x* [L*H], weighted by their coefficients [L, H]
    and by the effects of text rows [T], of which u* [T] count."""
    attention = engine.activations().attention.double().flatten(0, 1)  # [L*H, T, N]
    by_head = (coefficients.flatten() * heads.flatten()).to(attention)
    weights = (deltas * rows).to(attention)
    return torch.einsum("h,t,htn->n", by_head, weights, attention).cpu()


def _substantial(engine: MaskEngine, response: float) -> float:
    if response < _LEAST:
        raise weak(engine.answer, response * engine.span, _LEAST * engine.span)
    return response


@dataclass(frozen=True)
class HeadWords:
    """The words of one head's output by the logit lens."""

    layer: int
    head: int
    coefficient: float
    words: tuple[str, ...]  # the likeliest first


@dataclass(frozen=True, eq=False)
class TokenTrace:
    """Image tokens and text rows through which heads x* carry the effect."""

    attribution: Coefficients  # of the image tokens, gamma [N]
    deltas: Tensor  # [T] float64: reduction of the response when each text row is blocked
    rows: Tensor  # u* [T] bool
    sufficiency: float  # F(x*, u*) / F(x*)
    weighted: Tensor  # w [N] float64 (eq. 13)

    @property
    def agreement(self) -> float:
        """Pearson's correlation of image-token coefficients with the weighted attention."""
        return correlation(self.attribution.coefficients, self.weighted)


@dataclass(frozen=True, eq=False)
class AnswerTrace(Result):
    """Heads that carry the image into one token of an answer, with the curves of four rankings;
    text rows and image tokens, if requested.

    Attributes:
        engine: The engine with image, question and answer.
        heads: Coefficients of the heads.
        attention: [L, H], attention on the image (eq. 10).
        causal: [L, H], the share of the effect that is lost without one head.
        curves: Faithfulness and completeness of the rankings "hear", "causal", "attention" and
            "random".
        chosen: [L*H] bool, the heads x* that are enough.
        words: The logit lens of the top heads.
        tokens: Text rows and image tokens, or None.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> image = sc.data.open_image("critters:clean:test#3")
        >>> bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3))
        >>> engine = sc.lvlm.MaskEngine(lvlm, image, "What is this creature?", bank)
        >>> trace = sc.lvlm.trace_answer(engine, masks=8)
        >>> trace.heads.coefficients.shape, trace.attention.shape
        (torch.Size([6, 8]), torch.Size([6, 8]))
    """

    engine: MaskEngine
    heads: HeadAttribution
    attention: Tensor
    causal: Tensor
    curves: dict[str, RankingCurves]
    chosen: Tensor
    words: list[HeadWords]
    tokens: TokenTrace | None = None

    def left(self) -> float:
        """F(1 - x*): the share of the effect that is left without the heads that are enough."""
        return float(self.curves["hear"].completeness[0, int(self.chosen.sum())])

    def counts(self) -> dict[str, tuple[float, float]]:
        """k_faith and k_comp of every ranking, means over its orders."""
        return {
            name: (float(c.enough().double().mean()), float(c.needed().double().mean()))
            for name, c in self.curves.items()
        }

    def numbers(self) -> dict[str, float]:
        """Span, fit quality, and the number of heads that are enough and needed by each ranking."""
        found = {"span": self.engine.span, "r2": self.heads.r2, "agreement": self.heads.agreement}
        for name, (enough, needed) in self.counts().items():
            found |= {f"{name}_enough": enough, f"{name}_needed": needed}
        if self.tokens is not None:
            found["sufficiency"] = self.tokens.sufficiency
            found["token_r2"] = self.tokens.attribution.r2
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One row for each head."""
        heads, chosen = self.heads, self.chosen.reshape(self.attention.shape)
        columns = {"coefficient": heads.coefficients, "standard_error": heads.standard_error}
        columns |= {"attention": self.attention, "causal": self.causal, "enough": chosen}
        return [
            {"layer": layer, "head": head}
            | {name: values[layer, head].item() for name, values in columns.items()}
            for layer in range(chosen.shape[0])
            for head in range(chosen.shape[1])
        ]

    def save(self, folder: str | Path) -> Path:
        """Write `trace.safetensors` and `trace.json`."""
        parts = [("", self), ("", self.heads)]
        if self.tokens is not None:
            parts += [("tokens.", self.tokens), ("tokens.", self.tokens.attribution)]
        tensors = {}
        for prefix, part in parts:
            own = {name: x for name, x in vars(part).items() if isinstance(x, Tensor)}
            tensors |= {prefix + name: x for name, x in own.items()}
        for name, curves in self.curves.items():
            tensors |= {f"{kind}.{name}": rows for kind, rows in vars(curves).items()}
        card = {"numbers": self.numbers(), "protocol": self.heads.protocol}
        return save_result(folder, "trace", tensors, card)

    def concerns(self) -> list[str]:
        """Warnings about the trace, as sentences."""
        lines = self.engine.concerns()
        fits: dict[str, Coefficients] = {"heads": self.heads}
        if self.tokens is not None:
            fits["image tokens"] = self.tokens.attribution
        for what, fit in fits.items():
            if not fit.r2 >= LOW_R2:
                lines.append(
                    f"coefficients of {what} predict masked answers badly (R2 {fit.r2:.2f}): they"
                    " act together, so read single ones with care"
                )
            if not fit.agreement >= LOW_AGREEMENT:
                lines.append(
                    f"two halves of the masks agree by {fit.agreement:.2f} about {what}: use more"
                    " masks"
                )
        return lines


def save_result(
    folder: str | Path, name: str, tensors: Mapping[str, Tensor], card: Mapping[str, Any]
) -> Path:
    """Write NAME.safetensors and NAME.json into a folder, which is created if needed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = save({key: tensor.contiguous() for key, tensor in tensors.items()})
    write_atomic(folder / f"{name}.safetensors", content)
    write_json(folder / f"{name}.json", card)
    return folder


@checked
def trace_answer(
    engine: MaskEngine,
    *,
    how: How = "derivative",
    masks: MaskCount | None = None,
    p: Ablated = 0.75,
    seed: Seed = 0,
    tokens: bool = True,
) -> AnswerTrace:
    """Trace one token of an answer: heads, curves of their ranking, their logit lens, image tokens
    and text rows.

    Curves are complete for head attribution, whose counts choose x*, and at `POINTS` counts for the
    other rankings.

    Args:
        engine: One image, one question and one token of the answer. `engine.progress` is called
            with the number of masked runs that have finished.
        how: "derivative" or "fit", as in `attribute_heads`.
        masks: How many masks, for heads and for image tokens; None: 64 or 10,000.
        p: The probability that a mask ablates a head or an image token.
        seed: Seed of the masks and of the random ranking.
        tokens: Whether to trace text rows and image tokens too, which doubles the run time.

    Returns:
        An `AnswerTrace`.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> image = sc.data.open_image("critters:clean:test#3")
        >>> bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3))
        >>> engine = sc.lvlm.MaskEngine(lvlm, image, "What is this creature?", bank)
        >>> trace = sc.lvlm.trace_answer(engine, masks=8)
        >>> sorted(trace.counts()), trace.tokens.weighted.shape
        (['attention', 'causal', 'hear', 'random'], torch.Size([144]))
    """
    if tokens:
        Sampling.of(how, masks, p, seed).check(engine.n_image)
    heads = attribute_heads(engine, how=how, masks=masks, p=p, seed=seed)
    attention, causal = attention_scores(engine), causal_scores(engine)
    ranked = [x.flatten().argsort(descending=True, stable=True) for x in (causal, attention)]
    orders = torch.stack([*ranked, *random_orders(engine, ORDERS, seed=seed)])
    others = scan(engine, orders, points=POINTS)
    rows = {"causal": slice(0, 1), "attention": slice(1, 2), "random": slice(2, None)}
    curves = {"hear": scan(engine, heads.order())}
    curves |= {name: others.rows(mine) for name, mine in rows.items()}
    chosen = heads.mask(int(curves["hear"].enough()[0]))
    traced = None
    if tokens:
        deltas = text_effects(engine, chosen)
        kept = kept_rows(deltas)
        found = attribute_tokens(engine, chosen, kept, how=how, masks=masks, p=p, seed=seed)
        weighted = weighted_attention(engine, heads.coefficients, chosen, deltas, kept)
        traced = TokenTrace(found, deltas, kept, sufficiency(engine, chosen, kept), weighted)
    words = head_words(engine, heads)
    return AnswerTrace(engine, heads, attention, causal, curves, chosen, words, traced)


def masked_runs(
    engine: MaskEngine, *, how: How = "derivative", masks: int | None = None, tokens: bool = True
) -> int:
    """How many masked runs `trace_answer` makes, for progress bars."""
    runs, heads = Sampling.of(how, masks, 0.75, 0).runs, engine.n_components
    curves = 2 * (heads + 1) + 2 * (2 + ORDERS) * len(curve_counts(heads, POINTS))
    total = runs + heads + curves
    return total + runs + engine.n_text + 4 if tokens else total


def head_words(engine: MaskEngine, attribution: HeadAttribution) -> list[HeadWords]:
    """The likeliest words of each of the top heads, in the intact model."""
    activations, found = engine.activations(), []
    for layer, head in attribution.top(LENS_HEADS):
        logits = activations.lens(layer, head)
        pieces = engine.lvlm.pieces(logits.topk(min(LENS_WORDS, len(logits))).indices)
        coefficient = float(attribution.coefficients[layer, head])
        found.append(HeadWords(layer, head, coefficient, tuple(piece.strip() for piece in pieces)))
    return found
