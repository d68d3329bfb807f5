"""The whole objective, and the rates its parts are trained at.

total = c1 CE(parts) + c2 CE(stage 2) + presence + 2 background + total variation + entropy +
equivariance + orthogonality
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from seecause.faithful import losses
from seecause.faithful.equivariance import Affine, equivariance_loss
from seecause.faithful.net import IFAM
from seecause.faithful.output import IFAMOutput
from seecause.faithful.tower import Tower, is_token
from seecause.types import wide


@dataclass(frozen=True)
class LossWeights:
    """Those of the paper. SIIM-ACR takes background=0."""

    class1: float = 1.0
    class2: float = 1.0
    presence: float = 1.0
    background: float = 2.0
    total_variation: float = 1.0
    entropy: float = 1.0
    equivariance: float = 1.0
    orthogonality: float = 1.0


def objective(
    net: IFAM,
    out: IFAMOutput,
    labels: Tensor,
    *,
    size: tuple[int, int],
    moved: Affine | None = None,
    weights: LossWeights | None = None,
) -> dict[str, Tensor]:
    """Every loss by name, unweighted, and their weighted `total`. `moved` is the map that made the
    images `out.warped_maps` are of."""
    weights = weights or LossWeights()
    found = {
        "class1": F.cross_entropy(out.stage1_logits, labels),
        "presence": losses.presence_loss(out.maps, across=net.options["presence"]),
        "background": losses.background_loss(out.maps),
        "total_variation": losses.total_variation_loss(out.maps),
        "entropy": losses.entropy_loss(out.maps),
        "orthogonality": _orthogonality(net, out),
    }
    if net.stage2 is not None:
        found["class2"] = F.cross_entropy(wide(out.logits), labels)
    if moved is not None and out.warped_maps is not None:
        found["equivariance"] = equivariance_loss(out.maps, out.warped_maps, moved, size)
    factors = asdict(weights)
    terms = [factors[name] * value for name, value in found.items() if factors[name]]
    return {**found, "total": sum(terms, out.maps.new_zeros(()))}


def _orthogonality(net: IFAM, out: IFAMOutput) -> Tensor:
    """Of part embeddings, or of the prototypes as if they were one image's."""
    form = net.options["orthogonality"]
    if form == "prototypes":
        return losses.orthogonality_loss(wide(net.stage1.prototypes).T[None])  # [1, D, K + 1]
    return losses.orthogonality_loss(out.embeddings, form=form)


def parameter_groups(
    net: IFAM,
    base_lr: float,
    weight_decay: float,
    *,
    prototype_factor: float = 1e3,
    head_factor: float = 1e4,
) -> list[dict[str, Any]]:
    """Groups for an optimiser: what is trainable, at the paper's rates. Only matrices of backbones
    and classifiers are decayed."""
    stage1, stage2 = net.stage1, net.stage2
    groups = [
        *_tower_groups("stage1", stage1.tower, base_lr, weight_decay),
        _group("prototypes", [stage1.prototypes], base_lr * prototype_factor, 0.0),
        _group("modulation", list(stage1.modulation.parameters()), base_lr * head_factor, 0.0),
        _group(
            "stage1 classifier", [stage1.classifier.weight], base_lr * head_factor, weight_decay
        ),
    ]
    if stage2 is not None:
        groups += [
            *_tower_groups("stage2", stage2.tower, base_lr, weight_decay),
            _group("stage2 fc_norm", list(stage2.fc_norm.parameters()), base_lr * head_factor, 0.0),
            _group("stage2 head", [stage2.head.weight], base_lr * head_factor, weight_decay),
        ]
    return [group for group in groups if group["params"]]


def _tower_groups(name: str, tower: Tower, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    named = [(key, value) for key, value in tower.native.named_parameters() if value.requires_grad]
    tokens = [value for key, value in named if is_token(key)]
    vectors = [value for key, value in named if not is_token(key) and value.ndim < 2]
    matrices = [value for key, value in named if not is_token(key) and value.ndim >= 2]
    return [
        _group(f"{name} tokens", tokens, lr, 0.0),
        _group(f"{name} vectors", vectors, lr, 0.0),
        _group(f"{name} matrices", matrices, lr, weight_decay),
    ]


def _group(name: str, params: Sequence[Tensor], lr: float, weight_decay: float) -> dict[str, Any]:
    return {"name": name, "params": list(params), "lr": lr, "weight_decay": weight_decay}
