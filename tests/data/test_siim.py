"""SIIM-ACR in both layouts: run lengths by hand, DICOM files good and bad, tubes from a pickle that
may not run."""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path

import numpy as np
import pydicom
import pytest
import torch
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import ExplicitVRLittleEndian, JPEGBaseline8Bit, SecondaryCaptureImageStorage

from seecause.data import open_data
from seecause.data.siim import read_xray, rle_mask
from seecause.errors import BadImage, DataMissing, MissingExtra
from tests.files import lines

HEIGHT, WIDTH = 4, 3
# down the columns: pixels 1, 2 and 6 -> rows 1, 2 of the first column and row 2 of the second
RUNS = "1 2 3 1"
MASK = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
TUBES = {"tube-sick": True, "tube-well": True, "bare-sick": False, "bare-well": False}


def xray(path: Path, pixels: np.ndarray | None = None, kind: str = "MONOCHROME2") -> np.ndarray:
    """An uncompressed DICOM file; 8 bits, or as many as the pixels have."""
    pixels = (
        np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH)
        if pixels is None
        else pixels
    )
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = (
        SecondaryCaptureImageStorage,
        "1.2.3",
    )
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    file.Rows, file.Columns = pixels.shape
    file.SamplesPerPixel, file.PixelRepresentation, file.PhotometricInterpretation = 1, 0, kind
    file.BitsAllocated = file.BitsStored = 8 * pixels.itemsize
    file.HighBit = file.BitsStored - 1
    file.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path)
    return pixels


@pytest.fixture
def raw(tmp_path) -> Path:
    names = [*TUBES, *(f"train{n}-{'sick' if n % 2 else 'well'}" for n in range(20))]
    for n, name in enumerate([*names, "unlabelled"]):
        xray(tmp_path / "dicom-images-train" / f"a{n}" / f"b{n}" / f"{name}.dcm")
    rows = [f"{name}, {RUNS if name.endswith('sick') else '-1'}" for name in names]
    lines(tmp_path / "train-rle.csv", "ImageId, EncodedPixels", *rows, "tube-sick, 0 1")
    (tmp_path / "cxr_tube_dict.pkl").write_bytes(pickle.dumps(TUBES))
    return tmp_path


def test_run_lengths_are_relative_and_down_the_columns():
    assert rle_mask(RUNS, (HEIGHT, WIDTH)).int().tolist() == MASK
    assert not rle_mask(" -1", (HEIGHT, WIDTH)).any() and rle_mask("0 12", (HEIGHT, WIDTH)).all()
    for odd, _ in (
        ("1 2 3", "pairs"),
        ("1 x", "'x'"),
        ("-1 2", "pairs"),
        ("10 3", "beyond 4 x 3"),
    ):
        with pytest.raises(ValueError):
            rle_mask(odd, (HEIGHT, WIDTH))


def test_photos_whose_tube_is_told_are_the_test_set(raw):
    data = open_data(f"siim:{raw}")
    assert {p.id: p.group for p in data.photos} == {
        "tube-sick": (1, 1),
        "tube-well": (0, 1),
        "bare-sick": (1, 0),
        "bare-well": (0, 0),
    }
    assert {p.id for p in open_data(f"siim:{raw}:robust").photos} == {"tube-well", "bare-sick"}
    assert {p.id for p in open_data(f"siim:{raw}:non-robust").photos} == {"tube-sick", "bare-well"}
    assert data.classes == ("no pneumothorax", "pneumothorax") and data.places == (
        "no tube",
        "tube",
    )


def test_the_rest_is_trained_on(raw):
    parts = {
        split: {p.id for p in open_data(f"siim:{raw}:{split}").photos}
        for split in ("train", "val", "trainval")
    }
    assert (
        len(parts["trainval"]) == 20
        and parts["val"] == {"train18-well", "train19-sick"}
        and parts["train"] == parts["trainval"] - parts["val"]
    )
    assert set(open_data(f"siim:{raw}:train").groups) == {None}


def test_pixels_and_masks(raw):
    by_id = {s.id: s for s in open_data(f"siim:{raw}")}
    pixels = torch.arange(HEIGHT * WIDTH).view(HEIGHT, WIDTH)
    assert torch.equal((by_id["bare-sick"].image * 255).round().long(), pixels.expand(3, -1, -1))
    assert by_id["bare-sick"].mask.int().tolist() == MASK and not by_id["bare-well"].mask.any()
    assert int(by_id["tube-sick"].mask.sum()) == 4  # two rows: their union
    before = open_data(f"siim:{raw}").fingerprint
    (raw / "train-rle.csv").write_text((raw / "train-rle.csv").read_text() + "bare-well, -1\n")
    assert open_data(f"siim:{raw}").fingerprint != before


def test_the_prepared_layout_is_the_same_data(raw, tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared")
    data = {
        split: open_data(f"siim:{raw}:{split}")
        for split in ("trainval", "test", "robust", "non-robust")
    }
    names = {
        "trainval": "train_set",
        "test": "full_test_set",
        "robust": "robust_test_set",
        "non-robust": "non_robust_test_set",
    }
    for split, samples in data.items():
        for photo in samples.photos:
            xray(root / names[split] / str(photo.label) / f"{photo.id}.dcm")
    bare = open_data(f"siim:{root}:test")
    assert set(bare.groups) == {None} and bare[0].mask is None  # nothing is guessed
    assert set(open_data(f"siim:{root}:robust").groups) == {(0, 1), (1, 0)}
    for name in ("train-rle.csv", "cxr_tube_dict.pkl"):
        (root / name).write_bytes((raw / name).read_bytes())
    for split, samples in data.items():
        same = open_data(f"siim:{root}:{split}")
        assert {(p.id, p.label, p.group) for p in same.photos} == {
            (p.id, p.label, p.group) for p in samples.photos
        }
    assert {s.id: int(s.mask.sum()) for s in open_data(f"siim:{root}")}["bare-sick"] == 3


def test_black_is_the_largest_number_in_monochrome1(tmp_path):
    pixels = xray(tmp_path / "a.dcm", kind="MONOCHROME1")
    assert np.array_equal(np.asarray(read_xray(tmp_path / "a.dcm"))[..., 0], 255 - pixels)


def test_pixels_may_be_a_jpeg_as_in_the_release(tmp_path):
    jpeg = BytesIO()
    Image.fromarray(np.full((HEIGHT, WIDTH), 77, np.uint8)).save(jpeg, format="JPEG")
    xray(tmp_path / "a.dcm")
    file = pydicom.dcmread(tmp_path / "a.dcm")
    file.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    file.PixelData = encapsulate([jpeg.getvalue()])
    file.save_as(tmp_path / "a.dcm")
    assert np.abs(np.asarray(read_xray(tmp_path / "a.dcm")).astype(int) - 77).max() <= 2


@pytest.mark.parametrize(
    "kind", ["text", "truncated", "empty", "missing", "deep", "no pixels", "unknown syntax"]
)
def test_a_corrupt_dicom_is_one_hole_with_a_name(raw, kind):
    path = next(raw.glob("dicom-images-train/*/*/bare-well.dcm"))
    data = open_data(f"siim:{raw}")
    index = next(n for n, photo in enumerate(data.photos) if photo.id == "bare-well")
    if kind == "text":
        path.write_text("I am not an X-ray")
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "missing":
        path.unlink()
    elif kind == "deep":
        xray(path, np.zeros((HEIGHT, WIDTH), np.uint16))
    elif kind == "no pixels":
        file = pydicom.dcmread(path)
        del file.PixelData
        file.save_as(path)
    else:
        path.write_bytes(
            path.read_bytes().replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.99")
        )
    with pytest.raises(BadImage, match=r"bare-well\.dcm"):
        data[index]
    assert data[(index + 1) % 4].id != "bare-well"


def test_odd_lists_are_named(raw, caplog):
    tubes = raw / "cxr_tube_dict.pkl"
    for odd, _ in (
        (["x"], "not a dictionary"),
        ({"bare-sick": 1}, "bools"),
        ({"other": True}, "none of its images"),
        (Path("/"), "wants to load"),
    ):
        tubes.write_bytes(pickle.dumps(odd))
        with pytest.raises(DataMissing):
            open_data(f"siim:{raw}")
    tubes.write_bytes(pickle.dumps(TUBES)[:-9])
    with pytest.raises(DataMissing):
        open_data(f"siim:{raw}")
    tubes.write_bytes(pickle.dumps(TUBES))
    lines(
        raw / "train-rle.csv",
        "ImageId, EncodedPixels",
        "bare-sick, 1 2 3",
        "gone, -1",
        "tube-well, -1",
    )
    data = open_data(f"siim:{raw}")
    assert (
        "1 labelled images have no DICOM file" in caplog.text
        and "gone" in caplog.text
        and len(data) == 2
    )
    with pytest.raises(DataMissing):
        data[0]
    with pytest.raises(DataMissing):
        open_data(f"siim:{raw}:train")
    with pytest.raises(DataMissing):
        open_data(f"siim:{raw / 'dicom-images-train'}")


def test_without_pydicom_the_extra_is_named(raw, monkeypatch):
    data = open_data(f"siim:{raw}")
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    with pytest.raises(MissingExtra, match=r"seecause\[medical\]"):
        data[0]
