"""Where the image tokens of a vision-language model come from in the picture.

LLaVA-1.5, VipLLaVA, Gemma 3     one grid
LLaVA-NeXT, LLaVA-OneVision      a grid of the whole picture, then a finer one whose rows end with a
                                 newline token
InternVL, Idefics 3, SmolVLM     tiles, then a grid of the whole picture
Ovis 2                           a grid of the whole picture, then tiles
Qwen2-VL ..., GLM-4V             one grid of merged patches, of the picture's own shape, for each
                                 picture or frame
Pixtral, Mistral 3               one grid whose rows end with a break, but the last

What else stands between the first image token and the last (row and tile marks, words between two
pictures) has seen a part of the picture, so it belongs to the picture, without a place in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from seecause.errors import UnsupportedModel

Box = tuple[
    float, float, float, float
]  # top, left, bottom, right, in shares of the picture's height and width
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Grid:
    """rows x columns tokens, row by row; with `newline`, each row ends with one token more that
    belongs to no place. No box: no place at all."""

    rows: int
    columns: int
    box: Box | None = WHOLE
    newline: bool = False
    picture: int = 0  # which picture or frame it shows, where there are several

    @property
    def tokens(self) -> int:
        return self.rows * (self.columns + self.newline)

    def cut(self, rows: int) -> tuple[Grid, Grid]:
        """The first rows, and the others."""
        upper, lower = replace(self, rows=rows), replace(self, rows=self.rows - rows)
        if self.box is None:
            return upper, lower
        top, left, bottom, right = self.box
        middle = top + (bottom - top) * rows / self.rows
        return (
            replace(upper, box=(top, left, middle, right)),
            replace(lower, box=(middle, left, bottom, right)),
        )


@dataclass(frozen=True)
class ImageTokens:
    """All image tokens of a prompt, in order. Two pictures with equal `parts` have comparable
    tokens."""

    parts: tuple[Grid, ...]

    @property
    def count(self) -> int:
        return sum(part.tokens for part in self.parts)

    def __str__(self) -> str:
        return " + ".join(
            f"{part.rows} x {part.columns}{' with newlines' if part.newline else ''}"
            for part in self.parts
        )

    def maps(self, values: Tensor) -> list[tuple[Grid, Tensor]]:
        """Values [..., N] of image tokens as maps [..., rows, columns], one for each grid that
        shows the picture; newlines are left out."""
        shown = []
        for part, piece in zip(
            self.parts, values.split([part.tokens for part in self.parts], dim=-1), strict=True
        ):
            if part.box is not None:
                shown.append(
                    (
                        part,
                        piece.unflatten(-1, (part.rows, part.columns + part.newline))[
                            ..., : part.columns
                        ],
                    )
                )
        return shown

    def boxes(self) -> Tensor:
        """[N, 4]: the box of the picture each token stands for; NaN where it stands for none."""
        places = []
        for part in self.parts:
            boxes = torch.full(
                (part.rows, part.columns + part.newline, 4), torch.nan, dtype=torch.float64
            )
            if part.box is not None:
                top, left, bottom, right = part.box
                high, wide = (
                    torch.linspace(top, bottom, part.rows + 1).double(),
                    torch.linspace(left, right, part.columns + 1).double(),
                )
                boxes[:, : part.columns, 0], boxes[:, : part.columns, 2] = (
                    high[:-1, None],
                    high[1:, None],
                )
                boxes[:, : part.columns, 1], boxes[:, : part.columns, 3] = (
                    wide[None, :-1],
                    wide[None, 1:],
                )
            places.append(boxes.flatten(0, 1))
        return torch.cat(places)


def image_tokens(
    config: Any,
    inputs: Mapping[str, Any],
    places: Tensor,
    size: tuple[int, int] | None = None,
    tiling: Any = None,
) -> ImageTokens:
    """The tokens of native inputs from the first image token to the last; `places` [N] bool says
    which of them are image tokens. `size` (height, width) of the picture and the image processor
    place tiles."""
    count = int(places.sum())
    merge = getattr(config.vision_config, "spatial_merge_size", 1)
    if "image_grid_thw" in inputs or "video_grid_thw" in inputs:
        tokens = _frames(inputs, merge)
    elif "image_sizes" in inputs and hasattr(config, "image_grid_pinpoints"):
        pairs = (_next(config, picture, i) for i, picture in enumerate(inputs["image_sizes"]))
        tokens = ImageTokens(tuple(grid for pair in pairs for grid in pair))
    elif "image_sizes" in inputs and hasattr(config.vision_config, "patch_size"):
        step = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
        grids = [(int(high) // step, int(wide) // step) for high, wide in inputs["image_sizes"]]
        tokens = ImageTokens(tuple(Grid(*g, picture=i) for i, g in enumerate(grids)))
    elif hasattr(config, "mm_tokens_per_image"):
        side = math.isqrt(config.mm_tokens_per_image)
        many = range(count // max(1, side**2))
        tokens = ImageTokens(tuple(Grid(side, side, picture=i) for i in many))
    elif hasattr(config, "downsample_ratio"):
        tokens = _tiles(config, count, size, tiling)
    elif hasattr(config, "scale_factor") and "pixel_values" in inputs:
        tokens = _split(config, count, size, tiling)
    elif hasattr(config, "visual_indicator_token_ids"):
        tokens = _ovis(config, count, size, tiling)
    else:
        tokens = _one(config, count)
    if tokens.count != count:
        raise UnsupportedModel(
            type(config).__name__,
            f"{count} image tokens do not make {tokens}, so their places are unknown",
        )
    return _interleaved(config, tokens, places.tolist())


def _interleaved(config: Any, tokens: ImageTokens, places: list[bool]) -> ImageTokens:
    """Grids with what stands between them. A grid that is cut is cut at its rows; where one mark
    ends each of its rows but the last, these are its newlines."""
    parts: list[Grid] = []
    rest = list(tokens.parts)
    for is_image, run in groupby(places):
        length = len(list(run))
        if not is_image:
            parts.append(Grid(1, length, box=None))
        while is_image and length:
            part = rest.pop(0)
            if part.tokens > length:
                rows, over = divmod(length, part.columns + part.newline)
                if over or not rows:
                    raise UnsupportedModel(
                        type(config).__name__, f"marks stand inside the rows of {part}"
                    )
                part, lower = part.cut(rows)
                rest.insert(0, lower)
            parts.append(part)
            length -= part.tokens
    return ImageTokens(_with_newlines(parts))


def _with_newlines(parts: list[Grid]) -> tuple[Grid, ...]:
    """A row, a mark, a row, a mark ... as one grid with newlines."""
    joined: list[Grid] = []
    for index, part in enumerate(parts):
        mark = part.box is None and part.tokens == 1
        row = joined[-1] if joined else None
        below = parts[index + 1] if index + 1 < len(parts) else None
        if (
            mark and row is not None and below is not None and row.rows == below.rows == 1
            and not row.newline and row.box is not None and below.box is not None
            and row.columns == below.columns and row.box[2] == below.box[0]
        ):  # fmt: skip
            joined[-1] = replace(row, newline=True)
        else:
            joined.append(part)
    stacked: list[Grid] = []
    for part in joined:
        above = stacked[-1] if stacked else None
        if (
            above is not None and above.newline and part.newline and above.box and part.box
            and above.columns == part.columns and above.box[2] == part.box[0]
        ):  # fmt: skip
            top, left, _, right = above.box
            box = (top, left, part.box[2], right)
            stacked[-1] = replace(above, rows=above.rows + part.rows, box=box)
        else:
            stacked.append(part)
    return tuple(stacked)


def _frames(inputs: Mapping[str, Any], merge: int) -> ImageTokens:
    """A grid for each picture, and for each frame of a video."""
    grids: list[Grid] = []
    for name in ("image_grid_thw", "video_grid_thw"):
        for frames, rows, columns in (n.tolist() for n in inputs.get(name, ())):
            for _ in range(frames):
                grids.append(Grid(rows // merge, columns // merge, picture=len(grids)))
    return ImageTokens(tuple(grids))


def _side(config: Any) -> int:
    size, patch = config.vision_config.image_size, config.vision_config.patch_size
    return (size if isinstance(size, int) else size[0]) // (
        patch if isinstance(patch, int) else patch[0]
    )


def _one(config: Any, count: int) -> ImageTokens:
    side = _side(config)
    if count == side**2 + 1:  # "full" keeps the class token
        return ImageTokens((Grid(1, 1, box=None), Grid(side, side)))
    many = range(max(1, count // side**2))
    return ImageTokens(tuple(Grid(side, side, picture=index) for index in many))


def _next(config: Any, size: Tensor, picture: int) -> tuple[Grid, Grid]:
    """LLaVA-NeXT's base view and its tiles put together, without the padding."""
    from transformers.models.llava_next.modeling_llava_next import (
        get_anyres_image_grid_shape,
        unpad_image,
    )

    side = _side(config)
    high, wide = get_anyres_image_grid_shape(
        size.tolist(), config.image_grid_pinpoints, config.vision_config.image_size
    )
    _, rows, columns = unpad_image(torch.empty(1, high * side, wide * side), size.tolist()).shape
    most = str(getattr(config, "vision_aspect_ratio", ""))  # of LLaVA-OneVision: anyres_max_9
    if most.startswith("anyres_max_"):
        ratio = math.sqrt(rows * columns / (int(most.removeprefix("anyres_max_")) * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return Grid(side, side, picture=picture), Grid(rows, columns, newline=True, picture=picture)


def _tiles(config: Any, count: int, size: tuple[int, int] | None, tiling: Any) -> ImageTokens:
    """InternVL's tiles row by row, then the whole picture. Without the picture's size the tiles
    have no known place."""
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    side = int(_side(config) * config.downsample_ratio)
    tiles = count // side**2 - 1
    whole = Grid(side, side)
    if tiles < 1:
        return ImageTokens((whole,))
    columns = rows = 0
    if size is not None and tiling is not None:
        shape = (tiling.size["height"], tiling.size["width"])
        columns, rows = get_optimal_tiled_canvas(
            size, shape, tiling.min_patches, tiling.max_patches
        )
    return ImageTokens((*_known(side, tiles, (rows, columns)), whole))


def _placed(side: int, rows: int, columns: int) -> list[Grid]:
    """Tiles row by row."""
    return [
        Grid(side, side, box=(r / rows, c / columns, (r + 1) / rows, (c + 1) / columns))
        for r in range(rows)
        for c in range(columns)
    ]


def _split(config: Any, count: int, size: tuple[int, int] | None, tiling: Any) -> ImageTokens:
    """The tiles of Idefics 3 row by row, then the whole picture."""
    side = _side(config) // config.scale_factor
    tiles, whole = count // side**2 - 1, Grid(side, side)
    shape = (0, 0)
    if size is not None and tiling is not None and tiles > 0:
        shape = tiling.get_number_of_image_patches(*size)[1:]
    return ImageTokens((*_known(side, tiles, shape), whole))


def _ovis(config: Any, count: int, size: tuple[int, int] | None, tiling: Any) -> ImageTokens:
    """The whole picture, then the tiles of Ovis 2 row by row."""
    from transformers.models.ovis2.image_processing_ovis2 import get_min_tile_covering_grid

    side = _side(config) // config.vision_config.hidden_stride
    tiles, whole = count // side**2 - 1, Grid(side, side)
    shape = (0, 0)
    if size is not None and tiling is not None and tiles > 0:
        columns, rows = get_min_tile_covering_grid(size, tiling.size["height"], tiling.max_patches)
        shape = (rows, columns)
    return ImageTokens((whole, *_known(side, tiles, shape)))


def _known(side: int, tiles: int, shape: tuple[int, int]) -> list[Grid]:
    """Tiles in rows and columns; without a place where these are not known."""
    if shape[0] * shape[1] == tiles:
        return _placed(side, *shape)
    return [Grid(side, side, box=None) for _ in range(tiles)]
