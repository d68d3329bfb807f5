"""Pages of vision-language models row by row: every number stands where its name says."""

from __future__ import annotations

import html
import re
from types import SimpleNamespace

import pytest
import torch

import seecause as sc
from seecause.lvlm.trace import RANKINGS, trace_answer
from seecause.models.base import library_versions
from seecause.report import lvlm as pages, lvlm_answer as answers
from seecause.report.overlay import number
from tests.lvlm.test_words import made
from tests.lvlm.toy import QUESTION, pictures, toy_engine


def table(body: object) -> dict[str, list[str]]:
    """Rows of tables by their first cell, in order; also heads."""
    rows = {}
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", str(body), re.S):
        first, *rest = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) or [""]
        rows[html.unescape(first)] = [html.unescape(cell) for cell in rest]
    return rows


def titles(body: object) -> list[str]:
    """What is shown of each head that is pointed at, grid by grid."""
    return re.findall(r'title="(layer \d+, head \d+: [^"]*)"', str(body))


@pytest.fixture(scope="module")
def trace():
    return trace_answer(toy_engine(), masks=12, token_masks=8, p=0.6, seed=3)


def test_every_row_about_heads(trace):
    section, heads, engine = pages.heads_section(trace), trace.heads.heads, trace.engine
    rows, chosen, errors = table(section.body), trace.heads.chosen, heads.standard_error
    left = float(engine.evaluate(~chosen[None])[0])
    facts = {
        "answer": f"{engine.answer} (the picture moves its logit by {engine.span:.2f})",
        "heads that are enough": f"{int(chosen.sum())} of 12",
        "are they needed?": pages.needed_text(left),
        "coefficients": "mean derivative over 12 masks",
        "standard error of a coefficient": (
            f"{float(errors.median()):.2g} in the middle, {float(errors.max()):.2g} at most"
        ),
        "R² on unseen masks": f"{heads.r2:.3f} (correlation {heads.pearson:.3f})",
        "agreement of halves": f"{heads.agreement:.3f}",
    }
    assert {name: rows[name] for name in facts} == {name: [text] for name, text in facts.items()}
    shown = titles(section.body)
    assert len(shown) == 24  # coefficients, then attention
    for place in range(12):
        value, error = (float(x.flatten()[place]) for x in (heads.coefficients, errors))
        where = f"layer {place // 4}, head {place % 4}: "
        assert shown[place] == f"{where}{number(value)} ± {number(error)}"
        attention = float(trace.heads.attention.flatten()[place])
        assert shown[12 + place] == where + number(attention)
    cells = re.findall(r'<td class="(?:for|against)( chosen)?"', str(section.body))
    assert [bool(cell) for cell in cells] == chosen.tolist() * 2
    assert f"outlined: the {int(chosen.sum())} that are enough" in section.body
    assert section.body.count('class="warning"') == len(sc.lvlm.trace.concerns(trace)) > 0


def test_every_row_about_words_and_image_tokens(trace):
    rows = table(pages.words_section(trace.words, trace.heads.heads.standard_error).body)
    for each in trace.words:
        error = float(trace.heads.heads.standard_error[each.layer, each.head])
        own = rows[f"layer {each.layer}, head {each.head}"]
        assert own == [f"{each.coefficient:.3f} ± {error:.3f}", ", ".join(each.words)]
    tokens, shown = trace.tokens, pictures(1)[0]
    section = pages.tokens_section(trace, shown, name="mine.png")
    errors = tokens.tokens.standard_error
    facts = {
        "kept words alone bring": (
            f"{tokens.sufficiency:.0%} of what these heads bring into all words"
        ),
        "standard error of an image token": (
            f"{float(errors.median()):.2g} in the middle, {float(errors.max()):.2g} at most"
        ),
        "R² on unseen masks": f"{tokens.tokens.r2:.3f}",
        "agreement of halves": f"{tokens.tokens.agreement:.3f}",
        "correlation of the two maps": f"{tokens.agreement:.3f}",
    }
    assert table(section.body) == {name: [text] for name, text in facts.items()}
    pieces = re.findall(r'class="piece (\w+)( kept)?"[^>]*>([^<]*)<small>([^<]*)<', section.body)
    deltas = tokens.effects.deltas.tolist()
    assert [number for *_, number in pieces] == [f"{delta:z.2f}" for delta in deltas]
    assert [bool(kept) for _, kept, *_ in pieces] == tokens.text.tolist()
    assert "16 image tokens" in section.body and "mine.png" in section.body
    maps = [values.flatten().tolist() for values in pages._token_maps(trace)]
    assert maps == [tokens.tokens.coefficients.tolist(), tokens.weighted.tolist()]


def test_rankings_have_their_own_counts(trace):
    counts = pages.one_answer_counts(trace.heads)
    rows = table(pages.curves_section(trace.heads.curves, counts).body)
    for name, curves in trace.heads.curves.items():
        enough, needed = curves.enough().double().mean(), curves.needed().double().mean()
        assert counts[name] == (f"{float(enough):g}", f"{float(needed):g}")
    folded = table(pages.thresholds_table(trace.heads.curves))
    assert list(folded) == ["ranking", *(pages.CALLED[name] for name in RANKINGS[:-1])]
    assert folded["ranking"][0] == "50% brought, 50% left" and len(folded["ranking"]) == 5
    for name in RANKINGS[:-1]:
        curves, cells = trace.heads.curves[name], folded[pages.CALLED[name]]
        for level, cell in zip((0.5, 0.6, 0.7, 0.8, 0.9), cells, strict=True):
            assert cell == f"{int(curves.enough(level))}, {int(curves.needed(1 - level))}"
    assert rows[pages.CALLED["random"]] == list(counts["random"])


def test_the_page_of_an_answer_is_named_and_ordered(trace, tmp_path):
    page = pages.write_trace(tmp_path, trace, pictures(1)[0], name="mine.png").read_text()
    engine = trace.engine
    heading = html.escape(f"What makes {engine.lvlm.name} say {engine.answer}")
    assert heading in page and f"mine.png: {QUESTION} The explained word" in page
    assert re.findall(r"<h2>(.*?)</h2>", page)[:4] == [
        "From where in the picture, into which words?",
        "Which heads carry the picture into the answer?",
        "Does the ranking hold?",
        "What would these heads say?",
    ]
    assert (tmp_path / "overlay.png").is_file()
    manifest = pages.trace_manifest(trace)
    sampled = "p 0.6, bernoulli, seed 3, derivative"
    assert manifest == {
        "method": "head attribution (HeAr)",
        "options": {
            "question": QUESTION, "bank": "6 pictures (shape)", "floor": None,
            "heads": f"12 masks, {sampled}", "tokens": f"8 masks, {sampled}",
        },
        "model": engine.lvlm.name, "model_fingerprint": engine.lvlm.fingerprint(),
        "grid": ["4 x 4"], "readout": f"logit of {engine.answer!r} less the vocabulary's mean",
        "device": "cpu", "dtype": "float64", "versions": library_versions(),
    }  # fmt: skip


def test_heads_that_are_enough_are_needed_in_part_from_a_fifth_on():
    assert pages.needed_text(0.2).startswith("in part: without them 20%")
    assert pages.needed_text(0.19).startswith("yes: without them 19%")
    assert pages.needed_text(0.5).startswith("no: ") and pages.needed_text(0.49).startswith("in")


@pytest.fixture
def words():
    words = made([2.0, -1.0, 0.1])
    effects = torch.tensor([[0.5, -2.0, 0.0, 0.25, 0.0, 0.0], [0.1] * 6, [0, 0, 0, 0, 0, 1.0]])
    words.heads.copy_(effects.reshape(3, 2, 3))
    words.spans.copy_(torch.tensor([1.5, -0.25, 0.0]))
    words.heads_r2.copy_(torch.tensor([0.9, 0.8, 0.7]))
    words.image_r2.copy_(torch.tensor([0.6, 0.5, torch.nan]))
    words.image.copy_(torch.arange(12.0).reshape(3, 4))
    return words


def test_every_row_about_the_words_of_an_answer(words):
    rows = table(answers.table_section(words).body)
    assert rows["a"] == [
        *("from the picture", "0.500", "0.068", "u", "1.50", "(0, 0)", "0.90, 0.60")
    ]
    assert rows["b"][:2] == ["against the picture", "0.500"]
    assert rows["b"][3:] == ["v", "-0.25", "(0, 0)", "0.80, 0.50"]
    assert rows["c"] == [
        *("said without looking", "0.500", "0.452", "w", "0.00", "(1, 2)", "0.70, nothing moves")
    ]
    head = ["", "with the picture", "without", "then likeliest", "logits", "top head"]
    assert rows["word"] == [*head, "R² (heads, image tokens)"]


def test_every_word_of_the_sentence_says_how_far_the_picture_moves_it(words):
    toy = toy_engine()
    engine = SimpleNamespace(
        lvlm=toy.lvlm, prompt=toy.prompt, question=QUESTION, bank={"pictures": 100}
    )
    section = answers.words_section(engine, words, pictures(1)[0], name="mine.png")
    buttons = re.findall(
        r'<button[^>]*class="(\w+)"[^>]*--strength: (\d+)%" title="([^"]*)">([^<]*)<small>([^<]*)',
        str(section.body),
    )
    assert buttons == [
        ("picture", "80", "from the picture: 2 nats", "a", "7.39 x"),
        ("against", "40", "against the picture: -1 nats", "b", "/ 2.72"),
        ("unlooked", "4", "said without looking: 0.1 nats", "c", "without looking"),
    ]
    assert 'data-first="0"' in section.body
    first, second, third = re.findall(r'<p class="note">(.*?)</p>', str(section.body))
    assert first == (
        "“a”, from the picture: probability 0.500 with the picture, 0.068 without; then the"
        " likeliest is “u”. The picture moves its logit by +1.50."
    )
    assert "by -0.25." in second and "0.452 without" in third
    shown = titles(section.body)
    assert shown[0] == "layer 0, head 0: 0.5 ± 1" and shown[7] == "layer 0, head 1: 0.1 ± 8"
    assert len(shown) == 18
    grids = str(section.body).split('class="head-grid"')[1:]
    strengths = [re.findall(r'--strength: (\d+)%" title="layer', grid) for grid in grids]
    assert strengths[0][:2] == ["22", "90"] and strengths[2][-1] == "45"  # of 2 logits, in all
    assert "most: (0, 0), (1, 0), (0, 2), (1, 1), (1, 2) (layer, head)" in grids[0]
    just_so = made([2.0])
    object.__setattr__(just_so, "instead", just_so.pieces)
    assert "it would be said just so" in answers._story(just_so, 0, "picture")


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (0.6931472, "2 x"),
        (-1.6094379, "/ 5"),
        (9.3, "> 10⁴ x"),
        (-9.3, "/ > 10⁴"),
        (9.2, "9.9e+03 x"),
    ],
)
def test_gains_are_written_as_factors(gain, text):
    assert answers._times(gain) == text


def test_a_sentence_reads_as_the_tokenizer_writes_it_or_piece_by_piece():
    lvlm = toy_engine().lvlm
    ids = lvlm.processor.tokenizer("the tail is jade .", add_special_tokens=False)["input_ids"]
    engine = SimpleNamespace(lvlm=lvlm, targets=[*ids, lvlm.processor.tokenizer.eos_token_id])
    assert answers.sentence(engine) == "the tail is jade ."
    bare = SimpleNamespace(lvlm=SimpleNamespace(processor=None), pieces=("7", "11"))
    assert answers.sentence(bare) == "7 11"


def test_chances_and_pieces_are_readable():
    assert [answers._chance(p) for p in (0.0005, 0.0004, 1.0)] == ["0.001", "< 0.001", "1.000"]
    assert [answers._readable(p) for p in (" cat", "\n", "  ")] == ["cat", "⏎", "·"]


def test_the_manifest_of_an_answer_says_where_it_was_differentiated(words):
    protocol = toy_engine().protocol() | {
        "sampling": {"masks": 64, "p": 0.6, "seed": 3, "slopes": 16, "how": "derivative"}
    }
    object.__setattr__(words, "protocol", protocol)
    manifest = answers.answer_manifest(words)
    assert manifest["method"] == "head attribution (HeAr) of every word, derivative"
    assert manifest["readout"] == "logit of each word less the vocabulary's mean"
    asked = {"question": QUESTION, "bank": "6 pictures (shape)", "masks": 64, "p": 0.6, "seed": 3}
    assert manifest["options"] == {**asked, "differentiated at": 16}
    protocol["sampling"]["slopes"] = None
    assert answers.answer_manifest(words)["options"] == asked
