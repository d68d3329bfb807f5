"""Pictures by name: a file, or one sample of a dataset, `DATA#INDEX`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from seecause.data.dataset import Dataset
from seecause.data.images import find_images, read_image
from seecause.data.registry import is_data, open_data
from seecause.errors import BadImage, BadOption


def open_picture(text: str) -> Image.Image:
    """A file, or a sample such as `critters:clean:test#3` or `pets:PATH#0`, counted from 0 in the
    order of the dataset."""
    return next(open_pictures([text]))


def open_pictures(texts: Iterable[str]) -> Iterator[Image.Image]:
    """The same for many, one after the other; a dataset is opened once."""
    opened: dict[str, Dataset] = {}
    for text in texts:
        found = sample_of(text)
        if found is None:
            _check_no_sample(text)
            yield read_image(text)
            continue
        name, index = found
        if name not in opened:
            opened[name] = open_data(name)
        if index >= len(opened[name]):
            raise BadOption("sample", text, f"an index below {len(opened[name])}")
        yield to_pil(opened[name][index].image)


def find_pictures(texts: list[str]) -> list[str]:
    """What `open_picture` takes, for files, folders, globs and samples; each once."""
    found: list[str] = []
    for text in texts:
        if sample_of(text):
            found.append(text)
            continue
        _check_no_sample(text)
        found += map(str, find_images([text]))
    return list(dict.fromkeys(found))


def sample_of(text: str) -> tuple[str, int] | None:
    """Dataset and index of `KIND:...#INDEX`; None for anything else, also for a file that is called
    so."""
    name, _, index = text.rpartition("#")
    return (
        (name, int(index))
        if ":" in name and index.isdecimal() and not Path(text).exists()
        else None
    )


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
    return Image.fromarray(
        np.ascontiguousarray(
            (image.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        )
    )
