"""From images to a normalised tensor, and the same geometry for masks and points.

`Preprocess` is the preprocessing of one model. `as_images` takes whatever people have:

    PIL image, path, bytes of a file        prepared by the model's preprocessing
    whole numbers 0-255, any usual axes     raw pixels: prepared likewise, also [N, H, W, 3]
    floating point, channels last, 0-1      likewise
    floating point [B, 3, H, W], [3, H, W]  taken as normalised already
    lists and tuples of these, or what a processor of transformers returns
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, SupportsIndex, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause._pictures import as_array, as_picture
from seecause.errors import BadImage, BadOption
from seecause.types import wide

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preprocess:
    """Resize the short side to `size / crop`, crop the centre, normalise by `mean` and `std`.

    `squash` resizes both sides to `size / crop` instead, without keeping the aspect ratio. `pad`
    resizes the long side and fills up to `size` at the bottom or on the right, with `mean`.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0
    squash: bool = False
    filter: str = "bicubic"
    pad: bool = False

    kind: ClassVar[str] = "images"  # films are in film.py

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std"):  # lists, as JSON has them
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.size) != 2 or not all(isinstance(s, int) and s > 0 for s in self.size):
            raise BadOption("size", self.size, "height and width in whole pixels")
        if not 0.01 <= self.crop <= 100:
            raise BadOption("crop", self.crop, "a share of the image, such as 0.9")
        if self.filter.upper() not in Image.Resampling.__members__:
            known = ", ".join(name.lower() for name in Image.Resampling.__members__)
            raise BadOption("filter", self.filter, f"one of {known}")
        if not all(map(math.isfinite, self.mean)):
            raise BadOption("mean", self.mean, "finite numbers")
        positive = all(math.isfinite(value) and value > 0 for value in self.std)
        if not positive or len(self.mean) != len(self.std):
            raise BadOption("std", self.std, "as many finite numbers above 0 as mean has")

    def geometry(self) -> str:
        """Size, crop and interpolation in words."""
        if self.pad:
            frame = f"{self.size[0]} x {self.size[1]} pixels"
            return f"{frame} (long side, padded at the bottom or right, {self.filter})"
        high, wide = self._resized()
        both = f"{high} x {wide}" if self.squash or high != wide else f"short side {high}"
        cut = "" if (high, wide) == self.size and self.squash else ", centre crop"
        return f"{self.size[0]} x {self.size[1]} pixels ({both}{cut}, {self.filter})"

    def record(self) -> dict[str, Any]:
        """The settings for a manifest; `from_record` reads them."""
        fields = {name: v for name, v in asdict(self).items() if name != "pad" or v}
        kind = {} if self.kind == Preprocess.kind else {"kind": self.kind}
        return kind | {n: list(v) if isinstance(v, tuple) else v for n, v in fields.items()}

    def unpacked(self, value: Any) -> Any:
        """Inputs in the shapes that other libraries use, in the shape used here."""
        return value

    def inputs(self, files: Sequence[str]) -> list[str]:
        """The inputs that a list of files contains."""
        return list(files)

    def mask(self, mask: Tensor | np.ndarray) -> Tensor:
        """A mask [H, W] of the original image (bool or integer ids) in the model's frame."""
        ids = Image.fromarray(np.asarray(mask).astype(np.int32), mode="I")
        framed = np.asarray(self._fit(ids, Image.Resampling.NEAREST)).astype(np.int32)
        return torch.from_numpy(framed)

    def __call__(self, image: Any) -> Tensor:
        """One image (PIL, path or raw pixels) as a normalised tensor [1, 3, H, W]."""
        return self.normalise(self.pixels(image)[None])

    def transform(self, image: Any) -> Tensor:
        """One image as a normalised tensor [3, H, W].

        It can be passed to `torchvision.datasets.ImageFolder(transform=...)` and used by the
        workers of a DataLoader.
        """
        return self(image)[0]

    def pixels(self, image: Any) -> Tensor:
        """The part of an image that the model sees, raw in [0, 1]: [3, H, W], or [1, H, W]."""
        if len(self.mean) not in (1, 3):
            channels = f"this model takes {len(self.mean)} channels"
            raise BadImage("an image", channels, "give a tensor [B, channels, H, W], normalised")
        whole = as_picture(image)
        framed = self._fit(whole, getattr(Image.Resampling, self.filter.upper()))
        seen = np.asarray(framed.convert("L" if len(self.mean) == 1 else "RGB")).copy()
        raw = torch.from_numpy(seen).view(*self.size, -1).permute(2, 0, 1).float() / 255
        if self.pad:
            high, wide, *_ = self._frame(whole.height, whole.width)
            mean, _ = self._stats(raw)
            raw[:, high:], raw[:, :, wide:] = mean, mean  # 0 after normalisation
        return raw

    def normalise(self, raw: Tensor) -> Tensor:
        """Raw pixels in [0, 1], [B, 3, H, W] -> normalised."""
        mean, std = self._stats(raw)
        return (raw - mean) / std

    def raw(self, images: Tensor) -> Tensor:
        """Normalised [B, 3, H, W] -> raw pixels in [0, 1] (not clipped)."""
        mean, std = self._stats(images)
        return images * std + mean

    def shown(self, images: Tensor) -> Tensor:
        """Normalised [B, C, H, W] as RGB images to display, [B, 3, H, W] in [0, 1], on the CPU."""
        seen = wide(self.raw(images)).clamp(0, 1).cpu()
        return seen.expand(-1, 3, -1, -1) if len(self.mean) == 1 else seen

    def drawn(self, values: Tensor, axis: int) -> Tensor:
        """Maps whose rows are `axis` and whose columns follow, arranged for display."""
        return values

    def points(self, points: Tensor, height: int, width: int) -> Tensor:
        """Points x, y [..., 2] of an image of height x width, in the model's frame. Points that
        the crop removes lie outside of it."""
        high, wide, top, left = self._frame(height, width)
        scale = points.new_tensor([wide / width, high / height])
        return points * scale - points.new_tensor([left, top])

    def _stats(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (like.new_tensor(v)[:, None, None] for v in (self.mean, self.std))
        return mean, std

    def _fit(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        """The image in the model's frame."""
        high, wide, top, left = self._frame(image.height, image.width)
        return image.resize((wide, high), resample).crop(
            (left, top, left + self.size[1], top + self.size[0])
        )

    def _resized(self) -> tuple[int, int]:
        """Height and width before the crop, in whole pixels as timm and torchvision round them."""
        high, wide = (int(side / self.crop + 1e-6) for side in self.size)
        return high, wide

    def _frame(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Height and width of the resized image, and the top left corner of the crop in it."""
        high, wide = self._resized()
        if self.pad:
            scale = min(high / height, wide / width)
            return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5)), 0, 0
        if not self.squash:
            scale = max(high / height, wide / width)
            high, wide = max(high, int(height * scale + 1e-6)), max(wide, int(width * scale + 1e-6))
        return high, wide, round((high - self.size[0]) / 2), round((wide - self.size[1]) / 2)


def height_and_width(size: Sequence[int] | SupportsIndex | None) -> tuple[int, int] | None:
    """Height and width of an option `size`; one number is both."""
    if size is None:
        return None
    try:
        high, wide = map(operator.index, size if isinstance(size, Iterable) else (size, size))
    except (TypeError, ValueError):
        raise BadOption("size", size, "a number of pixels, or (height, width)") from None
    return high, wide


def from_record(record: Mapping[str, Any]) -> Preprocess:
    """The preprocessing that `Preprocess.record` wrote."""
    from seecause.models.film import Film

    fields = {name: value for name, value in record.items() if name != "kind"}
    return Film(**fields) if record.get("kind") == Film.kind else Preprocess(**fields)


def from_timm(config: dict[str, Any]) -> Preprocess:
    """The preprocessing of a timm data config (`timm.data.resolve_model_data_config`)."""
    _, height, width = config["input_size"]
    return Preprocess(
        size=(height, width),
        mean=config["mean"],
        std=config["std"],
        crop=float(config.get("crop_pct") or 1.0),
        squash=config.get("crop_mode") == "squash",
        filter=str(config.get("interpolation", "bicubic")).replace("random", "bicubic"),
    )


# processors of transformers for which a size of one number is the short side
SHORT_SIDE = (
    *("CLIP", "ChineseCLIP", "Bit", "Siglip"),
    *("ConvNext", "Levit", "MobileViT", "VideoMAE"),
)


def preprocess_from_processor(config: dict[str, Any]) -> Preprocess:
    """The preprocessing of a transformers image processor (`preprocessor_config.json`).

    Processors resize (both sides, or the short one) and may crop the centre; where only the short
    side is given, the centre is cropped here. NaFlex (SigLIP 2) fills a number of patches whatever
    an image's shape is; here the largest square of so many is taken, unless another size is given.
    """
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    crops = bool(config.get("do_center_crop"))
    if "max_num_patches" in config:
        square = math.isqrt(config["max_num_patches"]) * config["patch_size"]
        config = {**config, "size": {"shortest_edge": square}}
    resized = config["size"]
    scaled = _sides(resized)
    final = _sides(config["crop_size"]) if crops else scaled
    if isinstance(resized, dict):
        squash = "height" in resized
    else:  # one number is both sides, or the short one
        squash = not kind.startswith(SHORT_SIDE) if kind else not crops
    if squash and final[0] * scaled[1] != final[1] * scaled[0]:
        raise BadOption("crop_size", config["crop_size"], f"the aspect ratio of {scaled}")
    crop = final[0] / scaled[0]
    if kind.startswith("ConvNext"):  # crops small images without do_center_crop
        squash = scaled[0] >= 384
        crop *= 1.0 if squash else config.get("crop_pct") or 0.875
    factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1 / 255
    if abs(factor * 255 - 1) > 1e-3:
        raise BadOption("rescale_factor", factor, "1/255: raw pixels are in [0, 1] here")
    pads, normalises = bool(config.get("padded")), config.get("do_normalize", True)
    return Preprocess(
        size=final,
        mean=config["image_mean"] if normalises else (0.0, 0.0, 0.0),
        std=config["image_std"] if normalises else (1.0, 1.0, 1.0),
        crop=crop,
        squash=squash and not pads,
        pad=pads,
        filter=Image.Resampling(config.get("resample", Image.Resampling.BILINEAR)).name.lower(),
    )


def one_frame(config: dict[str, Any]) -> dict[str, Any]:
    """A fixed size for a processor that keeps the aspect ratio of images (a short side of 800,
    say): a frame of 4 to 3 to which all images are resized. For a long side alone (Segment
    Anything) it is a square, padded where the processor pads. Empty where the size is fixed."""
    size: Any = config.get("size")
    edges = size if isinstance(size, dict) else {"shortest_edge": size}
    if "max_size" not in config and "longest_edge" not in edges:
        return {}
    short = edges.get("shortest_edge")
    if short is None:
        square = {"height": edges["longest_edge"], "width": edges["longest_edge"]}
        return {"size": square, "padded": config.get("do_pad", False)}
    return {"size": {"height": short // 32 * 32, "width": round(short / 24) * 32}}


def _sides(size: Any) -> tuple[int, int]:
    """Height and width of a processor's size: a number, both sides, or the short side alone."""
    if isinstance(size, dict) and {"height", "width"} <= set(size):
        return size["height"], size["width"]
    if isinstance(size, dict) and "longest_edge" not in size:
        size = size.get("shortest_edge")
    if not isinstance(size, int):
        expected = "a number, height and width, or shortest_edge, which give all images one size"
        raise BadOption("size", size, expected)
    return size, size


Picture: TypeAlias = Image.Image | str | Path | bytes | np.ndarray | Tensor
Pictures: TypeAlias = Picture | Sequence[Picture] | Mapping[str, Any]

# beyond black and white, in units of their distance: resizing overshoots by a tenth
SLACK = 0.25
ENTRIES = ("pixel_values",)  # of what processors of transformers return
BYTES = 16.0  # no normalised pixel is as large, many of 0-255 are


class Framed(Protocol):
    """What images are prepared for: a model, or anything with the same three attributes."""

    @property
    def preprocess(self) -> Preprocess: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


class FramedModel(Framed, Protocol):
    """A model whose `memo` remembers that a warning was given."""

    @property
    def memo(self) -> dict[Any, Any]: ...


def as_images(model: FramedModel, images: Pictures) -> Tensor:
    """Images of any kind as one normalised batch on the model's device and in its dtype.

    Gradients of a tensor pass through. Values outside of the range of normalised pixels are
    refused, or warned of once for each model.

    Args:
        model: The model whose preprocessing, device and dtype are used.
        images: One image or several, in any form that the module's docstring lists.

    Returns:
        A tensor [B, 3, H, W].

    Raises:
        BadImage: If an image cannot be read, or tensors have different shapes.

    Example:
        >>> import numpy as np, seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> as_images(model, np.zeros((2, 120, 200, 3), np.uint8)).shape
        torch.Size([2, 3, 96, 96])
    """
    if isinstance(images, Mapping):
        key = next((key for key in ENTRIES if key in images), None)
        if key is None:
            raise BadImage(
                f"a mapping of {', '.join(map(str, images)) or 'nothing'}",
                "expected pixel_values, as processors of transformers name them",
                "give images, or a tensor [B, 3, H, W]",
            )
        images = images[key]
    images = model.preprocess.unpacked(images)
    if isinstance(images, list | tuple):
        batch = _joined([_one_or_more(model, image) for image in images])
    else:
        batch = _one_or_more(model, images)
    return batch.to(model.device, model.dtype)


def file_names(images: Pictures) -> list[str]:
    """Names of images by their paths; an empty list if no image comes from a file."""
    items: Any = images if isinstance(images, list | tuple) else [images]
    paths = [
        str(getattr(item, "filename", ""))  # PIL keeps it for an image that was not changed
        if isinstance(item, Image.Image)
        else (str(item) if isinstance(item, str | Path) else "")
        for item in items
    ]
    if not any(paths) or any(getattr(item, "ndim", 0) > 3 for item in items):
        return []
    return [path or f"image {place}" for place, path in enumerate(paths)]


def _one_or_more(model: FramedModel, value: Any) -> Tensor:
    """[B, 3, H, W], normalised, from one image or from an array of images."""
    steps = model.preprocess
    value = steps.unpacked(value)
    batch = _normalised(value, len(steps.mean))
    if batch is not None:
        check_range(model, batch)
        return batch
    pixels = as_array(value)
    if pixels is not None and pixels.ndim == 4:
        return _joined([steps(image) for image in pixels])
    return steps(value)


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
        "use model.preprocess(image), or give images or paths",
    )


def _joined(batches: Sequence[Tensor]) -> Tensor:
    if not batches:
        raise BadImage("an empty batch", "there is nothing in it", "give at least one image")
    sizes = {tuple(batch.shape[1:]) for batch in batches}
    if len(sizes) > 1:
        raise BadImage(
            f"images of {' and '.join(str(list(size)) for size in sorted(sizes))}",
            "one batch has one size",
            "give raw images (PIL, paths, 0-255), which are resized",
        )
    return torch.cat([batch.to(batches[0].device, batches[0].dtype) for batch in batches])


def check_range(model: FramedModel, images: Tensor) -> None:
    """Refuse values that no normalised image has, and warn once of values that few have."""
    if not images.numel():
        return
    low, high = torch.stack(images.detach().aminmax()).tolist()
    if not math.isfinite(low + high):
        raise BadImage("images", "they hold NaN or infinity", "give finite pixels")
    if low >= 0 and high > BYTES:
        raise BadImage(
            f"images with values from {low:g} to {high:g}",
            "expected normalised pixels; these look like 0-255",
            "give them as whole numbers (uint8), or use model.preprocess(image)",
        )
    steps, reason = model.preprocess, ""
    ends = steps.normalise(torch.tensor([0.0, 1.0]).repeat(len(steps.mean), 1)[None, :, None])
    black, white = float(ends[..., 0].min()), float(ends[..., 1].max())
    slack = SLACK * (white - black)
    if low < black - slack or high > white + slack:
        reason = "were they normalised twice, or with another mean and std?"
    elif low >= 0 and high <= 1 and high - low > 0.5 and (black, white) != (0, 1):
        reason = "were they normalised at all? Use model.preprocess(image)"
    if reason and "pixel range" not in model.memo:
        model.memo["pixel range"] = True
        log.warning(
            "images with values from %.3g to %.3g: this model's pixels reach from %.3g (black) to"
            " %.3g (white); %s",
            *(low, high, black, white, reason),
        )
