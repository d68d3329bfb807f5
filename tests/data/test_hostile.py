"""Files of strangers: nothing they hold crashes the process, runs a program, leaves the folder or
raises an exception that is not ours."""

from __future__ import annotations

import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydicom
import pytest
from PIL import Image

from seecause.data import open_data
from seecause.data._pickles import read_pickle
from seecause.data.images import read_image
from seecause.data.photos import Layout
from seecause.data.siim import read_xray, xray_size
from seecause.errors import BadImage, DataMissing
from tests.data.test_siim import xray
from tests.files import lines, photo

# pickles


def crafted(path: Path) -> None:
    """A CIFAR batch whose labels are an array of objects with the object flag cleared by a forged
    state: numpy would take raw bytes for pointers, and looking at a label would follow one."""
    state = b"(K\x03U\x01|NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00t"
    forged = b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR" + state + b"b"
    plain = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR" + state + b"b"

    def array(shape: bytes, dtype: bytes, content: bytes) -> bytes:
        made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        raw = b"T" + struct.pack("<I", len(content)) + content
        return made + b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb"

    pixels = array(b"(K\x02M\x00\x0ct", plain, bytes(2 * 3072))
    labels = array(b"(K\x02t", forged, struct.pack("<Q", 0x4141414141414141) * 2)
    path.write_bytes(b"\x80\x02}(U\x04data" + pixels + b"U\x06labels" + labels + b"u.")


def test_a_forged_dtype_never_reaches_numpy(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    crafted(folder / "test_batch")
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"cat", b"dog"]}))
    with pytest.raises(DataMissing, match="test_batch"):
        open_data(f"cifar10:{folder}")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",  # a deep list
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo of two thousand million places
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",  # bytes longer than the file
        b"\x80\x02cbuiltins\neval\n(U\x011tR.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",
        b"(S'a'\nI1\ncos\nsystem\nb.",
    ],
    ids=["deep list", "memo", "length", "eval", "new object", "state"],
)
def test_a_hostile_pickle_ends_in_our_error_or_in_plain_values(tmp_path, content):
    path = tmp_path / "p.pkl"
    path.write_bytes(content)
    try:
        value = read_pickle(path, Layout("expected something else"))
    except DataMissing as refused:
        assert len(str(refused)) < 500
    else:
        assert type(value) is dict


# pictures


def test_postscript_named_png_is_refused_and_not_run(tmp_path):
    path = tmp_path / "page.png"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n{} loop\nshowpage\n")
    with pytest.raises(BadImage, match=r"page\.png: not an image that can be read"):
        read_image(path)


@pytest.mark.parametrize("kind", ["DDS", "AVIF", "TGA", "PCX", "ICO", "JPEG2000", "PDF"])
def test_rare_formats_are_refused_whatever_their_name(tmp_path, kind):
    path = tmp_path / "rare.png"
    try:
        Image.new("RGB", (16, 16), "red").save(path, format=kind)
    except (KeyError, OSError):
        pytest.skip(f"this pillow cannot write {kind}")
    with pytest.raises(BadImage, match="not an image"):
        read_image(path)


@pytest.mark.parametrize("pixels", [False, True])
def test_a_deflated_xray_is_refused_before_it_is_inflated(tmp_path, monkeypatch, pixels):
    path = tmp_path / "bomb.dcm"
    xray(path)
    file = pydicom.dcmread(path)
    file.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    file.save_as(path)
    monkeypatch.setattr(zlib, "decompress", lambda *_: pytest.fail("it was inflated"))
    with pytest.raises(BadImage, match="deflated"):
        read_xray(path) if pixels else xray_size(path)


# names of files in lists


OUT = [
    "../secret.jpg",
    "/etc/secret.jpg",
    "a/../../secret.jpg",
    "",
    "a\\b.jpg",
]


@pytest.mark.parametrize("name", OUT)
def test_waterbirds_stay_in_their_folder(tmp_path, name):
    photo(tmp_path / "secret.jpg")
    root = tmp_path / "waterbirds"
    lines(root / "metadata.csv", "img_filename,y,split,place", f"{name},0,2,1")
    with pytest.raises(DataMissing, match=r"metadata\.csv"):
        open_data(f"waterbirds:{root}")


def pets_list(root: Path, name: str) -> str:
    lines(root / "annotations" / "test.txt", f"{name} 1 1 1")
    return f"pets:{root}"


def food_list(root: Path, name: str) -> str:
    lines(root / "meta" / "classes.txt", "pie", "..", "")
    lines(root / "meta" / "test.txt", f"pie/{name}")
    return f"food101:{root}"


def celeba_list(root: Path, name: str) -> str:
    lines(root / "list_eval_partition.csv", "image_id,partition", f"{name},2")
    lines(root / "list_attr_celeba.csv", "image_id,Blond_Hair,Male", f"{name},1,-1")
    return f"celeba:{root}"


def tiny_list(root: Path, name: str) -> str:
    lines(root / "wnids.txt", "n1")
    lines(root / "words.txt", "n1\tone")
    lines(root / "val" / "val_annotations.txt", f"{name}\tn1\t0\t0\t1\t1")
    return f"tiny-imagenet:{root}"


def tiny_folder(root: Path, name: str) -> str:
    lines(root / "wnids.txt", name)
    return f"tiny-imagenet:{root}:train"


def cub_list(root: Path, name: str) -> str:
    for list_name, field in (
        ("images", name),
        ("image_class_labels", "1"),
        ("train_test_split", "0"),
        ("bounding_boxes", "0 0 1 1"),
        ("parts/part_locs", "1 0 0 1"),
        ("classes", "bird"),
    ):
        lines(root / f"{list_name}.txt", f"1 {field}")
    return f"cub:{root}"


@pytest.mark.parametrize(
    "listing", [pets_list, food_list, celeba_list, tiny_list, tiny_folder, cub_list]
)
@pytest.mark.parametrize("name", ["../../secret", "/etc/secret"])
def test_no_list_leads_out_of_its_folder(tmp_path, listing, name):
    with pytest.raises(DataMissing, match=r"secret|/etc"):
        open_data(listing(tmp_path / "data", name))


# odd values


@pytest.mark.parametrize(
    "labels", [[[None]], [["cat"]], [3], [[1000]], [[]], [None], [[[1]]], [[1.5]]]
)
def test_odd_labels_in_parquet_are_named(tmp_path, labels):
    path = tmp_path / "data" / "validation-0.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"image": [{"bytes": b"x"}], "label": labels}), path)
    with pytest.raises(DataMissing):
        open_data(f"imagenet-hard:{tmp_path}")


@pytest.mark.parametrize("images", [[None], [{"bytes": None}], ["x"], [{"bytes": b""}], [7]])
def test_odd_pictures_in_parquet_are_holes(tmp_path, images):
    path = tmp_path / "data" / "validation-0.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"image": images, "label": [[3]]}), path)
    with pytest.raises(BadImage):
        open_data(f"imagenet-hard:{tmp_path}")[0]


@pytest.mark.parametrize("side", [1 << 40, 1 << 62, 10**30, -1, 0])
def test_a_mask_cannot_announce_more_than_it_holds(tmp_path, side):
    photo(tmp_path / "original" / "val" / "00_dog" / "a.JPEG")
    path = tmp_path / "fg_mask" / "val" / "00_dog" / "a.npy"
    path.parent.mkdir(parents=True)
    np.save(path, np.ones((4, 6), np.uint8))
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': (4, {side})}}".encode()
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\1" * 24)
    with pytest.raises(BadImage, match="not"):
        open_data(f"imagenet9:{tmp_path}")[0]


@pytest.mark.parametrize(("rows", "columns"), [(65535, 65535), (0, 3), (4, 60000)])
def test_an_xray_cannot_announce_more_than_it_holds(tmp_path, rows, columns):
    from seecause.data.siim import read_xray, xray_size

    path = tmp_path / "a.dcm"
    xray(path)
    content = path.read_bytes().replace(
        b"\x28\x00\x10\x00US\x02\x00\x04\x00",
        b"\x28\x00\x10\x00US\x02\x00" + struct.pack("<H", rows),
    )
    path.write_bytes(
        content.replace(
            b"\x28\x00\x11\x00US\x02\x00\x03\x00",
            b"\x28\x00\x11\x00US\x02\x00" + struct.pack("<H", columns),
        )
    )
    with pytest.raises(BadImage):
        read_xray(path)
    if rows * columns > 1 << 30 or not rows:
        with pytest.raises(BadImage):
            xray_size(path)
