"""From which image tokens, into which words (head attribution, sections 5.1 and 5.2, given the
heads x* that matter).

Delta_i = 1 - F(x*, all but text row i) / F(x*)                              what blocking one text
row costs        (eq. 11)
u*_i    = Delta_i > 0.05,   sufficiency = F(x*, u*) / F(x*)
gamma   : elastic net of F(x*, u*, v) / F(x*, u*) on image-token masks v
(eq. 12)
w       = sum_n x*_n beta_n sum_i u*_i Delta_i a^n_i                         attention, weighted by
what matters     (eq. 13)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seecause.errors import BadOption, WeakAnswer
from seecause.lvlm.attribute import protocol
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.masks import Law
from seecause.lvlm.regress import Sampling, regress
from seecause.models.image_tokens import Grid, ImageTokens

KEPT = 0.05  # a text row is kept if blocking it costs more
_LEAST = 0.05  # F of the chosen heads, below which shares of it are noise


@dataclass(frozen=True, eq=False)
class TextEffects:
    """What the picture loses when it may not reach one text row."""

    deltas: Tensor  # [T] float64
    pieces: tuple[str, ...]  # the text rows
    response: float  # F(x*)

    def kept(self, threshold: float = KEPT) -> Tensor:
        """u* [T]: the rows whose blocking costs more than `threshold`."""
        return self.deltas > threshold


@dataclass(frozen=True, eq=False)
class TokenAttribution:
    """One coefficient for each image token."""

    coefficients: Tensor  # gamma [N] float64
    intercept: float
    r2: float
    pearson: float
    masks: int
    agreement: float
    tokens: ImageTokens
    protocol: dict[str, Any] = field(default_factory=dict)

    def maps(self) -> list[tuple[Grid, Tensor]]:
        """Coefficients as maps [rows, columns], one for each grid that shows the picture."""
        return self.tokens.maps(self.coefficients)


def text_effects(engine: MaskEngine, heads: Tensor | None = None) -> TextEffects:
    """Delta of every text row, given the heads [L*H] that may see (None: all)."""
    rows = ~torch.eye(engine.n_text, dtype=torch.bool)
    found = (
        engine.evaluate(
            heads=_one(heads),
            text=torch.cat([torch.ones(1, engine.n_text, dtype=torch.bool), rows]),
        )
        .double()
        .cpu()
    )
    response = _substantial(engine, float(found[0]))
    return TextEffects(1 - found[1:] / response, engine.prompt.pieces, response)


def sufficiency(engine: MaskEngine, heads: Tensor | None, text: Tensor) -> float:
    """F(x*, u*) / F(x*): how much of the effect the kept text rows [T] carry alone."""
    both = torch.stack([torch.ones_like(text, dtype=torch.bool), text.bool()])
    whole, part = engine.evaluate(heads=_one(heads), text=both).double().tolist()
    return part / _substantial(engine, whole)


def attribute_tokens(
    engine: MaskEngine,
    heads: Tensor | None = None,
    text: Tensor | None = None,
    *,
    masks: int = 10_000,
    p: float = 0.75,
    law: Law = "bernoulli",
    split: float = 0.8,
    alpha: float = 5e-4,
    l1_ratio: float = 0.5,
    seed: int = 0,
    adaptive: bool = False,
    agreement: float = 0.9,
    step: int = 1000,
) -> TokenAttribution:
    """gamma of every image token, given heads x* [L*H] and text rows u* [T] that may see (None:
    all)."""
    if text is not None and not bool(text.any()):
        raise BadOption("text", "no row", "at least one text row that may see the picture")
    how = Sampling(masks, p, law, split, alpha, l1_ratio, seed, adaptive, agreement, step)
    whole = _substantial(engine, float(engine.evaluate(heads=_one(heads), text=_one(text))[0]))

    def respond(image: Tensor) -> Tensor:
        return engine.evaluate(heads=_one(heads), text=_one(text), image=image) / whole

    found = regress(respond, engine.n_image, how, engine.lvlm.device)
    made = {
        **protocol(engine, how, found),
        "heads": None if heads is None else int(heads.sum()),
        "text": None if text is None else text.int().tolist(),
    }
    return TokenAttribution(
        found.coefficients,
        found.intercept,
        found.r2,
        found.pearson,
        found.masks,
        found.agreement,
        engine.prompt.tokens,
        made,
    )


def weighted_attention(
    engine: MaskEngine,
    coefficients: Tensor,
    heads: Tensor,
    effects: TextEffects,
    text: Tensor | None = None,
) -> Tensor:
    """w [N] (eq. 13): the intact attention of heads x* [L*H], weighted by their coefficients [L, H]
    and by the effects of text rows u* [T]."""
    rows = effects.kept() if text is None else text.bool()
    weights = (effects.deltas * rows).to(engine.lvlm.device)
    seen, width = engine.look(), engine.lvlm.n_heads
    total = torch.zeros(engine.n_image, dtype=torch.float64, device=engine.lvlm.device)
    for component in heads.flatten().nonzero()[:, 0].tolist():
        total += float(coefficients.flatten()[component]) * (
            weights @ seen.attention(*divmod(component, width)).double()
        )
    return total.cpu()


def _one(mask: Tensor | None) -> Tensor | None:
    """One mask that serves all."""
    return None if mask is None else mask.reshape(1, -1)


def _substantial(engine: MaskEngine, response: float) -> float:
    if response < _LEAST:
        raise WeakAnswer(engine.answer, response * engine.span, _LEAST * engine.span)
    return response
