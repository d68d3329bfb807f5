"""Where image tokens lie in the picture, against a mask of the object (head attribution, section
5.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from seecause.data.dataset import IGNORE
from seecause.errors import BadOption
from seecause.lvlm.prompt import Prompt
from seecause.lvlm.view import LVLM
from seecause.models.image_tokens import ImageTokens


@dataclass(frozen=True)
class ObjectShare:
    """How much of what counts lies on the object, and how much of the picture the object is."""

    share: float  # of the positive values
    area: float  # of the tokens: what values spread evenly would have
    hit: bool  # whether the largest value lies on a token that the object covers by half or more

    @property
    def lift(self) -> float:
        return self.share / self.area


def coverage(tokens: ImageTokens, mask: Tensor) -> Tensor:
    """[N] float64: the share of each token's box that the object covers; NaN for tokens without a
    place (newlines, class token).

    mask [H, W]: bool, or integers with 1 on the object. Pixels that are neither (IGNORE) do not
    count; NaN where a box has no others.
    """
    if mask.ndim != 2:
        raise BadOption("mask", list(mask.shape), "one value for each pixel, [H, W]")
    height, width = mask.shape
    both = torch.stack([mask == 1, mask != IGNORE]).cpu().double()
    found = []
    for part in tokens.parts:
        covered = torch.full(
            (part.rows, part.columns + part.newline), torch.nan, dtype=torch.float64
        )
        if part.box is not None:
            top, left, bottom, right = (
                round(share * side)
                for share, side in zip(part.box, (height, width, height, width), strict=True)
            )
            on, known = F.adaptive_avg_pool2d(
                both[:, top:bottom, left:right], (part.rows, part.columns)
            )
            covered[:, : part.columns] = on / known  # 0 / 0 is NaN
        found.append(covered.flatten())
    return torch.cat(found)


def object_share(values: Tensor, tokens: ImageTokens, mask: Tensor) -> ObjectShare | None:
    """The share of the positive part of values [N] that lies on the object; mask [H, W] in the
    frame that the image tokens cover (`seen_mask`).

    None where no value is positive: there is nothing to share out.
    """
    covered = coverage(tokens, mask)
    placed = ~covered.isnan()
    weight, covered = values.double().cpu()[placed].clamp(min=0), covered[placed]
    if not bool((weight > 0).any()):
        return None
    return ObjectShare(
        float((weight * covered).sum() / weight.sum()),
        float(covered.mean()),
        bool(covered[weight.argmax()] >= 0.5),
    )


def picture_map(tokens: ImageTokens, values: Tensor) -> Tensor:
    """Values [N] of all grids as one map [gh, gw] of the finest grid: a coarse token's value is
    shared out over its box. One grid stays as it is."""
    shown = tokens.maps(values.double().cpu())
    if not shown:
        raise BadOption("tokens", str(tokens), "image tokens with known places")
    boxes = [part.box for part, _ in shown if part.box is not None]
    rows = max(
        round(part.rows / (box[2] - box[0])) for (part, _), box in zip(shown, boxes, strict=True)
    )
    columns = max(
        round(part.columns / (box[3] - box[1])) for (part, _), box in zip(shown, boxes, strict=True)
    )
    total = torch.zeros(rows, columns, dtype=torch.float64)
    for (part, piece), box in zip(shown, boxes, strict=True):
        top, left, bottom, right = (
            round(share * side)
            for share, side in zip(box, (rows, columns, rows, columns), strict=True)
        )
        spread = F.interpolate(
            piece[None, None], size=(bottom - top, right - left), mode="nearest"
        )[0, 0]
        total[top:bottom, left:right] += spread * (part.rows * part.columns / spread.numel())
    return total


def seen_picture(lvlm: LVLM, prompt: Prompt, picture: Image.Image) -> Tensor:
    """The picture [3, H, W] in [0, 1] in the frame that image tokens cover: what the model gets
    where it crops and gets one, else the picture as it is."""
    pixels, reader = (
        prompt.inputs.get("pixel_values"),
        getattr(lvlm.processor, "image_processor", None),
    )
    mean, deviation = (getattr(reader, name, None) for name in ("image_mean", "image_std"))
    if _is_picture(pixels) and mean is not None and deviation is not None:
        raw = (
            pixels[0].float().cpu() * torch.tensor(deviation)[:, None, None]
            + torch.tensor(mean)[:, None, None]
        )
        return raw.clamp(0, 1)
    return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1) / 255


def seen_mask(lvlm: LVLM, prompt: Prompt, mask: Tensor) -> Tensor:
    """A mask [H, W] of the picture in the frame that image tokens cover: resized and cropped as the
    picture was, without new values in between."""
    if (
        not _is_picture(prompt.inputs.get("pixel_values"))
        or getattr(lvlm.processor, "image_processor", None) is None
    ):
        return mask
    drawn = Image.fromarray(mask.cpu().to(torch.uint8).numpy())
    if prompt.size is not None:  # a bank may have had the picture resized
        drawn = drawn.resize((prompt.size[1], prompt.size[0]), Image.Resampling.NEAREST)
    as_picture = Image.merge("RGB", [drawn] * 3)
    plain = {
        "do_rescale": False,
        "do_normalize": False,
        "resample": Image.Resampling.NEAREST,
        "return_tensors": "pt",
    }
    seen = (
        lvlm.processor.image_processor(images=as_picture, **plain)["pixel_values"][0, 0]
        .round()
        .to(torch.uint8)
    )
    return seen == 1 if mask.dtype == torch.bool else seen


def _is_picture(pixels: object) -> TypeGuard[Tensor]:
    """One whole picture, not its tiles or patches."""
    return isinstance(pixels, Tensor) and pixels.ndim == 4 and tuple(pixels.shape[:2]) == (1, 3)
