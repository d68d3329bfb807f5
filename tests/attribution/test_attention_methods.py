"""Attention methods equal slow twins that read timm's own attention matrices."""

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.engine.trace import attention_probs, explicit_run, n_attentions, read_rows
from tests.helpers import near, ready, view
from tests.tiny import FAMILIES, pictures, tiny

TARGET = 3


class Twin:
    """A timm model run natively, unfused: its matrices [B, H, T, T] and block outputs, with a
    graph."""

    def __init__(self, native, images):
        self.module, self.probs, self.states = native.module, [], []
        hooks = []
        for block in native.module.blocks:
            block.attn.fused_attn = False
            hooks.append(
                block.attn.attn_drop.register_forward_hook(lambda m, i, out: self.probs.append(out))
            )
            hooks.append(block.register_forward_pre_hook(lambda m, i: self.states.append(i[0])))
        self.logits = native.module(images.clone().requires_grad_())
        for hook in hooks:
            hook.remove()

    def slopes(self, of, logits=None):
        return torch.autograd.grad(
            (self.logits if logits is None else logits)[:, TARGET].sum(), of, retain_graph=True
        )

    def read(self, matrix, prefix):
        """The class token's row, or the mean of patch rows."""
        rows = (
            matrix[..., prefix:, :].mean(dim=-2)
            if self.module.global_pool == "avg"
            else matrix[..., 0, :]
        )
        return rows[..., prefix:]


def twins(family, batch=2):
    native, model, images = ready(family, batch)
    return model, images, Twin(native, images)


def maps(model, images, method, **options):
    return (
        sc.attribute(model, images, target=TARGET, method=method, **options)
        .maps.flatten(1)
        .detach()
    )


CLASS_AND_MEAN = pytest.mark.parametrize("family", ["timm_registers", "timm_mean", "timm_deit3"])


# The matrices


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_explicit_attention_gives_the_same_answers(family):
    _, model, images = ready(family)
    run = explicit_run(model, images)
    near(run.logits, model(images), 1e-10)
    assert len(run.probs) == n_attentions(model)
    for probs, streamed in zip(run.probs, attention_probs(model, images), strict=True):
        assert probs.shape[-1] == model.check(images).tokens
        near(probs.sum(dim=-1), torch.ones_like(probs[..., 0]))
        near(streamed, probs)


def test_gates_are_seen_by_explicit_attention():
    _, model, images = ready("timm_deit3")
    gates = torch.rand(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with model.gated(gates), torch.no_grad():
        near(explicit_run(model, images).logits, model(images), 1e-10)


def test_rows_follow_the_readout():
    eye = torch.eye(28, dtype=torch.float64)
    rows = {}
    for family in ("timm_registers", "timm_distilled", "timm_mean", "hf_dinov2"):
        model = view(tiny(family), check=False)
        layout = model.check(pictures(tiny(family)))
        rows[family] = read_rows(model, layout, eye[: layout.tokens, : layout.tokens])
        assert_close(rows[family].sum().item(), 1.0)
    assert rows["timm_registers"].nonzero().flatten().tolist() == [0]
    assert rows["timm_distilled"].nonzero().flatten().tolist() == [0, 1]
    assert rows["timm_mean"].nonzero().flatten().tolist() == list(range(2, 26))
    assert_close(rows["hf_dinov2"], torch.tensor([0.5, *[0.5 / 24] * 24], dtype=torch.float64))


# The methods


def raw_attention(twin, start):
    return twin.probs[-1].mean(dim=1)


def rollout(twin, start):
    """The direct product, image by image."""
    eye = torch.eye(twin.probs[0].shape[-1], dtype=torch.float64)
    factors = [(p.mean(dim=1) + eye) / 2 for p in reversed(twin.probs[start:])]
    return torch.stack([torch.linalg.multi_dot([f[i] for f in factors]) for i in range(2)])


def attn_grad(twin, start):
    (slope,) = twin.slopes(twin.probs[-1:])
    return (slope * twin.probs[-1]).relu().mean(dim=1)


def gae(twin, start):
    reach = torch.eye(twin.probs[0].shape[-1], dtype=torch.float64)
    for probs, slope in list(zip(twin.probs, twin.slopes(twin.probs), strict=True))[start:]:
        reach = reach + (slope * probs).relu().mean(dim=1) @ reach
    return reach


@CLASS_AND_MEAN
@pytest.mark.parametrize(
    ("twin_of", "start"),
    [(raw_attention, None), (attn_grad, None), *((f, s) for f in (rollout, gae) for s in (0, 2))],
)
def test_maps_are_rows_of_the_twins_matrices(family, twin_of, start):
    model, images, twin = twins(family)
    options = {} if start is None else {"start": start}
    found = maps(model, images, twin_of.__name__.replace("_", "-"), **options)
    expected = twin.read(twin_of(twin, start), model.layout.prefix).detach()
    assert_close(found, expected, atol=1e-10, rtol=1e-10)


@CLASS_AND_MEAN
def test_legrad(family):
    model, images, twin = twins(family)
    layers = []
    outputs = [*twin.states[1:], None]  # of each block; the last one is read by the model itself
    for index in range(4):
        logits = (
            twin.logits
            if outputs[index] is None
            else twin.module.forward_head(twin.module.norm(outputs[index]))
        )
        (slope,) = twin.slopes([twin.probs[index]], logits)
        layers.append(slope.relu().mean(dim=(1, 2))[:, model.layout.prefix :])
    near(maps(model, images, "legrad"), torch.stack(layers).mean(dim=0))


@CLASS_AND_MEAN
@pytest.mark.parametrize("start", [0, 2])
def test_tam(family, start):
    model, images, twin = twins(family)
    prefix, slope = model.layout.prefix, 0
    for alpha in torch.linspace(0, 1, 20, dtype=torch.float64):
        scaled = Twin(tiny(family), alpha * images)
        slope = slope + scaled.slopes([scaled.probs[-1]])[0] / 20
    reach = torch.eye(model.layout.tokens, dtype=torch.float64)
    for probs in twin.probs[start:-1]:
        reach = reach + probs.mean(dim=1) @ reach
    state = twin.read(twin.probs[-1].mean(dim=1) @ reach, prefix)
    near(
        maps(model, images, "tam", start=start),
        (state * twin.read(slope.relu().mean(dim=1), prefix)).detach(),
        1e-10,
    )


@CLASS_AND_MEAN
def test_attcat(family):
    model, images, twin = twins(family)
    slopes = twin.slopes(twin.states)
    expected = sum(
        probs.mean(dim=(1, 2)) * (h * slope).sum(dim=-1)
        for probs, h, slope in zip(twin.probs, twin.states, slopes, strict=True)
    )[:, model.layout.prefix :].detach()
    assert_close(maps(model, images, "attcat"), expected, atol=1e-10, rtol=1e-10)


def test_a_latent_pool_is_one_more_step():
    _, model, images = ready("timm_map")
    *blocks, pool = attention_probs(model, images)
    assert pool.shape == (2, 3, 1, 25) and (pool[..., 0] == 0).all()  # the register is not read
    eye = torch.eye(25, dtype=torch.float64)
    reach = pool.mean(dim=1)
    for probs in reversed(blocks):
        reach = reach @ ((probs.mean(dim=1) + eye) / 2)
    near(maps(model, images, "rollout"), reach[:, 0, 1:])
    near(maps(model, images, "raw-attention"), pool.mean(dim=1)[:, 0, 1:])
    only_pool = maps(model, images, "gae", start=4)
    near(only_pool, maps(model, images, "attn-grad"))
