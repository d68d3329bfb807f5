"""Pages of vision-language models: one traced word, or every word of an answer.

A traced word has its heads, whether their ranking holds, the words that the heads would say, and
the way from image tokens through words of the prompt. An answer has how far the image moves each of
its words, with a map and a grid of heads behind each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from PIL import Image
from torch import Tensor

from seecause.models.base import library_versions
from seecause.report.figures import (
    Line,
    chart,
    charts,
    display_image,
    mean_line,
    number,
    overlay,
    panel,
    scale_of,
)
from seecause.report.pages import (
    Card,
    MapView,
    Section,
    Strip,
    cards_html,
    folded,
    head_grid,
    part,
    protocol_section,
    side_by_side,
    table,
    warnings,
    write_page,
)

if TYPE_CHECKING:
    from seecause.lvlm import (
        AnswerEngine,
        AnswerTrace,
        AnswerWords,
        HeadAttribution,
        HeadTrace,
        HeadWords,
        RankingCurves,
    )

RANKINGS = {
    "hear": "head attribution",
    "causal": "one head removed",
    "attention": "attention on the image",
    "random": "random order",
}
DOTS = 400  # of a chart, at most
FIT = {
    "effect": "how far the image moves the answer's logit, compared with an average image",
    "masks": "random choices of which heads see the image; coefficients are the mean derivative of"
    " the answer over masks, or fitted to the answers",
    "standard error": "by how much coefficients from other masks would differ",
    "R² on unseen masks": "how well the coefficients predict the answer under other masks",
    "agreement of halves": "correlation of coefficients from one half of the masks and from the"
    " other; near 1, more masks change little",
}
ESTIMATED = {
    "derivative": "mean derivative over {} masks",
    "corrected": "mean derivative, corrected by a fit to {} masks",
    "fit": "fitted to {} masks",
}
SOURCES = {  # of a word of the answer
    "picture": "from the image",
    "unlooked": "said without the image",
    "against": "against the image",
}


# One traced word.


def write_trace(folder: Path, trace: AnswerTrace, shown: Image.Image, *, name: str) -> Path:
    """Write the page of a traced answer (index.html) and, with image tokens, overlay.png."""
    engine = trace.engine
    sections = [
        heads_section(trace),
        curves_section(trace.heads.curves, head_counts(trace.heads)),
        words_section(trace.words, trace.heads.heads.standard_error),
        protocol_section([trace_manifest(trace)]),
    ]
    if trace.tokens is not None:
        tokens_panel(trace, shown).save(folder / "overlay.png")
        sections.insert(0, tokens_section(trace, shown, name=name))
    title = f"What makes {engine.lvlm.name} say {engine.answer}"
    lead = f"{name}: {engine.question} The explained word of the answer is {engine.answer!r}."
    return write_page(folder / "index.html", title, sections, lead=lead)


def heads_section(trace: AnswerTrace) -> Section:
    """Coefficients and attention as grids, and how far to trust them."""
    from seecause.lvlm.trace import concerns

    engine, fit, attention = trace.engine, trace.heads.heads, trace.heads.attention
    places = trace.heads.chosen.reshape(attention.shape).nonzero().tolist()
    chosen = [(layer, head) for layer, head in places]
    key = f"outlined: the {len(chosen)} that are enough"
    error = fit.standard_error
    grids = [
        head_grid("coefficients", fit.coefficients, chosen=chosen, errors=error, key=key),
        head_grid("attention on the image", attention, chosen=chosen),
    ]
    facts = [
        ("answer", f"{engine.answer} (the image moves its logit by {engine.span:.2f})"),
        ("heads that are enough", f"{len(chosen)} of {trace.heads.chosen.numel()}"),
        ("are they needed?", needed_text(trace.heads.left())),
        ("coefficients", ESTIMATED[fit.protocol["sampling"]["how"]].format(f"{fit.masks:,}")),
        ("standard error of a coefficient", errors_text(fit.standard_error)),
        ("R² on unseen masks", f"{fit.r2:.3f} (correlation {fit.pearson:.3f})"),
        ("agreement of halves", f"{fit.agreement:.3f}"),
    ]
    body = warnings(concerns(trace)) + side_by_side(grids) + table(facts) + fit_charts(fit)
    note = (
        "Each cell is one head. Left, its coefficient: its share of the image's effect on the"
        " answer, while the other heads see the image or an average image at random; hover for its"
        " standard error. Outlined heads are the fewest, highest first, that alone bring more than"
        " 80 % of the effect. Right, the share of its attention that lies on the image."
    )
    title = "Which heads carry the image into the answer?"
    return Section(title, body, note, FIT, short="Heads")


def fit_charts(fit: HeadAttribution) -> Markup:
    """Answers under masks that the coefficients were not fitted to, predicted and true; and the
    coefficients of each layer added up."""
    drawn = []
    if len(fit.unseen):
        true, predicted = fit.unseen[:: -(-len(fit.unseen) // DOTS)].T.tolist()
        ends = [float(fit.unseen.min()), float(fit.unseen.max())]
        lines = {
            "masks": Line(predicted, true, marker="o"),
            "exact prediction": Line(ends, ends, control=True),
        }
        titles = {"x": "predicted by the coefficients", "y": "share of the effect"}
        drawn.append(chart(lines, title="Answers under masks not seen before", **titles))
    sums, error = fit.coefficients.sum(dim=1), fit.standard_error.square().sum(dim=1).sqrt()
    layers = Line(list(range(len(sums))), sums.tolist(), error.tolist())
    title = "At what depth? All heads of a layer added up"
    drawn.append(chart({"layers": layers}, title=title, x="layer", y="share of the effect"))
    return charts(drawn)


def curves_section(
    curves: Mapping[str, RankingCurves], counts: Mapping[str, tuple[str, str]]
) -> Section:
    """Curves of each ranking, means over answers with standard errors, and the `counts` of heads
    that are enough and needed."""
    from seecause.lvlm.analysis import LEVELS, threshold_study
    from seecause.lvlm.trace import POINTS

    drawn = []
    for attribute, title, x in (
        ("faithfulness", "only the top heads see the image", "heads on"),
        ("completeness", "the top heads do not see the image", "heads off"),
    ):
        lines = {
            RANKINGS[name]: mean_line(getattr(curve, attribute), control=name == "random")
            for name, curve in curves.items()
        }
        drawn.append(chart(lines, title=title, x=x, y="share of the effect", share=True))
    body = charts(drawn)
    head = ("ranking", "heads that are enough", "heads that are needed")
    body += table([(RANKINGS[name], *pair) for name, pair in counts.items()], head=head)
    studied = {name: threshold_study(curves[name]) for name in curves if name != "random"}
    rows = [
        (RANKINGS[name], *(f"{a:.3g}, {b:.3g}" for a, b in levels.tolist()))
        for name, levels in studied.items()
    ]
    head = ("ranking", *(f"{level:.0%} brought, {1 - level:.0%} left" for level in LEVELS))
    body += folded("Heads that are enough, and needed, at other thresholds", table(rows, head=head))
    note = (
        "Heads are switched on (left) or off (right), the best first: a good ranking rises early"
        " and falls early. The table has the first count that brings more than 80 % of the effect,"
        " and the first that leaves less than 20 %."
    )
    if max(curve.faithfulness.shape[1] for curve in curves.values()) > POINTS:
        note += (
            f" Rankings other than head attribution are measured at about {POINTS} counts of heads,"
            " with straight lines between them."
        )
    return Section("Does the ranking hold?", body, note, short="Rankings")


def words_section(words: Sequence[HeadWords], errors: Tensor) -> Section:
    """The words that the top heads would say; `errors` [L, H] are standard errors."""
    rows = []
    for word in words:
        value = f"{word.coefficient:.3f} ± {float(errors[word.layer, word.head]):.3f}"
        rows.append((f"layer {word.layer}, head {word.head}", value, ", ".join(word.words)))
    note = (
        "What each head adds where the answer is formed, read through the final norm and the"
        " vocabulary (logit lens): the words it would say alone, the likeliest first."
    )
    body = table(rows, head=("head", "coefficient", "words"))
    return Section("What would these heads say?", body, note, short="Words of heads")


def tokens_section(trace: AnswerTrace, shown: Image.Image, *, name: str = "") -> Section:
    """The prompt with the effects of its words, and the image with where the effect comes from."""
    from seecause.lvlm.prompt import seen_picture

    engine, tokens = trace.engine, trace.tokens
    assert tokens is not None
    titles = ("image tokens: share of the effect", "weighted attention")
    maps = zip(titles, _token_maps(trace), strict=True)
    views = [MapView(title, values, scale_of(values)) for title, values in maps]
    strip = Strip(seen_picture(engine.lvlm, engine.prompt, shown), views)
    card = Card(name or (engine.question or ""), [strip], caption=f"answer: {engine.answer}")
    alone = f"{tokens.sufficiency:.0%} of what these heads bring into all words"
    facts = [
        ("kept words alone bring", alone),
        ("standard error of an image token", errors_text(tokens.tokens.standard_error)),
        ("R² on unseen masks", f"{tokens.tokens.r2:.3f}"),
        ("agreement of halves", f"{tokens.tokens.agreement:.3f}"),
        ("correlation of the two maps", f"{tokens.agreement:.3f}"),
    ]
    note = (
        "Under each token of the prompt: the share of the image's effect on the answer that is lost"
        " when the image may not reach it; framed ones are kept. The maps show from which image"
        " tokens the effect comes, through the heads that are enough (outlined below) and the kept"
        " words, and those heads' attention, weighted by the effects of heads and words."
    )
    terms = {
        "image tokens": "the model sees the image as a grid of these. A token is not a pixel: the"
        " vision tower mixes its tokens, so one over the background may carry the object",
        "weighted attention": "attention on each image token, summed over these heads and words",
    }
    effects = tokens.effects
    prompt = prompt_words(effects.pieces, effects.deltas, tokens.text, engine)
    body = prompt + cards_html([card]) + table(facts)
    title = "From where in the image, into which words?"
    return Section(title, body, note, terms, short="Image tokens")


def prompt_words(pieces: Sequence[str], deltas: Tensor, kept: Tensor, engine: Any) -> Markup:
    """Words of the prompt, each with what blocking it costs."""
    most = max(float(deltas.abs().max()), 1e-9)
    words = [
        {
            "text": piece.replace("\n", "⏎") or "·",
            "number": f"{value:z.2f}",
            "strength": round(80 * abs(value) / most),
            "sign": "for" if value >= 0 else "against",
            "kept": keep,
            "title": f"{piece!r}: {value:z.4f}",
        }
        for piece, value, keep in zip(pieces, deltas.tolist(), kept.tolist(), strict=True)
    ]
    count = "" if engine.n_image is None else f"{engine.n_image} "
    return part("prompt", f"{count}image tokens", words, engine.answer)


def tokens_panel(trace: AnswerTrace, shown: Image.Image) -> Image.Image:
    """The image, image-token coefficients and weighted attention side by side."""
    from seecause.lvlm.prompt import seen_picture

    engine, maps = trace.engine, _token_maps(trace)
    seen = seen_picture(engine.lvlm, engine.prompt, shown)
    images = [display_image(seen), *(overlay(seen, values) for values in maps)]
    titles = [str(engine.answer), "image tokens", "weighted attention"]
    return panel(images, titles, [None, *map(scale_of, maps)])


def _token_maps(trace: AnswerTrace) -> list[Tensor]:
    """Image-token coefficients and weighted attention, [gh, gw] each."""
    from seecause.lvlm.prompt import picture_map

    assert trace.tokens is not None
    values = (trace.tokens.tokens.coefficients, trace.tokens.weighted)
    return [picture_map(trace.tokens.tokens.tokens, tokens) for tokens in values]


def trace_manifest(trace: AnswerTrace) -> dict[str, Any]:
    """How a trace was computed."""
    protocol = trace.engine.protocol()
    options: dict[str, Any] = {"floor": protocol["floor"]}
    fits: dict[str, Any] = {"heads": trace.heads.heads}
    if trace.tokens is not None:
        fits["tokens"] = trace.tokens.tokens
    for what, fit in fits.items():
        how = fit.protocol["sampling"]
        most = f" of at most {how['masks']}" if how["adaptive"] else ""
        options[what] = (
            f"{fit.masks} masks{most}, p {how['p']}, {how['law']}, seed {how['seed']}, {how['how']}"
        )
    readout = f"logit of {protocol['answer']!r} less the vocabulary's mean"
    return lvlm_manifest("head attribution (HeAr)", protocol, options, readout)


def lvlm_manifest(
    method: str, protocol: Mapping[str, Any], options: Mapping[str, Any], readout: str
) -> dict[str, Any]:
    """What all traces have in common: the model, the question and the bank."""
    bank = f"{protocol['bank']['pictures']} images ({protocol['bank']['mode']})"
    return {
        "method": method,
        "options": {"question": protocol["question"], "bank": bank, **options},
        "model": protocol["model"],
        "model_fingerprint": protocol["fingerprint"],
        "grid": [protocol["image_tokens"]],
        "readout": readout,
        "device": protocol["device"],
        "dtype": protocol["dtype"],
        "versions": library_versions(),
    }


def needed_text(left: float) -> str:
    """Whether heads that are enough are also needed, by the share of the effect `left` without
    them."""
    from seecause.lvlm.analysis import COMPLETE

    share = f"without them {left:.0%} of the effect is left"
    if left >= 0.5:
        return f"no: {share}, through heads that replace them"
    return f"yes: {share}" if left < COMPLETE else f"in part: {share}"


def errors_text(errors: Tensor) -> str:
    return f"median {float(errors.median()):.2g}, at most {float(errors.max()):.2g}"


def head_counts(trace: HeadTrace) -> dict[str, tuple[str, str]]:
    counts = trace.counts()
    return {name: (f"{enough:g}", f"{needed:g}") for name, (enough, needed) in counts.items()}


# Every word of an answer.


def write_answer(
    folder: Path, engine: AnswerEngine, words: AnswerWords, shown: Image.Image, *, name: str
) -> Path:
    """Write the page of an answer (index.html)."""
    sections = [
        answer_section(engine, words, shown, name=name),
        all_words_section(words),
        protocol_section([answer_manifest(words)]),
    ]
    title, lead = f"What is behind {sentence(engine)!r}", f"{name}: {engine.question}"
    return write_page(folder / "index.html", title, sections, lead=lead)


def sentence(engine: AnswerEngine) -> str:
    """The answer as text."""
    tokenizer = getattr(engine.lvlm.processor, "tokenizer", None)
    if tokenizer is None:
        return " ".join(engine.pieces)
    return tokenizer.decode(engine.targets, skip_special_tokens=True).strip()


def answer_section(
    engine: AnswerEngine, words: AnswerWords, shown: Image.Image, *, name: str
) -> Section:
    """The sentence, and a panel behind each of its words."""
    from seecause.lvlm.prompt import picture_map, seen_picture
    from seecause.lvlm.words import MOVED, word_concerns

    seen = seen_picture(engine.lvlm, engine.prompt, shown)
    maps = [picture_map(words.tokens, values) for values in words.image]
    scale, most = scale_of(*maps, signed=True), float(words.heads.abs().max())
    gains = words.gains().tolist()
    largest = max(map(abs, gains)) or 1.0
    shown_words = []
    for word, (source, values) in enumerate(zip(words.sources(), maps, strict=True)):
        text, unlooked = _readable(words.pieces[word]), source == "unlooked"
        top = ", ".join(map(str, words.top(word, min(5, words.heads[word].numel()))))
        strip = Strip(seen, [MapView("image tokens: logits", values, scale)])
        grid = head_grid(
            "effect of each head, in logits",
            words.heads[word],
            errors=words.heads_error[word],
            most=most,
            key=f"largest: {top} (layer, head)",
        )
        shown_words.append(
            {
                "text": text,
                "mark": "without the image" if unlooked else _factor(gains[word]),
                "source": source,
                "strength": round(80 * abs(gains[word]) / largest),
                "title": f"{SOURCES[source]}: {number(gains[word])} nats",
                "story": _story(words, word),
                "card": cards_html([Card(f"“{text}”", [strip], caption=name)]),
                "grid": grid,
            }
        )
    body = warnings(word_concerns(engine, words))
    body += part("words", shown_words, gains.index(max(gains)))
    note = (
        "Click a word to see its map and its heads. Orange words come from the image; dashed ones"
        " would have been said of any image, and blue ones the image speaks against. Under a word:"
        " how many times as likely the image makes it (from"
        f" {math.exp(MOVED):.0f} times on it counts). Maps and heads are in logits, on one scale"
        " for all words."
    )
    terms = {
        "without the image": "all heads see the average of the calibration images, behind the same"
        " words",
        "logits": "how far the word's logit moves against the mean of the vocabulary; heads and"
        " image tokens add up to it roughly, because the answer is not linear in them",
        "token": "a long word may be several tokens; each is shown",
    }
    return Section("Which words come from the image?", body, note, terms, short="Words")


def _story(words: AnswerWords, word: int) -> str:
    """One word in a few sentences."""
    text, other = _readable(words.pieces[word]), _readable(words.instead[word])
    seen, unseen = (_chance(log[word]) for log in (words.log_seen, words.log_unseen))
    likeliest = "it would be said as well" if other == text else f"then the likeliest is “{other}”"
    return (
        f"“{text}”, {SOURCES[words.sources()[word]]}: probability {seen} with the image, {unseen}"
        f" without; {likeliest}. The image moves its logit by {float(words.spans[word]):+.2f}."
    )


def all_words_section(words: AnswerWords) -> Section:
    rows = [
        (
            _readable(words.pieces[word]),
            SOURCES[source],
            _chance(words.log_seen[word]),
            _chance(words.log_unseen[word]),
            _readable(words.instead[word]),
            f"{float(words.spans[word]):.2f}",
            str(words.top(word, 1)[0]),
            ", ".join(_explained(r2[word]) for r2 in (words.heads_r2, words.image_r2)),
        )
        for word, source in enumerate(words.sources())
    ]
    head = ("word", "", "with the image", "without", "then likeliest", "logits", "top head")
    body = table(rows, head=(*head, "R² (heads, image tokens)"))
    return Section("All words", body, fold="Numbers of every word")


def answer_manifest(words: AnswerWords) -> dict[str, Any]:
    """How the words of an answer were traced."""
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


def _factor(gain: float) -> str:
    """A gain in nats as a factor: "12 x", "/ 3"."""
    if abs(gain) > math.log(1e4):
        return "> 10⁴ x" if gain > 0 else "/ > 10⁴"
    return f"{math.exp(gain):.3g} x" if gain > 0 else f"/ {math.exp(-gain):.3g}"


def _chance(log: Tensor) -> str:
    p = float(log.exp())
    return f"{p:.3f}" if p >= 0.0005 else "< 0.001"
