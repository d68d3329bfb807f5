"""Images without their background, and without their object (CIGMA, phase 2).

    I_-bg = S I + (1 - S) B,      I_-fg = (1 - S) I + S B        for a mask S and a fill B

    mean     each image's own mean colour (the paper); padding does not count. Most of it is the
             background's colour, so it can reveal the background: on Critters BIG is near 0 with
             it and large with any other fill. Compare before trusting a small BIR
    grey     the mean colour of the training set, which normalisation makes 0: the default here
    blur     the image blurred by a Gaussian of about 10 pixels at 224
    noise    pixels with the mean and deviation the model expects, the same for every image
    tensor   any images [1|B, 3, H, W]
    swap     no mask: the data's own `other_background` and `other_object`

Fills may be mixed after normalisation: it is affine per channel and commutes with means. Padding
(`inside` is False) is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause.background.images import LabelledImages, on_pixels
from seecause.engine.blanks import blank_image
from seecause.errors import BadOption
from seecause.models.base import ImageModel
from seecause.types import wide

Fill = Literal["mean", "grey", "blur", "noise", "swap"]
ErasedView = Literal["no_background", "no_object"]
ERASED: tuple[ErasedView, ...] = ("no_background", "no_object")
SWAP = "exact swap"
BLUR = 10 / 224  # deviation, as a share of the longer side


def erase(
    model: ImageModel,
    images: Tensor,
    hard: Tensor,
    fill: Fill | Tensor = "grey",
    *,
    inside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Images [B, 3, H, W] without their background and without their object, by masks `hard`
    [B, H, W] (bool)."""
    base = fill_images(model, images, fill, inside=inside)
    padding = torch.zeros_like(hard) if inside is None else ~inside
    no_background = torch.where((hard | padding)[:, None], images, base)
    return no_background, torch.where((hard & ~padding)[:, None], base, images)


def fill_images(
    model: ImageModel,
    images: Tensor,
    fill: Fill | Tensor = "grey",
    *,
    inside: Tensor | None = None,
) -> Tensor:
    """What replaces the erased pixels of each image, [1|B, 3, 1|H, 1|W], in their dtype."""
    from torchvision.transforms.functional import gaussian_blur

    if isinstance(fill, Tensor):
        if fill.shape[1:] != images.shape[1:] or len(fill) not in (1, len(images)):
            expected = f"one image, or one for each: {list(images.shape)}"
            raise BadOption("fill", list(fill.shape), expected)
        return fill.to(images)
    if fill not in get_args(Fill)[:-1]:
        raise BadOption("fill", fill, f"one of {', '.join(get_args(Fill)[:-1])}, or a tensor")
    if fill == "grey":
        return images.new_zeros(1, 1, 1, 1).expand(1, images.shape[1], 1, 1)
    if fill == "noise":
        return blank_image(model, (images.shape[-2], images.shape[-1]), "noise").to(images)
    if fill == "blur":
        sigma = BLUR * max(images.shape[-2:])
        reach = min(2 * round(2 * sigma) + 1, 2 * min(images.shape[-2:]) - 1)  # reflection must fit
        return gaussian_blur(wide(images), [reach, reach], [sigma, sigma]).to(images.dtype)
    pixels = wide(images)
    if inside is None:
        return pixels.mean(dim=(2, 3), keepdim=True).to(images.dtype)
    weight = inside[:, None].to(pixels)
    total, area = (x.sum(dim=(2, 3), keepdim=True) for x in (pixels * weight, weight))
    return (total / area).to(images.dtype)


def fill_of(fill: Fill | Tensor, images: int, rows: slice | list[int]) -> Fill | Tensor:
    """The fill of some of the images."""
    return fill[rows] if isinstance(fill, Tensor) and len(fill) == images > 1 else fill


def describe(fill: Fill | Tensor) -> str:
    """A fill, for protocols."""
    return f"tensor {list(fill.shape)}" if isinstance(fill, Tensor) else fill


class Erased:
    """The erased versions of images, made on demand: by the masks and a fill, or "swap"."""

    def __init__(self, model: ImageModel, data: LabelledImages, fill: Fill | Tensor = "grey"):
        self.model, self.data, self.fill = model, data, fill
        if not isinstance(fill, Tensor) and fill not in get_args(Fill):
            raise BadOption("fill", fill, f"one of {', '.join(get_args(Fill))}, or a tensor")
        if isinstance(fill, str) and fill == "swap":
            if data.other_background is None:
                raise BadOption(
                    "fill",
                    "swap",
                    f"mean, grey, blur or noise: {data.name} has no other versions of its images,"
                    " as Critters and pairs:WITH:WITHOUT have",
                )
        elif data.masks is None:
            expected = "masks of the images: object_masks(model, data), or data with fill='swap'"
            raise BadOption("masks", None, expected)

    @property
    def name(self) -> str:
        """In tables: "true masks, grey", "exact swap" ..."""
        if self.data.masks is None or (isinstance(self.fill, str) and self.fill == "swap"):
            return SWAP
        return f"{self.data.masks.name}, {describe(self.fill)}"

    def versions(self, rows: slice, views: Sequence[ErasedView] = ERASED) -> list[Tensor]:
        """These versions of some images."""
        data = self.data
        if self.name == SWAP:
            others = {"no_background": data.other_background, "no_object": data.other_object}
            chosen = [others[view] for view in views]
            if any(whole is None for whole in chosen):
                expected = "data with other objects on the same backgrounds, or guard='none'"
                raise BadOption("fill", "swap", expected)
            return [whole[rows].to(data.images) for whole in chosen if whole is not None]
        assert data.masks is not None
        device, masks = data.images.device, data.masks
        part = masks.take(torch.arange(len(data))[rows])
        fill = fill_of(self.fill, len(data), rows)
        inside = None if part.inside is None else on_pixels(part.inside, data.size).to(device)
        hard = part.on_pixels(data.size).to(device)
        erased = erase(self.model, data.images[rows], hard, fill, inside=inside)
        return [erased[ERASED.index(view)] for view in views]

    def record(self) -> dict[str, Any]:
        """What decided the versions."""
        masks = None if self.name == SWAP or self.data.masks is None else self.data.masks.protocol
        return {"masks": masks, "fill": describe(self.fill)}
