"""Pages of vision-language models: one traced word, or every word of an answer.

The page of a traced word shows its heads, curves of their ranking, the logit lens of heads, and the
path from image tokens through words of the prompt. The page of an answer shows the effect of the
image on each word, with a map and a grid of heads for each.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup
from PIL import Image
from torch import Tensor

from seecause.files import write_atomic
from seecause.report import (
    Card,
    MapView,
    Section,
    Strip,
    cards_html,
    head_grid,
    part,
    protocol_section,
    rows_csv,
    sentences,
    table,
    warnings,
    write_page,
)
from seecause.report.figures import (
    chart,
    charts,
    display_image,
    mean_line,
    overlay,
    scale_of,
    side_by_side,
)

if TYPE_CHECKING:
    from seecause.lvlm import AnswerEngine, AnswerTrace, AnswerWords
    from seecause.lvlm.attribute import HeadWords

RANKINGS = {
    "hear": "head attribution",
    "causal": "one head removed",
    "attention": "attention on the image",
    "random": "random order",
}
SOURCES = {  # of a word of the answer
    "image": "from the image",
    "without": "said without the image",
    "against": "against the image",
}


# One traced word.


def write_trace(folder: Path, trace: AnswerTrace, shown: Image.Image, *, name: str) -> Path:
    """Write the page of a traced answer (index.html), heads.csv and, with image tokens,
    overlay.png."""
    engine = trace.engine
    write_atomic(folder / "heads.csv", rows_csv(trace.rows()))
    sections = [heads_section(trace), curves_section(trace), words_section(trace.words)]
    records = [trace.heads.protocol]
    if trace.tokens is not None:
        sections.insert(0, tokens_section(trace, shown, name=name))
        records.append(trace.tokens.attribution.protocol)
        seen, maps = _token_maps(trace, shown)
        images = [display_image(seen), *(overlay(seen, values) for values in maps)]
        side_by_side(images).save(folder / "overlay.png")
    title = f"What makes {engine.lvlm.name} say {engine.answer}"
    lead = f"{name}: {engine.question} The explained word of the answer is {engine.answer!r}."
    sections.append(protocol_section(records))
    return write_page(folder / "index.html", title, sections, lead=lead)


def heads_section(trace: AnswerTrace) -> Section:
    """Coefficients and attention as grids, with warnings."""
    fit, attention = trace.heads, trace.attention
    chosen = [(layer, head) for layer, head in trace.chosen.view_as(attention).nonzero().tolist()]
    grids = head_grid("coefficients", fit.coefficients, chosen=chosen, errors=fit.standard_error)
    grids += head_grid("attention on the image", attention, chosen=chosen)
    grids += head_grid("lost without this head alone", trace.causal, chosen=chosen)
    body = Markup('<div class="head-grids">{}</div>').format(grids)
    facts = part("head_facts", trace, needed_text(trace.left()))
    note = (
        "Left, the coefficient of each head: its share of the image's effect on the answer, while"
        " the other heads see the image or an average image at random. Outlined heads are the"
        " fewest, highest first, that alone bring more than 80 % of the effect. Beside it, the"
        " share of a head's attention that lies on the image, and the share of the effect that is"
        " lost without this head alone."
    )
    title = "Which heads carry the image into the answer?"
    return Section(title, warnings(trace.concerns()) + body + facts, note)


def curves_section(trace: AnswerTrace) -> Section:
    """Curves of each ranking, means over answers with standard errors, and counts of heads that are
    enough and needed."""
    drawn = []
    for attribute, title, x in (
        ("faithfulness", "only the top heads see the image", "heads on"),
        ("completeness", "the top heads do not see the image", "heads off"),
    ):
        lines = {
            RANKINGS[name]: mean_line(getattr(curve, attribute), control=name == "random")
            for name, curve in trace.curves.items()
        }
        drawn.append(chart(lines, title=title, x=x, y="share of the effect"))
    head = ("ranking", "heads on until 80 % is back", "heads off until 20 % is left")
    counts = trace.counts().items()
    rows = [(RANKINGS[name], f"{enough:g}", f"{needed:g}") for name, (enough, needed) in counts]
    note = (
        "Heads are switched on (left) or off (right), the best first: a good ranking rises early"
        " and falls early."
    )
    return Section("Does the ranking hold?", charts(drawn) + table(rows, head=head), note)


def words_section(words: list[HeadWords]) -> Section:
    """The logit lens of the top heads."""
    rows = [
        (f"layer {word.layer}, head {word.head}", f"{word.coefficient:.3f}", ", ".join(word.words))
        for word in words
    ]
    note = (
        "What each head adds where the answer is formed, read through the final norm and the"
        " vocabulary (logit lens): the words it would say alone, the likeliest first."
    )
    body = table(rows, head=("head", "coefficient", "words"))
    return Section("What would these heads say?", body, note)


def tokens_section(trace: AnswerTrace, shown: Image.Image, *, name: str = "") -> Section:
    """The prompt with the effects of its words, and maps of image tokens."""
    engine, tokens = trace.engine, trace.tokens
    assert tokens is not None
    seen, maps = _token_maps(trace, shown)
    titles = ("image tokens: share of the effect", "weighted attention")
    pairs = zip(titles, maps, strict=True)
    views = [MapView(title, values, scale_of(values)) for title, values in pairs]
    card = Card(
        name or str(engine.question), [Strip(seen, views)], caption=f"answer: {engine.answer}"
    )
    note = (
        "Under each token of the prompt: the share of the image's effect on the answer that is lost"
        " when the image may not reach it; framed ones are kept. The maps show from which image"
        " tokens the effect comes, through the heads that are enough (outlined below) and the kept"
        " words, and those heads' attention, weighted by the effects of heads and words."
    )
    prompt = prompt_words(engine.prompt.pieces, tokens.deltas, tokens.rows, engine.answer)
    body = prompt + cards_html([card]) + part("token_facts", tokens)
    return Section("From where in the image, into which words?", body, note)


def prompt_words(pieces: tuple[str, ...], deltas: Tensor, kept: Tensor, answer: str) -> Markup:
    """Words of the prompt, each with the effect of blocking it."""
    most = max(float(deltas.abs().max()), 1e-9)
    return part("prompt", pieces, deltas.tolist(), kept.tolist(), answer, most)


def _token_maps(trace: AnswerTrace, shown: Image.Image) -> tuple[Tensor, list[Tensor]]:
    """The image in the model's frame; image-token coefficients and weighted attention on it."""
    from seecause.lvlm.prompt import image_map, seen_image

    assert trace.tokens is not None
    values = (trace.tokens.attribution.coefficients, trace.tokens.weighted)
    maps = [image_map(trace.engine.prompt.tokens, tokens) for tokens in values]
    return seen_image(trace.engine.lvlm, trace.engine.prompt, shown), maps


def needed_text(left: float) -> str:
    """Whether heads that are enough are also needed, by the share of the effect `left` without
    them."""
    from seecause.lvlm.attribute import COMPLETE

    return sentences("needed", left=left, complete=COMPLETE)[0]


# Every word of an answer.


def write_answer(
    folder: Path, engine: AnswerEngine, words: AnswerWords, shown: Image.Image, *, name: str
) -> Path:
    """Write the page of an answer (index.html)."""
    section = answer_section(engine, words, shown, name=name)
    sections = [section, protocol_section([words.protocol])]
    title, lead = f"What is behind {sentence(engine)!r}", f"{name}: {engine.question}"
    return write_page(folder / "index.html", title, sections, lead=lead)


def sentence(engine: AnswerEngine) -> str:
    """The answer as text."""
    tokenizer = engine.lvlm.processor.tokenizer
    return tokenizer.decode(engine.targets, skip_special_tokens=True).strip()


def answer_section(
    engine: AnswerEngine, words: AnswerWords, shown: Image.Image, *, name: str
) -> Section:
    """The sentence, and a panel behind each of its words."""
    from seecause.lvlm.prompt import image_map, seen_image
    from seecause.lvlm.words import MOVED, word_concerns

    seen = seen_image(engine.lvlm, engine.prompt, shown)
    maps = [image_map(words.tokens, values) for values in words.image]
    scale, most = scale_of(*maps, signed=True), float(words.heads.abs().max())
    gains, ratios = words.gains().tolist(), words.gains().abs().exp().tolist()
    largest = max(map(abs, gains)) or 1.0
    entries = []
    for word, (source, values) in enumerate(zip(words.sources(), maps, strict=True)):
        text = _readable(words.pieces[word])
        strip = Strip(seen, [MapView("image tokens: logits", values, scale)])
        errors = words.heads_error[word]
        title = "effect of each head, in logits"
        entries.append(
            {
                "text": text,
                "gain": gains[word],
                "ratio": ratios[word],
                "source": source,
                "about": SOURCES[source],
                "story": _story(words, word),
                "card": Card(f"“{text}”", [strip], caption=name),
                "grid": head_grid(title, words.heads[word], errors=errors, most=most),
            }
        )
    body = warnings(word_concerns(engine, words))
    body += part("words", entries, largest, gains.index(max(gains)))
    note = (
        "Click a word to see its map and its heads. Orange words: the image makes them at"
        f" least {math.exp(MOVED):.0f} times as likely as the average of the calibration images"
        " does. Blue words: the image makes them less likely. Dashed words: the image changes their"
        " probability little. The number under a word is this ratio. Maps and heads are in logits,"
        " on one scale for all words."
    )
    return Section("Which words come from the image?", body, note)


def _story(words: AnswerWords, word: int) -> str:
    """One word in a few sentences."""
    text, other = _readable(words.pieces[word]), _readable(words.instead[word])
    source = SOURCES[words.sources()[word]]
    return sentences("word", words=words, word=word, text=text, other=other, source=source)[0]


def _readable(piece: str) -> str:
    return piece.replace("\n", "⏎").strip() or "·"
