"""The view of a `PlantedViT`: who sees whom travels with the tokens, as lanes of queries and keys
(visibility.py).

A token carries what it is (class, object, background) and where it stands, row and column (a, b)
counted from the middle of the grid. A key's lanes hide it from kinds of queries, head by head. That
a patch sees itself only is a distance, exact in small whole numbers:

    - s |(a, b) - (a', b')|^2 = s [2a, 2b, -(a^2 + b^2), -1] . [a', b', 1, a'^2 + b'^2]
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seecause.critters.planted import CLASS, ROLES, PlantedViT
from seecause.models import timm_view
from seecause.models.parts import Parts
from seecause.models.sources import Source, fill
from seecause.models.visibility import HIDDEN, flagged, laned

_KINDS = len(ROLES)
_FLAGS = _KINDS + 2
_ASK, _TELL = (
    32.0,
    128.0,
)  # s = 4096: the next patch is hidden, and products of coordinates stay whole numbers in float32


def planted_parts(module: PlantedViT) -> Parts:
    """timm's parts, with flags in the states and restricted blocks."""
    parts = timm_view.find(module, kind="VisionTransformer")
    width = module.embed_dim
    blocks = []
    for index, block in enumerate(parts.blocks):
        reads = module.readers.get(index)
        blocks.append(
            laned(
                block,
                width,
                _FLAGS,
                _local_lanes if reads is None else partial(_router_lanes, reads),
            )
        )
    return replace(
        parts,
        family="seecause.PlantedViT",
        embed=partial(_embed, module, parts),
        blocks=blocks,
        norm=lambda rows: module.norm(rows[..., :width]),
        beside=_FLAGS,
    )


def from_card(card: dict[str, Any], state: dict[str, Tensor], name: str) -> Source:
    """A stored network, from its card and weights."""
    module = PlantedViT(**card["architecture"]["arguments"])
    fill(module, state, name)
    origin = {**card["architecture"], "library": "seecause"}
    return Source(
        module, {"classes": card["classes"], "mean": card["mean"], "std": card["std"]}, origin
    )


def _embed(module: PlantedViT, parts: Parts, images: Tensor) -> Tensor:
    """Tokens [B, T, D + flags]."""
    tokens = parts.embed(images)
    kinds = torch.nn.functional.one_hot(module.kinds(images), _KINDS)  # [B, T, 3]
    rows, columns = module.patch_embed.grid_size
    place = torch.cartesian_prod(
        torch.arange(rows) - rows // 2, torch.arange(columns) - columns // 2
    ).to(tokens.device)  # [N, 2]
    place = torch.cat([place.new_zeros(1, 2), place]).expand(len(tokens), -1, -1)
    return flagged(tokens, torch.cat([kinds, place], dim=-1))


def _local_lanes(flag: Tensor) -> tuple[Tensor, Tensor]:
    """Every kind of query sees its own kind of keys."""
    kind = flag[..., None, :_KINDS]  # [B, R, 1, 3]
    return kind, (1 - kind) * HIDDEN


def _router_lanes(reads: tuple[int, ...], flag: Tensor) -> tuple[Tensor, Tensor]:
    """Class queries see what their head reads, or else the class token; patch queries see their own
    place.

    The class token is half hidden where it is not what a head reads: it weighs nothing beside a key
    that is, and everything beside keys that are not.
    """
    kind, place = flag[..., :_KINDS], flag[..., _KINDS:]
    is_class, is_patch = kind[..., CLASS, None], 1 - kind[..., CLASS, None]  # [B, R, 1]
    wanted = kind[
        ..., list(reads)
    ]  # [B, R, H], 1 where the token is of the kind that the head reads
    from_class = (1 - wanted) * (HIDDEN - is_class * HIDDEN / 2)
    square = place.square().sum(dim=-1, keepdim=True)
    asking = torch.cat(
        [
            is_class,
            is_patch,
            is_patch * _ASK * torch.cat([2 * place, -square, -torch.ones_like(square)], dim=-1),
        ],
        dim=-1,
    )
    telling = torch.cat(
        [is_class * HIDDEN, _TELL * torch.cat([place, torch.ones_like(square), square], dim=-1)],
        dim=-1,
    )[:, :, None]
    return asking[:, :, None], torch.cat(
        [from_class[..., None], telling.expand(-1, -1, len(reads), -1)], dim=-1
    )
