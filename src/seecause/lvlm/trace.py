"""One answer traced from the picture to its words: heads, then text rows, then image tokens, with
everything a reader needs to judge them.

heads     coefficients and three other rankings (`analysis.py`), curves of all four, x*
tokens    what each text row receives, u*, how much that is enough for, gamma, weighted attention

x* = x^(k_faith): the fewest heads, the best first, that alone bring more than 80 % of the effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from seecause.files import write_atomic
from seecause.lvlm.analysis import (
    FAITHFUL,
    RankingCurves,
    attention_scores,
    causal_scores,
    curve_counts,
    essential_heads,
    random_orders,
    scan,
)
from seecause.lvlm.attribute import (
    KEPT,
    HeadAttribution,
    TextEffects,
    TokenAttribution,
    attribute_heads,
    attribute_tokens,
    sufficiency,
    text_effects,
    weighted_attention,
)
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.fit import correlation
from seecause.lvlm.masks import How, MaskSampling, check_sampling, mask_count
from seecause.lvlm.model import LVLM

LOW_R2, LOW_AGREEMENT, FEW_PICTURES = 0.5, 0.8, 20  # below these a page warns
RANKINGS = ("hear", "causal", "attention", "random")
ORDERS = 5  # of the random ranking
POINTS = 128  # counts of heads that other rankings than head attribution's are asked at


@dataclass(frozen=True, eq=False)
class HeadTrace:
    """Which heads carry the picture into the answer, and how well four rankings of them hold."""

    heads: HeadAttribution
    attention: Tensor  # [L, H] float64
    causal: Tensor  # [L, H] float64
    curves: dict[str, RankingCurves]  # by ranking; several orders for random
    chosen: Tensor  # x* [L*H] bool

    def left(self) -> float:
        """F(1 - x*): the share of the effect that is left without the heads that are enough."""
        return float(self.curves["hear"].completeness[0, int(self.chosen.sum())])

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
    how: How = "derivative",
    masks: int | None = None,
    p: float = 0.75,
    seed: int = 0,
    adaptive: bool = False,
    level: float = FAITHFUL,
) -> HeadTrace:
    """Which heads carry the picture into the answer, beside other rankings of them.

    Options are those of `attribute_heads`; `level` is the share of the effect at which heads are
    enough. Curves are in full for head attribution, whose counts choose x*, and at `POINTS` counts
    for the others, seven orders of them, which would cost more than everything else together.
    """
    heads = attribute_heads(engine, how=how, masks=masks, p=p, seed=seed, adaptive=adaptive)
    attention, causal = attention_scores(engine), causal_scores(engine)
    ranked = [x.flatten().argsort(descending=True, stable=True) for x in (causal, attention)]
    orders = torch.stack([*ranked, *random_orders(engine, ORDERS, seed=seed)])
    others = scan(engine, orders, points=POINTS)
    rows = (slice(0, 1), slice(1, 2), slice(2, None))
    curves = [scan(engine, heads.order()), *map(others.rows, rows)]
    named: dict[str, RankingCurves] = dict(zip(RANKINGS, curves, strict=True))
    return HeadTrace(heads, attention, causal, named, essential_heads(heads, named["hear"], level))


def trace_tokens(
    engine: MaskEngine,
    coefficients: Tensor,
    chosen: Tensor,
    *,
    text: Tensor | None = None,
    how: How = "derivative",
    masks: int | None = None,
    p: float = 0.75,
    seed: int = 0,
) -> TokenTrace:
    """Into which words the picture comes through `chosen` heads, and from which image tokens.

    `chosen` [L*H] (x*) and `coefficients` [L, H] are of `trace_heads`; `text` [T] are the rows u*
    that may see, None: this answer's own. The other options are those of `attribute_tokens`.
    """
    effects = text_effects(engine, chosen)
    rows = rows_of(effects.deltas) if text is None else text.bool()
    tokens = attribute_tokens(engine, chosen, rows, how=how, masks=masks, p=p, seed=seed)
    weighted = weighted_attention(engine, coefficients, chosen, effects, rows)
    return TokenTrace(effects, rows, sufficiency(engine, chosen, rows), tokens, weighted)


def rows_of(deltas: Tensor) -> Tensor:
    """u* [T] from effects [T], of one answer or their mean over a dataset; where none costs more
    than the threshold, the row that costs most."""
    kept = deltas > KEPT
    return kept if bool(kept.any()) else deltas == deltas.max()


@dataclass(frozen=True)
class HeadWords:
    layer: int
    head: int
    coefficient: float
    words: tuple[str, ...]  # the likeliest first

    def says(self, word: str) -> bool:
        return word.strip().lower() in (other.strip().lower() for other in self.words)


def head_words(
    engine: MaskEngine,
    attribution: HeadAttribution,
    *,
    heads: int = 5,
    words: int = 10,
    row: int = -1,
    image_only: bool = False,
) -> list[HeadWords]:
    """The `words` likeliest words of each of the top `heads` heads, in the intact model."""
    activations = engine.activations()
    top = []
    for layer, head in attribution.top(min(heads, engine.n_components)):
        logits = activations.lens(layer, head, row=row, image_only=image_only)
        pieces = engine.lvlm.pieces(logits.topk(min(words, len(logits))).indices)
        coefficient = float(attribution.coefficients[layer, head])
        top.append(HeadWords(layer, head, coefficient, tuple(piece.strip() for piece in pieces)))
    return top


@dataclass(frozen=True, eq=False)
class AnswerTrace:
    """Everything about one answer: heads, the words they would say and, where they were asked for,
    text rows and image tokens."""

    engine: MaskEngine
    heads: HeadTrace
    words: list[HeadWords]
    tokens: TokenTrace | None = None

    def save(self, folder: Path) -> None:
        """The coefficients (heads/), curves and other rankings (trace.safetensors), and the numbers
        of words and image tokens (tokens.safetensors)."""
        self.heads.heads.save(folder / "heads")
        trace = self.heads
        tensors = {"attention": trace.attention, "causal": trace.causal, "chosen": trace.chosen}
        for name, curves in trace.curves.items():
            tensors[f"faithfulness.{name}"] = curves.faithfulness
            tensors[f"completeness.{name}"] = curves.completeness
        _save_tensors(folder / "trace.safetensors", tensors)
        if self.tokens is not None:
            tensors = {
                "coefficients": self.tokens.tokens.coefficients,
                "standard_error": self.tokens.tokens.standard_error,
                "weighted": self.tokens.weighted,
                "deltas": self.tokens.effects.deltas,
                "text": self.tokens.text,
            }
            _save_tensors(folder / "tokens.safetensors", tensors)


def engine_concerns(lvlm: LVLM, question: str | None, pictures: int) -> list[str]:
    """What makes any answer about this question less trustworthy: words that the model does not
    know, and an average of few calibration pictures."""
    lines = []
    unknown = lvlm.unknown_words(question or "")
    if unknown:
        lines.append(f"the model has no token for {', '.join(unknown)}: it reads them as one word")
    if pictures < FEW_PICTURES:
        lines.append(
            f"{pictures} calibration pictures make the average picture: about a hundred are better"
        )
    return lines


def concerns(trace: AnswerTrace) -> list[str]:
    """What makes a trace less trustworthy, in words; nothing where all is well."""
    engine = trace.engine
    lines = engine_concerns(engine.lvlm, engine.question, engine.bank["pictures"])
    fits: dict[str, HeadAttribution | TokenAttribution] = {"heads": trace.heads.heads}
    if trace.tokens is not None:
        fits["image tokens"] = trace.tokens.tokens
    for what, fit in fits.items():
        if not fit.r2 >= LOW_R2:
            lines.append(
                f"coefficients of {what} foretell masked answers badly (R2 {fit.r2:.2f}): they act"
                " together, so read single ones with care"
            )
        if not fit.agreement >= LOW_AGREEMENT:
            lines.append(
                f"two halves of the masks agree by {fit.agreement:.2f} about {what}: ask more masks"
            )
    return lines


def masked_runs(
    engine: MaskEngine,
    *,
    how: How = "derivative",
    masks: int | None = None,
    token_masks: int | None = 0,
) -> int:
    """How many masked runs `trace_answer` makes at most; `engine.progress` hears of each."""
    token_masks = mask_count(how, token_masks)
    heads, orders = engine.n_components, 2 + ORDERS
    curves = 2 * (heads + 1) + 2 * orders * len(curve_counts(heads, POINTS))
    total = MaskSampling(mask_count(how, masks), how=how).runs + heads + curves
    if token_masks:
        # text rows, and four ends
        total += engine.n_text + 4 + MaskSampling(token_masks, how=how).runs
    return total


def trace_answer(
    engine: MaskEngine,
    *,
    how: How = "derivative",
    masks: int | None = None,
    token_masks: int | None = 0,
    p: float = 0.75,
    seed: int = 0,
    adaptive: bool = False,
    advance: Callable[[int], None] = lambda done: None,
) -> AnswerTrace:
    """Heads and what they would say, and with `token_masks` (None: the usual number) also text rows
    and image tokens: what `seecause lvlm heads` and `lvlm tokens` compute. `how` and `masks` are
    those of `attribute_heads`; `advance` hears of every part."""
    token_masks = mask_count(how, token_masks)
    check_masks_suffice(engine, masks, token_masks, seed=seed, how=how)
    heads = trace_heads(engine, how=how, masks=masks, p=p, seed=seed, adaptive=adaptive)
    words = head_words(engine, heads.heads)
    advance(1)
    if not token_masks:
        return AnswerTrace(engine, heads, words)
    coefficients, chosen = heads.heads.coefficients, heads.chosen
    tokens = trace_tokens(engine, coefficients, chosen, how=how, masks=token_masks, p=p, seed=seed)
    advance(1)
    return AnswerTrace(engine, heads, words, tokens)


def check_masks_suffice(
    engine: MaskEngine,
    masks: int | None,
    token_masks: int = 0,
    *,
    seed: int = 0,
    how: How = "derivative",
) -> None:
    """Refuse too few masks for the heads or the image tokens (0: none are asked for) before any are
    asked."""
    count = mask_count(how, masks)
    check_sampling(MaskSampling(count, seed=seed, how=how), engine.n_components)
    if token_masks:
        check_sampling(MaskSampling(token_masks, seed=seed, how=how), engine.n_image)


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    write_atomic(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
