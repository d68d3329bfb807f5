"""COCO and DomainNet in their published layouts; a missing or odd file is named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from seecause.data import IGNORE, open_data
from seecause.data.labelled import main_category, run_lengths
from seecause.errors import BadImage, DataMissing, UnknownName
from tests.files import lines, photo

CAT, DOG = 17, 18  # numbers of the release, which has gaps


def thing(image: int, category: int, outline: Any, area: float, crowd: int = 0) -> dict[str, Any]:
    return {
        "id": image * 100 + int(area), "image_id": image, "category_id": category, "area": area,
        "segmentation": outline, "bbox": [0, 1, area, 2], "iscrowd": crowd,
    }  # fmt: skip


def square(x: int, y: int, side: int) -> list[int]:
    return [x, y, x + side, y, x + side, y + side, x, y + side]


@pytest.fixture
def coco(tmp_path) -> Path:
    """Three photos of 6 x 4 pixels: a cat beside a small dog and a crowd of dogs, two dogs that
    are more than one cat, and nothing."""
    for number in (1, 2, 3):
        photo(tmp_path / "val2017" / f"{number:012}.jpg", seed=number)
    crowd = {"counts": [20, 4], "size": [4, 6]}  # the last column
    objects = [
        thing(1, CAT, [square(0, 0, 1)], 9), thing(1, DOG, [square(4, 0, 0)], 1),
        thing(1, DOG, crowd, 50, crowd=1),
        thing(2, DOG, [square(0, 0, 1), square(3, 2, 1)], 4), thing(2, DOG, [square(5, 0, 0)], 3),
        thing(2, CAT, [square(1, 1, 2)], 6),
    ]  # fmt: skip
    images = [
        {"id": n, "file_name": f"{n:012}.jpg", "height": 4, "width": 6, "license": 1}
        for n in (1, 2, 3)
    ]
    names = [{"id": DOG, "name": "dog"}, {"id": CAT, "name": "cat"}]
    content = {"images": images, "annotations": objects, "categories": names}
    lines(tmp_path / "annotations" / "instances_val2017.json", json.dumps(content))
    return tmp_path


def rewrite(root: Path, change) -> None:
    path = root / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_the_main_object_covers_most_and_crowds_are_ignored(coco):
    data = open_data(f"coco:{coco}")
    assert data.classes == ("cat", "dog") and data.labels == (0, 1)  # none without an object
    first, second = data[0], data[1]
    expected = torch.zeros(4, 6, dtype=torch.uint8)
    expected[:2, :2], expected[:, 5] = 1, IGNORE
    assert torch.equal(first.mask, expected) and first.box == (0, 1, 9, 2)
    assert int((second.mask == 1).sum()) == 4 + 4 + 1 and bool(second.mask[3, 4] == 1)
    assert second.box == (0, 1, 4, 2)  # of the larger dog
    assert data.capabilities == {"labels", "masks", "boxes"}
    assert open_data(f"coco:{coco}", limit=1).ids == ("000000000001",)
    again = pickle.loads(pickle.dumps(data))  # as it travels to workers
    assert torch.equal(again[1].mask, second.mask) and again.fingerprint == data.fingerprint


def test_photos_of_one_name_in_two_folders_keep_their_own_masks(coco):
    for number, name in ((1, "a/x.jpg"), (2, "b/x.jpg")):
        photo(coco / "val2017" / name, seed=number)
        rewrite(coco, lambda c, n=number, name=name: c["images"][n - 1].update(file_name=name))
    data = open_data(f"coco:{coco}")
    assert data.ids == ("a/x", "b/x")
    assert [int((data[place].mask == 1).sum()) for place in (0, 1)] == [4, 4 + 4 + 1]


def test_runs_go_down_the_columns_and_must_fill_the_picture():
    mask = run_lengths([1, 2, 3], (2, 3))
    assert mask.tolist() == [[False, True, False], [True, False, False]]
    with pytest.raises(ValueError, match="fill"):
        run_lengths([1, 2], (2, 3))
    assert main_category([]) is None


def test_odd_coco_is_named(coco):
    rewrite(coco, lambda c: c["annotations"][0].update(segmentation=[[0, 0, 1]]))
    with pytest.raises(DataMissing):
        open_data(f"coco:{coco}")[0]
    compressed = {"counts": "PPYo0", "size": [4, 6]}
    rewrite(coco, lambda c: c["annotations"][0].update(segmentation=compressed))
    with pytest.raises(DataMissing):
        open_data(f"coco:{coco}")[0]
    rewrite(coco, lambda c: c["images"][1].update(width=7))
    with pytest.raises(BadImage):
        open_data(f"coco:{coco}")[1]
    rewrite(coco, lambda c: c["images"][0].update(file_name="../../secret.jpg"))
    with pytest.raises(DataMissing):
        open_data(f"coco:{coco}")
    rewrite(coco, lambda c: c["annotations"][0].update(category_id=99))
    with pytest.raises(DataMissing):
        open_data(f"coco:{coco}")
    rewrite(coco, lambda c: c["annotations"][0].pop("area"))
    with pytest.raises(DataMissing):
        open_data(f"coco:{coco}")
    with pytest.raises(DataMissing):
        open_data(f"coco:{coco}:train")
    with pytest.raises(UnknownName):
        open_data(f"coco:{coco}:test")


@pytest.fixture
def domainnet(tmp_path) -> Path:
    for name in ("real/aircraft_carrier/r1", "real/zebra/r2", "sketch/zebra/s1"):
        photo(tmp_path / f"{name}.jpg")
    lines(tmp_path / "real_test.txt", "real/aircraft_carrier/r1.jpg 0", "real/zebra/r2.jpg 2")
    lines(tmp_path / "sketch_test.txt", "sketch/zebra/s1.jpg 2")
    lines(tmp_path / "real_train.txt", "real/zebra/r2.jpg 2")
    return tmp_path


def test_domains_are_the_second_code_of_groups(domainnet):
    data = open_data(f"domainnet:{domainnet}")
    assert data.classes == ("aircraft carrier", "class 1", "zebra") and data.labels == (0, 2, 2)
    assert [(data.places[place]) for _, place in data.groups] == ["real", "real", "sketch"]
    assert open_data(f"domainnet:{domainnet}:sketch").ids == ("sketch/zebra/s1.jpg",)
    train = open_data(f"domainnet:{domainnet}:real:train")
    assert train.ids == ("real/zebra/r2.jpg",) and train[0].image.shape == (3, 4, 6)
    assert len(open_data(train.name)) == 1 and data.name == f"domainnet:{domainnet}:test"


def test_odd_domainnet_is_named(domainnet):
    with pytest.raises(DataMissing):
        open_data(f"domainnet:{domainnet}:quickdraw")
    with pytest.raises(UnknownName):
        open_data(f"domainnet:{domainnet}:cartoon")
    lines(domainnet / "sketch_test.txt", "sketch/horse/s1.jpg 2")
    with pytest.raises(DataMissing):
        open_data(f"domainnet:{domainnet}")
    for wrong in ("real/zebra/r2.jpg 2", "sketch/zebra/s1.jpg 345", "sketch/s1.jpg 2", "x"):
        lines(domainnet / "sketch_test.txt", wrong)
        with pytest.raises(DataMissing):
            open_data(f"domainnet:{domainnet}")
    with pytest.raises(DataMissing):
        open_data(f"domainnet:{domainnet / 'real'}")
