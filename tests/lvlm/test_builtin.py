"""The embedded vision-language model reads the picture, and its picture matters: shares of its
effect can be told from noise."""

from __future__ import annotations

import torch

import seecause as sc
from seecause.loading import ZOO
from tools.critters import card, find_recipe
from tools.critters.llava import ENOUGH, evaluate
from tools.critters.llava_model import Teacher, make_words


def test_critters_llava_meets_its_bar():
    words = card(ZOO, "critters-llava")
    assert words is not None and words["evaluation"]["fit_to_embed"]
    lvlm = sc.lvlm.load("builtin:critters-llava")
    with torch.no_grad():
        result = evaluate(
            lvlm.module,
            Teacher(make_words(), "cpu"),
            preprocess=find_recipe("critters-llava").preprocess,
            samples=72,
        )  # type: ignore[arg-type]
    assert result["accuracy"] >= ENOUGH
    assert result["margin_above_floor"] >= ENOUGH
