"""An intervention that does not happen is an error on its first use, not a comparison in a test."""

import dataclasses

import pytest
import torch

import seecause as sc
from seecause.engine.canary import proofs
from seecause.errors import EditLost
from seecause.models.block import Block
from tests.tiny import FAMILIES, tiny


def wrapped(family: str = "timm_deit3", dtype: torch.dtype = torch.float64):
    native = tiny(family, dtype)
    return sc.wrap(native.module, **native.options)


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_and_patches_move_native_models_as_computed(family):
    for proof in proofs(wrapped(family)):
        assert proof.moved > 0.01 and proof.worst < 1e-10, proof


def test_half_precision_is_enough_to_see_that_an_edit_happened():
    for proof in proofs(wrapped(dtype=torch.bfloat16)):
        assert proof.moved > 0.05 and proof.worst < 0.02, proof


@dataclasses.dataclass(eq=False)
class DropsGates(Block):
    def close(self, h, carried, gate=None):
        return super().close(h, carried, None)


@dataclasses.dataclass(eq=False)
class NextHead(Block):
    def close(self, h, carried, gate=None):
        return super().close(h, carried, None if gate is None else gate.roll(1, -1))


@dataclasses.dataclass(eq=False)
class AddsALittle(Block):
    def close(self, h, carried, gate=None):
        return super().close(h, carried, gate) + (0 if gate is None else 1e-12)


def broken(kind: type[Block]):
    model = wrapped()
    model.blocks = [kind(**vars(block)) for block in model.blocks]
    return model


@pytest.mark.parametrize(
    ("kind", "words"),
    [(DropsGates, "should move"), (NextHead, "should move"), (AddsALittle, "empty edit")],
)
def test_a_gate_that_is_dropped_shifted_or_inexact_is_refused_when_used(kind, words):
    model = broken(kind)
    with pytest.raises(EditLost, match=words), sc.background.ablate(model, [(0, 1)]):
        pass


def test_a_patch_that_is_dropped_is_refused_when_used(monkeypatch):
    model = wrapped()
    images = torch.rand(2, 3, *model.preprocess.size, dtype=torch.float64)
    monkeypatch.setattr(  # marks no token: every set of sites is empty
        "seecause.engine.patching._mark", lambda *_: torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    )
    with pytest.raises(EditLost, match=r"'patch'.*torch 2"):
        sc.patch(model, images[:1], images[1:], [[sc.Site(0)]])


def test_the_check_runs_once_for_the_same_weights():
    model, runs = wrapped(), []
    model.native = lambda images, native=model.native: runs.append(1) or native(images)
    images = torch.rand(2, 3, *model.preprocess.size, dtype=torch.float64)
    for _ in range(3):
        sc.patch(model, images[:1], images[1:], [[]])
        with sc.background.ablate(model, [(0, 1)]):
            model(images)
    assert len(runs) == 2  # one of each kind
    with torch.no_grad():
        model.module.head.bias.add_(1)
    sc.patch(model, images[:1], images[1:], [[]])
    assert len(runs) == 3
