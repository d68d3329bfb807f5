"""Splits of a dataset, its classes against a network's, and batches in a known order."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch.utils.data import default_collate

from seecause.critters.world import CLASSES
from seecause.data.batch import to_batch
from seecause.data.dataset import open_data
from seecause.data.imagenet import open_imagenet9
from seecause.data.photos import open_folder
from seecause.errors import BadOption, DataMissing
from seecause.faithful.data import (
    TrainingImages,
    batches_of,
    epoch_order,
    match_classes,
    open_split,
    pass_rows,
    read_batches,
)
from seecause.faithful.evaluation import Examination, examine
from seecause.faithful.training import new_net
from tests.faithful.nets import tiny_net
from tests.faithful.runs import tiny_config, tiny_images


def test_another_order_is_mapped_and_other_classes_are_refused(tmp_path):
    data = open_folder(str(tiny_images(tmp_path / "all", others=1) / "test"))
    turned, mapping = match_classes(tiny_net(classes=("right", "up", "left", "down")), data)
    assert turned.tolist() == [2, 0] and mapping is None
    without_names, _ = match_classes(tiny_net(classes=2), data)
    assert without_names.tolist() == [0, 1]  # nothing to compare but the count
    for classes in (4, ("left", "up"), ("left", "right", "right")):
        with pytest.raises(BadOption, match="not among them"):
            match_classes(tiny_net(classes=classes), data)
    many = tiny_net(classes=tuple("abcdefg"))
    with pytest.raises(BadOption, match=r"\(a, b, c, d, e, f\); not among them: .*left"):
        match_classes(many, data)
    with pytest.raises(BadOption, match=r"\(4, without names\)"):
        match_classes(tiny_net(), data)
    with pytest.raises(BadOption, match="not among them"):
        match_classes(many, replace(data, classes=()))


def test_imagenet9_takes_the_map_of_its_release(tmp_path):
    """Every ImageNet answer means `bird`, so each image of a bird is right and no other."""
    tiny_images(tmp_path / "raw", others=2)
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
    classes, mapping = match_classes(net, data)
    table = examine(net, data, (classes, mapping)).table()
    assert torch.equal(mapping, torch.ones(1000, dtype=torch.int64))
    assert (
        table["average"] == table["stage1_average"] == 0.5
        and table["worst"] == 0
        and "auc" not in table
    )


def test_the_public_codes_worst_group_looks_at_fewer_groups():
    logits, groups = torch.eye(2)[[0, 1, 0, 1, 1]], ((0, 0), (0, 1), (1, 0), (1, 1), (0, 1))
    labels = torch.tensor(
        [1, 0, 0, 1, 1]
    )  # right: (0, 0) no, (0, 1) no and yes, (1, 0) yes, (1, 1) yes
    examination = Examination(logits, logits, labels, torch.tensor(groups), torch.ones(5))
    assert examination.table()["worst"] == 0 and examination.public_worst("waterbirds:x:test") == {
        "worst_public": 0.5
    }
    assert (
        examination.public_worst("metashift:x:test") == {"worst_public": pytest.approx(1 / 3)}
        and examination.public_worst("celeba:x:test") == {}
    )


def test_an_epoch_is_shared_out_whole():
    order = epoch_order(11, 5, 2)
    alone = pass_rows(order, 4)
    assert [row for step in alone for row in step] == order.tolist()[:8]
    shared = [pass_rows(order, 4, accumulate=2, rank=rank, world=2) for rank in (0, 1)]
    assert all(len(part) == 4 and all(len(one) == 1 for one in part) for part in shared)
    for step in (0, 1):
        rows = [row for part in shared for one in part[2 * step : 2 * step + 2] for row in one]
        assert sorted(rows) == sorted(alone[step])
    assert pass_rows(order, 4, first=1) == alone[1:]
    orders = [epoch_order(11, *key).tolist() for key in ((5, 2), (5, 3), (6, 2))]
    assert len(set(map(tuple, orders))) == 3 and len(alone) == 2


def test_validation_is_never_training_nor_test(tmp_path):
    flat = tiny_images(tmp_path / "all", train=20)
    folder = f"folder:{flat / 'train'}"
    train_part, val_part = (ids(open_split(folder, split)) for split in ("train", "val"))
    assert len(train_part) == 36 and len(val_part) == 4 and not train_part & val_part
    split = [ids(open_split(f"folder:{flat}", name)) for name in ("train", "val", "test")]
    assert [len(subset) for subset in split] == [40, 6, 6]
    whole = open_split("critters:simplicity", "train")
    assert whole.name == "critters:simplicity:train" and len(whole) == 4096
    val = open_split("critters:simplicity", "val", limit=7)
    assert (val.name, len(val)) == ("critters:simplicity:val", 7)
    few = open_split(f"folder:{flat / 'train'}", "train", limit=4)
    assert len(few) == 4 and {sample.label for sample in few} == {0, 1} and ids(few) < train_part
    with pytest.raises(BadOption, match="for testing"):
        open_split("waterbird200:PATH", "train")
    with pytest.raises(DataMissing, match="too few images of any class to keep one in ten for val"):
        open_split(f"folder:{flat / 'val'}", "val")
    (tmp_path / "loose").mkdir()
    shutil.copy(flat / "test" / "left" / "0.png", tmp_path / "loose")
    with pytest.raises(BadOption, match="a dataset with labels"):
        open_split(f"folder:{tmp_path / 'loose'}", "train")
    with pytest.raises(DataMissing, match="test"):  # all images are for training and validation
        open_split(f"folder:{flat / 'train'}", "test")


def ids(data):
    return {data[place].id for place in range(len(data))}


def test_reading_processes_change_nothing(tmp_path):
    config = tiny_config(tmp_path)
    frame = new_net(config, ("a", "b")).preprocess
    data = TrainingImages(open_split(config.data, "train"), "birds", frame, seed=1)
    rows, cpu = pass_rows(epoch_order(16, 1, 0), 4)[:2], torch.device("cpu")
    alone, helped = (
        read_batches(data, rows, default_collate, workers=workers, device=cpu) for workers in (0, 1)
    )
    for mine, theirs in zip(alone, helped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    image, label, index = data[3]
    later, other = replace(data, epoch=1), replace(data, seed=2)
    assert not torch.equal(image, later[3][0]) and not torch.equal(image, other[3][0])
    assert (label, index) == (data.data[3].label, 3)


def test_groups_come_with_their_images():
    net, data = tiny_net(classes=CLASSES), open_data("critters:balanced:val", limit=5)
    batches = list(batches_of(net, data, batch=2))
    assert [len(images) for images, *_ in batches] == [2, 2, 1]
    samples = list(data)
    assert torch.cat([batch[1] for batch in batches]).tolist() == [s.label for s in samples]
    groups = torch.cat([batch[2] for batch in batches])
    assert groups.tolist() == [list(s.group) for s in samples]
    assert torch.equal(torch.cat([b[0] for b in batches]), to_batch(net, samples).images)
    mixed = [replace(samples[0], group=None), samples[1]]
    assert [batch[2] for batch in batches_of(net, mixed)] == [None]  # not all have one
    assert list(batches_of(net, data, rows=range(0))) == []  # the share of an idle process


def test_an_image_without_a_label_is_named():
    net = tiny_net()
    sample = replace(open_data("critters:clean:val", limit=1)[0], label=None, id="x.png")
    with pytest.raises(BadOption, match=r"x\.png without a label"):
        list(batches_of(net, [sample]))
    labelled = TrainingImages([replace(sample, label=3)], "none", net.preprocess, seed=0)
    image, label, index = labelled[0]
    assert torch.equal(image, to_batch(net.float(), [sample]).images[0])
    assert (label, index) == (3, 0)
