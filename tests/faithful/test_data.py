"""A dataset's classes against a network's."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import default_collate

from seecause.critters import CLASSES
from seecause.data.batch import to_batch
from seecause.data.imagenet import open_imagenet9
from seecause.data.photos import open_folder
from seecause.data.registry import open_data
from seecause.errors import (
    BadOption,
    DataMissing,
    UnknownName,
)
from seecause.faithful import (
    TrainedNetwork,
    open_network,
)
from seecause.faithful.data import (
    StepShares,
    TrainingPictures,
    epoch_order,
    frame_of,
    labelled_batches,
    match_classes,
    open_test,
    open_train,
    open_val,
    open_validation,
    read_batches,
)
from seecause.faithful.evaluation import Examination, examine, merge
from seecause.faithful.training import new_net
from seecause.metrics._localization import Overlap
from tests.faithful.nets import tiny_net
from tests.faithful.runs import tiny_config, tiny_pictures


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
    assert turned.classes == ("right", "up", "left", "down")
    assert turned.fingerprint == data.fingerprint
    unknown = replace(turned, data=[replace(data[0], label=None)])
    assert unknown[0].label is None and len(unknown) == 1
    for classes in (4, ("left", "up"), ("left", "right", "right")):
        with pytest.raises(BadOption, match="is none of them"):
            match_classes(tiny_net(classes=classes), data)
    many = tiny_net(classes=tuple("abcdefg"))
    with pytest.raises(BadOption, match=r"\(a, b, c, d, e, f \.\.\.\); 'left' is none"):
        match_classes(many, data)
    with pytest.raises(BadOption, match=r"\(4, without names\)"):
        match_classes(tiny_net(), data)
    with pytest.raises(BadOption, match="a dataset with labels"):
        match_classes(many, replace(data, classes=()))
    with pytest.raises(BadOption, match="does not tell how pictures are prepared"):
        frame_of(SimpleNamespace(preprocess=None))


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


def test_an_epoch_is_shared_out_whole():
    alone = StepShares(4).keys(11, seed=5, epoch=2)
    assert [index for step in alone for _, index in step] == epoch_order(11, 5, 2).tolist()[:8]
    shared = [
        StepShares(4, accumulate=2, rank=rank, world=2).keys(11, seed=5, epoch=2) for rank in (0, 1)
    ]
    assert all(len(part) == 4 and all(len(one) == 1 for one in part) for part in shared)
    for step in (0, 1):
        assert sorted(
            key for part in shared for one in part[2 * step : 2 * step + 2] for key in one
        ) == sorted(alone[step])
    assert StepShares(4).keys(11, seed=5, epoch=2, first=1) == alone[1:]
    orders = [epoch_order(11, *key).tolist() for key in ((5, 2), (5, 3), (6, 2))]
    assert len(set(map(tuple, orders))) == 3 and len(alone) == 2
    with pytest.raises(BadOption, match="multiple of 4"):
        StepShares(6, accumulate=2, world=2).keys(11, seed=0, epoch=0)
    with pytest.raises(BadOption, match="at most 3"):
        StepShares(4).check(3)


def test_validation_is_never_training_nor_test(tmp_path):
    flat = tiny_pictures(tmp_path / "all", train=20)
    train_part, val_part = (
        ids(opener(f"folder:{flat / 'train'}")) for opener in (open_train, open_val)
    )
    assert len(train_part) == 36 and len(val_part) == 4 and not train_part & val_part
    split = [ids(opener(f"folder:{flat}")) for opener in (open_train, open_val, open_test)]
    assert [len(subset) for subset in split] == [40, 6, 6]
    assert (
        open_train("critters:simplicity").name == "critters:simplicity:train"
        and len(open_train("critters:simplicity")) == 4096
    )
    val = open_val("critters:simplicity", limit=7)
    assert (val.name, len(val)) == ("critters:simplicity:val", 7)
    few = open_train(f"folder:{flat / 'train'}", limit=4)
    assert len(few) == 4 and {sample.label for sample in few} == {0, 1} and ids(few) < train_part
    with pytest.raises(BadOption, match="for testing"):
        open_train("waterbird200:PATH")
    assert open_val(f"folder:{flat / 'train'}").name == f"folder:{flat / 'train'} (val)"
    with pytest.raises(DataMissing, match="too few photos of any class to keep one in ten for val"):
        open_val(f"folder:{flat / 'val'}")
    (tmp_path / "loose").mkdir()
    shutil.copy(flat / "test" / "left" / "0.png", tmp_path / "loose")
    loose = f"folder:{tmp_path / 'loose'}"
    for opener in (open_train, lambda name: open_validation("critters:clean", name)):
        with pytest.raises(BadOption, match="a dataset with labels"):
            opener(loose)
    shutil.rmtree(flat / "test")
    with pytest.raises(DataMissing, match="no such folder"):
        open_test(f"folder:{flat}")
    with pytest.raises(DataMissing, match="no test split"):
        open_test(f"folder:{flat / 'train'}")


def ids(data):
    return {data[place].id for place in range(len(data))}


def test_reading_processes_change_nothing(tmp_path):
    config = tiny_config(tmp_path)
    data = TrainingPictures(
        open_train(config.data), "birds", new_net(config, ("a", "b")).preprocess, seed=1
    )
    keys = StepShares(4).keys(len(data), seed=1, epoch=0)[:2]
    alone, helped = (
        read_batches(data, keys, default_collate, workers=workers) for workers in (0, 1)
    )
    for mine, theirs in zip(alone, helped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    other = TrainingPictures(data.data, "birds", data.frame, seed=2)
    image, label, index = data[(0, 3)]
    assert not torch.equal(image, data[(1, 3)][0]) and not torch.equal(image, other[(0, 3)][0])
    assert (label, index) == (data.data[3].label, 3)


def test_networks_that_are_not_there_are_named_as_what_they_are(tmp_path):
    for name, error, message in (
        ("builtin:nonsense", UnknownName, "builtin model 'nonsense' not found"),
        ("builtin:critters-vit", BadOption, "an iFAM network.*VisionTransformer"),
        (str(tmp_path), DataMissing, "no run"),
    ):
        with pytest.raises(error, match=message):
            open_network(name)


def test_numbers_of_both_stages_and_of_pictures_without_an_object_stand_apart():
    right, wrong = torch.eye(2)[[0, 1, 0, 1]], torch.eye(2)[[0, 1, 1, 0]]
    ious = torch.tensor([0.5, torch.nan, 0.25, torch.nan], dtype=torch.float64)
    made = Examination(
        right, wrong, torch.tensor([0, 1, 0, 1]), (None,) * 4, Overlap(3, 4), 0.5, 1,
        picture_ious=ious, mask_overlap=Overlap(1, 4),
    )  # fmt: skip
    expected = {"average": 1, "worst": 1, "stage1_average": 0.5, "auc": 1, "miou": 0.75}
    expected |= {"miou_pictures": 0.375, "mask_iou": 0.25, "kept": 0.5, "empty": 1}
    assert made.table() == pytest.approx(expected)
    both = merge([made, replace(made, stage1=right, empty=2, kept=0.0)]).table()
    assert (both["stage1_average"], both["empty"], both["kept"]) == (0.75, 3, 0.25)


def test_groups_come_with_their_pictures():
    net, data = tiny_net(classes=CLASSES), open_data("critters:balanced:val", limit=5)
    batches = list(labelled_batches(net, data, batch=2))
    assert [len(images) for images, *_ in batches] == [2, 2, 1]
    samples = list(data)
    assert torch.cat([batch[1] for batch in batches]).tolist() == [s.label for s in samples]
    groups = torch.cat([batch[2] for batch in batches])
    assert groups.tolist() == [list(s.group) for s in samples]
    assert torch.equal(torch.cat([b[0] for b in batches]), to_batch(frame_of(net), samples).images)
    ungrouped = [replace(samples[0], group=None), *samples[1:2]]
    mixed = type("Mixed", (list,), {"name": "mixed"})(ungrouped)
    assert [len(batch) for batch in labelled_batches(net, mixed)] == [2]  # not all have one


def test_a_picture_without_a_label_is_named():
    sample = replace(open_data("critters:clean:val", limit=1)[0], label=None, id="x.png")
    data = type("Unlabelled", (list,), {"name": "unlabelled"})([sample])
    pictures = TrainingPictures(data, "none", tiny_net().preprocess, seed=0)
    with pytest.raises(BadOption, match=r"x\.png without a label"):
        pictures[0, 0]
    with pytest.raises(BadOption, match=r"unlabelled.*a dataset with labels"):
        list(labelled_batches(tiny_net(), data))
    labelled = TrainingPictures([replace(sample, label=3)], "none", tiny_net().preprocess, seed=0)
    image, label, index = labelled[0, 0]
    assert torch.equal(image, to_batch(frame_of(tiny_net().float()), [sample]).images[0])
    assert (label, index, len(labelled)) == (3, 0, 1)
