"""Last layers: fits against slow twins, directions, DFR, and layers read from and put into
models."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.background import export, last_layer as layers
from seecause.background.last_layer import (
    LastLayer,
    balanced_layer,
    change_directions,
    features,
    last_layer,
    new_layer,
    with_last_layer,
)
from seecause.errors import BadOption
from tests.background.repair_toys import numbers
from tests.helpers import view
from tests.reference import last_layer as twin
from tests.tiny import pictures, tiny


def uneven(classes: int = 3):
    """Features of classes that are not equally frequent."""
    labels = torch.tensor([0] * 20 + [1] * 8 + [2] * 5)[:33]
    centres = 1.5 * numbers(1, classes, 6)
    return numbers(0, 33, 6) * torch.linspace(0.3, 2, 6).double() + centres[labels] + 4, labels


@pytest.mark.parametrize("strength", [0.01, 1.0])
def test_a_new_layer_is_newtons(strength):
    x, labels = uneven()
    fast = new_layer(x, labels, classes=3, strength=strength)(x)
    slow = twin.ridge_logistic(x, labels, 3, strength)
    assert_close(fast - fast.mean(dim=1, keepdim=True), slow, atol=1e-6, rtol=1e-6)


def test_an_anchored_layer_minimises_its_loss_and_keeps_rows_of_classes_without_images():
    """C sum w nll + |W - anchor|^2 / 2 over standardised features; all old classes compete."""
    labels = torch.tensor([0] * 7 + [2] * 4)
    x = numbers(0, 11, 3) * torch.tensor([1.0, 2.0, 0.5]) + 3
    old = LastLayer(0.1 * numbers(1, 4, 3), numbers(2, 4))
    new = new_layer(x, labels, classes=4, strength=0.5, anchor=old)
    deviation = x.std(dim=0, correction=0)
    weights = torch.tensor([11 / 14] * 7 + [11 / 8] * 4).double()  # two classes occur
    weight, bias = (part.clone().requires_grad_(True) for part in (new.weight, new.bias))
    logits = x @ weight.T + bias
    nll = logits.logsumexp(dim=1) - logits.gather(1, labels[:, None])[:, 0]
    ridge = ((weight - old.weight) * deviation).square().sum() / 2
    for slope in torch.autograd.grad(0.5 * (weights * nll).sum() + ridge, (weight, bias)):
        assert slope[[0, 2]].abs().max() < 1e-5
    assert_close(new.weight[[1, 3]], old.weight[[1, 3]])
    assert_close(new.bias[[1, 3]], old.bias[[1, 3]])
    tight = new_layer(x, labels, classes=4, anchor=old, strength=1e-9)
    assert_close(tight.weight, old.weight, atol=1e-4, rtol=1e-4)


def test_a_constant_feature_gets_no_weight():
    x = torch.cat([numbers(0, 8, 2), torch.full((8, 1), 5.0).double()], dim=1)
    layer = new_layer(x, torch.arange(8) % 2, classes=2)
    assert layer(x).isfinite().all() and not layer.weight[:, 2].any()
    labels, groups = torch.arange(40) % 2, torch.arange(40) // 20
    varied = numbers(0, 40, 3) + labels[:, None]
    constant = torch.cat([varied, torch.full((40, 1), 7.0).double()], dim=1)
    balanced, tried = balanced_layer(constant, labels, groups, classes=2, refits=2)
    assert (balanced.weight[:, 3] == 0).all() and (balanced.weight[:, :3] != 0).any()
    assert balanced.bias.isfinite().all() and max(tried.values()) > 0.5


def test_missing_classes_are_refused_without_an_anchor():
    x, labels = uneven()
    with pytest.raises(BadOption, match="3 of 5 classes"):
        new_layer(x, labels, classes=5)
    with pytest.raises(BadOption, match="1 of 3 classes"):
        new_layer(x[:20], labels[:20], classes=3)


@pytest.mark.parametrize("rank", [1, 3])
def test_folding_into_the_layer_is_removing_from_features(rank):
    versions, images = numbers(0, 24, 6), torch.arange(8).repeat_interleave(3)
    layer, x = LastLayer(numbers(1, 4, 6), numbers(2, 4)), numbers(3, 7, 6)
    with pytest.raises(BadOption, match="one version each"):
        change_directions(versions, torch.arange(24))
    directions = change_directions(versions, images)
    slow = twin.without_directions(x, versions, images, rank, layer.weight, layer.bias)
    assert_close(directions.fold(layer, rank)(x), slow, atol=1e-10, rtol=1e-10)


def toy(n: int, agreement: float, seed: int):
    """A weak cue that is always right, a strong one that agrees with the label as often as given,
    and eight features of noise."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (n,), generator=generator)
    place = torch.where(torch.rand(n, generator=generator) < agreement, label, 1 - label)
    noise = torch.randn(n, 10, generator=generator, dtype=torch.float64)
    x = noise.clone()
    x[:, 0] += 1.5 * (2 * label - 1)
    x[:, 1] = 0.3 * noise[:, 1] + 2 * (2 * place - 1)
    return x, label, 2 * label + place


def test_dfr_chooses_c_by_the_worst_group_of_the_other_half_and_averages(monkeypatch):
    """Every step written out, with a head that is easily fitted: class means."""

    def class_means(x, y, strength, classes):
        means = np.stack([x[y == kind].mean(axis=0) for kind in range(classes)])
        means[:, 1] *= strength  # of the misleading cue
        return means, -np.square(means).sum(axis=1) / 2

    monkeypatch.setattr(layers, "_l1_logistic", class_means)
    x, label, group = toy(160, 0.8, 3)
    strengths = (5.0, 0.1)
    options = {"classes": 2, "refits": 3, "strengths": strengths, "seed": 4}
    layer, tried = balanced_layer(x, label, group, **options)
    mean, deviation, draw = x.mean(dim=0), x.std(dim=0, correction=0), np.random.default_rng(4)
    z, y, member = ((x - mean) / deviation).numpy(), label.numpy(), group.numpy()

    def drawn(member):
        return [draw.permutation(np.flatnonzero(member == kind)) for kind in range(4)]

    def subset(member):
        size = np.bincount(member).min()
        return np.concatenate([rows[:size] for rows in drawn(member)])

    halves = drawn(member)
    first = np.concatenate([rows[: len(rows) // 2] for rows in halves])
    second = np.concatenate([rows[len(rows) // 2 :] for rows in halves])
    expected = {}
    for strength in strengths:
        rows = first[subset(member[first])]
        weight, bias = class_means(z[rows], y[rows], strength, 2)
        right = (z[second] @ weight.T + bias).argmax(axis=1) == y[second]
        expected[strength] = min(right[member[second] == kind].mean() for kind in range(4))
    assert tried == pytest.approx(expected) and tried[5.0] < tried[0.1]
    rows = [subset(member) for _ in range(3)]
    fits = [class_means(z[each], y[each], 0.1, 2) for each in rows]
    logits = np.mean([z @ weight.T + bias for weight, bias in fits], axis=0)
    assert_close(layer(x), torch.from_numpy(logits), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("labels", "groups", "message"),
    [
        ([0, 0, 0, 0], [0, 0, 1, 1], "all 2 classes"),
        ([0, 1, 0, 1], [0, 0, 0, 1], "at least two"),
    ],
)
def test_data_that_cannot_balance_is_refused(labels, groups, message):
    with pytest.raises(BadOption, match=message):
        balanced_layer(torch.randn(4, 3), torch.tensor(labels), torch.tensor(groups), classes=2)


@pytest.mark.parametrize(
    ("family", "last"),
    [("timm_mean", "head"), ("hf_dinov2", "classifier"), ("torchvision_pre_logits", "heads")],
)
def test_features_are_what_the_last_layer_reads(family, last):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native)
    read = getattr(native.module, last)(features(model, images))
    assert_close(read, native.forward(images), atol=1e-10, rtol=0)
    assert_close(features(model, images.float()), features(model, images), atol=1e-5, rtol=1e-5)


def test_the_new_head_is_part_of_the_native_model(tmp_path):
    native = tiny("hf_vit", dtype=torch.float32)
    model, images = view(native, check=False), pictures(native, batch=42)
    labels, groups = torch.arange(42) % 7, torch.arange(42) // 7 // 4  # four and two of each class
    groups = torch.stack([labels, groups], dim=1)
    expected, _ = balanced_layer(features(model, images), labels, groups, classes=7, seed=3)
    new = with_last_layer(model, expected)
    with sc.background.ablate(model, [(1, 0)]):
        cut = features(model, images)
        assert_close(model.module.classifier(cut.float()), model(images), atol=1e-5, rtol=1e-4)
    assert_close(new.module.classifier.weight, expected.weight.float())
    assert_close(new.module.classifier.bias, expected.bias.float())
    assert (new(images) - model(images)).abs().max() > 1e-2
    again = sc.load(str(export(new, [(0, 1)], tmp_path)))
    with sc.background.ablate(new, [(0, 1)]):
        assert_close(again(images), new(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["sigmoid texts", "prototypes", "no bias"])
def test_the_old_last_layer_reads_features_as_the_model_does(kind):
    native = tiny("hf_siglip" if kind == "sigmoid texts" else "timm_registers")
    images = pictures(native)
    if kind == "sigmoid texts":
        model = view(native, check=False)
        assert last_layer(model).bias[0] != 0
    else:
        width = native.module.embed_dim
        head = torch.randn(5, width, dtype=torch.float64)
        if kind == "no bias":
            head = torch.nn.Linear(width, 5, bias=False).double()
        around = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "size": native.size}
        model = sc.wrap(native.module, head=head, pool="cls", check=False, **around)
    layer = last_layer(model)
    assert_close(layer(features(model, images)), model(images), atol=1e-9, rtol=0)
    if kind != "sigmoid texts":
        assert_close(with_last_layer(model, layer)(images), model(images), atol=1e-9, rtol=0)
