"""From a picture to a normalised tensor, and the same geometry for masks."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, SupportsIndex

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause._pictures import as_picture
from seecause.errors import BadImage, BadOption
from seecause.types import wide


@dataclass(frozen=True)
class Preprocess:
    """Resize the short side to `size / crop`, cut the centre, normalise by `mean` and `std`.

    `squash` resizes both sides to `size / crop` instead, without keeping the picture's shape. `pad`
    resizes the long side and fills up to `size` at the bottom or on the right, with `mean`.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0
    squash: bool = False
    filter: str = "bicubic"
    pad: bool = False

    kind: ClassVar[str] = "pictures"  # what comes in; sound and film are in signals.py
    bounded: ClassVar[bool] = True  # whether raw values lie in [0, 1]
    to_one_size: ClassVar[str] = (
        "give them raw (PIL, paths, 0-255), so that they are brought to one size"
    )
    defaults: ClassVar[Mapping[str, Any]] = {}  # of options of methods, where others are better

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std"):  # lists, as JSON has them
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.size) != 2 or not all(isinstance(s, int) and s > 0 for s in self.size):
            raise BadOption("size", self.size, "height and width in whole pixels")
        if not 0.01 <= self.crop <= 100:
            raise BadOption("crop", self.crop, "a share of the picture, such as 0.9")
        if self.filter.upper() not in Image.Resampling.__members__:
            known = ", ".join(name.lower() for name in Image.Resampling.__members__)
            raise BadOption("filter", self.filter, f"one of {known}")
        if len(self.mean) != len(self.std):
            raise BadOption("std", self.std, "as many numbers as mean")
        if not all(map(math.isfinite, self.mean)):
            raise BadOption("mean", self.mean, "finite numbers")
        if not all(math.isfinite(value) and value > 0 for value in self.std):
            raise BadOption("std", self.std, "finite numbers above 0")

    def geometry(self) -> str:
        """Size, crop and interpolation in words."""
        if self.pad:
            frame = f"{self.size[0]} x {self.size[1]} pixels"
            return f"{frame} (long side, padded at the bottom or right, {self.filter})"
        high, wide = (int(side / self.crop + 1e-6) for side in self.size)
        both = f"{high} x {wide}" if self.squash or high != wide else f"short side {high}"
        cut = "" if (high, wide) == self.size and self.squash else ", centre cut"
        return f"{self.size[0]} x {self.size[1]} pixels ({both}{cut}, {self.filter})"

    def record(self) -> dict[str, Any]:
        """For manifests, and to make it again: `Preprocess(**record)`."""
        fields = {name: v for name, v in asdict(self).items() if name != "pad" or v}
        kind = {} if self.kind == Preprocess.kind else {"kind": self.kind}
        return kind | {n: list(v) if isinstance(v, tuple) else v for n, v in fields.items()}

    def unpacked(self, value: Any) -> Any:
        """What a library has in shapes of its own, in the shape that is used here; anything else
        as it is."""
        return value

    def inputs(self, files: Sequence[str]) -> list[str]:
        """What is explained, of the files that were named."""
        return list(files)

    def picture(self, image: Any) -> Image.Image:
        """The part of the picture the model sees, as an image of `size`."""
        return self._fit(as_picture(image), getattr(Image.Resampling, self.filter.upper()))

    def mask(self, mask: Tensor | np.ndarray) -> Tensor:
        """A mask [H, W] of the original picture (bool or integer ids) in the model's frame."""
        ids = Image.fromarray(np.asarray(mask).astype(np.int32), mode="I")
        framed = np.asarray(self._fit(ids, Image.Resampling.NEAREST)).astype(np.int32)
        return torch.from_numpy(framed)

    def __call__(self, image: Any) -> Tensor:
        """One picture (PIL, path, raw pixels: `seecause._pictures.as_picture`) -> [1, 3, H, W],
        normalised."""
        return self.normalise(self.pixels(image)[None])

    def transform(self, image: Any) -> Tensor:
        """The same as [3, H, W], for `torchvision.datasets.ImageFolder(transform=...)` and a
        DataLoader, with workers too."""
        return self(image)[0]

    def pixels(self, image: Any) -> Tensor:
        """The part of the picture the model sees, raw: [3, H, W] in [0, 1], or grey, [1, H, W]."""
        whole = as_picture(image)
        seen = np.asarray(self.picture(whole).convert(self._mode())).copy()  # [H, W(, 3)] uint8
        raw = torch.from_numpy(seen).view(*self.size, -1).permute(2, 0, 1).float() / 255
        if self.pad:
            high, wide, *_ = self._frame(whole.height, whole.width)
            mean, _ = self._stats(raw)
            raw[:, high:], raw[:, :, wide:] = mean, mean  # nothing, once it is normalised
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
        """Normalised [B, C, H, W] -> what people look at, [B, 3, H, W] in [0, 1], on the CPU."""
        seen = wide(self.raw(images)).clamp(0, 1).cpu()
        return seen.expand(-1, 3, -1, -1) if len(self.mean) == 1 else seen

    def drawn(self, values: Tensor, axis: int) -> Tensor:
        """Values whose rows are `axis`, columns behind it, turned as people look at them."""
        return values

    def _mode(self) -> str:
        """What Pillow calls pictures of as many channels as `mean` has."""
        if len(self.mean) not in (1, 3):
            channels = f"this model takes {len(self.mean)} channels"
            raise BadImage("a picture", channels, "give a tensor [B, channels, H, W], normalised")
        return "L" if len(self.mean) == 1 else "RGB"

    def _stats(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (
            torch.tensor(v, dtype=like.dtype, device=like.device)[:, None, None]
            for v in (self.mean, self.std)
        )
        return mean, std

    def points(self, points: Tensor, height: int, width: int) -> Tensor:
        """Places x, y [..., 2] in a picture of height x width -> in the model's frame; those that
        were cut away lie outside it."""
        high, wide, top, left = self._frame(height, width)
        scale = points.new_tensor([wide / width, high / height])
        return points * scale - points.new_tensor([left, top])

    def _fit(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        high, wide, top, left = self._frame(image.height, image.width)
        return image.resize((wide, high), resample).crop(
            (left, top, left + self.size[1], top + self.size[0])
        )

    def _frame(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Height and width of the whole picture once it is resized, and where the model's frame
        begins in it."""
        # whole pixels, as timm and torchvision cut them
        high, wide = (int(side / self.crop + 1e-6) for side in self.size)
        if self.pad:
            scale = min(high / height, wide / width)
            return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5)), 0, 0
        if not self.squash:
            scale = max(high / height, wide / width)
            high, wide = max(high, int(height * scale + 1e-6)), max(wide, int(width * scale + 1e-6))
        return high, wide, round((high - self.size[0]) / 2), round((wide - self.size[1]) / 2)


def complete(
    known: Preprocess | None,
    *,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    size: tuple[int, int] | None,
    of: str,
) -> Preprocess:
    """What is known of a model's preprocessing with what the caller adds; what neither tells is
    asked for."""
    if known is not None:
        mean, std, size = mean or known.mean, std or known.std, size or known.size
    absent = [n for n, value in {"mean": mean, "std": std, "size": size}.items() if value is None]
    if absent:
        options = ", ".join(f"{name}=" for name in absent)
        flags = " ".join(f"--{name}" for name in absent)
        raise BadOption(
            absent[0],
            None,
            f"a value: {of} does not tell its {' and '.join(absent)}, so pass {options} ({flags})."
            " What it was trained with counts; often mean and std are 0.5,0.5,0.5 both, or"
            " 0.485,0.456,0.406 and 0.229,0.224,0.225 (ImageNet)",
        )
    assert mean is not None and std is not None and size is not None
    base = known or Preprocess(size=size, mean=tuple(mean), std=tuple(std))
    return replace(base, size=size, mean=tuple(mean), std=tuple(std))


def height_and_width(size: Sequence[int] | SupportsIndex | None) -> tuple[int, int] | None:
    """Height and width; one number is both."""
    if size is None:
        return None
    try:
        high, wide = map(operator.index, size if isinstance(size, Iterable) else (size, size))
    except (TypeError, ValueError):
        raise BadOption("size", size, "a number of pixels, or (height, width)") from None
    return high, wide


def from_record(record: Mapping[str, Any]) -> Preprocess:
    """What `Preprocess.record` wrote, to describe and draw results. Of a bag's blank a record has
    the digest only: zeros stand for it, so bags are not prepared by this."""
    kind = record.get("kind", Preprocess.kind)
    if kind == Preprocess.kind:
        return Preprocess(**record)
    from seecause.models.signals import BagSteps, Film, Spectrogram

    if kind == "bag":
        return BagSteps.of_width(record["features"])
    fields = {name: value for name, value in record.items() if name != "kind"}
    return {signal.kind: signal for signal in (Film, Spectrogram)}[kind](**fields)


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


# classes of transformers to which a size of one number is the short side
SHORT_SIDE = (
    *("CLIP", "ChineseCLIP", "Bit", "Siglip"),
    *("ConvNext", "Levit", "MobileViT", "VideoMAE"),
)


def preprocess_from_processor(config: dict[str, Any]) -> Preprocess:
    """The config of a transformers image processor (`preprocessor_config.json`).

    Processors resize (both sides, or the short one) and may cut the centre; where only the short
    side is given, the centre is cut here. NaFlex (SigLIP 2) fills a number of patches whatever a
    picture's shape is; here the largest square of so many is taken, unless another size is given.
    """
    kind = _processor_class(config)
    cuts = bool(config.get("do_center_crop"))
    if "max_num_patches" in config:
        square = math.isqrt(config["max_num_patches"]) * config["patch_size"]
        config = {**config, "size": {"shortest_edge": square}}
    resized = config["size"]
    scaled = _sides(resized)
    final = _sides(config["crop_size"]) if cuts else scaled
    if isinstance(resized, dict):
        squash = "height" in resized
    else:  # one number is both sides, or the short one
        squash = not kind.startswith(SHORT_SIDE) if kind else not cuts
    if squash and final[0] * scaled[1] != final[1] * scaled[0]:
        raise BadOption("crop_size", config["crop_size"], f"as high and as wide a part of {scaled}")
    crop = final[0] / scaled[0]
    if kind.startswith("ConvNext"):  # cuts small pictures without being told to
        squash = scaled[0] >= 384
        crop *= 1.0 if squash else config.get("crop_pct") or 0.875
    factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1 / 255
    if abs(factor * 255 - 1) > 1e-3:
        raise BadOption("rescale_factor", factor, "1/255: raw pixels are in [0, 1] here")
    pads = bool(config.get("padded"))
    normalises = config.get("do_normalize", True)
    return Preprocess(
        size=final,
        mean=tuple(config["image_mean"]) if normalises else (0.0, 0.0, 0.0),
        std=tuple(config["image_std"]) if normalises else (1.0, 1.0, 1.0),
        crop=crop,
        squash=squash and not pads,
        pad=pads,
        filter=Image.Resampling(config.get("resample", Image.Resampling.BILINEAR)).name.lower(),
    )


def _processor_class(config: dict[str, Any]) -> str:
    """The class of transformers that a config is for, as far as it tells."""
    return str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")


def one_frame(config: dict[str, Any]) -> dict[str, Any]:
    """The size of a processor that keeps the shape of pictures (a short side of 800, say), as one
    frame of 4 to 3 that all of them are resized to; of a long side alone (Segment Anything), a
    square that is filled up where the processor does. Nothing where the size is fixed already."""
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
    """Height and width of a size as processors write it: a number, both sides, or the short side
    alone."""
    if isinstance(size, dict) and {"height", "width"} <= set(size):
        return size["height"], size["width"]
    side = (
        size.get("shortest_edge") if isinstance(size, dict) and "longest_edge" not in size else size
    )
    if not isinstance(side, int):
        raise BadOption(
            "size",
            size,
            "a number, height and width, or shortest_edge: pictures of varying shape have no fixed"
            " frame",
        )
    return side, side
