"""From latents to pictures, with exact counterfactuals.

`render(latents, do=Do(background=2))` is the same scene on another background: every pixel of the
creature keeps its bits. The same holds for the other interventions: what was not touched does not
change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from seecause.critters import backgrounds, creature
from seecause.critters.anatomy import PARTS, VARIANTS
from seecause.critters.latents import REACH, Latents
from seecause.errors import BadOption, UnknownName

Style = Literal["plain", "flat", "sketch"]
STYLES: tuple[Style, ...] = get_args(Style)
MAT_CELLS = 12  # patches a side of the grid that a mat follows: 8 pixels each at 96
_NEUTRAL = 0.5
_CPU_ROWS = 16  # pictures drawn at once on a CPU: temporaries then stay in its cache


class Picture(NamedTuple):
    image: Tensor  # [B, 3, H, W] float32 in [0, 1]
    mask: Tensor  # [B, H, W] bool, True on the creature
    parts: Tensor  # [B, H, W] uint8: 0 background, 1 body, 2.. as in PARTS


@dataclass(frozen=True)
class Do:
    """An intervention. What is left out stays as the latents have it."""

    background: int | Tensor | None = None  # another texture, one code or [B]
    cue: float = 1.0  # strength of the background: 0 is flat mean colour
    fill: tuple[float, float, float] | None = None  # this colour instead of a background
    without: tuple[str, ...] = ()  # parts to remove; all of PARTS leaves the background alone
    swap: Mapping[str, str | int] = field(default_factory=dict)  # part -> variant, by name or index
    move: tuple[int, int] = (0, 0)  # pixels down and right, as far as the picture allows


@torch.no_grad()
def render(
    latents: Latents, *, size: int = 96, do: Do | None = None, style: Style = "plain"
) -> Picture:
    """Draw a batch on the device the latents live on. Deterministic: a picture depends on its own
    latent only."""
    if style not in STYLES:
        raise UnknownName("drawing style", style, STYLES)
    if size < 32:
        raise BadOption("size", size, "at least 32 pixels; parts are not visible below")
    do = do or Do()
    latents = intervene(latents, do, size=size)
    rows = _CPU_ROWS if latents.seed.device.type == "cpu" else max(1, len(latents))
    drawn = [_draw(batch, do, size, style) for batch in latents.split(rows)]
    return Picture(*(torch.cat(tensors) for tensors in zip(*drawn, strict=True)))


def intervene(latents: Latents, do: Do, *, size: int = 96) -> Latents:
    """The latents after the intervention (what concerns only pixels, `cue` and `fill`, is left to
    `render`)."""
    if do.background is not None:
        code = torch.as_tensor(do.background, device=latents.background.device)
        latents = latents.replace(background=code.expand_as(latents.background))
    if do.without:
        present = latents.present.clone()
        present[:, [_part_index(part) for part in do.without]] = False
        latents = latents.replace(present=present)
    if do.swap:
        variants = latents.variants.clone()
        for part, variant in do.swap.items():
            variants[:, _part_index(part) - 1] = _variant_index(part, variant)
        latents = latents.replace(variants=variants)
    if do.move != (0, 0):
        shift = torch.tensor(do.move, device=latents.centre.device) / size
        latents = latents.replace(centre=(latents.centre + shift).clamp(0.5 - REACH, 0.5 + REACH))
    return latents


def _draw(latents: Latents, do: Do, size: int, style: str) -> Picture:
    image = _backdrop(latents, do, size, style)  # [B, 3, H, W]
    layer = creature.draw(latents, size=size, style=style)
    side = layer.parts.shape[-1]
    pixels = torch.arange(side, device=image.device)
    batch = torch.arange(len(latents), device=image.device)[:, None, None]
    rows = (layer.top[:, None] + pixels)[:, :, None]  # [B, S, 1]
    columns = (layer.left[:, None] + pixels)[:, None, :]  # [B, 1, S]

    parts = torch.zeros(len(latents), size, size, dtype=torch.uint8, device=image.device)
    parts[batch, rows, columns] = layer.parts
    window = image[batch, :, rows, columns]  # [B, S, S, 3]
    seen = (layer.parts > 0)[..., None]
    image[batch, :, rows, columns] = torch.where(seen, layer.colour.permute(0, 2, 3, 1), window)
    mask = parts > 0
    if (
        image.device.type != "cpu" or latents.mat.any()
    ):  # elsewhere asking would keep the device waiting
        image = torch.where(
            (_touched(mask) & ~mask & latents.mat[:, None, None])[:, None], _NEUTRAL, image
        )
    return Picture(image.mul_(latents.gain[:, None, None, None]), mask, parts)


def _touched(mask: Tensor) -> Tensor:
    """[B, H, W] bool: pixels of the patches that hold a pixel of the mask."""
    size = mask.shape[-1]
    cell = torch.arange(size, device=mask.device) * MAT_CELLS // size  # [size]
    belongs = (
        cell == torch.arange(MAT_CELLS, device=mask.device)[:, None]
    ).float()  # [cells, size]
    cells = belongs @ mask.float() @ belongs.T > 0  # [B, cells, cells]
    return cells[:, cell][:, :, cell]


def _backdrop(latents: Latents, do: Do, size: int, style: str) -> Tensor:
    if do.fill is not None:
        fill = torch.tensor(do.fill, device=latents.gain.device)
        return fill[:, None, None].expand(len(latents), 3, size, size).clone()
    painted = backgrounds.paint(latents.background, latents.seed, size=size, style=style)
    if do.cue == 1:
        return painted
    mean = backgrounds.mean_colour(painted.device)[:, None, None]
    return mean + do.cue * (painted - mean)


def _part_index(part: str) -> int:
    if part not in PARTS:
        raise UnknownName("part", part, PARTS)
    return PARTS.index(part)


def _variant_index(part: str, variant: str | int) -> int:
    known = VARIANTS.get(part)
    if known is None:
        raise UnknownName("part with variants", part, VARIANTS)
    if isinstance(variant, int):
        if not 0 <= variant < len(known):
            raise BadOption(f"swap[{part!r}]", variant, f"a variant from 0 to {len(known) - 1}")
        return variant
    if variant not in known:
        raise UnknownName(f"{part} variant", variant, known)
    return known.index(variant)
