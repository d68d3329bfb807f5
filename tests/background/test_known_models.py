"""The embedded models, whose truth is known: an audit must tell them apart, and scores must find
planted heads."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

import seecause as sc
from seecause import critters
from seecause.background import penalised, score
from seecause.background.heads import logits_without
from seecause.background.images import correct_images, critter_images


@pytest.mark.parametrize(("name", "verdict"), [("vit", "no"), ("biased", "yes")])
def test_the_audit_tells_the_clean_model_from_the_biased_one(name, verdict):
    model = sc.load(f"builtin:critters-{name}", check=False)
    regime = "balanced" if name == "vit" else "certified"
    latents = critters.draw(regime, "test", 390)[::6]
    found = sc.audit(model, critter_images(model, latents), per_image=1, fills=("mean", "grey"))
    assert found.verdict == verdict
    if name == "biased":  # the paper's fill alone would have missed it
        grey, mean = (found.erasures[f"true masks, {fill}"] for fill in ("grey", "mean"))
        assert mean.bir_ratio_of_means < 0.05 < 0.3 < grey.bir_ratio_of_means
        assert found.erasures["exact swap"].bir_ratio_of_means > 0.3


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


def correct(planted, count, cap):
    data = critter_images(planted, critters.draw("matted", "train", count))
    return correct_images(planted, data.with_masks(data.truth), share=1.0, cap=cap)


@pytest.mark.parametrize("fill", ["grey", "swap"])
def test_scores_with_true_masks_and_guard_find_the_planted_background_heads(planted, fill):
    data = correct(planted, 32, 12)
    found = score(planted, data, heads=list(planted.module.roles), fill=fill)
    assert area(planted, penalised(found)) >= 0.95


def test_the_papers_fill_does_not_find_them(planted):
    """Below chance, and no better than chance with the guard."""
    data = correct(planted, 96, 40)
    found = score(planted, data, heads=list(planted.module.roles), fill="mean")
    assert area(planted, found) < 0.3 and area(planted, penalised(found)) < 0.6


def test_without_the_planted_background_heads_no_background_matters(planted):
    latents = critters.draw("balanced", "test", 65)[::13]
    data = critter_images(planted, latents.replace(mat=torch.ones_like(latents.mat)))
    heads = [head for head, role in planted.module.roles.items() if role == "background"]
    images = torch.cat([data.images, data.other_background])
    whole, cut = logits_without(planted, images, [[], heads]).unflatten(1, (2, -1))
    assert (cut[0] - cut[1]).abs().max() < 1e-5 < 1 < (whole[0] - whole[1]).abs().max()
