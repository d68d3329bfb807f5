"""CIFAR, Tiny ImageNet and CelebA as they are released; a missing or odd file is named."""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

from seecause.data import open_data
from seecause.errors import DataMissing, UnknownName
from tests.files import lines, photo

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
    (root / "batches.meta").write_bytes(
        pickle.dumps({b"label_names": [b"airplane", b"automobile", b"bird", b"cat"]})
    )
    return root


def test_cifar_pixels_are_planes_of_colour(cifar):
    data = open_data(f"cifar10:{cifar}")
    pixels = batch(cifar / "test_batch", [3, 1], seed=9)
    assert (
        data.classes[3] == "cat"
        and data.labels == (3, 1)
        and data[0].id == "test_batch/0"
        and data[0].mask is None
    )
    assert torch.equal((data[1].image * 255).round().byte().flatten(), torch.from_numpy(pixels[1]))
    assert (
        data[1].image.shape == (3, 32, 32)
        and open_data(f"cifar10:{cifar.parent}").fingerprint == data.fingerprint
    )


def test_all_training_batches_are_read_in_their_order(cifar):
    data = open_data(f"cifar10:{cifar}:trainval")
    assert data.ids == tuple(f"data_batch_{n}/{row}" for n in range(1, 6) for row in range(4))
    last = batch(cifar / "data_batch_5", [0, 1, 2, 3], seed=5)[3]
    assert torch.equal((data[19].image * 255).round().byte().flatten(), torch.from_numpy(last))


def test_cifar_keeps_every_tenth_of_a_class_for_validation(tmp_path):
    root = tmp_path / "cifar-100-python"
    batch(root / "train", [5] * 20 + [7] * 10, key=b"fine_labels")
    (root / "meta").write_bytes(
        pickle.dumps({b"fine_label_names": [f"c{n}".encode() for n in range(100)]})
    )
    assert [s.id for s in open_data(f"cifar100:{tmp_path}:val")] == [
        "train/9",
        "train/19",
        "train/29",
    ]
    train = {s.id for s in open_data(f"cifar100:{tmp_path}:train")}
    assert (
        len(train) == 27
        and "train/9" not in train
        and len(open_data(f"cifar100:{tmp_path}:trainval", limit=6)) == 6
    )
    with pytest.raises(DataMissing, match="test: no such file"):
        open_data(f"cifar100:{tmp_path}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"data": [1, 2]}, "pixels"),
        ({b"data": np.zeros((2, 7), np.uint8)}, "pixels"),
        ({b"labels": [3, 99]}, "0 to 3"),
        ({b"labels": 4}, "no entry labels"),
    ],
)
def test_odd_cifar_batches_are_named(cifar, change, message):
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [3, 1], **change}
    (cifar / "test_batch").write_bytes(pickle.dumps(batch))
    with pytest.raises(DataMissing):
        open_data(f"cifar10:{cifar}")


def test_a_cifar_file_that_would_run_code_is_refused(cifar, tmp_path):
    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    (cifar / "test_batch").write_bytes(pickle.dumps({b"data": Attack(), b"labels": []}))
    with pytest.raises(DataMissing):
        open_data(f"cifar10:{cifar}")
    assert not (tmp_path / "ran").exists()


# tiny imagenet


@pytest.fixture
def tiny_imagenet(tmp_path) -> Path:
    wnids = ["n02124075", "n01443537"]  # the release's list is not sorted
    lines(tmp_path / "wnids.txt", *wnids)
    lines(
        tmp_path / "words.txt",
        "n01443537\tgoldfish, Carassius auratus",
        "n02124075\tEgyptian cat",
        "n09999999\tother",
    )
    for wnid in wnids:
        names = [f"{wnid}_{n}.JPEG" for n in range(10)]
        lines(
            tmp_path / "train" / wnid / f"{wnid}_boxes.txt",
            *(f"{name}\t0\t{n}\t5\t3" for n, name in enumerate(names)),
        )
        for name in names:
            photo(tmp_path / "train" / wnid / "images" / name)
    lines(
        tmp_path / "val" / "val_annotations.txt",
        "val_0.JPEG\tn02124075\t1\t0\t4\t3",
        "val_1.JPEG\tn01443537\t0\t0\t63\t63",
    )
    photo(tmp_path / "val" / "images" / "val_0.JPEG")
    photo(tmp_path / "val" / "images" / "val_1.JPEG")
    return tmp_path


def test_tiny_imagenet_tests_on_the_labelled_folder(tiny_imagenet):
    data = open_data(f"tiny-imagenet:{tiny_imagenet}")
    assert data.classes == ("goldfish", "Egyptian cat") and [(s.id, s.label) for s in data] == [
        ("val_0.JPEG", 1),
        ("val_1.JPEG", 0),
    ]
    assert data[0].box == (1.0, 0.0, 4.0, 4.0) and data[1].box == (
        0.0,
        0.0,
        64.0,
        64.0,
    )  # corners belong to the box
    val = open_data(f"tiny-imagenet:{tiny_imagenet}:val")
    assert (
        {photo.label for photo in val.photos} == {0, 1}
        and len(val) == 2
        and len(open_data(f"tiny-imagenet:{tiny_imagenet}:train")) == 18
    )


# celeba

FACES = {
    "000001.jpg": (1, 1, 0),
    "000002.jpg": (1, 0, 0),
    "000003.jpg": (0, 1, 1),
    "000004.jpg": (0, 0, 2),
}  # blond, male, split
SIGN = {0: "-1", 1: "1"}


@pytest.fixture(params=["csv", "txt", "kaggle"])
def celeba(tmp_path, request) -> Path:
    if request.param == "txt":
        rows = [
            f"{name}  {SIGN[1 - blond]} {SIGN[blond]}  {SIGN[male]}"
            for name, (blond, male, _) in FACES.items()
        ]
        lines(tmp_path / "list_attr_celeba.txt", "4", "Bald Blond_Hair Male", *rows)
        lines(
            tmp_path / "list_eval_partition.txt",
            *(f"{name} {split}" for name, (_, _, split) in FACES.items()),
        )
    else:
        rows = [f"{name},{SIGN[male]},{SIGN[blond]}" for name, (blond, male, _) in FACES.items()]
        lines(tmp_path / "list_attr_celeba.csv", "image_id,Male,Blond_Hair", *rows)
        lines(
            tmp_path / "list_eval_partition.csv",
            "image_id,partition",
            *(f"{name},{split}" for name, (_, _, split) in FACES.items()),
        )
    folder = tmp_path / "img_align_celeba"
    for name in FACES:
        photo((folder / folder.name if request.param == "kaggle" else folder) / name)
    return tmp_path


def test_celeba_reads_both_forms_of_its_lists(celeba):
    data = open_data(f"celeba:{celeba}:train")
    assert (
        data.groups == ((1, 1), (1, 0))
        and data.labels == (1, 1)
        and data.places == ("not male", "male")
    )
    assert (
        data[0].id == "000001.jpg"
        and data[0].image.shape == (3, 4, 6)
        and open_data(f"celeba:{celeba}").groups == ((0, 0),)
    )
    assert open_data(f"celeba:{celeba}:val").groups == ((0, 1),)


def test_celeba_lists_that_do_not_match_are_named(celeba):
    kind = "csv" if (celeba / "list_attr_celeba.csv").is_file() else "txt"
    gap, header = (",", ["image_id,partition"]) if kind == "csv" else (" ", [])
    lines(celeba / f"list_eval_partition.{kind}", *header, f"000009.jpg{gap}2")
    with pytest.raises(DataMissing, match=r"000009\.jpg"):
        open_data(f"celeba:{celeba}")
    lines(celeba / f"list_eval_partition.{kind}", *header, f"000001.jpg{gap}7")
    with pytest.raises(DataMissing, match=r"000001\.jpg.7"):
        open_data(f"celeba:{celeba}")
    lines(celeba / f"list_eval_partition.{kind}", *header, f"000001.jpg{gap}0")
    with pytest.raises(DataMissing, match="no photo of the split test"):
        open_data(f"celeba:{celeba}")
    attributes = celeba / f"list_attr_celeba.{kind}"
    attributes.write_text(attributes.read_text().replace("Blond_Hair", "Brown_Hair"))
    with pytest.raises(DataMissing, match="Blond_Hair"):
        open_data(f"celeba:{celeba}:train")
    with pytest.raises(UnknownName, match="training"):
        open_data(f"celeba:{celeba}:training")
