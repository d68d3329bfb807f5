"""Attribution classes for captum, which can be used wherever captum takes an `Attribution`.

    from captum.attr import NoiseTunnel
    from seecause.attribution.captum import CAAP

    caap = CAAP(model)
    caap.attribute(images, target=3)                           # [B, 3, H, W], like the images
    NoiseTunnel(caap).attribute(images, nt_samples=4, stdevs=0.1, target=3)

Attributions have the shape of the inputs, as captum's have: the score of a patch is shared out
evenly to its pixels and channels, so their sum is that of the map.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seecause.attribution.attribute import ModelLike, attribute
from seecause.attribution.registry import find
from seecause.errors import MissingExtra
from seecause.loading import as_view
from seecause.models.block import pixel_cells

try:
    from captum.attr import Attribution
    from captum.log import log_usage  # type: ignore[attr-defined]
except ImportError:
    raise MissingExtra("captum", "tools") from None


class ByMethod(Attribution):
    """Any attribution method as one of captum; `options` are the method's own."""

    method = ""  # of a class for one method

    def __init__(self, model: ModelLike, method: str = "", **options: Any) -> None:
        self.view, self.method, self.options = as_view(model), method or self.method, options
        find(self.method, self.view.architecture).check(options)
        super().__init__(self.view)

    @log_usage()  # NoiseTunnel looks for what this wraps
    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Attributions in the shape of `inputs`, normalised images [B, 3, H, W] or a tuple of one
        such tensor. `target` as in captum: a class, or one for each image; None for the predicted.
        """
        (images,) = (inputs,) if isinstance(inputs, Tensor) else inputs
        if isinstance(target, Tensor) and target.numel() == 1:
            target = int(target)
        own = {**self.options, **options}
        result = attribute(self.view, images.detach(), target, self.method, **own)
        maps = result.maps if result.native is None else result.native
        attributions = shares(maps, images.detach())
        return attributions if isinstance(inputs, Tensor) else (attributions,)


class CAAP(ByMethod):
    """CAAP: which patches carry the prediction into a blank image? One sweep, no gradient.

    >>> import torch
    >>> import seecause as sc
    >>> caap = CAAP(sc.load("builtin:critters-vit"))
    >>> caap.attribute(torch.zeros(1, 3, 96, 96), target=2).shape
    torch.Size([1, 3, 96, 96])
    """

    method = "caap"


class Mosaic(ByMethod):
    """Mosaic: what does the prediction depend on? Slopes over mixtures of the image and a blank."""

    method = "mosaic"


def shares(maps: Tensor, like: Tensor) -> Tensor:
    """Maps [B, h, w] in the shape of their images [B, C, H, W]: what a patch has is shared out
    evenly to its pixels and their channels, so that sums stay what they are.

    >>> import torch
    >>> float(shares(torch.ones(1, 2, 2), torch.zeros(1, 3, 4, 4)).sum())
    4.0
    """
    rows, columns = (
        pixel_cells(side, cells, maps.device)
        for side, cells in zip(like.shape[-2:], maps.shape[-2:], strict=True)
    )
    size = rows.bincount()[rows][:, None] * columns.bincount()[columns] * like.shape[1]  # [H, W]
    return (maps[:, rows][:, :, columns] / size)[:, None].expand_as(like).to(like).contiguous()
