"""One picture with everything that is known about it, whatever dataset it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

IGNORE = 255  # in integer masks: neither object nor background


@dataclass(frozen=True)
class Sample:
    """Loaders yield these, so metrics and methods need to know no dataset.

    Pictures have their own size; `to_batch` brings them and their masks into a model's frame. A
    field a dataset cannot fill is None; it is never guessed.
    """

    image: Tensor  # [3, H, W] float32, raw pixels in [0, 1], not normalised
    label: int | None
    group: tuple[int, int] | None = (
        None  # (foreground code, background code): what a shortcut confuses, such as bird and place
    )
    mask: Tensor | None = (
        None  # [H, W] bool, True on the object; or integers: 1 object, 0 background, IGNORE neither
    )
    parts: Tensor | None = None  # [H, W] uint8: 0 background, 1 body, 2.. parts
    box: tuple[float, float, float, float] | None = (
        None  # x, y, width, height of the object, in pixels
    )
    points: Tensor | None = (
        None  # [P, 3] float32: x, y of each key point in pixels, and 1 where it is visible
    )
    id: str = ""
