"""ImageNet-9 and MetaShift as they are released; a missing or odd file is named."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from seecause.data import open_data
from seecause.data.imagenet import object_of, read_in9_map
from seecause.data.shortcuts import part_of_test
from seecause.errors import BadImage, DataMissing, UnknownName
from tests.files import photo

# imagenet-9


@pytest.fixture
def imagenet9(tmp_path) -> Path:
    for part, wnid in (("00_dog", "n02085620_1"), ("02_wheeled vehicle", "n02701002_7")):
        photo(tmp_path / "original" / "val" / part / f"{wnid}.JPEG")
        photo(tmp_path / "mixed_rand" / "val" / part / f"fg_{wnid}_bg_n02536864_02721.JPEG", seed=1)
        photo(tmp_path / "no_fg" / "val" / part / f"{wnid}.JPEG", seed=2)
        (tmp_path / "fg_mask" / "val" / part).mkdir(parents=True)
        np.save(
            tmp_path / "fg_mask" / "val" / part / f"{wnid}.npy",
            np.arange(24).reshape(4, 6) % 5 == 0,
        )
    return tmp_path


def test_imagenet9_labels_are_the_numbers_of_the_folders(imagenet9):
    data = open_data(f"imagenet9:{imagenet9}")
    assert (
        data.labels == (0, 2)
        and data.classes[2] == "wheeled vehicle"
        and data.name.endswith(":original")
    )
    assert (
        data[1].mask.dtype == torch.bool and int(data[1].mask.sum()) == 5 and data[1].group is None
    )


def test_a_mixed_photo_has_the_mask_of_its_object(imagenet9):
    assert (
        object_of("fg_n02497673_05944_bg_n02536864_02721") == "n02497673_05944"
        and object_of("n02497673_05944") == "n02497673_05944"
    )
    assert torch.equal(
        open_data(f"imagenet9:{imagenet9}:mixed_rand")[0].mask,
        open_data(f"imagenet9:{imagenet9}")[0].mask,
    )
    assert open_data(f"imagenet9:{imagenet9}:no_fg")[0].mask is None


def test_odd_imagenet9_files_are_named(imagenet9):
    with pytest.raises(UnknownName):
        open_data(f"imagenet9:{imagenet9}:mixed_sum")
    with pytest.raises(DataMissing):
        open_data(f"imagenet9:{imagenet9}:mixed_same")
    mask = imagenet9 / "fg_mask" / "val" / "00_dog" / "n02085620_1.npy"
    np.save(mask, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(BadImage):  # a pickle inside: not loaded
        open_data(f"imagenet9:{imagenet9}")[0]
    np.save(mask, np.zeros((4, 6, 3)))
    with pytest.raises(BadImage):
        open_data(f"imagenet9:{imagenet9}")[0]
    mask.unlink()
    with pytest.raises(BadImage):
        open_data(f"imagenet9:{imagenet9}")[0]
    photo(imagenet9 / "original" / "val" / "09_plant" / "a.JPEG")
    with pytest.raises(DataMissing):
        open_data(f"imagenet9:{imagenet9}")


def test_the_map_to_nine_classes_is_read_in_order(tmp_path):
    path = tmp_path / "in_to_in9.json"
    path.write_text(json.dumps({str(place): place % 10 - 1 for place in reversed(range(1000))}))
    assert read_in9_map(path).tolist() == [place % 10 - 1 for place in range(1000)]
    for odd, _ in (
        ({"0": 1}, "each class"),
        ({str(n): 9 for n in range(1000)}, "belongs to 9"),
        ({str(n): "1" for n in range(1000)}, "'1'"),
    ):
        path.write_text(json.dumps(odd))
        with pytest.raises(DataMissing):
            read_in9_map(path)
    path.write_text("{")
    with pytest.raises(DataMissing):
        read_in9_map(path)


# metashift


@pytest.fixture
def folders(tmp_path) -> Path:
    """DISC's layout."""
    for group, count in (("cat(sofa)", 2), ("cat(bed)", 1), ("dog(bench)", 2), ("dog(bike)", 1)):
        for n in range(count):
            photo(tmp_path / "train" / group[:3] / group / f"{n}.jpg", size=(2, 2))
    for animal in ("cat", "dog"):
        for n in range(10):
            photo(tmp_path / "test" / animal / f"{animal}(shelf)" / f"{n:02}.jpg", size=(2, 2))
    return tmp_path


@pytest.fixture
def listed(tmp_path) -> Path:
    """The layout of MetaShift's own script."""
    groups = {}
    for folder in ("train", "val_out_of_domain"):
        for animal in ("cat", "dog"):
            for n in range(4):
                name = f"{folder[0]}{animal}{n}"
                photo(tmp_path / folder / animal / f"{name}.jpg", size=(2, 2))
                groups[name] = [f"{animal}({'outdoor' if n else 'indoor'})"]
    (tmp_path / "imageID_to_group.pkl").write_bytes(pickle.dumps(groups))
    return tmp_path


def test_metashift_places_are_in_brackets(folders):
    train = open_data(f"metashift:{folders}:train")
    assert train.places == ("bed", "bench", "bike", "shelf", "sofa") and train.classes == (
        "cat",
        "dog",
    )
    assert (
        train.groups == ((0, 0), (0, 4), (0, 4), (1, 1), (1, 1), (1, 2))
        and train[1].id == "cat(sofa)/0.jpg"
    )
    whole = open_data(f"metashift:{folders}:test-all")
    assert len(whole) == 20 and set(whole.groups) == {(0, 3), (1, 3)}


def test_disc_holds_out_fifteen_percent_of_the_test_folder(folders):
    """Sizes and class counts of the public split: 81 photos for validation, 201 cats and 259 dogs
    for test."""
    whole = [(Path(str(n)), "cat" if n < 235 else "dog", "shelf") for n in range(541)]
    val, test = part_of_test(whole, "val"), part_of_test(whole, "test")
    assert (
        len(val) == 81
        and [animal for _, animal, _ in test].count("cat") == 201
        and len(test) == 460
        and not set(val) & set(test)
    )
    assert (
        len(open_data(f"metashift:{folders}:val")) == 3
        and len(open_data(f"metashift:{folders}")) == 17
    )


def test_metashift_groups_from_its_list(listed):
    train = open_data(f"metashift:{listed}:train")
    assert train.places == ("indoor", "outdoor") and train.groups == (
        (0, 0),
        (0, 1),
        (0, 1),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 1),
        (1, 1),
    )
    assert (
        len(open_data(f"metashift:{listed}:val")) == 1
        and len(open_data(f"metashift:{listed}:test")) == 7
    )


def test_older_lists_hold_sets(listed):
    path = listed / "imageID_to_group.pkl"
    before = open_data(f"metashift:{listed}:train").groups
    groups = defaultdict(
        set, {name: set(group) for name, group in pickle.loads(path.read_bytes()).items()}
    )
    for protocol in (2, 4):
        path.write_bytes(pickle.dumps(groups, protocol=protocol))
        assert open_data(f"metashift:{listed}:train").groups == before


def test_a_group_file_that_does_not_match_is_named(listed):
    path = listed / "imageID_to_group.pkl"
    groups = pickle.loads(path.read_bytes())
    for change, _ in (
        ({"tcat0": ["dog(indoor)"]}, r"tcat0\.jpg.*dog\(indoor\).*class folder cat"),
        ({"tcat0": "cat(indoor)"}, "'tcat0'"),
        ({"tcat0": ["cat(indoor)", "cat(outdoor)"]}, "'tcat0'"),
        ({"tcat0": ["indoor"]}, "'indoor'"),
    ):
        path.write_bytes(pickle.dumps({**groups, **change}))
        with pytest.raises(DataMissing):
            open_data(f"metashift:{listed}:train")
    del groups["tcat0"]
    path.write_bytes(pickle.dumps(groups))
    with pytest.raises(DataMissing):
        open_data(f"metashift:{listed}:train")
    path.write_bytes(pickle.dumps(Path("/")))
    with pytest.raises(DataMissing):
        open_data(f"metashift:{listed}:train")
    path.unlink()
    with pytest.raises(DataMissing):
        open_data(f"metashift:{listed}:train")


def test_an_empty_or_missing_class_is_named(folders):
    for path in (folders / "train" / "cat" / "cat(bed)").iterdir():
        path.unlink()
    with pytest.raises(BadImage, match=r"cat\(bed\)"):
        open_data(f"metashift:{folders}")
    with pytest.raises(DataMissing, match="train/cat"):
        open_data(f"metashift:{folders / 'test'}")


def test_few_photos_cannot_be_held_out(listed):
    for path in list((listed / "val_out_of_domain").glob("*/*[01].jpg")):
        path.unlink()
    with pytest.raises(DataMissing, match="test-all"):
        open_data(f"metashift:{listed}")
    assert len(open_data(f"metashift:{listed}:test-all")) == 4
