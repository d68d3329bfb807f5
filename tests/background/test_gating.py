"""Causal Head Gating finds what was planted: a head that drowns the labels, heads that do nothing,
heads that carry the answer."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import seecause as sc
from seecause.background import LabelledImages, ablate, gating, head_gates, select
from seecause.background.erase import erase
from seecause.background.gating import Gating
from seecause.engine.chunks import budget
from seecause.engine.forks import gated_logits
from tests.families.native import HALF
from tests.tiny import scramble

NOISY, IDLE, CARRYING = (1, 0), [(0, 2), (1, 2)], [(0, 0), (0, 1), (1, 1)]


@pytest.fixture(scope="module")
def planted():
    """Labels are a model's own answers without one head, which it then gets back six times as loud;
    two other heads write nothing."""
    from timm.models.vision_transformer import VisionTransformer

    module = scramble(
        VisionTransformer(
            img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5
        ),
        seed=1,
    ).requires_grad_(False)
    model = sc.wrap(module, **HALF, check=False)

    def columns(layer, head):
        return module.blocks[layer].attn.proj.weight[:, 8 * head : 8 * head + 8]

    for place in IDLE:
        columns(*place).zero_()
    images = torch.randn(128, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with ablate(model, [NOISY]):
        module.head.bias -= model(images).mean(dim=0)  # every class is someone's answer
        module.head.weight *= 8
        module.head.bias *= 8
        labels = model(images).argmax(dim=1)
    columns(*NOISY).mul_(6)
    return model, images, labels


@pytest.fixture(scope="module")
def gates(planted):
    model, images, labels = planted
    return head_gates(model, (images, labels), fits=5, steps=30, batch=64)


def test_a_head_that_adds_label_noise_interferes(gates):
    assert gates.roles()[NOISY[0]][NOISY[1]] == "interfering"
    assert gates.opened[:, *NOISY].max() < 0.5  # in every fit
    assert divmod(int(gates.interference.argmax()), 3) == NOISY


def test_heads_without_effect_follow_the_pressure(gates):
    for layer, head in IDLE:
        assert gates.roles()[layer][head] == "irrelevant"
        assert gates.irrelevance[layer, head] > 0.9


def test_heads_that_carry_the_answer_facilitate(gates):
    assert {gates.roles()[layer][head] for layer, head in CARRYING} == {"facilitating"}


def test_removing_what_interferes_repairs_the_model(planted):
    model, images, labels = planted
    scores = select("gating", model, LabelledImages(images, labels), fits=2, steps=15, batch=64)
    assert (model(images).argmax(dim=1) == labels).float().mean() < 0.5
    assert scores.top(1) == [NOISY]
    with ablate(model, scores.top(1)):
        assert (model(images).argmax(dim=1) == labels).all()


def test_soft_roles_follow_from_the_two_gates():
    opened, shut = torch.tensor([[[0.9, 0.9, 0.1, 0.1]]]), torch.tensor([[[0.8, 0.2, 0.3, 0.9]]])
    result = Gating(opened, opened, shut)
    assert result.roles() == [["facilitating", "irrelevant", "interfering", "unclear"]]
    lacking = opened.clone()
    lacking[..., 1] = torch.nan
    assert Gating(lacking, lacking, shut).roles()[0][:2] == ["facilitating", None]
    assert result.roles(threshold=0.85)[0][0] == "irrelevant"
    assert result.scores(threshold=0.95)[0, 0] == pytest.approx(0.1)
    half = torch.full((1, 1, 1), 0.5)  # is not open
    for opened_by, shut_by, role, value in (
        (half, half, "interfering", 0.5),
        (half, half + 0.1, "unclear", -0.5),
        (half + 0.1, half, "irrelevant", -0.6),
    ):
        edge = Gating(half, opened_by, shut_by)
        assert edge.roles() == [[role]]
        assert_close(edge.scores(), torch.tensor([[value]]))
    assert_close(result.facilitation, shut[0])
    assert_close(result.irrelevance, (opened * (1 - shut))[0])
    assert_close(result.interference, 1 - opened[0])


def test_masks_do_not_meet(planted):
    """As many fits at once as fit in memory are the same fits one by one."""
    model, images, labels = planted
    together = head_gates(model, (images, labels), fits=3, steps=3, batch=8)
    with budget(1):
        apart = head_gates(model, (images, labels), fits=3, steps=3, batch=8)
    assert_close(together.opened, apart.opened, atol=1e-4, rtol=0)


def test_the_contrastive_form_keeps_one_task_and_suppresses_the_other(planted):
    """What a head is called depends on the tasks: the loud head interferes with one set of answers
    and makes the other."""
    model, images, quiet = planted
    loud = model(images).argmax(dim=1)
    differ = quiet != loud
    metadata = dict(fits=2, steps=15, batch=32)
    against = head_gates(
        model, (images[differ], quiet[differ]), suppress=(images[differ], loud[differ]), **metadata
    )
    towards = head_gates(
        model, (images[differ], loud[differ]), suppress=(images[differ], quiet[differ]), **metadata
    )
    assert against.roles()[NOISY[0]][NOISY[1]] == "interfering"
    assert towards.roles()[NOISY[0]][NOISY[1]] == "facilitating"


def test_only_heads_called_interfering_score_above_zero():
    """The rule of removal: both gates at most 0.5. The order within each kind is that of soft
    interference."""
    opened, shut = (
        torch.tensor([[[0.9, 0.6, 0.1, 0.3, 0.2]]]),
        torch.tensor([[[0.8, 0.2, 0.3, 0.4, 0.9]]]),
    )
    result = Gating(opened, opened, shut)
    assert_close(result.scores(), torch.tensor([[-0.9, -0.6, 0.9, 0.7, -0.2]]))
    assert [role == "interfering" for role in result.roles()[0]] == (
        result.scores()[0] > 0
    ).tolist()


def test_slopes_are_those_of_the_loss_as_written(planted):
    """All tasks and masks in one pass are the same as one after another, and the push is the slope
    of the clipped mean."""
    model, images, labels = planted
    tasks = [(images[:8], labels[:8]), (images[8:20], labels[8:20])]
    theta = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(0))
    for place, one in enumerate(theta):
        gates = one.clone().requires_grad_()
        first, second = (
            F.cross_entropy(
                gated_logits(model, x, gates.sigmoid().expand(len(x), -1, -1)), y, reduction="none"
            )
            for x, y in tasks
        )
        (slope,) = torch.autograd.grad(first.mean() - second.clamp(max=math.log(5)).mean(), gates)
        assert_close(gating._slopes(model, tasks, theta)[place], slope, atol=1e-5, rtol=1e-4)


def test_a_step_follows_the_loss_as_written_also_where_a_block_has_fewer_heads(
    planted, monkeypatch
):
    """The pressure is on the mean over heads that exist."""
    model, images, labels = planted
    missing = torch.tensor([[False, False, True], [False, False, False]])
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.SGD)
    monkeypatch.setattr(gating, "NORM", 1e6)
    start = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))
    start[0, 0, 1], start[1, 1, 0] = 5.0, -5.0  # beyond the clip: no pressure
    strengths, batch = torch.tensor([3.0, -3.0]), 8
    options = {"steps": 1, "rate": 0.5, "batch": batch, "missing": missing}

    def step():
        return gating._fit(
            model, [(images, labels)], start, strengths,
            generator=torch.Generator().manual_seed(0), **options,
        )  # fmt: skip

    after = step()
    monkeypatch.setattr(gating, "NORM", 0.01)
    shortened = step()
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:batch]
    for place, strength in enumerate(strengths):
        theta = start[place].clone().requires_grad_()
        logits = gated_logits(model, images[rows], theta.sigmoid().expand(batch, -1, -1))
        pressure = strength * theta[~missing].clamp(-gating.CLIP, gating.CLIP).mean()
        (slope,) = torch.autograd.grad(F.cross_entropy(logits, labels[rows]) - pressure, theta)
        assert_close(after[place], start[place] - 0.5 * slope, atol=1e-5, rtol=1e-4)
        short = 0.01 * slope / slope.norm()  # each mask's own
        assert_close(shortened[place], start[place] - 0.5 * short, atol=1e-6, rtol=1e-4)


def test_gates_begin_uniform_and_are_pushed_apart_from_where_they_were_free(planted):
    model, images, labels = planted
    task = (images, labels)
    still = head_gates(model, task, fits=2, steps=1, rate=1e-9, batch=4, seed=3)
    uniform = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    least, most = (torch.tensor(clip).sigmoid() for clip in (-4.0, 4.0))
    expected = uniform.clamp(float(least), float(most)).float()
    for gates in (still.free, still.opened, still.shut):
        assert_close(gates, expected, atol=1e-5, rtol=0)
    options = {"steps": 2, "rate": 0.3, "batch": 4}
    result = head_gates(model, task, fits=2, seed=3, strength=2.0, **options)
    chance = torch.Generator().manual_seed(3)
    start = torch.rand(2, 2, 3, generator=chance, dtype=torch.float64).logit().clamp(-4, 4).float()
    options |= {"missing": torch.zeros(2, 3, dtype=torch.bool), "generator": chance}
    free = gating._fit(model, [task], start, torch.zeros(2), **options)
    before = chance.get_state()
    for strength, gates in ((2.0, result.opened), (-2.0, result.shut)):
        chance.set_state(before)  # the same batches
        pushed = gating._fit(model, [task], free, torch.full((2,), strength), **options)
        assert_close(gates, pushed.sigmoid(), atol=1e-5, rtol=0)
    assert_close(result.free, free.sigmoid(), atol=1e-6, rtol=0)


def test_contrastive_gating_keeps_the_object_and_suppresses_the_background(planted):
    model, images, labels = planted
    masks = torch.zeros(128, 16, 16, dtype=torch.bool)
    masks[:, 4:12, 4:12] = True
    own = {"fits": 2, "steps": 2, "batch": 2, "seed": 4, "strength": 0.5, "rate": 0.3}
    data = LabelledImages(images, labels, masks)
    found = select("contrastive-gating", model, data, fill="mean", **own)
    shown, hidden = erase(model, images, masks, "mean")
    gates = head_gates(model, (shown, labels), suppress=(hidden, labels), **own)
    assert_close(found.value, gates.scores().double())
    assert_close(found.after["interference"], gates.interference.double())
    assert_close(found.error, gates.opened.double().std(dim=0) / 2**0.5)
    assert found.protocol["contrastive"] and own.items() <= found.protocol.items()
