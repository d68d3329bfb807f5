"""Last-layer retraining: better on the worst group than the plain model, and a model that can be
shipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.testing import assert_close

import seecause as sc
from seecause.background import baselines, export, retrain_last_layer
from seecause.background.baselines import (
    _balanced,
    _halves,
    _logistic,
    features,
    fit_head,
    last_layer,
    with_last_layer,
)
from seecause.errors import BadOption
from seecause.metrics.accuracy import group_accuracy
from tests.helpers import view
from tests.tiny import pictures, tiny


def toy(n: int, agreement: float, seed: int):
    """A weak cue that is always right and a strong one that agrees with the label as often as said;
    eight features of noise."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (n,), generator=generator)
    place = torch.where(torch.rand(n, generator=generator) < agreement, label, 1 - label)
    noise = torch.randn(n, 10, generator=generator, dtype=torch.float64)
    x = noise.clone()
    x[:, 0] += 1.5 * (2 * label - 1)
    x[:, 1] = 0.3 * noise[:, 1] + 2 * (2 * place - 1)
    return x, label, 2 * label + place


def worst(weight, bias, x, label, group):
    return group_accuracy((x @ weight.T + bias).argmax(dim=1) == label, group).worst


def test_it_beats_the_plain_head_on_the_worst_group():
    train, held, test = toy(2000, 0.98, 0), toy(600, 0.8, 1), toy(4000, 0.5, 2)
    plain = [
        torch.from_numpy(part) for part in _logistic(train[0].numpy(), train[1].numpy(), 1.0, 2)
    ]
    result = fit_head(*held, classes=2)
    before, after = worst(*plain, *test), worst(result.weight, result.bias, *test)
    assert after > before + 0.2 and after > 0.85
    assert result.strength in result.tried and len(result.tried) == 7
    assert (
        result.weight[1, 1].abs() < result.weight[1, 0].abs()
    )  # the cue that misleads is turned down


def test_two_classes_share_the_intercept_of_one_logit():
    """Their difference is scikit-learn's own decision, where classes are not as many."""
    x, label, _ = (part.numpy() for part in toy(200, 0.5, 0))
    x, label = x[:120] + 1, (label * (x[:, 2] > -0.5))[:120]
    weight, bias = _logistic(x, label, 0.3, 2)
    model = LogisticRegression(C=0.3, l1_ratio=1.0, solver="liblinear", max_iter=1000).fit(x, label)
    assert abs(model.intercept_[0]) > 0.1
    logits = x @ weight.T + bias
    decision = model.decision_function(x)  # coordinate descent in an order by chance
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], decision, atol=0.02)


def test_what_chooses_the_strength_is_not_what_was_fitted():
    member = np.repeat([0, 1, 2], [10, 7, 4])
    first, second = _halves(member, np.random.default_rng(0))
    assert sorted([*first, *second]) == list(range(21))
    assert np.bincount(member[first]).tolist() == [5, 3, 2]
    rows = _balanced(member, np.random.default_rng(1))
    assert np.bincount(member[rows]).tolist() == [4, 4, 4] and len(set(rows)) == 12


def test_a_strength_is_chosen_by_the_worst_group_and_heads_of_balanced_subsets_are_averaged(
    monkeypatch,
):
    """Every step written out, with a head that is easily fitted: class means."""

    def class_means(x, y, strength, classes):
        means = np.stack([x[y == kind].mean(axis=0) for kind in range(classes)])
        means[:, 1] *= strength  # of the cue that misleads
        return means, -np.square(means).sum(axis=1) / 2

    monkeypatch.setattr(baselines, "_logistic", class_means)
    x, label, group = toy(160, 0.8, 3)
    result = fit_head(x, label, group, classes=2, refits=3, strengths=(5.0, 0.1), seed=4)
    mean, deviation, draw = x.mean(dim=0), x.std(dim=0, correction=0), np.random.default_rng(4)
    z, y, member = ((x - mean) / deviation).numpy(), label.numpy(), group.numpy()
    first, second = _halves(member, draw)
    tried = {}
    for strength in (5.0, 0.1):
        rows = first[_balanced(member[first], draw)]
        weight, bias = class_means(z[rows], y[rows], strength, 2)
        right = (z[second] @ weight.T + bias).argmax(axis=1) == y[second]
        tried[strength] = min(right[member[second] == kind].mean() for kind in range(4))
    assert result.tried == pytest.approx(tried) and tried[5.0] < tried[0.1]
    assert result.strength == 0.1
    fits = []
    for _ in range(3):
        rows = _balanced(member, draw)
        fits.append(class_means(z[rows], y[rows], 0.1, 2))
    logits = np.mean([z @ weight.T + bias for weight, bias in fits], axis=0)
    assert_close(x @ result.weight.T + result.bias, torch.from_numpy(logits), atol=1e-9, rtol=0)


def test_a_feature_that_never_varies_says_nothing():
    """A patch of padding, a dead unit: it has no deviation to be divided by."""
    draw = torch.Generator().manual_seed(0)
    labels, groups = torch.arange(40) % 2, torch.arange(40) // 20
    varied = torch.randn(40, 3, generator=draw) + labels[:, None]
    constant = torch.cat([varied, torch.full((40, 1), 7.0)], dim=1)
    head = fit_head(constant, labels, groups, classes=2, refits=2)
    assert (head.weight[:, 3] == 0).all() and (head.weight[:, :3] != 0).any()
    assert head.bias.isfinite().all() and head.tried[head.strength] > 0.5


def test_three_classes_and_several_group_columns():
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(240) % 3
    x = torch.randn(
        240, 6, generator=generator, dtype=torch.float64
    ) + 3 * torch.nn.functional.one_hot(label, 6)
    result = fit_head(
        x,
        label,
        torch.stack([label, torch.arange(240) // 120], dim=1),
        classes=3,
        refits=3,
        strengths=(1.0, 0.1),
    )
    assert (
        result.weight.shape == (3, 6)
        and ((x @ result.weight.T + result.bias).argmax(dim=1) == label).double().mean() > 0.9
    )


@pytest.mark.parametrize(
    ("family", "last"),
    [("timm_mean", "head"), ("hf_dinov2", "classifier"), ("torchvision_pre_logits", "heads")],
)
def test_features_are_what_the_last_layer_reads(family, last):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native)
    assert_close(
        getattr(native.module, last)(features(model, images)),
        native.forward(images),
        atol=1e-10,
        rtol=0,
    )


def test_the_new_head_is_part_of_the_native_model(tmp_path):
    native = tiny("hf_vit", dtype=torch.float32)
    model, images = view(native, check=False), pictures(native, batch=42)
    labels, groups = torch.arange(42) % 7, torch.arange(42) // 7 // 4  # four and two of each class
    options = {"refits": 2, "strengths": (1.0, 0.1), "seed": 3}
    new = retrain_last_layer(model, images, labels, torch.stack([labels, groups], dim=1), **options)
    expected = fit_head(
        features(model, images),
        labels,
        torch.stack([labels, groups], dim=1),
        classes=7,
        **options,
    )
    with sc.background.ablate(model, [(1, 0)]):
        cut = features(model, images)
        assert_close(model.module.classifier(cut.float()), model(images), atol=1e-5, rtol=1e-4)
    assert_close(new.module.classifier.weight, expected.weight.float())
    assert_close(new.module.classifier.bias, expected.bias.float())
    assert (new(images) - model(images)).abs().max() > 1e-2
    again = sc.load(str(export(new, [(0, 1)], tmp_path)))
    with sc.background.ablate(new, [(0, 1)]):
        assert_close(again(images), new(images), atol=1e-4, rtol=1e-4)


def test_a_zero_shot_model_gets_a_linear_head():
    native = tiny("hf_clip")
    model, images = view(native, check=False), pictures(native, batch=20)
    labels = torch.arange(20) % 5
    new = retrain_last_layer(model, images, labels, labels, refits=1, strengths=(1.0,))
    result = fit_head(
        features(model, images), labels, labels, classes=5, refits=1, strengths=(1.0,)
    )
    assert_close(
        new(images), features(model, images) @ result.weight.T + result.bias, atol=1e-8, rtol=0
    )
    assert new.classes == model.classes


def test_the_native_last_layer_is_the_one_that_answers_alone():
    for family, name in (("torchvision_vit", "heads.head"), ("hf_vit", "classifier")):
        module = tiny(family).module
        assert baselines._own_classifier(module) is module.get_submodule(name)
    assert baselines._own_classifier(tiny("timm_distilled").module) is None  # two, averaged


def test_the_old_last_layer_of_sigmoid_texts_has_their_bias():
    native = tiny("hf_siglip")
    model, images = view(native, check=False), pictures(native)
    layer = last_layer(model)
    assert layer.bias[0] != 0
    assert_close(layer(features(model, images)), model(images), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", ["prototypes", "no bias"])
def test_the_old_last_layer_reads_features_as_the_model_does(kind):
    native = tiny("timm_registers")
    images, width = pictures(native), native.module.embed_dim
    head = torch.randn(5, width, dtype=torch.float64)
    if kind == "no bias":
        head = torch.nn.Linear(width, 5, bias=False).double()
    around = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "size": native.size}
    model = sc.wrap(native.module, head=head, pool="cls", check=False, **around)
    layer = last_layer(model)
    assert_close(layer(features(model, images)), model(images), atol=1e-9, rtol=0)
    same = with_last_layer(model, layer)
    assert_close(same(images), model(images), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("labels", "groups", "message"),
    [
        ([0, 0, 0, 0], [0, 0, 1, 1], "all 2 classes"),
        ([0, 1, 0, 1], [0, 0, 0, 1], "at least two"),
        ([0, 1, 0, 1], [0, 1], "one for each of the 4"),
    ],
)
def test_data_that_cannot_balance_is_refused(labels, groups, message):
    with pytest.raises(BadOption, match=message):
        fit_head(torch.randn(4, 3), torch.tensor(labels), torch.tensor(groups), classes=2)


@pytest.mark.parametrize("options", [{"refits": 0}, {"strengths": ()}, {"strengths": (1.0, 0.0)}])
def test_a_fit_that_is_none_is_refused(options):
    labels, groups = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    with pytest.raises(BadOption, match="at least one refit and strengths above 0"):
        fit_head(torch.randn(4, 3), labels, groups, classes=2, **options)


def test_groups_that_hide_a_class_are_refused_in_words():
    """A balanced half of groups that say nothing of the class may lack one."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=draw, dtype=torch.float64)
    groups = (torch.arange(40) % 20 == 0).long()  # two pictures, one in each half
    for classes in (2, 3):
        with pytest.raises(BadOption, match=r"groups=.*no picture of class"):
            fit_head(x, torch.arange(40) % classes, groups, classes=classes, refits=2)


def test_images_of_another_type_are_taken_along():
    native = tiny("timm_deit3")
    model, images, labels = view(native), pictures(native, batch=8), torch.arange(8) % 2
    assert_close(features(model, images.float()), features(model, images), atol=1e-5, rtol=1e-5)
    kept = sc.background.divprune(model, images.float(), keep=0.5)
    assert kept.logits.dtype == torch.float64
    gates = sc.background.head_gates(model, (images.float(), labels), fits=1, steps=1)
    assert gates.free.shape[0] == 1
