"""A dataset's classes against a network's."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from seecause.data.folder import open_folder
from seecause.data.imagenet9 import open_imagenet9
from seecause.errors import BadOption, DataMissing
from seecause.faithful import TrainedNetwork, evaluate
from seecause.faithful.data import match_classes
from seecause.faithful.examine import Examination, examine
from seecause.metrics.segmentation import Overlap
from tests.faithful.nets import tiny_net
from tests.faithful.runs import tiny_pictures


def test_another_order_is_mapped_and_other_classes_are_refused(tmp_path):
    data = open_folder(str(tiny_pictures(tmp_path / "all", others=1) / "test"))
    turned, mapping = match_classes(tiny_net(classes=("right", "up", "left", "down")), data)
    assert (
        [sample.label for sample in turned] == [2, 0]
        and [sample.label for sample in data] == [0, 1]
        and mapping is None
    )
    assert turned.classes[2] == "left" and turned.name == data.name and len(turned) == 2
    assert (
        match_classes(tiny_net(classes=2), data)[0] is data
    )  # no names: nothing to compare but the count
    for classes in (4, ("left", "up")):
        with pytest.raises(BadOption, match="is none of them"):
            match_classes(tiny_net(classes=classes), data)


def test_every_imagenet_has_one_order_and_many_spellings(tmp_path):
    data = open_folder(str(tiny_pictures(tmp_path / "all", others=1) / "test"))
    for name in ("imagenet:x:val", "imagenet-s:x", "imagenet-hard:x"):
        spelt = dataclasses.replace(data, name=name)
        assert match_classes(tiny_net(classes=("sinister", "dexter")), spelt) == (spelt, None)


def test_imagenet9_takes_the_map_of_its_release(tmp_path):
    """Every ImageNet answer means `bird`, so each picture of a bird is right and no other."""
    tiny_pictures(tmp_path / "raw", others=2)
    for place, name in ((1, "01_bird"), (8, "08_fish")):
        (tmp_path / "bg" / "original" / "val").mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / ("test" if place == 1 else "val") / "left").rename(
            tmp_path / "bg" / "original" / "val" / name
        )
    data = open_imagenet9(str(tmp_path / "bg"))
    net = tiny_net(classes=1000)
    with pytest.raises(DataMissing, match="in_to_in9"):
        match_classes(net, data)
    (tmp_path / "bg" / "in_to_in9.json").write_text(
        json.dumps({str(place): 1 for place in range(1000)})
    )
    result, mapping = match_classes(net, data)
    table = examine(net, result, mapping=mapping).table()
    assert torch.equal(mapping, torch.ones(1000, dtype=torch.int64))
    assert (
        table["average"] == table["stage1_average"] == 0.5
        and table["worst"] == 0
        and "auc" not in table
    )


def test_a_network_is_tested_on_the_pictures_it_names(tmp_path):
    folder = tiny_pictures(tmp_path / "all")
    network = TrainedNetwork("tiny", tiny_net(), f"folder:{folder}", limit=10, val_limit=4)
    assert len(network.train_pictures()) == 10 and len(network.train_pictures(6)) == 6
    assert len(network.val_pictures()) == 4 and len(network.test_pictures()) == 6
    other = dataclasses.replace(network, test=f"folder:{folder / 'val'}")
    assert other.test_pictures().name.endswith("val")


def test_the_gap_between_backgrounds(tmp_path):
    """Every answer means `bird`: all of mixed_same are birds, half of mixed_rand are."""
    tiny_pictures(tmp_path / "raw", others=2)
    root = tmp_path / "bg"
    for variant, split, side, name in (
        ("mixed_same", "test", "left", "01_bird"),
        ("mixed_rand", "test", "right", "01_bird"),
        ("mixed_rand", "val", "left", "08_fish"),
    ):
        (root / variant / "val").mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / split / side).rename(root / variant / "val" / name)
    (root / "in_to_in9.json").write_text(json.dumps({str(place): 1 for place in range(1000)}))
    net = tiny_net(classes=1000)
    network = TrainedNetwork("tiny", net)
    row = evaluate(network, data=f"imagenet9:{root}:mixed_rand", interventions=False).plain
    assert row["average"] == row["background_gap"] == 0.5


def test_the_public_codes_worst_group_looks_at_fewer_groups():
    logits, groups = torch.eye(2)[[0, 1, 0, 1, 1]], ((0, 0), (0, 1), (1, 0), (1, 1), (0, 1))
    labels = torch.tensor(
        [1, 0, 0, 1, 1]
    )  # right: (0, 0) no, (0, 1) no and yes, (1, 0) yes, (1, 1) yes
    examination = Examination(logits, logits, labels, groups, Overlap(), 1.0, 0)
    assert examination.table()["worst"] == 0 and examination.public_worst("waterbirds:x:test") == {
        "worst_public": 0.5
    }
    assert (
        examination.public_worst("metashift:x:test") == {"worst_public": pytest.approx(1 / 3)}
        and examination.public_worst("celeba:x:test") == {}
    )
