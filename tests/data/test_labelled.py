"""Oxford-IIIT Pet, COCO, Food-101, CIFAR and Tiny ImageNet as they are released; a missing or odd
file is named."""

import json
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seecause.data import IGNORE, open_data
from seecause.data.labelled import main_category, run_lengths
from seecause.errors import BadImage, DataMissing, UnknownName
from seecause.loading import imagenet_names
from tests.files import grey, lines, photo

# pets


@pytest.fixture
def pets(tmp_path) -> Path:
    rows = {"Abyssinian_1": "1 1 1", "american_bulldog_7": "2 2 1", "pug_3": "4 2 1"}
    for name in rows:
        photo(tmp_path / "images" / f"{name}.jpg")
        trimap = np.tile(np.array([1, 1, 3, 2, 2, 2]), (4, 1))
        grey(tmp_path / "annotations" / "trimaps" / f"{name}.png", trimap)
    listed = [f"{name} {row}" for name, row in rows.items()]
    lines(tmp_path / "annotations" / "test.txt", "#Image CLASS-ID SPECIES BREED ID", *listed)
    lines(tmp_path / "annotations" / "trainval.txt", listed[-1])
    return tmp_path


def test_pets_have_breeds_and_masks_without_their_border(pets):
    data = open_data(f"pets:{pets}")
    assert data.classes == ("Abyssinian", "american_bulldog", "breed 3", "pug")
    assert [s.label for s in data] == [0, 1, 3] and data[1].id == "american_bulldog_7"
    assert data[1].mask[0].tolist() == [1, 1, IGNORE, 0, 0, 0]
    assert [s.id for s in open_data(f"pets:{pets}:trainval")] == ["pug_3"]


def test_pets_take_imagenet_labels_from_a_table(pets, caplog):
    table = pets / "imagenet_labels.csv"
    lines(table, "image,breed,imagenet_index,wnid", "pug_3,pug,254,n02110958")
    data = open_data(f"pets:{pets}")
    assert [(s.id, s.label) for s in data] == [("pug_3", 254)]
    assert data.classes == imagenet_names() and "2 photos" in caplog.text
    lines(table, "breed,index", "pug,254")
    with pytest.raises(DataMissing, match="imagenet_index"):
        open_data(f"pets:{pets}")


@pytest.mark.parametrize("missing", ["images/pug_3.jpg", "annotations/trimaps/pug_3.png"])
def test_a_missing_file_of_a_pet_is_named(pets, missing):
    (pets / missing).unlink()
    data = open_data(f"pets:{pets}")
    assert data[0].mask is not None and len(data.fingerprint) == 16
    with pytest.raises(BadImage, match=Path(missing).name):
        data[2]


@pytest.mark.parametrize(
    ("trimap", "mode", "said"),
    [
        (np.zeros((4, 6)), "L", r"values \{0\}"),
        (np.ones((4, 5)), "L", r"\[4, 5\] for an image \[4, 6\]"),
        (np.ones((4, 6)), "RGB", "colour"),
    ],
)
def test_an_odd_trimap_is_named(pets, trimap, mode, said):
    grey(pets / "annotations" / "trimaps" / "pug_3.png", trimap, mode)
    with pytest.raises(BadImage, match=rf"pug_3.*{said}"):
        open_data(f"pets:{pets}")[2]


# coco

CAT, DOG = 17, 18  # numbers of the release, which has gaps


def thing(image: int, category: int, outline: Any, area: float, crowd: int = 0) -> dict[str, Any]:
    known = {"image_id": image, "category_id": category, "area": area, "iscrowd": crowd}
    return {"id": image * 100 + int(area), "segmentation": outline, "bbox": [0, 1, area, 2]} | known


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
    assert torch.equal(first.mask, expected)
    assert int((second.mask == 1).sum()) == 4 + 4 + 1 and bool(second.mask[3, 4] == 1)
    assert data.capabilities == {"masks"} and main_category([]) is None
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


def test_runs_go_down_the_columns_and_must_fill_the_image():
    assert run_lengths([1, 2, 3], (2, 3)).tolist() == [[False, True, False], [True, False, False]]
    with pytest.raises(ValueError, match="fill"):
        run_lengths([1, 2], (2, 3))


def test_odd_coco_is_named(coco):
    for outline in ([[0, 0, 1]], {"counts": "PPYo0", "size": [4, 6]}):
        rewrite(coco, lambda c, o=outline: c["annotations"][0].update(segmentation=o))
        with pytest.raises(DataMissing, match="000000000001"):
            open_data(f"coco:{coco}")[0]
    rewrite(coco, lambda c: c["images"][1].update(width=7))
    with pytest.raises(BadImage, match="000000000002"):
        open_data(f"coco:{coco}")[1]
    rewrite(coco, lambda c: c["annotations"][0].pop("area"))
    with pytest.raises(DataMissing, match="instances_val2017"):
        open_data(f"coco:{coco}")
    with pytest.raises(DataMissing, match="instances_train2017"):
        open_data(f"coco:{coco}:train")
    with pytest.raises(UnknownName, match="test"):
        open_data(f"coco:{coco}:test")


# food101


@pytest.fixture
def food(tmp_path) -> Path:
    for name in ("apple_pie/11", "waffles/22", "waffles/33"):
        photo(tmp_path / "images" / f"{name}.jpg")
    lines(tmp_path / "meta" / "classes.txt", "apple_pie", "baklava", "waffles")
    lines(tmp_path / "meta" / "test.txt", "apple_pie/11", "waffles/22")
    lines(tmp_path / "meta" / "train.txt", "waffles/33")
    return tmp_path


def test_food_has_the_labels_of_its_list(food):
    data = open_data(f"food101:{food}")
    assert [(s.id, s.label) for s in data] == [("apple_pie/11", 0), ("waffles/22", 2)]
    assert data.classes == ("apple_pie", "baklava", "waffles") and data[0].mask is None
    assert [s.id for s in open_data(f"food101:{food}:train")] == ["waffles/33"]


# cifar


class Python2(pickle._Pickler):
    """Writes what the release's own Python 2 wrote: text of bytes, and numpy under its old name."""

    def save_bytes(self, content: bytes) -> None:
        self.write(pickle.BINSTRING + len(content).to_bytes(4, "little") + content)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_bytes}  # noqa: RUF012


def python2(content: object) -> bytes:
    file = BytesIO()
    Python2(file, protocol=2).dump(content)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def batch(path: Path, labels: list[int], seed: int = 0, key: bytes = b"labels") -> np.ndarray:
    """As the release has it: bytes for keys, a row of 3,072 bytes for each photo."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(python2({b"data": pixels, key: labels, b"batch_label": b"one"}))
    return pixels


@pytest.fixture
def cifar(tmp_path) -> Path:
    root = tmp_path / "cifar-10-batches-py"
    for n in range(1, 6):
        batch(root / f"data_batch_{n}", [0, 1, 2, 3], seed=n)
    batch(root / "test_batch", [3, 1], seed=9)
    names = [b"airplane", b"automobile", b"bird", b"cat"]
    (root / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}))
    return root


def test_cifar_pixels_are_planes_of_colour(cifar):
    data = open_data(f"cifar10:{cifar}")
    pixels = batch(cifar / "test_batch", [3, 1], seed=9)
    assert data.classes[3] == "cat" and data.labels == (3, 1) and data[0].mask is None
    assert data[0].id == "test_batch/0" and data[1].image.shape == (3, 32, 32)
    assert torch.equal((data[1].image * 255).round().byte().flatten(), torch.from_numpy(pixels[1]))
    assert open_data(f"cifar10:{cifar.parent}").fingerprint == data.fingerprint
    whole = open_data(f"cifar10:{cifar}:trainval")
    assert whole.ids == tuple(f"data_batch_{n}/{row}" for n in range(1, 6) for row in range(4))
    last = batch(cifar / "data_batch_5", [0, 1, 2, 3], seed=5)[3]
    assert torch.equal((whole[19].image * 255).round().byte().flatten(), torch.from_numpy(last))


def test_cifar_keeps_every_tenth_of_a_class_for_validation(tmp_path):
    root = tmp_path / "cifar-100-python"
    batch(root / "train", [5] * 20 + [7] * 10, key=b"fine_labels")
    names = {b"fine_label_names": [f"c{n}".encode() for n in range(100)]}
    (root / "meta").write_bytes(pickle.dumps(names))
    val, train = (open_data(f"cifar100:{tmp_path}:{split}") for split in ("val", "train"))
    assert val.ids == ("train/9", "train/19", "train/29")
    assert len(train) == 27 and "train/9" not in train.ids
    assert len(open_data(f"cifar100:{tmp_path}:trainval", limit=6)) == 6
    with pytest.raises(DataMissing, match="test: cannot be read"):
        open_data(f"cifar100:{tmp_path}")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",  # bytes longer than the file
        b"\x80\x02cbuiltins\neval\n(U\x011tR.",
        b"(S'a'\nI1\ncos\nsystem\nb.",
    ],
)
def test_a_pickle_runs_no_code(cifar, content):
    (cifar / "test_batch").write_bytes(content)
    with pytest.raises(DataMissing, match="test_batch"):
        open_data(f"cifar10:{cifar}")


# tiny imagenet


@pytest.fixture
def tiny_imagenet(tmp_path) -> Path:
    wnids = ["n02124075", "n01443537"]  # the release's list is not sorted
    lines(tmp_path / "wnids.txt", *wnids)
    words = (
        "n01443537\tgoldfish, Carassius auratus",
        "n02124075\tEgyptian cat",
        "n09999999\tother",
    )
    lines(tmp_path / "words.txt", *words)
    for wnid in wnids:
        for n in range(10):
            photo(tmp_path / "train" / wnid / "images" / f"{wnid}_{n}.JPEG")
    rows = ("val_0.JPEG\tn02124075\t1\t0\t4\t3", "val_1.JPEG\tn01443537\t0\t0\t63\t63")
    lines(tmp_path / "val" / "val_annotations.txt", *rows)
    photo(tmp_path / "val" / "images" / "val_0.JPEG")
    photo(tmp_path / "val" / "images" / "val_1.JPEG")
    return tmp_path


def test_tiny_imagenet_tests_on_the_labelled_folder(tiny_imagenet):
    data = open_data(f"tiny-imagenet:{tiny_imagenet}")
    assert data.classes == ("goldfish", "Egyptian cat")
    assert [(s.id, s.label) for s in data] == [("val_0.JPEG", 1), ("val_1.JPEG", 0)]
    val, train = (open_data(f"tiny-imagenet:{tiny_imagenet}:{split}") for split in ("val", "train"))
    assert set(val.labels) == {0, 1} and len(val) == 2 and len(train) == 18
    assert val[0].id.startswith("n01443537/")
    with pytest.raises(BadImage, match="n0"):
        lines(tiny_imagenet / "wnids.txt", "n0")
        open_data(f"tiny-imagenet:{tiny_imagenet}:train")
    with pytest.raises(DataMissing, match="cannot be read"):
        open_data(f"tiny-imagenet:{tiny_imagenet}")
