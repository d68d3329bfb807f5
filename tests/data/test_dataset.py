"""Names of splits after paths that hold colons, and validation photos kept back from training."""

from __future__ import annotations

from pathlib import Path

import pytest

from seecause.data import open_data
from seecause.data.dataset import part_of_train, path_and_split
from seecause.errors import DataMissing, UnknownName
from tests.files import photo


def test_a_split_follows_the_last_colon(tmp_path):
    splits = ("train", "test")
    assert path_and_split("a:b:train", splits) == (Path("a:b"), "train")
    assert path_and_split("a", splits) == (Path("a"), "test") and path_and_split(
        "a:b", splits, "train"
    ) == (Path("a:b"), "train")
    (tmp_path / "x:y").mkdir()
    assert path_and_split(f"{tmp_path}/x:y", splits) == (tmp_path / "x:y", "test")
    with pytest.raises(UnknownName, match=r"'trian' not found. Did you mean train"):
        path_and_split(f"{tmp_path}/x:y:trian", splits)


def test_every_tenth_of_each_class_is_kept_back():
    items, classes = range(35), [0] * 5 + [1] * 10 + [0] * 20
    assert part_of_train(items, classes, "val") == [
        14,
        19,
        29,
    ]  # the tenth of class 1, the tenth and twentieth of class 0
    assert (
        sorted([*part_of_train(items, classes, "train"), 14, 19, 29])
        == part_of_train(items, classes, "trainval")
        == list(items)
    )


def test_imagenet_has_a_training_folder_too(tmp_path):
    photo(tmp_path / "train" / "n02123045" / "n02123045_1.JPEG")
    data = open_data(f"imagenet:{tmp_path}:train")
    assert data.labels == (281,) and data[0].image.shape == (3, 4, 6)
    with pytest.raises(DataMissing, match="val: no such folder"):
        open_data(f"imagenet:{tmp_path}")
