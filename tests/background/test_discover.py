"""Discover: kinds of patches that turn pictures into a class, without anybody naming them."""

from __future__ import annotations

import csv
import importlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch
from typer.testing import CliRunner

import seecause as sc
from seecause.background import LabelledImages, Masks
from seecause.background.patch_kinds import (
    KindPlan,
    ObjectPatches,
    kinds_at,
    object_patches,
    pasted,
)
from seecause.background.versions import origins
from seecause.cli import app
from seecause.errors import BadOption

RED, SIDE = 2, 32  # a class, and pixels of a picture


def planted():
    """A transformer whose class token sees the colours of patches alone, averaged by how red they
    are: red patches turn any picture into class 2."""
    net = timm.models.VisionTransformer(
        img_size=SIDE, patch_size=8, num_classes=3, depth=1, embed_dim=8, num_heads=1,
        pos_embed="none", mlp_ratio=1.0,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        for norm in (net.blocks[0].norm1, net.blocks[0].norm2, net.norm):
            norm.weight.fill_(1.0)
        mean = 1 / 64
        for place, (channel, sign) in enumerate(
            [(0, 1), (0, -1), (1, 1), (1, -1), (2, 1), (2, -1)]
        ):
            net.patch_embed.proj.weight[place, channel] = sign * mean
        net.cls_token[..., 6], net.cls_token[..., 7] = 1.0, -1.0
        width = 8
        net.blocks[0].attn.qkv.weight[:width, 6:8] = torch.tensor([0.2, -0.2]).expand(width, 2)
        keys = net.blocks[0].attn.qkv.weight[width : 2 * width]
        keys[:, 0], keys[:, 2], keys[:, 4] = 1.0, -1.0, -1.0  # red, not green, not blue
        net.blocks[0].attn.qkv.weight[2 * width :] = torch.eye(width)
        net.blocks[0].attn.proj.weight.copy_(torch.eye(width))
        net.head.weight[0, 2], net.head.weight[1, 4] = 1.0, 1.0  # green, blue
        net.head.weight[2, 0], net.head.bias[2] = 4.0, -2.0
    return sc.wrap(net.eval(), mean=(0.5,) * 3, std=(0.5,) * 3, classes=("green", "blue", "red"))


def scenes(n=24):
    """Green and blue pictures; every third has a red patch and is labelled so."""
    draw = torch.Generator().manual_seed(0)
    raw = 0.3 * torch.rand(n, 3, SIDE, SIDE, generator=draw)
    number, spots = torch.arange(n), torch.zeros(n, 4, 4, dtype=torch.bool)
    labels = torch.where(number % 3 == 2, RED, number % 2)
    for place in range(n):
        raw[place, 1 + place % 2] += 0.5
        if labels[place] == RED:
            row, column = torch.randint(0, 4, (2,), generator=draw).tolist()
            spots[place, row, column] = True
            patch = raw[place, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
            patch[0], patch[1:] = 1.0, 0.0
    return raw, labels, spots


@pytest.fixture(scope="module")
def model():
    return planted()


@pytest.fixture(scope="module")
def pictures(model):
    raw, labels, _ = scenes()
    ids = tuple(map(str, range(len(raw))))
    return LabelledImages(model.preprocess.normalise(raw), labels, name="scenes", ids=ids)


@pytest.fixture(scope="module")
def found(model, pictures):
    return sc.discover(model, pictures, layers=[0, 1], kinds=4, top=2, trials=16)


def test_a_planted_patch_is_the_first_finding(model, pictures, found):
    assert (found.answers == pictures.labels).double().mean() > 0.9  # it learned the patch
    first = found.findings[0]
    assert (first.answer, first.name) == (RED, "red")
    assert first.flips > 0.9 and first.control < 0.1 and first.interval[0] > 0.5
    spots = scenes()[2].flatten(1)
    assert (first.sets & spots).sum() > 0.9 * first.sets.sum()
    assert first.patches < 1.2 and "red" in first.sentence()


def test_trials_that_sorted_kinds_out_do_not_count_for_them(found):
    """Who is chosen for a high number would have it twice."""
    assert [len(finding.trials) for finding in found.findings] == [16] * len(found.findings)


def test_findings_are_ranked_and_what_may_be_chance_is_left_out(found):
    effects = [finding.effect for finding in found.findings]
    assert effects == sorted(effects, reverse=True)
    trials = replace(
        found.findings[0].trials,
        flipped=torch.tensor([True, True, True, False]),
        control_flipped=torch.tensor([True, False, False, False]),
    )
    finding = replace(found.findings[0], trials=trials)
    assert finding.effect == 0.5 and "difference +50%" in finding.sentence()
    assert all(finding.interval[0] > 0 for finding in found.findings)


def test_known_objects_are_told_and_spared(model, pictures, found):
    assert found.findings[0].on_object is None
    truth = torch.zeros(len(pictures), SIDE, SIDE, dtype=torch.bool)
    truth[:, :8] = True  # the upper row of patches
    masked = replace(pictures, truth=Masks.given(truth))
    told = sc.discover(model, masked, layers=[0], kinds=4, top=2, trials=8)
    first = next(finding for finding in told.findings if finding.answer == RED)
    upper = (first.tokens[:, 1] < 4).double().mean()  # of a spot, its middle counts
    if first.extent == "all":
        upper = first.sets.unflatten(1, (4, 4))[:, 0].sum() / first.sets.sum()
    assert first.on_object == pytest.approx(float(upper))
    assert not first.trials.sets[:, 0].any()


def test_a_paste_is_a_quarter_at_most_where_objects_are_not_known(model, pictures, found):
    most = max(int(f.trials.sets.flatten(1).sum(dim=1).max()) for f in found.findings)
    assert most <= 4
    large = sc.discover(model, pictures, layers=[0], kinds=2, top=2, trials=4, area=0.75)
    sizes = [int(f.sets.sum(dim=1).max()) for f in large.findings]
    assert 4 < max(sizes) <= 12


def test_pastes_are_the_sources_patches_in_the_recipient(pictures, found):
    trials = found.findings[0].trials
    mixed = pasted(pictures.images, trials)
    shown = trials.sets.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)[:, None]
    shown = shown.expand_as(mixed)
    assert mixed[shown].equal(pictures.images[trials.sources][shown])
    assert mixed[~shown].equal(pictures.images[trials.recipients][~shown])
    assert (found.answers[trials.sources] == RED).all()
    assert not (found.answers[torch.cat([trials.recipients, trials.controls])] == RED).any()


def test_pairs_are_pictures_with_and_without_the_kind_under_their_own_label(model, pictures, found):
    pairs = found.pairs([0])
    first = found.findings[0]
    count = sum(map(len, (first.trials, *first.alike)))
    assert len(pairs) == 2 * count and len(set(pairs.ids)) == 2 * count
    with_it = model(pairs.others[:count]).argmax(dim=1)
    covered = model(pairs.others[count:]).argmax(dim=1)
    assert (with_it == RED).double().mean() > 0.9 and (covered == RED).double().mean() < 0.1
    assert not (pairs.labels[:count] == RED).any() and (pairs.labels[count:] == RED).all()
    assert pairs.labelled.other_background.equal(pairs.others)


def test_the_same_seed_finds_the_same(model, pictures, found):
    again = sc.discover(model, pictures, layers=[0, 1], kinds=4, top=2, trials=16)
    assert [f.flips for f in again.findings] == [f.flips for f in found.findings]


def test_bad_input_is_one_clear_line(model, pictures):
    for options, line in (
        ({"layers": [9]}, "layers from 0 to 1"),
        ({"kinds": 0}, "a count from 1"),
        ({"method": "nonsense"}, "method .* not found"),
        ({"nonsense": 1}, "option 'nonsense' of caap"),
    ):
        with pytest.raises(sc.SeecauseError, match=line):
            sc.discover(model, pictures, **options)
    alike = pictures.take((pictures.labels == 0).nonzero()[:, 0])
    with pytest.raises(sc.SeecauseError, match="all answered 'green'"):
        sc.discover(model, alike)


@pytest.mark.slow
def test_the_command_writes_a_page_a_table_and_pairs(tmp_path, monkeypatch):
    few = importlib.import_module("seecause.background.discover")
    monkeypatch.setattr(few, "SCREENED", 3)
    monkeypatch.setattr(few, "TRIED", 1)
    words = ["discover", "--limit", "16", "--kinds", "4", "--trials", "8", "--layers", "4"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), "--pairs", "1"])
    assert done.exit_code == 0, done.output
    assert "turn" in done.output and "--data pairs:" in done.output
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Which kinds of patches turn pictures into which class?" in page
    with (tmp_path / "out" / "findings.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows and float(rows[0]["flips"]) > float(rows[0]["control"])
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["pairs"] == [1]
    pairs = tmp_path / "out" / "pairs"
    data = sc.data.open_data(f"pairs:{pairs / 'with'}:{pairs / 'without'}")
    assert len(data) == 16
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "no"), "--pairs", "99"])
    assert done.exit_code == 2 and "ranks from 1 to" in done.output
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "no"), "--pairs", "a"])
    assert done.exit_code == 2 and not (tmp_path / "no").exists()


def test_an_area_is_a_share_and_the_smallest_pastes_one_patch(model, pictures):
    for area in (0.0, -1.0, 1.5):
        with pytest.raises(BadOption, match="share of the picture"):
            sc.discover(model, pictures, area=area)
    findings = sc.discover(model, pictures, area=1e-6, top=16, trials=16, layers=[1]).findings
    assert findings and all(finding.patches <= 1 for finding in findings)


def test_a_kind_that_no_picture_lends_is_left_out():
    draw = torch.Generator().manual_seed(0)
    tokens, scores = torch.randn(12, 16, 8, generator=draw), torch.rand(12, 16, generator=draw)
    answers, plan = torch.arange(12) % 3, KindPlan(4, 8, 4, 0, 0)  # no patch is typical
    assert not list(kinds_at(tokens, scores, answers, None, (4, 4), 1, plan))
    kinds = list(kinds_at(tokens, scores, answers, None, (4, 4), 1, replace(plan, most=4)))
    assert kinds and all(kind.extent == "all" for kind in kinds)  # nine patches are too many


def test_a_spot_is_a_pictures_most_typical_example_and_what_is_around_it():
    draw = torch.Generator().manual_seed(0)
    tokens, scores = torch.randn(12, 25, 8, generator=draw), torch.rand(12, 25, generator=draw)
    plan = KindPlan(2, 8, 4, 9, 0)
    kinds = list(kinds_at(tokens, scores, torch.arange(12) % 2, None, (5, 5), 1, plan))
    for kind in kinds:
        if kind.extent != "spot":
            continue
        for place in kind.sets.any(dim=1).nonzero()[:, 0].tolist():
            first = next(patch for picture, patch in kind.tokens.tolist() if picture == place)
            near = torch.zeros(5, 5, dtype=torch.bool)
            row, column = divmod(first, 5)
            near[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2] = True
            assert kind.sets[place].equal(near.flatten())
    assert {kind.extent for kind in kinds} == {"all", "spot"}


def test_a_mark_beside_the_object_is_not_crowded_out_by_it():
    draw = torch.Generator().manual_seed(0)
    tokens, scores = torch.randn(12, 16, 8, generator=draw), torch.rand(12, 16, generator=draw)
    answers, objects = torch.arange(12) % 2, torch.zeros(12, 16, dtype=torch.bool)
    objects[:, :8] = True
    scores[:, :8] += 5  # objects are evidence by right
    marked = answers == 0
    tokens[marked, 12], scores[:, 12] = torch.full((8,), 9.0), torch.where(marked, 2.0, -1.0)
    plan = KindPlan(4, 4, 4, 16, 0)

    def kinds_with(known):
        kinds = list(kinds_at(tokens, scores, answers, known, (4, 4), 1, plan))
        return [kind for kind in kinds if (kind.tokens[:, 1] == 12).any()], kinds

    assert not kinds_with(None)[0]
    marks, kinds = kinds_with(ObjectPatches(objects, objects))
    assert {(kind.answer, kind.extent) for kind in marks} == {(0, "all"), (0, "spot")}
    assert all((kind.tokens[:, 1] == 12).all() and kind.on_object == 0 for kind in marks)
    for kind in kinds:  # what is lent is on one side, all of it
        assert not (kind.sets & (objects if kind.on_object == 0 else ~objects)).any()


def test_a_patch_with_a_pixel_of_the_object_shows_it():
    truth = torch.zeros(1, 8, 8, dtype=torch.uint8)
    truth[0, 3, 4], truth[0, 7, 7] = 1, 255  # 255: not known
    truth[0, 4:, :2] = 1
    patches = object_patches(Masks.given(truth), (2, 2))
    assert patches.shown.tolist() == [[False, True, True, False]]
    assert patches.covered.tolist() == [[False, False, True, False]]  # by half


def test_no_answer_takes_the_places_of_another():
    strong = [SimpleNamespace(answer=1, on_object=1.0, evidence=9.0 - n) for n in range(5)]
    weak = SimpleNamespace(answer=1, on_object=0.0, evidence=0.5)
    other = SimpleNamespace(answer=0, on_object=None, evidence=0.1)
    dealt = importlib.import_module("seecause.background.discover")._in_turn([*strong, weak, other])
    assert dealt == [strong[0], weak, other, *strong[1:]]


@pytest.mark.parametrize(
    ("mine", "theirs", "extents", "same"),
    [
        ([0, 1, 2], [0, 1, 2, 3], ("all", "spot"), True),  # three of four
        ([0, 1], [0, 1, 2, 3], ("all", "spot"), False),  # half is not more than half
        ([0, 1, 2, 3], [3, 4, 5, 6], ("all", "all"), False),  # a quarter of the smaller
        ([0, 1, 2], [2, 3, 4, 5], ("all", "all"), True),  # a third of it
        ([0, 1, 2], [2, 3, 4, 5], ("all", "spot"), False),  # but pasted otherwise
    ],
)
def test_kinds_of_mostly_the_same_patches_are_one(mine, theirs, extents, same):
    is_same = importlib.import_module("seecause.background.discover")._is_same
    sets = torch.zeros(2, 4, 9, dtype=torch.bool)
    sets[0, :3, mine], sets[1, :3, theirs] = True, True
    first, second = (
        SimpleNamespace(answer=1, sets=patches, extent=extent)
        for patches, extent in zip(sets, extents, strict=True)
    )
    assert is_same(first, second) is same is is_same(second, first)
    second.answer = 0
    assert not is_same(first, second)


def test_pairs_of_one_picture_stay_together_when_they_are_dealt(found):
    pairs = found.pairs([0])
    pictures = [name.rsplit("~", 1)[0] for name in pairs.ids]
    assert len(set(pictures)) < len(pictures)  # a picture gets several pastes
    numbers = origins(pairs.ids).tolist()
    assert len(set(zip(pictures, numbers, strict=True))) == len(set(pictures)) == len(set(numbers))
