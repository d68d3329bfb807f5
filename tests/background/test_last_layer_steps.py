"""Last layers: anchors and group DRO by arithmetic written out, ranks by answers written out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from seecause.background import last_layer as steps
from seecause.background._remedies import Lesson, find_remedy
from seecause.background.last_layer import (
    Directions,
    LastLayer,
    blind,
    change_directions,
    class_weights,
    group_dro,
    new_layer,
    random_directions,
)
from seecause.background.versions import VersionLogits
from seecause.errors import BadOption
from tests.background.repair_toys import numbers


def anchored(form, strength=0.5):
    """Features of classes 0 and 2 of four, and an old layer."""
    labels = torch.tensor([0] * 7 + [2] * 4)
    x = numbers(0, 11, 3) * torch.tensor([1.0, 2.0, 0.5]) + 3
    old = LastLayer(0.1 * numbers(1, 4, 3), numbers(2, 4))  # no class is out of reach
    return x, labels, old, new_layer(x, labels, classes=4, strength=strength, anchor=old, form=form)


def gradients(loss, weight, bias):
    weight, bias = weight.clone().requires_grad_(True), bias.clone().requires_grad_(True)
    return torch.autograd.grad(loss(weight, bias), (weight, bias))


@pytest.mark.parametrize("form", ["logistic", "squares"])
def test_an_anchored_layer_is_where_its_loss_is_flat(form):
    """C sum w nll + |W - anchor|^2 / 2 over standardised features; every old class competes."""
    x, labels, old, new = anchored(form)
    deviation = x.std(dim=0, correction=0)
    weights = torch.tensor([11 / 14] * 7 + [11 / 8] * 4).double()  # two classes occur
    assert_close(class_weights(labels, 4), weights)

    def loss(weight, bias):
        logits = x @ weight.T + bias
        ridge = ((weight - old.weight) * deviation).square().sum() / 2
        if form == "squares":
            wanted = torch.eye(4).double()[labels]
            return 0.5 * ((weights[:, None] * (wanted - logits).square()).sum() / 2) + ridge
        nll = logits.logsumexp(dim=1) - logits.gather(1, labels[:, None])[:, 0]
        return 0.5 * (weights * nll).sum() + ridge

    for slope in gradients(loss, new.weight, new.bias):
        assert slope[[0, 2]].abs().max() < 1e-5
    assert_close(new.weight[[1, 3]], old.weight[[1, 3]])
    assert_close(new.bias[[1, 3]], old.bias[[1, 3]])


def test_a_feature_that_never_changes_is_no_number_for_nobody():
    x = torch.cat([numbers(0, 8, 2), torch.full((8, 1), 5.0).double()], dim=1)
    layer = new_layer(x, torch.arange(8) % 2, classes=2)
    assert layer(x).isfinite().all() and not layer.weight[:, 2].any()


@pytest.mark.parametrize("steps_taken", [1, 2])
def test_the_first_steps_of_group_dro_are_those_of_its_equation(steps_taken):
    x, labels = numbers(0, 6, 2), torch.tensor([0, 0, 0, 1, 1, 1])
    groups = torch.tensor([[0, 0], [0, 0], [0, 0], [1, 0], [1, 0], [1, 7]])
    options = {"strength": 0.2, "rate": 0.3, "step_size": 0.7}
    layer = group_dro(x, labels, groups, classes=2, steps=steps_taken, **options)
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0)
    z, members = (x - mean) / deviation, [[0, 1, 2], [3, 4], [5]]
    weight, bias = (torch.zeros(2, n).double().requires_grad_(True) for n in (2, 1))
    optimizer, share = torch.optim.Adam([weight, bias], lr=0.3), torch.ones(3).double() / 3
    for _ in range(steps_taken):
        logits = z @ weight.T + bias[:, 0]
        nll = logits.logsumexp(dim=1) - logits.gather(1, labels[:, None])[:, 0]
        means = torch.stack([nll[rows].mean() for rows in members])
        share = share * (0.7 * means.detach()).exp()
        share = share / share.sum()
        optimizer.zero_grad()
        ((share * means).sum() + weight.square().sum() / (2 * 0.2 * 6)).backward()
        optimizer.step()
    slow = (z @ weight.T + bias[:, 0]).detach()
    assert_close(layer(x), slow)


def test_directions_are_of_pictures_with_versions_and_stay_at_the_mean_of_all():
    features = torch.tensor([[1.0, 0, 5], [3, 0, 5], [0, 9, 2]])  # the last has one version
    directions = change_directions(features, torch.tensor([4, 4, 1]))
    assert_close(directions.vectors[0].abs(), torch.tensor([1.0, 0, 0]).double())
    assert_close(directions.mean, torch.tensor([4 / 3, 3, 4]).double())
    assert directions.rank == 1
    with pytest.raises(BadOption, match="one version each"):
        change_directions(features, torch.arange(3))
    layer = LastLayer(torch.tensor([[2.0, 1, 1]]), torch.tensor([0.5]))
    folded = directions.fold(layer, 1)
    assert_close(folded.weight, torch.tensor([[0.0, 1, 1]]).double())
    assert_close(folded.bias, torch.tensor([0.5 + 2 * 4 / 3]).double())


def test_the_spectrum_may_fall_to_nothing():
    values = torch.tensor([3.0, 0.5, 0.0, 0.0]).double()
    assert Directions(torch.eye(4).double(), values, torch.zeros(4)).rank == 2
    assert Directions(torch.eye(1).double(), values[:1], torch.zeros(1)).rank == 1


class Written:
    """A lesson of which features are known, and how good a layer is."""

    def __init__(self, worst):
        self.worst_of, self.layers = worst, []
        plain, moved = numbers(0, 6, 5), numbers(1, 12, 5)
        rows = VersionLogits(plain, moved, None)
        self.seen = rows
        source = torch.arange(6).repeat_interleave(2)
        self.learn = SimpleNamespace(
            features=lambda model: rows,
            moved=SimpleNamespace(source_index=source, labels=source % 2),
            labels=torch.arange(6) % 2,
        )
        self.choose = SimpleNamespace(under=lambda model, layer: layer)

    def worst(self, layer):
        self.layers.append(layer)
        return self.worst_of[len(self.layers) - 1]


@pytest.fixture
def old(monkeypatch):
    layer = LastLayer(numbers(2, 3, 5), numbers(3, 3))
    monkeypatch.setattr(steps, "last_layer", lambda model: layer)
    monkeypatch.setattr(
        steps, "with_layer", lambda model, layer, done, details: (layer, done, details)
    )
    return layer


def directions_of(lesson):
    return change_directions(lesson.seen.moved, lesson.learn.moved.source_index)


def test_directions_are_folded_out_and_random_ones_out_of_the_old_layer(old):
    lesson = Written([0.3, 0.6, 0.5, 0.1, 0.2, 0.3, 0.4, 0.15])
    directions = directions_of(lesson)
    layer, done, details = steps.fold_directions(SimpleNamespace(n_classes=3), lesson, most=3)
    for rank, tried in enumerate(lesson.layers[:3], start=1):
        assert_close(tried.weight, directions.fold(old, rank).weight)
        assert_close(tried.bias, directions.fold(old, rank).bias)
    for seed, tried in enumerate(lesson.layers[3:]):
        control = blind(old, random_directions(2, 5, seed=seed), directions.mean)
        assert_close(tried.weight, control.weight)
        assert_close(tried.bias, control.bias)
    assert layer is lesson.layers[1] and done.startswith("2 of 5 directions")
    assert details == {
        "rank": 2,
        "rank of the spectrum": directions.rank,
        "transplant-worst by rank": {"1": 0.3, "2": 0.6, "3": 0.5},
        "transplant-worst of random directions": [0.1, 0.2, 0.3, 0.4, 0.15],
        "spectrum": pytest.approx(
            (directions.values / directions.values[0])[:4].tolist(), abs=1e-4
        ),
    }
    lesson = Written([0.3] * 6)
    assert steps.fold_directions(SimpleNamespace(n_classes=3), lesson, rank=3)[2]["rank"] == 3


@pytest.mark.parametrize(
    ("worst", "of_spectrum", "chosen"),
    [
        ([0.5, 0.5, 0.4], 2, 2),  # of equals the spectrum's
        ([0.5, 0.5, 0.4], 3, 1),  # else the lowest
        ([0.5, 0.6, 0.4], 1, 2),
    ],
)
def test_of_equal_ranks_that_of_the_spectrum_is_kept(worst, of_spectrum, chosen):
    lesson = Written(worst)
    values = torch.ones(6).double()
    values[of_spectrum:] = 0.01
    directions = Directions(torch.eye(6).double(), values, torch.zeros(6).double())
    layers = dict(enumerate("abc", start=1))
    rank, details = steps._best_rank(lesson, None, layers, directions)
    assert rank == chosen and details["rank of the spectrum"] == of_spectrum
    assert lesson.layers == list("abc")


@pytest.mark.parametrize("classes", [2, 3])
def test_a_refit_is_blind_to_directions_and_held_where_classes_lack(old, classes):
    lesson = Written([0.3, 0.6])
    directions = directions_of(lesson)
    model = SimpleNamespace(n_classes=classes)
    layer, done, _ = steps.fold_and_refit(model, lesson, most=2, strength=0.7)
    assert layer is lesson.layers[1] and "on 6 plain pictures" in done
    for rank, made in enumerate(lesson.layers, start=1):
        vectors, x = directions.vectors[:rank], lesson.seen.plain
        flat = x - ((x - directions.mean) @ vectors.T) @ vectors
        held = directions.fold(old, rank) if classes == 3 else None
        options = {"classes": classes, "strength": 0.7, "anchor": held}
        refit = new_layer(flat, lesson.learn.labels, **options)
        assert_close(made(x), refit(flat), atol=1e-6, rtol=1e-6)  # as if x were flat
        assert_close(
            made.weight @ vectors.T, torch.zeros(classes, rank).double(), atol=1e-9, rtol=0
        )


def test_a_layer_is_held_where_classes_lack_unless_told_otherwise(old):
    lesson = Written([])
    for classes, anchored in ((3, True), (2, False)):
        model = SimpleNamespace(n_classes=classes)
        _, _, details = steps.fit_last_layer(model, lesson)
        assert details == {"versions": 12, "anchored": anchored}


@pytest.mark.parametrize(
    ("rank", "most", "ranks"),
    [(None, 3, [1, 2, 3]), (None, 9, [1, 2, 3, 4]), (2, 1, [2]), (4, 1, [4])],
)
def test_ranks_are_those_asked_for_up_to_what_there_is(rank, most, ranks):
    assert steps._ranks(rank, most, 4) == ranks
    with pytest.raises(BadOption, match="1 to 4 directions"):
        steps._ranks(5, most, 4)


def test_of_equal_views_the_first_is_kept_and_each_is_told():
    worst = {"a": 0.2, "b": 0.51234, "c": 0.51234, "d": 0.4}
    lesson = SimpleNamespace(choose=SimpleNamespace(logits=worst.get), worst=lambda value: value)
    name, view, tried = Lesson.best(lesson, ((name, name) for name in worst))
    assert (name, view) == ("b", "b")
    assert tried == {"a": 0.2, "b": 0.5123, "c": 0.5123, "d": 0.4}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("heads", {"counts": (1, 0)}),
        ("fine-tune", {"rate": 0.0}),
        ("last-layer", {"strength": 0.0}),
        ("directions", {"most": 0}),
    ],
)
def test_options_that_are_none_are_refused_by_name(name, options):
    option = next(iter(options))
    with pytest.raises(BadOption, match=f"{name}.{option}"):
        find_remedy(name, options)
