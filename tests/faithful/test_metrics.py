"""What is measured on a dataset: where the mask is, what an intervention is chosen by, what a run
keeps of it, and key points of birds from parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from torchvision.transforms.functional import pil_to_tensor

import seecause as sc
from seecause.background.images import no_progress
from seecause.critters import CLASSES
from seecause.data.batch import to_batch
from seecause.data.dataset import IGNORE, Sample
from seecause.data.images import to_pil
from seecause.data.registry import open_data
from seecause.errors import BadOption
from seecause.faithful import (
    LeaveOneOut,
    calibrate,
    intervene,
)
from seecause.faithful.data import batches_of, frame_of
from seecause.faithful.evaluation import (
    Examination,
    RandomCuts,
    TrainedNetwork,
    _Test,
    cuts_with_object,
    examine,
    key_points,
    keypoint_fit_data,
    merge,
)
from seecause.faithful.interventions import Trial, best_of, sensible_criterion
from seecause.metrics import keypoint_error, locate, part_agreement
from seecause.metrics._localization import Overlap, foreground
from seecause.metrics.accuracy import auroc
from seecause.models.preprocess import Preprocess
from tests.faithful.birds import bird_net, tiny_cub
from tests.faithful.nets import SIZE, tiny_net
from tests.faithful.runs import tiny_config
from tests.helpers import noise

FRAME = Preprocess(size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, filter="bilinear")


@pytest.fixture(scope="module")
def scenes():
    return tiny_net(classes=CLASSES).float(), open_data("critters:balanced:test", limit=5)


@torch.no_grad()
def test_maps_and_mask_are_measured_apart(scenes):
    """Parts left out leave the maps as they are, and the mask not."""
    net, data = scenes
    plain = examine(net, data, batch=2).table()
    batch = to_batch(frame_of(net), list(data))
    out, truth = net(batch.images), batch.masks == 1
    ious = [
        float((m & t).sum() / (m | t).sum())
        for m, t in zip(foreground(out.maps, SIZE), truth, strict=True)
    ]
    assert (
        plain["miou_pictures"] == pytest.approx(sum(ious) / 5, abs=1e-6)
        and plain["miou_pictures"] != plain["miou"]
    )
    result = examine(net, data, batch=2)
    assert_close(result.logits, out.logits.float())
    assert_close(result.stage1, out.stage1_logits.float())
    both = either = 0
    for mask, object_ in zip(out.mask, truth, strict=True):
        for row in range(SIZE[0]):
            for column in range(SIZE[1]):
                pair = bool(mask[row // 8, column // 8]), bool(object_[row, column])
                both, either = both + all(pair), either + any(pair)
    assert plain["mask_iou"] == pytest.approx(both / either)
    with intervene(net, drop_parts=range(net.parts)):
        changed = examine(net, data, batch=2).table()
    assert (
        changed["miou"] == plain["miou"] > 0
        and changed["mask_iou"] == changed["kept"] == 0 < plain["mask_iou"]
    )
    assert (plain["empty"], changed["empty"]) == (int(out.empty.sum()), 5) and plain["empty"] < 5
    try:  # a network that learns is examined as it answers, and goes on learning
        assert examine(net.train(), data, batch=2).table() == plain and net.training
    finally:
        net.eval()


@torch.no_grad()
def test_half_precision_is_that_of_the_network_and_pixels_that_are_neither_do_not_count(scenes):
    net, data = scenes
    images = to_batch(frame_of(net), list(data)).images
    half = examine(net, data, autocast=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(half.logits, net(images).logits.float(), atol=1e-2, rtol=0)
    assert not torch.equal(half.logits, examine(net, data).logits)

    masks = [sample.mask.to(torch.int32) for sample in data]
    for mask in masks:
        mask[:, :40] = IGNORE
    unsure = [replace(sample, mask=mask) for sample, mask in zip(data, masks, strict=True)]
    batch = to_batch(frame_of(net), unsure)
    counted, truth = batch.masks != IGNORE, batch.masks == 1
    parts = foreground(net(batch.images).maps, SIZE)
    both, either = ((parts & truth & counted), ((parts | truth) & counted))
    table = examine(net, type("Unsure", (list,), {"name": "unsure"})(unsure), batch=2).table()
    assert table["miou"] == pytest.approx(float(both.sum() / either.sum()))
    ious = both.sum(dim=(1, 2)) / either.sum(dim=(1, 2))
    assert table["miou_pictures"] == pytest.approx(float(ious.mean()))


@torch.no_grad()
def test_several_processes_measure_as_one(scenes):
    net, data = scenes
    shares = [examine(net, data, places=range(start, 5, 2)) for start in (0, 1)]
    assert merge(shares).table() == pytest.approx(examine(net, data).table(), abs=1e-6)


class Strip:
    """One picture, twice as wide as the frame, whose object is at the right end; and one without a
    mask."""

    name, classes, fingerprint, turned = "strip", ("a",), "0", False

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Sample:
        image = torch.linspace(0, 1, 32).expand(3, 16, 32)
        mask = torch.zeros(16, 32, dtype=torch.bool)
        mask[4:12, 28:] = True
        if self.turned:
            image, mask = image.transpose(1, 2), mask.T
        marked = {"box": (28.0, 4.0, 4.0, 8.0), "points": torch.ones(2, 3), "parts": mask.int()}
        return Sample(image, 0, mask=None if index else mask, id=str(index), **marked)


def test_random_cuts_hold_some_of_the_object():
    """Halved to 8 x 16; the object is in columns 14 and 15, so a cut begins at column 7 or 8, each
    as often."""
    seen = set()
    for seed in range(30):
        cut = RandomCuts(Strip(), FRAME, seed)[0]
        assert cut.image.shape == (3, 8, 8) and cut.mask.shape == (8, 8)
        assert cut.box is cut.points is cut.parts is None  # where they were, nothing is
        assert_close(
            cut.image[0, 0].diff(), torch.full((7,), 2 / 31), atol=0.01, rtol=0
        )  # shape and scale are kept
        seen.add(
            (
                cut.mask.any(dim=0).nonzero().flatten().tolist()[0],
                round(float(cut.image[0, 0, 0]), 1),
            )
        )
        assert torch.equal(RandomCuts(Strip(), FRAME, seed)[0].image, cut.image)
    assert seen == {(7, 0.5), (6, 0.5)}
    assert RandomCuts(Strip(), FRAME)[1].image.shape == (3, 16, 32)
    assert RandomCuts(Strip(), FRAME).seed == 0  # which published numbers are of


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_a_cut_is_resized_as_the_frame_says_and_its_mask_by_the_middle_of_pixels(name):
    """12 x 12 pixels as 8 x 8, where there is one cut only."""
    image, mask = (noise(3, 12, 12) > 0).float(), 1 + torch.arange(144).view(12, 12)
    data = type("One", (list,), {"name": "one"})([Sample(image, 0, mask=mask)])
    cut = RandomCuts(data, replace(FRAME, filter=name))[0]
    places = torch.tensor([0, 2, 3, 5, 6, 8, 9, 11])
    assert torch.equal(cut.mask, mask[places][:, places].int())
    picture = to_pil(image).resize((8, 8), getattr(Image.Resampling, name.upper()))
    assert_close(cut.image, pil_to_tensor(picture) / 255)


class Strips(Strip):
    """The picture with an object, many times."""

    def __getitem__(self, index: int) -> Sample:
        return super().__getitem__(0)


def test_a_frame_that_is_no_square_is_covered():
    """16 x 32 pixels become 8 x 16; turned, 32 x 16 become 24 x 12."""
    frame = replace(FRAME, size=(8, 12))
    for turned, starts in ((False, {3, 4}), (True, set(range(14, 17)))):
        strip = Strip()
        strip.turned, edges = turned, set()
        for seed in range(30):
            cut = RandomCuts(strip, frame, seed)[0]
            assert cut.image.shape == (3, 8, 12) and cut.mask.shape == (8, 12) and cut.mask.any()
            brightness = cut.image[0].mean(dim=int(turned))[0]
            edges.add(round(float(brightness) * (23 if turned else 15)))
        assert edges <= starts and len(edges) > 1
    assert RandomCuts(Strips(), frame, 3).fingerprint == "0-cut-3"
    cuts = RandomCuts(Strip(), frame)
    assert (cuts.name, cuts.classes, len(cuts)) == ("strip", ("a",), 2)


def test_every_cut_with_object_is_found():
    mask = torch.zeros(6, 9, dtype=torch.int32)
    mask[5, 2], mask[0, 8] = 1, IGNORE
    by_hand = [
        [top, left]
        for top in range(4)
        for left in range(6)
        if (mask[top : top + 3, left : left + 4] == 1).any()
    ]
    assert cuts_with_object(mask, (3, 4)).tolist() == by_hand and len(by_hand) == 3
    assert len(cuts_with_object(torch.zeros(6, 9), (3, 4))) == 24  # no object: any cut


@torch.no_grad()
def test_miou_on_random_cuts_is_another_number(scenes):
    net, data = scenes
    cut = examine(net, RandomCuts(data, frame_of(net).preprocess)).table()
    again = examine(net, RandomCuts(data, frame_of(net).preprocess)).table()
    assert cut == again and cut["miou"] != examine(net, data).table()["miou"]
    heard: list[int] = []
    test = _Test(TrainedNetwork("n", net), data, None, 2, None, True, no_progress)
    assert test.numbers()["miou_public"] == pytest.approx(cut["miou"])
    examine(net, data, batch=2, advance=heard.append)
    assert heard == [2, 2, 1]


def test_leave_one_out_tells_auc_of_two_classes():
    draw = torch.Generator().manual_seed(0)
    logits, without, labels = (
        torch.randn(8, 2, generator=draw),
        torch.randn(3, 8, 2, generator=draw),
        torch.tensor([0, 1] * 4),
    )
    row = LeaveOneOut(logits, without, labels, labels).table()[1]
    assert row["auc"] == auroc(without[1], labels) and row["auc_gain"] == pytest.approx(
        row["auc"] - auroc(logits, labels)
    )
    assert row["worst_gain"] == pytest.approx(
        row["worst"] - LeaveOneOut(logits, without, labels, labels).before().worst
    )
    ones = torch.ones(8, dtype=torch.int64)
    assert "auc" not in LeaveOneOut(logits, without, ones, ones).table()[0]
    assert (
        "auc" not in LeaveOneOut(torch.randn(8, 3), torch.randn(3, 8, 3), labels, labels).table()[0]
    )


def test_an_intervention_is_chosen_by_auc_where_accuracy_says_little(tmp_path):
    tried = [
        Trial((), None, 0.9, 0.5, 0.7),
        Trial((0,), None, 0.8, 0.4, 0.9),
        Trial((1,), None, 0.9, 0.4, 0.9),
    ]
    assert best_of(tried) is tried[0] and best_of(tried, "auc") is tried[2]
    with pytest.raises(BadOption, match="AUC needs two classes"):
        best_of([*tried, Trial((2,), None, 0.9, 0.4)], "auc")
    folder = open_data(f"folder:{tiny_config(tmp_path).data.removeprefix('folder:')}/val")
    assert (
        sensible_criterion(tried, folder) == "auc"
        and sensible_criterion([Trial((), None, 0.9, 0.5)], folder) == "worst"
    )
    assert (
        sensible_criterion(tried, open_data("critters:balanced:val", limit=1)) == "worst"
    )  # it has groups


def examined(logits, labels, groups=(None,), **more) -> Examination:
    """Of made-up answers; one group for all, or one for each."""
    groups = groups * len(labels) if len(groups) == 1 else groups
    return Examination(logits, logits, torch.tensor(labels), groups, Overlap(), 1.0, 0, **more)


def test_auc_is_of_two_classes_or_more_that_are_the_networks_own():
    assert "auc" in examined(torch.eye(2), [0, 1]).table()
    assert "auc" not in examined(torch.ones(2, 1), [0, 0]).table()
    assert "auc" not in examined(torch.eye(3)[:2], [0, 1]).table()  # one class is not there
    mapped = examined(torch.eye(2), [1, 0], mapping=torch.tensor([1, 0])).table()
    assert "auc" not in mapped and mapped["average"] == 1


def test_worst_is_that_of_a_class_where_some_picture_has_no_group():
    logits, labels = torch.eye(2)[[0, 0, 0, 1]], [0, 0, 1, 1]  # the third is wrong
    whole = examined(logits, labels, ((0, 0), (0, 1), (1, 0), (1, 1)))
    some = examined(logits, labels, ((0, 0), (0, 1), (1, 0), None))
    assert (whole.table()["worst"], some.table()["worst"]) == (0, 0.5)
    assert whole.public_worst("waterbirds:x:test") == {"worst_public": 0}
    assert some.public_worst("waterbirds:x:test") == some.public_worst("metashift:x:test") == {}
    half = examined(logits, labels, ((0, 0), (0, 1), (1, 1), (1, 1)))
    assert half.public_worst("waterbirds:x:test") == {}  # one of the two was not tested


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    return tiny_cub(tmp_path_factory.mktemp("birds") / "CUB_200_2011")


def slow(net, fit, test):
    """By the metric's own loop, one photo after the other, with maps of the whole network."""
    model = sc.wrap(net)
    result = [locate(model, data, lambda images: net(images).maps) for data in (fit, test)]
    return [keypoint_error(*result).mean, *part_agreement(result[1])]


@pytest.mark.parametrize("name", ["cub", "waterbird200"])
def test_key_points_are_those_of_the_metric(birds, name):
    net, test = bird_net(birds), open_data(f"{name}:{birds}")
    fit, seen = open_data(keypoint_fit_data(test.name)), []
    result = key_points(net, fit, test, batch=3, advance=seen.append)
    assert fit.name == f"cub:{birds}:trainval" and len(fit) == 20 and sum(seen) == 20 + len(test)
    assert (
        list(result.values()) == pytest.approx(slow(net, fit, test), abs=1e-9)
        and result["keypoints"] > 1
        and result["nmi"] > 0.01
    )


def test_rejected_tokens_change_them_and_parts_left_out_do_not(birds):
    net, test = bird_net(birds), open_data(f"cub:{birds}")
    fit = open_data(keypoint_fit_data(test.name))
    calibrate(net, (images for images, *_ in batches_of(net, fit)), 0.5)
    plain = key_points(net, fit, test)
    with intervene(net, drop_parts=[0]):
        assert key_points(net, fit, test) == plain
    with intervene(net, quantile=0.5):
        changed = key_points(net, fit, test)
        assert (
            list(changed.values()) == pytest.approx(slow(net, fit, test), abs=1e-9)
            and abs(changed["keypoints"] - plain["keypoints"]) > 0.01
        )


def test_maps_that_follow_the_bird_find_its_points(birds):
    """A net whose first part is what is bright: centres move with the square, so a linear map finds
    every point on it."""
    net, test = bird_net(birds), open_data(f"cub:{birds}")

    def bright(images):
        light = (
            torch.nn.functional.avg_pool2d(net.preprocess.raw(images).mean(dim=1, keepdim=True), 8)
            > 0.5
        )
        return torch.cat([light, 0 * light, 0 * light, ~light], dim=1).to(images.dtype)

    blind = key_points(net, open_data(keypoint_fit_data(test.name)), test)["keypoints"]
    net.maps = bright
    assert key_points(net, open_data(keypoint_fit_data(test.name)), test)["keypoints"] < min(
        15, blind
    )
