"""One answer traced from the picture to its words: heads, then text rows, then image tokens, with
everything a reader needs to judge them.

heads     coefficients and the three other rankings, curves of all four, x*
tokens    what each text row receives, u*, how much that is enough for, gamma and the weighted
attention
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.lvlm.attribute import HeadAttribution, attribute_heads
from seecause.lvlm.baselines import attention_scores, causal_scores, random_orders
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.regress import correlation
from seecause.lvlm.tokens import (
    KEPT,
    TextEffects,
    TokenAttribution,
    attribute_tokens,
    sufficiency,
    text_effects,
    weighted_attention,
)
from seecause.lvlm.validate import FAITHFUL, Curves, essential_heads, scan

RANKINGS = ("hear", "causal", "attention", "random")
ORDERS = 5  # of the random ranking


@dataclass(frozen=True, eq=False)
class HeadTrace:
    """Which heads carry the picture into the answer, and how well four rankings of them hold."""

    heads: HeadAttribution
    attention: Tensor  # [L, H] float64
    causal: Tensor  # [L, H] float64
    curves: dict[str, Curves]  # by ranking; several orders for random
    chosen: Tensor  # x* [L*H] bool

    def counts(self) -> dict[str, tuple[float, float]]:
        """k_faith and k_comp of every ranking, means over its orders."""
        return {
            name: (float(c.enough().double().mean()), float(c.needed().double().mean()))
            for name, c in self.curves.items()
        }


@dataclass(frozen=True, eq=False)
class TokenTrace:
    """From which image tokens, into which text rows, through heads x*."""

    effects: TextEffects
    text: Tensor  # u* [T] bool
    sufficiency: float  # F(x*, u*) / F(x*)
    tokens: TokenAttribution
    weighted: Tensor  # w [N] float64 (eq. 13)

    @property
    def agreement(self) -> float:
        """Pearson's correlation of image-token coefficients with the weighted attention."""
        return correlation(self.tokens.coefficients, self.weighted)


def trace_heads(
    engine: MaskEngine,
    *,
    masks: int = 10_000,
    p: float = 0.75,
    seed: int = 0,
    adaptive: bool = False,
    level: float = FAITHFUL,
) -> HeadTrace:
    """Head attribution, the baselines, and the curves of all in one scan."""
    found = attribute_heads(engine, masks=masks, p=p, seed=seed, adaptive=adaptive)
    attention, causal = attention_scores(engine), causal_scores(engine)
    ranked = [
        score.flatten().argsort(descending=True, stable=True) for score in (causal, attention)
    ]
    curves = scan(
        engine, torch.stack([found.order(), *ranked, *random_orders(engine, ORDERS, seed=seed)])
    )
    slices = [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, None)]
    named = {name: curves.rows(rows) for name, rows in zip(RANKINGS, slices, strict=True)}
    return HeadTrace(found, attention, causal, named, essential_heads(found, named["hear"], level))


def trace_tokens(
    engine: MaskEngine,
    coefficients: Tensor,
    chosen: Tensor,
    *,
    text: Tensor | None = None,
    masks: int = 10_000,
    p: float = 0.75,
    seed: int = 0,
) -> TokenTrace:
    """Text rows and image tokens, given heads x* [L*H] with coefficients [L, H]. `text` [T] are the
    rows u* that may see; None takes this answer's own."""
    effects = text_effects(engine, chosen)
    rows = rows_of(effects.deltas) if text is None else text.bool()
    tokens = attribute_tokens(engine, chosen, rows, masks=masks, p=p, seed=seed)
    weighted = weighted_attention(engine, coefficients, chosen, effects, rows)
    return TokenTrace(effects, rows, sufficiency(engine, chosen, rows), tokens, weighted)


def rows_of(deltas: Tensor) -> Tensor:
    """u* [T] from effects [T], of one answer or their mean over a dataset; where none costs more
    than the threshold, the row that costs most."""
    kept = deltas > KEPT
    return kept if bool(kept.any()) else deltas == deltas.max()
