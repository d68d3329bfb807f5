"""A trained network, the images it is tested on, and what is measured there: accuracies, the
foreground, key points of birds, and interventions."""

from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.critters.world import CLASSES
from seecause.data.batch import to_batch
from seecause.data.dataset import IGNORE, open_data
from seecause.errors import BadOption, DataMissing, UnknownName
from seecause.faithful import Intervention, calibrate, evaluate, intervene, open_network
from seecause.faithful.data import batches_of, open_split
from seecause.faithful.evaluation import (
    Examination,
    TrainedNetwork,
    examine,
    example_parts,
    key_points,
    keypoint_fit_data,
    merge,
)
from seecause.metrics.annotations import Overlap, foreground, keypoint_error, locate, part_agreement
from seecause.models.preprocess import Preprocess
from tests.faithful.birds import KINDS, bird_net, tiny_cub
from tests.faithful.nets import SIZE, tiny_net
from tests.faithful.runs import tiny_images

FRAME = Preprocess(size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, filter="bilinear")


@pytest.fixture(scope="module")
def scenes():
    return tiny_net(classes=CLASSES).float(), open_data("critters:balanced:test", limit=5)


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    return tiny_cub(tmp_path_factory.mktemp("birds") / "CUB_200_2011")


def recorded():
    """A `progress`, and what it was called with: what, of how many, in which steps."""
    calls: list[tuple[str, int, list[int]]] = []

    @contextmanager
    def progress(what, total):
        steps: list[int] = []
        yield steps.append
        calls.append((what, total, steps))

    return progress, calls


@torch.no_grad()
def test_the_numbers_are_those_of_the_network(scenes):
    """Parts left out leave the maps as they are, and the mask not."""
    net, data = scenes
    result = examine(net, data, batch=2)
    batch = to_batch(net, list(data))
    out, truth = net(batch.images), batch.masks == 1
    assert_close(result.logits, out.logits.float())
    assert_close(result.stage1, out.stage1_logits.float())
    parts, plain = foreground(out.maps, SIZE), result.table()
    assert plain["miou"] == pytest.approx(float((parts & truth).sum() / (parts | truth).sum()))
    assert plain["kept"] == pytest.approx(float(out.mask.double().mean()))
    with intervene(net, drop_parts=range(net.parts)):
        changed = examine(net, data, batch=2).table()
    assert changed["miou"] == plain["miou"] > 0 and changed["kept"] == 0 < plain["kept"]
    assert (plain["empty"], changed["empty"]) == (int(out.empty.sum()), 5) and plain["empty"] < 5
    try:  # a network in training mode is examined as it predicts, and stays in that mode
        assert examine(net.train(), data, batch=2).table() == plain and net.training
    finally:
        net.eval()
    shares = [examine(net, data, rows=range(start, 5, 2)) for start in (0, 1)]
    assert merge(shares).table() == pytest.approx(plain, abs=1e-6)  # two processes


@torch.no_grad()
def test_half_precision_is_that_of_the_network_and_pixels_that_are_neither_do_not_count(scenes):
    net, data = scenes
    images = to_batch(net, list(data)).images
    half = examine(net, data, autocast=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(half.logits, net(images).logits.float(), atol=1e-2, rtol=0)
    assert not torch.equal(half.logits, examine(net, data).logits)

    masks = [sample.mask.to(torch.int32) for sample in data]
    for mask in masks:
        mask[:, :40] = IGNORE
    unsure = [replace(sample, mask=mask) for sample, mask in zip(data, masks, strict=True)]
    batch = to_batch(net, unsure)
    counted, truth = batch.masks != IGNORE, batch.masks == 1
    parts = foreground(net(batch.images).maps, SIZE)
    both, either = ((parts & truth & counted), ((parts | truth) & counted))
    table = examine(net, unsure, batch=2).table()
    assert table["miou"] == pytest.approx(float(both.sum() / either.sum()))


def test_numbers_of_both_stages_stand_apart():
    right, wrong = torch.eye(2)[[0, 1, 0, 1]], torch.eye(2)[[0, 1, 1, 0]]
    kept = torch.tensor([1.0, 1, 0, 0])
    made = Examination(right, wrong, torch.tensor([0, 1, 0, 1]), None, kept, Overlap(3, 4))
    expected = {"average": 1, "worst": 1, "stage1_average": 0.5, "auc": 1, "miou": 0.75}
    assert made.table() == pytest.approx(expected | {"kept": 0.5, "empty": 2})
    both = merge([made, replace(made, stage1=right)]).table()
    assert (both["stage1_average"], both["empty"], both["kept"]) == (0.75, 4, 0.5)


def examined(logits, labels, groups=None, mapping=None) -> Examination:
    groups = None if groups is None else torch.tensor(groups)
    return Examination(
        logits, logits, torch.tensor(labels), groups, torch.ones(len(labels)), mapping=mapping
    )


def test_auc_is_of_two_classes_or_more_that_are_the_networks_own():
    assert "auc" in examined(torch.eye(2), [0, 1]).table()
    assert "auc" not in examined(torch.ones(2, 1), [0, 0]).table()
    assert "auc" not in examined(torch.eye(3)[:2], [0, 1]).table()  # a class is missing
    mapped = examined(torch.eye(2), [1, 0], mapping=torch.tensor([1, 0])).table()
    assert "auc" not in mapped and mapped["average"] == 1


def test_a_class_that_belongs_to_none_of_the_nine_is_wrong():
    mapping = torch.tensor([3, -1, 3, 0])
    assert examined(torch.eye(4), [3, 3, 3, 0], mapping=mapping).table()["average"] == 0.75


def test_worst_is_that_of_a_class_where_some_image_has_no_group():
    logits, labels = torch.eye(2)[[0, 0, 0, 1]], [0, 0, 1, 1]  # the third is wrong
    whole = examined(logits, labels, ((0, 0), (0, 1), (1, 0), (1, 1)))
    some = merge([whole, examined(logits, labels)])
    assert (whole.table()["worst"], some.table()["worst"]) == (0, 0.5)
    assert whole.public_worst("waterbirds:x:test") == {"worst_public": 0}
    assert some.public_worst("waterbirds:x:test") == some.public_worst("metashift:x:test") == {}
    half = examined(logits, labels, ((0, 0), (0, 1), (1, 1), (1, 1)))
    assert half.public_worst("waterbirds:x:test") == {}  # one of the two was not tested


def calibrated(birds, limit, quantiles):
    """The network with thresholds by dot product, of so many training images as they are tested."""
    net = bird_net(birds)
    images = open_split(f"cub:{birds}", "train", limit=limit)
    calibrate(net, (pixels for pixels, *_ in batches_of(net, images)), quantiles, by="dot")
    return net


@torch.no_grad()
def test_an_intervention_is_tested_with_the_thresholds_asked_for(birds):
    (progress, calls), name = recorded(), f"waterbird200:{birds}"
    network = TrainedNetwork("birds", bird_net(birds), f"cub:{birds}")
    result = evaluate(
        network, intervention=Intervention((2,), 0.8, "dot"), keypoints=False, data=name,
        calibration=9, limit=5, batch=2, progress=progress,
    )  # fmt: skip
    net, test = calibrated(birds, 9, 0.8), open_data(name, limit=5)
    assert result.plain == pytest.approx(examine(net, test).table())
    with intervene(net, drop_parts=[2], quantile=0.8, by="dot"):
        assert result.changed == pytest.approx(examine(net, test).table())
    assert result.changed["kept"] < result.plain["kept"] and result.images == 5
    assert result.intervention == Intervention((2,), 0.8, "dot")
    steps = [("calibrating", 9, [2, 2, 2, 2, 1]), *[("examining", 5, [2, 2, 1])] * 2]
    assert calls == steps
    with pytest.raises(BadOption, match="parts 0-2"):
        evaluate(network, intervention=Intervention((3,)), keypoints=False)


@torch.no_grad()
def test_the_best_intervention_is_chosen_on_validation(birds):
    """Plain numbers, those it changes, and key points where tokens are rejected."""
    network = TrainedNetwork("birds", bird_net(birds), f"cub:{birds}")
    result = evaluate(network, quantiles=[0.5], keypoints=False)
    net, val = network.net, network.images("val")
    every = [trial.intervention for trial in result.trials]
    assert len(every) == 8 and every[0] == Intervention() and len(set(every)) == 8
    assert net.thresholds[0.5, "distance"].images == len(network.images("train"))
    for trial in result.trials:
        with intervene(net, **asdict(trial.intervention)):
            assert examine(net, val).table()["average"] == pytest.approx(trial.average)
    with intervene(net, **asdict(result.intervention)):
        assert result.changed == pytest.approx(examine(net, network.images("test")).table())
    # a copy without a run brings its thresholds; those of fewer images are not taken for them
    kept = dict(net.thresholds)
    evaluate(network, intervention=Intervention((), 0.5), keypoints=False, limit=1)
    assert net.thresholds == kept
    evaluate(network, intervention=Intervention((), 0.5), keypoints=False, limit=1, calibration=3)
    assert net.thresholds[0.5, "distance"].images == 3
    alone = TrainedNetwork("alone", bird_net(birds), test=f"cub:{birds}:test")
    with pytest.raises(BadOption, match="names its training data"):
        evaluate(alone)


def test_a_network_is_tested_on_the_images_it_names(tmp_path):
    folder = tiny_images(tmp_path / "all")
    network = TrainedNetwork("tiny", tiny_net(), f"folder:{folder}")
    assert len(network.images("train")) == 16 and len(network.images("train", 6)) == 6
    assert len(network.images("val")) == 6 and len(network.images("test")) == 6
    other = replace(network, test=f"folder:{folder / 'val'}")
    assert other.images("test").name.endswith("val")


def test_a_network_comes_back_from_its_folder_on_the_device_asked_for(birds, tmp_path):
    network = TrainedNetwork("birds", bird_net(birds), f"cub:{birds}", test="t:x")
    network.export(tmp_path / "shipped")
    again = open_network(str(tmp_path / "shipped"), device="meta")
    assert (again.data, again.val, again.test) == (f"cub:{birds}", None, "t:x")
    assert again.run is None and not again.net.training
    assert again.net.device.type == "meta" and again.net.class_names == KINDS
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "shipped"):
        with pytest.raises(BadOption, match="a new or empty folder"):
            network.export(place)


def test_networks_that_are_not_there_are_named_as_what_they_are(tmp_path):
    for name, error, message in (
        ("builtin:nonsense", UnknownName, "builtin model 'nonsense' not found"),
        ("builtin:critters-vit", BadOption, "an iFAM network.*VisionTransformer"),
        (str(tmp_path), DataMissing, "0 models"),
    ):
        with pytest.raises(error, match=message):
            open_network(name)


@torch.no_grad()
def test_examples_are_named_by_their_place_and_class(birds, scenes):
    network = TrainedNetwork("birds", bird_net(birds), f"cub:{birds}")
    network.net.class_names = ()  # the images have names, even if the network has none
    name, examples = example_parts(network, limit=4)
    data = open_data(f"cub:{birds}:test", limit=4)
    assert name == data.name
    assert examples.titles == [f"{n}: {KINDS[data[n - 1].label]}" for n in (1, 2, 3, 4)]
    assert torch.equal(examples.images, to_batch(network.net, list(data)).images)
    other, examples = example_parts(network, data=f"waterbird200:{birds}", limit=2)
    assert other == f"waterbird200:{birds}" and len(examples.images) == 2
    assert list(examples.without) == [0, 1, 2] and examples.net is network.net
    many = TrainedNetwork("scenes", scenes[0], test="critters:balanced:test")
    assert len(example_parts(many, limit=33)[1].images) == 33


def slow(net, fit, test):
    """By the metric's own loop, with maps of the whole network."""
    model = sc.wrap(net)
    result = [locate(model, data, lambda images: net(images).maps) for data in (fit, test)]
    return [keypoint_error(*result), *part_agreement(result[1])]


@pytest.mark.parametrize("name", ["cub", "waterbird200"])
def test_key_points_are_those_of_the_metric(birds, name):
    net, test = bird_net(birds), open_data(f"{name}:{birds}")
    fit = open_data(keypoint_fit_data(test.name))
    result = key_points(net.train(), fit, test)  # without noise
    net.eval()
    assert fit.name == f"cub:{birds}:trainval" and len(fit) == 20
    assert list(result.values()) == pytest.approx(slow(net, fit, test), abs=1e-9)
    assert result["keypoints"] > 1 and result["nmi"] > 0.01


def test_rejected_tokens_change_key_points_and_parts_left_out_do_not(birds):
    net, test = bird_net(birds), open_data(f"cub:{birds}")
    fit = open_data(keypoint_fit_data(test.name))
    calibrate(net, (images for images, *_ in batches_of(net, fit)), 0.5)
    plain = key_points(net, fit, test)
    with intervene(net, drop_parts=[0]):
        assert key_points(net, fit, test) == plain
    with intervene(net, quantile=0.5):
        changed = key_points(net, fit, test)
        assert list(changed.values()) == pytest.approx(slow(net, fit, test), abs=1e-9)
    assert abs(changed["keypoints"] - plain["keypoints"]) > 0.01
    network = TrainedNetwork("birds", net, f"cub:{birds}")
    result = evaluate(network, intervention=Intervention((), 0.5), calibration=None)
    assert result.plain["keypoints"] == pytest.approx(plain["keypoints"])
    assert result.changed["keypoints"] != result.plain["keypoints"]
