"""Pictures as heads are judged on, with everything that is known of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close

import seecause as sc
from seecause import critters
from seecause.background import images as pictures_file
from seecause.background.erase import Erasure
from seecause.background.images import critter_pictures, model_for, read_pictures
from seecause.data import backgrounds, open_data
from seecause.data.dataset import IGNORE
from seecause.errors import BadImage, BadOption, DataMissing, SeecauseError, UnknownName


def test_critters_come_with_exact_counterfactuals(model):
    data = open_data("critters:certified:test", limit=5)
    result = read_pictures(model, data)
    assert any(sample.label != sample.group[0] for sample in data)  # not what it shows
    for place, sample in enumerate(data):
        seen = model.preprocess.normalise(sample.image[None])[0].double()
        assert_close(result.images[place], seen)
        assert result.groups[place] == sample.group and result.labels[place] == sample.label
        assert torch.equal(result.truth[place], sample.mask)
    assert torch.equal(
        result.swapped.background[result.truth[:, None].expand_as(result.images)],
        result.images[result.truth[:, None].expand_as(result.images)],
    )
    assert (result.swapped.background != result.images).flatten(1).any(dim=1).all()
    other = result.swapped.foreground != result.images  # another creature in the same place
    assert other.flatten(1).any(dim=1).all() and other.double().mean() < 0.5
    assert (other & result.truth[:, None]).flatten(1).any(dim=1).all()
    assert result.objects == tuple(critters.CLASSES) and result.places == critters.BACKGROUNDS
    latents = data.latents(0, 5, device="cpu")
    turned = (latents.background + 1 + torch.arange(5) % (len(critters.BACKGROUNDS) - 1)) % len(
        critters.BACKGROUNDS
    )
    moved = critters.render(latents.replace(background=turned)).image
    assert_close(result.swapped.background, model.preprocess.normalise(moved).double())
    shown = (latents.creature + 1 + torch.arange(5)) % len(critters.CLASSES)
    changed = critters.render(latents.show(shown)).image
    assert_close(result.swapped.foreground, model.preprocess.normalise(changed).double())
    assert critter_pictures(model, latents, swaps=False).swapped is None
    done = []
    read_pictures(model, data, progress=done.append)
    assert done == [5]
    smaller = replace(model, preprocess=replace(model.preprocess, size=(48, 64)))
    resized = read_pictures(smaller, data)  # critters are drawn at one size
    assert resized.images.shape == (5, 3, 48, 64) and resized.swapped is None
    assert torch.equal(resized.labels, result.labels) and resized.groups == result.groups


def test_some_pictures_are_taken_with_all_that_is_known_of_them(cases):
    rows = torch.tensor([4, 1])
    part = cases.take(rows)
    assert part.ids == (cases.ids[4], cases.ids[1])
    assert part.groups == (cases.groups[4], cases.groups[1])
    for name in ("images", "labels", "truth"):
        assert torch.equal(getattr(part, name), getattr(cases, name)[rows]), name
    for name in ("background", "foreground"):
        assert torch.equal(getattr(part.swapped, name), getattr(cases.swapped, name)[rows]), name
    masks = sc.background.Masks(
        cases.truth, *(torch.randn(6, 2) for _ in range(4)), ~cases.truth, {"source": "discovered"}
    )
    for name in ("hard", "soft", "ties", "losses", "steps", "inside"):
        assert torch.equal(getattr(masks.take(rows), name), getattr(masks, name)[rows]), name
    assert Erasure(masks, "grey").take(rows).masks.source == "discovered"
    unknown = cases.truth.int()
    unknown[3] = IGNORE
    assert replace(cases, truth=unknown).oracle is None and cases.oracle is not None
    unknown[3, 0, 0] = 0  # a pixel is known
    assert not replace(cases, truth=unknown).oracle.inside[3, 0, 1]


def test_a_dataset_of_files_has_what_its_samples_have(model):
    class Files:
        name, classes, fingerprint = "files", tuple(critters.CLASSES), ""

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return next(critters.samples("clean", "test", 1, start=range(3)[index]))

    result = read_pictures(model, Files())
    assert (
        len(result) == 3 and result.swapped is None and result.oracle is not None and result.grouped
    )
    assert result.take(torch.tensor([2, 0])).ids == (result.ids[2], result.ids[0])


class Broken:
    """Seven pictures in two versions; one of each version cannot be read."""

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


def test_pictures_are_read_some_at_a_time_and_what_cannot_be_read_has_its_name(model, monkeypatch):
    monkeypatch.setattr(pictures_file, "_READ", 2)
    data, done = Broken(), []
    result = read_pictures(model, data, progress=done.append)
    assert result.ids == tuple("acdeg") and done == [2, 2, 2, 1]
    assert [hole.name for hole in result.holes] == ["b", "f"] and "cut" in result.holes[0].reason
    rows = [0, 2, 3, 4, 6]
    for place, row in enumerate(rows):
        sample = data[row]
        seen = model.preprocess.normalise(sample.image[None])[0].double()
        other = model.preprocess.normalise(data.other(row).image[None])[0].double()
        assert_close(result.images[place], seen)
        assert_close(result.swapped.background[place], other)
        assert result.groups[place] == sample.group and int(result.labels[place]) == sample.label
        if sample.mask is None:
            assert (result.truth[place] == IGNORE).all()
        else:
            assert torch.equal(result.truth[place] == 1, sample.mask == 1)
    assert result.grouped and result.oracle is None and result.swapped.foreground is None
    assert result.objects == data.classes and result.places == ("here", "there")
    assert result.exact_swaps == []  # other objects are not known
    with pytest.raises(BadOption, match="a mask for every picture; broken has none"):
        result.true_masks()
    monkeypatch.setattr(Broken, "__len__", lambda self: 0)
    with pytest.raises(BadOption, match="at least one picture"):
        read_pictures(model, data)


def test_pictures_without_names_are_counted(model, monkeypatch):
    monkeypatch.setattr(pictures_file, "_READ", 2)
    monkeypatch.setattr(Broken, "ids", ("",) * 7)
    assert read_pictures(model, Broken()).ids == tuple("01234")


def test_only_a_model_of_imagenets_classes_gives_the_nine_answers(model, monkeypatch):
    module = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=12, depth=1, num_heads=3, num_classes=1000
    )
    thousand = sc.wrap(module.eval(), mean=(0.5,) * 3, std=(0.5,) * 3, size=16, check=False)
    monkeypatch.setattr(backgrounds, "find_in9_map", lambda name: name.partition(":")[2])
    maps = {"p:original": torch.arange(1000) % 10 - 1}
    monkeypatch.setattr(backgrounds, "read_in9_map", maps.get)
    nine, birds = (SimpleNamespace(name=name) for name in ("imagenet9:p:original", "folder:p"))
    assert model_for(model, nine) is model and model_for(thousand, birds) is thousand
    assert model_for(thousand, nine).classes == (*backgrounds.CLASSES, "none of the nine")


def test_where_no_picture_can_be_read_the_first_says_why(model, monkeypatch):
    def unreadable(self, index):
        raise BadImage(f"{self.ids[index]}.png", "cut")

    monkeypatch.setattr(Broken, "__getitem__", unreadable)
    with pytest.raises(SeecauseError, match=r"a\.png: cut"):
        read_pictures(model, Broken())


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (tuple(reversed(critters.CLASSES)), [7, 6]),  # as many as the model has, in another order
        (tuple(reversed(critters.CLASSES[:3])), [2, 1]),
        (tuple(f"LABEL_{i}" for i in range(8)), [0, 1]),  # names that say nothing: by position
    ],
)
def test_labels_follow_class_names(model, names, labels):
    assert read_pictures(model, Named(names)).labels.tolist() == labels


def test_one_known_name_among_others_is_a_mistake(model):
    with pytest.raises(UnknownName, match=r"does not fit .*walrus"):
        read_pictures(model, Named(("walrus", *critters.CLASSES[1:])))


class Named:
    """Two pictures with labels 0 and 1."""

    name, fingerprint = "files", ""

    def __init__(self, classes):
        self.classes = classes

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return replace(
            next(critters.samples("clean", "test", 1, start=range(2)[index])), label=index
        )
