"""What `tests/fuzz.py` damages: pictures, masks and lists of datasets, and who reads them."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydicom
from PIL import Image

import seecause as sc
from seecause.data.images import FORMATS, read_image
from seecause.data.siim import read_xray, xray_size
from tests.data.mutations import (
    of_bytes,
    of_csv,
    of_npy,
    of_parquet,
    of_png,
)
from tests.data.test_hostile import cub_list, food_list, tiny_list
from tests.data.test_labelled_photos import batch, python2
from tests.data.test_siim import xray
from tests.files import grey, lines, photo
from tests.fuzz import Victim

TABLE = (of_bytes, of_csv)


def read_all(spec: str) -> None:
    for sample in sc.data.open_data(spec):
        assert sample.image.shape[0] == 3


def parquet(folder: Path) -> list[Victim]:
    path = folder / "data" / "validation-0.parquet"
    path.parent.mkdir()
    picture = io.BytesIO()
    Image.new("RGB", (9, 8), "red").save(picture, format="PNG")
    image = {"bytes": picture.getvalue(), "path": ""}
    pq.write_table(pa.table({"image": [image] * 2, "label": [[3, 5], [1]]}), path)
    return [Victim(path, lambda: read_all(f"imagenet-hard:{folder}"), (of_bytes, of_parquet))]


def csv_files(folder: Path) -> list[Victim]:
    photos = folder / "folder"
    for name in ("dog/1.jpg", "cat/2.jpg"):
        photo(photos / name)
    groups = lines(photos / "groups.csv", "file,background", "dog/1.jpg,grass", "cat/2.jpg,sea")
    birds = folder / "waterbirds"
    photo(birds / "a" / "1.jpg")
    listing = lines(birds / "metadata.csv", "img_filename,y,split,place", "a/1.jpg,0,2,1")
    celeba = folder / "celeba"
    photo(celeba / "img_align_celeba" / "1.jpg")
    split = lines(celeba / "list_eval_partition.csv", "image_id,partition", "1.jpg,2")
    marks = lines(celeba / "list_attr_celeba.csv", "image_id,Blond_Hair,Male", "1.jpg,1,-1")
    siim = xrays(folder / "siim")
    return [
        Victim(groups, lambda: read_all(f"folder:{photos}"), TABLE),
        Victim(listing, lambda: read_all(f"waterbirds:{birds}"), TABLE),
        Victim(split, lambda: read_all(f"celeba:{celeba}"), TABLE),
        Victim(marks, lambda: read_all(f"celeba:{celeba}"), TABLE),
        Victim(siim / "train-rle.csv", lambda: read_all(f"siim:{siim}"), TABLE),
    ]


def lists(folder: Path) -> list[Victim]:
    """Lists of pictures as datasets are released."""
    victims = []
    for make, names in (
        (food_list, ["meta/classes.txt", "meta/test.txt"]),
        (tiny_list, ["wnids.txt", "words.txt", "val/val_annotations.txt"]),
        (cub_list, ["images.txt", "image_class_labels.txt", "bounding_boxes.txt", "classes.txt"]),
    ):
        root = folder / make.__name__
        spec = make(root, "1.jpg")
        for place in ("images/pie/1.jpg.jpg", "val/images/1.jpg", "images/1.jpg"):
            photo(root / place)
        victims += [
            Victim(root / name, lambda spec=spec: read_all(spec), (of_bytes,)) for name in names
        ]
    return victims


def xrays(folder: Path) -> Path:
    for label in (0, 1):
        for split in ("train_set", "full_test_set"):
            xray(folder / split / str(label) / f"uid{label}.dcm")
    lines(folder / "train-rle.csv", "ImageId, EncodedPixels", "uid0, -1", "uid1, 1 2 3 1")
    return folder


def of_dicom(content: bytes, draw: random.Random) -> bytes:
    """Some element of another value; by bytes where pydicom refuses to write that."""
    try:
        file = pydicom.dcmread(io.BytesIO(content))
        element = draw.choice([*file.file_meta, *file])
        element.value = draw.choice((0, 1, 9, 65535, "", "x", "1.2.840.10008.1.2.4.90", None, b"x"))
        made = io.BytesIO()
        file.save_as(made)
        return made.getvalue()
    except Exception:  # a test's own tool
        return of_bytes(content, draw)


def dicom(folder: Path) -> list[Victim]:
    path = folder / "x.dcm"
    xray(path)
    return [Victim(path, lambda: (xray_size(path), read_xray(path)), (of_bytes, of_dicom))]


def images(folder: Path) -> list[Victim]:
    noise = np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8)
    victims = []
    for kind in FORMATS:
        for mode in ("RGB", "P") if kind in ("PNG", "GIF", "TIFF") else ("RGB",):
            path = folder / f"{kind}-{mode}.png"
            Image.fromarray(noise).convert(mode).save(path, format=kind)
            more = (of_bytes, of_png) if kind == "PNG" else (of_bytes,)
            victims.append(Victim(path, lambda path=path: read_image(path), more))
    return victims


def npy_masks(folder: Path) -> list[Victim]:
    photo(folder / "original" / "val" / "00_dog" / "a.JPEG")
    path = folder / "fg_mask" / "val" / "00_dog" / "a.npy"
    path.parent.mkdir(parents=True)
    np.save(path, np.ones((4, 6), np.uint8))
    return [Victim(path, lambda: read_all(f"imagenet9:{folder}"), (of_bytes, of_npy))]


def png_masks(folder: Path) -> list[Victim]:
    pets = folder / "pets"
    trimap = pets / "annotations" / "trimaps" / "Abyssinian_1.png"
    photo(pets / "images" / "Abyssinian_1.jpg")
    grey(trimap, np.ones((4, 6)))
    names = lines(pets / "annotations" / "test.txt", "Abyssinian_1 1 1 1")
    own = folder / "own"
    photo(own / "dog" / "1.png")
    grey(own / "masks" / "dog" / "1.png", np.ones((4, 6)))
    return [
        Victim(trimap, lambda: read_all(f"pets:{pets}"), (of_bytes, of_png)),
        Victim(names, lambda: read_all(f"pets:{pets}"), (of_bytes,)),
        Victim(
            own / "masks" / "dog" / "1.png", lambda: read_all(f"folder:{own}"), (of_bytes, of_png)
        ),
    ]


def pickles(folder: Path) -> list[Victim]:
    root = folder / "cifar-10-batches-py"
    batch(root / "test_batch", [0, 1])
    meta = root / "batches.meta"
    meta.write_bytes(python2({b"label_names": [b"cat", b"dog"]}))
    content = (root / "test_batch").read_bytes()
    shell = content.index(b"data") + 200

    def around(content: bytes, draw: random.Random) -> bytes:
        """What stands around the pixels: a changed pixel is another picture."""
        return of_bytes(content[:shell], draw) + content[shell:]

    def read() -> None:
        read_all(f"cifar10:{root}")

    return [Victim(root / "test_batch", read, (around,)), Victim(meta, read, (of_bytes,))]
