"""Labelled images: what a dataset brings, what can be taken, and what is refused."""

import multiprocessing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close

import seecause as sc
from seecause import critters
from seecause.background import LabelledImages, Masks, images as images_file, read_images
from seecause.background.images import imagenet9_model, model_for, on_pixels
from seecause.critters.world import BACKGROUNDS
from seecause.data import imagenet, open_data
from seecause.data.dataset import IGNORE, reading_with
from seecause.errors import BadImage, BadOption, DataMissing, NotDefined, UnknownName
from tests.tiny import scramble


def test_critters_come_with_exact_counterfactuals(model):
    data = open_data("critters:certified:test", limit=5)
    found = read_images(model, data)
    for place, sample in enumerate(data):
        seen = model.preprocess.normalise(sample.image[None])[0].double()
        assert_close(found.images[place], seen)
        assert found.groups[place] == sample.group and found.labels[place] == sample.label
        assert torch.equal(found.truth.hard[place], sample.mask)
    latents = data.latents(0, 5, device="cpu")
    turned = latents.background + 1 + torch.arange(5) % (len(BACKGROUNDS) - 1)
    moved = critters.render(latents.replace(background=turned % len(BACKGROUNDS))).image
    assert_close(found.other_background, model.preprocess.normalise(moved).double())
    shown = (latents.creature + 1 + torch.arange(5)) % len(critters.CLASSES)
    changed = critters.render(latents.show(shown)).image
    assert_close(found.other_object, model.preprocess.normalise(changed).double())
    smaller = replace(model, preprocess=replace(model.preprocess, size=(48, 64)))
    resized = read_images(smaller, data)  # critters are drawn at one size
    assert resized.images.shape == (5, 3, 48, 64) and resized.other_background is None
    assert torch.equal(resized.labels, found.labels) and resized.groups == found.groups


class Counting:
    """A dataset that notes, in a file, each image that is read."""

    classes, fingerprint, name = ("a", "b"), "counting", "counting"
    capabilities = frozenset({"masks", "pairs"})

    def __init__(self, notes):
        self.notes, self.inner = notes, open_data("critters:certified:test", limit=40)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, place):
        with self.notes.open("a") as file:
            file.write(f"{place}\n")
        if place == 23:
            raise BadImage("23.png", "the file is empty", "give an intact file")
        sample = self.inner[place]
        mask = sample.mask if place % 2 else None
        return replace(sample, label=place % 2, mask=mask, image=sample.image[:, :90])

    def other(self, place):
        return self.inner[(place + 1) % 40]


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_read_each_image_once_with_the_same_results(model, tmp_path, workers):
    model = replace(model, classes=("a", "b", *map(str, range(10))))
    read = []
    for count in (0, workers):
        notes = tmp_path / str(count)
        with reading_with(count):
            read.append(read_images(model, Counting(notes)))
        assert sorted(map(int, notes.read_text().split())) == list(range(40))
    here, there = read
    assert not multiprocessing.active_children()
    assert torch.equal(here.images, there.images) and here.ids == there.ids
    assert torch.equal(here.other_background, there.other_background)
    assert torch.equal(here.labels, there.labels) and here.groups == there.groups
    assert torch.equal(here.truth.hard, there.truth.hard)
    assert torch.equal(here.truth.known, there.truth.known)
    assert here.skipped == there.skipped and "23.png" in there.skipped[0].reason


@pytest.mark.parametrize(
    "rows", [torch.tensor([4, 1]), torch.tensor([False, True, False, False, True, False])]
)
def test_some_images_are_taken_with_all_that_is_known_of_them(cases, rows):
    at = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
    masks = Masks(
        cases.truth.hard, "discovered", inside=~cases.truth.hard,
        **{name: torch.randn(6, 2) for name in ("soft", "overlap")},
    )  # fmt: skip
    part = cases.with_masks(masks).take(rows)
    assert part.ids == tuple(cases.ids[i] for i in at) and len(part) == 2
    assert part.groups == tuple(cases.groups[i] for i in at)
    for name in ("images", "labels", "other_background", "other_object"):
        assert torch.equal(getattr(part, name), getattr(cases, name)[at]), name
    for name in ("hard", "inside", "soft", "overlap"):
        assert torch.equal(getattr(part.masks, name), getattr(masks, name)[at]), name
    assert part.masks.kind == "discovered" and len(repr(part)) < 100


def test_masks_are_on_pixels_or_on_patches():
    truth = torch.zeros(1, 4, 4, dtype=torch.int32)
    truth[0, 0, 0], truth[0, 0, 1], truth[0, 1] = 1, IGNORE, IGNORE  # one object pixel, one known
    masks = Masks.given(truth)
    assert masks.on_patches((1, 1)).item() is False
    assert masks.on_patches((2, 2))[0].tolist() == [[True, False], [False, False]]
    large = on_pixels(masks.hard, (8, 8))
    assert large.sum() == 4 and large[0, :2, :2].all()
    images = torch.zeros(1, 3, 8, 8)
    assert LabelledImages(images, masks=truth).masks.kind == "given"
    unknown = LabelledImages(images, truth=Masks.given(torch.full_like(truth, IGNORE)))
    assert not unknown.truth.known.any()
    for wrong in (truth[:, :3], truth.repeat(2, 1, 1)):
        with pytest.raises(BadOption, match="a mask for each image"):
            LabelledImages(images, masks=wrong)
    with pytest.raises(BadOption, match="with labels"):
        LabelledImages(images).need_labels()


class Broken:
    """Seven images in two versions; one of each version cannot be read."""

    name, classes, fingerprint = "broken", tuple(critters.CLASSES), ""
    places, capabilities = ("here", "there"), frozenset({"pairs"})
    ids = tuple("abcdefg")

    def __len__(self):
        return 7

    def __getitem__(self, index):
        if index == 1:
            raise BadImage("b.png", "cut")
        sample = next(critters.samples("certified", "test", 1, start=range(7)[index]))
        sample = replace(sample, id=self.ids[index])
        return replace(sample, mask=None, group=None) if index in (2, 3) else sample

    def other(self, index):
        if index == 5:
            raise DataMissing("f.png", "gone", "bring it back")
        sample = next(critters.samples("certified", "test", 1, start=20 + index))
        return replace(sample, id=self.ids[index])


def test_images_that_cannot_be_read_are_skipped_and_named(model, monkeypatch):
    monkeypatch.setattr(images_file, "READ", 2)
    data, done = Broken(), []
    found = read_images(model, data, progress=done.append)
    assert found.ids == tuple("acdeg") and done == [2, 2, 2, 1]
    assert [hole.name for hole in found.skipped] == ["b", "f"]
    for place, row in enumerate([0, 2, 3, 4, 6]):
        sample = data[row]
        seen = model.preprocess.normalise(sample.image[None])[0].double()
        other = model.preprocess.normalise(data.other(row).image[None])[0].double()
        assert_close(found.images[place], seen)
        assert_close(found.other_background[place], other)
        assert found.groups[place] == sample.group and int(found.labels[place]) == sample.label
        known = sample.mask is not None
        assert bool(found.truth.known[place]) == known
        assert not known or torch.equal(found.truth.hard[place], sample.mask == 1)
    assert found.grouped and not found.swaps
    monkeypatch.setattr(Broken, "ids", ("",) * 7)
    assert read_images(model, data).ids == tuple("01234")
    monkeypatch.setattr(Broken, "__len__", lambda self: 0)
    with pytest.raises(BadOption, match="at least one image"):
        read_images(model, data)


class Named:
    """Two images with labels 0 and 1."""

    name, fingerprint = "files", ""

    def __init__(self, classes):
        self.classes = classes

    def __len__(self):
        return 2

    def __getitem__(self, index):
        sample = next(critters.samples("clean", "test", 1, start=range(2)[index]))
        return replace(sample, label=index)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (tuple(reversed(critters.CLASSES[:3])), [2, 1]),
        (tuple(f"LABEL_{i}" for i in range(8)), [0, 1]),  # unknown names: by position
    ],
)
def test_labels_follow_class_names(model, names, labels):
    assert read_images(model, Named(names)).labels.tolist() == labels
    with pytest.raises(UnknownName, match=r"does not fit .*walrus"):
        read_images(model, Named(("walrus", *critters.CLASSES[1:])))


def nine_classes(classes=14):
    module = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=classes
    )
    half = (0.5,) * 3
    return sc.wrap(scramble(module).double(), mean=half, std=half, size=16, check=False)


def test_nine_classes_are_those_of_the_release(tmp_path):
    mapping, model = torch.tensor([*range(9), -1, 3, -1, 0, 8]), nine_classes()
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(40, 3, 16, 16, generator=draw, dtype=torch.float64)
    ten = imagenet9_model(model, mapping)
    expected = mapping[model(images).argmax(dim=1)] % 10
    assert (ten(images).argmax(dim=1) == expected).all() and ten.n_classes == 10
    assert model.fingerprint() != ten.fingerprint()  # masks are kept by it
    for edit in (
        lambda: sc.background.prune_heads(ten, [(0, 0)]),
        lambda: sc.background.export(ten, [(0, 0)], tmp_path / "out"),
    ):
        with pytest.raises(NotDefined, match="14 classes"):  # a copy would have the 14
            edit()


def test_only_a_model_with_imagenets_classes_gets_the_nine(model, monkeypatch):
    thousand = nine_classes(1000)
    monkeypatch.setattr(imagenet, "find_in9_map", lambda name: name.partition(":")[2])
    maps = {"p:original": torch.arange(1000) % 10 - 1}
    monkeypatch.setattr(imagenet, "read_in9_map", maps.get)
    nine, birds = (SimpleNamespace(name=name) for name in ("imagenet9:p:original", "folder:p"))
    assert model_for(model, nine) is model and model_for(thousand, birds) is thousand
    assert model_for(thousand, nine).classes == (*imagenet.IN9_CLASSES, "none of the nine")
