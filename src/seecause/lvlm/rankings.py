"""Rankings of heads, and whether they hold (Kim et al. 2025, section 4.1).

attention   Img(l, h): attention on the picture, averaged over text rows                   (eq. 10)
causal      Delta_n = 1 - F(all heads but n): what it costs to take one head away
random      any order

Heads are switched on, or off, one after the other, the best first; x^(k) has the top k on:

faithfulness F(x^(k)) -> 1        k_faith = min {k : F(x^(k)) > 0.8}: the heads that are enough
completeness F(1 - x^(k)) -> 0    k_comp = min {k : F(1 - x^(k)) < 0.2}: the heads that are needed

The curves are not monotone, so both counts are the first crossing of a scan from k = 1 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.lvlm.attribute import HeadAttribution, attribute_heads
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.fit import How

FAITHFUL, COMPLETE = 0.8, 0.2
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)  # of faithfulness; of completeness 1 - level
RATIOS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # shares of heads that are ablated


@dataclass(frozen=True, eq=False)
class RankingCurves:
    """F along a ranking, P heads; one row for each order where there are several (random)."""

    faithfulness: Tensor  # [O, P + 1] float64; column k: only the top k on
    completeness: Tensor  # [O, P + 1] float64; column k: all but the top k on

    def enough(self, level: float = FAITHFUL) -> Tensor:
        """[O] k_faith: how many heads alone bring more than `level` of the effect."""
        return _first(self.faithfulness > _share("level", level))

    def needed(self, level: float = COMPLETE) -> Tensor:
        """[O] k_comp: how many heads must go until less than `level` of the effect is left."""
        return _first(self.completeness < _share("level", level))

    def rows(self, rows: slice) -> RankingCurves:
        return RankingCurves(self.faithfulness[rows], self.completeness[rows])


@dataclass(frozen=True, eq=False)
class RankedRatio:
    """One share of ablated heads."""

    heads: HeadAttribution
    enough: int  # k_faith
    needed: int  # k_comp


def scan(engine: MaskEngine, orders: Tensor, *, points: int | None = None) -> RankingCurves:
    """Both curves for orders [P] or [O, P] of component indices, the best first. Orders share the
    masks' common blocks. In full, or with `points` at about so many counts (`curve_counts`) and
    straight between them."""
    orders = orders.reshape(-1, engine.n_components).cpu()
    counts = curve_counts(engine.n_components, points)
    on = torch.stack([_top(order, counts) for order in orders])  # [O, K, P]
    responses = engine.evaluate(heads=torch.cat([on, ~on]).flatten(0, 1)).double().cpu()
    curves = responses.reshape(2, len(orders), -1)
    if len(counts) <= engine.n_components:
        every = np.arange(engine.n_components + 1)
        rows = [np.interp(every, counts, row) for row in curves.flatten(0, 1).numpy()]
        curves = torch.from_numpy(np.stack(rows)).reshape(2, len(orders), -1)
    return RankingCurves(*curves)


def curve_counts(size: int, points: int | None = None) -> list[int]:
    """How many of `size` heads are on at each place of a curve: any number, or about `points` of
    them, close together where heads are few."""
    if points is None or points > size:
        return list(range(size + 1))
    if points < 2:
        raise BadOption("points", points, "at least two counts of heads")
    return sorted({round(size * (place / (points - 1)) ** 2) for place in range(points)})


def first_crossing(
    engine: MaskEngine,
    order: Tensor,
    *,
    level: float = FAITHFUL,
    completeness: bool = False,
    chunk: int = 128,
) -> int:
    """One of the counts without the rest of the curve: masks are asked `chunk` at a time until it
    is there. For models with a thousand heads."""
    _share("level", level)
    order = order.flatten().cpu()
    for start in range(1, len(order) + 1, chunk):
        on = _top(order, range(start, min(start + chunk, len(order) + 1)))
        responses = engine.evaluate(heads=~on if completeness else on)
        crossed = responses < level if completeness else responses > level
        if bool(crossed.any()):
            return start + int(crossed.int().argmax())
    return len(order)


def essential_heads(
    attribution: HeadAttribution, curves: RankingCurves, level: float = FAITHFUL
) -> Tensor:
    """x* [L*H]: the fewest heads, in order of their coefficients, that alone bring more than
    `level` of the effect."""
    return attribution.mask(int(curves.enough(level)[0]))


def threshold_study(curves: RankingCurves, levels: Sequence[float] = LEVELS) -> Tensor:
    """[levels, 2] float64: heads that are enough for a level, and heads to take away until 1 -
    level is left; means over orders."""
    enough = torch.stack([curves.enough(level) for level in levels])  # [levels, O]
    needed = torch.stack([curves.needed(1 - level) for level in levels])
    return torch.stack([enough.double().mean(dim=1), needed.double().mean(dim=1)], dim=1)


def ratio_study(
    engine: MaskEngine,
    ratios: Sequence[float] = RATIOS,
    *,
    how: How = "fit",
    masks: int | None = None,
    seed: int = 0,
) -> list[RankedRatio]:
    """Head attribution with other shares of ablated heads, and how its ranking does. Each has masks
    of its own: the same lots would be nested."""
    ranked = []
    for place, ratio in enumerate(ratios):
        heads = attribute_heads(engine, how=how, masks=masks, p=ratio, seed=seed + place)
        enough = first_crossing(engine, heads.order())
        needed = first_crossing(engine, heads.order(), level=COMPLETE, completeness=True)
        ranked.append(RankedRatio(heads, enough, needed))
    return ranked


def _top(order: Tensor, counts: Sequence[int]) -> Tensor:
    """[counts, P] bool: the first k of an order on, for each k."""
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return rank < torch.tensor(counts)[:, None]


def _first(crossed: Tensor) -> Tensor:
    """The first True of each row [O, P + 1], from k = 1 on; the last k where there is none."""
    crossed = crossed[:, 1:]
    return torch.where(crossed.any(dim=1), crossed.int().argmax(dim=1) + 1, crossed.shape[1])


def _share(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise BadOption(name, value, "a share between 0 and 1")
    return value


def attention_scores(engine: MaskEngine) -> Tensor:
    """[L, H] float64: how much of its attention a head of the intact model has on the picture."""
    return engine.activations().image_attention().double().cpu()


def causal_scores(engine: MaskEngine) -> Tensor:
    """[L, H] float64: the share of the picture's effect that is lost without this head, all others
    seeing."""
    all_but_one = ~torch.eye(engine.n_components, dtype=torch.bool)
    lost = 1 - engine.evaluate(heads=all_but_one).double().cpu()
    return lost.reshape(engine.lvlm.n_layers, engine.lvlm.n_heads)


def random_orders(engine: MaskEngine, count: int, *, seed: int = 0) -> Tensor:
    """[count, L*H]: component indices in orders drawn by lot."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(engine.n_components, generator=generator) for _ in range(count)]
    return torch.stack(orders)
