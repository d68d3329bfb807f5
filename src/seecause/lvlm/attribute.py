"""Which heads carry the picture into the answer, from which image tokens, into which words (head
attribution, Kim et al. 2025).

beta_n   mean of F over masks with head n on, less the mean with it off, the other heads at random
         (a q-weighted Banzhaf value). Estimated by the mean derivative of F over a few masks, by
         that corrected with a fit, or by the paper's fit of many

Given the heads x* that matter (sections 5.1 and 5.2):

Delta_i  1 - F(x*, all but text row i) / F(x*): what blocking one text row costs          (eq. 11)
u*_i     Delta_i > 0.05,   sufficiency = F(x*, u*) / F(x*)
gamma    elastic net of F(x*, u*, v) / F(x*, u*) on image-token masks v                    (eq. 12)
w        sum_n x*_n beta_n sum_i u*_i Delta_i a^n_i: attention, weighted by what matters   (eq. 13)

Does the same question in other words use the same heads (appendix C.3)? cosine(beta_first,
beta_other) for every other wording. Coefficients are noisy, so the cosine to expect is not 1 but
that of the first wording with itself, fitted again on fresh masks: the ceiling.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.errors import BadOption
from seecause.files import write_atomic, write_json
from seecause.lvlm.analysis import COMPLETE, RATIOS, Head, cosines, first_crossing
from seecause.lvlm.bank import MeanBank
from seecause.lvlm.engine import MaskEngine, weak
from seecause.lvlm.fit import SOFTEN, Coefficients, Regression, estimate
from seecause.lvlm.masks import (
    MASKS,
    How,
    Law,
    MaskSampling,
    check_sampling,
    draw_masks,
    mask_count,
)
from seecause.lvlm.model import LVLM
from seecause.models.decoder import Grid, ImageTokens
from seecause.models.load import reading

VALUES, CARD = "coefficients.safetensors", "attribution.json"
TENSORS = ("coefficients", "standard_error", "unseen")


@dataclass(frozen=True, eq=False)
class HeadAttribution(Coefficients):
    """One coefficient for each head: the share of the picture's effect on the answer that it
    brings. By its standard error other masks would change it; where a derivative stands for it, it
    may be further off, by as much as the response bends. Tensors are [L, H]."""

    protocol: dict[str, Any] = field(default_factory=dict)
    # [n, 2] float64: responses to those masks, true and foretold
    unseen: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64))

    def order(self) -> Tensor:
        """Component indices l * H + h from the largest coefficient down, [L*H]."""
        return self.coefficients.flatten().argsort(descending=True, stable=True)

    def top(self, k: int) -> list[Head]:
        """The `k` heads with the largest coefficients."""
        return [divmod(i, self.coefficients.shape[1]) for i in self._first(k).tolist()]

    def mask(self, k: int) -> Tensor:
        """The top k heads on, the others off: [L*H]."""
        on = torch.zeros(self.coefficients.numel(), dtype=torch.bool)
        on[self._first(k)] = True
        return on

    def _first(self, k: int) -> Tensor:
        """The first `k` of `order`."""
        if not 0 <= k <= self.coefficients.numel():
            raise BadOption("k", k, f"a count up to {self.coefficients.numel()}")
        return self.order()[:k]

    def save(self, folder: str | Path) -> Path:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        values = {name: getattr(self, name).contiguous() for name in TENSORS}
        card = {name: value for name, value in vars(self).items() if name not in TENSORS}
        write_atomic(folder / VALUES, save(values))
        write_json(folder / CARD, card)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> HeadAttribution:
        folder = Path(folder)
        with reading(folder, VALUES, CARD, writer="HeadAttribution.save"):
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
            values = load_file(folder / VALUES)
            if "standard_error" not in values:  # written by a version that had none
                values["standard_error"] = torch.full_like(values["coefficients"], torch.nan)
            loaded = cls(**values, **card)
            _check_read(loaded)
            return loaded


def _check_read(attribution: HeadAttribution) -> None:
    """What was read from a file has the types it was saved with; ValueError if not."""
    numbers = [getattr(attribution, name) for name in ("intercept", "r2", "pearson", "agreement")]
    right = all(type(number) in (int, float) for number in numbers)
    right &= type(attribution.masks) is int and isinstance(attribution.protocol, dict)
    for tensor in (getattr(attribution, name) for name in TENSORS):
        right &= tensor.ndim == 2 and tensor.is_floating_point()
    if not right or attribution.standard_error.shape != attribution.coefficients.shape:
        raise ValueError("other types than those of an attribution")


def attribute_heads(
    engine: MaskEngine,
    *,
    how: How = "derivative",
    masks: int | None = None,
    p: float = 0.75,
    law: Law = "bernoulli",
    split: float = 0.8,
    alpha: float = 5e-4,
    l1_ratio: float = 0.5,
    seed: int = 0,
    adaptive: bool = False,
    agreement: float = 0.9,
    step: int = 1000,
) -> HeadAttribution:
    """What each head brings of the picture's effect on the answer.

        heads = sc.lvlm.attribute_heads(engine)
        heads.top(5), heads.coefficients, heads.r2

    how         derivative: the mean derivative of the response with respect to every head, over 64
                masks; corrected: the same, and a fit of what it leaves unexplained (1,000 masks, 64
                of them differentiated); fit: the paper's elastic net on 10,000 masks
    masks       how many; None: those above
    p           the share of heads that a mask ablates: each by itself (law="bernoulli"), or
                exactly so many (law="fixed")
    seed        of the masks; use another for each picture, for shared masks share their errors
    split, alpha, l1_ratio
                of the fit: the share of masks that it is made on, and its penalty
    adaptive    of the fit: ask `step` masks at a time, at most `masks`, until coefficients from two
                halves of them correlate by `agreement`
    """
    sampling = MaskSampling(
        masks=mask_count(how, masks), p=p, law=law, split=split, alpha=alpha, l1_ratio=l1_ratio,
        seed=seed, adaptive=adaptive, agreement=agreement, step=step, how=how,
        soften=0.0 if how == "fit" else SOFTEN,
    )  # fmt: skip
    size, device = engine.n_components, engine.lvlm.device
    result = estimate(engine.evaluate, lambda soft: engine.slopes(soft)[1], size, sampling, device)
    shape = (engine.lvlm.n_layers, engine.lvlm.n_heads)
    shared = _shared(engine, sampling, result)
    shared |= {name: shared[name].reshape(shape) for name in ("coefficients", "standard_error")}
    return HeadAttribution(**shared, unseen=result.unseen)


def _shared(
    engine: MaskEngine, sampling: MaskSampling, fit: Regression, **facts: Any
) -> dict[str, Any]:
    """What attributions of heads and of image tokens have alike: coefficients, how good they are,
    and how they were made."""
    protocol = {**engine.protocol(), "sampling": dataclasses.asdict(sampling)}
    protocol |= {"converged": fit.converged, "history": fit.history, **facts}
    values = {column.name: getattr(fit, column.name) for column in dataclasses.fields(Coefficients)}
    return {**values, "protocol": protocol}


KEPT = 0.05  # a text row is kept if blocking it costs more
_LEAST = 0.05  # F of the chosen heads, below which shares of it are noise


@dataclass(frozen=True, eq=False)
class TextEffects:
    """What the picture loses when it may not reach one text row."""

    deltas: Tensor  # [T] float64
    pieces: tuple[str, ...]  # the text rows
    response: float  # F(x*)
    standard_error: Tensor | None = None  # [T]; None: exact

    def kept(self, threshold: float = KEPT) -> Tensor:
        """u* [T]: the rows whose blocking costs more than `threshold`."""
        return self.deltas > threshold


@dataclass(frozen=True, eq=False)
class TokenAttribution(Coefficients):
    """One coefficient for each image token, gamma [N]."""

    tokens: ImageTokens
    protocol: dict[str, Any] = field(default_factory=dict)

    def maps(self) -> list[tuple[Grid, Tensor]]:
        """Coefficients as maps [rows, columns], one for each grid that shows the picture."""
        return self.tokens.maps(self.coefficients)


def text_effects(engine: MaskEngine, heads: Tensor | None = None) -> TextEffects:
    """Delta of every text row, given the heads [L*H] that may see (None: all)."""
    whole = torch.ones(1, engine.n_text, dtype=torch.bool)
    all_but_one = ~torch.eye(engine.n_text, dtype=torch.bool)
    masks = torch.cat([whole, all_but_one])
    responses = engine.evaluate(heads=_one_mask(heads), text=masks).double().cpu()
    response = _substantial(engine, float(responses[0]))
    return TextEffects(1 - responses[1:] / response, engine.prompt.pieces, response)


def text_slopes(
    engine: MaskEngine,
    heads: Tensor | None = None,
    *,
    masks: int = MASKS["derivative"],
    p: float = 0.75,
    seed: int = 0,
) -> TextEffects:
    """What every text row brings in random company: the mean derivative of F(x*, u) / F(x*) with
    respect to each row, over masks u of text rows. Taking one row away (`text_effects`) misses
    rows that stand in for each other."""
    check_sampling(MaskSampling(masks, p, seed=seed, how="derivative"), engine.n_text)
    response = _substantial(engine, float(engine.evaluate(heads=_one_mask(heads))[0]))
    rows = draw_masks(masks, engine.n_text, p=p, seed=seed)
    slopes = engine.slopes(_one_mask(heads), rows, of="text")[1].double().cpu() / response
    error = slopes.std(dim=0) / masks**0.5
    return TextEffects(slopes.mean(dim=0), engine.prompt.pieces, response, error)


def sufficiency(engine: MaskEngine, heads: Tensor | None, text: Tensor) -> float:
    """F(x*, u*) / F(x*): how much of the effect the kept text rows [T] carry alone."""
    both = torch.stack([torch.ones_like(text, dtype=torch.bool), text.bool()])
    whole, part = engine.evaluate(heads=_one_mask(heads), text=both).double().tolist()
    return part / _substantial(engine, whole)


def attribute_tokens(
    engine: MaskEngine,
    heads: Tensor | None = None,
    text: Tensor | None = None,
    *,
    how: How = "derivative",
    masks: int | None = None,
    p: float = 0.75,
    alpha: float = 5e-4,
    l1_ratio: float = 0.5,
    seed: int = 0,
    adaptive: bool = False,
    agreement: float = 0.9,
    step: int = 1000,
) -> TokenAttribution:
    """What each image token brings of the picture's effect on the answer (gamma).

    `heads` [L*H] (x*) and `text` [T] (u*) are masks of the heads and text rows that may see the
    picture; None: all. The other options are those of `attribute_heads`.
    """
    if text is not None and not bool(text.any()):
        raise BadOption("text", "no row", "at least one text row that may see the picture")
    sampling = MaskSampling(
        masks=mask_count(how, masks), p=p, alpha=alpha, l1_ratio=l1_ratio,
        seed=seed, adaptive=adaptive, agreement=agreement, step=step, how=how,
    )  # fmt: skip
    seeing = (_one_mask(heads), _one_mask(text))
    response = _substantial(engine, float(engine.evaluate(*seeing)[0]))

    def respond(image: Tensor) -> Tensor:
        return engine.evaluate(*seeing, image) / response

    def differentiate(image: Tensor) -> Tensor:
        return engine.slopes(*seeing, image, of="image")[1] / response

    result = estimate(respond, differentiate, engine.n_image, sampling, engine.lvlm.device)
    facts = {
        "heads": None if heads is None else int(heads.sum()),
        "text": None if text is None else text.int().tolist(),
    }
    shared = _shared(engine, sampling, result, **facts)
    return TokenAttribution(**shared, tokens=engine.prompt.tokens)


def weighted_attention(
    engine: MaskEngine,
    coefficients: Tensor,
    heads: Tensor,
    effects: TextEffects,
    text: Tensor | None = None,
) -> Tensor:
    """w [N] (eq. 13): the intact attention of heads x* [L*H], weighted by their coefficients [L, H]
    and by the effects of text rows u* [T]."""
    if heads.numel() != engine.n_components:
        raise BadOption("heads", list(heads.shape), f"one value a head, [{engine.n_components}]")
    rows = effects.kept() if text is None else text.bool()
    weights = (effects.deltas * rows).to(engine.lvlm.device)
    activations, width = engine.activations(), engine.lvlm.n_heads
    total = torch.zeros(engine.n_image, dtype=torch.float64, device=engine.lvlm.device)
    for component in heads.flatten().nonzero()[:, 0].tolist():
        attention = activations.attention(*divmod(component, width)).double()  # [T, N]
        total += float(coefficients.flatten()[component]) * (weights @ attention)
    return total.cpu()


def _one_mask(mask: Tensor | None) -> Tensor | None:
    """One mask that serves all."""
    return None if mask is None else mask.reshape(1, -1)


def _substantial(engine: MaskEngine, response: float) -> float:
    if response < _LEAST:
        raise weak(engine.answer, response * engine.span, _LEAST * engine.span)
    return response


@dataclass(frozen=True, eq=False)
class RankedRatio:
    """One share of ablated heads."""

    heads: HeadAttribution
    enough: int  # k_faith
    needed: int  # k_comp


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


@dataclass(frozen=True, eq=False)
class WordingComparison:
    questions: tuple[str, ...]
    attributions: tuple[HeadAttribution, ...]  # one for each question
    cosines: Tensor  # [Q - 1] float64: of every other wording with the first
    ceiling: float  # of the first with itself, on fresh masks


def compare_wordings(
    lvlm: LVLM,
    image: Image.Image,
    questions: Sequence[str],
    bank: MeanBank,
    *,
    answer: str | Sequence[int] | None = None,
    how: How = "derivative",
    masks: int | None = None,
    p: float = 0.75,
    floor: float | None = 1.0,
    seed: int = 0,
) -> WordingComparison:
    """Head attributions of one picture for several wordings of a question, `how`, by how many
    `masks` and with which share `p` of ablated heads as in `attribute_heads`; without `answer`, of
    whatever the model says to the first one."""
    if len(questions) < 2:
        raise BadOption("questions", len(questions), "at least two wordings")
    first = MaskEngine(lvlm, image, questions[0], bank, answer=answer, floor=floor)
    engines = [first]
    for question in questions[1:]:
        engines.append(MaskEngine(lvlm, image, question, bank, answer=[first.target], floor=floor))
    attributions = [
        attribute_heads(engine, how=how, masks=masks, p=p, seed=seed + place)
        for place, engine in enumerate([*engines, first])
    ]  # the last: the first wording again
    vectors = torch.stack([attribution.coefficients for attribution in attributions])
    alike = cosines(vectors[:1].expand_as(vectors[1:]), vectors[1:])
    return WordingComparison(
        tuple(questions), tuple(attributions[:-1]), alike[:-1], float(alike[-1])
    )
