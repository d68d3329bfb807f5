"""What heads do in the intact run, and whether a ranking of heads holds (Kim et al. 2025, 4.1).

attention   Img(l, h): attention on the image, averaged over text rows                     (eq. 10)
causal      Delta_n = 1 - F(all heads but n): what removing one head costs
random      any order

The paper leaves the row and the norm of its logit lens open: here a head's output at the last text
row goes through the final norm and the vocabulary.

Heads are switched on, or off, one after the other, highest first; x^(k) has the top k on:

faithfulness F(x^(k)) -> 1        k_faith = min {k : F(x^(k)) > 0.8}: the heads that are enough
completeness F(1 - x^(k)) -> 0    k_comp = min {k : F(1 - x^(k)) < 0.2}: the heads that are needed

The curves are not monotone, so both counts are the first crossing of a scan from k = 1 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from seecause.engine.attend import Bank, attend, attention_weights
from seecause.engine.walk import walk
from seecause.lvlm.cache import PrefixCache
from seecause.lvlm.model import LVLM
from seecause.models.block import wide

if TYPE_CHECKING:
    from seecause.lvlm.engine import MaskEngine

Head = tuple[int, int]  # (layer, head), both from 0
FAITHFUL, COMPLETE = 0.8, 0.2


@dataclass(frozen=True, eq=False)
class HeadActivations:
    """What every head of the intact model does."""

    lvlm: LVLM
    attention: Tensor  # [L, H, T, N] of text rows on image tokens
    outputs: Tensor  # [L, H, dh] at the last text row, before the output projection

    @torch.no_grad()
    def lens(self, layer: int, head: int) -> Tensor:
        """[V]: the logit lens on one head's output (final norm, then vocabulary)."""
        block, decoder = self.lvlm.blocks[layer], self.lvlm.decoder
        alone = torch.zeros_like(self.outputs[layer])
        alone[head] = self.outputs[layer, head]
        both = torch.stack([alone, torch.zeros_like(alone)]).flatten(1)[None]  # [1, 2, H*dh]
        mixed = block.mix(both)
        return wide(decoder.head(decoder.norm(mixed[:, :1] - mixed[:, 1:])))[0, 0]


@torch.no_grad()
def head_activations(lvlm: LVLM, cache: PrefixCache) -> HeadActivations:
    """Run the text rows of the intact model and keep what its heads do."""
    everything = cache.at.take(torch.cat([cache.keys_at.index, cache.at.index]))
    attention, outputs = [], []
    for step in walk(lvlm, cache.states, cache.at):
        k, v = (
            torch.cat(both, dim=2)
            for both in zip(cache.image_bank[step.index], (step.k, step.v), strict=True)
        )
        bank = Bank(k, v, bias=step.block.bias(cache.at, everything))
        weights = attention_weights(step.q, bank, scale=step.block.scale)  # [1, H, T, K]
        attention.append(weights[0, :, :, cache.image])
        step.o, _ = attend(step.q, [bank], scale=step.block.scale)
        outputs.append(step.o[0, -1])
    return HeadActivations(lvlm, torch.stack(attention), torch.stack(outputs))


@dataclass(frozen=True, eq=False)
class RankingCurves:
    """F along a ranking of P heads; one row for each order where there are several (random)."""

    faithfulness: Tensor  # [O, P + 1] float64; column k: only the top k on
    completeness: Tensor  # [O, P + 1] float64; column k: all but the top k on

    def enough(self, level: float = FAITHFUL) -> Tensor:
        """[O] k_faith: how many heads alone bring more than `level` of the effect."""
        return _first(self.faithfulness > level)

    def needed(self, level: float = COMPLETE) -> Tensor:
        """[O] k_comp: how many heads must go until less than `level` of the effect is left."""
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
    """How many of `size` heads are on at each place of a curve: any number, or about `points` of
    them, close together where heads are few."""
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
