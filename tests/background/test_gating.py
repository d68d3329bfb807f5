"""Causal Head Gating finds what was planted: a head that drowns the labels, heads that do nothing,
heads that carry the prediction."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import seecause as sc
from seecause.background import LabelledImages, ablate, scoring as module, select
from seecause.background.scoring import fit_gates, fitted_gates
from seecause.engine.chunks import budget
from seecause.engine.forks import gated_logits
from tests.families.native import HALF
from tests.tiny import scramble

NOISY, IDLE, CARRYING = (1, 0), [(0, 2), (1, 2)], [(0, 0), (0, 1), (1, 1)]


@pytest.fixture(scope="module")
def planted():
    """Labels are a model's own predictions without one head, which it then gets back six times as
    loud; two other heads write nothing."""
    from timm.models.vision_transformer import VisionTransformer

    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    vit = scramble(VisionTransformer(**size, num_classes=5), seed=1).requires_grad_(False)
    model = sc.wrap(vit, **HALF, check=False)

    def columns(layer, head):
        return vit.blocks[layer].attn.proj.weight[:, 8 * head : 8 * head + 8]

    for place in IDLE:
        columns(*place).zero_()
    images = torch.randn(128, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with ablate(model, [NOISY]):
        vit.head.bias -= model(images).mean(dim=0)  # every class is predicted for some image
        vit.head.weight *= 8
        vit.head.bias *= 8
        labels = model(images).argmax(dim=1)
    columns(*NOISY).mul_(6)
    return model, LabelledImages(images, labels)


def test_planted_heads_get_their_roles_and_removing_what_interferes_repairs_the_model(planted):
    model, data = planted
    scores = select("gating", model, data, fits=5, steps=30, batch=64)
    assert scores.order() == scores.top(1) == [NOISY] and scores.after["interference"][NOISY] > 0.5
    assert all(scores.after["irrelevance"][head] > 0.9 for head in IDLE)
    assert all(scores.after["facilitation"][head] > 0.5 for head in CARRYING)
    assert (model(data.images).argmax(dim=1) == data.labels).float().mean() < 0.5
    with ablate(model, scores.top(1)):
        assert (model(data.images).argmax(dim=1) == data.labels).all()


def test_only_heads_that_stay_shut_under_both_pressures_score_above_zero(planted, monkeypatch):
    opened = torch.tensor([[[0.9, 0.6, 0.1], [0.3, 0.2, 0.5]]], dtype=torch.float64)
    shut = torch.tensor([[[0.8, 0.2, 0.3], [0.4, 0.9, 0.5]]], dtype=torch.float64)
    monkeypatch.setattr(module, "fitted_gates", lambda *_, **__: (opened, shut))
    found = select("gating", *planted)
    expected = torch.tensor([[-0.9, -0.6, 0.9], [0.7, -0.2, 0.5]], dtype=torch.float64)
    assert_close(found.value, expected)
    assert_close(found.after["irrelevance"], (opened * (1 - shut))[0])
    assert_close(found.after["facilitation"], shut[0])


def test_sets_of_gates_do_not_meet(planted):
    """As many fits at once as fit in memory are the same fits one by one."""
    options = {"fits": 3, "steps": 3, "batch": 8, "strength": 0.1, "rate": 1.0, "seed": 0}
    together, _ = fitted_gates(*planted, **options)
    with budget(1):
        apart, _ = fitted_gates(*planted, **options)
    assert_close(together, apart, atol=1e-4, rtol=0)


@pytest.mark.parametrize("norm", [1e6, 0.01])
def test_a_step_follows_the_loss_as_written_also_where_a_block_has_fewer_heads(
    planted, monkeypatch, norm
):
    """The pressure is on the mean over heads that exist, and a step is cut to a norm."""
    model, data = planted
    missing = torch.tensor([[False, False, True], [False, False, False]])
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.SGD)
    monkeypatch.setattr(module, "absent", lambda model: missing)
    monkeypatch.setattr(module, "NORM", norm)
    start = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))
    start[0, 0, 1], start[1, 1, 0] = 5.0, -5.0  # beyond the clip: no pressure
    strengths, batch = torch.tensor([3.0, -3.0]), 8
    draw = torch.Generator().manual_seed(0)
    after = fit_gates(model, data, start, strengths, steps=1, rate=0.5, batch=batch, generator=draw)
    rows = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:batch]
    for place, strength in enumerate(strengths):
        theta = start[place].clone().requires_grad_()
        logits = gated_logits(model, data.images[rows], theta.sigmoid().expand(batch, -1, -1))
        pressure = strength * theta[~missing].clamp(-4, 4).mean()
        loss = F.cross_entropy(logits, data.labels[rows]) - pressure
        (slope,) = torch.autograd.grad(loss, theta)
        slope = slope * min(1.0, norm / float(slope.norm()))
        assert_close(after[place], start[place] - 0.5 * slope, atol=1e-5, rtol=1e-4)


def test_gates_begin_uniform_and_are_pushed_apart_from_where_they_were_free(planted):
    model, data = planted
    own = {"fits": 2, "strength": 2.0, "seed": 3}
    uniform = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    least, most = (torch.tensor(clip).sigmoid() for clip in (-4.0, 4.0))
    for gates in fitted_gates(model, data, **own, steps=1, rate=1e-9, batch=4):
        assert_close(gates, uniform.clamp(float(least), float(most)), atol=1e-5, rtol=0)
    schedule = {"steps": 2, "rate": 0.3, "batch": 4}
    found = fitted_gates(model, data, **own, **schedule)
    chance = torch.Generator().manual_seed(3)
    start = torch.rand(2, 2, 3, generator=chance, dtype=torch.float64).logit().clamp(-4, 4).float()
    free = fit_gates(model, data, start, torch.zeros(2), **schedule, generator=chance)
    before = chance.get_state()
    for strength, gates in zip((2.0, -2.0), found, strict=True):
        chance.set_state(before)  # the same batches
        pressure = torch.full((2,), strength)
        pushed = fit_gates(model, data, free, pressure, **schedule, generator=chance)
        assert_close(gates, pushed.sigmoid().double(), atol=1e-5, rtol=0)
