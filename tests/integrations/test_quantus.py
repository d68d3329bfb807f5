"""Quantus' own metrics call our `explain_func`. Quantus is GPL: tests alone import it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import seecause as sc
from tests.helpers import view
from tests.tiny import pictures, tiny

quantus = pytest.importorskip("quantus", reason="Quantus is not installed: pip install quantus")

pytestmark = pytest.mark.filterwarnings("ignore:::quantus.*")


@pytest.fixture(scope="module")
def case():
    native = tiny("timm_registers", dtype=torch.float32)
    return view(native), pictures(native, batch=2)


def measured(metric, model, images, explain, **more):
    return metric(
        model=model.module, x_batch=images.numpy(), y_batch=np.array([1, 2]), device="cpu",
        explain_func=explain, **{"a_batch": None, **more},
    )  # fmt: skip


def test_a_metric_explains_by_itself_and_gets_what_we_give(case):
    model, images = case
    explain = sc.integrations.quantus.explain_func(model)
    maps = sc.attribute(model, images, target=[1, 2]).pixels("nearest")[:, None].numpy()
    assert_allclose(explain(model.module, images.numpy(), np.array([1, 2])), maps, atol=1e-6)
    flipping = {"features_in_step": 64, "disable_warnings": True, "normalise": False, "abs": False}
    asked = measured(quantus.PixelFlipping(**flipping), model, images, explain)
    handed = measured(quantus.PixelFlipping(**flipping), model, images, explain, a_batch=maps)
    assert_allclose(asked, handed, atol=1e-6)


def test_sensitivity_perturbs_the_pictures_that_we_explain(case):
    model, images = case
    explain = sc.integrations.quantus.explain_func(model, "rollout")
    metric = quantus.MaxSensitivity(nr_samples=2, disable_warnings=True, abs=False, normalise=False)
    scores = measured(metric, model, images, explain)
    assert len(scores) == 2 and min(scores) > 0


def test_randomised_modules_are_explained_not_the_first_one(case):
    """Model parameter randomisation: maps of modules with random weights."""
    model, images = case
    explain = sc.integrations.quantus.explain_func(model)
    before = model.fingerprint()
    metric = quantus.MPRT(
        similarity_func=quantus.similarity_func.correlation_spearman, disable_warnings=True,
        normalise=False, abs=False, layer_order="bottom_up",
    )  # fmt: skip
    scores = measured(metric, model, images, explain)
    last = list(scores.values())[-1]
    assert max(map(abs, last)) < 0.9, "maps of a random model are not those of the first"
    assert model.fingerprint() == before


def test_a_module_that_is_handed_over_stays_as_it_was(case):
    model, images = case
    other = copy.deepcopy(model.module).train().requires_grad_(True)
    sc.integrations.quantus.explain_func(model, "rollout")(other, images.numpy(), np.array([1, 2]))
    assert all(part.training for part in other.modules())
    assert all(weight.requires_grad for weight in other.parameters())
