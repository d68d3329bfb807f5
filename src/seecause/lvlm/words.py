"""Trace every word of an answer in one run: the effect of the image on it, the heads that carry it,
and the image tokens.

A row looks back only, so one masked run of question and answer serves all words, and one backward
pass for each word gives the derivatives for all heads (`attribute.py`; fits need no backward pass):

    gain_w   log p(w | image, words before) - log p(w | average image, words before)
    a_w(x)   logit of word w less the vocabulary's mean, under masks x
    beta_w   mean over masks of da_w/dm, in logits; divided by a_w(1) - a_w(0) it is what
             `attribute_heads` gives for this word alone. Image tokens likewise

A word with a small gain does not depend on the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from seecause.lvlm.attribute import (
    LOW_R2,
    SOFTEN,
    Ablated,
    How,
    MaskCount,
    Sampling,
    estimate,
    save_result,
    top_heads,
)
from seecause.lvlm.bank import MeanBank
from seecause.lvlm.engine import MaskedRows
from seecause.lvlm.model import LVLM, Head
from seecause.models.block import Named
from seecause.models.decoder import ImageTokens
from seecause.options import Count, Seed, checked
from seecause.results import Result

LENGTH = 24  # maximum number of tokens of an answer
LEAST_SLOPES = 16  # minimum number of masks at which each word is differentiated
MOVED = 0.7  # nats, a factor of two in probability
Source = Literal["image", "without", "against"]


class AnswerEngine(MaskedRows):
    """One image, one question and a whole answer, ready for masks.

    Args:
        lvlm: A model returned by `sc.lvlm.load` or `sc.lvlm.wrap`.
        image: The image.
        question: What is asked about it.
        bank: The average image, returned by `sc.lvlm.make_bank`.
        answer: Text or token ids; None: the model's own answer.
        length: The most tokens of the model's own answer.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> image = sc.data.open_image("critters:clean:test#3")
        >>> bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3))
        >>> engine = sc.lvlm.AnswerEngine(lvlm, image, "What colour is the tail?", bank)
        >>> engine.pieces
        ('coral',)
    """

    @checked
    @torch.no_grad()
    def __init__(
        self,
        lvlm: LVLM,
        image: Image.Image,
        question: str,
        bank: MeanBank,
        *,
        answer: str | Sequence[int] | None = None,
        length: Count = LENGTH,
    ):
        self.targets = lvlm.answer_ids(image, question, answer, length)
        prompt = lvlm.prompt(image, question, self.targets[:-1] or None)
        super().__init__(lvlm, prompt, question, bank, image, self.targets)
        both = self.logits(self._ends()).double().log_softmax(dim=-1)
        self.unseen, self.seen = both.cpu()  # [W, V] each
        self.ablated, self.intact = self.adjusted(self._ends())  # a(0), a(1), [W] each

    @property
    def pieces(self) -> tuple[str, ...]:
        """The explained tokens."""
        return self.lvlm.pieces(torch.tensor(self.targets))

    def protocol(self) -> Named:
        return {**super().protocol(), "targets": self.targets}


@dataclass(frozen=True, eq=False)
class AnswerWords(Result):
    """Causes of every word (token) of an answer with W words; effects are in logits.

    Attributes:
        pieces: The words.
        instead: The likeliest word at each place without the image.
        log_seen: [W], log-probability of each word with the image.
        log_unseen: [W], log-probability of each word with the average image, given earlier words.
        spans: [W], effect of the image on each word's adjusted logit.
        heads: [W, L, H], part of each head in that effect, with `heads_error`.
        image: [W, N], part of each image token in it, with `image_error`.
        heads_r2: [W], explained variance on masks not used for the estimate; `image_r2` likewise.
        tokens: Where the image tokens lie.
        protocol: How this was computed.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> image = sc.data.open_image("critters:clean:test#3")
        >>> bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3))
        >>> engine = sc.lvlm.AnswerEngine(lvlm, image, "What colour is the tail?", bank)
        >>> words = sc.lvlm.trace_words(engine, masks=8)
        >>> words.heads.shape, words.sources()
        (torch.Size([1, 6, 8]), ['image'])
    """

    pieces: tuple[str, ...]
    instead: tuple[str, ...]
    log_seen: Tensor
    log_unseen: Tensor
    spans: Tensor
    heads: Tensor
    heads_error: Tensor
    image: Tensor
    image_error: Tensor
    heads_r2: Tensor
    image_r2: Tensor
    tokens: ImageTokens
    protocol: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pieces)

    def gains(self) -> Tensor:
        """[W] in nats: how much likelier the image makes each word."""
        return self.log_seen - self.log_unseen

    def sources(self) -> list[Source]:
        """Where each word comes from: "image" where the image makes it at least twice as likely,
        "against" where it makes it half as likely, else "without"."""
        gains = self.gains().tolist()
        return ["without" if abs(g) < MOVED else "image" if g > 0 else "against" for g in gains]

    def top(self, word: int, k: int) -> list[Head]:
        """The `k` heads that bring most of the image into a word."""
        return top_heads(self.heads[word], k)

    def numbers(self) -> dict[str, float]:
        """How many words there are, and how many come from the image or are against it."""
        sources = self.sources()
        counts = {f"words_{name}": float(sources.count(name)) for name in ("image", "against")}
        return {"words": float(len(self)), **counts}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each word."""
        columns = zip(self.pieces, self.sources(), self.log_seen, self.log_unseen, strict=True)
        return [
            {
                "word": piece.strip(),
                "source": source,
                "probability": float(seen.exp()),
                "without": float(unseen.exp()),
                "heads": ", ".join(map(str, self.top(place, 3))),
            }
            for place, (piece, source, seen, unseen) in enumerate(columns)
        ]

    def save(self, folder: str | Path) -> Path:
        """Write `words.safetensors` and `words.json`."""
        card = {"pieces": self.pieces, "instead": self.instead, "sources": self.sources()}
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return save_result(folder, "words", tensors, {**card, "protocol": self.protocol})


def word_concerns(engine: AnswerEngine, words: AnswerWords) -> list[str]:
    """Warnings about a traced answer, as sentences. Words without an effect of the image are not
    considered."""
    lines = engine.concerns()
    moved = torch.tensor([source == "image" for source in words.sources()])
    for what, r2 in (("heads", words.heads_r2), ("image tokens", words.image_r2)):
        bad = [words.pieces[i].strip() for i in (moved & ~(r2 >= LOW_R2)).nonzero()[:, 0]]
        if bad:
            lines.append(
                f"coefficients of {what} predict masked answers badly (R2 below {LOW_R2}) for"
                f" {', '.join(bad)}: they act together, so read single ones with care"
            )
    return lines


def masked_runs(engine: AnswerEngine, *, how: How = "derivative", masks: int | None = None) -> int:
    """How many masked runs `trace_words` makes, for progress bars."""
    return 2 * word_sampling(engine.n_words, how, masks, 0.75, 0).runs


def word_sampling(words: int, how: How, masks: int | None, p: float, seed: int) -> Sampling:
    """Masked runs serve all words, backward passes do not: unless `masks` are given, a long answer
    is differentiated at fewer of them."""
    sampling = Sampling.of(how, masks, p, seed)
    if masks is None and how == "derivative":
        return replace(sampling, slopes=max(LEAST_SLOPES, sampling.masks // words))
    return sampling


@checked
def trace_words(
    engine: AnswerEngine,
    *,
    how: How = "derivative",
    masks: MaskCount | None = None,
    p: Ablated = 0.75,
    seed: Seed = 0,
) -> AnswerWords:
    """Trace every word of an answer: does it come from the image, through which heads, from which
    image tokens?

    Args:
        engine: One image, one question and an answer. `engine.progress` is called with the number
            of masked runs that have finished.
        how: "derivative" or "fit", as in `attribute_heads`.
        masks: How many masks; None: 64 or 10,000. Without it, derivatives of an answer of four
            words or more are taken at 16 of the 64 masks.
        p: The probability that a mask ablates a head or an image token.
        seed: Seed of the masks.

    Returns:
        An `AnswerWords`.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> image = sc.data.open_image("critters:clean:test#3")
        >>> bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3))
        >>> engine = sc.lvlm.AnswerEngine(lvlm, image, "What colour is the tail?", bank)
        >>> sc.lvlm.trace_words(engine, masks=8).sources()
        ['image']
    """
    grid = (engine.lvlm.n_layers, engine.lvlm.n_heads)
    sampling = word_sampling(engine.n_words, how, masks, p, seed)
    spans = (engine.intact - engine.ablated).double().cpu()
    softened = replace(sampling, soften=SOFTEN if sampling.slopes else 0.0)
    heads, heads_error, heads_r2 = _effects(engine, "heads", spans, softened)
    image, image_error, image_r2 = _effects(engine, "image", spans, sampling)
    place = torch.arange(engine.n_words), torch.tensor(engine.targets)
    return AnswerWords(
        pieces=engine.pieces,
        instead=engine.lvlm.pieces(engine.unseen.argmax(dim=1)),
        log_seen=engine.seen[place],
        log_unseen=engine.unseen[place],
        spans=spans,
        heads=heads.unflatten(1, grid),
        heads_error=heads_error.unflatten(1, grid),
        image=image,
        image_error=image_error,
        heads_r2=heads_r2,
        image_r2=image_r2,
        tokens=engine.prompt.tokens,
        protocol={**engine.protocol(), "sampling": asdict(sampling)},
    )


def _effects(
    engine: AnswerEngine, of: Literal["heads", "image"], spans: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """What each head or image token brings of every word's span [W], in logits [W, P], its error
    and R2 [W]. All words share each masked run."""
    masks = sampling.draw(engine.n_components if of == "heads" else engine.n_image)
    answers = (engine.adjusted(**{of: masks}) - engine.ablated).double().cpu()  # [M, W]
    slopes = None
    if sampling.slopes:
        slopes = engine.slopes(**{of: sampling.softened(masks)}, of=of)[1].double().cpu()
    units = torch.where(spans == 0, 1.0, spans)  # 1 where the image has no effect
    fits = []
    for word, unit in enumerate(units):
        own = None if slopes is None else slopes[:, word] / unit
        given = {"seed": sampling.seed, "device": engine.lvlm.device}
        fits.append(estimate(masks, answers[:, word] / unit, own, **given))
    effects = torch.stack([fit.coefficients for fit in fits]) * units[:, None]
    errors = torch.stack([fit.standard_error for fit in fits]) * units[:, None].abs()
    return effects, errors, torch.tensor([fit.r2 for fit in fits], dtype=torch.float64)
