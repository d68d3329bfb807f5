"""What the page of the LVLM study says: pairs stay pairs, a claim has two bounds, and planted heads
that hardly matter are named."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

import seecause as sc
from scripts import lvlm_study, lvlm_study_page
from scripts.lvlm_study_page import Case, Found, Planted
from seecause.lvlm.trace import HeadTrace


def result(*numbers) -> Found:
    nothing = torch.zeros(1)
    cases = [
        Case(
            place,
            Image.new("RGB", (8, 8)),
            nothing,
            nothing,
            "plain",
            "sand",
            "mossling",
            "red",
            dict(one),
        )
        for place, one in enumerate(numbers)
    ]
    return Found(cases, torch.tensor([True]), ("a",), nothing, 4, 100, nothing)


def test_columns_stay_in_step_where_a_picture_lacks_a_number():
    made = result({"a": 1.0, "b": 5.0}, {"a": None, "b": 7.0}, {"b": 9.0, "a": 2.0})
    assert made.column("a").shape == made.column("b").shape == (3,)
    gap = sc.metrics.paired_difference(made.column("b"), made.column("a"))
    assert (gap.n, gap.mean) == (2, 5.5)  # 5 - 1 and 9 - 2
    assert made.summary("a").mean == 1.5


@pytest.mark.parametrize(
    ("share", "mostly", "some"), [(0.98, True, False), (0.8, True, True), (0.21, False, False)]
)
def test_some_on_the_background_is_not_most_of_it(share, mostly, some):
    numbers = dict.fromkeys(
        ("sufficiency", "tokens_for_80", "object_area", "weighted_object_share", "token_attention"),
        0.5,
    )
    claims = {
        claim.said: claim.seen
        for claim in lvlm_study_page._claims_of_tokens(
            result({**numbers, "object_share": share}, {**numbers, "object_share": share})
        )
    }
    assert (claims["mostly on the object"], claims["and some on the background"]) == (mostly, some)


def test_planted_heads_that_hardly_matter_are_named_and_rounding_is_proved():
    right = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    page = "\n".join(
        lvlm_study_page._planted(
            Planted(
                [(0, 1), (2, 3)],
                right,
                torch.tensor([[0.3, 0.001], [0.5, 0.002]]).double(),
                1.8e-7,
                0.0,
                10_000,
            )
        )
    )
    assert "| 0.1 | 0.4000 | 100% |" in page and "| 2.3 | 0.0015 (below 1%) | 50% |" in page
    assert (
        "a share of 0.750" in page
        and "of the others, 100.0% are found" in page
        and "1.8e-07 in float32 and 0.0e+00 in float64: the first is rounding." in page
    )
    assert "rounding" not in "".join(
        lvlm_study_page._planted(
            Planted([(0, 1)], right[:, :1], right[:, :1], 1.8e-7, 1.7e-7, 10_000)
        )
    )  # then it is no rounding


def test_masks_are_asked_until_halves_agree(monkeypatch):
    monkeypatch.setattr(lvlm_study, "AGREEMENTS", (0.5, 0.85))
    lvlm = sc.lvlm.load("builtin:critters-llava")
    bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters()[:4])
    made = result({})
    made.cases = lvlm_study.draw_cases(1)
    engine = sc.lvlm.MaskEngine(
        lvlm, made.cases[0].picture, lvlm_study.wordings(lvlm_study.SUBJECT)[0], bank
    )
    whole = sc.lvlm.attribute_heads(engine, masks=400)
    made.cases[0].heads = HeadTrace(
        whole,
        attention=torch.zeros(6, 8),
        causal=torch.zeros(6, 8),
        curves={},
        chosen=torch.zeros(48, dtype=torch.bool),
    )
    lvlm_study.adaptive(lvlm, bank, made, 1.0)
    loose, strict = made.adaptive
    assert made.top == 12 and 100 <= float(loose.masks) <= float(strict.masks) < 10_000
    assert float(strict.alike) > 0.9 and float(strict.agreed) == 1 and float(strict.whole) > 6
    assert "| 0.85 |" in "\n".join(lvlm_study_page._adaptive(made))
