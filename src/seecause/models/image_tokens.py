"""Where the image tokens of a vision-language model come from in the picture.

LLaVA-1.5       one grid
LLaVA-NeXT      a grid of the whole picture, then a finer one whose rows end with a newline token
InternVL        tiles, then a grid of the whole picture
Qwen2-VL ...    one grid of merged patches, of the picture's own shape
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

    @property
    def tokens(self) -> int:
        return self.rows * (self.columns + self.newline)


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
    count: int,
    size: tuple[int, int] | None = None,
    tiling: Any = None,
) -> ImageTokens:
    """The `count` image tokens of native inputs. `size` (height, width) of the picture and the
    image processor place InternVL's tiles."""
    if "image_grid_thw" in inputs:
        _, rows, columns = (
            int(n) // (config.vision_config.spatial_merge_size if i else 1)
            for i, n in enumerate(inputs["image_grid_thw"][0])
        )
        tokens = ImageTokens((Grid(rows, columns),))
    elif "image_sizes" in inputs and hasattr(config, "image_grid_pinpoints"):
        tokens = _next(config, inputs["image_sizes"][0])
    elif hasattr(config, "downsample_ratio"):
        tokens = _tiles(config, count, size, tiling)
    else:
        tokens = _one(config, count)
    if tokens.count != count:
        raise UnsupportedModel(
            type(config).__name__,
            f"{count} image tokens do not make {tokens}, so their places are unknown",
        )
    return tokens


def _side(config: Any) -> int:
    size, patch = config.vision_config.image_size, config.vision_config.patch_size
    return (size if isinstance(size, int) else size[0]) // (
        patch if isinstance(patch, int) else patch[0]
    )


def _one(config: Any, count: int) -> ImageTokens:
    side = _side(config)
    grid = Grid(side, side)
    return ImageTokens(
        (Grid(1, 1, box=None), grid) if count == grid.tokens + 1 else (grid,)
    )  # "full" keeps the class token


def _next(config: Any, size: Tensor) -> ImageTokens:
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
    return ImageTokens((Grid(side, side), Grid(rows, columns, newline=True)))


def _tiles(config: Any, count: int, size: tuple[int, int] | None, tiling: Any) -> ImageTokens:
    """InternVL's tiles row by row, then the whole picture. Without the picture's size the tiles
    have no known place."""
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    side = int(_side(config) * config.downsample_ratio)
    tiles = count // side**2 - 1
    whole = Grid(side, side)
    if tiles < 1:
        return ImageTokens((whole,))
    if size is None or tiling is None:
        return ImageTokens((*(Grid(side, side, box=None) for _ in range(tiles)), whole))
    columns, rows = get_optimal_tiled_canvas(
        size, (tiling.size["height"], tiling.size["width"]), tiling.min_patches, tiling.max_patches
    )
    places = [
        (r / rows, c / columns, (r + 1) / rows, (c + 1) / columns)
        for r in range(rows)
        for c in range(columns)
    ]
    return ImageTokens((*(Grid(side, side, box=place) for place in places), whole))
