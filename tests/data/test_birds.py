"""CUB, Waterbirds and Waterbird200 as they are released; a missing or odd file is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from seecause.data import open_data
from seecause.data.shortcuts import read_votes
from seecause.errors import BadImage, DataMissing, UnknownName
from tests.files import grey, lines, photo

FOLDER = "waterbird_complete95_forest2water2"
NAMES = [
    f"{kind}/{kind[4:]}_{n}.jpg" for kind in ("001.Albatross", "002.Sparrow") for n in range(12)
]  # 11 of each train, the last one test
VOTES = np.array([[0, 0, 51, 255, 0, 0]] * 4)


@pytest.fixture
def cub(tmp_path) -> Path:
    """24 birds of two classes, in the release's own lists; ids do not start at 1 and lists are not
    in the same order."""
    root = tmp_path / "CUB_200_2011"
    ids = [str(5 + n) for n in range(len(NAMES))]
    lines(root / "classes.txt", "1 001.Albatross", "2 002.Sparrow")
    lines(root / "images.txt", *(f"{i} {name}" for i, name in zip(ids, NAMES, strict=True)))
    lines(
        root / "image_class_labels.txt",
        *(f"{i} {1 + n // 12}" for n, i in reversed(list(enumerate(ids)))),
    )
    lines(root / "train_test_split.txt", *(f"{i} {int(n % 12 < 11)}" for n, i in enumerate(ids)))
    lines(root / "bounding_boxes.txt", *(f"{i} 1.0 {n}.5 3.0 2.0" for n, i in enumerate(ids)))
    lines(
        root / "parts" / "part_locs.txt",
        *(f"{i} {part} {part}.0 2.5 {part % 2}" for i in ids for part in range(1, 16)),
    )
    for n, name in enumerate(NAMES):
        photo(root / "images" / name, seed=n)
        photo(root / FOLDER / name, seed=100 + n)
    for name in (NAMES[11], NAMES[23]):
        grey((root / "segmentations" / name).with_suffix(".png"), VOTES)
    rows = [
        f"{i},{name},{n // 12},{(0, 1, 2)[n % 3]},{n % 2},/forest/x.jpg"
        for n, (i, name) in enumerate(zip(ids, NAMES, strict=True))
    ]
    lines(root / FOLDER / "metadata.csv", "img_id,img_filename,y,split,place,place_filename", *rows)
    return root


# cub


def test_cub_joins_its_lists_on_the_id(cub):
    data = open_data(f"cub:{cub}")
    assert data.classes == ("001.Albatross", "002.Sparrow") and [(s.id, s.label) for s in data] == [
        (NAMES[11], 0),
        (NAMES[23], 1),
    ]
    bird = data[1]
    assert (
        bird.box == (1.0, 23.5, 3.0, 2.0)
        and bird.points.shape == (15, 3)
        and bird.points[2].tolist() == [3.0, 2.5, 1.0]
    )
    assert torch.equal(bird.mask, torch.from_numpy(VOTES > 0)) and bird.group is None
    assert torch.equal(
        (bird.image * 255).round().byte().permute(1, 2, 0),
        torch.from_numpy(photo(cub / "images" / NAMES[23], seed=23)),
    )


def test_cub_keeps_every_tenth_training_photo_of_a_class_for_validation(cub):
    parts = {
        split: [s for s in open_data(f"cub:{cub}:{split}").photos]
        for split in ("train", "val", "trainval")
    }
    assert [photo.id for photo in parts["val"]] == [NAMES[9], NAMES[21]]
    assert sorted(photo.id for photo in parts["train"] + parts["val"]) == sorted(
        photo.id for photo in parts["trainval"]
    )
    assert (
        len(parts["trainval"]) == 22
        and set(parts["trainval"]) & set(open_data(f"cub:{cub}").photos) == set()
    )


@pytest.mark.parametrize("mode", ["L", "RGB", "LA", "RGBA", "P"])
def test_segmentations_are_votes_whatever_their_mode(tmp_path, mode):
    grey(tmp_path / "a.png", VOTES, mode)
    assert torch.equal(read_votes(tmp_path / "a.png"), torch.from_numpy(VOTES > 0))


def test_a_transparent_background_is_no_object(tmp_path):
    pixels = np.zeros((4, 6, 4), np.uint8)
    pixels[0, 0] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert int(read_votes(tmp_path / "a.png").sum()) == 1


def test_without_segmentations_there_are_no_masks(cub):
    (cub / "segmentations").rename(cub / "elsewhere")
    assert open_data(f"cub:{cub}")[0].mask is None
    (cub / "elsewhere").rename(cub.parent / "segmentations")
    assert open_data(f"cub:{cub}")[0].mask is not None


def test_the_fingerprint_knows_boxes_and_points(cub):
    before = open_data(f"cub:{cub}").fingerprint
    boxes = cub / "bounding_boxes.txt"
    boxes.write_text(boxes.read_text().replace("23.5", "22.5"))
    assert open_data(f"cub:{cub}").fingerprint != before


@pytest.mark.parametrize(
    "name",
    [
        "images",
        "image_class_labels",
        "train_test_split",
        "bounding_boxes",
        "parts/part_locs",
        "classes",
    ],
)
def test_a_missing_or_damaged_list_is_named(cub, name):
    path = cub / f"{name}.txt"
    path.write_text(path.read_text() + "what is this line\n")
    with pytest.raises(DataMissing):
        open_data(f"cub:{cub}")
    path.unlink()
    with pytest.raises(DataMissing):
        open_data(f"cub:{cub}")


def test_a_photo_that_a_list_forgets_is_named(cub):
    lines(cub / "bounding_boxes.txt", "5 1 1 1 1")
    with pytest.raises(DataMissing, match=r"bounding_boxes\.txt: no line for photo 6"):
        open_data(f"cub:{cub}")


# waterbirds


def test_waterbirds_have_groups_and_cubs_masks(cub):
    data = open_data(f"waterbirds:{cub / FOLDER}")
    assert (
        data.classes == ("land bird", "water bird")
        and data.places == ("land", "water")
        and len(data) == 8
    )
    by_name = {NAMES[n]: (n // 12, n % 2) for n in range(24) if n % 3 == 2}
    assert dict(
        zip([p.id for p in data.photos], data.groups, strict=True)
    ) == by_name and data.labels == tuple(y for y, _ in by_name.values())
    last = data[-1]
    assert (
        last.id == NAMES[23]
        and last.group == (1, 1)
        and torch.equal(last.mask, torch.from_numpy(VOTES > 0))
    )
    assert torch.equal(
        (last.image * 255).round().byte().permute(1, 2, 0),
        torch.from_numpy(photo(cub / FOLDER / NAMES[23], seed=123)),
    )
    assert (
        open_data(f"waterbirds:{cub}:train").groups[0] == (0, 0)
        and len(open_data(f"waterbirds:{cub}:val")) == 8
    )


def test_odd_waterbird_lists_are_named(cub):
    table = cub / FOLDER / "metadata.csv"
    with pytest.raises(UnknownName, match=r"trian.*train"):
        open_data(f"waterbirds:{cub}:trian")
    lines(
        table,
        "img_id,img_filename,y,split,place,place_filename",
        "1,a.jpg,0,0,0,x",
        "2,b.jpg,0,3,0,x",
    )
    with pytest.raises(DataMissing, match=r"metadata\.csv, line 3"):
        open_data(f"waterbirds:{cub}")
    lines(table, "img_id,img_filename,y,split,place,place_filename", "1,a.jpg,0,0,0,x")
    with pytest.raises(DataMissing, match="no photo of the split test"):
        open_data(f"waterbirds:{cub}")
    lines(table, "img_filename,y,split", "a.jpg,0,0")
    with pytest.raises(DataMissing, match="no column place"):
        open_data(f"waterbirds:{cub}")
    lines(table, "img_id,img_filename,y,split,place", "1,a.jpg,0")
    with pytest.raises(DataMissing, match=r"line 2: .* cannot be read"):
        open_data(f"waterbirds:{cub}")
    lines(table, "img_id,img_filename,y,split,place", f"1,{'a' * 140_000},0,0,0")
    with pytest.raises(DataMissing, match=r"line 2: .* cannot be read"):
        open_data(f"waterbirds:{cub}")
    table.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataMissing, match="cannot be read"):
        open_data(f"waterbirds:{cub}")


def test_a_mask_of_another_size_is_named(cub):
    path = (cub / "segmentations" / NAMES[23]).with_suffix(".png")
    grey(path, VOTES[:, :5])
    with pytest.raises(BadImage, match=path.name):
        open_data(f"waterbirds:{cub}")[-1]


# waterbird200


def test_waterbird200_is_cubs_test_on_other_backgrounds(cub):
    data, plain = open_data(f"waterbird200:{cub}"), open_data(f"cub:{cub}")
    assert (
        [p.id for p in data.photos] == [p.id for p in plain.photos]
        and data.labels == plain.labels
        and data.classes == plain.classes
    )
    assert (
        data[0].box == plain[0].box
        and torch.equal(data[0].mask, plain[0].mask)
        and not torch.equal(data[0].image, plain[0].image)
    )
    (cub / FOLDER).rename(cub.parent / "away")
    with pytest.raises(DataMissing, match=FOLDER):
        open_data(f"waterbird200:{cub}")
