"""Taylor importance (Michel et al. 2019; the head term of MDP, 2504.02168): |g_h dL/dg_h| at g = 1,
the first-order change of the loss without head h.

One forward and one backward give all heads of an image. Pruning removes what matters least, so
`remove="least"` is the default; `"most"` is the control that damages the model. MDP itself solves a
latency program and then fine-tunes: this is its importance alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.forks import gated_logits
from seecause.heads.registry import selector
from seecause.heads.result import HeadScores
from seecause.heads.values import Remove, mean_scores, over_images
from seecause.models.view import VisionModel


@selector("taylor", cost="1 forward, 1 backward", needs="labels")
def taylor(
    model: VisionModel, images: Tensor, labels: Tensor, *, remove: Remove = "least"
) -> HeadScores:
    """First-order change of the loss without each head; the least important go first."""

    def some(start: int, stop: int) -> Tensor:
        return gate_gradients(model, images[start:stop], labels[start:stop]).abs()

    per_image = over_images(some, model, images, holds=2 * model.n_layers)
    return mean_scores(
        model, per_image, remove=remove, protocol={"selector": "taylor", "remove": remove}
    )


def gate_gradients(model: VisionModel, images: Tensor, labels: Tensor) -> Tensor:
    """dNLL / dg at g = 1, image by image: [B, L, H]."""
    gates = torch.ones(
        len(images),
        model.n_layers,
        model.n_heads,
        device=images.device,
        dtype=images.dtype,
        requires_grad=True,
    )
    with torch.enable_grad():
        loss = F.cross_entropy(gated_logits(model, images, gates), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, gates)
    return gradient
