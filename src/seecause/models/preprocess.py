"""From a picture to a normalised tensor, and the same geometry for masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class Preprocess:
    """Resize the short side to `size / crop`, cut the centre, normalise by `mean` and `std`.

    `squash` resizes both sides to `size` instead, without cutting.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0
    squash: bool = False
    filter: str = "bicubic"

    def picture(self, image: Image.Image) -> Image.Image:
        """The part of the picture the model sees, as an image of `size`."""
        return self._fit(image.convert("RGB"), getattr(Image.Resampling, self.filter.upper()))

    def mask(self, mask: Tensor | np.ndarray) -> Tensor:
        """A mask [H, W] of the original picture (bool or integer ids) in the model's frame."""
        array = np.asarray(mask)
        kind = Image.fromarray(array.astype(np.int32), mode="I")
        return torch.from_numpy(np.asarray(self._fit(kind, Image.Resampling.NEAREST)).copy()).to(torch.int32)

    def __call__(self, image: Image.Image) -> Tensor:
        """One picture -> [1, 3, H, W], normalised."""
        raw = torch.from_numpy(np.asarray(self.picture(image)).copy()).permute(2, 0, 1)[None]
        return self.normalise(raw.float() / 255)

    def normalise(self, raw: Tensor) -> Tensor:
        """Raw pixels in [0, 1], [B, 3, H, W] -> normalised."""
        mean, std = self._stats(raw)
        return (raw - mean) / std

    def raw(self, images: Tensor) -> Tensor:
        """Normalised [B, 3, H, W] -> raw pixels in [0, 1] (not clipped)."""
        mean, std = self._stats(images)
        return images * std + mean

    def _stats(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(v, dtype=like.dtype, device=like.device)[:, None, None] for v in (self.mean, self.std))
        return mean, std

    def _fit(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        height, width = self.size
        if self.squash:
            return image.resize((width, height), resample)
        scale = max(round(height / self.crop) / image.height, round(width / self.crop) / image.width)
        wide, high = max(width, round(image.width * scale)), max(height, round(image.height * scale))
        image = image.resize((wide, high), resample)
        left, top = (wide - width) // 2, (high - height) // 2
        return image.crop((left, top, left + width, top + height))


def from_timm(config: dict[str, Any]) -> Preprocess:
    """A timm data config (`timm.data.resolve_model_data_config`)."""
    _, height, width = config["input_size"]
    return Preprocess(
        size=(height, width),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        crop=float(config.get("crop_pct") or 1.0),
        squash=config.get("crop_mode") == "squash",
        filter=str(config.get("interpolation", "bicubic")).replace("random", "bicubic"),
    )
