"""Inputs that are no pictures, as pictures: sound as its spectrogram, film as a strip of frames, a
bag of instances as one column.

    sound   [1, time, frequency]            log-mel energies, as AST's feature extractor makes them
    film    [3 * tubelet, times * H, W]     tubelets one below the other: the frames of a tubelet
                                            are channels, so a patch of pixels is one tubelet
    bag     [D, N, 1]                       instances one below the other, features are channels

Everything that is done with pictures (blanks, patches, metrics) is then done with them.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from seecause._pictures import (
    SUFFIXES,
    as_array,
    check_file,
    even_places,
    first_line,
    read_frames,
)
from seecause.errors import BadImage
from seecause.files import digest
from seecause.models.preprocess import Preprocess

log = logging.getLogger(__name__)

SILENCE, LOUD = -15.942385, 10.0  # log-mel energies: the extractor's floor, and a full-scale tone
HOP = 0.01  # seconds from one row of a spectrogram to the next
SHORTEST = 0.025  # seconds: what one row is made of
PROBED = 12  # instances of the bags that the wrap compares
KEPT = ("int16", "int32", "uint8")  # whole numbers as WAV files keep samples, on their full scale


@dataclass(frozen=True)
class Spectrogram(Preprocess):
    """Sound -> [1, 1, time, frequency]. `mean` and `std` are those of log-mel energies, as the
    extractor has them (it divides by 2 std); raw values run from silence, 0, to a full tone, 1."""

    rate: int = 16_000

    kind: ClassVar[str] = "spectrogram"
    defaults: ClassVar[Mapping[str, Any]] = {"blank": "mean"}

    @classmethod
    def of_extractor(cls, config: Mapping[str, Any]) -> Spectrogram:
        """As the config of an `ASTFeatureExtractor` says (`preprocessor_config.json`)."""
        normalises = config.get("do_normalize", True)
        return cls(
            size=(config.get("max_length", 1024), config.get("num_mel_bins", 128)),
            mean=(config.get("mean", -4.2677393) if normalises else 0.0,),
            std=(config.get("std", 4.5689974) if normalises else 0.5,),
            rate=config.get("sampling_rate", 16_000),
        )

    def geometry(self) -> str:
        seconds = self.size[0] * HOP
        return f"{seconds:.4g} s of sound at {self.rate} Hz, {self.size[1]} mel bands"

    def __call__(self, image: Any) -> Tensor:
        """A WAV file, or mono samples [n] at `rate`, -1 to 1."""
        wave = _read_wave(image, self.rate) if isinstance(image, str | Path) else _as_wave(image)
        if len(wave) < SHORTEST * self.rate:
            raise BadImage(
                f"{len(wave)} samples at {self.rate} Hz", "too short", "give 25 ms of sound or more"
            )
        if len(wave) > self.size[0] * HOP * self.rate + self.rate * HOP:
            seconds = len(wave) / self.rate
            log.warning("only the first %.4g of %.4g s are heard", self.size[0] * HOP, seconds)
        heard = _extractor(self)(wave, sampling_rate=self.rate, return_tensors="np")
        return torch.from_numpy(np.asarray(heard["input_values"], np.float32))[:, None]

    def unpacked(self, value: Any) -> Any:
        """Spectrograms [time, frequency] or [B, time, frequency] as the extractor gives them, or
        samples [n], as [B, 1, time, frequency]."""
        if not isinstance(value, Tensor | np.ndarray) or value.ndim > 3:
            return value
        array: Any = value
        if array.ndim == 1:
            return self(array)
        if tuple(array.shape[-2:]) != self.size:
            return value
        return torch.as_tensor(array).reshape(-1, 1, *self.size)

    def drawn(self, values: Tensor, axis: int) -> Tensor:
        """Time to the right, frequency upwards."""
        return values.transpose(axis, axis + 1).flip(axis)

    def _stats(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = super()._stats(like)
        return (mean - SILENCE) / (LOUD - SILENCE), 2 * std / (LOUD - SILENCE)


@lru_cache(maxsize=4)
def _extractor(steps: Spectrogram) -> Any:
    from transformers import ASTFeatureExtractor

    return ASTFeatureExtractor(
        sampling_rate=steps.rate, num_mel_bins=steps.size[1], max_length=steps.size[0],
        mean=steps.mean[0], std=steps.std[0],
    )  # fmt: skip


def _read_wave(path: str | Path, rate: int) -> np.ndarray:
    """Samples of a WAV file, mono, float32 in [-1, 1], at `rate`."""
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    check_file(Path(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # chunks that are no samples
            own, samples = wavfile.read(path)
    except (ValueError, EOFError, OSError, KeyError, TypeError) as broken:
        raise BadImage(
            str(path),
            f"not a WAV file that can be read ({first_line(broken)})",
            "convert it: ffmpeg -i SOUND sound.wav",
        ) from broken
    wave = _as_wave(samples.mean(axis=1) if samples.ndim == 2 else samples, samples.dtype)
    if own != rate:
        wave = resample_poly(wave, rate, own).astype(np.float32)
    return wave


def _as_wave(samples: Any, dtype: np.dtype | None = None) -> np.ndarray:
    """[n] float32 in [-1, 1], of samples that files keep as `dtype`."""
    wave = as_array(samples)
    if wave is None or wave.ndim != 1 or wave.dtype.kind not in "iuf":
        shape = "" if wave is None else f" {list(wave.shape)}"
        raise BadImage(
            f"{type(samples).__name__}{shape}",
            "expected sound",
            "give a WAV file, samples [n], or what the feature extractor makes of them",
        )
    kind = wave.dtype if dtype is None else dtype
    if kind.kind in "iu" and kind not in KEPT:
        raise BadImage(
            f"samples of {kind}",
            "how loud the loudest is cannot be told",
            "give int16 or int32, uint8 around 128, or floating-point numbers from -1 to 1",
        )
    scaled = wave.astype(np.float64)
    if kind.kind == "u":  # 8 bits, around 128
        scaled = (scaled - 128) / 128
    elif kind.kind == "i":
        scaled /= -float(np.iinfo(kind).min)
    if not np.isfinite(scaled).all():
        raise BadImage(f"{len(scaled)} samples", "not all of them are finite", "give intact sound")
    return scaled.astype(np.float32)


@dataclass(frozen=True)
class Film(Preprocess):
    """Frames -> [1, 3 * tubelet, times * H, W]; of more frames than the model reads, as many at
    even distances. `size`, `mean` and `std` are those of the strip."""

    frames: int = 16
    tubelet: int = 2

    kind: ClassVar[str] = "film"

    @classmethod
    def of_frame(cls, steps: Preprocess, *, high: int, frames: int, tubelet: int) -> Film:
        """Of the preprocessing of one frame, `high` pixels high."""
        if isinstance(steps, Film):
            return steps
        known = {f.name: getattr(steps, f.name) for f in fields(Preprocess)}
        known |= {"size": (high * frames // tubelet, steps.size[1])}
        known |= {name: known[name] * tubelet for name in ("mean", "std")}
        return cls(**known, frames=frames, tubelet=tubelet)

    @property
    def times(self) -> int:
        return self.frames // self.tubelet

    @property
    def frame(self) -> Preprocess:
        """The preprocessing of one frame."""
        known = {f.name: getattr(self, f.name) for f in fields(Preprocess)}
        known |= {"size": (self.size[0] // self.times, self.size[1])}
        known |= {name: known[name][: len(self.mean) // self.tubelet] for name in ("mean", "std")}
        return Preprocess(**known)

    def geometry(self) -> str:
        return f"{self.frames} frames of {self.frame.geometry()}"

    def __call__(self, image: Any) -> Tensor:
        """A folder of frames, an animated GIF or WebP, a .npy file, a list of pictures, or pixels
        [T, H, W, 3]."""
        pictures, frame = _read_film(image, self.frames), self.frame
        return self._folded(torch.cat([frame(picture) for picture in pictures])[None])

    def unpacked(self, value: Any) -> Any:
        """Frames [B, T, 3, H, W] as the processor gives them, or one film, as strips
        [B, 3 * tubelet, times * H, W]."""
        if isinstance(value, list | tuple) and value and all(map(_is_frame, value)):
            return self(value)
        if not isinstance(value, Tensor | np.ndarray) or value.ndim not in (4, 5):
            return value
        array: Any = value
        if tuple(array.shape[-3:]) == (len(self.mean), *self.size):
            return value
        array = array if array.ndim == 5 else array[None]
        side = (len(self.mean) // self.tubelet, self.size[0] // self.times, self.size[1])
        tensor = torch.as_tensor(array)
        if tensor.is_floating_point() and tuple(tensor.shape[1:]) == (self.frames, *side):
            return self._folded(tensor)
        return torch.cat([self(film) for film in array])

    def _folded(self, frames: Tensor) -> Tensor:
        """[B, T, 3, H, W] -> [B, 3 * tubelet, times * H, W]."""
        tubelets = frames.unflatten(1, (self.times, self.tubelet))  # [B, t, tubelet, 3, H, W]
        return tubelets.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)

    def unfolded(self, strips: Tensor) -> Tensor:
        """[B, 3 * tubelet, times * H, W] -> [B, T, 3, H, W], as the native model takes it."""
        tubelets = strips.unflatten(2, (self.times, -1)).unflatten(1, (self.tubelet, -1))
        return tubelets.permute(0, 3, 1, 2, 4, 5).flatten(1, 2)

    def inputs(self, files: Sequence[str]) -> list[str]:
        """Frames by the folder they lie in; files that are films stay."""
        films = [f if Path(f).suffix.lower() in FILMS else str(Path(f).parent) for f in files]
        return list(dict.fromkeys(films))

    def shown(self, images: Tensor) -> Tensor:
        """The first frame of each tubelet."""
        return super().shown(images)[:, : len(self.mean) // self.tubelet]

    def drawn(self, values: Tensor, axis: int) -> Tensor:
        """Frames in a row."""
        apart = values.unflatten(axis, (self.times, -1))
        return apart.movedim(axis, axis + 1).flatten(axis + 1, axis + 2)


def _read_film(film: Any, count: int) -> list[Any]:
    """`count` frames of a film at even distances, each what `as_picture` takes."""
    if isinstance(film, str | Path):
        film = _film_file(Path(film), count)
    frames = film if isinstance(film, list | tuple) else as_array(film)
    if frames is None or (isinstance(frames, np.ndarray) and frames.ndim != 4):
        what = type(film).__name__ if frames is None else f"pixels {list(frames.shape)}"
        raise BadImage(
            what,
            "expected a film",
            "give a folder of frames, an animated GIF or WebP, a .npy file, or pixels [T, H, W, 3]",
        )
    if len(frames) < count:
        raise BadImage(f"a film of {len(frames)} frames", f"this model reads {count}", "give more")
    return [frames[place] for place in even_places(len(frames), count)]


def _film_file(path: Path, count: int) -> Any:
    """A folder's pictures, or the frames that a file holds."""
    if path.is_dir():
        inside = [p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file()]
        return sorted(inside, key=lambda p: _counted(p.name))
    check_file(path)
    if path.suffix.lower() == ".npy":
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as broken:
            raise BadImage(
                str(path), f"no array can be read ({first_line(broken)})", "give an intact file"
            ) from broken
    if path.suffix.lower() in FILMS:
        return read_frames(path, count)
    raise BadImage(
        str(path),
        "video files are not decoded here",
        "write its frames into a folder: ffmpeg -i FILM frames/%04d.png",
    )


def _counted(name: str) -> list[tuple[int, str]]:
    """Frame 10 comes behind frame 9."""
    pieces = re.split(r"(\d+)", name)
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in pieces]


def _is_frame(value: Any) -> bool:
    """Whether something in a list is one picture, not a film."""
    if isinstance(value, str | Path):
        return Path(value).suffix.lower() in SUFFIXES - FILMS
    return isinstance(value, Image.Image | bytes) or getattr(value, "ndim", 0) in (2, 3)


FILMS = frozenset({".gif", ".webp", ".npy"})


@dataclass(frozen=True)
class BagSteps(Preprocess):
    """Features [N, D] -> [1, D, N, 1]. `mean` is the instance that says nothing."""

    kind: ClassVar[str] = "bag"
    bounded: ClassVar[bool] = False
    to_one_size: ClassVar[str] = "give bags of different length one by one"
    # instances have no neighbours
    defaults: ClassVar[Mapping[str, Any]] = {"blank": "mean", "select": "none", "law": "iid"}

    @classmethod
    def of_width(cls, width: int, nothing: Sequence[float] = ()) -> BagSteps:
        """For instances of so many features."""
        count = PROBED + (width == PROBED)  # or rows and features could be taken for each other
        return cls((count, 1), tuple(nothing) or (0.0,) * width, (1.0,) * width)

    def geometry(self) -> str:
        return f"bags of instances with {len(self.mean)} features"

    def record(self) -> dict[str, Any]:
        """Without a list of features."""
        return {"kind": self.kind, "features": len(self.mean), "blank": digest(repr(self.mean))}

    def unpacked(self, value: Any) -> Any:
        """One bag [N, D], or bags of one size [B, N, D]."""
        if not isinstance(value, Tensor | np.ndarray) or value.ndim not in (2, 3):
            return value
        value = torch.as_tensor(value)
        if value.shape[-1] != len(self.mean):
            raise BadImage(
                f"a bag of shape {list(value.shape)}",
                f"expected features [N, {len(self.mean)}]",
                "give one row for each instance",
            )
        bags = value if value.ndim == 3 else value[None]
        return self.normalise(bags.transpose(1, 2)[..., None])

    def shown(self, images: Tensor) -> Tensor:
        """Instances have no colour."""
        return torch.full((len(images), 3, *images.shape[-2:]), 0.5)

    def drawn(self, values: Tensor, axis: int) -> Tensor:
        """Instances row by row, in a square."""
        count = values.shape[axis]
        side = math.ceil(count**0.5)
        padded = F.pad(values.squeeze(axis + 1).movedim(axis, -1), (0, side * side - count))
        return padded.unflatten(-1, (side, side)).movedim((-2, -1), (axis, axis + 1))
