"""Where the image tokens of a vision-language model come from in the image.

LLaVA-1.5, VipLLaVA, Gemma 3,    one grid
PaliGemma
LLaVA-NeXT, LLaVA-OneVision      a grid of the whole image, then a finer one whose rows end with a
                                 newline token
InternVL, Idefics 3, SmolVLM     tiles, then a grid of the whole image, for each image
Ovis 2                           a grid of the whole image, then tiles, for each image
Qwen2-VL ..., GLM-4V             one grid of merged patches, of the image's own shape, for each
                                 image or frame
Pixtral, Mistral 3               one grid whose rows end with a break, but the last

What else stands between the first image token and the last (row and tile marks, words between two
images) has seen a part of the image, so it belongs to the image, without a place in it. The
marks of Idefics 3 and Ovis 2 also say which image a tile is of, and where it lies in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from seecause.errors import UnsupportedModel

# top, left, bottom, right, in shares of the image's height and width
Box = tuple[float, float, float, float]
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Grid:
    """rows x columns tokens, row by row; with `newline`, each row ends with one token more that
    belongs to no place. No box: no place at all."""

    rows: int
    columns: int
    box: Box | None = WHOLE
    newline: bool = False
    image: int = 0  # which image or frame it shows, where there are several

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
    """All image tokens of a prompt, in order. Two images with equal `parts` have comparable
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
        shows the image; newlines are left out."""
        shown = []
        pieces = values.split([part.tokens for part in self.parts], dim=-1)
        for part, piece in zip(self.parts, pieces, strict=True):
            if part.box is not None:
                grid = piece.unflatten(-1, (part.rows, part.columns + part.newline))
                shown.append((part, grid[..., : part.columns]))
        return shown

    def boxes(self) -> Tensor:
        """[N, 4]: the box of the image each token stands for; NaN where it stands for none."""
        places = []
        for part in self.parts:
            shape = (part.rows, part.columns + part.newline, 4)
            boxes = torch.full(shape, torch.nan, dtype=torch.float64)
            if part.box is not None:
                top, left, bottom, right = part.box
                high = torch.linspace(top, bottom, part.rows + 1, dtype=boxes.dtype)[:, None]
                wide = torch.linspace(left, right, part.columns + 1, dtype=boxes.dtype)
                ends = torch.broadcast_tensors(high[:-1], wide[:-1], high[1:], wide[1:])
                boxes[:, : part.columns] = torch.stack(ends, dim=-1)
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
    which of them are image tokens. `size` (height, width) of the image and the image processor
    place tiles that have no marks, where there is one image."""
    _refuse_unplaced(config, inputs)
    count = int(places.sum())
    merge = getattr(config.vision_config, "spatial_merge_size", 1)
    if "image_grid_thw" in inputs or "video_grid_thw" in inputs:
        tokens = _frames(config, inputs, merge)
    elif "image_sizes" in inputs and hasattr(config, "image_grid_pinpoints"):
        pairs = (_next(config, image, i) for i, image in enumerate(inputs["image_sizes"]))
        tokens = ImageTokens(tuple(grid for pair in pairs for grid in pair))
    elif "image_sizes" in inputs and hasattr(config.vision_config, "patch_size"):
        step = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
        grids = [(int(high) // step, int(wide) // step) for high, wide in inputs["image_sizes"]]
        tokens = ImageTokens(tuple(Grid(*g, image=i) for i, g in enumerate(grids)))
    elif hasattr(config, "mm_tokens_per_image"):
        side = math.isqrt(config.mm_tokens_per_image)
        many = range(count // max(1, side**2))
        tokens = ImageTokens(tuple(Grid(side, side, image=i) for i in many))
    elif hasattr(config, "downsample_ratio"):
        tokens = _tiles(config, places.tolist(), size, tiling)
    elif hasattr(config, "scale_factor") and "pixel_values" in inputs:
        tokens = _split(config, inputs["input_ids"][0].tolist(), size, tiling)
    elif hasattr(config, "visual_indicator_token_ids"):
        tokens = _ovis(config, inputs["input_ids"][0].tolist())
    else:
        tokens = _one(config, count)
    if tokens.count != count:
        raise UnsupportedModel(
            type(config).__name__,
            f"{count} image tokens do not make {tokens}, so their places are unknown",
        )
    return _interleaved(config, tokens, places.tolist())


def _refuse_unplaced(config: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse images and frames whose tokens have unknown places."""
    if inputs.get("pixel_values_videos") is not None and "video_grid_thw" not in inputs:
        raise UnsupportedModel(
            type(config).__name__, "the places of its video tokens are not known", "give images"
        )
    together = inputs.get("batch_num_images")  # of LLaVA-OneVision
    if together is not None and int(torch.as_tensor(together).max()) > 1:
        raise UnsupportedModel(
            type(config).__name__,
            "several images of one prompt are padded to squares, so the places of their tokens"
            " are not known",
            "give one image",
        )


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


def _frames(config: Any, inputs: Mapping[str, Any], merge: int) -> ImageTokens:
    """A grid for each image, and for each frame of a video, in the order of the sequence."""
    waiting = {
        kind: [
            Grid(rows // merge, columns // merge)
            for frames, rows, columns in (n.tolist() for n in inputs.get(f"{kind}_grid_thw", ()))
            for _ in range(frames)
        ]
        for kind in ("image", "video")
    }
    if not waiting["image"] or not waiting["video"]:  # GLM-4V writes image tokens for videos too
        parts = waiting["image"] + waiting["video"]
    else:
        parts, left = [], dict.fromkeys(waiting, 0)  # tokens that the kind's last grid still lacks
        kinds = {config.image_token_id: "image", config.video_token_id: "video"}
        for kind in (kinds.get(i) for i in inputs["input_ids"][0].tolist()):
            if kind is not None and not left[kind] and waiting[kind]:
                parts.append(waiting[kind].pop(0))
                left[kind] = parts[-1].tokens
            if kind is not None:
                left[kind] -= 1
    return ImageTokens(tuple(replace(part, image=i) for i, part in enumerate(parts)))


def _side(config: Any) -> int:
    size, patch = config.vision_config.image_size, config.vision_config.patch_size
    size, patch = (side if isinstance(side, int) else side[0] for side in (size, patch))
    return size // patch


def _one(config: Any, count: int) -> ImageTokens:
    side = _side(config)
    if count == side**2 + 1:  # "full" keeps the class token
        return ImageTokens((Grid(1, 1, box=None), Grid(side, side)))
    many = range(max(1, count // side**2))
    return ImageTokens(tuple(Grid(side, side, image=index) for index in many))


def _next(config: Any, size: Tensor, image: int) -> tuple[Grid, Grid]:
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
    return Grid(side, side, image=image), Grid(rows, columns, newline=True, image=image)


def _tiles(
    config: Any, places: list[bool], size: tuple[int, int] | None, tiling: Any
) -> ImageTokens:
    """InternVL's tiles row by row, then the whole image; marks stand between images and frames.
    Without the image's size the tiles have no known place."""
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    side = int(_side(config) * config.downsample_ratio)
    runs = [len(list(run)) for is_image, run in groupby(places) if is_image]
    columns = rows = 0
    if size is not None and tiling is not None and len(runs) == 1:
        shape = (tiling.size["height"], tiling.size["width"])
        columns, rows = get_optimal_tiled_canvas(
            size, shape, tiling.min_patches, tiling.max_patches
        )
    parts: list[Grid] = []
    for image, length in enumerate(runs):
        parts += _known(side, length // side**2 - 1, (rows, columns), image)
        parts.append(Grid(side, side, image=image))
    return ImageTokens(tuple(parts))


def _gaps(ids: list[int], image: int) -> list[list[int]]:
    """What stands before each run of image tokens, and behind the last."""
    gaps: list[list[int]] = [[]]
    for before, token in pairwise([-1, *ids]):
        if token != image:
            if before == image:
                gaps.append([])
            gaps[-1].append(token)
    return gaps


def _split(config: Any, ids: list[int], size: tuple[int, int] | None, tiling: Any) -> ImageTokens:
    """The tiles of Idefics 3 row by row, then the whole image. A fence stands before the mark of
    every view and behind an image, a line's end behind each row of tiles; all whole images have
    the same mark."""
    *gaps, behind = _gaps(ids, config.image_token_id)
    fence = behind[0]
    images: list[list[bool | None]] = [[]]
    for gap in gaps:
        if _after_last(gap, fence) != _after_last(gaps[-1], fence):
            begins = fence in gap and (not images[-1] or gap[0] != fence)
            images[-1].append(begins)
            continue
        if gap[:1] == [fence]:  # no line's end behind the tiles: the tokenizer keeps none
            images[-1] = [False] * len(images[-1])
        images[-1].append(None)
        images.append([])
    shape = (0, 0)
    if size is not None and tiling is not None and len(images) == 2:
        shape = tiling.get_number_of_image_patches(*size, {})[1:]  # optional since 5.9
    return ImageTokens(_views(_side(config) // config.scale_factor, images[:-1], shape))


def _after_last(ids: list[int], mark: int) -> list[int]:
    return ids[len(ids) - ids[::-1].index(mark) :] if mark in ids else ids


def _ovis(config: Any, ids: list[int]) -> ImageTokens:
    """The whole image, then the tiles of Ovis 2 row by row, after marks of their own."""
    start, first, _, row, _ = config.visual_indicator_token_ids
    images: list[list[bool | None]] = []
    for gap in _gaps(ids, config.image_token_id)[:-1]:
        if not images or start in gap:
            images.append([None])
        else:
            images[-1].append(first in gap or row in gap)
    side = _side(config) // config.vision_config.hidden_stride
    return ImageTokens(_views(side, images))


def _views(
    side: int, images: list[list[bool | None]], shape: tuple[int, int] = (0, 0)
) -> tuple[Grid, ...]:
    """Grids of the views of images: None is the whole image, the others are tiles and say
    whether they begin a row. `shape`: rows and columns where they do not."""
    parts: list[Grid] = []
    for image, begins in enumerate(images):
        starts = [begin for begin in begins if begin is not None]
        columns = len(starts) // max(1, sum(starts))
        even = any(starts) and starts == [i % columns == 0 for i in range(len(starts))]
        known = (sum(starts), columns) if even else (0, 0) if any(starts) else shape
        tiles = _known(side, len(starts), known, image)
        tiles.insert(begins.index(None), Grid(side, side, image=image))
        parts += tiles
    return tuple(parts)


def _known(side: int, tiles: int, shape: tuple[int, int], image: int) -> list[Grid]:
    """Tiles in rows and columns, row by row; without a place where these are not known."""
    rows, columns = shape
    if rows * columns != tiles:
        return [Grid(side, side, box=None, image=image) for _ in range(tiles)]
    return [
        Grid(side, side, (r / rows, c / columns, (r + 1) / rows, (c + 1) / columns), False, image)
        for r in range(rows)
        for c in range(columns)
    ]
