"""One training step's losses as one module: what DistributedDataParallel wraps, and what every loop
calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seecause.faithful.equivariance import Affine
from seecause.faithful.net import IFAM
from seecause.faithful.noise import Noise
from seecause.faithful.objective import LossWeights, objective


class Lesson(nn.Module):
    """A network and the weights of its losses."""

    def __init__(self, net: IFAM, weights: LossWeights | None = None):
        super().__init__()
        self.net = net
        self.weights = weights or LossWeights()

    def forward(
        self, images: Tensor, labels: Tensor, ids: Tensor, seed: int, step: int
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The total, every loss by name (for the log, without gradient), and answers [B, C].

        Noise and dropped parts are keyed by (seed, step, sample id), the affine map by (seed,
        step): the same in any process, batch or resumed run.
        """
        height, width = images.shape[-2:]
        moved = Affine.draw(seed, step, (height, width)) if self.weights.equivariance else None
        out = self.net(
            images,
            noise=Noise(seed, step, ids),
            warped=None if moved is None else moved.warp(images),
        )
        with torch.autocast(
            images.device.type, enabled=False
        ):  # maps are float32 already, and CUDA refuses binary cross entropy in half precision
            found = objective(
                self.net, out, labels, size=(height, width), moved=moved, weights=self.weights
            )
        return (
            found["total"],
            {name: value.detach() for name, value in found.items()},
            out.logits.detach(),
        )
