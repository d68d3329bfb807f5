"""Libra's rules: values stay as they are, and relevance adds up to the logit at every depth."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.gradients import LibraRules, usual_score
from seecause.engine.trace import record, suffix
from tests.helpers import near, ready
from tests.tiny import FAMILIES, scramble

TARGET = 3


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_libra_leaves_values_as_they_are(family):
    _, model, images = ready(family)
    before = model(images)
    with LibraRules():
        assert torch.equal(model(images), before)


@contextmanager
def trained(module):
    module.requires_grad_(True)
    yield {name: p for name, p in module.named_parameters() if name.endswith("bias")}
    module.requires_grad_(False)


EVERY = [(f, torch.float64) for f in FAMILIES if f != "torchvision_pre_logits"]  # tanh is no gate


@pytest.mark.parametrize(
    ("family", "dtype"), [*EVERY, ("timm_registers", torch.float32), ("timm_swiglu", torch.float32)]
)
def test_libra_relevance_and_biases_add_up_to_the_logit_at_every_depth(family, dtype):
    native, model, images = ready(family, dtype=dtype)
    if usual_score(model) == "logit":
        pytest.skip("the L2 norm of cosine heads keeps its plain gradient")
    for layer in range(5):
        assert imbalance(native.module, model, images, layer) < (
            1e-10 if dtype == torch.float64 else 1e-4
        )


def imbalance(module, model, images, layer, rules=LibraRules):
    """What is missing between the logit and relevance + bias terms, relative to the logit."""
    h = record(model, images, states={layer}).states[layer].detach().requires_grad_()
    with trained(module) as biases:
        with rules():
            logit = suffix(model, h, model.at(images), layer)[:, TARGET].sum()
        slope, *rest = torch.autograd.grad(logit, [h, *biases.values()], allow_unused=True)
        of_biases = sum(
            (b * g).sum() for b, g in zip(biases.values(), rest, strict=True) if g is not None
        )
    return abs((h * slope).sum() + of_biases - logit).item() / max(1.0, logit.abs().item())


def test_libra_balances_rms_norms():
    from timm.layers import RmsNorm
    from timm.models.vision_transformer import VisionTransformer

    for norm in (RmsNorm, torch.nn.RMSNorm):  # one written out by hand, one built in
        module = scramble(
            VisionTransformer(
                img_size=16,
                patch_size=8,
                embed_dim=24,
                depth=2,
                num_heads=3,
                num_classes=7,
                norm_layer=norm,
            )
        ).double()
        model = sc.wrap(module.requires_grad_(False), mean=(0.5,) * 3, std=(0.5,) * 3)
        images = torch.randn(
            2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        before = model(images)
        with LibraRules():
            assert torch.equal(model(images), before)
        assert (
            imbalance(module, model, images, 0)
            < 1e-10
            < imbalance(module, model, images, 0, nullcontext)
        )


@pytest.mark.parametrize("activation", [torch.nn.functional.gelu, torch.nn.functional.silu])
def test_libra_gates_have_their_limit_at_zero(activation):
    x = torch.tensor([-1.0, -1e-6, 0.0, 1e-6, 2.0], dtype=torch.float64, requires_grad=True)
    with LibraRules():
        (slope,) = torch.autograd.grad(activation(x).sum(), x)
    expected = activation(x.detach()) / x.detach()
    expected[2] = 0.5  # where that is 0 / 0
    assert_close(slope, expected)


def test_libra_ends_with_its_block_even_after_an_error():
    native, model, images = ready("timm_registers")
    leaf = images.clone().requires_grad_()
    (expected,) = torch.autograd.grad(native.module(leaf)[:, TARGET].sum(), leaf)
    with pytest.raises(RuntimeError, match="stop"), LibraRules():
        raise RuntimeError("stop")
    found = sc.attribute(model, images, TARGET, "smoothgrad", samples=1, noise=0.0).native
    near(found, expected.abs().sum(dim=1))
