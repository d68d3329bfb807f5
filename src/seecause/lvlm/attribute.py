"""Which heads carry the image into the answer, from which image tokens, into which words (head
attribution, Kim et al. 2025).

beta_n   mean of F over masks with head n on, less the mean with it off, the other heads at random
         (a q-weighted Banzhaf value); estimated as in `fit.py`
x*       x^(k_faith): the fewest heads, highest first, that alone bring more than 80 % of the effect

Given x* (sections 5.1 and 5.2):

Delta_i  1 - F(x*, all but text row i) / F(x*): what blocking one text row costs          (eq. 11)
u*_i     Delta_i > 0.05,   sufficiency = F(x*, u*) / F(x*)
gamma    coefficients of F(x*, u*, v) / F(x*, u*) on image-token masks v                   (eq. 12)
w        sum_n x*_n beta_n sum_i u*_i Delta_i a^n_i: attention, weighted by what matters   (eq. 13)

`trace_answer` computes all of it, beside the other rankings and curves of `analysis.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from seecause.errors import BadOption
from seecause.files import write_atomic, write_json
from seecause.lvlm.analysis import (
    Head,
    RankingCurves,
    attention_scores,
    causal_scores,
    curve_counts,
    random_orders,
    scan,
)
from seecause.lvlm.engine import MaskedRows, MaskEngine, weak
from seecause.lvlm.fit import (
    SOFTEN,
    Ablated,
    Coefficients,
    How,
    MaskCount,
    Sampling,
    correlation,
    estimate,
)
from seecause.options import Seed, checked
from seecause.results import Result

KEPT = 0.05  # a text row is kept if blocking it costs more
LOW_R2, LOW_AGREEMENT = 0.5, 0.8  # below these a page warns
ORDERS = 5  # of the random ranking
POINTS = 128  # counts of heads at which rankings other than head attribution's are measured
LENS_HEADS, LENS_WORDS = 5, 10
_LEAST = 0.05  # F of the chosen heads, below which shares of it are noise


@dataclass(frozen=True, eq=False)
class HeadAttribution(Coefficients):
    """One coefficient for each head, [L, H]: its share of the image's effect on the answer. A mean
    derivative may be further off than its standard error, by the curvature of the response."""

    def order(self) -> Tensor:
        """Component indices l * H + h by falling coefficient, [L*H]."""
        return self.coefficients.flatten().argsort(descending=True, stable=True)

    def top(self, k: int) -> list[Head]:
        """The `k` heads with the largest coefficients."""
        return [divmod(i, self.coefficients.shape[1]) for i in self.order()[:k].tolist()]

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
    """Estimate the share of the image's effect on the answer that each head brings.

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
    values = vars(found) | {
        name: getattr(found, name).reshape(grid) for name in ("coefficients", "standard_error")
    }
    return HeadAttribution(**values | {"protocol": _protocol(engine, sampling)})


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
    """Estimate the share of the image's effect on the answer that each image token brings (gamma).

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
    if text is not None and not bool(text.any()):
        raise BadOption("text", "no row", "at least one text row that may see the image")
    sampling = Sampling.of(how, masks, p, seed)
    seeing = (_one_mask(heads), _one_mask(text))
    response = _substantial(engine, float(engine.evaluate(*seeing)[0]))
    drawn = sampling.draw(engine.n_image)
    slopes = None
    if sampling.slopes:
        slopes = engine.slopes(*seeing, sampling.softened(drawn), of="image")[1] / response
    responses = engine.evaluate(*seeing, drawn) / response
    found = estimate(drawn, responses, slopes, seed=seed, device=engine.lvlm.device)
    facts = {
        "heads": None if heads is None else int(heads.sum()),
        "text": None if text is None else text.int().tolist(),
    }
    protocol = _protocol(engine, sampling) | facts
    return dataclasses.replace(found, protocol=protocol)


def _protocol(engine: MaskedRows, sampling: Sampling) -> dict[str, Any]:
    return {**engine.protocol(), "sampling": dataclasses.asdict(sampling)}


def text_effects(engine: MaskEngine, heads: Tensor | None = None) -> Tensor:
    """Delta [T] float64 of every text row, given the heads [L*H] that may see (None: all)."""
    whole = torch.ones(1, engine.n_text, dtype=torch.bool)
    all_but_one = ~torch.eye(engine.n_text, dtype=torch.bool)
    masks = torch.cat([whole, all_but_one])
    responses = engine.evaluate(heads=_one_mask(heads), text=masks).double().cpu()
    return 1 - responses[1:] / _substantial(engine, float(responses[0]))


def kept_rows(deltas: Tensor) -> Tensor:
    """u* [T] from effects [T], of one answer or their mean over a dataset; where none costs more
    than the threshold, the row that costs most."""
    kept = deltas > KEPT
    return kept if bool(kept.any()) else deltas == deltas.max()


def sufficiency(engine: MaskEngine, heads: Tensor | None, text: Tensor) -> float:
    """F(x*, u*) / F(x*): how much of the effect the kept text rows [T] carry alone."""
    both = torch.stack([torch.ones_like(text, dtype=torch.bool), text.bool()])
    whole, part = engine.evaluate(heads=_one_mask(heads), text=both).double().tolist()
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


def _one_mask(mask: Tensor | None) -> Tensor | None:
    """One mask that serves all."""
    return None if mask is None else mask.reshape(1, -1)


def _substantial(engine: MaskEngine, response: float) -> float:
    if response < _LEAST:
        raise weak(engine.answer, response * engine.span, _LEAST * engine.span)
    return response


@dataclass(frozen=True)
class HeadWords:
    """What one head would say alone (logit lens)."""

    layer: int
    head: int
    coefficient: float
    words: tuple[str, ...]  # the likeliest first


@dataclass(frozen=True, eq=False)
class TokenTrace:
    """From which image tokens, into which text rows, through heads x*."""

    attribution: Coefficients  # of the image tokens, gamma [N]
    deltas: Tensor  # [T] float64: what blocking each text row costs
    rows: Tensor  # u* [T] bool
    sufficiency: float  # F(x*, u*) / F(x*)
    weighted: Tensor  # w [N] float64 (eq. 13)

    @property
    def agreement(self) -> float:
        """Pearson's correlation of image-token coefficients with the weighted attention."""
        return correlation(self.attribution.coefficients, self.weighted)


@dataclass(frozen=True, eq=False)
class AnswerTrace(Result):
    """Which heads carry the image into one token of an answer, and how well four rankings of them
    hold; into which text rows and from which image tokens, where these were asked for.

    Attributes:
        engine: What was asked.
        heads: Coefficients of the heads.
        attention: [L, H], attention on the image (eq. 10).
        causal: [L, H], the share of the effect that is lost without one head.
        curves: Faithfulness and completeness of the rankings "hear", "causal", "attention" and
            "random".
        chosen: [L*H] bool, the heads x* that are enough.
        words: What the top heads would say.
        tokens: Text rows and image tokens, or None.
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
        tensors = {"coefficients": self.heads.coefficients, "unseen": self.heads.unseen}
        tensors |= {"standard_error": self.heads.standard_error, "chosen": self.chosen}
        tensors |= {"attention": self.attention, "causal": self.causal}
        for name, curves in self.curves.items():
            tensors[f"faithfulness.{name}"] = curves.faithfulness
            tensors[f"completeness.{name}"] = curves.completeness
        if self.tokens is not None:
            found = self.tokens.attribution
            tensors |= {"tokens.coefficients": found.coefficients, "tokens.rows": self.tokens.rows}
            tensors |= {"tokens.standard_error": found.standard_error}
            tensors |= {"tokens.weighted": self.tokens.weighted}
            tensors |= {"tokens.deltas": self.tokens.deltas}
        card = {"numbers": self.numbers(), "protocol": self.heads.protocol}
        return save_result(folder, "trace", tensors, card)

    def concerns(self) -> list[str]:
        """What makes the trace less trustworthy, as sentences."""
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
    """Trace one token of an answer: heads, whether their ranking holds, what they would say, and
    from which image tokens into which text rows.

    Curves are complete for head attribution, whose counts choose x*, and at `POINTS` counts for the
    other rankings.

    Args:
        engine: One image, one question and one token of the answer. `engine.progress` is called
            with the number of masked runs that have finished.
        how: "derivative" or "fit", as in `attribute_heads`.
        masks: How many masks, for heads and for image tokens; None: 64 or 10,000.
        p: The probability that a mask ablates a head or an image token.
        seed: Seed of the masks and of the random ranking.
        tokens: Whether to trace text rows and image tokens, which takes half the time.

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
    curves = {"hear": scan(engine, heads.order())}
    for name, rows in (("causal", slice(0, 1)), ("attention", slice(1, 2))):
        curves[name] = others.rows(rows)
    curves["random"] = others.rows(slice(2, None))
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
