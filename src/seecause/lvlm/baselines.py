"""Other ways to rank heads, which head attribution is measured against (Kim et al. 2025, section
4.1).

attention   Img(l, h): attention on the picture, averaged over text rows                        (eq.
10)
causal      Delta_n = 1 - F(all heads but n): what it costs to take one head away
random      any order
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.lvlm.engine import MaskEngine


def attention_scores(engine: MaskEngine) -> Tensor:
    """[L, H] float64: how much of its attention a head of the intact model has on the picture."""
    return engine.look().image_attention().double().cpu()


def causal_scores(engine: MaskEngine) -> Tensor:
    """[L, H] float64: the share of the picture's effect that is lost without this head, all others
    seeing."""
    all_but_one = ~torch.eye(engine.n_components, dtype=torch.bool)
    lost = 1 - engine.evaluate(heads=all_but_one).double().cpu()
    return lost.reshape(engine.lvlm.n_layers, engine.lvlm.n_heads)


def random_orders(engine: MaskEngine, count: int, *, seed: int = 0) -> Tensor:
    """[count, L*H]: component indices in orders drawn by lot."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [torch.randperm(engine.n_components, generator=generator) for _ in range(count)]
    )
