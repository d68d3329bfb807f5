"""What selectors share: runs over images, and scores from one number for each image and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.chunks import fit, in_chunks
from seecause.errors import BadOption
from seecause.heads.result import HeadScores
from seecause.metrics import standard_error
from seecause.models.constant import is_silent
from seecause.models.view import VisionModel

Remove = Literal["most", "least"]


def absent(model: VisionModel) -> Tensor:
    """[L, H], true where a block has no such head."""
    return torch.tensor(
        [
            [head >= block.heads or is_silent(block) for head in range(model.n_heads)]
            for block in model.blocks
        ]
    )


def padded(model: VisionModel, blocks: list[Tensor]) -> Tensor:
    """One tensor [..., H_l] for each block -> [..., L, H]."""
    return torch.stack(
        [F.pad(values, (0, model.n_heads - values.shape[-1])) for values in blocks], dim=-2
    )


def over_images(
    run: Callable[[int, int], Tensor], model: VisionModel, images: Tensor, *, holds: int
) -> Tensor:
    """`run(start, stop)` over as many images at once as fit, when a run holds `holds` times what a
    plain forward does."""
    each = model.forward_bytes(model.check(images)) * holds
    return torch.cat(
        list(in_chunks(run, len(images), fit(len(images), each, images.device), what="images"))
    )


def mean_scores(
    model: VisionModel, per_image: Tensor, *, remove: Remove = "most", protocol: dict[str, Any]
) -> HeadScores:
    """Means over images of per_image [N, L, H], with their standard errors. `remove="least"` turns
    them round: the largest gets 0."""
    if remove not in ("most", "least"):
        raise BadOption("remove", remove, "most or least")
    values, missing = per_image.detach().double().cpu(), absent(model)
    mean, error = values.mean(dim=0), standard_error(values)
    mean = mean if remove == "most" else mean[~missing].max() - mean
    return HeadScores(
        mean.masked_fill(missing, torch.nan),
        error.masked_fill(missing, torch.nan),
        protocol={**protocol, "images": len(values)},
    )
