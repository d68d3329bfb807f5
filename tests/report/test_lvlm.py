"""Pages of vision-language models: words and numbers in their places."""

from __future__ import annotations

import re
from types import SimpleNamespace

import torch

from seecause.lvlm import HeadAttribution, RankingCurves
from seecause.report.lvlm import (
    all_words_section,
    curves_section,
    fit_charts,
    needed_text,
    prompt_words,
)
from tests.lvlm.test_words import made

ENGINE = SimpleNamespace(n_image=9, answer="<i>")


def test_words_are_shown_with_their_effects_and_never_as_markup():
    effects, kept = torch.tensor([-1e-9, -0.5, 1.0]), torch.tensor([False, False, True])
    shown = prompt_words(["\n", "<b>", ":"], effects, kept, ENGINE)
    assert shown.count('class="piece') == 3 and shown.count("kept") == 1
    assert "&lt;b&gt;" in shown and "<b>" not in shown and "&lt;i&gt;" in shown
    assert "⏎" in shown and "9 image tokens" in shown and "-0.50" in shown and "-0.00" not in shown


def test_the_page_says_whether_heads_that_are_enough_are_needed():
    assert needed_text(0.7).startswith("no: without them 70% of the effect is left")
    assert needed_text(0.3).startswith("in part") and needed_text(-0.05).startswith("yes")


def test_a_fit_is_drawn_against_the_truth_and_by_depth():
    unseen = torch.rand(900, 2, generator=torch.Generator().manual_seed(0)).double()
    grid = torch.tensor([[0.1, 0.2], [0.0, 0.4]]).double()
    fit = HeadAttribution(grid, 0.0, 0.9, 0.9, 10, 0.9, grid / 10, unseen=unseen)
    drawn = fit_charts(fit)
    assert drawn.count("<figure") == 2 and "exact prediction" in drawn
    assert 300 <= len(re.findall(r"<use ", drawn)) < 400
    bare = HeadAttribution(grid, 0.0, 0.9, 0.9, 10, 0.9, grid / 10)
    assert fit_charts(bare).count("<figure") == 1


def test_counts_at_other_thresholds_are_folded_below_the_curves():
    line = torch.linspace(0, 1, 11)[None].double()
    section = curves_section({"hear": RankingCurves(line, 1 - line)}, {"hear": ("9", "8")})
    assert "50% brought, 50% left" in section.body and "<td>6, 6</td>" in section.body
    assert "<td>9</td>" in section.body and "straight lines" not in section.note
    long = torch.linspace(0, 1, 200)[None].double()
    assert "straight lines" in curves_section({"hear": RankingCurves(long, 1 - long)}, {}).note


def test_a_word_that_nothing_moves_has_no_r2():
    words = made([2.0, 0.0])
    words.heads_r2[1] = torch.nan
    body = all_words_section(words).body
    assert "1.00, 2.00" in body and "nothing moves, 2.00" in body and "nan" not in body
