"""One answer traced from the picture to its words: heads, then text rows, then image tokens, with
everything a reader needs to judge them.

heads     coefficients and three other rankings, curves of all four, x*
tokens    what each text row receives, u*, how much that is enough for, gamma, weighted attention

Other ways to rank heads (Kim et al. 2025, section 4.1):

attention   Img(l, h): attention on the picture, averaged over text rows                   (eq. 10)
causal      Delta_n = 1 - F(all heads but n): what it costs to take one head away
random      any order

Does a ranking hold? Heads are switched on, or off, one after the other, the best first; x^(k) has
the top k on:

faithfulness F(x^(k)) -> 1        k_faith = min {k : F(x^(k)) > 0.8}: the heads that are enough
completeness F(1 - x^(k)) -> 0    k_comp = min {k : F(1 - x^(k)) < 0.2}: the heads that are needed

The curves are not monotone, so both counts are the first crossing of a scan from k = 1 on. x* =
x^(k_faith).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from seecause._files import write_atomic
from seecause.errors import BadOption
from seecause.lvlm.activations import HeadWords, head_words
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
from seecause.lvlm.fit import MASKS, How, MaskSampling, check_sampling, correlation

FAITHFUL, COMPLETE = 0.8, 0.2
LOW_R2, LOW_AGREEMENT, FEW_PICTURES = 0.5, 0.8, 20  # below these a page warns
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


def scan(engine: MaskEngine, orders: Tensor) -> RankingCurves:
    """Both curves in full for orders [P] or [O, P] of component indices, the best first. Orders
    share the masks' common blocks."""
    orders = orders.reshape(-1, engine.n_components).cpu()
    on = torch.stack([_top(order, range(len(order) + 1)) for order in orders])  # [O, P + 1, P]
    responses = engine.evaluate(heads=torch.cat([on, ~on]).flatten(0, 1)).double().cpu()
    return RankingCurves(*responses.reshape(2, len(orders), -1))


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
    engine: MaskEngine, ratios: Sequence[float] = RATIOS, *, masks: int = 10_000, seed: int = 0
) -> list[RankedRatio]:
    """Head attribution with other shares of ablated heads, and how its ranking does. Each has masks
    of its own: the same lots would be nested."""
    ranked = []
    for place, ratio in enumerate(ratios):
        heads = attribute_heads(engine, how="fit", masks=masks, p=ratio, seed=seed + place)
        enough = first_crossing(engine, heads.order())
        needed = first_crossing(engine, heads.order(), level=COMPLETE, completeness=True)
        ranked.append(RankedRatio(heads, enough, needed))
    return ranked


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


RANKINGS = ("hear", "causal", "attention", "random")
ORDERS = 5  # of the random ranking


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
    """Head attribution, the baselines, and the curves of all in one scan."""
    heads = attribute_heads(engine, how=how, masks=masks, p=p, seed=seed, adaptive=adaptive)
    attention, causal = attention_scores(engine), causal_scores(engine)
    scores = (heads.coefficients, causal, attention)
    ranked = [score.flatten().argsort(descending=True, stable=True) for score in scores]
    curves = scan(engine, torch.stack([*ranked, *random_orders(engine, ORDERS, seed=seed)]))
    slices = [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, None)]
    named = {name: curves.rows(rows) for name, rows in zip(RANKINGS, slices, strict=True)}
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
    """Text rows and image tokens, given heads x* [L*H] with coefficients [L, H]. `text` [T] are the
    rows u* that may see; None takes this answer's own."""
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


def concerns(trace: AnswerTrace) -> list[str]:
    """What makes a trace less trustworthy, in words; nothing where all is well."""
    engine = trace.engine
    lines: list[str] = []
    unknown = engine.lvlm.unknown_words(engine.question or "")
    if unknown:
        lines.append(f"the model has no token for {', '.join(unknown)}: it reads them as one word")
    if engine.bank["pictures"] < FEW_PICTURES:
        lines.append(
            f"{engine.bank['pictures']} calibration pictures make the average picture: about a"
            " hundred are better"
        )
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
    token_masks = MASKS.get(how, 0) if token_masks is None else token_masks
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
    count = masks or MASKS.get(how, 0)
    check_sampling(MaskSampling(count, seed=seed, how=how), engine.n_components)
    if token_masks:
        check_sampling(MaskSampling(token_masks, seed=seed, how=how), engine.n_image)


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    write_atomic(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
