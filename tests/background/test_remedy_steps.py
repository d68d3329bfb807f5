"""Remedies inside the model, step by step: training as a plain loop, heads as a hook."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from seecause.background import head_remedies, training_remedies
from seecause.background._export import edited_copy
from seecause.background._remedies import Lesson, Mended, read_remedy, write_remedy
from seecause.background.heads import HeadScores
from seecause.background.last_layer import Directions
from seecause.background.versions import PairVersions
from seecause.errors import BadOption, NotDefined, SeecauseError
from tests.background.repair_toys import numbers, plain_vit, scenes, wrapped


class Written:
    """A lesson whose held-out versions say what is written."""

    def __init__(self, curve, seed=2, labels=(0, 0, 1, 0, 0)):
        labels = torch.tensor(labels)
        images = numbers(0, len(labels), 3, 32, 32)
        place = torch.arange(len(labels))
        self.learn = SimpleNamespace(
            moved=PairVersions(images, labels, labels, place),
            pictures=SimpleNamespace(images=images),
            labels=labels,
        )
        self.choose = SimpleNamespace(logits=lambda view: view)
        self.curve, self.told, self.views = list(curve), [], []
        self.seed, self.work = seed, None

    def worst(self, view):
        self.views.append(view)
        return self.curve[len(self.views) - 1]

    def best(self, views):
        return Lesson.best(self, views)

    @contextmanager
    def progress(self, what, total):
        self.told.append((what, total))
        yield self.told.append


def trained_one_by_one(module, lesson, *, epochs, of, rate, batch):
    """Each version once an epoch; the pace rises for a twentieth of the way and falls to none."""
    module, versions = copy.deepcopy(module).requires_grad_(True), lesson.learn.moved
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.05)
    counts = torch.bincount(versions.labels).tolist()
    total = len(versions)
    for epoch in range(epochs):
        draw = torch.Generator().manual_seed(1000 * lesson.seed + epoch)
        batches = torch.randperm(total, generator=draw).split(batch)
        for number, rows in enumerate(batches):
            done = (epoch + number / len(batches)) / of
            optimizer.param_groups[0]["lr"] = rate * min(1.0, 20 * done + 0.05) * (1 - done)
            loss = 0.0
            for row, turned in zip(
                rows.tolist(), torch.rand(len(rows), generator=draw), strict=True
            ):
                image, label = versions.images[row], versions.labels[row]
                image = image.flip(2) if turned < 0.5 else image  # left for right
                nll = F.cross_entropy(module(image[None]), label[None])
                loss = loss + total / (2 * counts[int(label)]) * nll / len(rows)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    return module.requires_grad_(False)


def loud_vit():
    """Whose gradients are longer than what they are clipped to."""
    module = plain_vit().double().eval()
    with torch.no_grad():
        module.head.weight *= 20
    return module


def test_fine_tuning_is_a_plain_loop_that_keeps_its_first_best_epoch():
    module = loud_vit()
    before, model = copy.deepcopy(module.state_dict()), wrapped(module)
    lesson = Written([0.2, 0.5, 0.5, 0.4, 0.9])
    options = {"rate": 1e-3, "batch": 2}
    mended = training_remedies.fine_tune(model, lesson, epochs=9, patience=2, **options)
    slow = trained_one_by_one(module, lesson, epochs=2, of=9, **options)
    assert_close(mended.model.module.state_dict(), slow.state_dict(), atol=1e-9, rtol=1e-9)
    assert mended.done == "Fine-tuned on 5 versions: epoch 2 of 4 (rate 0.001)."
    assert mended.details == {
        "epochs": 4, "rate": 1e-3, "versions": 5, "transplant-worst by epoch": [0.2, 0.5, 0.5, 0.4]
    }  # fmt: skip
    assert lesson.told == [("fine-tuning", 45), 0, *[2, 2, 1] * 4]
    assert_close(module.state_dict(), before, atol=0, rtol=0)  # the model itself is as it was
    assert not any(weight.requires_grad for weight in mended.model.module.parameters())


def test_training_that_runs_away_is_an_error():
    options = {"epochs": 1, "batch": 1, "rate": 1e300}
    with pytest.raises(SeecauseError, match="not finite"):
        training_remedies.fine_tune(wrapped(loud_vit()), Written([0.1]), **options)


@pytest.mark.parametrize(
    ("curve", "stale"),
    [
        ([], False),
        ([0.5], False),
        ([0.5, 0.4], False),
        ([0.5, 0.4, 0.5], True),
        ([0.1, 0.5, 0.5], False),
    ],
)
def test_training_stops_when_the_best_is_so_many_epochs_ago(curve, stale):
    assert training_remedies._stale(curve, 2) is stale


def test_ifam_gets_its_setting_its_pictures_and_its_paces(monkeypatch):
    calls, groups, model = [], [], wrapped(plain_vit().eval())
    real = training_remedies.parameter_groups

    class Losses:
        def __init__(self, net, weights):
            self.net, self.weights = net, weights

        def __call__(self, shown, labels, rows, seed, step):
            calls.append((shown, labels, rows, seed, step, self.weights))
            return (sum(weight.sum() for weight in self.net.parameters()) * 0,)

    def paced(net, *given, **factors):
        groups.append((given, factors))
        return real(net, *given, **factors)

    monkeypatch.setattr(training_remedies, "TrainingLosses", Losses)
    monkeypatch.setattr(training_remedies, "parameter_groups", paced)
    lesson = Written([])
    lesson.learn.pictures.images = images = lesson.learn.pictures.images.float()
    view = training_remedies._trained(
        model, lesson, (2.0, 0.3, True), 2, 1, 1e-3, 3, lambda _: None
    )
    assert view.classes == model.classes and len(calls) == 2
    assert groups == [
        ((1e-3, 0.05), {"prototype_factor": 30.0, "head_factor": pytest.approx(10.0)})
    ]
    assert torch.cat([call[2] for call in calls]).sort().values.tolist() == list(range(5))
    for step, (shown, labels, rows, seed, at, weights) in enumerate(calls):
        assert (seed, at) == (2, step) and (weights.background, weights.total_variation) == (2, 0.3)
        assert labels.equal(lesson.learn.labels[rows])
        for picture, row in zip(shown, rows.tolist(), strict=True):
            assert picture.equal(images[row]) or picture.equal(images[row].flip(2))
    assert any(not picture.equal(images[row]) for call in calls
               for picture, row in zip(call[0], call[2].tolist(), strict=True))  # fmt: skip


def scores_of(monkeypatch, *values):
    """Scores of two blocks of four heads, by what is asked for."""
    asked = []

    def head_scores(model, lesson, by, pairs):
        asked.append((by, pairs))
        return HeadScores(torch.tensor(values).double().view(2, 4), None)

    monkeypatch.setattr(head_remedies, "head_scores", head_scores)
    return asked


def test_heads_go_from_the_highest_score_above_zero(monkeypatch):
    model, removed = wrapped(plain_vit().eval()), []
    asked = scores_of(monkeypatch, 0.1, -1, 0, 0.4, 0.3, -2, 0, 0)
    monkeypatch.setattr(
        head_remedies, "without", lambda *given: removed.append(given[1:3]) or len(removed)
    )
    lesson = Written([0.1, 0.7, 0.5])
    lesson.learn.pictures.images = lesson.learn.pictures.images.float()
    options = {"by": "cigma", "operator": "mean", "pairs": 3}
    mended = head_remedies.remove_heads(model, lesson, counts=(8, 1, 2, 4), **options)
    order = [(0, 3), (1, 0), (0, 0)]
    assert asked == [("cigma", 3)]
    assert removed == [(order[:1], "mean"), (order[:2], "mean"), (order, "mean")]
    assert mended.model == 2 and mended.done == "2 heads removed (cigma, mean): (0, 3), (1, 0)."
    assert mended.details["heads"] == order[:2] and mended.details["operator"] == "mean"
    assert mended.details["transplant-worst by count"] == {"1": 0.1, "2": 0.7, "3": 0.5}
    scores_of(monkeypatch, *[0.0] * 4, *[-1.0] * 4)
    nothing = head_remedies.remove_heads(model, lesson)
    assert nothing.model is model and "No head was removed: interchange" in nothing.done


@pytest.mark.parametrize("rank", [1, 2])
def test_a_blind_head_stays_at_its_mean_along_directions(rank):
    module, images = plain_vit().eval(), scenes(4).images
    model = wrapped(module)
    vectors, mean = torch.linalg.qr(numbers(1, 8, 3)).Q.T, numbers(2, 8)
    directions = Directions(vectors, torch.ones(3).double(), mean)
    edited = edited_copy(model, head_remedies._fold_into(model, 1, 2, directions, rank))
    flat, own = vectors[:rank].float(), slice(16, 24)

    def blinded(_, inputs):
        changed = inputs[0].clone()
        away = changed[..., own] - mean.float()
        changed[..., own] -= away @ flat.T @ flat
        return (changed,)

    module.blocks[1].attn.proj.register_forward_pre_hook(blinded)
    with torch.no_grad():
        assert_close(edited.module(images), module(images), atol=1e-5, rtol=1e-5)


def test_the_head_that_carries_most_is_made_blind_to_what_changes_within_pictures(monkeypatch):
    model, folded = wrapped(plain_vit().eval()), []
    asked = scores_of(monkeypatch, -3, -1, -2, -4, -5, -6, -7, -8)
    carried, heads = numbers(3, 6, 8), []
    monkeypatch.setattr(
        head_remedies, "carried_by", lambda *given: heads.append(given[2:]) or carried
    )
    monkeypatch.setattr(head_remedies, "edited_copy", lambda model, edit: edit)
    monkeypatch.setattr(
        head_remedies, "_fold_into", lambda *given: folded.append(given[1:]) or len(folded)
    )
    lesson = Written([0.1, 0.3, 0.2, 0.9])
    source = torch.tensor([0, 0, 1, 1, 2, 2])
    lesson.learn.moved = replace(lesson.learn.moved, source_index=source)
    mended = head_remedies.blind_head(model, lesson, pairs=5)
    assert asked == [("interchange", 5)] and heads == [(0, 1)]
    assert [(layer, head, rank) for layer, head, _, rank in folded] == [
        (0, 1, 1), (0, 1, 2), (0, 1, 4)
    ]  # fmt: skip
    moved = carried - carried.view(3, 2, 8).mean(dim=1).repeat_interleave(2, dim=0)
    assert_close(folded[0][2].values, torch.linalg.svdvals(moved))
    assert mended.model == 2 and mended.details["rank"] == 2
    assert mended.done == "2 of 8 directions folded out of head (0, 1)."
    assert head_remedies.blind_head(model, lesson, rank=8).details["rank"] == 8
    with pytest.raises(BadOption, match="1 to 8 directions of a head"):
        head_remedies.blind_head(model, lesson, rank=9)


def test_a_projection_without_bias_holds_no_mean():
    module = plain_vit().eval()
    module.blocks[0].attn.proj.bias = None
    with pytest.raises(NotDefined, match="no bias to hold it"):
        head_remedies.without(wrapped(module), [(0, 1)], "mean", [torch.ones(4, 8)] * 2)


@pytest.mark.parametrize("head", [False, True])
def test_a_kept_remedy_is_what_was_made_and_leaves_the_model_alone(tmp_path, head):
    options = {"head": nn.Linear(32, 2), "pool": "cls"} if head else {}
    model = wrapped(plain_vit().eval(), **options)
    made = edited_copy(model, lambda block, at: block.attn.proj.weight.data.mul_(at + 2))
    if head:
        made.extra.weight.data.mul_(3)
    (tmp_path / training_remedies.EPOCH).write_text("an epoch that is over")
    write_remedy(tmp_path, Mended(made, "Done.", {"a": 1}), 2.5)
    assert not (tmp_path / training_remedies.EPOCH).exists()
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    extra = model.extra.weight.clone() if head else None
    again, seconds = read_remedy(model, tmp_path)
    assert (again.done, again.details, seconds) == ("Done.", {"a": 1}, 2.5)
    images = scenes(2).images
    assert_close(again.model(images), made(images), atol=0, rtol=0)
    assert_close(dict(model.module.state_dict()), before, atol=0, rtol=0)
    assert not head or model.extra.weight.equal(extra)
