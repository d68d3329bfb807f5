"""Pictures by name: files, folders, globs, or one sample of a dataset, `DATA#INDEX`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from seecause._pictures import (
    BROKEN as BROKEN,
    FORMATS as FORMATS,
    MAX_PIXELS as MAX_PIXELS,
    MIN_SIDE as MIN_SIDE,
    SUFFIXES as SUFFIXES,
    check_file,
    decode_image as decode_image,
    first_line as first_line,
    kinds,
    read_grey as read_grey,
    read_ids as read_ids,
    read_image as read_image,
)
from seecause.data.dataset import Dataset, has_pairs
from seecause.data.registry import is_data, open_data
from seecause.errors import BadImage, BadOption

if TYPE_CHECKING:
    from torch import Tensor

_PATTERN = frozenset("*?[")


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Files that exist, pictures of folders (sorted, not of their subfolders) and matches of globs,
    each once."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(
                p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file()
            )
            if not inside:
                raise BadImage(
                    str(path), "a folder without pictures", f"give a folder with {kinds()}"
                )
            files += inside
        elif not path.exists() and _PATTERN & set(str(path)):
            matches = sorted(
                p for p in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if p.is_file()
            )
            if not matches:
                raise BadImage(str(path), "no file matches", "check the pattern")
            files += matches
        else:
            check_file(path)
            files.append(path)
    return list(dict.fromkeys(files))


def open_picture(text: str) -> Image.Image:
    """A file, or a sample such as `critters:clean:test#3` or `pets:PATH#0`, counted from 0 in the
    order of the dataset."""
    return next(open_pictures([text]))


def open_pictures(texts: Iterable[str], *, second: bool = False) -> Iterator[Image.Image]:
    """The same for many, one after the other; a dataset is opened once. `second`: of samples of
    pairs, the other version."""
    opened: dict[str, Dataset] = {}
    for text in texts:
        sample = sample_of(text)
        if sample is None:
            _check_no_sample(text)
            yield read_image(text)
            continue
        name, index = sample
        if name not in opened:
            opened[name] = open_data(name)
        if index >= len(opened[name]):
            raise BadOption("sample", text, f"an index below {len(opened[name])}")
        data = opened[name]
        shown = data.other(index) if second and has_pairs(data) else data[index]
        yield to_pil(shown.image)


def find_pictures(texts: list[str]) -> list[str]:
    """What `open_picture` takes, for files, folders, globs and samples; each once."""
    names: list[str] = []
    for text in texts:
        if sample_of(text):
            names.append(text)
            continue
        _check_no_sample(text)
        names += map(str, find_images([text]))
    return list(dict.fromkeys(names))


def second_versions(texts: Sequence[str], folder: Path | None) -> list[str] | None:
    """What `open_pictures(second=True)` takes for the other versions of pictures: files of the same
    names in `folder`, and samples of pairs themselves. None where there are none."""
    paired = [(sample_of(text) or ("",))[0].startswith("pairs:") for text in texts]
    if folder is None and not any(paired):
        return None
    others = []
    for text, has_second in zip(texts, paired, strict=True):
        if folder is not None and not sample_of(text):
            others.append(str(folder / Path(text).name))
            check_file(Path(others[-1]))
        elif has_second:
            others.append(text)
        else:
            raise BadOption(
                "picture",
                text,
                "another version of each picture: a folder with files of the same names, or samples"
                " of pairs:WITH:WITHOUT",
            )
    return others


def sample_of(text: str) -> tuple[str, int] | None:
    """Dataset and index of `KIND:...#INDEX`; None for anything else, also for a file that is called
    so."""
    name, _, index = text.rpartition("#")
    if ":" in name and index.isdecimal() and not Path(text).exists():
        return name, int(index)
    return None


def _check_no_sample(text: str) -> None:
    """Refuse what is meant as a sample, or several, and is not written as one."""
    name, _, index = text.rpartition("#")
    if (is_data(text) or (":" in name and index)) and not Path(text).exists():
        example = f"{name or text}#0"
        raise BadOption(
            "sample",
            text,
            f"one sample of a dataset, DATA#INDEX, such as {example}; several are named one by one:"
            f" {example} {name or text}#1",
        )


def to_pil(image: Tensor) -> Image.Image:
    """Raw pixels [3, H, W] in [0, 1] as a picture of 8 bits."""
    if image.ndim != 3 or image.shape[0] != 3:
        raise BadImage(
            f"tensor of shape {list(image.shape)}",
            "expected raw pixels [3, H, W] in [0, 1]",
            "see seecause.data.Sample",
        )
    pixels = (image.detach().float().cpu().clamp(0, 1) * 255).round().byte()  # [3, H, W]
    return Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
