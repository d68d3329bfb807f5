"""Average keys and values of one token grid, stretched to another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.errors import BankMismatch
from seecause.models.image_tokens import Grid, ImageTokens


def stretch(values: Tensor, have: ImageTokens, want: ImageTokens) -> Tensor:
    """Values [L, Hkv, N, dh] of tokens `have` at the places of tokens `want`, bilinearly, grid by
    grid; every newline token gets the newlines' mean."""
    if len(have.parts) != len(want.parts) or any(
        a.newline != b.newline for a, b in zip(have.parts, want.parts, strict=True)
    ):
        raise BankMismatch(
            f"a bank for image tokens {have}",
            f"this picture has {want}, another number of grids",
            "use mode='shape' or 'mean'",
        )
    pieces = values.split([part.tokens for part in have.parts], dim=2)
    return torch.cat(
        [_grid(piece, a, b) for piece, a, b in zip(pieces, have.parts, want.parts, strict=True)],
        dim=2,
    )


def _grid(piece: Tensor, have: Grid, want: Grid) -> Tensor:
    layers, heads, _, width = piece.shape
    field = piece.unflatten(
        2, (have.rows, have.columns + have.newline)
    )  # [L, Hkv, rows, columns, dh]
    flat = (
        field[:, :, :, : have.columns].permute(0, 1, 4, 2, 3).flatten(1, 2)
    )  # [L, Hkv*dh, rows, columns]
    if (have.rows, have.columns) != (want.rows, want.columns):
        flat = F.interpolate(
            flat, size=(want.rows, want.columns), mode="bilinear", align_corners=False
        )
    grown = flat.unflatten(1, (heads, width)).permute(0, 1, 3, 4, 2)
    if have.newline:
        line = (
            field[:, :, :, have.columns :]
            .mean(dim=2, keepdim=True)
            .expand(layers, heads, want.rows, 1, width)
        )
        grown = torch.cat([grown, line], dim=3)
    return grown.flatten(2, 3)
