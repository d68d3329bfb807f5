"""What the tools have in common: a view of what they call a model, and maps in the shape of its
input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from seecause.attribution.result import Attribution
from seecause.loading import wrap
from seecause.models.base import ImageModel


def view_of(model: ImageModel | nn.Module) -> ImageModel:
    """A view as it is; a module wrapped."""
    return model if isinstance(model, ImageModel) else wrap(model)


def shares(attribution: Attribution, like: Tensor) -> Tensor:
    """A map in the shape of its images [B, C, H, W]: what a patch has is shared out evenly to its
    pixels and their channels, so that sums stay what they are.

    >>> import torch
    >>> maps = Attribution(torch.ones(1, 2, 2), torch.zeros(1, 3, 4, 4), {})
    >>> float(shares(maps, torch.zeros(1, 3, 4, 4)).sum())
    4.0
    """
    channels, height, width = like.shape[1:]
    maps = attribution.maps if attribution.native is None else attribution.native
    pixels = F.interpolate(maps[:, None], size=(height, width), mode="nearest")
    each = pixels * (maps.shape[1] * maps.shape[2] / (height * width * channels))
    return each.expand(-1, channels, -1, -1).to(like).contiguous()
