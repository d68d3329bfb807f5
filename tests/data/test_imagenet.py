"""ImageNet and the datasets made of it as they are released; a missing or odd file is named."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image

import seecause as sc
from seecause.data import IGNORE, open_data
from seecause.data.batch import class_places
from seecause.data.imagenet import (
    MERGED,
    imagenet_wnids,
    kept_class,
    object_of,
    read_class_ids,
    read_in9_map,
)
from seecause.errors import BadImage, DataMissing, UnknownName
from seecause.loading import imagenet_names
from tests.files import photo


def test_imagenet_labels_follow_the_sorted_wnids(tmp_path):
    assert imagenet_wnids() == tuple(sorted(imagenet_wnids())) and len(imagenet_wnids()) == 1000
    photo(tmp_path / "val" / "n02123045" / "ILSVRC2012_val_00000001.JPEG")
    photo(tmp_path / "val" / "n01440764" / "ILSVRC2012_val_00000002.JPEG")
    data = open_data(f"imagenet:{tmp_path}")
    assert [s.label for s in data] == [0, 281] and data.classes[281].startswith("tabby")
    with pytest.raises(DataMissing, match="train: no such folder"):
        open_data(f"imagenet:{tmp_path}:train")
    photo(tmp_path / "train" / "n02123045" / "n02123045_1.JPEG")
    assert open_data(f"imagenet:{tmp_path}:train").labels == (281,)
    photo(tmp_path / "val" / "n99999999" / "a.JPEG")
    with pytest.raises(DataMissing, match="n99999999"):
        open_data(f"imagenet:{tmp_path}")


# imagenet-s


def id_mask(path: Path, ids: list[list[int]]) -> None:
    """As the release writes it: red holds the low byte, green the high one."""
    numbers = np.array(ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    planes = [numbers % 256, numbers // 256, 0 * numbers]
    Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8)).save(path)


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
        mask = tmp_path / "validation-segmentation" / wnid / f"{wnid}.png"
        id_mask(mask, [[0, 255, 256, 919, 1000, 1]] * 4)
    return tmp_path


def test_the_object_is_the_class_of_the_folder(imagenet_s, categories):
    data = open_data(f"imagenet-s:{imagenet_s}")
    labels = [imagenet_wnids().index(categories[number - 1]) for number in (255, 256, 919)]
    assert [s.label for s in data] == labels and data[2].id == "n15075141/n15075141.JPEG"
    assert [s.mask[0].tolist() for s in data] == [
        [0, 1, 0, 0, IGNORE, 0],
        [0, 0, 1, 0, IGNORE, 0],
        [0, 0, 0, 1, IGNORE, 0],
    ]
    ids = read_class_ids(next(imagenet_s.glob("validation-segmentation/*/*.png")))
    assert ids[0].tolist() == [0, 255, 256, 919, 1000, 1]  # beyond eight bits


def test_merged_classes_count_as_the_class_kept(imagenet_s):
    wnid = "n03887697"  # paper towel, kept as n15075141, the last of the list
    photo(imagenet_s / "validation" / wnid / "a.JPEG")
    id_mask(imagenet_s / "validation-segmentation" / wnid / "a.png", [[919, 0, 0, 0, 0, 0]] * 4)
    merged = next(s for s in open_data(f"imagenet-s:{imagenet_s}") if s.id.startswith(wnid))
    assert merged.label == imagenet_wnids().index("n15075141")
    assert merged.mask[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert len(MERGED) == 5 and kept_class("n02123045") == "n02123045"
    assert set(MERGED) | set(MERGED.values()) <= set(imagenet_wnids())


def test_all_folders_are_a_list_too(tmp_path, categories):
    for wnid in categories[:50]:
        photo(tmp_path / "validation" / wnid / "a.JPEG", size=(2, 2))
        id_mask(tmp_path / "validation-segmentation" / wnid / "a.png", [[7, 0], [0, 50]])
    data = open_data(f"imagenet-s:{tmp_path}")
    assert [int(s.mask.sum()) for s in data] == [0] * 6 + [1] + [0] * 42 + [1]


def test_odd_imagenet_s_files_are_named(imagenet_s, categories):
    other = imagenet_s / "ImageNetS_categories_im50.txt"
    other.write_text("\n".join(categories[:50]))
    with pytest.raises(DataMissing, match="2 lists"):
        open_data(f"imagenet-s:{imagenet_s}")
    other.unlink()
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
    with pytest.raises(DataMissing, match=r"4 categories.*ImageNetS_categories_im50\.txt"):
        open_data(f"imagenet-s:{imagenet_s}")
    with pytest.raises(DataMissing, match="validation"):
        open_data(f"imagenet-s:{imagenet_s / 'validation'}")


# imagenet-hard


def encoded(value: int) -> dict[str, bytes | str]:
    file = BytesIO()
    Image.new("RGB", (6, 4), (value, 0, 255)).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": ""}


def parquet(path: Path, images: list, labels: list, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": images, "label": labels, "origin": ["v2"] * len(labels)})
    pq.write_table(table, path, **options)


@pytest.fixture
def hard(tmp_path) -> Path:
    images = [encoded(10), encoded(20), encoded(30)]
    first = tmp_path / "data" / "validation-00000-of-00002-a.parquet"
    parquet(first, images, [[3], [5, 7], [9]], row_group_size=2)
    parquet(tmp_path / "data" / "validation-00001-of-00002-b.parquet", [encoded(40)], [[999]])
    return tmp_path


def test_hard_images_lie_in_parquet_files(hard):
    data = open_data(f"imagenet-hard:{hard}")
    assert [s.label for s in data] == [3, 5, 9, 999] and len(data.classes) == 1000
    assert [round(s.image[0, 0, 0].item() * 255) for s in data] == [10, 20, 30, 40]
    assert data[0].image.shape == (3, 4, 6) and len({s.id for s in data}) == 4
    few = open_data(f"imagenet-hard:{hard}", limit=2)
    assert [s.label for s in few] == [3, 9] and few.fingerprint != data.fingerprint
    assert data.fingerprint == open_data(f"imagenet-hard:{hard}").fingerprint


@pytest.mark.parametrize("labels", [[[None]], [["cat"]], [3], [[1000]], [[]], [None]])
def test_odd_labels_in_parquet_are_named(tmp_path, labels):
    parquet(tmp_path / "data" / "validation-0.parquet", [{"bytes": b"x"}], labels)
    with pytest.raises(DataMissing, match="validation-0"):
        open_data(f"imagenet-hard:{tmp_path}")


@pytest.mark.parametrize("images", [[None], [{"bytes": None}], ["x"], [{"bytes": b"no image"}]])
def test_odd_images_in_parquet_are_named(tmp_path, images):
    parquet(tmp_path / "data" / "validation-0.parquet", images, [[3]])
    with pytest.raises(BadImage, match="validation-0"):
        open_data(f"imagenet-hard:{tmp_path}")[0]


# imagenet-9


@pytest.fixture
def imagenet9(tmp_path) -> Path:
    for part, wnid in (("00_dog", "n02085620_1"), ("02_wheeled vehicle", "n02701002_7")):
        photo(tmp_path / "original" / "val" / part / f"{wnid}.JPEG")
        photo(tmp_path / "mixed_rand" / "val" / part / f"fg_{wnid}_bg_n02536864_02721.JPEG", seed=1)
        photo(tmp_path / "no_fg" / "val" / part / f"{wnid}.JPEG", seed=2)
        mask = tmp_path / "fg_mask" / "val" / part / f"{wnid}.npy"
        mask.parent.mkdir(parents=True)
        np.save(mask, np.arange(24).reshape(4, 6) % 5 == 0)
    return tmp_path


def test_imagenet9_has_the_labels_of_its_folders_and_the_masks_of_its_objects(imagenet9):
    data = open_data(f"imagenet9:{imagenet9}")
    assert data.labels == (0, 2) and data.classes[2] == "wheeled vehicle"
    assert data.name.endswith(":original") and data[1].group is None
    assert data[1].mask.dtype == torch.bool and int(data[1].mask.sum()) == 5
    assert object_of("fg_n02497673_05944_bg_n02536864_02721") == "n02497673_05944"
    assert object_of("n02497673_05944") == "n02497673_05944"
    mixed = open_data(f"imagenet9:{imagenet9}:mixed_rand")
    assert torch.equal(mixed[0].mask, data[0].mask)
    assert open_data(f"imagenet9:{imagenet9}:no_fg")[0].mask is None


def test_odd_imagenet9_files_are_named(imagenet9):
    with pytest.raises(UnknownName, match="mixed_sum"):
        open_data(f"imagenet9:{imagenet9}:mixed_sum")
    with pytest.raises(DataMissing, match="mixed_same"):
        open_data(f"imagenet9:{imagenet9}:mixed_same")
    mask = imagenet9 / "fg_mask" / "val" / "00_dog" / "n02085620_1.npy"
    np.save(mask, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(BadImage, match=mask.name):  # a pickle inside: not loaded
        open_data(f"imagenet9:{imagenet9}")[0]
    np.save(mask, np.zeros((4, 6, 3)))
    with pytest.raises(BadImage, match=mask.name):
        open_data(f"imagenet9:{imagenet9}")[0]
    mask.unlink()
    with pytest.raises(BadImage, match=mask.name):
        open_data(f"imagenet9:{imagenet9}")[0]
    photo(imagenet9 / "original" / "val" / "09_plant" / "a.JPEG")
    with pytest.raises(DataMissing, match="09_plant"):
        open_data(f"imagenet9:{imagenet9}")


def test_the_map_to_nine_classes_is_read_in_order(tmp_path):
    path = tmp_path / "in_to_in9.json"
    path.write_text(json.dumps({str(place): place % 10 - 1 for place in reversed(range(1000))}))
    assert read_in9_map(path).tolist() == [place % 10 - 1 for place in range(1000)]
    odd = ({"0": 1}, {str(n): 9 for n in range(1000)}, {str(n): "1" for n in range(1000)})
    for text in (*map(json.dumps, odd), "{"):
        path.write_text(text)
        with pytest.raises(DataMissing, match=path.name):
            read_in9_map(path)


@pytest.mark.parametrize("form", ["folder:{0}", "pairs:{0}:{0}"])
def test_folders_of_wordnet_ids_fit_a_model_of_imagenet(tmp_path, form):
    for wnid in ("n02123045", "n01440764"):
        photo(tmp_path / wnid / "a.png")
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4}
    module = timm.models.VisionTransformer(**shape).eval()  # of 1,000 classes
    view = sc.wrap(module, classes=imagenet_names(), mean=(0.5,) * 3, std=(0.5,) * 3)
    assert class_places(view, open_data(form.format(tmp_path))) == (0, 281)
