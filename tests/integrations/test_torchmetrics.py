"""The metric interface, with torchmetrics and without it."""

from __future__ import annotations

import copy
import importlib.util
import sys

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadOption
from tests.helpers import noise, view
from tests.tiny import pictures, tiny


@pytest.fixture(scope="module")
def case():
    native = tiny("timm_registers")
    return view(native), pictures(native, batch=4), noise(4, 4, 6)


@pytest.fixture(params=["torchmetrics", "plain"])
def module(request, monkeypatch):
    """The file as it is with torchmetrics, and a copy as it is without."""
    if request.param == "torchmetrics":
        pytest.importorskip("torchmetrics", reason="pip install 'seecause[tools]'")
        return importlib.import_module("seecause.integrations.torchmetrics")
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    file = importlib.util.find_spec("seecause.integrations.torchmetrics").origin
    spec = importlib.util.spec_from_file_location("without_torchmetrics", file)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    return without


def test_a_clone_has_scores_of_its_own_and_the_same_model(case, module):
    model, images, maps = case
    metric = module.Faithfulness(model, "complexity")
    metric.update(images, maps)
    clone = copy.deepcopy(metric)
    before = metric.compute()
    clone.update(images, maps**3)
    assert metric.compute() == before != clone.compute() and clone.view is metric.view
    assert clone.summary()["gini"].n == 2 * metric.summary()["gini"].n


def test_collections_of_torchmetrics_are_cloned(case):
    torchmetrics = pytest.importorskip("torchmetrics", reason="pip install 'seecause[tools]'")
    model, images, maps = case
    metric = sc.integrations.torchmetrics.Faithfulness(model, "complexity")
    clone = torchmetrics.MetricCollection({"maps": metric}).clone(prefix="val_")
    clone.update(images, maps)
    assert all(name.startswith("val_") for name in clone.compute())


def test_batches_give_what_all_pictures_give_at_once(case, module):
    model, images, maps = case
    metric = module.Faithfulness(model, steps=4)
    alone = metric(images[:1], maps[:1], 1)  # as torchmetrics calls it: of these pictures alone
    metric.update(images[1:], maps[1:], [1, 1, 1])
    whole = sc.metrics.insertion_deletion(model, images, maps, 1, steps=4)
    values = metric.compute()
    assert_close(values["ins-del"], whole.difference.mean(), atol=1e-10, rtol=0)
    assert_close(alone["deletion"], whole.deletion_area[0], atol=1e-10, rtol=0)
    assert metric.summary()["insertion"].n == 4
    metric.reset()
    metric.update(images[2:], maps[2:], 1)
    assert_close(metric.compute()["insertion"], whole.insertion_area[2:].mean(), atol=1e-10, rtol=0)


def test_pictures_that_cannot_be_scored_are_counted(case, module):
    model, images, maps = case
    masks = torch.zeros(4, *images.shape[2:], dtype=torch.bool)
    masks[1:, :8, :8] = True
    metric = module.Faithfulness(model, "localization")
    metric.update(images, maps, masks=masks)
    assert metric.summary()["pointing"].skipped == 1
    assert metric.higher_is_better and 0 <= metric.compute()["pointing"] <= 1


def test_what_cannot_be_measured_is_refused_before_pictures_run(case, module):
    model, images, maps = case
    with pytest.raises(BadOption, match="explain"):
        module.Faithfulness(model, "stability")
    with pytest.raises(BadOption, match="stepz"):
        module.Faithfulness(model, stepz=3)
    with pytest.raises(BadOption, match="masks"):
        module.Faithfulness(model, "localization").update(images, maps)


def test_it_stands_in_a_collection_of_torchmetrics(case):
    torchmetrics = pytest.importorskip("torchmetrics", reason="pip install 'seecause[tools]'")
    model, images, maps = case
    ours = sc.integrations.torchmetrics.Faithfulness(model, "complexity")
    assert isinstance(ours, torchmetrics.Metric)
    collection = torchmetrics.MetricCollection({"maps": ours})
    collection.update(images, maps)
    assert {"maps_gini", "gini"} & set(collection.compute())
