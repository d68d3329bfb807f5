"""From images to a normalised tensor, and the same geometry for masks and points.

`Preprocess` is the preprocessing of one model, and `Film` that of a model of films. A film is a
strip [3 * tubelet, times * H, W]: tubelets stand one below the other, and the frames of a tubelet
are channels, so that a patch of pixels is one tubelet, and blanks, patches and metrics work as for
images.

`as_images` takes images in many forms:

    PIL image, path, bytes of a file        prepared by the model's preprocessing
    whole numbers 0-255, any usual axes     raw pixels: prepared likewise, also [N, H, W, 3]
    floating point, channels last, 0-1      likewise
    floating point [B, 3, H, W], [3, H, W]  taken as normalised already
    lists and tuples of these, or what a processor of transformers returns

An image file is read as 8-bit RGB (`as_rgb`); otherwise an error names the file.
"""

from __future__ import annotations

import json
import logging
import math
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from seecause.errors import BadImage, BadOption
from seecause.models.block import Named, Size, wide
from seecause.options import Count, Limit, Share, checked

log = logging.getLogger(__name__)
T = TypeVar("T")

# the largest cameras have 100 million; larger headers are refused before anything is decoded
MAX_PIXELS = 120_000_000
MIN_SIDE = 2
# the short side is scaled to the model's input, so a long thin strip would grow without bound
MAX_ASPECT = 64
SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)

ORIENTATION = 0x0112  # a tag of EXIF data
EXIF, ALPHA = "SEECAUSE_EXIF", "SEECAUSE_ALPHA"  # in the environment, so that workers have them
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# no other format is opened, whatever the file's name: PostScript files execute code, and rarely
# used decoders are a security risk


Filter = Annotated[
    str,
    Limit(
        lambda name: name.upper() in Image.Resampling.__members__,
        f"one of {', '.join(Image.Resampling.__members__).lower()}",
    ),
]


@checked
@dataclass(frozen=True)
class Preprocess:
    """Resize the short side to `size / crop`, crop the centre, normalise by `mean` and `std`.

    `squash` resizes both sides to `size / crop` instead, without keeping the aspect ratio. With
    `round_down` a crop of half a pixel begins at the pixel before, as transformers has it;
    otherwise at the nearest even one, as torchvision has it.
    """

    size: tuple[Count, Count]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: Share = 1.0  # the share that is kept
    squash: bool = False
    filter: Filter = "bicubic"
    round_down: bool = False

    kind: ClassVar[str] = "images"

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std"):  # lists, as JSON has them
            object.__setattr__(self, name, tuple(getattr(self, name)))
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if not finite or min(self.std) <= 0 or len(self.mean) != len(self.std):
            raise BadOption("std", self.std, "as many finite numbers above 0 as mean has")

    def geometry(self) -> str:
        """Size, crop and interpolation in words."""
        high, wide = self._resized()
        both = f"{high} x {wide}" if self.squash or high != wide else f"short side {high}"
        cut = "" if (high, wide) == self.size and self.squash else ", centre crop"
        return f"{self.size[0]} x {self.size[1]} pixels ({both}{cut}, {self.filter})"

    def sentence(self) -> str:
        """All of it in words."""
        mean, std = (",".join(f"{value:.4g}" for value in v) for v in (self.mean, self.std))
        return f"{self.geometry()}, mean {mean}, std {std}"

    def record(self) -> Named:
        """The settings for a manifest; `from_record` reads them."""
        kind = {} if self.kind == Preprocess.kind else {"kind": self.kind}
        values = {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(self).items()}
        return kind | values

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
        resample = Image.Resampling[self.filter.upper()]
        framed = self._fit(as_image(image), resample)
        seen = np.asarray(framed.convert("L" if len(self.mean) == 1 else "RGB")).copy()
        return torch.from_numpy(seen).view(*self.size, -1).permute(2, 0, 1).float() / 255

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

    def _resized(self) -> Size:
        """Height and width before the crop, in whole pixels as timm and torchvision round them."""
        high, wide = (int(side / self.crop + 1e-6) for side in self.size)
        return high, wide

    def _frame(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Height and width of the resized image, and the top left corner of the crop in it."""
        high, wide = self._resized()
        if not self.squash:
            scale = max(high / height, wide / width)
            high, wide = max(high, int(height * scale + 1e-6)), max(wide, int(width * scale + 1e-6))
        rounded = math.floor if self.round_down else round
        top, left = (rounded((a - b) / 2) for a, b in zip((high, wide), self.size, strict=True))
        return high, wide, top, left


@dataclass(frozen=True)
class Film(Preprocess):
    """Frames -> [1, 3 * tubelet, times * H, W]. From a film with more frames than the model reads,
    evenly spaced ones are taken. `size`, `mean` and `std` are those of the strip."""

    frames: int = 16
    tubelet: int = 2

    kind: ClassVar[str] = "film"

    @classmethod
    def of_frame(cls, steps: Preprocess, *, high: int, frames: int, tubelet: int) -> Film:
        """The preprocessing of a film, from that of one frame, which is `high` pixels high."""
        if isinstance(steps, Film):
            return steps
        strip = {
            "size": (high * frames // tubelet, steps.size[1]),
            "mean": steps.mean * tubelet,
            "std": steps.std * tubelet,
        }
        return cls(**vars(steps) | strip, frames=frames, tubelet=tubelet)

    @property
    def times(self) -> int:
        return self.frames // self.tubelet

    @property
    def frame(self) -> Preprocess:
        """The preprocessing of one frame."""
        size, channels = (self.size[0] // self.times, self.size[1]), len(self.mean) // self.tubelet
        mean, std = self.mean[:channels], self.std[:channels]
        return Preprocess(size, mean, std, self.crop, self.squash, self.filter, self.round_down)

    def geometry(self) -> str:
        return f"{self.frames} frames of {self.frame.geometry()}"

    def __call__(self, image: Any) -> Tensor:
        """One film as a strip: a folder of frames, or a list of images."""
        if isinstance(image, str | Path):
            if not Path(image).is_dir():
                remedy = "write its frames into a folder: ffmpeg -i FILM frames/%04d.png"
                raise BadImage(str(image), "a film is a folder of frames", remedy)
            files = [p for p in Path(image).iterdir() if p.suffix.lower() in SUFFIXES]
            image = sorted(files, key=lambda p: (len(p.name), p.name))  # frame 10 after frame 9
        if len(image) < self.frames:
            read = f"this model reads {self.frames}"
            raise BadImage(f"a film of {len(image)} frames", read, "give a longer film")
        places, frame = np.linspace(0, len(image) - 1, self.frames).round(), self.frame
        return self._folded(torch.cat([frame(image[int(place)]) for place in places])[None])

    def unpacked(self, value: Any) -> Any:
        """Frames [B, T, 3, H, W] as the processor returns them, or one film as a list of images, as
        strips [B, 3 * tubelet, times * H, W]."""
        if isinstance(value, list | tuple) and value and isinstance(value[0], Image.Image):
            return self(value)
        return self._folded(value) if isinstance(value, Tensor) and value.ndim == 5 else value

    def _folded(self, frames: Tensor) -> Tensor:
        """[B, T, 3, H, W] -> [B, 3 * tubelet, times * H, W]."""
        tubelets = frames.unflatten(1, (self.times, self.tubelet))  # [B, t, tubelet, 3, H, W]
        return tubelets.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)

    def unfolded(self, strips: Tensor) -> Tensor:
        """[B, 3 * tubelet, times * H, W] -> [B, T, 3, H, W], as the native model takes it."""
        tubelets = strips.unflatten(2, (self.times, -1)).unflatten(1, (self.tubelet, -1))
        return tubelets.permute(0, 3, 1, 2, 4, 5).flatten(1, 2)

    def inputs(self, files: Sequence[str]) -> list[str]:
        """Films among files: a frame stands for the folder it lies in."""
        return list(dict.fromkeys(str(Path(file).parent) for file in files))

    def shown(self, images: Tensor) -> Tensor:
        """The first frame of each tubelet."""
        return super().shown(images)[:, : len(self.mean) // self.tubelet]

    def drawn(self, values: Tensor, axis: int) -> Tensor:
        """Frames in a row."""
        apart = values.unflatten(axis, (self.times, -1))
        return apart.movedim(axis, axis + 1).flatten(axis + 1, axis + 2)


def height_and_width(size: Sequence[int] | SupportsIndex | None) -> Size | None:
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
    values = {name: value for name, value in record.items() if name != "kind"}
    return Film(**values) if record.get("kind") == Film.kind else Preprocess(**values)


def from_timm(config: Named) -> Preprocess:
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


def preprocess_from_processor(config: Named) -> Preprocess:
    """The preprocessing of a transformers image processor (`preprocessor_config.json`).

    Processors resize (both sides, or the short one) and may crop the centre; where only the short
    side is given, the centre is cropped here.
    """
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    scaled = _sides(config["size"])
    final = _sides(config["crop_size"]) if config.get("do_center_crop") else scaled
    squash = "height" in config["size"]
    if squash and final[0] * scaled[1] != final[1] * scaled[0]:
        raise BadOption("crop_size", config["crop_size"], f"the aspect ratio of {scaled}")
    crop = final[0] / scaled[0]
    if kind.startswith("ConvNext"):  # crops small images without do_center_crop
        squash = scaled[0] >= 384
        crop *= 1.0 if squash else config.get("crop_pct") or 0.875
    factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1 / 255
    if abs(factor * 255 - 1) > 1e-3:
        raise BadOption("rescale_factor", factor, "1/255: raw pixels are in [0, 1] here")
    normalises = config.get("do_normalize", True)
    return Preprocess(
        size=final,
        mean=config["image_mean"] if normalises else (0.0, 0.0, 0.0),
        std=config["image_std"] if normalises else (1.0, 1.0, 1.0),
        crop=crop,
        squash=squash,
        filter=Image.Resampling(config.get("resample", Image.Resampling.BILINEAR)).name.lower(),
        round_down=crop != 1 or not squash,
    )


def preprocess_of(value: Any) -> Preprocess | Named:
    """Preprocessing from what describes it.

    Args:
        value: A `Preprocess`, or some of its fields in a dict, which is returned; a transform of
            torchvision, timm or open_clip; a data config of timm or a processor of transformers, as
            an object, a dict, a JSON file, or a folder with one.

    Raises:
        BadOption: If a part of it cannot be expressed as resize, centre crop and normalisation.

    Example:
        >>> preprocess_of({"input_size": (3, 96, 96), "mean": (0.5,) * 3, "std": (0.5,) * 3}).size
        (96, 96)
    """
    if isinstance(value, Preprocess):
        return value
    if isinstance(value, str | Path):
        return _preprocess_file(Path(value))
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        return _of_transform(value)
    value = value.get("pretrained_cfg") or value
    if "input_size" in value:
        return from_timm({"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), **value})
    if "image_mean" in value:
        return preprocess_from_processor(dict(value))
    known = [field.name for field in fields(Preprocess)]
    if unknown := value.keys() - {*known, "kind"}:
        raise BadOption("preprocess", ", ".join(map(str, unknown)), f"some of {', '.join(known)}")
    return dict(value)


def _preprocess_file(path: Path) -> Preprocess | Named:
    if path.is_dir():
        inside = [path / name for name in ("preprocessor_config.json", "config.json")]
        path = next(filter(Path.is_file, inside), inside[0])
    try:
        text = path.read_text(encoding="utf-8")
        return preprocess_of(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError) as failure:
        if isinstance(failure, BadOption):
            raise
        expected = (
            "a timm config (JSON), the folder of a processor of transformers, or FILE.py:FUNCTION"
            f" that returns a transform ({first_line(failure)})"
        )
        raise BadOption("preprocess", str(path), expected) from None


def _of_transform(transform: Any) -> Preprocess:
    """Preprocessing from the steps of a transform, compared with what it makes of an image."""

    def refuse(what: Any, expected: str) -> BadOption:
        return BadOption("preprocess", str(what)[:60], f"Resize, CenterCrop, Normalize: {expected}")

    def sides(size: Any) -> tuple[int, ...]:
        return tuple(size) if isinstance(size, Iterable) else (size,)

    steps = {type(step).__name__: step for step in _flat(transform)}
    if preset := steps.get("ImageClassification"):  # of torchvision's weights
        resize = normalise = preset
        scaled, cut = sides(preset.resize_size), sides(preset.crop_size)
    else:
        if any("Rand" in name or "Augment" in name for name in steps):
            raise refuse(transform, "give the transform of evaluation, not of training")
        if (resize := steps.get("Resize")) is None:
            raise refuse(transform, "there is no Resize")
        crop = steps.get("CenterCrop", steps.get("CenterCropOrPad"))
        normalise = steps.get("Normalize")
        scaled = sides(resize.size)
        cut = scaled if crop is None else sides(crop.size)
        if getattr(resize, "max_size", None) is not None or (crop is None and len(scaled) < 2):
            expected = "no max_size, and a CenterCrop behind it or both sides: size=(224, 224)"
            raise refuse(resize, expected)
    squash = len(scaled) == 2
    scaled, cut = (each * 2 if len(each) == 1 else each for each in (scaled, cut))
    if cut[0] * scaled[1] != cut[1] * scaled[0] or cut[0] > scaled[0]:
        raise refuse(f"a crop of {cut}", f"a part of {scaled} with the same aspect ratio")
    mean, std = getattr(normalise, "mean", (0.0,)), getattr(normalise, "std", (1.0,))
    mean, std = (  # timm's are of 32 bits; one is for all channels
        tuple(float(str(np.float32(value))) for value in values) * (3 // len(values))
        for values in (mean, std)
    )
    read = Preprocess(
        size=(cut[0], cut[1]),
        mean=mean,
        std=std,
        crop=cut[0] / scaled[0],
        squash=squash,
        filter=str(getattr(resize.interpolation, "value", resize.interpolation)),
    )
    colours = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
    image = Image.fromarray(colours).resize((431, 357), Image.Resampling.BICUBIC)
    made, ours = transform(image), read(image)[0]
    alike = getattr(made, "shape", None) == ours.shape
    if not alike or (made - ours).abs().mean() > 0.01 / min(read.std):
        raise refuse(transform, "in this order, of pixels of 0-1, they give other pixels")
    return read


def _flat(transform: Any) -> list[Any]:
    """The steps of a transform, and of transforms in it."""
    if not hasattr(transform, "transforms"):
        return [transform]
    return [each for step in transform.transforms for each in _flat(step)]


def one_frame(config: Named) -> Named:
    """A fixed size for a detector's processor that keeps the aspect ratio of images (a short side
    of 800, say): a frame of 4 to 3 to which all images are resized. Empty where the size is
    fixed."""
    edges = config["size"]
    short = edges.get("shortest_edge")
    if short is None or "longest_edge" not in edges:
        return {}
    return {"size": {"height": short // 32 * 32, "width": round(short / 24) * 32}}


def _sides(size: Any) -> Size:
    """Height and width of a processor's size: both sides, or the short side alone."""
    if {"height", "width"} <= set(size):
        return size["height"], size["width"]
    if "shortest_edge" not in size or "longest_edge" in size:
        expected = "height and width, or shortest_edge, which give all images one size"
        raise BadOption("size", size, expected)
    return size["shortest_edge"], size["shortest_edge"]


OneImage: TypeAlias = Image.Image | str | Path | bytes | np.ndarray | Tensor
Images: TypeAlias = OneImage | Sequence[OneImage] | Mapping[str, Any]

# beyond black and white, in units of their distance: resizing overshoots by a tenth
SLACK = 0.25
BYTES = 16.0  # larger than any normalised pixel; pixels of 0-255 exceed it


class Framed(Protocol):
    """A model, or any object with the same three attributes, for which images are prepared."""

    @property
    def preprocess(self) -> Preprocess: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


def as_images(model: Any, images: Images, *, check: bool = True) -> Tensor:
    """Images of any kind as one normalised batch on the model's device and in its dtype.

    Gradients of a tensor pass through. Values outside of the range of normalised pixels are
    refused, or warned of once for each model.

    Args:
        model: The model whose preprocessing, device and dtype are used.
        images: One image or several, in any form that the module's docstring lists.
        check: Whether the range of values is checked here.

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
    if isinstance(images, Mapping):  # what a processor of transformers returns
        images = images["pixel_values"]
    images = model.preprocess.unpacked(images)
    if isinstance(images, list | tuple):
        batch = _joined([_one_or_more(model, image, check) for image in images])
    else:
        batch = _one_or_more(model, images, check)
    return batch.to(model.device, model.dtype)


def file_names(images: Images) -> list[str]:
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


def _one_or_more(model: Any, value: Any, check: bool) -> Tensor:
    """[B, 3, H, W], normalised, from one image or from an array of images."""
    steps = model.preprocess
    value = steps.unpacked(value)
    batch = _normalised(value, len(steps.mean))
    if batch is not None:
        if check:
            check_range(model, batch)
        return batch
    pixels = as_array(value)
    if pixels is None or pixels.ndim != 4:
        return steps(value)
    return _joined([steps(image) for image in pixels])


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


def check_range(model: Any, images: Tensor) -> None:
    """Raises for values that normalised images cannot have, and warns once about unusual values."""
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
    steps = list(zip(model.preprocess.mean, model.preprocess.std, strict=True))
    black, white = min(-m / s for m, s in steps), max((1 - m) / s for m, s in steps)
    slack = SLACK * (white - black)
    outside = low < black - slack or high > white + slack
    raw = low >= 0 and high <= 1 and high - low > 0.5 and (black, white) != (0, 1)
    if (outside or raw) and "pixel range" not in model.memo:
        model.memo["pixel range"] = True
        log.warning(
            "images with values from %.3g to %.3g: this model's pixels reach from %.3g (black) to"
            " %.3g (white); %s",
            *(low, high, black, white),
            "were they normalised at all? Use model.preprocess(image)"
            if raw
            else "were they normalised twice, or with another mean and std?",
        )


# ---------------------------------------------------------------- image files


def read_image(path: str | Path) -> Image.Image:
    """One image as RGB, by `as_rgb`; the first frame of an animation."""
    return _open_image(path, lambda image: as_rgb(str(path), image))


def decode_image(content: bytes, name: str, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """One image from the bytes of a file, as `read_image` reads it; errors call it `name`."""
    return _decode(content, name, lambda image: as_rgb(name, image), max_pixels)


def read_ids(path: str | Path) -> np.ndarray:
    """A mask [H, W] int64: the numbers in a file (palette indices, not their colours)."""
    ids = _open_image(path, np.array)
    if ids.ndim != 2 or ids.dtype.kind not in "biu":
        raise BadImage(
            str(path), "an image in colour", "give a mask with one number for each pixel"
        )
    return ids.astype(np.int64)


def read_grey(path: str | Path) -> np.ndarray:
    """A mask [H, W] uint8 that may have been saved in colour or with transparency: its brightness,
    whatever its alpha."""
    return _open_image(path, lambda image: np.array(image.convert("L")))


def _open_image(path: str | Path, take: Callable[[Image.Image], T]) -> T:
    check_there(Path(path))
    return _decode(Path(path).read_bytes(), str(path), take, MAX_PIXELS)


def _decode(content: bytes, name: str, take: Callable[[Image.Image], T], max_pixels: int) -> T:
    """The result of `take` for the opened image; raises `BadImage` if it cannot be read."""
    if not content:
        raise BadImage(name, "the file is empty", "give an intact file")
    with warnings.catch_warnings():
        # pillow warns about large, odd or damaged files; what matters is checked below
        warnings.simplefilter("ignore")
        try:
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                _check_size(name, image, max_pixels)
                image.load()
                return take(image)
        except BadImage:
            raise
        except UnidentifiedImageError:
            raise BadImage(
                name, "not an image that can be read", f"give one of {kinds()}"
            ) from None
        except Image.DecompressionBombError:
            raise _too_large(name, "its header announces a huge image", max_pixels) from None
        except Exception as broken:  # decoders raise anything on a damaged file
            reason = f"damaged or truncated ({first_line(broken)})"
            raise BadImage(name, reason, "give an intact file") from broken


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, shortened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def check_there(path: Path) -> None:
    """Refuse a path that is not a file, without reading it."""
    if path.is_dir():
        raise BadImage(str(path), "a folder, not an image", "give its files in a list")
    if not path.exists():
        raise BadImage(str(path), "no such file", "check the path")


def _check_size(name: str, image: Image.Image, max_pixels: int) -> None:
    """Raises for images that are too large, by the header alone, before any pixel is decoded."""
    short, long = sorted(image.size)
    size = f"{image.width} x {image.height} pixels"
    if short < MIN_SIDE:
        raise BadImage(name, f"{size} are too small")
    if short * long > max_pixels:
        raise _too_large(name, size, max_pixels)
    if long > MAX_ASPECT * short:
        remedy = f"cut it so that one side is at most {MAX_ASPECT} times the other"
        raise BadImage(name, f"{size} are too long and thin", remedy)


def _too_large(name: str, what: str, max_pixels: int) -> BadImage:
    limit = f"the limit of {max_pixels / 1e6:.0f} million pixels"
    return BadImage(name, f"{what}, more than {limit}", "scale it down first")


def as_rgb(name: str, image: Image.Image) -> Image.Image:
    """An image in 8 bits, as torchvision's ImageFolder has it: a rotation in its EXIF data is not
    applied and transparency is ignored, which is mentioned, unless `EXIF` and `ALPHA` in the
    environment ask for an upright image on white. Errors call it `name`."""
    if image.getexif().get(ORIENTATION, 1) not in (0, 1):
        if os.environ.get(EXIF):
            image = ImageOps.exif_transpose(image)
        else:
            _mention("EXIF data that rotate it, which is not applied", name, "exif")
    if image.mode.startswith("I;16"):  # pillow would clip at 255
        grey = (np.asarray(image).astype(np.uint32) // 257).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("I", "F"):
        remedy = "save it with 8 or 16 bits a channel"
        raise BadImage(name, "32-bit pixels have no agreed white", remedy)
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        if os.environ.get(ALPHA):
            white = Image.new("RGBA", clear.size, "white")
            return Image.alpha_composite(white, clear).convert("RGB")
        if clear.getchannel("A").getextrema()[0] < 255:  # type: ignore[operator]
            _mention("transparent pixels, whose hidden colours are read", name, "alpha")
    return image.convert("RGB")


def _mention(what: str, name: str, option: str) -> None:
    """Say once in a process what was not applied, and how it is."""
    if option not in _MENTIONED:
        _MENTIONED.add(option)
        changed = {"exif": f"upright: --input exif=true, or {EXIF}=1 in the environment"}
        changed["alpha"] = f"on white: --input alpha=true, or {ALPHA}=1 in the environment"
        log.warning("%s has %s, as in torchvision's ImageFolder (%s)", name, what, changed[option])


_MENTIONED = set[str]()


def kinds() -> str:
    """The kinds of files that can be read, for error messages."""
    return ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))


def as_image(value: Any, name: str = "image") -> Image.Image:
    """A PIL image, a path, the bytes of a file, or raw pixels as RGB. Raw pixels are whole
    numbers 0-255, [H, W], [H, W, 3] or [3, H, W], or floating-point numbers 0-1, [H, W, 3]."""
    if isinstance(value, Image.Image):
        _check_size(name, value, MAX_PIXELS)
        return as_rgb(name, value)
    if isinstance(value, str | Path):
        return read_image(value)
    if isinstance(value, bytes):
        return decode_image(value, name)
    pixels = as_array(value)
    if pixels is None:
        raise BadImage(
            f"{name}: {type(value).__name__}",
            "expected a PIL image, a path, bytes of a file, or pixels",
            "for samples of a dataset use sc.data.to_batch(model, samples)",
        )
    image = Image.fromarray(_eight_bits(name, pixels))
    _check_size(name, image, MAX_PIXELS)
    return as_rgb(name, image)


def as_array(value: Any) -> np.ndarray | None:
    """An array, or a tensor as one; None for anything else. Torch is not needed to tell."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "detach"):
        return None
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def _eight_bits(name: str, pixels: np.ndarray) -> np.ndarray:
    """Raw pixels as [H, W] or [H, W, 3 or 4] uint8; raises if they are not valid."""
    what, whole = f"{name}: {pixels.dtype} {list(pixels.shape)}", pixels.dtype.kind in "ui"
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    flat = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if not flat or not pixels.size or not (whole or pixels.dtype.kind == "f"):
        raise BadImage(what, "expected pixels [H, W, 3], [3, H, W] or [H, W]", "check the axes")
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= (255 if whole else 1)):
        raise BadImage(
            what,
            f"its values reach from {low:g} to {high:g}",
            "give whole numbers 0-255, floating-point numbers 0-1, or, if they are normalised"
            " already, a tensor [B, 3, H, W]",
        )
    return np.ascontiguousarray(pixels if whole else (pixels * 255).round()).astype(np.uint8)
