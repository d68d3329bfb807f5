"""The page of one traced answer: the grid of heads, whether the ranking holds, what heads would
say, and the way from picture to words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image
from torch import Tensor

from seecause.lvlm import AnswerTrace, HeadAttribution, HeadTrace, HeadWords, RankingCurves
from seecause.lvlm.analysis import COMPLETE, LEVELS, threshold_study
from seecause.lvlm.prompt import picture_map, seen_picture
from seecause.lvlm.trace import POINTS, RANKINGS, concerns
from seecause.models.base import library_versions
from seecause.report.cards import (
    Card,
    MapView,
    Strip,
    grid_of,
    head_grids,
    render_cards,
    sign_of,
)
from seecause.report.charts import DASHES, GREY, Series, chart, mean_series, styled
from seecause.report.overlay import legend, overlay, panel, picture, scale_of
from seecause.report.page import (
    Section,
    chart_row,
    folded,
    fragment,
    protocol_section,
    table,
    warnings,
    write_page,
)

CALLED = {
    "hear": "head attribution",
    "causal": "one head taken away",
    "attention": "attention on the picture",
    "random": "random order",
}
DOTS = 400  # of a chart, at most
HEADS_NOTE = (
    "Each cell is one head. Left, its coefficient: the share of the picture's effect on the answer"
    " that it brings, other heads seeing the picture or an average picture by lot; point at it for"
    " its standard error. Outlined heads"
    " are the fewest, highest first, that alone bring more than 80 % of the effect. Right, the"
    " share of its attention that lies on the picture."
)
CURVES_NOTE = (
    "Heads are switched on (left) or off (right), the best first: a good ranking rises early and"
    " falls early. The table has the first count that brings more than 80 % of the effect, and the"
    " first that leaves less than 20 %."
)
COARSE_NOTE = (
    f" Rankings other than head attribution are asked at about {POINTS} counts of heads, and are"
    " straight between them."
)
TOKENS_NOTE = (
    "Under each token of the prompt: the share of the picture's effect on the answer that is lost"
    " when the picture may not reach it; framed ones are kept. The maps show from which image"
    " tokens the effect comes, through the heads that are enough (outlined below) and the kept"
    " words, and those heads' attention, weighted by what heads and words are worth."
)
PICTURE = {
    "image tokens": (
        "the model sees the picture as a grid of these. A token is not a pixel: the vision tower"
        " mixes its tokens, so one over the background may carry the object"
    ),
    "weighted attention": "attention on each image token, summed over these heads and words",
}
FIT = {
    "effect": "how far the picture moves the answer's logit, compared with an average picture",
    "masks": (
        "random choices of what sees the picture. Coefficients are the mean derivative of the"
        " answer over masks, or fitted to the answers"
    ),
    "standard error": "by how much coefficients from other masks would differ",
    "R² on unseen masks": "how well the coefficients foretell the answer under other masks",
    "agreement of halves": (
        "correlation of coefficients from one half of the masks and from the other; near 1, more"
        " masks change little"
    ),
}
MADE = {
    "derivative": "mean derivative over {} masks",
    "corrected": "mean derivative, corrected by a fit to {} masks",
    "fit": "fitted to {} masks",
}
WORDS_NOTE = (
    "What each head adds where the answer is formed, read through the final norm and the vocabulary"
    " (logit lens): the words it would say on its own, the likeliest first."
)


def write_trace(folder: Path, trace: AnswerTrace, shown: Image.Image, *, name: str) -> Path:
    """The page of a traced answer (index.html) and, with image tokens, overlay.png."""
    engine = trace.engine
    sections = [
        heads_section(trace),
        curves_section(trace.heads.curves, one_answer_counts(trace.heads)),
        words_section(trace.words, trace.heads.heads.standard_error),
        protocol_section([trace_manifest(trace)]),
    ]
    if trace.tokens is not None:
        tokens_panel(trace, shown).save(folder / "overlay.png")
        sections.insert(0, tokens_section(trace, shown, name=name))
    return write_page(
        folder / "index.html",
        f"What makes {engine.lvlm.name} say {engine.answer}",
        sections,
        lead=f"{name}: {engine.question} The explained word of the answer is {engine.answer!r}.",
    )


def heads_section(trace: AnswerTrace) -> Section:
    """Coefficients and attention as grids, and how far to trust them."""
    engine, fit, attention = trace.engine, trace.heads.heads, trace.heads.attention
    chosen = trace.heads.chosen.reshape(attention.shape)
    enough = int(chosen.sum())
    key = f"outlined: the {enough} that are enough"
    grids = [
        grid_of(
            "coefficient of each head", fit.coefficients, chosen, key, errors=fit.standard_error
        ),
        grid_of("attention on the picture", attention, chosen),
    ]
    facts = [
        ("answer", f"{engine.answer} (the picture moves its logit by {engine.span:.2f})"),
        ("heads that are enough", f"{enough} of {chosen.numel()}"),
        ("are they needed?", needed_text(trace.heads.left())),
        ("coefficients", MADE[fit.protocol["sampling"]["how"]].format(f"{fit.masks:,}")),
        ("standard error of a coefficient", errors_text(fit.standard_error)),
        ("R² on unseen masks", f"{fit.r2:.3f} (correlation {fit.pearson:.3f})"),
        ("agreement of halves", f"{fit.agreement:.3f}"),
    ]
    return Section(
        "Which heads carry the picture into the answer?",
        warnings(concerns(trace)) + head_grids(grids) + table(facts) + fit_charts(fit),
        HEADS_NOTE,
        FIT,
        short="Which heads carry it?",
    )


def fit_charts(fit: HeadAttribution) -> Markup:
    """Answers under masks that the coefficients have not seen, as foretold and as they are; and
    what the heads of each layer bring together."""
    charts = []
    if len(fit.unseen):
        step = -(-len(fit.unseen) // DOTS)
        dots = [(foretold, true) for true, foretold in fit.unseen[::step].tolist()]
        ends = [float(fit.unseen.min()), float(fit.unseen.max())]
        exact = Series("foretold exactly", ends, ends, colour=GREY, dash=DASHES[1])
        titles = ("answers under masks not seen before", "foretold by the coefficients")
        y_title = "share of the effect"
        charts = [chart([exact], title=titles[0], x_title=titles[1], y_title=y_title, dots=dots)]
    error = fit.standard_error.square().sum(dim=1).sqrt()
    charts.append(depth_chart(fit.coefficients.sum(dim=1), error))
    return chart_row(charts)


def depth_chart(sums: Tensor, error: Tensor) -> Markup:
    """Coefficients of each layer added up [L], with their errors [L]."""
    layers = Series("all heads of a layer", list(range(len(sums))), sums.tolist(), error.tolist())
    share = "share of the effect, heads added up"
    return chart([layers], title="coefficients by depth", x_title="layer", y_title=share)


def thresholds_table(curves: Mapping[str, RankingCurves]) -> Markup:
    """Counts where other shares than 80 % and 20 % are asked for, the random control left out."""
    head = ("ranking", *(f"{level:.0%} brought, {1 - level:.0%} left" for level in LEVELS))
    rows = [
        (CALLED[name], *(f"{a:.3g}, {b:.3g}" for a, b in threshold_study(curves[name]).tolist()))
        for name in RANKINGS[:-1]
        if name in curves
    ]
    return folded("Heads that are enough, and needed, at other thresholds", table(rows, head=head))


def curves_section(
    curves: Mapping[str, RankingCurves], counts: Mapping[str, tuple[str, str]]
) -> Section:
    """Curves by ranking, means over their rows with standard errors, and the counts as written in
    `counts`."""
    looks = styled(RANKINGS)
    on = [mean_series(CALLED[name], c.faithfulness, looks[name]) for name, c in curves.items()]
    off = [mean_series(CALLED[name], c.completeness, looks[name]) for name, c in curves.items()]
    share = "share of the effect"
    seeing, blind = "only the top heads see the picture", "the top heads do not see the picture"
    charts = [
        chart(on, title=seeing, x_title="heads on", y_title=share, beside=off),
        chart(off, title=blind, x_title="heads off", y_title=share, beside=on),
    ]
    keys = {CALLED[name]: look for name, look in looks.items() if name in curves}
    rows = [(CALLED[name], *pair) for name, pair in counts.items()]
    head = ("ranking", "heads that are enough", "heads that are needed")
    body = chart_row(charts, keys) + table(rows, head=head)
    size = max(c.faithfulness.shape[1] for c in curves.values()) - 1
    note = CURVES_NOTE + (COARSE_NOTE if size >= POINTS else "")
    body += thresholds_table(curves)
    return Section("Does the ranking hold?", body, note, short="Rankings")


def words_section(words: Sequence[HeadWords], errors: Tensor) -> Section:
    """What the top heads say; `errors` [L, H] are the standard errors of all coefficients."""
    rows = []
    for w in words:
        coefficient = f"{w.coefficient:.3f} ± {float(errors[w.layer, w.head]):.3f}"
        rows.append((f"layer {w.layer}, head {w.head}", coefficient, ", ".join(w.words)))
    body = table(rows, head=("head", "coefficient", "words"))
    return Section("What would these heads say?", body, WORDS_NOTE)


def tokens_section(trace: AnswerTrace, shown: Image.Image, *, name: str = "") -> Section:
    """The prompt with the effects of its words, and the picture with where the effect comes
    from."""
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
    pieces, deltas = tokens.effects.pieces, tokens.effects.deltas
    prompt = prompt_words(pieces, deltas, tokens.text, answer=engine.answer, images=engine.n_image)
    return Section(
        "From where in the picture, into which words?",
        prompt + render_cards([card]) + table(facts),
        TOKENS_NOTE,
        PICTURE,
        short="From where, into which words?",
    )


def tokens_panel(trace: AnswerTrace, shown: Image.Image) -> Image.Image:
    """The picture, image-token coefficients and weighted attention side by side, for slides and
    papers."""
    engine = trace.engine
    seen, maps = seen_picture(engine.lvlm, engine.prompt, shown), _token_maps(trace)
    images = [picture(seen), *(overlay(seen, values) for values in maps)]
    below = [None, *(legend(scale_of(values), width=images[0].width) for values in maps)]
    titles = [f"{engine.answer}", "image tokens", "weighted attention"]
    return panel(images, titles=titles, below=below)


def _token_maps(trace: AnswerTrace) -> list[Tensor]:
    """Image-token coefficients and weighted attention, [gh, gw] each."""
    assert trace.tokens is not None
    values = (trace.tokens.tokens.coefficients, trace.tokens.weighted)
    return [picture_map(trace.tokens.tokens.tokens, tokens) for tokens in values]


def prompt_words(
    pieces: Sequence[str], deltas: Tensor, kept: Tensor, *, answer: str, images: int | None
) -> Markup:
    """Words of the prompt, each with what blocking it costs."""
    most = max(float(deltas.abs().max()), 1e-9)
    words = [
        {
            "text": piece.replace("\n", "⏎") or "·",
            "number": f"{value:z.2f}",
            "strength": round(80 * abs(value) / most),
            "sign": sign_of(value),
            "kept": keep,
            "title": f"{piece!r}: {value:z.4f}",
        }
        for piece, value, keep in zip(pieces, deltas.tolist(), kept.tolist(), strict=True)
    ]
    before = "image tokens" if images is None else f"{images} image tokens"
    return fragment("prompt.html.j2", before=before, pieces=words, answer=answer)


def trace_manifest(trace: AnswerTrace) -> dict[str, Any]:
    """The protocol in the words of `protocol_section`."""
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
    bank = f"{protocol['bank']['pictures']} pictures ({protocol['bank']['mode']})"
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
    """Whether heads that are enough are also needed, by what is `left` of the effect without."""
    share = f"without them {left:.0%} of the effect is left"
    if left >= 0.5:
        return f"no: {share}, through heads that stand in for them"
    return f"yes: {share}" if left < COMPLETE else f"in part: {share}"


def errors_text(errors: Tensor) -> str:
    """Of many coefficients, in a few words."""
    return f"{float(errors.median()):.2g} in the middle, {float(errors.max()):.2g} at most"


def one_answer_counts(trace: HeadTrace) -> dict[str, tuple[str, str]]:
    counts = trace.counts()
    return {name: (f"{enough:g}", f"{needed:g}") for name, (enough, needed) in counts.items()}
