"""`siim:PATH[:train|val|trainval|test|robust|non-robust]`: SIIM-ACR Pneumothorax with chest tubes
told (Saab et al. 2022). Extra `medical`.

A tube is the treatment: it says "pneumothorax" without showing one. A group is (pneumothorax,
tube), where the tube is known. Two layouts:
    raw        dicom-images-train/*/*/<uid>.dcm   train-rle.csv (ImageId, EncodedPixels)
               cxr_tube_dict.pkl (uid -> bool)
    prepared   {train_set,full_test_set,robust_test_set,non_robust_test_set}/{0,1}/<uid>.dcm, and
               the two lists if they are there
`test` holds the photos whose tubes are told; `robust` those where tube and answer disagree,
`non-robust` those where they agree. The rest is `trainval`; `val` is every tenth of a class,
`train` the others.

Masks come from the run lengths: pairs (gap since the last run, length), down the columns. An image
may have several rows; its mask is their union. `all_masks/` of the prepared layout is not read: the
public script that makes it leaves out the transpose.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause.data._pickles import read_pickle
from seecause.data.dataset import evenly, part_of_train, path_and_split
from seecause.data.images import BROKEN, MAX_PIXELS, MIN_SIDE, first_line
from seecause.data.outlined_photos import run_lengths
from seecause.data.photos import Layout, Photo, Photos
from seecause.errors import BadImage, DataMissing, MissingExtra

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "trainval", "test", "robust", "non-robust")
CLASSES, PLACES = ("no pneumothorax", "pneumothorax"), ("no tube", "tube")
_FOLDERS = {
    "test": "full_test_set",
    "robust": "robust_test_set",
    "non-robust": "non_robust_test_set",
}
_NEGATIVE = "-1"
_LAYOUT = Layout(
    "expected PATH/dicom-images-train/*/*/<uid>.dcm, PATH/train-rle.csv and PATH/cxr_tube_dict.pkl,"
    " or PATH/{train_set,full_test_set,...}/{0,1}/<uid>.dcm"
)
_EXPECTED = "give a DICOM file of one 8-bit grey picture"

Runs = dict[str, list[str]]  # of each image, its rows of run lengths


def open_siim(rest: str, *, limit: int | None = None) -> Photos:
    """X-rays as RGB, with masks where the run lengths are there."""
    root, split = path_and_split(rest, SPLITS)
    table, tube_list = root / "train-rle.csv", root / "cxr_tube_dict.pkl"
    prepared = (root / "train_set").is_dir()
    runs = read_runs(table) if table.is_file() or not prepared else {}
    tubes = read_tubes(tube_list) if tube_list.is_file() or not prepared else {}
    photos = _prepared(root, split, runs, tubes) if prepared else _raw(root, split, runs, tubes)
    if split in ("train", "val", "trainval"):
        photos = part_of_train(photos, [photo.label for photo in photos], split)
    return Photos(
        f"siim:{root}:{split}",
        CLASSES,
        evenly(photos, limit),
        _mask_reader(runs),
        PLACES,
        read_xray,
        (table,) if runs else (),
    )


def rle_mask(runs: str, size: tuple[int, int]) -> Tensor:
    """[H, W] bool from pairs (gap, length) that run down the columns; ValueError if they do not
    fit."""
    numbers = [] if runs.strip() == _NEGATIVE else [int(number) for number in runs.split()]
    if len(numbers) % 2 or any(number < 0 for number in numbers):
        raise ValueError("not pairs of a gap and a length")
    rest = size[0] * size[1] - sum(numbers)
    if rest < 0:
        raise ValueError(f"they run beyond {size[0]} x {size[1]} pixels")
    return run_lengths([*numbers, rest], size)


def read_runs(path: Path) -> Runs:
    """The rows of each image. The header of the release has a space in front of EncodedPixels;
    spaces are cut."""
    runs: Runs = {}
    for _, row in _LAYOUT.csv(path, ("ImageId", "EncodedPixels")):
        runs.setdefault(row["ImageId"], []).append(row["EncodedPixels"])
    return runs


def read_tubes(path: Path) -> dict[str, bool]:
    """Whether each image shows a tube. The pickle may hold a dictionary of text and bools, and
    nothing else."""
    tubes = read_pickle(path, _LAYOUT)
    kinds = {(type(uid), type(tube)) for uid, tube in tubes.items()} if type(tubes) is dict else ()
    if kinds != {(str, bool)}:
        raise _LAYOUT.refusal(path, "not a dictionary of image ids and bools")
    return tubes


def _raw(root: Path, split: str, runs: Runs, tubes: dict[str, bool]) -> list[Photo]:
    files = {path.stem: path for path in sorted((root / "dicom-images-train").glob("*/*/*.dcm"))}
    if not files:
        raise _LAYOUT.refusal(root / "dicom-images-train", "no DICOM files in it")
    if not any(uid in runs for uid in tubes):
        raise DataMissing(
            str(root / "cxr_tube_dict.pkl"),
            "none of its images is in train-rle.csv",
            "use the stage-1 release; later ones have other ids",
        )
    labels = {uid: int(any(row != _NEGATIVE for row in rows)) for uid, rows in runs.items()}
    lost = [uid for uid in labels if uid not in files]
    if lost:
        words = "%s: %d labelled images have no DICOM file and are left out, %s first"
        log.warning(words, root, len(lost), lost[0])
    photos = [
        _photo(files[uid], label, runs, tubes.get(uid))
        for uid, label in labels.items()
        if uid in files
    ]
    chosen = [photo for photo in photos if _belongs(photo, split)]
    if not chosen:
        raise _LAYOUT.refusal(root, f"no image in the split {split}")
    return chosen


def _prepared(root: Path, split: str, runs: Runs, tubes: dict[str, bool]) -> list[Photo]:
    folder = root / _FOLDERS.get(split, "train_set")
    photos = []
    for label in (0, 1):
        files = sorted((folder / str(label)).glob("*.dcm"))
        if not files:
            raise _LAYOUT.refusal(folder / str(label), "no DICOM files in it")
        # whether there is a tube; None where the split does not say
        tube = {"robust": not label, "non-robust": bool(label)}.get(split)
        for path in files:
            shown = tubes.get(path.stem) if tube is None else tube
            photos.append(_photo(path, label, runs, shown))
    return photos


def _belongs(photo: Photo, split: str) -> bool:
    if photo.group is None or split not in _FOLDERS:
        return photo.group is None and split not in _FOLDERS
    agree = photo.group[0] == photo.group[1]
    return split == "test" or agree == (split == "non-robust")


def _photo(path: Path, label: int, runs: Runs, tube: bool | None) -> Photo:
    """The mask's place is the X-ray itself: its name finds the run lengths, its header their
    frame."""
    group = None if tube is None else (label, int(tube))
    return Photo(path, path.stem, label, path if path.stem in runs else None, group)


def _mask_reader(runs: Runs) -> Callable[[Path], Tensor]:
    def read(path: Path) -> Tensor:
        size = xray_size(path)
        try:
            return torch.stack([rle_mask(row, size) for row in runs[path.stem]]).any(dim=0)
        except ValueError as odd:
            raise DataMissing(
                f"train-rle.csv, {path.stem}",
                f"run lengths that cannot be read ({odd})",
                "expected pairs `gap length`, or -1",
            ) from None

    return read


def read_xray(path: Path) -> Image.Image:
    """RGB with three equal channels; MONOCHROME1, where black is the largest number, is turned
    round."""
    _, inverted, pixels = _read_dicom(path, pixels=True)
    if pixels.ndim != 2 or pixels.dtype != np.uint8:
        raise BadImage(str(path), f"an array {list(pixels.shape)} of {pixels.dtype}", _EXPECTED)
    return Image.fromarray(255 - pixels if inverted else pixels).convert("RGB")


def xray_size(path: Path) -> tuple[int, int]:
    """Height and width, by the header alone."""
    return _read_dicom(path, pixels=False)[0]


def _read_dicom(path: Path, *, pixels: bool) -> tuple[tuple[int, int], bool, np.ndarray]:
    """Height and width, whether black is the largest number and, if asked for, the pixels."""
    pydicom = _pydicom()
    if not path.is_file():
        raise BadImage(str(path), "no such file", "check the path")
    with warnings.catch_warnings():
        # pydicom warns about odd identifiers; what matters is checked
        warnings.simplefilter("ignore")
        try:
            _refuse_deflated(pydicom, path)
            header = pydicom.dcmread(path, stop_before_pixels=not pixels)
            size = _checked_size(header, str(path))
            inverted = header.get("PhotometricInterpretation") == "MONOCHROME1"
            return size, inverted, header.pixel_array if pixels else np.empty(0)
        except pydicom.errors.InvalidDicomError:
            raise BadImage(str(path), "not a DICOM file", _EXPECTED) from None
        except (*BROKEN, pydicom.errors.BytesLengthException) as broken:
            raise BadImage(
                str(path), f"damaged or of an unknown kind ({first_line(broken)})", _EXPECTED
            ) from broken


def _refuse_deflated(pydicom: ModuleType, path: Path) -> None:
    """A kilobyte may inflate to a gigabyte before there is a header to look at."""
    syntax = pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID")
    if "Deflate" in getattr(syntax, "name", ""):
        raise BadImage(str(path), "deflated: how large it becomes is not known", _EXPECTED)


def _checked_size(header: Any, name: str) -> tuple[int, int]:
    """By the header, before any pixel is decoded."""
    height, width = header.get("Rows"), header.get("Columns")
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < MIN_SIDE:
        raise BadImage(name, "its header tells no size", _EXPECTED)
    frames = int(header.get("NumberOfFrames") or 1) * int(header.get("SamplesPerPixel") or 1)
    if height * width * frames > MAX_PIXELS:
        raise BadImage(name, f"{frames} x {height} x {width} pixels are too many", _EXPECTED)
    return height, width


def _pydicom() -> ModuleType:
    try:
        import pydicom
    except ImportError:
        raise MissingExtra("pydicom", "medical") from None
    return pydicom
