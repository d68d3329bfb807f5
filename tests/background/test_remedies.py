"""Remedies on a tiny transformer whose last layer took the shortcut."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.background import (
    Swapped,
    baselines,
    head_remedies,
    interchange,
    penalised,
    score,
    training_remedies,
)
from seecause.background._remedies import Lesson, find_remedy, remedies
from seecause.background.baselines import last_layer
from seecause.background.head_remedies import _last_versions, without
from seecause.background.images import logits_of
from seecause.background.last_layer import group_dro, new_layer
from seecause.background.transplant import on_pixels
from seecause.background.versions import JudgedAnswers, Material, origins, split_rows, worst_cell
from seecause.engine.forks import mean_carried
from seecause.errors import BadOption, UnknownName
from tests.background.repair_toys import fitted, scenes


@pytest.fixture(scope="module")
def biased():
    return fitted(scenes(64, usual=1.0))


@pytest.fixture(scope="module")
def lesson(biased):
    return made_lesson(biased)


def made_lesson(model, **options):
    cases = scenes(64, usual=0.8, seed=1)
    cases = dataclasses.replace(cases, images=cases.images.to(model.dtype))
    material = Material(cases, sc.eye("given", model=model).masks(cases))
    learn, choose = (material.take(rows) for rows in split_rows(cases.labels, (0.6, 0.4), seed=0))
    return Lesson(learn.lesson(4, seed=0), choose.test(model, 4, seed=0), **options)


def test_the_model_under_repair_has_something_to_repair(biased, lesson):
    judged = JudgedAnswers(lesson.choose, lesson.choose.logits(biased))
    assert judged.accuracy > 0.8 and judged.transplant_worst < 0.5
    assert judged.flips > 0.5 > judged.control_flips


def test_a_new_last_layer_is_fitted_on_versions_and_held_where_it_is_asked_for(biased, lesson):
    seen, labels = lesson.learn.features(biased).moved, lesson.learn.moved.labels
    for anchor, old in ((None, None), (False, None), (True, last_layer(biased))):
        mended = find_remedy("last-layer", {}).fit(biased, lesson, anchor=anchor)
        expected = new_layer(seen, labels, classes=2, strength=0.01, anchor=old)
        assert_close(mended.layer.weight, expected.weight)
        assert mended.details == {"versions": len(seen), "anchored": bool(anchor)}
    squares = find_remedy("last-layer", {}).fit(biased, lesson, form="squares", strength=1.0)
    expected = new_layer(seen, labels, classes=2, strength=1.0, form="squares")
    assert_close(squares.layer.bias, expected.bias)


@pytest.mark.parametrize("name", ["last-layer", "directions", "directions-refit"])
def test_last_layers_mend_it_without_a_group_label(biased, lesson, name):
    mended = find_remedy(name, {}).fit(biased, lesson)
    before = find_remedy("nothing", {}).fit(biased, lesson).judge(lesson.choose)
    after = mended.judge(lesson.choose)
    assert after.transplant_worst > before.transplant_worst + 0.3
    direct = JudgedAnswers(lesson.choose, lesson.choose.logits(mended.model))
    assert_close(after.logits.moved, direct.logits.moved.double(), atol=1e-4, rtol=1e-4)


def test_directions_tell_their_spectrum_and_what_random_ones_do(biased, lesson):
    details = find_remedy("directions", {}).fit(biased, lesson, most=2).details
    assert list(details["transplant-worst by rank"]) == ["1", "2"]
    spectrum = details["spectrum"]
    assert spectrum[0] == 1 and len(spectrum) == 3 and spectrum == sorted(spectrum, reverse=True)
    by_lot = details["transplant-worst of random directions"]
    assert len(by_lot) == 5 and max(by_lot) < max(details["transplant-worst by rank"].values())


def test_fine_tuning_keeps_the_best_epoch(biased, lesson):
    mended = find_remedy("fine-tune", {}).fit(biased, lesson, epochs=3, rate=3e-3, batch=32)
    curve = mended.details["transplant-worst by epoch"]
    worst = JudgedAnswers(lesson.choose, lesson.choose.logits(mended.model)).transplant_worst
    assert worst == pytest.approx(max(curve), abs=1e-4)
    assert not any(p.requires_grad for p in mended.model.module.parameters())
    assert worst > JudgedAnswers(lesson.choose, lesson.choose.logits(biased)).transplant_worst


@pytest.mark.parametrize("harmed", [False, True])  # a damaged epoch: it begins again
def test_a_killed_fine_tuning_goes_on_as_if_it_had_not_been(biased, tmp_path, monkeypatch, harmed):
    options = {"epochs": 3, "rate": 1e-3, "batch": 32, "patience": 9}
    fit = find_remedy("fine-tune", options).fit
    whole = fit(biased, made_lesson(biased), **options)
    lesson, save = made_lesson(biased, work=tmp_path), training_remedies._Run.save

    def killed(run, file):
        save(run, file)
        if run.epoch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(training_remedies._Run, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(biased, lesson, **options)
    monkeypatch.setattr(training_remedies._Run, "save", save)
    if harmed:
        file = tmp_path / training_remedies.EPOCH
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    resumed = fit(biased, lesson, **options)
    assert resumed.details == whole.details
    images = lesson.choose.pictures.images
    assert_close(logits_of(resumed.model, images), logits_of(whole.model, images))


def test_heads_go_by_held_out_versions(biased, lesson):
    mended = find_remedy("heads", {}).fit(biased, lesson, counts=(1, 2), pairs=8)
    tried = mended.details["transplant-worst by count"]
    judged = JudgedAnswers(lesson.choose, lesson.choose.logits(mended.model))
    assert judged.transplant_worst == pytest.approx(max(tried.values()), abs=1e-4)
    heads = mended.details["heads"]
    order = head_remedies.head_scores(biased, lesson, "interchange", 8).order()
    assert heads == order[: len(heads)] and tried[str(len(heads))] == max(tried.values())
    images = lesson.choose.pictures.images
    with sc.background.ablate(biased, heads):
        assert_close(logits_of(mended.model, images), logits_of(biased, images))
    by_cigma = find_remedy("heads", {}).fit(biased, lesson, by="cigma", counts=(1,), pairs=8)
    assert by_cigma.details.get("by", "cigma") == "cigma"


def test_heads_are_scored_by_what_is_asked_for(biased, lesson):
    part = lesson.learn
    source, last = _last_versions(part.moved.source_index, 4)
    pair = part.pictures.images[source], Swapped(part.moved[last])
    scores = head_remedies.head_scores(biased, lesson, "interchange", 4)
    effects = interchange(biased, *pair)
    assert torch.equal(scores.value, effects.background)
    assert torch.equal(scores.error, effects.background_error)
    masks = on_pixels(part.moved.shapes[source], tuple(pair[0].shape[-2:]))
    expected = penalised(score(biased, pair[0], masks, target=part.labels[source]))
    assert torch.equal(head_remedies.head_scores(biased, lesson, "cigma", 4).value, expected.value)
    swapped = dataclasses.replace(part.pictures, swapped=Swapped(part.pictures.images.flip(0)))
    paired = Lesson(Material(swapped, None).lesson(4, seed=0), lesson.choose)
    images = part.pictures.images[[0, len(swapped) - 1]]
    expected = score(biased, images, baseline=Swapped(images.flip(0)), guard=False)
    by_pairs = head_remedies.head_scores(biased, paired, "cigma", 2)
    assert_close(by_pairs.value, expected.value)


def test_what_a_head_carries_is_that_of_its_own_block(biased, lesson):
    block, images, inputs = biased.module.blocks[1], lesson.learn.moved[:64], []
    hook = block.attn.proj.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    with torch.no_grad():
        biased.module(images)
    hook.remove()
    width = block.attn.head_dim
    carried = head_remedies.carried_by(biased, lesson, 1, 2)
    expected = inputs[0][:, 0, 2 * width : 3 * width].double()  # the class token is read
    assert_close(carried[: len(images)], expected, atol=1e-5, rtol=1e-5)


def test_a_head_that_carries_its_mean_is_that_head_replaced(biased, lesson):
    """The last block's heads, whose mean over all tokens goes into the bias."""
    images = lesson.choose.pictures.images[:4]
    means = [by_token.mean(dim=0) for by_token in mean_carried(biased, images)]
    edited = without(biased, [(1, 2)], "mean", means)
    block = biased.module.blocks[1]
    width = block.attn.head_dim
    kept = {}
    hook = block.attn.proj.register_forward_pre_hook(lambda _, x: kept.update(x=x[0].clone()))
    biased.module(images)
    hook.remove()
    own = slice(2 * width, 3 * width)
    assert_close(means[1][2], kept["x"][:, :, own].mean(dim=(0, 1)))

    def replaced(_, inputs):
        changed = inputs[0].clone()
        changed[:, :, own] = means[1][2]
        return (changed,)

    hook = block.attn.proj.register_forward_pre_hook(replaced)
    slow = biased.module(images)
    hook.remove()
    assert_close(edited.module(images), slow, atol=1e-5, rtol=1e-5)


def test_directions_of_a_head_are_folded_into_its_projection(biased, lesson):
    mended = find_remedy("head-directions", {}).fit(biased, lesson, rank=1, pairs=8)
    (layer, head), width = mended.details["head"], 8
    assert mended.done.endswith(f"folded out of head ({layer}, {head}).")
    old, new = (m.module.blocks[layer].attn.proj.weight for m in (biased, mended.model))
    own = slice(head * width, (head + 1) * width)
    lost = (old - new)[:, own]
    assert torch.linalg.matrix_rank(lost, atol=1e-5) == 1
    others = torch.ones(old.shape[1], dtype=torch.bool)
    others[own] = False
    assert torch.equal(old[:, others], new[:, others])


def test_group_labels_are_used_where_they_may_be(biased, lesson, monkeypatch):
    def class_means(x, y, strength, classes):
        means = np.stack([x[y == kind].mean(axis=0) for kind in range(classes)])
        return strength * means, means.sum(axis=1)

    monkeypatch.setattr(baselines, "_logistic", class_means)
    seen, labels = lesson.learn.features(biased).plain, lesson.learn.labels
    known = dataclasses.replace(lesson, groups=True, seed=3)
    codes = torch.tensor(lesson.learn.pictures.groups)
    robust = {"strength": 0.3, "steps": 4}
    expected = {
        "dfr": baselines.fit_head(seen, labels, codes, classes=2, refits=2, seed=3),
        "group-dro": group_dro(seen, labels, codes, classes=2, **robust),
    }
    for name, options in (("dfr", {"refits": 2}), ("group-dro", robust)):
        entry = find_remedy(name, options)
        with pytest.raises(BadOption, match="groups"):
            entry.fit(biased, lesson)
        mended = entry.fit(biased, known, **options)
        assert_close(mended.layer.weight, expected[name].weight)
        assert_close(mended.layer.bias, expected[name].bias)
        assert f"on {len(seen)} pictures with group labels" in mended.done


@pytest.mark.slow
def test_ifam_is_a_remedy_where_it_is_asked_for(biased, lesson):
    setting = ((2.0, 1.0, True),)
    mended = find_remedy("ifam", {}).fit(biased, lesson, epochs=1, parts=2, settings=setting)
    assert mended.judge(lesson.choose).logits.plain.shape[1] == 2


@pytest.mark.parametrize("whole", [True, False])
def test_ifam_learns_all_weights_or_stage_2_alone_at_a_falling_pace(
    biased, lesson, monkeypatch, whole
):
    paces, done, real = [], [], training_remedies.set_pace
    monkeypatch.setattr(
        training_remedies,
        "set_pace",
        lambda groups, pace: paces.append(pace) or real(groups, pace),
    )
    few = lesson.learn.pictures.take(torch.arange(6))
    small = dataclasses.replace(lesson, learn=dataclasses.replace(lesson.learn, pictures=few))
    view = training_remedies._trained(biased, small, (2.0, 0.3, whole), 2, 2, 1e-3, 4, done.append)
    assert paces == pytest.approx([0.5 * (1 + math.cos(math.pi * n / 4)) for n in range(4)])
    assert done == [1, 1] and view.name == f"iFAM of {biased.name}"
    old = biased.module.blocks[0].attn.qkv.weight
    first, second = (stage.tower for stage in (view.module.stage1, view.module.stage2))
    assert torch.equal(first.native.blocks[0].attn.qkv.weight, old) != whole
    assert not torch.equal(second.native.blocks[0].attn.qkv.weight, old)
    assert torch.equal(biased.module.blocks[0].attn.qkv.weight, old)


def test_remedies_are_known_by_name_and_their_options_checked():
    assert {"nothing", "last-layer", "fine-tune", "heads", "ifam"} <= set(remedies())
    with pytest.raises(UnknownName, match="last-layer"):
        find_remedy("last-layr", {})
    with pytest.raises(BadOption, match="strength"):
        find_remedy("last-layer", {"strenght": 1})


def test_small_cells_are_pooled_before_the_worst_is_taken():
    labels = torch.tensor([0] * 10 + [1] * 12)
    donors = torch.tensor([0] * 10 + [0] * 2 + [1] * 10)
    right, each = torch.ones(22, dtype=torch.bool), torch.arange(22)
    right[10:12] = False  # a cell of two
    assert worst_cell(right, labels, donors, each, fewest=2) == 0.0
    assert worst_cell(right, labels, donors, each, fewest=3) == pytest.approx(10 / 12)  # its class
    assert worst_cell(right, labels, donors, each, fewest=13) == pytest.approx(20 / 22)  # all
    wrong = ~right
    wrong[0] = True  # of class 0 one in ten is right, of the rest of class 1 none
    assert worst_cell(wrong, labels, donors, each, fewest=3) == 0.0


def test_a_cell_is_as_large_as_it_has_pictures_not_versions():
    labels, donors = torch.zeros(24, dtype=torch.long), torch.tensor([0] * 8 + [1] * 16)
    right = donors == 1  # the cell of eight versions is all wrong
    few = torch.cat([torch.arange(2).repeat(4), torch.arange(2, 10).repeat(2)])
    assert worst_cell(right, labels, donors, few, fewest=3) == pytest.approx(16 / 24)
    assert worst_cell(right, labels, donors, torch.arange(24), fewest=3) == 0.0


def test_pictures_of_one_origin_count_as_one_when_cells_are_judged(biased, lesson):
    judged = JudgedAnswers(lesson.choose, lesson.choose.logits(biased))
    right, _, _ = judged._versions()
    everything, pictures = float(right.double().mean()), lesson.choose.pictures
    assert judged.transplant_worst < everything - 0.1
    ids = tuple(f"scene~{place}.png" for place in range(len(pictures)))  # versions of one
    renamed = dataclasses.replace(pictures, ids=ids)
    together = dataclasses.replace(lesson.choose, pictures=renamed, memo={})
    assert JudgedAnswers(together, judged.logits).transplant_worst == pytest.approx(everything)


def test_versions_of_a_picture_are_never_torn_apart():
    names = [f"{kind}{number}~{version}.png" for kind in "ab" for number in range(20)
             for version in range(3)]  # fmt: skip
    labels = torch.tensor([0] * 60 + [1] * 60)
    parts = split_rows(labels, (0.6, 0.2, 0.2), seed=1, pictures=origins(names))
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(120))
    assert [len(rows) for rows in parts] == [72, 24, 24]
    pictures = [{names[row].split("~")[0] for row in rows.tolist()} for rows in parts]
    assert not (pictures[0] & pictures[1] or pictures[0] & pictures[2] or pictures[1] & pictures[2])


def test_parts_are_dealt_class_by_class_and_leave_nobody_out():
    labels = torch.tensor([0] * 30 + [1] * 10)
    parts = split_rows(labels, (0.6, 0.2, 0.2), seed=3)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(40))
    assert [int((labels[rows] == 1).sum()) for rows in parts] == [6, 2, 2]
    again = split_rows(labels, (0.6, 0.2, 0.2), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_heads_are_scored_on_versions_that_differ_from_their_pictures():
    source = torch.arange(6).repeat(2)  # of pairs: the pictures, then their other versions
    pictures, versions = _last_versions(source, 3)
    assert pictures.tolist() == [0, 2, 5] and versions.tolist() == [6, 8, 11]


def test_mean_heads_are_measured_on_pictures_spread_over_all(biased, lesson, monkeypatch):
    seen, images = [], lesson.learn.pictures.images
    monkeypatch.setattr(
        head_remedies, "mean_carried", lambda m, x: seen.append(x) or mean_carried(m, x)
    )
    fit = find_remedy("heads", {}).fit
    fit(biased, lesson, counts=(1,), pairs=2)
    assert not seen
    fit(biased, lesson, counts=(1,), pairs=2, operator="mean")
    assert torch.equal(seen[0], images[[0, len(images) - 1]])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fine-tune", {"epochs": 0}),
        ("fine-tune", {"batch": 0}),
        ("heads", {"counts": (0, 1)}),
        ("heads", {"counts": ()}),
        ("head-directions", {"rank": 0}),
    ],
)
def test_counts_start_at_one(biased, lesson, name, options):
    with pytest.raises(BadOption, match=next(iter(options))):
        find_remedy(name, options).fit(biased, lesson, **options)
