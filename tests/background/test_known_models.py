"""The embedded models, whose truth is known: an audit must tell them apart, and scores must find
planted heads."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import roc_auc_score

import seecause as sc
from seecause import critters
from seecause.background import penalised, score
from seecause.background._heads_audit import heads_audit as audit
from seecause.background._outcomes import logits_without
from seecause.background.images import answered_right, critter_pictures
from seecause.report.heads_audit import verdict as verdict_lines


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("vit", "Nothing to repair"), ("biased", "The model answers mostly from the background")],
)
def test_the_audit_tells_the_clean_model_from_the_biased_one(name, verdict):
    model = sc.load(f"builtin:critters-{name}", check=False)
    result = audit(
        model, critter_pictures(model, critters.draw("balanced", "test", 65)[::13]), masks="oracle"
    )
    assert verdict_lines(result)[0].startswith(verdict)
    if name == "biased":  # the paper's fill alone would have missed it
        assert (
            result.gains["true masks, mean"].bir_ratio_of_means
            < 0.05
            < 0.3
            < result.gains["true masks, grey"].bir_ratio_of_means
        )


@pytest.fixture(scope="module")
def planted():
    return sc.load("builtin:critters-planted", check=False)


def area(planted, scores):
    """AUROC of background heads among the heads whose role is known."""
    roles = planted.module.roles
    return roc_auc_score(
        [role == "background" for role in roles.values()],
        [float(scores.value[head]) for head in roles],
    )


@pytest.mark.parametrize("fill", ["default", "swap"])
def test_scores_with_true_masks_and_guard_find_the_planted_background_heads(planted, fill):
    train = answered_right(
        planted, critter_pictures(planted, critters.draw("matted", "train", 32)), share=1.0, cap=12
    )
    given = {"default": {}, "swap": {"baseline": train.swapped}}[fill]
    result = score(
        planted,
        train.images,
        train.oracle,
        target=train.labels,
        heads=list(planted.module.roles),
        **given,
    )
    assert area(planted, penalised(result)) >= 0.95


def test_the_papers_fill_does_not_find_them(planted):
    train = answered_right(
        planted, critter_pictures(planted, critters.draw("matted", "train", 96)), share=1.0, cap=40
    )
    result = score(
        planted,
        train.images,
        train.oracle,
        target=train.labels,
        heads=list(planted.module.roles),
        baseline="mean",
    )
    assert (
        area(planted, result) < 0.3 and area(planted, penalised(result)) < 0.6
    )  # below chance, and no better than chance with the guard


def test_without_the_planted_background_heads_no_background_matters(planted):
    test = critter_pictures(planted, critters.draw("balanced", "test", 65)[::13].on_mat())
    heads = [head for head, role in planted.module.roles.items() if role == "background"]
    pictures = torch.cat([test.images, test.swapped.background])
    whole, cut = logits_without(planted, pictures, [[], heads]).unflatten(1, (2, -1))
    assert (cut[0] - cut[1]).abs().max() < 1e-5 < 1 < (whole[0] - whole[1]).abs().max()
