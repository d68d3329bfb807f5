"""Parts in colour: which patch belongs to which part, laid over the picture."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import matplotlib.colors
import torch
from PIL import Image
from torch import Tensor

from seecause.data.images import to_pil

SIDE = 192  # pixels of a tile, at least
_ALPHA, _DIM = 0.6, 0.35
_TOLD_APART = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#d55e00",
    "#56b4e9",
    "#f0e442",
    "#999999",
)  # Okabe and Ito, also for the colour-blind


def part_colours(parts: int) -> Tensor:
    """[K, 3] in [0, 1], as far apart as so many can be."""
    if parts <= len(_TOLD_APART):
        return torch.tensor(
            [matplotlib.colors.to_rgb(colour) for colour in _TOLD_APART[:parts]],
            dtype=torch.float32,
        )
    table = matplotlib.colormaps["tab20"]
    return torch.tensor([table(part % table.N)[:3] for part in range(parts)], dtype=torch.float32)


def part_picture(image: Tensor, maps: Tensor, removed: Sequence[int] = ()) -> Image.Image:
    """A raw picture [3, H, W] whose background is dimmed and whose parts have a colour each; maps
    are [K + 1, gh, gw]. Removed parts are dimmed too."""
    scale = max(1, -(-SIDE // min(image.shape[1:])))
    raw = (
        image.detach()
        .float()
        .cpu()
        .clamp(0, 1)
        .repeat_interleave(scale, dim=1)
        .repeat_interleave(scale, dim=2)
    )  # [3, H, W]
    parts, winner = (
        maps.shape[0] - 1,
        maps.argmax(dim=0).cpu(),
    )  # patch by patch: smooth outlines would show what is not seen
    label = winner.repeat_interleave(raw.shape[1] // winner.shape[0], dim=0).repeat_interleave(
        raw.shape[2] // winner.shape[1], dim=1
    )
    colours = torch.cat([part_colours(parts), torch.zeros(1, 3)])
    for part in removed:
        colours[part] = 0
    hidden = (label == parts) | torch.isin(label, torch.tensor(list(removed), dtype=label.dtype))
    paint = colours[label].permute(2, 0, 1)  # [3, H, W]
    grey = raw.mean(
        dim=0, keepdim=True
    )  # so that a part has the colour of the legend, whatever it covers
    shown = torch.where(hidden, raw * _DIM, grey * (1 - _ALPHA) + paint * _ALPHA)
    return to_pil(shown)


def sheet(images: Tensor, maps: Tensor, *, columns: int = 8) -> Image.Image:
    """Raw pictures [B, 3, H, W], each above its parts [B, K + 1, gh, gw]."""
    tiles = [part_picture(image, one) for image, one in zip(images, maps, strict=True)]
    plain = [to_pil(image) for image in images]
    wide, high = tiles[0].size
    columns = min(columns, len(tiles))
    canvas = Image.new("RGB", (columns * wide, 2 * high * -(-len(tiles) // columns)), "white")
    for place, (original, tile) in enumerate(zip(plain, tiles, strict=True)):
        left, top = place % columns * wide, place // columns * 2 * high
        canvas.paste(original.resize((wide, high), Image.Resampling.NEAREST), (left, top))
        canvas.paste(tile, (left, top + high))
    return canvas
