"""Does a ranking of heads hold? (head attribution, section 4.1)

Heads are switched on, or off, one after the other, the best first; x^(k) has the top k on:

    faithfulness F(x^(k)) -> 1,    k_faith = min {k : F(x^(k)) > 0.8}          the heads that are
    enough
    completeness F(1 - x^(k)) -> 0,    k_comp = min {k : F(1 - x^(k)) < 0.2}   the heads without
    which nothing is left

The curves are not monotone, so both counts are the first crossing of a scan from k = 1 on. x* =
x^(k_faith).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.lvlm.attribute import HeadAttribution, attribute_heads
from seecause.lvlm.engine import MaskEngine

FAITHFUL, COMPLETE = 0.8, 0.2
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)  # of faithfulness; of completeness 1 - level
RATIOS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # shares of heads that are ablated


@dataclass(frozen=True, eq=False)
class Curves:
    """F along a ranking, P heads; one row for each order where there are several (random)."""

    faithfulness: Tensor  # [O, P + 1] float64; column k: only the top k on
    completeness: Tensor  # [O, P + 1] float64; column k: all but the top k on

    def enough(self, level: float = FAITHFUL) -> Tensor:
        """[O] k_faith: how many heads alone bring more than `level` of the effect."""
        return _first(self.faithfulness > _share("level", level))

    def needed(self, level: float = COMPLETE) -> Tensor:
        """[O] k_comp: how many heads must go until less than `level` of the effect is left."""
        return _first(self.completeness < _share("level", level))

    def rows(self, rows: slice) -> Curves:
        return Curves(self.faithfulness[rows], self.completeness[rows])


@dataclass(frozen=True, eq=False)
class RankedRatio:
    """One share of ablated heads."""

    heads: HeadAttribution
    enough: int  # k_faith
    needed: int  # k_comp


def scan(engine: MaskEngine, orders: Tensor) -> Curves:
    """Both curves in full for orders [P] or [O, P] of component indices, the best first. Orders
    share the masks' common blocks."""
    orders = orders.reshape(-1, engine.n_components).cpu()
    on = torch.stack([_top(order, range(len(order) + 1)) for order in orders])  # [O, P + 1, P]
    found = engine.evaluate(heads=torch.cat([on, ~on]).flatten(0, 1)).double().cpu()
    return Curves(*found.reshape(2, len(orders), -1))


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
        found = engine.evaluate(heads=~on if completeness else on)
        crossed = found < level if completeness else found > level
        if bool(crossed.any()):
            return start + int(crossed.int().argmax())
    return len(order)


def essential_heads(found: HeadAttribution, curves: Curves, level: float = FAITHFUL) -> Tensor:
    """x* [L*H]: the fewest heads, in order of their coefficients, that alone bring more than
    `level` of the effect."""
    return found.mask(int(curves.enough(level)[0]))


def threshold_study(curves: Curves, levels: Sequence[float] = LEVELS) -> Tensor:
    """[levels, 2] float64: heads that are enough for a level, and heads to take away until 1 -
    level is left; means over orders."""
    return torch.stack(
        [
            torch.stack(
                [curves.enough(level).double().mean(), curves.needed(1 - level).double().mean()]
            )
            for level in levels
        ]
    )


def ratio_study(
    engine: MaskEngine, ratios: Sequence[float] = RATIOS, *, masks: int = 10_000, seed: int = 0
) -> list[RankedRatio]:
    """Head attribution with other shares of ablated heads, and how its ranking does. Each has masks
    of its own: the same lots would be nested."""
    found = [
        attribute_heads(engine, masks=masks, p=ratio, seed=seed + place)
        for place, ratio in enumerate(ratios)
    ]
    return [
        RankedRatio(
            one,
            first_crossing(engine, one.order()),
            first_crossing(engine, one.order(), level=COMPLETE, completeness=True),
        )
        for one in found
    ]


def _top(order: Tensor, counts: range) -> Tensor:
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
