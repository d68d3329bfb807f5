"""Films as images: a strip of frames [3 * tubelet, times * H, W].

Tubelets stand one below the other, and the frames of a tubelet are channels, so a patch of pixels
is one tubelet. Blanks, patches and metrics then work as for images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
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
from seecause.models.preprocess import Preprocess

FILMS = frozenset({".gif", ".webp", ".npy"})


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
        """One film as a strip: a folder of frames, an animated GIF or WebP, a .npy file, a list of
        images, or pixels [T, H, W, 3]."""
        frame = self.frame
        return self._folded(torch.cat([frame(f) for f in _read_film(image, self.frames)])[None])

    def unpacked(self, value: Any) -> Any:
        """Frames [B, T, 3, H, W] as the processor returns them, or one film, as strips
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
        """Films among files: a frame stands for the folder it lies in."""
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
    """`count` evenly spaced frames of a film, each in a form that `as_picture` takes."""
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
    """The images of a folder, or the frames of a file."""
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
        "video files are not decoded",
        "write its frames into a folder: ffmpeg -i FILM frames/%04d.png",
    )


def _counted(name: str) -> list[tuple[int, str]]:
    """A sorting key that puts frame 10 after frame 9."""
    pieces = re.split(r"(\d+)", name)
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in pieces]


def _is_frame(value: Any) -> bool:
    """Whether an item of a list is one image, not a film."""
    if isinstance(value, str | Path):
        return Path(value).suffix.lower() in SUFFIXES - FILMS
    return isinstance(value, Image.Image | bytes) or getattr(value, "ndim", 0) in (2, 3)
