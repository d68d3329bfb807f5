"""Targets of models with many outputs: a box of a detector, a region of pixels.

    Box(3)                          query 3 and its best class
    Box(3, label="cat")             the score of a class
    Box(3, side="left")             where its left side lies, in pixels
    Box(label="cat")                the box that is most surely a cat
    Region((10, 20, 60, 80))        pixels x 10 to 60, y 20 to 80, and the class of most of them
    Region((30, 40), label="sky")   one pixel; to Segment Anything, a prompt
    Region(mask)                    any pixels [H, W]

As text: `box:3`, `box:3:cat`, `box:3:left`, `box:cat`, `region:10,20,60,80`, `region:30,40:sky`.
Pixels are those of the model's frame, the size that `preprocess` gives.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, SupportsIndex, get_args

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.models.preprocess import Preprocess

Side = Literal["left", "top", "right", "bottom", "width", "height"]
SIDES: tuple[str, ...] = get_args(Side)


@dataclass(frozen=True)
class Box:
    """One box of a detector, as the target of `sc.attribute`.

    `index` is its number among the queries (None: the surest one). Explained is its own class,
    another one (`label`), or where one `side` of it lies.

    >>> Box.parse("box:3:left")
    Box(index=3, label=None, side='left')
    """

    index: int | None = None
    label: str | int | None = None
    side: Side | None = None

    def __post_init__(self) -> None:
        if self.index is not None:
            index = whole_number(self.index)
            if index is None:
                raise BadOption("index", self.index, "the number of a query, such as 3")
            object.__setattr__(self, "index", index)
        _need_label(self.label)
        if self.side is not None and self.side not in SIDES:
            raise BadOption("side", self.side, f"one of {', '.join(SIDES)}")
        if self.side is not None and self.label is not None:
            raise BadOption("label", self.label, "None where a side of the box is explained")

    @classmethod
    def parse(cls, text: str) -> Box:
        """`box:INDEX`, `box:INDEX:CLASS or SIDE`, `box:CLASS`."""
        _, first, *rest = text.split(":", 2)
        if not first.isdigit():
            return cls(label=":".join([first, *rest]))
        if rest and rest[0] in SIDES:
            return cls(int(first), side=rest[0])  # pyright: ignore[reportArgumentType]
        return cls(int(first), label=rest[0] if rest else None)

    @property
    def name(self) -> str:
        return "the surest box" if self.index is None else f"box {self.index}"


@dataclass(frozen=True, eq=False)
class Region:
    """Pixels of the image: corners (x0, y0, x1, y1), one place (x, y), a mask [H, W], or None for
    those that the largest class has."""

    where: Sequence[float] | Tensor | None = None
    label: str | int | None = None

    def __post_init__(self) -> None:
        _need_label(self.label)
        where: Any = self.where
        if where is None:
            return
        if getattr(where, "ndim", 1) == 2:  # a mask, of torch or numpy
            object.__setattr__(self, "where", torch.as_tensor(where))
            return
        try:
            numbers = tuple(float(number) for number in where)
        except (TypeError, ValueError):
            numbers = ()
        if len(numbers) not in (2, 4) or not all(map(math.isfinite, numbers)):
            raise BadOption("region", where, "(x, y), (x0, y0, x1, y1) or a mask [H, W]")
        object.__setattr__(self, "where", numbers)

    @classmethod
    def parse(cls, text: str) -> Region:
        """`region:X,Y`, `region:X0,Y0,X1,Y1`, each with `:CLASS` or without."""
        _, corners, *rest = text.split(":", 2)
        try:
            where = tuple(float(number) for number in corners.split(","))
        except ValueError:
            raise BadOption("region", corners, "X,Y or X0,Y0,X1,Y1 in pixels") from None
        return cls(where, rest[0] if rest else None)

    @property
    def corners(self) -> tuple[float, ...] | None:
        """Of a place or a rectangle; None for a mask."""
        if self.where is None or isinstance(self.where, Tensor):
            return None
        return tuple(float(number) for number in self.where)

    def framed(self, steps: Preprocess, height: int, width: int) -> Region:
        """The region of an image of height x width, in the frame of a model's preprocessing
        `steps`; what lies outside of the frame is cut off."""
        if isinstance(self.where, Tensor):
            return Region(steps.mask(self.where.cpu().numpy()), self.label)
        corners = self.corners
        if corners is None:
            return self
        points = steps.points(torch.tensor(corners).view(-1, 2), height, width)
        most = points.new_tensor([steps.size[1], steps.size[0]])
        if len(points) == 1 and not ((points >= 0) & (points < most)).all():
            raise BadOption("region", corners, "a place that the model sees: it was cut away")
        ends = points.clamp(torch.zeros_like(most), most)
        if len(points) == 2:
            ends = torch.stack([ends[0].floor(), ends[1].ceil()])
        return Region(tuple(ends.flatten().tolist()), self.label)

    def mask(self, size: tuple[int, int]) -> Tensor:
        """Its pixels [H, W] in a frame of `size`."""
        if isinstance(self.where, Tensor):
            mask = self.where.detach().cpu() > 0
            if tuple(mask.shape) != tuple(size) or not mask.any():
                shape = f"{int(mask.sum())} pixels of a mask {list(mask.shape)}"
                raise BadOption("region", shape, f"pixels of a mask {list(size)}, at least one")
            return mask
        corners = self.corners
        if corners is None:
            raise BadOption("region", None, "(x, y), (x0, y0, x1, y1) or a mask [H, W]")
        x0, y0 = (int(number) for number in corners[:2])
        x1, y1 = (int(number) for number in corners[2:]) if len(corners) == 4 else (x0 + 1, y0 + 1)
        if not (0 <= x0 < x1 <= size[1] and 0 <= y0 < y1 <= size[0]):
            inside = f"0 <= x0 < x1 <= {size[1]} and 0 <= y0 < y1 <= {size[0]}"
            raise BadOption("region", corners, f"corners in the model's frame: {inside}")
        mask = torch.zeros(size, dtype=torch.bool)
        mask[y0:y1, x0:x1] = True
        return mask


Row = Box | Region


def whole_number(value: Any) -> int | None:
    """A whole number of any library; None for anything else, True and False too."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # tensors and arrays of several numbers have the method, and refuse
        return None


def _need_label(label: Any) -> None:
    if label is not None and not isinstance(label, str) and whole_number(label) is None:
        raise BadOption("label", label, "a class, by name or by index")


def parse_row(spec: Any) -> Row | None:
    """What a target names a row by; None where it names none."""
    if isinstance(spec, str) and spec.startswith("box:"):
        return Box.parse(spec)
    if isinstance(spec, str) and spec.startswith("region:"):
        return Region.parse(spec)
    return spec if isinstance(spec, Box | Region) else None


@dataclass(frozen=True)
class FoundBox:
    """A box that a detector is sure of: its query, class, probability and corners in pixels."""

    index: int
    name: str
    probability: float
    place: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Aim:
    """A row of one image: a view that predicts this row alone, the class that is explained, and the
    pixels it is about, to be drawn."""

    model: Any  # ImageModel
    target: int
    name: str
    pixels: Tensor  # [H, W] bool
    value: float  # of the target, in the run of the image itself
    boxes: Sequence[FoundBox] = ()  # all boxes that a detector is sure of

    @property
    def record(self) -> dict[str, list[Any]]:
        """For manifests: one entry an image."""
        rows, columns = self.pixels.any(dim=1).nonzero(), self.pixels.any(dim=0).nonzero()
        ends = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1] if len(rows) else []
        place = [int(end) for end in ends]
        boxes = [asdict(box) for box in self.boxes]
        return {"row": [self.name], "place": [place], "value": [self.value], "boxes": [boxes]}


def rectangle(corners: Tensor, size: tuple[int, int]) -> Tensor:
    """The pixels [H, W] of a box x0, y0, x1, y1, cut to the frame; a box outside of it has none."""
    x0, y0, x1, y1 = (int(number) for number in corners.round().tolist())
    mask = torch.zeros(size, dtype=torch.bool)
    mask[max(0, y0) : max(0, y1), max(0, x0) : max(0, x1)] = True
    return mask
