"""The one door for pictures: whatever people have becomes one normalised batch, or one clear error.

PIL image, path, bytes of a file       prepared by the model's preprocessing
whole numbers 0-255, any usual axes    raw pixels: prepared likewise, also [N, H, W, 3]
floating point, channels last, 0-1     the same
floating point [B, 3, H, W], [3, H, W] normalised already: taken as they are
lists and tuples of these, or what a processor of transformers gives
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause._pictures import as_array
from seecause.errors import BadImage
from seecause.models.preprocess import Preprocess

Picture: TypeAlias = Image.Image | str | Path | bytes | np.ndarray | Tensor
Pictures: TypeAlias = Picture | Sequence[Picture] | Mapping[str, Any]

# beyond black and white, in units of their distance: resizing overshoots by a tenth
SLACK = 0.25
ENTRIES = ("pixel_values", "input_values")  # of what processors of transformers give
BYTES = 16.0  # no normalised pixel is as large, many of 0-255 are
log = logging.getLogger(__name__)


class Framed(Protocol):
    """What pictures are prepared for: a model, or anything that tells as much."""

    @property
    def preprocess(self) -> Preprocess: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


class FramedModel(Framed, Protocol):
    """The same, with a memo: it is warned once."""

    @property
    def memo(self) -> dict[Any, Any]: ...


def as_images(model: FramedModel, pictures: Pictures) -> Tensor:
    """One normalised batch [B, 3, H, W] on the model's device and in its dtype; gradients of a
    tensor pass. Values that no normalised picture has are refused, or warned of once.

    >>> import numpy as np, seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> as_images(model, np.zeros((2, 120, 200, 3), np.uint8)).shape
    torch.Size([2, 3, 96, 96])
    """
    if isinstance(pictures, Mapping):
        key = next((key for key in ENTRIES if key in pictures), None)
        if key is None:
            raise BadImage(
                f"a mapping of {', '.join(map(str, pictures)) or 'nothing'}",
                "expected pixel_values, as processors of transformers name them",
                "give pictures, or a tensor [B, 3, H, W]",
            )
        pictures = pictures[key]
    pictures = model.preprocess.unpacked(pictures)
    if isinstance(pictures, list | tuple):
        batch = _joined([_one_or_more(model, picture) for picture in pictures], model.preprocess)
    else:
        batch = _one_or_more(model, pictures)
    return batch.to(model.device, model.dtype)


def file_names(pictures: Pictures) -> list[str]:
    """What pictures are called by the paths they come from; empty where none comes from a file."""
    items: Any = pictures if isinstance(pictures, list | tuple) else [pictures]
    paths = [_path(item) for item in items]
    if not any(paths) or any(getattr(item, "ndim", 0) > 3 for item in items):
        return []
    return [path or f"picture {place}" for place, path in enumerate(paths)]


def _path(item: Any) -> str:
    if isinstance(item, Image.Image):  # one that was opened and not changed knows its file
        return str(getattr(item, "filename", ""))
    return str(item) if isinstance(item, str | Path) else ""


def _one_or_more(model: FramedModel, value: Any) -> Tensor:
    """[B, 3, H, W], normalised, of a picture or of an array of them."""
    frame = model.preprocess
    value = frame.unpacked(value)
    batch = _normalised(value, len(frame.mean))
    if batch is not None:
        check_range(model, batch)
        return batch
    pixels = as_array(value)
    if pixels is not None and pixels.ndim == 4:
        return _joined([frame(picture) for picture in pixels], frame)
    return frame(value)


def _normalised(value: Any, channels: int) -> Tensor | None:
    """[B, C, H, W] of floating-point values with channels first; None for anything else."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.ndim == 5 and value.shape[1] == 1:  # a DataLoader over `preprocess`
        value = value[:, 0]
    if value.ndim == 3 and value.shape[0] == channels:
        value = value[None]
    if value.ndim == 4 and value.shape[1] == channels:
        return value
    if value.ndim in (3, 4) and value.shape[-1] in (channels, channels + 1):
        return None  # channels last: raw
    raise BadImage(
        f"images of shape {list(value.shape)}",
        f"expected [B, {channels}, H, W], normalised",
        "use model.preprocess(picture), or give pictures or paths",
    )


def _joined(batches: Sequence[Tensor], frame: Preprocess) -> Tensor:
    if not batches:
        raise BadImage("an empty batch", "there is nothing to look at", "give at least one image")
    sizes = {tuple(batch.shape[1:]) for batch in batches}
    if len(sizes) > 1:
        raise BadImage(
            f"images of {' and '.join(str(list(size)) for size in sorted(sizes))}",
            "one batch has one size",
            frame.to_one_size,
        )
    return torch.cat([batch.to(batches[0].device, batches[0].dtype) for batch in batches])


def check_range(model: FramedModel, images: Tensor) -> None:
    """Refuse numbers that are no normalised pixels, and warn once of those that hardly are."""
    if not images.numel():
        return
    low, high = torch.stack(images.detach().aminmax()).tolist()
    if not math.isfinite(low + high):
        raise BadImage("images", "they hold NaN or infinity", "give finite pixels")
    if not model.preprocess.bounded:
        return
    if low >= 0 and high > BYTES:
        raise BadImage(
            f"images with values from {low:g} to {high:g}",
            "expected normalised pixels; these look like 0-255",
            "give them as whole numbers (uint8), or use model.preprocess(picture)",
        )
    reason = _suspicion(model.preprocess, low, high)
    if reason and "pixel range" not in model.memo:
        model.memo["pixel range"] = True
        log.warning("images with values from %.3g to %.3g: %s", low, high, reason)


def _suspicion(frame: Preprocess, low: float, high: float) -> str:
    """What is odd about the range of normalised values; empty if nothing is."""
    ends = frame.normalise(torch.tensor([0.0, 1.0]).repeat(len(frame.mean), 1)[None, :, None])
    black, white = float(ends[..., 0].min()), float(ends[..., 1].max())
    expected = f"this model's pixels reach from {black:.3g} (black) to {white:.3g} (white)"
    slack = SLACK * (white - black)
    if low < black - slack or high > white + slack:
        return f"{expected}; were they normalised twice, or with another mean and std?"
    if low >= 0 and high <= 1 and high - low > 0.5 and (black, white) != (0, 1):
        return f"{expected}; were they normalised at all? Use model.preprocess(picture)"
    return ""
