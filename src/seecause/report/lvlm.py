"""The page of one traced answer: the grid of heads, whether the ranking holds, what heads would
say, and the way from picture to words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from PIL import Image
from torch import Tensor

from seecause.attribution.attribute import versions
from seecause.lvlm import MaskEngine, RankingCurves, picture_map, seen_picture
from seecause.lvlm.activations import HeadWords
from seecause.lvlm.attribute import TokenAttribution
from seecause.lvlm.trace import RANKINGS, HeadTrace, TokenTrace
from seecause.metrics import standard_error
from seecause.report.cards import Card, MapView, Strip, render_cards
from seecause.report.cell import Cell
from seecause.report.charts import Series, chart, styled
from seecause.report.overlay import legend, number, overlay, panel, picture, scale_of
from seecause.report.page import Section, fragment

CALLED = {
    "hear": "head attribution",
    "causal": "one head taken away",
    "attention": "attention on the picture",
    "random": "random order",
}
WRITTEN = 16  # heads in a row that still have room for their numbers
HEADS_NOTE = (
    "Each cell is one head. Left, its coefficient: the share of the picture's effect on the answer"
    " that it brings, other heads seeing the picture or an average picture by lot. Outlined heads"
    " are the fewest, highest first, that alone bring more than 80 % of the effect. Right, the"
    " share of its attention that lies on the picture, which is what a glance at attention maps"
    " would suggest."
)
CURVES_NOTE = (
    "Heads are switched on (left) or off (right), the best first. A good ranking rises early and"
    " falls early. The table has the first count that brings more than 80 % of the effect, and the"
    " first that leaves less than 20 %."
)
TOKENS_NOTE = (
    "The prompt in tokens, pieces of words. Under each: the share of the picture's effect on the"
    " answer that is lost when the picture may not reach it. Framed ones are kept. The maps show"
    " from which image tokens the effect comes, through the heads that are enough (outlined below)"
    " and the kept words; beside it is those heads' attention, weighted by what heads and words are"
    " worth."
)
PICTURE = {
    "image tokens": (
        "the model sees the picture as a grid of these; the map has one value for each, fitted like"
        " heads' (below). A token is not a pixel: the vision tower mixes its tokens, so one over"
        " the background may carry the object"
    ),
    "weighted attention": (
        "attention on each image token, summed over these heads and words, each with its weight; to"
        " compare with"
    ),
}
FIT = {
    "effect": "how far the picture moves the answer's logit, compared with an average picture",
    "masks": (
        "random choices of what sees the picture; coefficients are fitted to the answers under many"
        " of them"
    ),
    "R² on unseen masks": (
        "how well the coefficients foretell the answer under masks they were not fitted to; 1 is"
        " perfectly"
    ),
    "agreement of half fits": (
        "correlation of coefficients fitted to one half of the masks and to the other; near 1, more"
        " masks change little"
    ),
}
WORDS_NOTE = (
    "What each head adds where the answer is formed, read through the final norm and the vocabulary"
    " (logit lens): the words it would say on its own, the likeliest first."
)


@dataclass(frozen=True, eq=False)
class HeadGrid:
    """Values [L, H] as a table; `chosen` [L, H] are outlined."""

    title: str
    values: Tensor
    chosen: Tensor | None = None
    key: str = ""

    @property
    def width(self) -> int:
        return self.values.shape[1]

    def rows(self) -> list[list[Cell]]:
        most = float(self.values.abs().max()) or 1.0
        return [
            [self._cell(layer, head, most) for head in range(self.width)]
            for layer in range(len(self.values))
        ]

    def _cell(self, layer: int, head: int, most: float) -> Cell:
        value = float(self.values[layer, head])
        text = (
            ""
            if self.width > WRITTEN
            else f"{value:z.2f}"
            if abs(value) >= 1
            else f"{value:z.2f}".replace("0.", ".")
        )
        chosen = self.chosen is not None and bool(self.chosen[layer, head])
        return Cell(
            round(90 * abs(value) / most),
            _sign(value),
            text,
            f"layer {layer}, head {head}: {number(value)}",
            chosen,
        )


@dataclass(frozen=True)
class Piece:
    """A word of the prompt and what blocking it costs."""

    text: str
    number: str
    strength: int
    sign: str
    kept: bool
    said: str


def heads_section(engine: MaskEngine, found: HeadTrace) -> Section:
    """Coefficients and attention as grids, and how far to trust them."""
    shape, fit = found.attention.shape, found.heads
    grids = [
        HeadGrid(
            "coefficient of each head",
            fit.coefficients,
            found.chosen.reshape(shape),
            key=f"outlined: the {int(found.chosen.sum())} that are enough",
        ),
        HeadGrid("attention on the picture", found.attention, found.chosen.reshape(shape)),
    ]
    facts = [
        ("answer", f"{engine.answer} (the picture moves its logit by {engine.span:.2f})"),
        ("heads that are enough", f"{int(found.chosen.sum())} of {found.chosen.numel()}"),
        ("R² on unseen masks", f"{fit.r2:.3f} (correlation {fit.pearson:.3f})"),
        ("agreement of half fits", f"{fit.agreement:.3f} with {fit.masks:,} masks in all"),
    ]
    return Section(
        "Which heads carry the picture into the answer?",
        fragment("head_grid.html.j2", grids=grids) + table(facts),
        HEADS_NOTE,
        FIT,
        short="Which heads carry it?",
    )


def curves_section(
    curves: Mapping[str, RankingCurves], counts: Mapping[str, tuple[str, str]]
) -> Section:
    """Curves by ranking, means over their rows with standard errors, and the counts as written in
    `counts`."""
    looks = styled(RANKINGS)
    on, off = (
        [_series(name, getattr(found, kind), looks[name]) for name, found in curves.items()]
        for kind in ("faithfulness", "completeness")
    )
    charts = [
        chart(
            on,
            title="only the top heads see the picture",
            x_title="heads on",
            y_title="share of the effect",
            beside=off,
        ),
        chart(
            off,
            title="the top heads do not see the picture",
            x_title="heads off",
            y_title="share of the effect",
            beside=on,
        ),
    ]
    keys = {CALLED[name]: look for name, look in looks.items() if name in curves}
    rows = [(CALLED[name], *pair) for name, pair in counts.items()]
    drawn = fragment("bench_charts.html.j2", charts=charts, keys=keys) + table(
        rows, head=("ranking", "heads that are enough", "heads that are needed")
    )
    return Section("Does the ranking hold?", drawn, CURVES_NOTE)


def words_section(words: Sequence[HeadWords]) -> Section:
    rows = [
        (f"layer {one.layer}, head {one.head}", f"{one.coefficient:.3f}", ", ".join(one.words))
        for one in words
    ]
    return Section(
        "What would these heads say?",
        table(rows, head=("head", "coefficient", "words")),
        WORDS_NOTE,
    )


def tokens_section(
    engine: MaskEngine, found: TokenTrace, shown: Image.Image, *, name: str = ""
) -> Section:
    """The prompt with the effects of its words, and the picture with where the effect comes
    from."""
    maps = [
        (
            "image tokens: share of the effect",
            picture_map(found.tokens.tokens, found.tokens.coefficients),
        ),
        ("weighted attention", picture_map(found.tokens.tokens, found.weighted)),
    ]
    views = [MapView(title, values, scale_of(values)) for title, values in maps]
    card = Card(
        name or (engine.question or ""),
        [Strip(seen_picture(engine.lvlm, engine.prompt, shown), views)],
        said=f"answer: {engine.answer}",
    )
    facts = [
        (
            "kept words alone bring",
            f"{found.sufficiency:.0%} of what these heads bring into all words",
        ),
        ("R² on unseen masks", f"{found.tokens.r2:.3f}"),
        ("agreement of half fits", f"{found.tokens.agreement:.3f}"),
        ("correlation of the two maps", f"{found.agreement:.3f}"),
    ]
    body = prompt_words(
        found.effects.pieces,
        found.effects.deltas,
        found.text,
        answer=engine.answer,
        images=engine.n_image,
    )
    return Section(
        "From where in the picture, into which words?",
        body + render_cards([card]) + table(facts),
        TOKENS_NOTE,
        PICTURE,
        short="From where, into which words?",
    )


def tokens_panel(engine: MaskEngine, found: TokenTrace, shown: Image.Image) -> Image.Image:
    """The picture, image-token coefficients and weighted attention side by side, for slides and
    papers."""
    seen = seen_picture(engine.lvlm, engine.prompt, shown)
    maps = [
        picture_map(found.tokens.tokens, values)
        for values in (found.tokens.coefficients, found.weighted)
    ]
    images = [picture(seen), *(overlay(seen, values) for values in maps)]
    below = [None, *(legend(scale_of(values), width=images[0].width) for values in maps)]
    return panel(
        images, titles=[f"{engine.answer}", "image tokens", "weighted attention"], below=below
    )


def prompt_words(
    pieces: Sequence[str], deltas: Tensor, kept: Tensor, *, answer: str, images: int | None
) -> Markup:
    most = max(float(deltas.abs().max()), 1e-9)
    words = [
        Piece(
            piece.replace("\n", "⏎") or "·",
            f"{value:z.2f}",
            round(80 * abs(value) / most),
            _sign(value),
            bool(keep),
            f"{piece!r}: {value:z.4f}",
        )
        for piece, value, keep in zip(pieces, deltas.tolist(), kept.tolist(), strict=True)
    ]
    return fragment(
        "prompt.html.j2",
        before="image tokens" if images is None else f"{images} image tokens",
        pieces=words,
        answer=answer,
    )


def trace_manifest(engine: MaskEngine, *fits: HeadTrace | TokenAttribution) -> dict[str, Any]:
    """The protocol in the words of `protocol_section`."""
    told = engine.protocol()
    sampled = [fit.heads if isinstance(fit, HeadTrace) else fit for fit in fits]
    options = {
        "question": told["question"],
        "bank": f"{told['bank']['pictures']} pictures ({told['bank']['mode']})",
        "floor": told["floor"],
    }
    for what, fit in zip(("heads", "tokens"), sampled, strict=False):
        how = fit.protocol["sampling"]
        most = f" of at most {how['masks']}" if how["adaptive"] else ""
        options[what] = f"{fit.masks} masks{most}, p {how['p']}, {how['law']}, seed {how['seed']}"
    return {
        "method": "head attribution (HeAr)", "options": options, "model": told["model"],
        "model_fingerprint": told["fingerprint"], "random_weights": False,
        "grid": [told["image_tokens"]],
        "readout": f"logit of {told['answer']!r} less the vocabulary's mean",
        "device": told["device"], "dtype": told["dtype"],
        "versions": versions(),
    }  # fmt: skip


def table(
    rows: Sequence[Sequence[str]], *, head: Sequence[str] = (), marked: Sequence[int] = ()
) -> Markup:
    return fragment("facts.html.j2", rows=rows, head=head, marked=marked)


def one_answer_counts(found: HeadTrace) -> dict[str, tuple[str, str]]:
    return {
        name: (f"{enough:g}", f"{needed:g}") for name, (enough, needed) in found.counts().items()
    }


def _series(name: str, values: Tensor, look: tuple[str, str]) -> Series:
    """Rows [O, P + 1] -> their mean, with a standard error where there are several."""
    return Series(
        CALLED[name],
        list(range(values.shape[1])),
        values.mean(dim=0).tolist(),
        standard_error(values).tolist(),
        *look,
    )


def _sign(value: float) -> str:
    return "for" if value >= 0 else "against"
