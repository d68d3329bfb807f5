"""Blank images: the neutral context that a patch is put into, and their recorded runs.

    white | black   raw pixels 1 or 0
    mean            the channel mean the model subtracts
    noise           independent Gaussian pixels with the mean and deviation the model expects
    blur-noise      the same noise, blurred by a Gaussian of 1/28 of the side and brought back to
    that deviation
    tensor          any picture, or one for each image: its other version, for one (pairs)

The run of a blank is recorded once per model state, size and blank, and reused; any change of a
weight or gate is noticed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause.engine.trace import Trace, record
from seecause.errors import BadImage, BadOption
from seecause.files import digest
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel
from seecause.types import wide

Blank = Literal["white", "black", "mean", "noise", "blur-noise"]
_KEPT = 8  # blank images, and half as many of their runs


def blank_image(
    model: ImageModel,
    size: tuple[int, int],
    blank: Blank | Tensor = "white",
    *,
    seed: int = 0,
    count: int = 1,
) -> Tensor:
    """A normalised blank [1, 3, H, W] on the model's device; the same object for the same blank, so
    that its run can be kept. `blank` may be one for each of `count` images: [count, 3, H, W]."""
    channels = len(model.preprocess.mean)
    if isinstance(blank, Tensor):
        shape = (channels, *size)
        if blank.shape[-3:] != shape or blank.shape[:-3] not in ((), (1,), (count,)):
            each = f", or one for each image: {[count, *shape]}" if count > 1 else ""
            raise BadImage(
                f"blank of shape {list(blank.shape)}",
                f"expected {[1, *shape]}, normalised like the images{each}",
                "resize it",
            )
        if blank.ndim == 4 and len(blank) > 1:
            return blank.detach().to(model.device, model.dtype)
        pixels = wide(blank).detach().cpu().contiguous()
        key: tuple[Any, ...] = (
            digest(pixels.numpy().tobytes()), size, model.dtype, model.device
        )  # fmt: skip
    elif blank in get_args(Blank):
        key = (blank, size, seed, model.preprocess, model.dtype, model.device)
    else:
        raise BadOption("blank", blank, f"one of {', '.join(get_args(Blank))}, or a tensor")
    made: dict[tuple[Any, ...], Tensor] = model.memo.setdefault("blank images", {})
    if key not in made:
        if len(made) >= _KEPT:
            made.pop(next(iter(made)))
        shape = (1, channels, *size)
        with torch.inference_mode(False):  # so that it can be used outside such a block, too
            drawn = pixels if isinstance(blank, Tensor) else _draw(model, shape, blank, seed)
            made[key] = drawn.reshape(shape).to(model.device, model.dtype, copy=True)
    return made[key]


def _draw(model: ImageModel, shape: tuple[int, ...], blank: Blank, seed: int) -> Tensor:
    """A normalised blank in float64 on the CPU."""
    if blank in ("white", "black"):
        level = torch.full(shape, float(blank == "white"), dtype=torch.float64)
        return model.preprocess.normalise(level)
    if blank == "mean":
        return torch.zeros(shape, dtype=torch.float64)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if blank == "noise":
        return noise
    from torchvision.transforms.functional import gaussian_blur  # a second to import

    sigma = max(shape[-2:]) / 28
    reach = round(2 * sigma)
    if reach >= min(shape[-2:]):
        narrow = f"another one: {shape[-2]} x {shape[-1]} pixels are too narrow to blur"
        raise BadOption("blank", blank, narrow)
    soft = gaussian_blur(noise, [2 * reach + 1] * 2, [sigma] * 2)
    return (soft - soft.mean()) / soft.std()


@torch.inference_mode(False)
@torch.no_grad()
def blank_trace(
    model: VisionModel, blank: Tensor, *, states: Collection[int], kv: Collection[int]
) -> Trace:
    """The recorded run of a blank image, kept in the model's memo while neither the image nor the
    model changes. Blanks of single images [B, 3, H, W] are run and let go."""
    if len(blank) > 1:
        return record(model, blank, states=set(states), kv=set(kv))
    known: list[_HeldBlank] = model.memo.setdefault("blanks", [])
    key = (model.state_key(), blank._version)
    held = next((h for h in known if h.blank is blank and h.key == key), None)
    if held is not None and set(states) <= set(held.trace.states) and set(kv) <= set(held.trace.kv):
        return held.trace
    if held is not None:  # the same blank, more of it
        states, kv = {*states, *held.trace.states}, {*kv, *held.trace.kv}
    others = [h for h in known if h.key[0] == key[0] and h.blank is not blank]
    known[:] = others[1 - _KEPT // 2 :]  # all of this state of the model
    known.append(_HeldBlank(blank, key, record(model, blank, states=set(states), kv=set(kv))))
    return known[-1].trace


@dataclass(eq=False)
class _HeldBlank:
    blank: Tensor  # kept alive, so that `is` means the same pixels
    key: tuple[Any, ...]
    trace: Trace
