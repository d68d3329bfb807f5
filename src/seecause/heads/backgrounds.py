"""ImageNet-9, the Backgrounds Challenge (Xiao et al. 2020), for any ImageNet-1k model: nine
answers, and what another background costs.

    logit of a class of ImageNet-9 = the largest logit of its ImageNet-1k classes         (630 of
    them belong to none: a tenth answer, always wrong)
    BG-gap = accuracy(mixed_same) - accuracy(mixed_rand)

So the answer is the release's own: the class that the largest logit belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seecause.data.imagenet9 import CLASSES
from seecause.errors import BadOption
from seecause.heads.cases import Cases
from seecause.heads.removal import logits_without
from seecause.heads.result import Head
from seecause.metrics.groups import background_gap
from seecause.models.block import chain
from seecause.models.view import VisionModel

NONE = "none of the nine"


def nine(model: VisionModel, mapping: Tensor) -> VisionModel:
    """The same view with ten answers: `mapping` [1000] (`read_in9_map`) says which of the nine each
    ImageNet class is, -1 for none."""
    members = [(mapping == place).nonzero()[:, 0] for place in (*range(len(CLASSES)), -1)]
    if any(len(some) == 0 for some in members):
        raise BadOption(
            "mapping",
            mapping.unique().tolist(),
            "classes for each of the nine, and some that are none of them (-1)",
        )

    def best(logits: Tensor) -> Tensor:
        return torch.stack(
            [logits[..., some.to(logits.device)].amax(dim=-1) for some in members], dim=-1
        )

    native = model.native
    readout = replace(model.readout, head=chain(model.readout.head, best))
    told: dict[str, Any] = {
        "classes": (*CLASSES, NONE),
        "merged": tuple(mapping.tolist()),
        "memo": {},
    }
    return replace(model, readout=readout, native=lambda images: best(native(images)), **told)


def background_gaps(
    model: VisionModel, same: Cases, random: Cases, sets: Sequence[Sequence[Head]]
) -> list[float]:
    """BG-gap of a model without each set of heads, on the variants mixed_same and mixed_rand."""
    right = []
    for cases in (same, random):
        assert cases.labels is not None
        right.append(
            logits_without(model, cases.images, sets).argmax(dim=-1) == cases.labels
        )  # [S, N]
    return [background_gap(a.cpu(), b.cpu()) for a, b in zip(*right, strict=True)]
