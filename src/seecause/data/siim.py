"""`siim:PATH[:train|val|trainval|test|robust|non-robust]`: SIIM-ACR Pneumothorax with labels of
chest tubes (Saab et al. 2022). Needs the extra `medical`.

A tube is the treatment: it indicates a pneumothorax without showing one. A group is (pneumothorax,
tube), where the tube is known. Two layouts:

    raw        dicom-images-train/*/*/<uid>.dcm   train-rle.csv (ImageId, EncodedPixels)
               cxr_tube_dict.pkl (uid -> bool)
    prepared   {train_set,full_test_set,robust_test_set,non_robust_test_set}/{0,1}/<uid>.dcm, and
               the two lists if they are there

`test` holds the images whose tubes are labelled; `robust` those where tube and label disagree,
`non-robust` those where they agree. The rest is `trainval`; `val` is every tenth of a class,
`train` the others.

Masks come from the run lengths: pairs (gap since the last run, length), down the columns. An image
may have several rows; its mask is their union. `all_masks/` of the prepared layout is not read: the
public script that makes it leaves out the transpose.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause.data._pickles import read_pickle
from seecause.data.dataset import evenly, part_of_train, path_and_split
from seecause.data.images import BROKEN, MAX_PIXELS, MIN_SIDE, first_line
from seecause.data.labelled import run_lengths
from seecause.data.photos import Layout, Photo, Photos
from seecause.errors import BadImage, MissingExtra

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
    "expected PATH/dicom-images-train/*/*/<uid>.dcm, PATH/train-rle.csv and PATH/cxr_tube_dict.pkl"
    " (uid -> bool), or PATH/{train_set,full_test_set,...}/{0,1}/<uid>.dcm"
)
_EXPECTED = "give a DICOM file of one 8-bit grey image"

Runs = dict[str, list[str]]  # of each image, its rows of run lengths


def open_siim(rest: str, *, limit: int | None = None) -> Photos:
    """X-rays as RGB, with masks where the run lengths are there."""
    root, split = path_and_split(rest, SPLITS)
    table, tube_list = root / "train-rle.csv", root / "cxr_tube_dict.pkl"
    prepared = (root / "train_set").is_dir()
    runs: Runs = {}
    if table.is_file() or not prepared:
        columns = {"ImageId": str, "EncodedPixels": str}
        for uid, row in _LAYOUT.table(table, columns, separator=",", header=True):
            runs.setdefault(uid, []).append(row)
    tubes: dict[str, bool] = {}
    if tube_list.is_file() or not prepared:
        tubes = read_pickle(tube_list, _LAYOUT)
        if not all(type(tube) is bool for tube in tubes.values()):
            raise _LAYOUT.refusal(tube_list, "not a dictionary of image ids and bools")
    photos = _prepared(root, split, runs, tubes) if prepared else _raw(root, split, runs, tubes)
    if split in ("train", "val", "trainval"):
        photos = part_of_train(photos, [photo.label for photo in photos], split)

    def read_mask(path: Path) -> Tensor:
        size = xray_size(path)
        with _LAYOUT.reading(f"{table}, {path.stem}"):
            return torch.stack([rle_mask(row, size) for row in runs[path.stem]]).any(dim=0)

    name, lists = f"siim:{root}:{split}", (table,) if runs else ()
    return Photos(name, CLASSES, evenly(photos, limit), read_mask, PLACES, read_xray, lists)


def rle_mask(runs: str, size: tuple[int, int]) -> Tensor:
    """[H, W] bool from pairs (gap, length) that run down the columns; ValueError if they do not
    fit."""
    numbers = [] if runs.strip() == _NEGATIVE else [int(number) for number in runs.split()]
    if len(numbers) % 2:
        raise ValueError("not pairs of a gap and a length")
    return run_lengths([*numbers, size[0] * size[1] - sum(numbers)], size)


def _raw(root: Path, split: str, runs: Runs, tubes: dict[str, bool]) -> list[Photo]:
    files = {path.stem: path for path in sorted((root / "dicom-images-train").glob("*/*/*.dcm"))}
    if not files:
        raise _LAYOUT.refusal(root / "dicom-images-train", "no DICOM files in it")
    if not any(uid in runs for uid in tubes):
        layout = Layout("use the stage-1 release; later ones have other ids")
        raise layout.refusal(root / "cxr_tube_dict.pkl", "none of its images is in train-rle.csv")
    labels = {uid: int(any(row != _NEGATIVE for row in rows)) for uid, rows in runs.items()}
    lost = [uid for uid in labels if uid not in files]
    if lost:
        words = "%s: %d labelled images have no DICOM file and are skipped, %s first"
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
    """The mask's path is the X-ray itself: its name finds the run lengths, its header their
    size."""
    group = None if tube is None else (label, int(tube))
    return Photo(path, path.stem, label, path if path.stem in runs else None, group)


def read_xray(path: Path) -> Image.Image:
    """RGB with three equal channels; MONOCHROME1, where black is the largest number, is
    inverted."""
    header = _read_dicom(path, pixels=True)
    pixels = header.pixel_array
    if pixels.ndim != 2 or pixels.dtype != np.uint8:
        raise BadImage(str(path), f"an array {list(pixels.shape)} of {pixels.dtype}", _EXPECTED)
    inverted = header.get("PhotometricInterpretation") == "MONOCHROME1"
    return Image.fromarray(255 - pixels if inverted else pixels).convert("RGB")


def xray_size(path: Path) -> tuple[int, int]:
    """Height and width, by the header alone."""
    header = _read_dicom(path, pixels=False)
    return header.Rows, header.Columns


def _read_dicom(path: Path, *, pixels: bool) -> Any:
    """A DICOM header, checked before any pixel is decoded; with `pixels` they are decoded too."""
    try:
        import pydicom
    except ImportError:
        raise MissingExtra("pydicom", "medical") from None
    if not path.is_file():
        raise BadImage(str(path), "no such file", "check the path")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydicom warns about odd identifiers
        try:
            syntax = pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID")
            if "Deflate" in getattr(syntax, "name", ""):  # a kilobyte may inflate to a gigabyte
                raise BadImage(str(path), "deflated, so that its size is not known", _EXPECTED)
            header = pydicom.dcmread(path, stop_before_pixels=not pixels)
            height, width = int(header.Rows), int(header.Columns)
            frames = int(header.get("NumberOfFrames") or 1) * int(
                header.get("SamplesPerPixel") or 1
            )
            if min(height, width) < MIN_SIDE or height * width * frames > MAX_PIXELS:
                raise BadImage(str(path), f"{frames} x {height} x {width} pixels", _EXPECTED)
            if pixels:
                header.pixel_array  # noqa: B018  # decodes and keeps them
            return header
        except BadImage:
            raise
        except (
            *BROKEN,
            pydicom.errors.InvalidDicomError,
            pydicom.errors.BytesLengthException,
        ) as e:
            raise BadImage(
                str(path), f"not a DICOM file that can be read ({first_line(e)})", _EXPECTED
            ) from e
