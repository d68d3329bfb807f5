"""Parts and tokens taken out at test time."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadOption, EditLost
from seecause.faithful import Intervention, calibrate, evaluate, intervene, leave_one_out
from seecause.faithful.evaluation import TrainedNetwork
from seecause.faithful.interventions import LeaveOneOut, Trial, _threshold, best_of, prove
from seecause.faithful.parts import (
    Assignment,
    Noise,
    reject_far,
    reject_unlike,
    select,
    select_without,
)
from seecause.faithful.stages import reads_only
from seecause.metrics.statistics import auroc, group_accuracy
from tests.faithful.nets import dinov2_backbone, random_images, timm_backbone, tiny_net
from tests.reference import ifam as reference

EXACT = {"atol": 1e-10, "rtol": 0}
pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def _winner(net, images):
    return net(images).maps.argmax(dim=1)


def test_tokens_of_a_dropped_part_become_background_and_others_stay():
    net, images = tiny_net(), random_images()
    plain, winner = net(images), _winner(net, images)
    with intervene(net, drop_parts=[1]):
        out = net(images)
    assert torch.equal(out.mask, plain.mask & (winner != 1)) and not torch.equal(
        out.mask, plain.mask
    )
    assert torch.equal(out.maps, plain.maps) and torch.equal(out.part_logits, plain.part_logits)
    best = [plain.maps[:, [0, 2]].amax(dim=1), plain.maps[:, 3]]
    assert torch.equal(out.pair, torch.stack(best, dim=1))
    stage = net.stage2
    expected = torch.stack(
        [
            reference.on_selected(stage.tower.native, stage.fc_norm, stage.head, x, m)
            for x, m in zip(images, out.mask, strict=True)
        ]
    )
    assert_close(out.logits, expected, **EXACT)
    assert torch.equal(net(images).logits, plain.logits)  # over


def test_interventions_nest_and_end_after_an_error():
    net, images = tiny_net(), random_images()
    plain = net(images).mask
    with pytest.raises(RuntimeError, match="inside"), intervene(net, drop_parts=[0]):
        with intervene(net, drop_parts=[1]):
            inner = net(images).mask
        assert not torch.equal(net(images).mask, inner)
        raise RuntimeError("inside")
    assert torch.equal(net(images).mask, plain)


@pytest.mark.parametrize("by", ["distance", "dot"])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_calibrated_share_of_tokens_survives(by, stages):
    net, images = tiny_net(stages=stages), random_images(8)
    winner, plain = _winner(net, images), net(images)
    (result,) = calibrate(net, images.split(3), 0.8, by=by)
    values = plain.distances if by == "distance" else plain.dots
    for part in range(net.parts):
        mine = values[:, part][winner == part]
        assert result.values[part] == pytest.approx(
            np.quantile(mine.numpy(), 0.8 if by == "distance" else 0.2), abs=1e-12
        )
        share = (
            ((mine <= result.values[part]) if by == "distance" else (mine >= result.values[part]))
            .double()
            .mean()
        )
        assert abs(share - 0.8) <= 1 / len(mine)
    with intervene(net, quantile=0.8, by=by):
        out = net(images)
    if by == "distance":
        far = (winner < net.parts) & (
            values.gather(1, winner[:, None])[:, 0]
            > torch.tensor((*result.values, torch.inf), dtype=torch.float64)[winner]
        )
        assert (
            torch.equal(out.maps.argmax(dim=1), torch.where(far, net.parts, winner)) and far.any()
        )
        assert torch.equal(out.maps[:, -1] == 1, far | (plain.maps[:, -1] == 1))
    else:
        floors = torch.tensor((*result.values, -torch.inf), dtype=torch.float64)[:, None, None]
        expected = torch.where(plain.dots < floors, -torch.inf, plain.dots).softmax(dim=1)
        assert_close(out.maps, expected, **EXACT)
    assert torch.equal(out.mask, out.maps.argmax(dim=1) < net.parts)
    assert not torch.equal(out.logits, plain.logits)


@pytest.mark.parametrize("by", ["distance", "dot"])
@pytest.mark.parametrize("quantile", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_at_its_limit_passes_in_whatever_batch_it_is(by, quantile, dtype):
    """A limit is some token's own value, whose last bits differ from batch to batch."""
    net, images = tiny_net().to(dtype), random_images(13).to(dtype)
    plain = net(images)
    calibrate(net, images, quantile, by=by)
    with intervene(net, quantile=quantile, by=by):
        whole = net(images)
        for size in (1, 2, 5):
            masks = torch.cat([net(batch).mask for batch in images.split(size)])
            assert torch.equal(masks, whole.mask)
    if quantile == 1 and by == "distance":
        assert torch.equal(whole.mask, plain.mask)
    if quantile < 1:
        assert not torch.equal(whole.mask, plain.mask)


def test_ties_between_parts_and_background_go_to_the_parts():
    """And those between parts to the first of them, which is then the one that can be removed."""
    maps = torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4], [0.4, 0.2, 0.4], [0.1, 0.4, 0.5]])
    maps = maps.T[None]  # [1, K + 1, N]
    everything = [True, True, True, False]
    assert select(maps).hard[0].tolist() == everything
    for removed, stay in (
        ([], everything),
        ([0], [False, True, False, False]),
        ([1], [True, False, True, False]),
    ):
        gone = torch.tensor([part in removed for part in range(2)])
        assert select_without(maps, gone).hard[0].tolist() == stay
    pair = select_without(maps, torch.tensor([True, False])).pair[0]
    assert torch.equal(pair, maps[0, 1:])  # the part that is left, and the background
    both = select_without(maps, torch.tensor([False, False])).pair[0]
    assert torch.equal(both, select(maps).pair[0])
    dropped = select(maps, torch.tensor([[False, True]])).hard[0]
    assert dropped.tolist() == [True, True, False, False]
    certain = torch.tensor([[1.0, 0.0, 0.0]]).T[None]  # a background that rounds to zero
    assert select(certain, torch.tensor([[False, True]])).hard.all()
    assert not select(certain, torch.tensor([[False, False]])).hard.any()


def test_thresholds_are_those_of_the_network_as_it_is_also_inside_an_intervention():
    """And a network that learns goes on learning."""
    net, images = tiny_net(), random_images(6)
    calibrate(net, images, 0.5)
    (plain,) = calibrate(net, images, 0.9)
    with intervene(net, quantile=0.5):
        assert calibrate(net.train(), images, 0.9) == [plain]
        assert net.training and net.intervention.quantile == 0.5


def test_pdiscoformer_loses_the_vote_of_a_dropped_part():
    net, images = tiny_net(stages=1), random_images()
    votes = net(images).part_logits
    with intervene(net, drop_parts=[0]):
        assert_close(net(images).logits, votes[..., 1:].mean(dim=-1), **EXACT)
        assert_close(sc.wrap(net)(images), votes[..., 1:].mean(dim=-1), **EXACT)
    with intervene(net, drop_parts=range(3)):
        assert (net(images).logits == 0).all()


@pytest.mark.parametrize(
    "options",
    [{"stages": 1}, {"stages": 2}, {"gradient": "soft"}],
    ids=["one stage", "two stages", "soft"],
)
def test_leave_one_out_equals_one_intervention_each(options):
    net, images = tiny_net(**options), random_images(6)
    labels, groups = (
        torch.tensor([0, 1, 2, 3, 0, 1]),
        torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1], [0, 0], [1, 0]]),
    )
    calibrate(net, images, 0.9)
    batches = [(images[:4], labels[:4], groups[:4]), (images[4:], labels[4:], groups[4:])]
    with intervene(net, drop_parts=[2], quantile=0.9):
        result = leave_one_out(net, batches)
        assert_close(result.logits, net(images).logits, **EXACT)
    for part in range(net.parts):
        with intervene(net, drop_parts=[2, part], quantile=0.9):
            assert_close(result.without[part], net(images).logits, **EXACT)
    assert torch.equal(result.groups, groups) and torch.equal(result.labels, labels)
    accuracy = group_accuracy(result.without[0].argmax(dim=-1) == labels, groups)
    row = result.numbers(result.without[0])
    assert row == {"average": accuracy.average, "worst": accuracy.worst}
    ungrouped = leave_one_out(net, [(images, labels)])
    assert torch.equal(ungrouped.groups, labels)  # classes, where no groups are given


def test_thresholds_survive_half_precision():
    net, images = tiny_net(), random_images()
    (result,) = calibrate(net, images, 0.9)
    with intervene(net, quantile=0.9):
        assert net.bfloat16().limits.tolist() == list(result.values)


@pytest.mark.parametrize("stages", [1, 2])
def test_training_is_not_intervened_on(stages):
    net, images = tiny_net(part_dropout2=0.0, stages=stages), random_images()
    calibrate(net, images, 0.5)
    assert not net.training
    draws = Noise(0, 0, torch.arange(3))
    plain = net.train()(images, noise=draws)
    for change in ({"drop_parts": [0, 1]}, {"quantile": 0.5}):
        with intervene(net, **change):
            out = net(images, noise=draws)
        assert torch.equal(out.mask, plain.mask) and torch.equal(out.maps, plain.maps)
        assert torch.equal(out.logits, plain.logits)


@pytest.mark.parametrize("backbone", [timm_backbone, dinov2_backbone])
@pytest.mark.parametrize("options", [{}, {"parts": 1}, {"stages": 1}, {"eval_noise": True}])
def test_what_is_hidden_or_dropped_has_no_effect_in_any_network(backbone, options):
    for proof in prove(tiny_net(backbone(), **options)):
        assert proof.moved > 1e-4 and proof.worst < 1e-10, proof


def a_stem_that_mixes_neighbours(net, monkeypatch):
    """Tokens that read pixels of other patches, as overlapping convolutions do."""
    stem = net.stage2.tower.native.patch_embed
    stem.register_forward_hook(lambda _, __, tokens: tokens + 1e-3 * tokens.roll(1, dims=1))


def a_mask_that_is_dropped(net, monkeypatch):
    read = "seecause.faithful.net.reads_only"
    monkeypatch.setattr(read, lambda visible: reads_only(torch.ones_like(visible)))


def a_run_that_sees_nothing(net, monkeypatch):
    net.stage2.head.weight.detach().zero_()


def a_drop_that_is_dropped(net, monkeypatch):
    monkeypatch.setattr("seecause.faithful.net.select_without", lambda maps, removed: select(maps))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (a_stem_that_mixes_neighbours, "'hidden patches'.*an empty edit changes"),
        (a_mask_that_is_dropped, "'hidden patches'"),
        (a_run_that_sees_nothing, "not hidden have no effect"),
        (a_drop_that_is_dropped, "'dropped parts'.*should move"),
    ],
)
def test_a_network_that_reads_what_is_hidden_is_refused_when_it_is_used(broken, words, monkeypatch):
    net = tiny_net()
    broken(net, monkeypatch)
    with pytest.raises(EditLost, match=words), intervene(net, drop_parts=[0]):
        pytest.fail("the block was entered")
    with pytest.raises(EditLost, match=words):
        evaluate(TrainedNetwork("broken", net))
    with pytest.raises(EditLost, match=words):
        sc.wrap(net)


@pytest.mark.parametrize("by", ["distance", "dot"])
def test_a_part_that_no_calibration_image_has_rejects_nothing(by):
    limit = _threshold(0.9, by, np.empty(0))
    assigned = Assignment(torch.randn(1, 2, 5), torch.rand(1, 2, 5))
    if by == "dot":
        logits = reject_unlike(assigned, torch.tensor([limit]))
        assert torch.equal(logits, assigned.dots)
    else:
        maps = torch.tensor([0.9, 0.1])[None, :, None].expand(1, 2, 5)
        assert torch.equal(reject_far(maps, assigned, torch.tensor([limit])), maps)


def test_a_trial_is_chosen_by_the_worst_group_or_auc_and_then_by_the_average():
    tried = [
        Trial(Intervention(), 0.9, 0.5, 0.7),
        Trial(Intervention((0,)), 0.8, 0.4, 0.9),
        Trial(Intervention((1,)), 0.9, 0.4, 0.9),
    ]
    assert best_of(tried) is tried[0] and best_of(tried, by="auc") is tried[2]
    assert best_of([tried[1], tried[2], tried[2]]) is tried[2]


def test_auc_is_of_two_classes_that_both_occur():
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(8, 2, generator=draw), torch.tensor([0, 1] * 4)
    result = LeaveOneOut(logits, logits[None], labels, labels)
    assert result.numbers(logits)["auc"] == auroc(logits, labels)
    ones = torch.ones(8, dtype=torch.int64)
    assert "auc" not in LeaveOneOut(logits, logits[None], ones, ones).numbers(logits)
    assert "auc" not in result.numbers(torch.randn(8, 3, generator=draw))


def test_groups_of_some_batches_only_are_no_groups():
    """Classes and group numbers are not mixed up."""
    net, images, labels = tiny_net(), random_images(3), torch.arange(3)
    for groups in (torch.tensor([7, 8, 9]), torch.tensor([[7, 8], [8, 9], [9, 9]])):
        some = leave_one_out(net, [(images, labels, groups), (images, labels)])
        assert some.groups.tolist() == [0, 1, 2, 0, 1, 2]


def test_what_cannot_be_calibrated_is_refused():
    """Infinite thresholds, of a generator that was used up, would reject no token."""
    net = tiny_net()
    with pytest.raises(BadOption, match="at least one batch"):
        calibrate(net, iter(()), 0.9)
    for quantiles in (0.0, [0.5, 1.01], 1.5):
        with pytest.raises(BadOption, match="share above 0"):
            calibrate(net, random_images(), quantiles)
    assert not net.thresholds
    with pytest.raises(BadOption, match="parts 0-2"), intervene(net, drop_parts=[3]):
        pass
    with pytest.raises(BadOption, match="calibrate"), intervene(net, quantile=0.9):
        pass
