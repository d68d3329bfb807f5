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

from seecause.background.images import no_progress
from seecause.critters import CLASSES
from seecause.data.backgrounds import open_imagenet9
from seecause.data.batch import to_batch
from seecause.data.folder import open_folder
from seecause.data.registry import open_data
from seecause.errors import (
    BadOption,
    DataMissing,
    UnknownName,
)
from seecause.faithful import (
    Thresholds,
    TrainedNetwork,
    data as faithful_data,
    evaluate,
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
from seecause.faithful.evaluation import _Test
from seecause.faithful.metrics import Examination, examine, merge
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


def test_the_gap_between_backgrounds(tmp_path, monkeypatch):
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
    matched, asked = TrainedNetwork.matched, []
    monkeypatch.setattr(
        TrainedNetwork, "matched", lambda self, *what: asked.append(what) or matched(self, *what)
    )
    name = f"imagenet9:{root}:mixed_rand"
    row = evaluate(network, data=name, interventions=False).plain
    assert row["average"] == row["background_gap"] == 0.5
    assert asked == [(name, None), (f"imagenet9:{root}:mixed_same", 4)]  # as many of the twin
    same = evaluate(network, data=f"imagenet9:{root}:mixed_same", interventions=False).plain
    assert "background_gap" not in same and same["average"] == 1


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
    with pytest.raises(DataMissing, match="no test split; name others: --data"):
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


def test_reading_leaves_the_global_generator_and_pins_where_a_gpu_waits(tmp_path, monkeypatch):
    """A draw of torch's loader would change whatever is drawn next."""
    pinned, helpers, loader = [], [], faithful_data.DataLoader

    def spy(*given, pin_memory, num_workers, **options):
        pinned.append(pin_memory)
        helpers.append(num_workers)
        return loader(*given, **options)

    monkeypatch.setattr(faithful_data, "DataLoader", spy)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    before = torch.get_rng_state()
    for pin in (False, True):
        assert list(read_batches([5, 6, 7], [[2, 0], [1]], list, workers=0, pin=pin)) == [
            [7, 5],
            [6],
        ]
    assert torch.equal(torch.get_rng_state(), before) and pinned == [False, True]
    for workers, keys in ((2, 5), (9, 5), (9, 2)):  # no more than batches, nor than cores
        list(read_batches([5, 6, 7], [[1]] * keys, list, workers=workers))
    assert helpers == [0, 0, 2, 3, 2]


def test_thresholds_are_made_where_they_are_not_those_of_all_pictures_and_kept_if_they_are(
    tmp_path, monkeypatch
):
    """Thresholds of some training pictures are for one look only."""
    net, made, kept = tiny_net(), [], []
    place = "seecause.faithful.evaluation"
    monkeypatch.setattr(f"{place}.calibrate", lambda net, images, q, by: made.append((q, by)))
    monkeypatch.setattr(f"{place}.keep_thresholds", lambda run, net: kept.append(run))
    monkeypatch.setattr(TrainedNetwork, "train_pictures", lambda self, limit: range(limit or 9))
    run = TrainedNetwork("n", net, "d", run=tmp_path)

    def look(network, calibration):
        made.clear(), kept.clear()
        test = _Test(network, [], None, 2, calibration, False, no_progress)
        test.calibrate([0.9], "dot")
        return len(made), len(kept)

    assert look(run, None) == (1, 1) and kept == [tmp_path] and made == [([0.9], "dot")]
    assert look(run, 4) == (1, 0)
    net.thresholds[0.9, "dot"] = Thresholds(0.9, "dot", (1.0,) * 3, pictures=9)
    assert look(run, None) == (0, 0) and look(run, 4) == (1, 0)
    shipped = TrainedNetwork("n", net, "d")
    monkeypatch.setattr(TrainedNetwork, "train_pictures", lambda self, limit: range(limit or 5))
    assert look(shipped, None) == (0, 0)  # it brings its own
    assert look(shipped, 4) == (1, 0) and look(run, None) == (1, 1)


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


class Release:
    """A dataset of 20 pictures of two classes, by any name."""

    classes, fingerprint, labels = ("a", "b"), "0", (0,) * 10 + (1,) * 10

    def __init__(self, name, limit):
        self.name, self.limit = name, limit

    def __len__(self):
        return 20


@pytest.mark.parametrize(
    ("data", "train", "val", "test"),
    [
        ("waterbirds:P", "waterbirds:P:train 5", "waterbirds:P:val 5", "waterbirds:P:test 5"),
        ("imagenet:P", "imagenet:P:train None", "imagenet:P:train None", "imagenet:P 5"),
        ("pets:P", "pets:P:trainval None", "pets:P:trainval None", "pets:P:test 5"),
        ("food101:P", "food101:P:train None", "food101:P:train None", "food101:P:test 5"),
        ("imagenet9:P", "", "", "imagenet9:P 5"),
        ("waterbird200:P", "", "", "waterbird200:P 5"),
        ("imagenet-s:P", "", "", "imagenet-s:P 5"),
        ("imagenet-hard:P", "", "", "imagenet-hard:P 5"),
    ],
)
def test_every_release_has_its_splits(monkeypatch, data, train, val, test):
    """Where it has no validation of its own, one in ten training pictures of each class is."""
    opened = []

    def spy(name, limit=None):
        opened.append(f"{name} {limit}")
        return Release(name, limit)

    monkeypatch.setattr(faithful_data, "open_data", spy)
    for opener, expected in ((open_train, train), (open_val, val), (open_test, test)):
        if not expected:
            with pytest.raises(BadOption, match="for testing"):
                opener(data, limit=5)
            continue
        pictures = opener(data, limit=5)
        assert opened.pop() == expected and not opened
        if expected.endswith("None"):  # a part of what was opened whole
            assert len(pictures) == (5 if opener is open_train else 2)
    open_validation(data, "other:P:val", limit=3)
    assert opened == ["other:P:val 3"]


def test_a_world_without_end_is_trained_on_a_pool_of_it(monkeypatch):
    monkeypatch.setattr(faithful_data, "_POOL", 11)
    assert len(open_train("critters:certified")) == 11
    assert len(open_train("critters:certified", limit=30)) == 30
    assert len(open_train("critters:simplicity")) == 4096  # it has an end
    assert len(open_val("critters:certified")) > 11


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
