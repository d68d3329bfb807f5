"""Discover: kinds of patches that turn images into a class, from a planted shortcut, and each step
against loops over images and patches."""

import importlib
from dataclasses import replace

import pytest
import timm
import torch
from torch.testing import assert_close

import seecause as sc
from seecause._random import bits
from seecause.background import LabelledImages, Masks
from seecause.background.discover import (
    Discovery,
    Finding,
    Search,
    Trials,
    object_patches,
    tokens_at,
)
from tests.background.repair_toys import plain_vit, scenes as squares, wrapped

steps = importlib.import_module("seecause.background.discover")
RED, SIDE, COUNT, SEED = 2, 32, 40, 3  # a class, pixels of an image, trials of a finding


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


def a_search(scores, predictions, grid, shown=None, covered=None, **options):
    given = {"kinds": 3, "top": 6, "trials": 20, "most": 9, "seed": SEED, **options}
    return Search(scores, predictions, grid, shown, covered, **given)


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
    assert (found.predictions == pictures.labels).double().mean() > 0.9  # it learned the patch
    first = found.findings[0]
    assert (first.predicted, first.name) == (RED, "red")
    assert first.flips > 0.9 and first.control < 0.1 and first.interval[0] > 0.5
    spots = scenes()[2].flatten(1)
    assert (first.sets & spots).sum() > 0.9 * first.sets.sum()
    assert first.patches < 1.2 and "red" in first.sentence()


def test_trials_that_sorted_kinds_out_do_not_count_for_them(found):
    """Who is chosen for a high number would have it twice."""
    assert [len(finding.trials) for finding in found.findings] == [16] * len(found.findings)


def test_known_objects_are_told_and_spared(model, pictures, found):
    assert found.findings[0].on_object is None
    truth = torch.zeros(len(pictures), SIDE, SIDE, dtype=torch.bool)
    truth[:, :8] = True  # the upper row of patches
    masked = replace(pictures, truth=Masks.given(truth))
    told = sc.discover(model, masked, layers=[0], kinds=4, top=2, trials=8)
    first = next(finding for finding in told.findings if finding.predicted == RED)
    upper = (first.tokens[:, 1] < 4).double().mean()  # of a spot, its middle counts
    if first.extent == "all":
        upper = first.sets.unflatten(1, (4, 4))[:, 0].sum() / first.sets.sum()
    assert first.on_object == pytest.approx(float(upper))
    assert not first.trials.sets[:, 0].any()


def test_a_paste_is_a_quarter_at_most_where_objects_are_not_known(model, pictures, found):
    most = max(int(f.trials.sets.flatten(1).sum(dim=1).max()) for f in found.findings)
    assert most <= 4


def test_bad_input_is_one_clear_line(model, pictures):
    for options, line in (
        ({"layers": [9]}, "layers from 0 to 1"),
        ({"kinds": 0}, "at least 1"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"layers": []}, "layers from 0"),
        ({"method": "nonsense"}, "method .* not found"),
        ({"nonsense": 1}, "caap\\+mosaic option nonsense"),
    ):
        with pytest.raises(sc.SeecauseError, match=line):
            sc.discover(model, pictures, **options)
    alike = pictures.take((pictures.labels == 0).nonzero()[:, 0])
    with pytest.raises(sc.SeecauseError, match="all predicted 'green'"):
        sc.discover(model, alike)


def test_a_patch_with_a_pixel_of_the_object_shows_it():
    truth = torch.zeros(1, 8, 8, dtype=torch.uint8)
    truth[0, 3, 4], truth[0, 7, 7] = 1, 255  # 255: not known
    truth[0, 4:, :2] = 1
    shown, covered = object_patches(Masks.given(truth), (2, 2))
    assert shown.tolist() == [[False, True, True, False]]
    assert covered.tolist() == [[False, False, True, False]]  # by half


def trials(sources, recipients, controls, patches=(0,)):
    sets = torch.zeros(len(sources), 4, dtype=torch.bool)
    sets[:, list(patches)] = True
    roles = (torch.tensor(part) for part in (sources, recipients, controls))
    return Trials(*roles, sets.unflatten(1, (2, 2)))


def finding(flips, control, patch, predicted=0):
    """Of `COUNT` trials so many flip, and so many by the control; one patch of three pictures."""
    done = trials([patch] * COUNT, [0] * COUNT, [0] * COUNT)
    place = torch.arange(COUNT)
    done = replace(done, flipped=place < flips, control_flipped=place < control)
    sets = torch.zeros(3, 16, dtype=torch.bool)
    sets[:, patch] = True
    return Finding(predicted, 1, "all", torch.zeros(1, 2), sets, done, 0.0, None, name="cat")


def test_the_best_findings_by_effect_without_those_that_are_the_same():
    strong, loud, again = finding(30, 0, 1), finding(40, 15, 2), finding(28, 0, 1)
    third, other = finding(27, 0, 1), finding(26, 0, 1, predicted=1)
    chance, harmful = finding(2, 1, 3), finding(0, 9, 4)
    tried = [chance, loud, third, again, harmful, strong, other]
    best = steps._ranked(tried, 9)
    assert [found.effect for found in best] == [0.75, 0.65, 0.625]  # none that may be chance
    assert best[0] is strong and best[1].predicted == 1  # not by flips, which are louder
    assert len(steps._ranked(tried, 2)) == 2
    low, high = loud.interval
    assert 0.45 < low < 0.625 < high < 0.8 and (loud.flips, loud.control) == (1, 15 / 40)


@pytest.mark.parametrize("labels", [None, torch.tensor([5, 6, 7, 8, 9, 4])])
def test_pairs_are_recipients_with_the_kind_and_sources_without_it(labels):
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 4, 4)
    data = LabelledImages(images, labels, name="scenes", ids=tuple("abcdef"))
    predictions = torch.tensor([10, 11, 12, 13, 14, 15])
    one, two = finding(9, 0, 0), finding(9, 0, 1)
    one = replace(one, trials=trials([0], [2], [4], patches=(1,)))
    two = replace(two, trials=trials([1, 0], [3, 3], [5, 2]))
    pairs = Discovery(None, data, predictions, (one, two)).pairs([1])
    assert pairs.ids == ("d~0", "d~1", "b~2", "a~3") and pairs.name == "discovered in scenes"
    assert pairs.images[:, 0, 0, 0].tolist() == [3, 3, 1, 0]
    corners = pairs.other_background[:, 0, ::2, ::2].flatten(1).tolist()
    assert corners == [[1, 3, 3, 3], [0, 3, 3, 3], [5, 1, 1, 1], [2, 0, 0, 0]]
    known = predictions if labels is None else labels
    assert pairs.labels.tolist() == known[[3, 3, 1, 0]].tolist()
    assert len(Discovery(None, data, predictions, (one, two)).pairs()) == 6


def random_bools(*shape, seed=0, share=0.5):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def lot(number, purpose, among):
    return among[int(bits(torch.tensor(number), 4 * SEED + purpose)) % len(among)]


@pytest.mark.parametrize("known", [True, False])
def test_pastes_go_where_the_recipients_object_is_covered_least_and_spare_it(known):
    """Every draw again, one at a time: the lender's own object plays no part."""
    predictions = torch.tensor([1, 0, 1, 0, 2, 0, 1, 2])
    sets = random_bools(8, 12, seed=1) & (predictions == 1)[:, None]
    sets[6] = False  # answered 1, and lends nothing
    objects = random_bools(8, 12, seed=2)
    search = a_search(torch.zeros(8, 12), predictions, (3, 4))
    trials = search.drawn(sets, 1, objects if known else None)
    assert len(trials) == 6 + 20  # those that sort out, and those that count
    lenders, others = [0, 2], [1, 3, 4, 5, 7]
    for place in range(26):
        number = (1 << 32) + place
        source, control = lot(number, 11, lenders), lot(number, 13, others)
        recipients = [lot(4 * number + draw, 12, others) for draw in range(4)]
        left = [sets[source] & ~objects[recipient] for recipient in recipients]
        best = max(range(4), key=lambda draw: (int(left[draw].sum()), -draw))
        if not known:
            best, left = 0, [sets[source]]
        assert int(trials.sources[place]) == source
        assert int(trials.recipients[place]) == recipients[best]
        assert int(trials.controls[place]) == control
        assert trials.sets[place].flatten().equal(left[best])


def test_kinds_on_objects_and_off_them_spare_what_is_shown_or_covered():
    """A whole background reaches up to what objects cover by half; a spot spares all of them."""
    draw = torch.Generator().manual_seed(0)
    tokens, scores = torch.randn(12, 20, 8, generator=draw), torch.rand(12, 20, generator=draw)
    shown = random_bools(12, 20, seed=6, share=0.6)
    covered = shown & random_bools(12, 20, seed=7)
    predictions = torch.arange(12) % 2
    search = a_search(scores, predictions, (4, 5), shown, covered)
    kinds = list(search.kinds_at(tokens, 1))
    reaching = 0
    for kind in kinds:
        on_side = shown[kind.tokens[:, 0], kind.tokens[:, 1]]
        assert on_side.all() or not on_side.any()
        assert kind.evidence == pytest.approx(
            sum(float(scores[n, p]) for n, p in kind.tokens.tolist()) / len(kind.tokens)
        )
        share = (kind.sets & shown).sum() / kind.sets.sum()
        if kind.extent == "spot":
            share = on_side.float().mean()
            assert not (kind.sets & (~shown if on_side.all() else shown)).any()
        elif not on_side.any():
            assert not (kind.sets & covered).any()
            reaching += int((kind.sets & shown).sum())
        assert kind.on_object == pytest.approx(float(share))
        spared = (covered if kind.extent == "all" else shown)[kind.trials.recipients]
        assert kind.trials.sets.flatten(1).equal(kind.sets[kind.trials.sources] & ~spared)
    assert reaching and {kind.extent for kind in kinds} == {"all", "spot"}


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_tokens_are_what_a_patch_shows_less_what_its_place_does(layer):
    module = plain_vit().eval()
    model, images = wrapped(module), squares(5).images
    entered = []
    for block in module.blocks:
        block.register_forward_pre_hook(lambda _, x: entered.append(x[0]))
    module.blocks[-1].register_forward_hook(lambda _, x, out: entered.append(out))
    with torch.no_grad():
        module(images)
        states = entered[layer][:, 1:]  # without the class token
        tokens = tokens_at(model, images, layer)
    rest = states - states.mean(dim=0)
    expected = rest / rest.norm(dim=-1, keepdim=True)
    assert_close(tokens, expected, atol=1e-5, rtol=1e-5)
