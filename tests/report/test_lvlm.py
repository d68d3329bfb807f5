"""Pages of vision-language models: words and numbers in their places."""

from types import SimpleNamespace

import torch

from seecause.lvlm.attribute import RankingCurves
from seecause.report.lvlm import curves_section, needed_text, prompt_words


def test_words_are_shown_with_their_effects_and_never_as_markup():
    effects, kept = torch.tensor([-1e-9, -0.5, 1.0]), torch.tensor([False, False, True])
    shown = prompt_words(["\n", "<b>", ":"], effects, kept, "<i>")
    assert shown.count('class="piece') == 3 and shown.count("kept") == 1
    assert "&lt;b&gt;" in shown and "<b>" not in shown and "&lt;i&gt;" in shown
    assert "⏎" in shown and "-0.50" in shown and "-0.00" not in shown


def test_the_page_says_whether_heads_that_are_enough_are_needed():
    assert needed_text(0.7).startswith("no: without them 70% of the effect is left")
    assert needed_text(0.3).startswith("in part") and needed_text(-0.05).startswith("yes")


def test_curves_of_every_ranking_are_drawn_above_their_counts():
    line = torch.linspace(0, 1, 11)[None].double()
    curves = {name: RankingCurves(line, 1 - line) for name in ("hear", "random")}
    heads = SimpleNamespace(curves=curves, counts=lambda: {"hear": (9.0, 8.0), "random": (5.5, 7)})
    body = curves_section(heads).body
    assert body.count("<figure") == 2 and "random order" in body
    assert "<td>9</td>" in body and "<td>5.5</td>" in body
