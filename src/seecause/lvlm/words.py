"""Every word of an answer in one run: how far the picture moves it, which heads carry the picture
into it, and from where.

A row looks back only, so one masked run of question and answer answers for all words, and one run
back for each word tells of all heads (the mean derivative, `fit.py`; fits of answers need
no way back, so all words cost as much as the last):

    gain_w   log p(w | picture, words before) - log p(w | average picture, words before)
    a_w(x)   logit of word w less the vocabulary's mean, under masks x
    beta_w   mean over masks of da_w/dm, in logits; over a_w(1) - a_w(0) it is what
             `attribute_heads` gives for this word alone. Image tokens likewise

A word whose gain is small would have been said of any picture: it was said without looking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor

from seecause.errors import BadOption
from seecause.files import write_atomic, write_json
from seecause.lvlm.analysis import Head
from seecause.lvlm.bank import MeanBank, checked_bank
from seecause.lvlm.engine import MaskedRows
from seecause.lvlm.fit import SOFTEN, estimate
from seecause.lvlm.masks import How, MaskSampling, mask_count
from seecause.lvlm.model import LVLM
from seecause.lvlm.trace import LOW_R2, engine_concerns
from seecause.models.decoder import Grid, ImageTokens
from seecause.types import wide

LENGTH = 24  # tokens of an answer, at most
LEAST_SLOPES = 16  # masks that each word is differentiated at, at least
MOVED = 0.7  # nats: the picture makes the word twice as likely, or half
VALUES, CARD = "words.safetensors", "words.json"
TENSORS = (
    *("log_seen", "log_unseen", "spans", "heads", "heads_error"),
    *("image", "image_error", "heads_r2", "image_r2"),
)
Source = Literal["picture", "unlooked", "against"]


class AnswerEngine(MaskedRows):
    """One picture, one question and a whole answer, ready for masks. Without an `answer` (text or
    token ids) it is the model's own, of at most `length` tokens."""

    @torch.no_grad()
    def __init__(
        self,
        lvlm: LVLM,
        image: Image.Image,
        question: str,
        bank: MeanBank,
        *,
        answer: str | Sequence[int] | None = None,
        length: int = LENGTH,
        vocabulary: int | None = None,
        block_size: int | None = None,
    ):
        if length < 1:
            raise BadOption("length", length, "at least one token")
        seen = checked_bank(bank).resized(image)
        self.targets = lvlm.answer_ids(seen, question, answer, length)
        prompt = lvlm.prompt(seen, question, self.targets[:-1] or None)
        targets = self.targets
        super().__init__(lvlm, prompt, question, bank, image, targets, vocabulary, block_size)
        both = self.logits(self._ends()).double().log_softmax(dim=-1)
        self.unseen, self.seen = both.cpu()  # [W, V] each
        self.ablated, self.intact = self.adjusted(self._ends())  # a(0), a(1), [W] each

    @property
    def pieces(self) -> tuple[str, ...]:
        """The explained tokens."""
        return self.lvlm.pieces(torch.tensor(self.targets))

    def adjusted(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """a [M, W]: each word's logit less the vocabulary's mean, for masks of `MaskEngine`."""
        return self._answers(self._checked(heads, text, image))

    def logits(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """[M, W, V]: what each word is chosen from, the words before it taken as said."""
        masks = self._checked(heads, text, image)
        return self._answers(masks, lambda h: wide(self.lvlm.decoder.head(h)))

    def protocol(self) -> dict[str, Any]:
        return {**super().protocol(), "targets": self.targets}


@dataclass(frozen=True, eq=False)
class AnswerWords:
    """What is behind every word (token) of an answer, W of them; effects are in logits."""

    pieces: tuple[str, ...]
    instead: tuple[str, ...]  # the likeliest word at each place without the picture
    log_seen: Tensor  # [W] float64: log-probability of each word with the picture
    log_unseen: Tensor  # [W]: with the average picture, behind the same words
    spans: Tensor  # [W]: how far the picture moves the word's adjusted logit
    heads: Tensor  # [W, L, H]: what each head brings of that
    heads_error: Tensor
    image: Tensor  # [W, N]: what each image token brings of it
    image_error: Tensor
    heads_r2: Tensor  # [W], on masks that the effects have not seen
    image_r2: Tensor
    tokens: ImageTokens
    protocol: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pieces)

    def gains(self) -> Tensor:
        """[W] in nats: how much likelier the picture makes each word."""
        return self.log_seen - self.log_unseen

    def sources(self, least: float = MOVED) -> list[Source]:
        """Where each word comes from: the `picture` makes it likelier by `least` nats or more, it
        was said `unlooked`, or `against` the picture, which makes it less likely."""
        if least <= 0:
            raise BadOption("least", least, "nats above 0")
        gains = self.gains().tolist()
        return ["unlooked" if abs(g) < least else "picture" if g > 0 else "against" for g in gains]

    def moved(self, least: float = MOVED) -> Tensor:
        """[W] bool: the words that come from the picture."""
        return torch.tensor([source == "picture" for source in self.sources(least)])

    def top(self, word: int, k: int) -> list[Head]:
        """The `k` heads that bring most of the picture into a word."""
        effects = self.heads[word].flatten()
        if not 0 <= k <= len(effects):
            raise BadOption("k", k, f"a count up to {len(effects)}")
        order = effects.argsort(descending=True, stable=True)[:k].tolist()
        return [divmod(index, self.heads.shape[2]) for index in order]

    def maps(self, word: int) -> list[tuple[Grid, Tensor]]:
        """Effects of image tokens on a word as maps, one for each grid that shows the picture."""
        return self.tokens.maps(self.image[word])

    def save(self, folder: str | Path) -> Path:
        """Tensors (words.safetensors) and what they are (words.json)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / VALUES, save({n: getattr(self, n).contiguous() for n in TENSORS}))
        card = {"pieces": self.pieces, "instead": self.instead, "sources": self.sources()}
        write_json(folder / CARD, {**card, "protocol": self.protocol})
        return folder


def word_concerns(engine: AnswerEngine, words: AnswerWords) -> list[str]:
    """What makes a traced answer less trustworthy, in words; nothing where all is well. Of words
    that the picture does not move there is nothing to foretell."""
    lines = engine_concerns(engine.lvlm, engine.question, engine.bank["pictures"])
    from_picture = words.moved()
    for what, r2 in (("heads", words.heads_r2), ("image tokens", words.image_r2)):
        bad = [words.pieces[i].strip() for i in (from_picture & ~(r2 >= LOW_R2)).nonzero()[:, 0]]
        if bad:
            lines.append(
                f"coefficients of {what} foretell masked answers badly (R2 below {LOW_R2}) for"
                f" {', '.join(bad)}: they act together, so read single ones with care"
            )
    return lines


def masked_runs(engine: AnswerEngine, *, how: How = "derivative", masks: int | None = None) -> int:
    """How many masked runs `trace_words` makes; `engine.progress` hears of each."""
    return 2 * word_sampling(engine.n_words, how, masks).runs


def word_sampling(words: int, how: How, masks: int | None, **options: Any) -> MaskSampling:
    """How masks of an answer are drawn. Runs are shared by its words, ways back are not: unless
    `masks` are asked for, a long answer is differentiated at fewer of them."""
    count = mask_count(how, masks)
    spared = masks is None and how == "derivative"
    slopes = max(LEAST_SLOPES, count // words) if spared else None
    return MaskSampling(count, how=how, slopes=slopes, **options)


def trace_words(
    engine: AnswerEngine,
    *,
    how: How = "derivative",
    masks: int | None = None,
    p: float = 0.75,
    seed: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> AnswerWords:
    """Which words of an answer come from the picture, through which heads, from which image tokens.

        engine = sc.lvlm.AnswerEngine(lvlm, picture, "What colour is the tail?", bank)
        words = sc.lvlm.trace_words(engine)
        words.sources()          # picture, unlooked or against, word by word
        words.top(0, 5)          # the heads behind the first word
        words.maps(0)            # and its image tokens

    how, masks, p, seed
                as in `attribute_heads`; without `masks`, derivatives of an answer of four words or
                more are taken at 16 of the 64 masks
    advance     is called with 1 after the heads, and after the image tokens
    """
    grid = (engine.lvlm.n_layers, engine.lvlm.n_heads)
    sampling = word_sampling(engine.n_words, how, masks, p=p, seed=seed)
    spans = (engine.intact - engine.ablated).double().cpu()
    softened = replace(sampling, soften=0.0 if how == "fit" else SOFTEN)
    heads, heads_error, heads_r2 = _effects(engine, "heads", spans, softened)
    advance(1)
    image, image_error, image_r2 = _effects(engine, "image", spans, sampling)
    advance(1)
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
    engine: AnswerEngine, of: Literal["heads", "image"], spans: Tensor, sampling: MaskSampling
) -> tuple[Tensor, Tensor, Tensor]:
    """What each head or image token brings of every word's span [W], in logits [W, P], its error
    and R2 [W]: estimated by the masks that one word alone would have; all words share each run."""
    size = engine.n_components if of == "heads" else engine.n_image
    runs: dict[str, Tensor] = {}  # every word asks the same masks, once
    units = torch.where(spans == 0, 1.0, spans)  # shares are of these; of 1 where nothing moves

    def shared(kind: str, ask: Callable[[], Tensor]) -> Tensor:
        if kind not in runs:
            runs[kind] = ask().double().cpu()
        return runs[kind]

    def respond(masks: Tensor, word: int) -> Tensor:
        answers = shared("answers", lambda: engine.adjusted(**{of: masks}))[:, word]
        return (answers - float(engine.ablated[word])) / units[word]

    def differentiate(soft: Tensor, word: int) -> Tensor:
        slopes = shared("slopes", lambda: engine.slopes(**{of: soft}, of=of)[1])
        return slopes[:, word] / units[word]

    fits = []
    for word in range(engine.n_words):
        ask = (partial(respond, word=word), partial(differentiate, word=word))
        fits.append(estimate(*ask, size, sampling, engine.lvlm.device))
    effects = torch.stack([fit.coefficients for fit in fits]) * units[:, None]
    errors = torch.stack([fit.standard_error for fit in fits]) * units[:, None].abs()
    return effects, errors, torch.tensor([fit.r2 for fit in fits], dtype=torch.float64)
