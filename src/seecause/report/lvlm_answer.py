"""The page of a whole answer: the sentence, how far the picture moves each word, and behind each
word its map and its heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image
from torch import Tensor

from seecause.lvlm import AnswerEngine, AnswerWords
from seecause.lvlm.prompt import picture_map, seen_picture
from seecause.lvlm.words import MOVED, Source, word_concerns
from seecause.report.cards import Card, MapView, Strip, grid_of, head_grids, render_cards
from seecause.report.lvlm import lvlm_manifest
from seecause.report.overlay import number, scale_of
from seecause.report.page import Section, fragment, protocol_section, table, warnings, write_page

SHOWN = 5  # heads that are named
MARKS: dict[Source, str] = {
    "picture": "from the picture",
    "unlooked": "said without looking",
    "against": "against the picture",
}
NOTE = (
    "Touch a word: its map and its heads. Orange words come from the picture; dashed ones would"
    " have been said of any picture, and blue ones the picture speaks against. Under a word: how"
    f" many times as likely the picture makes it (from {math.exp(MOVED):.0f} times on it counts)."
    " Maps and heads are in logits, on one scale for all words."
)
TERMS = {
    "without the picture": (
        "all heads see the average of the calibration pictures, behind the same words"
    ),
    "logits": (
        "how far the word's logit moves against the mean of the vocabulary; heads and image tokens"
        " add up to it roughly, as the answer bends"
    ),
    "token": "a long word may be several tokens; each is shown",
}


@dataclass(frozen=True)
class SentenceWord:
    """A word to touch, and what is shown then."""

    text: str
    mark: str
    source: Source
    strength: int
    title: str
    story: str
    card: Markup
    grid: Markup


def write_answer(
    folder: Path, engine: AnswerEngine, words: AnswerWords, shown: Image.Image, *, name: str
) -> Path:
    """The page of an answer (index.html)."""
    sections = [
        words_section(engine, words, shown, name=name),
        table_section(words),
        protocol_section([answer_manifest(words)]),
    ]
    answer = sentence(engine)
    title = f"What is behind {answer!r}"
    return write_page(folder / "index.html", title, sections, lead=f"{name}: {engine.question}")


def sentence(engine: AnswerEngine) -> str:
    """The answer as it reads."""
    tokenizer = getattr(engine.lvlm.processor, "tokenizer", None)
    if tokenizer is None:
        return " ".join(engine.pieces)
    return tokenizer.decode(engine.targets, skip_special_tokens=True).strip()


def words_section(
    engine: AnswerEngine, words: AnswerWords, shown: Image.Image, *, name: str
) -> Section:
    """The sentence, and a panel for each of its words."""
    seen = seen_picture(engine.lvlm, engine.prompt, shown)
    maps = [picture_map(words.tokens, values) for values in words.image]
    scale = scale_of(*maps, signed=True)
    most = float(words.heads.abs().max()) or 1.0
    gains = words.gains().tolist()
    largest = max(map(abs, gains)) or 1.0
    pieces = []
    for word, (source, values) in enumerate(zip(words.sources(), maps, strict=True)):
        text = _readable(words.pieces[word])
        strip = Strip(seen, [MapView("image tokens: logits", values, scale)])
        pieces.append(
            SentenceWord(
                text,
                _times(gains[word]) if source != "unlooked" else "without looking",
                source,
                round(80 * abs(gains[word]) / largest),
                f"{MARKS[source]}: {number(gains[word])} nats",
                _story(words, word, source),
                render_cards([Card(f"“{text}”", [strip], caption=name)]),
                _heads(words, word, most),
            )
        )
    first = gains.index(max(gains))
    body = warnings(word_concerns(engine, words))
    body += fragment("words.html.j2", words=pieces, first=first)
    return Section("Which words come from the picture?", body, NOTE, TERMS, short="Words")


def _story(words: AnswerWords, word: int, source: Source) -> str:
    """One word in a few sentences."""
    seen, unseen = (float(log[word].exp()) for log in (words.log_seen, words.log_unseen))
    text, other = _readable(words.pieces[word]), _readable(words.instead[word])
    chances = f"probability {_chance(seen)} with the picture, {_chance(unseen)} without"
    likeliest = "it would be said just so" if other == text else f"then the likeliest is “{other}”"
    effect = f"The picture moves its logit by {float(words.spans[word]):+.2f}."
    return f"“{text}”, {MARKS[source]}: {chances}; {likeliest}. {effect}"


def _heads(words: AnswerWords, word: int, most: float) -> Markup:
    """The grid of heads behind a word; colours are those of the largest effect of all words."""
    values: Tensor = words.heads[word]
    top = words.top(word, min(SHOWN, values.numel()))
    named = ", ".join(map(str, top))
    grid = grid_of(
        "what each head brings, in logits", values, errors=words.heads_error[word], most=most,
        key=f"most: {named} (layer, head)",
    )  # fmt: skip
    return head_grids([grid])


def table_section(words: AnswerWords) -> Section:
    rows = []
    for word, source in enumerate(words.sources()):
        top = words.top(word, 1)[0]
        rows.append(
            (
                _readable(words.pieces[word]),
                MARKS[source],
                _chance(float(words.log_seen[word].exp())),
                _chance(float(words.log_unseen[word].exp())),
                _readable(words.instead[word]),
                f"{float(words.spans[word]):.2f}",
                str(top),
                ", ".join(_explained(r2[word]) for r2 in (words.heads_r2, words.image_r2)),
            )
        )
    head = (
        *("word", "", "with the picture", "without", "then likeliest", "logits", "top head"),
        "R² (heads, image tokens)",
    )
    return Section("All words", table(rows, head=head), fold="Numbers of every word")


def answer_manifest(words: AnswerWords) -> dict[str, Any]:
    """The protocol in the words of `protocol_section`."""
    sampling = words.protocol["sampling"]
    options = {name: sampling[name] for name in ("masks", "p", "seed")}
    if sampling["slopes"]:
        options["differentiated at"] = sampling["slopes"]
    method = f"head attribution (HeAr) of every word, {sampling['how']}"
    readout = "logit of each word less the vocabulary's mean"
    return lvlm_manifest(method, words.protocol, options, readout)


def _readable(piece: str) -> str:
    return piece.replace("\n", "⏎").strip() or "·"


def _explained(r2: Tensor) -> str:
    """R2; of a word that no mask moves there is nothing to explain."""
    return f"{float(r2):.2f}" if bool(r2.isfinite()) else "nothing moves"


def _times(gain: float) -> str:
    """A gain in nats as a factor: "12 x", "/ 3"."""
    if abs(gain) > math.log(1e4):
        return "> 10⁴ x" if gain > 0 else "/ > 10⁴"
    return f"{math.exp(gain):.3g} x" if gain > 0 else f"/ {math.exp(-gain):.3g}"


def _chance(p: float) -> str:
    return f"{p:.3f}" if p >= 0.0005 else "< 0.001"
