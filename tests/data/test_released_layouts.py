"""ImageNet-S, Food-101 and ImageNet-Hard as they are released; a missing or odd file is named."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from seecause.data import IGNORE, open_data
from seecause.data.imagenet import MERGED, imagenet_wnids, kept_class, read_class_ids
from seecause.errors import BadImage, DataMissing


def photo(path: Path, size: tuple[int, int] = (6, 4), seed: int = 0) -> None:
    """A noisy picture, width x height, written without loss whatever its suffix."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="PNG")


def id_mask(path: Path, ids: list[list[int]]) -> None:
    """As the release writes it: red holds the low byte, green the high one."""
    numbers = np.array(ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(
        np.stack([numbers % 256, numbers // 256, 0 * numbers], axis=-1).astype(np.uint8)
    ).save(path)


# imagenet-s


@pytest.fixture
def categories() -> list[str]:
    """919 categories; which ones matters to no test, but the merged classes are not among them."""
    return [*[wnid for wnid in imagenet_wnids() if wnid not in MERGED][:918], "n15075141"]


@pytest.fixture
def imagenet_s(tmp_path, categories) -> Path:
    (tmp_path / "ImageNetS_categories_im919.txt").write_text("\n".join(categories) + "\n")
    for number in (255, 256, 919):
        wnid = categories[number - 1]
        photo(tmp_path / "validation" / wnid / f"{wnid}.JPEG")
        id_mask(
            tmp_path / "validation-segmentation" / wnid / f"{wnid}.png",
            [[0, 255, 256, 919, 1000, 1]] * 4,
        )
    return tmp_path


def test_ids_are_decoded_beyond_eight_bits(tmp_path):
    id_mask(tmp_path / "mask.png", [[0, 255, 256], [919, 1000, 1]])
    ids = read_class_ids(tmp_path / "mask.png")
    assert ids.tolist() == [[0, 255, 256], [919, 1000, 1]]


def test_the_object_is_the_class_of_the_folder(imagenet_s, categories):
    data = open_data(f"imagenet-s:{imagenet_s}")
    assert [s.label for s in data] == [
        imagenet_wnids().index(categories[number - 1]) for number in (255, 256, 919)
    ]
    assert [s.mask[0].tolist() for s in data] == [
        [0, 1, 0, 0, IGNORE, 0],
        [0, 0, 1, 0, IGNORE, 0],
        [0, 0, 0, 1, IGNORE, 0],
    ]
    assert data[2].id == "n15075141/n15075141.JPEG"


def test_merged_classes_count_as_the_class_kept(imagenet_s):
    wnid = "n03887697"  # paper towel, kept as n15075141, the last of the list
    photo(imagenet_s / "validation" / wnid / "a.JPEG")
    id_mask(imagenet_s / "validation-segmentation" / wnid / "a.png", [[919, 0, 0, 0, 0, 0]] * 4)
    merged = next(s for s in open_data(f"imagenet-s:{imagenet_s}") if s.id.startswith(wnid))
    assert merged.label == imagenet_wnids().index("n15075141") and merged.mask[0].tolist() == [
        1,
        0,
        0,
        0,
        0,
        0,
    ]
    assert (
        len(MERGED) == 5
        and kept_class("n02123045") == "n02123045"
        and set(MERGED) | set(MERGED.values()) <= set(imagenet_wnids())
    )


def test_all_folders_are_a_list_too(tmp_path, categories):
    for wnid in categories[:50]:
        photo(tmp_path / "validation" / wnid / "a.JPEG", size=(2, 2))
        id_mask(tmp_path / "validation-segmentation" / wnid / "a.png", [[7, 0], [0, 50]])
    data = open_data(f"imagenet-s:{tmp_path}")
    assert [int(s.mask.sum()) for s in data] == [0] * 6 + [1] + [0] * 42 + [1]


def test_of_several_lists_that_of_the_folders_counts(imagenet_s, categories):
    """The release's repository has all three side by side; the ids of masks go by one of them."""
    few = imagenet_s / "ImageNetS_categories_im50.txt"
    few.write_text("\n".join(categories[:50]))
    with pytest.raises(DataMissing):
        open_data(f"imagenet-s:{imagenet_s}")
    own, others = [categories[number - 1] for number in (255, 256, 919)], categories[300:347]
    few.write_text("\n".join([*own, *others]))
    for wnid in others:
        photo(imagenet_s / "validation" / wnid / "a.JPEG", size=(2, 2))
    data = open_data(f"imagenet-s:{imagenet_s}")
    assert data[0].mask[0].tolist() == [0, 0, 0, 0, IGNORE, 1]  # the first of fifty


def test_odd_imagenet_s_files_are_named(imagenet_s, categories):
    mask = imagenet_s / "validation-segmentation" / categories[254] / f"{categories[254]}.png"
    id_mask(mask, [[1001] * 6] * 4)
    with pytest.raises(BadImage, match=rf"{mask.name}.*1001"):
        open_data(f"imagenet-s:{imagenet_s}")[0]
    mask.unlink()
    with pytest.raises(BadImage, match=mask.name):
        open_data(f"imagenet-s:{imagenet_s}")[0]
    photo(imagenet_s / "validation" / "n99999999" / "a.JPEG")
    with pytest.raises(DataMissing, match="n99999999"):
        open_data(f"imagenet-s:{imagenet_s}")
    (imagenet_s / "ImageNetS_categories_im919.txt").unlink()
    with pytest.raises(DataMissing, match=r"4 categories.*ImageNetS_categories_im919\.txt"):
        open_data(f"imagenet-s:{imagenet_s}")
    with pytest.raises(DataMissing, match="validation"):
        open_data(f"imagenet-s:{imagenet_s / 'validation'}")


# food101


@pytest.fixture
def food(tmp_path) -> Path:
    for name in ("apple_pie/11", "waffles/22", "waffles/33"):
        photo(tmp_path / "images" / f"{name}.jpg")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "classes.txt").write_text("apple_pie\nbaklava\nwaffles\n")
    (tmp_path / "meta" / "test.txt").write_text("apple_pie/11\nwaffles/22\n")
    (tmp_path / "meta" / "train.txt").write_text("waffles/33\n")
    return tmp_path


def test_food_has_the_labels_of_its_list(food):
    data = open_data(f"food101:{food}")
    assert [(s.id, s.label, s.mask) for s in data] == [
        ("apple_pie/11", 0, None),
        ("waffles/22", 2, None),
    ]
    assert data.classes == ("apple_pie", "baklava", "waffles") and data[0].image.shape == (3, 4, 6)
    assert [s.id for s in open_data(f"food101:{food}:train")] == ["waffles/33"]


def test_odd_food_is_named(food):
    (food / "images" / "waffles" / "22.jpg").unlink()
    with pytest.raises(BadImage, match=r"22\.jpg"):
        open_data(f"food101:{food}")[1]
    (food / "meta" / "test.txt").write_text("apple_pie/11\nsoup/1\n")
    with pytest.raises(DataMissing, match=r"line 2.*soup/1"):
        open_data(f"food101:{food}")
    (food / "meta" / "train.txt").write_text("\n")
    with pytest.raises(DataMissing, match=r"train\.txt.*nothing"):
        open_data(f"food101:{food}:train")
    with pytest.raises(DataMissing, match=r"classes\.txt"):
        open_data(f"food101:{food / 'images'}")


# imagenet-hard


def encoded(value: int) -> dict[str, bytes | str]:
    file = BytesIO()
    Image.new("RGB", (6, 4), (value, 0, 255)).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": ""}


def parquet(path: Path, images: list, labels: list, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"image": images, "label": labels, "origin": ["v2"] * len(labels)}),
        path,
        **options,
    )


@pytest.fixture
def hard(tmp_path) -> Path:
    parquet(
        tmp_path / "data" / "validation-00000-of-00002-a.parquet",
        [encoded(10), encoded(20), encoded(30)],
        [[3], [5, 7], [9]],
        row_group_size=2,
    )
    parquet(tmp_path / "data" / "validation-00001-of-00002-b.parquet", [encoded(40)], [[999]])
    return tmp_path


def test_hard_pictures_lie_in_parquet_files(hard):
    data = open_data(f"imagenet-hard:{hard}")
    assert (
        [s.label for s in data] == [3, 5, 9, 999]
        and data.answers(1) == (5, 7)
        and len(data.classes) == 1000
    )
    assert [round(s.image[0, 0, 0].item() * 255) for s in data] == [10, 20, 30, 40] and data[
        0
    ].image.shape == (3, 4, 6)
    assert len({s.id for s in data}) == 4
    assert [s.label for s in open_data(f"imagenet-hard:{hard}", limit=2)] == [3, 9]
    assert (
        data.fingerprint
        == open_data(f"imagenet-hard:{hard}").fingerprint
        != open_data(f"imagenet-hard:{hard}", limit=2).fingerprint
    )


def test_odd_hard_files_are_named(hard):
    broken = hard / "data" / "validation-00002-c.parquet"
    parquet(broken, [{"bytes": b"no picture", "path": ""}], [[1]])
    data = open_data(f"imagenet-hard:{hard}")
    assert data[3].label == 999
    with pytest.raises(BadImage):
        data[4]
    parquet(broken, [encoded(1)], [[1000]])
    with pytest.raises(DataMissing):
        open_data(f"imagenet-hard:{hard}")
    pq.write_table(pa.table({"image": [encoded(1)]}), broken)
    with pytest.raises(DataMissing):
        open_data(f"imagenet-hard:{hard}")
    broken.write_text("no table")
    with pytest.raises(DataMissing):
        open_data(f"imagenet-hard:{hard}")
    with pytest.raises(DataMissing):
        open_data(f"imagenet-hard:{hard / 'data'}")
