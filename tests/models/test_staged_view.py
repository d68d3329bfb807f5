"""Convolutional views: stages of native modules that can be left and entered anywhere, and a wrong
split is refused."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from seecause.engine import verify as probing
from seecause.engine.verify import verify
from seecause.errors import BadImage, BadOption, ViewMismatch
from seecause.loading import wrap
from seecause.models.staged import Stage, StagedModel
from tests.families.conv import CONV_FAMILIES, OPTIONS, tiny_conv
from tests.families.native import matrix
from tests.helpers import hooks, noise, view
from tests.reference.caap_cnn import features
from tests.tiny import pictures

CELLS = {"resnet": "layer3", "densenet": "denseblock3", "vgg": "conv4"}


@pytest.mark.parametrize("family", CONV_FAMILIES)
@torch.no_grad()
def test_every_stage_can_be_left_and_entered(family):
    native = tiny_conv(family)
    model, images = view(native), pictures(native)
    assert model.cells == CELLS[family.split("_")[1]] and hooks(native.module) == 0
    outputs = model.stage_outputs(images)
    assert len(outputs) == len(native.blocks)
    for (name, got), block in zip(outputs.items(), native.blocks, strict=True):
        expected = features(native.forward, block, images)
        assert_close(got, expected, atol=1e-12, rtol=0)
        assert_close(model.run_to(name, images), expected, atol=1e-12, rtol=0)
        assert_close(model.run_from(name, got), native.forward(images), atol=1e-12, rtol=0)
        assert_close(
            got, expected, atol=0, rtol=0
        )  # in-place activations keep off what they were given


@pytest.mark.parametrize("family", ["timm_resnet", "torchvision_densenet", "timm_vgg_bn"])
@torch.no_grad()
def test_other_sizes_are_taken(family):
    native = tiny_conv(family)
    model, images = view(native), noise(1, 3, 64, 32)
    assert model.check(images).grid == (4, 2)
    assert_close(model(images), native.forward(images), atol=1e-12, rtol=0)
    with pytest.raises(BadImage, match="multiple of the patch"):
        model(noise(1, 3, 60, 32))
    with pytest.raises(BadOption, match="do not tile"):
        wrap(native.module, **{**OPTIONS, "size": (50, 80)})


def test_the_worst_of_all_stages_is_told(monkeypatch):
    """Each stage gives its map, and the answer from it, a little beside the native ones."""
    off = {"one": 0.001, "two": 0.003, "three": 0.002}
    native = torch.tensor([[4.0, -2.0]])
    stages = {name: nn.Identity() for name in off}

    def run(images: Tensor) -> Tensor:
        for stage in stages.values():
            stage(torch.ones(1, 1, 3, 3))
        return native

    model = MagicMock(
        return_value=native, memo={}, native=run,
        stages=[
            SimpleNamespace(name=name, listened=stage, leave=lambda output: output)
            for name, stage in stages.items()
        ],
        stage_outputs=lambda images: {n: torch.full((1, 1, 3, 3), 1 + off[n]) for n in off},
        run_from=lambda name, features: native * (1 + 2 * off[name]),
    )  # fmt: skip
    monkeypatch.setattr(probing, "_feature_locality", lambda *_: None)
    logits, maps, resumed, _ = probing._verify_stages(
        model, torch.zeros(1, 3, 6, 6), 0.01, torch.Generator()
    )
    assert logits.worst == 0 and model.memo == {"n_classes": 2}
    assert maps.worst == pytest.approx(0.003, rel=0.01)
    assert resumed.worst == pytest.approx(0.006, rel=0.01)


class Flip(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features.flip(-1, -2)


class TestWrongSplits:
    """Every probe can fail, and names the stage."""

    def refusal(self, model: StagedModel) -> tuple[str, str]:
        with pytest.raises(ViewMismatch) as refused:
            verify(model)
        return refused.value.probe, refused.value.where

    def test_a_module_left_out_of_a_stage(self):
        model = view(tiny_conv("torchvision_vgg_bn"), check=False)
        conv4 = model.stages[3]
        without = conv4.modules[:4] + conv4.modules[5:]  # the second norm
        model.stages[3] = replace(conv4, modules=without)
        assert self.refusal(model) == ("stages", "conv4")

    def test_a_stage_that_the_native_run_never_ends(self):
        model = view(tiny_conv("timm_resnet"), check=False)
        model.stages[2:3] = [Stage("layer2", (*model.stages[2].modules, nn.Identity()))]
        assert self.refusal(model) == ("stages", "the native run")

    def test_a_rest_without_its_norm(self):
        native = tiny_conv("torchvision_densenet")
        model = view(native, check=False)
        model.rest = lambda x: native.module.classifier(x.relu().mean(dim=(2, 3)))
        assert self.refusal(model) == ("resume", "denseblock4")

    def test_cells_of_another_stage(self):
        model = view(tiny_conv("timm_resnet"), check=False)
        model.cells = "layer2"
        assert self.refusal(model) == ("locality", "layer2")

    def test_features_that_are_not_where_their_pixels_are(self):
        native = tiny_conv("timm_resnet")
        native.module.layer3, native.module.layer4 = (
            nn.Sequential(native.module.layer3, Flip()),
            nn.Sequential(Flip(), native.module.layer4),
        )
        with pytest.raises(ViewMismatch, match="'locality' failed at layer3"):
            view(native)


def test_what_a_network_has_is_not_replaced():
    native = tiny_conv("timm_resnet")
    with pytest.raises(BadOption, match="classifier of its own"):
        wrap(native.module, head=matrix(8), **OPTIONS)
    with pytest.raises(BadOption, match="pools by itself"):
        wrap(native.module, pool="mean", **OPTIONS)


@torch.no_grad()
def test_stages_in_training_mode_give_the_verified_values_and_leave_statistics_alone():
    native = tiny_conv("timm_resnet")
    module, images = native.module, pictures(native)
    model = view(native, check=False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    features, logits = model.stage_outputs(images), model(images)
    module.train()
    assert_close(model.stage_outputs(images), features, atol=0, rtol=0)
    assert_close(model.run_to(model.cells, images), features[model.cells], atol=0, rtol=0)
    assert_close(model.run_from(model.cells, features[model.cells]), logits, atol=1e-12, rtol=0)
    assert module.training
    assert_close(dict(module.state_dict()), before, atol=0, rtol=0)
