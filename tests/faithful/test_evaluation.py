"""A trained network, the pictures it is tested on, and its evaluation put together."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from seecause.critters import CLASSES
from seecause.data.batch import to_batch
from seecause.data.registry import open_data
from seecause.errors import BadOption
from seecause.faithful import (
    Intervention,
    TrainedNetwork,
    calibrate,
    evaluate,
    evaluate_intervention,
    example_parts,
    intervene,
    leave_one_out,
    open_network,
    part_examples,
)
from seecause.faithful.data import batches_of, frame_of, open_train
from seecause.faithful.evaluation import _check_shares, examine
from seecause.faithful.run import keep_evaluation, read_evaluations
from tests.faithful.birds import KINDS, bird_net, tiny_cub
from tests.faithful.nets import pictures, tiny_net


@pytest.fixture(scope="module")
def scenes():
    return tiny_net(classes=CLASSES).float(), open_data("critters:balanced:test", limit=5)


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    return tiny_cub(tmp_path_factory.mktemp("birds") / "CUB_200_2011")


def hearing():
    """`progress`, and what it heard: what, of how many, in which steps."""
    heard: list[tuple[str, int, list[int]]] = []

    @contextmanager
    def progress(what, total):
        steps: list[int] = []
        yield steps.append
        heard.append((what, total, steps))

    return progress, heard


def calibrated(birds, limit, quantiles):
    """The network with thresholds by dot product, of so many training photos as they are tested."""
    net = bird_net(birds)
    photos = open_train(f"cub:{birds}", limit=limit)
    calibrate(net, (images for images, *_ in batches_of(net, photos)), quantiles, by="dot")
    return net


@torch.no_grad()
def test_an_intervention_is_tested_on_the_pictures_and_with_the_thresholds_asked_for(birds):
    (progress, heard), name = hearing(), f"waterbird200:{birds}"
    network = TrainedNetwork("birds", bird_net(birds), f"cub:{birds}")
    result = evaluate_intervention(
        network, drop_parts=[2], quantile=0.8, by="dot", data=name, calibration=9, limit=5,
        batch=2, progress=progress,
    )  # fmt: skip
    net, test = calibrated(birds, 9, 0.8), open_data(name, limit=5)
    assert result.plain == pytest.approx(examine(net, test).table())
    with intervene(net, drop_parts=[2], quantile=0.8, by="dot"):
        assert result.changed == pytest.approx(examine(net, test).table())
    assert result.changed["kept"] < result.plain["kept"] and result.pictures == 5
    assert (result.data, result.intervention) == (test.name, Intervention((2,), 0.8, "dot"))
    examined = ("examining", 5, [2, 2, 1])
    assert heard == [("calibrating", 9, [2, 2, 2, 2, 1]), examined, examined]
    assert result.to_json() == {"data": test.name, "pictures": 5, "plain": result.plain}


def test_pictures_without_masks_are_not_cut(birds):
    network = TrainedNetwork("birds", bird_net(birds), f"cub:{birds}")
    options = {"interventions": False, "keypoints": False, "limit": 2}
    plain = evaluate(network, random_cuts=True, **options).plain
    assert plain == evaluate(network, **options).plain and "miou_public" not in plain


def test_parts_that_are_not_there_and_shares_that_are_none(birds):
    network = TrainedNetwork("birds", bird_net(birds), f"cub:{birds}")
    for parts in ([3], [-1], [0, 3]):
        with pytest.raises(BadOption, match="parts 0-2 of birds"):
            evaluate_intervention(network, drop_parts=parts)
    _check_shares([1.0, 0.01])
    for shares in ([0.0], [0.5, 1.01], []):
        with pytest.raises(BadOption, match="up to 1"):
            _check_shares(shares)


def test_a_network_comes_back_from_its_folder_on_the_device_asked_for(birds, tmp_path):
    network = replace(TrainedNetwork("birds", bird_net(birds), f"cub:{birds}"), limit=7, test="t:x")
    card = network.export(tmp_path / "shipped")
    fields = json.loads(card.read_text())
    own = {"data": f"cub:{birds}", "val": None, "test": "t:x", "limit": 7, "val_limit": None}
    assert {name: fields[name] for name in own} == network.card_fields() == own
    again = open_network(str(tmp_path / "shipped"), device="meta")
    assert again.card_fields() == own and again.run is None and not again.net.training
    assert again.net.stage1.prototypes.device.type == "meta" and again.net.class_names == KINDS
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "shipped"):
        with pytest.raises(BadOption, match="a new or empty folder"):
            network.export(place)
    (tmp_path / "empty").mkdir()
    assert network.export(tmp_path / "empty") == tmp_path / "empty" / "ifam.json"


@torch.no_grad()
def test_examples_are_named_by_their_place_and_class(birds):
    network = TrainedNetwork("birds", bird_net(birds), f"cub:{birds}")
    network.net.class_names = ()  # the pictures have names, be it that the network has none
    name, examples = example_parts(network, limit=4)
    pictures = open_data(f"cub:{birds}:test", limit=4)
    assert name == pictures.name
    assert examples.titles == [
        f"{place}: {KINDS[pictures[place - 1].label]}" for place in (1, 2, 3, 4)
    ]
    assert torch.equal(examples.images, to_batch(frame_of(network.net), list(pictures)).images)
    other, examples = example_parts(network, data=f"waterbird200:{birds}", limit=2)
    assert other == f"waterbird200:{birds}" and len(examples.images) == 2
    assert list(examples.without) == [0, 1, 2] and examples.net is network.net


def test_examples_are_as_many_as_asked_for(scenes):
    network = TrainedNetwork("scenes", scenes[0], test="critters:balanced:test")
    _, examples = example_parts(network, limit=34)  # more than are read at once elsewhere
    assert len(examples.images) == len(examples.titles) == len(examples.output.logits) == 34
    assert examples.titles[33].startswith("34: ")


def test_evaluations_are_kept_by_dataset(tmp_path):
    assert read_evaluations(tmp_path) == {}
    path = tmp_path / "evaluation.json"
    path.write_text(
        json.dumps({"data": "siim:x:test", "pictures": 3, "plain": {"auc": 0.5}})
    )  # as it was before
    keep_evaluation(tmp_path, {"data": "siim:x:robust", "plain": {"auc": 0.25}})
    keep_evaluation(tmp_path, {"data": "siim:x:robust", "plain": {"auc": 0.75}})
    result = json.loads(path.read_text())
    assert result == {
        "siim:x:test": {"data": "siim:x:test", "pictures": 3, "plain": {"auc": 0.5}},
        "siim:x:robust": {"data": "siim:x:robust", "plain": {"auc": 0.75}},
    }
    assert read_evaluations(tmp_path) == result and [one.name for one in tmp_path.iterdir()] == [
        "evaluation.json"
    ]
    for broken in ("{", "[]"):
        path.write_text(broken)
        with pytest.raises(BadOption, match="move it away"):
            keep_evaluation(tmp_path, {"data": "x"})
        assert path.read_text() == broken
    nothing = TrainedNetwork("n", tiny_net(), "no:such", run=tmp_path)  # before a picture is opened
    with pytest.raises(BadOption, match="move it away"):
        evaluate(nothing, interventions=False)


@torch.no_grad()
def test_examples_are_what_the_network_makes_of_them_with_and_without_each_part(scenes):
    net, data = scenes
    images = to_batch(frame_of(net), list(data)).images
    examples = part_examples(net, images, "abcde")
    assert torch.equal(examples.output.mask, net(images).mask)
    for part in range(net.parts):
        with intervene(net, drop_parts=[part]):
            assert torch.equal(examples.without[part].logits, net(images).logits)
            assert torch.equal(examples.without[part].mask, net(images).mask)


def test_examples_of_a_network_in_training_are_those_of_a_test():
    net, images = tiny_net(), pictures()
    expected = part_examples(net, images, "abc")
    result = part_examples(net.train(), images, "abc")
    assert net.training
    for part in range(net.parts):
        assert torch.equal(result.without[part].mask, expected.without[part].mask)
        assert_close(result.without[part].logits, expected.without[part].logits)


def test_groups_of_some_batches_only_are_no_groups():
    """Classes and group numbers are not mixed up."""
    net, images, labels = tiny_net(), pictures(3), torch.arange(3)
    for groups in (torch.tensor([7, 8, 9]), torch.tensor([[7, 8], [8, 9], [9, 9]])):
        some = leave_one_out(net, [(images, labels, groups), (images, labels)])
        assert some.groups.tolist() == [0, 1, 2, 0, 1, 2]


def test_no_picture_calibrates_nothing():
    """A generator that was used up, say: infinite thresholds would reject no token."""
    net = tiny_net()
    with pytest.raises(BadOption, match="at least one batch"):
        calibrate(net, iter(()), 0.9)
    assert not net.thresholds
