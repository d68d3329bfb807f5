"""A trained network, the pictures it is tested on, and its evaluation put together."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
import torch
from torch.testing import assert_close

from seecause.background.images import no_progress
from seecause.critters import CLASSES
from seecause.data.batch import to_batch
from seecause.data.registry import open_data
from seecause.errors import BadOption
from seecause.faithful import (
    Evaluation,
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
from seecause.faithful.data import batches_of, frame_of, labelled_batches, open_train, open_val
from seecause.faithful.evaluation import _check_shares, _Test
from seecause.faithful.interventions import Trial, try_interventions
from seecause.faithful.metrics import examine, key_points
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
@pytest.mark.parametrize("choice", [10, 0], ids=["a part and tokens", "nothing"])
def test_an_evaluation_is_its_pieces_put_together(birds, monkeypatch, choice):
    """Trials: nothing and each of three parts, for all tokens, and for two quantiles of them."""
    criteria, place = [], "seecause.faithful.evaluation.best_of"
    monkeypatch.setattr(place, lambda trials, by: criteria.append(by) or trials[choice])
    (progress, heard), quantiles = hearing(), [0.5, 0.8]
    network = TrainedNetwork("birds", bird_net(birds), f"cub:{birds}")
    result = evaluate(
        network, quantiles=quantiles, calibration=10, by="dot", choose="worst", batch=3,
        progress=progress,
    )  # fmt: skip

    net, test = calibrated(birds, 10, quantiles), open_data(f"cub:{birds}:test")
    val, fit = open_val(f"cub:{birds}"), open_data(f"cub:{birds}:trainval", limit=10)
    trials = try_interventions(net, lambda: labelled_batches(net, val), quantiles, by="dot")
    plain = examine(net, test).table() | key_points(net, fit, test)
    assert result.plain == pytest.approx(plain) and {"keypoints", "auc"} <= plain.keys()
    assert list(map(asdict, result.trials)) == list(map(asdict, trials)) and len(trials) == 12
    assert result.chosen is result.trials[choice]
    assert (result.data, result.pictures) == (test.name, 8)
    assert result.chosen_on == val.name and [result.chosen_by] == criteria == ["worst"]
    change = Intervention((1,), 0.8, "dot") if choice else Intervention(by="dot")
    assert result.intervention == change
    with intervene(net, **asdict(change)):
        changed = examine(net, test).table() | key_points(net, fit, test)
    assert result.changed == pytest.approx(changed) and (changed != plain) == bool(choice)
    examined, marked = ("examining", 8, [3, 3, 2]), ("key points", 18, [3, 3, 3, 1, 3, 3, 2])
    again = [marked, examined] if choice else []
    assert heard == [examined, marked, ("calibrating", 10, [3, 3, 3, 1]), *again]


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


def test_an_intervention_is_counted_by_the_classes_of_the_pictures(scenes, monkeypatch):
    """As on ImageNet-9: every answer stands for the class of the first picture."""
    (net, data), network = scenes, TrainedNetwork("scenes", scenes[0])
    mapping = torch.full((len(CLASSES),), data[0].label)
    monkeypatch.setattr(TrainedNetwork, "matched", lambda self, *_: (data, mapping))
    result = evaluate_intervention(network, drop_parts=[0])
    share = sum(sample.label == data[0].label for sample in data) / 5
    assert result.plain["average"] == result.changed["average"] == pytest.approx(share)
    assert examine(net, data).table()["average"] != pytest.approx(share)


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


def test_an_evaluation_shows_what_the_intervention_does_beside_the_plain_numbers(
    scenes, monkeypatch
):
    net, data = scenes
    trials = [Trial((), None, 0.5, 0.1), Trial((1,), 0.9, 0.6, 0.4, by="dot")]
    place = "seecause.faithful.evaluation"
    monkeypatch.setattr(f"{place}.try_interventions", lambda *_, **__: trials)
    monkeypatch.setattr(f"{place}.TrainedNetwork.val_pictures", lambda self: data)
    monkeypatch.setattr(f"{place}._Test.changed", lambda self, change, **_: {"average": 0.9})
    test = _Test(TrainedNetwork("tiny", net), data, None, 2, None, False, no_progress)
    plain = Evaluation("d", 5, {"average": 0.5, "keypoints": 7.0})
    result = test.with_best_intervention(plain, [], "distance", "worst")
    assert result.intervention == Intervention((1,), 0.9, "dot") and result.chosen is trials[1]
    assert result.plain["average"] == 0.5
    assert (result.chosen_on, result.chosen_by, result.trials) == (data.name, "worst", trials)
    written = result.to_json()
    assert written["chosen"]["drop"] == (1,) and written["tried"][0]["worst"] == 0.1
    assert {name: written[name] for name in ("data", "pictures", "plain", "changed")} == {
        "data": "d", "pictures": 5, "plain": plain.plain, "changed": result.changed,
    }  # fmt: skip
    assert result.changed == {"average": 0.9, "keypoints": 7.0}  # what cannot change stays


def test_a_network_is_chosen_and_tested_on_the_pictures_that_it_names(scenes, monkeypatch):
    net, data = scenes
    opened, place = [], "seecause.faithful.evaluation"
    for name in ("open_train", "open_test", "open_data"):
        monkeypatch.setattr(
            f"{place}.{name}",
            lambda spec, limit=None, name=name: opened.append((name, spec, limit)) or data,
        )
    monkeypatch.setattr(
        f"{place}.open_validation",
        lambda spec, val, limit: opened.append(("open_validation", spec, val, limit)) or data,
    )
    network = TrainedNetwork("n", net, "d", val="v", limit=7, val_limit=5)
    network.train_pictures()
    network.train_pictures(3)
    network.val_pictures()
    network.test_pictures(2)
    replace(network, test="t").test_pictures(2)
    network.matched("other", 4)
    assert opened == [
        ("open_train", "d", 7),
        ("open_train", "d", 3),
        ("open_validation", "d", "v", 5),
        ("open_test", "d", 2),
        ("open_data", "t", 2),
        ("open_data", "other", 4),
    ]
    own = {"data": "d", "val": "v", "test": None, "limit": 7, "val_limit": 5}
    assert network.card_fields() == own
    with pytest.raises(BadOption, match="for thresholds from training pictures"):
        TrainedNetwork("n", net).train_pictures()


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


def test_key_points_of_a_network_in_training_are_those_of_a_test(birds):
    net, fit = bird_net(birds), open_data(f"cub:{birds}:trainval", limit=8)
    test = open_data(f"cub:{birds}:test")
    expected = key_points(net, fit, test)
    assert key_points(net.train(), fit, test) == pytest.approx(expected) and net.training


def test_parts_of_a_network_in_training_are_left_out_as_in_a_test():
    net, batch = tiny_net(), (pictures(), torch.arange(3))
    expected = leave_one_out(net, [batch])
    result = leave_one_out(net.train(), [batch])
    assert net.training and not torch.equal(expected.without[0], expected.logits)
    assert_close(result.logits, expected.logits)
    assert_close(result.without, expected.without)


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
