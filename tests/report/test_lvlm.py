"""What the page of a traced answer draws: cells, words and dots."""

from __future__ import annotations

import re
from types import SimpleNamespace

import torch
from markupsafe import Markup
from torch.testing import assert_close

from seecause.lvlm import (
    AnswerTrace,
    HeadAttribution,
    HeadTrace,
    RankingCurves,
    attribute_heads,
)
from seecause.lvlm.trace import concerns
from seecause.report.cards import grid_of
from seecause.report.lvlm import (
    CURVES_NOTE,
    FIT,
    HEADS_NOTE,
    TOKENS_NOTE,
    WORDS_NOTE,
    curves_section,
    fit_charts,
    needed_text,
    prompt_words,
    trace_manifest,
)
from seecause.report.lvlm_answer import table_section
from tests.lvlm.test_words import made
from tests.lvlm.toy import toy_engine


def test_a_grid_colours_by_size_and_sign_and_outlines_what_is_chosen():
    grid = grid_of(
        "heads",
        torch.tensor([[0.4, -0.2], [0.0, 0.1]]),
        torch.tensor([[True, False], [False, False]]),
    )
    (first, second), (third, _) = grid.cells
    assert (first.strength, first.sign, first.text, first.chosen) == (90, "for", ".40", True)
    assert (second.strength, second.sign, second.text, second.chosen) == (
        45,
        "against",
        "-.20",
        False,
    )
    assert third.strength == 0 and third.title == "layer 1, head 0: 0"
    assert grid_of("nothing", torch.zeros(1, 2)).cells[0][0].strength == 0
    assert grid_of("wide", torch.ones(1, 32)).cells[0][0].text == ""  # no room for numbers


def test_words_are_shown_with_their_effects_and_never_as_markup():
    shown = prompt_words(
        ["\n", "<b>", ":"],
        torch.tensor([0.0, -0.5, 1.0]),
        torch.tensor([False, False, True]),
        answer="<i>",
        images=9,
    )
    assert shown.count('class="piece') == 3 and shown.count("kept") == 1
    assert "&lt;b&gt;" in shown and "<b>" not in shown and "&lt;i&gt;" in shown
    assert "⏎" in shown and "9 image tokens" in shown and "-0.50" in shown


def test_the_page_says_whether_heads_that_are_enough_are_needed():
    assert needed_text(0.7).startswith("no: without them 70% of the effect is left")
    assert needed_text(0.3).startswith("in part") and needed_text(-0.05).startswith("yes")
    curves = RankingCurves(torch.tensor([[0.0, 0.9, 1.0]]), torch.tensor([[1.0, 0.6, 0.0]]))
    chosen = torch.tensor([True, False])
    zero = torch.zeros(1, 2)
    assert HeadTrace(None, zero, zero, {"hear": curves}, chosen).left() == torch.tensor(0.6)


def test_a_trace_that_is_not_to_be_trusted_says_why():
    engine = toy_engine()
    trace = AnswerTrace(engine, SimpleNamespace(heads=attribute_heads(engine, masks=8)), [])
    lines = concerns(trace)
    assert "6 calibration pictures" in lines[0]
    weak = SimpleNamespace(r2=0.1, agreement=float("nan"))
    weak_trace = AnswerTrace(engine, SimpleNamespace(heads=weak), [])
    lines = concerns(weak_trace)
    assert "foretell masked answers badly (R2 0.10)" in lines[1] and "ask more masks" in lines[2]
    assert engine.lvlm.unknown_words("What colour is the banana?") == ["banana?"]


def test_a_fit_is_drawn_against_the_truth_and_by_depth():
    unseen = torch.rand(900, 2, generator=torch.Generator().manual_seed(0)).double()
    grid = torch.tensor([[0.1, 0.2], [0.0, 0.4]]).double()
    heads = HeadAttribution(grid, 0.0, 0.9, 0.9, 10, 0.9, grid / 10, unseen=unseen)
    drawn = str(fit_charts(heads))
    assert drawn.count('class="dot"') == 300 and drawn.count("<polyline") == 2
    depth = re.findall(r"([\d.]+),([\d.]+)", lines_of(drawn)[1])
    assert float(depth[0][1]) > float(depth[1][1])  # the second layer brings more
    bare = HeadAttribution(grid, 0.0, 0.9, 0.9, 10, 0.9, grid / 10)  # of an older version
    assert str(fit_charts(bare)).count("<polyline") == 1
    two = HeadAttribution(
        grid, 0.0, 0.9, 0.9, 10, 0.9, grid / 10, unseen=torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    )
    dots = re.findall(
        r'<circle class="dot"[^>]*cx="([\d.]+)"[^>]*cy="([\d.]+)"', str(fit_charts(two))
    )
    (first, low), (second, high) = dots  # foretold alike, and the truth differs
    assert first == second and float(low) > float(high)


def test_layers_add_up_their_heads_and_the_squares_of_their_errors(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "seecause.report.lvlm.depth_chart", lambda *both: drawn.extend(both) or Markup()
    )
    grid, errors = torch.tensor([[0.1, 0.2], [0.0, 0.4]]), torch.tensor([[3.0, 4.0], [5.0, 12.0]])
    fit_charts(HeadAttribution(grid, 0.0, 0.9, 0.9, 10, 0.9, errors))
    assert_close(drawn, [torch.tensor([0.3, 0.4]), torch.tensor([5.0, 13.0])])


def test_counts_at_other_thresholds_are_folded_below_the_curves():
    line = torch.linspace(0, 1, 11)[None].double()
    body = str(curves_section({"hear": RankingCurves(line, 1 - line)}, {}).body)
    assert "50% brought, 50% left" in body and "<td>6, 6</td>" in body and "<td>10, 10</td>" in body
    assert (
        "straight between" not in curves_section({"hear": RankingCurves(line, 1 - line)}, {}).note
    )
    long = torch.linspace(0, 1, 200)[None].double()
    assert "straight between" in curves_section({"hear": RankingCurves(long, 1 - long)}, {}).note


def test_a_word_that_nothing_moves_has_no_r2():
    words = made([2.0, 0.0])
    words.heads_r2[1] = torch.nan
    body = str(table_section(words).body)
    assert "1.00, 2.00" in body and "nothing moves, 2.00" in body and "nan" not in body


def test_nothing_is_shown_as_minus_zero():
    assert "-0.00" not in prompt_words(
        ["a", "b"], torch.tensor([-1e-4, 1.0]), torch.tensor([False, True]), answer="c", images=9
    ).replace("-0.0001", "")
    assert grid_of("heads", torch.tensor([[1.0, -1e-4]])).cells[0][1].text == ".00"


def test_a_large_coefficient_keeps_its_digits():
    assert [
        cell.text for cell in grid_of("heads", torch.tensor([[10.5, -0.5, 1.0, 0.999]])).cells[0]
    ] == ["10.50", "-.50", "1.00", "1.00"]


def test_notes_use_no_name_that_only_the_paper_explains():
    assert not any(
        "x*" in words for words in (HEADS_NOTE, CURVES_NOTE, TOKENS_NOTE, WORDS_NOTE, *FIT.values())
    )


def test_curves_have_one_line_for_each_ranking_and_a_band_where_there_are_several_orders():
    line = torch.linspace(0, 1, 5)[None].double()
    curves = {
        "hear": RankingCurves(line, 1 - line),
        "random": RankingCurves(line.repeat(3, 1), 1 - line.repeat(3, 1)),
    }
    body = curves_section(curves, {"hear": ("4", "4"), "random": ("4", "4")}).body
    assert (
        body.count("<polyline") == 4
        and body.count("<polygon") == 2
        and body.count("random order") >= 3
    )


def test_heads_on_and_heads_off_are_drawn_as_what_they_are():
    line = torch.linspace(0, 1, 5)[None].double()
    charts = str(curves_section({"hear": RankingCurves(line, 1 - line)}, {}).body)
    on, off = (re.findall(r"[\d.]+,([\d.]+)", points) for points in lines_of(charts))
    assert [float(y) for y in on] == sorted(map(float, on), reverse=True)  # up the page
    assert [float(y) for y in off] == sorted(map(float, off))


def lines_of(charts: str) -> list[str]:
    return re.findall(r'<polyline[^>]* points="([^"]+)"', charts)


def test_the_manifest_counts_the_masks_that_were_used():
    engine = toy_engine()
    result = attribute_heads(engine, how="fit", masks=600, adaptive=True, agreement=0.3, step=100)
    assert result.masks < 600
    traced = HeadTrace(result, result.coefficients, result.coefficients, {}, result.mask(1))
    assert trace_manifest(AnswerTrace(engine, traced, []))["options"]["heads"].startswith(
        f"{result.masks} masks of at most 600, p 0.75"
    )
