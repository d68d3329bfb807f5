"""T-Attr: relevance as a backward pass equals the rules written out, and is conserved for every
sample."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.attention import Rules, _relevant, unchanged
from seecause.engine.trace import explicit_run
from seecause.errors import NotDefined
from tests.helpers import near, noise, ready, view
from tests.reference import t_attr as reference
from tests.tiny import pictures, tiny


@pytest.mark.parametrize("family", ["timm_registers", "timm_deit3", "timm_dynamic"])
@pytest.mark.parametrize("start", [0, 1])
def test_maps_equal_the_rules_written_out(family, start):
    native, model, images = ready(family, 3)
    found = sc.attribute(model, images, [3, 0, 6], "t-attr", start=start).maps.flatten(1)
    prefix = model.check(images).prefix
    for row, image, label in zip(found, images, [3, 0, 6], strict=True):
        slow, sums = reference.t_attr(native.module, image, label, start=start)
        assert_close(row, slow[prefix:], rtol=1e-5, atol=1e-10)
        assert_close(sums, torch.ones_like(sums), rtol=1e-3, atol=0)  # safe division adds 1e-9
        assert row.std() > 0


CONSERVING = ["timm_registers", "timm_swiglu", "timm_mean", "timm_map", "hf_dinov2_swiglu"]
CONSERVING += ["hf_dinov3", "hf_clip", "torchvision_vit"]


@pytest.mark.parametrize("family", CONSERVING)
def test_relevance_is_conserved_for_every_sample(family):
    native, model, images = ready(family, 3)
    inputs = []

    def heard(step):
        return lambda x: inputs.append(x) or step(x)

    for block in model.blocks:
        block.norm = heard(block.norm)
    with model.eval_mode(frozen=True), Rules():
        logits = explicit_run(
            replace(model, blocks=[_relevant(b) for b in model.blocks]), images
        ).logits
    near(logits, native.forward(images), 1e-10)  # values are the model's own
    seed = torch.zeros_like(logits)
    seed[:, 2] = torch.tensor([1.0, 2.0, -3.0])
    for found in torch.autograd.grad(logits, inputs, seed):
        assert_close(found.sum(dim=(1, 2)), seed[:, 2], rtol=1e-3, atol=0)


def test_an_operator_without_a_rule_is_named():
    class Odd(nn.Module):
        def forward(self, x):
            return x.cumsum(dim=1)

    native = tiny("timm_deit3")
    model = view(native, check=False)
    model.blocks[1].feed = Odd()
    with pytest.raises(NotDefined, match=r"no rule for `cumsum`"):
        sc.attribute(model, pictures(native), 0, "t-attr")


def test_rules_of_single_operators():
    x, relevance = noise(2, 3, 32).requires_grad_(), noise(2, 3, 32, seed=2)
    layer = nn.Linear(32, 32, dtype=torch.float64).requires_grad_(False)
    with Rules():
        y, mean = layer(x), x.mean(dim=1)
        turned, gated = unchanged(torch.flip)(x, (1,)), x * nn.functional.silu(x)
    found = torch.autograd.grad(y, x, relevance)[0]
    assert_close(found, reference.linear_rule(layer, x.detach(), relevance), atol=1e-12, rtol=1e-9)
    assert_close(found.sum(dim=-1), relevance.sum(dim=-1), rtol=1e-6, atol=1e-6)  # conserved
    assert_close(
        torch.autograd.grad(mean, x, relevance[:, 0])[0],
        (x / x.sum(dim=1, keepdim=True) * relevance[:, :1]).detach(),
        rtol=1e-5,
        atol=0,
    )
    assert torch.equal(torch.autograd.grad(turned, x, relevance)[0], relevance)
    assert torch.equal(torch.autograd.grad(gated, x, relevance)[0], relevance)
