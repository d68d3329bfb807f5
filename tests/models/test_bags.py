"""Bags of instances: the view equals the module, CAAP, mosaic and removal their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadImage, BadOption, NotDefined, ViewMismatch
from seecause.models.signals import PROBED
from tests.helpers import noise
from tests.reference import bags as reference
from tests.tiny import scramble


class ABMIL(nn.Module):
    """As its authors write it, one bag [N, D] at a time."""

    def __init__(self, gated: bool, branches: int):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(7, 6), nn.GELU())
        self.value = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.gate = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid()) if gated else None
        self.weight = nn.Linear(5, branches)
        self.classifier = nn.Linear(branches * 6, 3)

    def forward(self, bag):
        rows = self.encoder(bag)
        hidden = self.value(rows) if self.gate is None else self.value(rows) * self.gate(rows)
        share = torch.softmax(self.weight(hidden).T, dim=1)  # [K, N]
        return self.classifier((share @ rows).flatten()), share


PARTS = ("encoder", "value", "gate", "weight", "classifier")


@pytest.fixture(scope="module", params=[(True, 1), (False, 1), (True, 2)], ids=str)
def tiny(request):
    net = scramble(ABMIL(*request.param)).double().requires_grad_(False)
    blank = noise(7, seed=5)
    model = sc.wrap_bag(net, **{name: getattr(net, name) for name in PARTS}, blank=blank)
    return net, model, noise(2, 8, 7, seed=1), blank


def test_a_view_answers_like_its_module(tiny):
    net, model, bags, _ = tiny
    expected = torch.stack([net(bag)[0] for bag in bags])
    assert_close(model(model.prepare(bags)), expected, atol=1e-10, rtol=0)
    longer = noise(1, 13, 7, seed=2)
    assert_close(model(model.prepare(longer))[0], net(longer[0])[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("direction", ["insert", "delete"])
def test_caap_equals_the_slow_twin(tiny, direction):
    net, model, bags, blank = tiny
    maps = sc.attribute(model, bags, 1, score="logit", direction=direction).maps
    assert maps.shape == (2, 8, 1)
    for bag, got in zip(bags, maps, strict=True):
        slow = reference.caap(lambda x: net(x)[0][1], bag, blank, direction)
        assert_close(got[:, 0], slow, atol=1e-10, rtol=0)
        assert slow.std() > 1e-3


def test_mosaic_equals_the_slow_twin(tiny):
    net, model, bags, blank = tiny
    result = sc.attribute(model, bags, 1, method="mosaic", score="logit", law="path", masks=4)
    for bag, got in zip(bags, result.maps, strict=True):
        slow = reference.mosaic_path(net, bag, blank, 1, masks=4)
        assert_close(got[:, 0], slow, atol=1e-10, rtol=0)
        assert slow.abs().max() > 1e-3


def test_removal_is_exact_also_of_an_instance_that_has_all_attention(tiny):
    net, model, bags, _ = tiny
    assert_close(model.without(bags)[1], reference.without(net, bags[1]), atol=1e-10, rtol=0)
    loud = bags[0].clone()
    loud[3] *= 300
    assert_close(model.without(loud)[0], reference.without(net, loud), atol=1e-10, rtol=0)
    with pytest.raises(BadImage, match="nothing is left"):
        model.without(bags[0, :1])


def test_what_is_planted_wrong_is_refused():
    net = scramble(ABMIL(True, 1)).double().requires_grad_(False)
    parts = {name: getattr(net, name) for name in PARTS}
    with pytest.raises(ViewMismatch):
        sc.wrap_bag(net, **{**parts, "gate": None})
    with pytest.raises(ViewMismatch):
        sc.wrap_bag(net, **{**parts, "value": net.gate, "gate": net.value[0]})
    with pytest.raises(BadOption, match="blank"):
        sc.wrap_bag(net, **parts, blank=torch.zeros(3))


def test_results_are_saved_and_drawn(tiny, tmp_path):
    _, model, bags, _ = tiny
    result = sc.attribute(model, bags, 1, method=["caap", "mosaic"])
    again = sc.Attribution.load(result.save(tmp_path) / "caap")
    assert torch.equal(again.maps, result["caap"].maps)
    assert again.manifest["options"]["select"] == "none"
    assert again.overlay(0).size[0] == again.overlay(0).size[1]  # 8 instances in a square of 3
    assert "row by row" in result.page(tmp_path / "page").read_text()
    with pytest.raises(BadImage, match="one row for each instance"):
        model.prepare(torch.zeros(4, 5))
    with pytest.raises(BadImage, match="one by one"):
        model.prepare([torch.zeros(4, 7), torch.zeros(5, 7)])


class Lenient(nn.Module):
    """Takes bags [B, N, D]; of one [N, D] every row passes as a bag of one."""

    def __init__(self):
        super().__init__()
        self.value, self.weight = nn.Linear(7, 4), nn.Linear(4, 1)
        self.classifier = nn.Linear(7, 3)

    def forward(self, bags):
        share = torch.softmax(self.weight(self.value(bags).tanh()), dim=-2)
        return self.classifier((share * bags).sum(dim=-2) if bags.ndim == 3 else bags)


def test_a_row_for_each_instance_is_no_answer():
    net = scramble(Lenient()).requires_grad_(False)
    parts = {name: getattr(net, name) for name in ("value", "weight", "classifier")}
    bag = noise(5, 7).float()
    assert_close(sc.wrap_bag(net, **parts)(bag.T[None, ..., None]), net(bag[None]))


class Batched(nn.Module):
    """Takes bags [B, N, D] only; one of as many instances as features would pass as a vector."""

    def __init__(self, width: int):
        super().__init__()
        self.value, self.weight = nn.Linear(width, 4), nn.Linear(4, 1)
        self.classifier = nn.Linear(width, 3)

    def forward(self, bags):
        share = torch.softmax(self.weight(self.value(bags).tanh()), dim=1)
        return self.classifier((share * bags).sum(dim=1))


def test_a_module_of_batches_is_read_at_any_width():
    for width in (PROBED, PROBED + 1):
        net = scramble(Batched(width)).requires_grad_(False)
        parts = {name: getattr(net, name) for name in ("value", "weight", "classifier")}
        bag = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
        model = sc.wrap_bag(net, **parts)
        assert_close(model(model.prepare(bag)), net(bag[None]))
        assert_close(model.without(bag.numpy()), model.without(bag))  # as files hold features


@pytest.mark.parametrize("method", ["gae", "bt", "grad-cam", "t-attr"])
def test_methods_whose_gradient_passes_no_pool_are_refused_in_words(tiny, method):
    _, model, bags, _ = tiny
    with pytest.raises(NotDefined, match="pools of bags"):
        sc.attribute(model, bags, 1, method)
