"""Key points of birds from discovered parts: Kp, NMI and ARI as PDiscoFormer and iFAM report them
(`seecause.metrics.keypoints` has the definitions).

The regression is fitted on the photos that CUB releases for training, also where Waterbird200 is
tested: its photos are CUB's birds, elsewhere. Tokens that an intervention rejects are background in
the maps, of both sets; a part left out of the mask is still a part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seecause.data.batch import seen
from seecause.data.dataset import Dataset, Sample
from seecause.faithful.evaluate import frame_of
from seecause.faithful.interventions import evaluating
from seecause.faithful.net import IFAM
from seecause.faithful.reading import read
from seecause.metrics.keypoints import (
    Located,
    Marks,
    keypoint_error,
    located,
    marks_of,
    part_agreement,
    together,
)
from seecause.models.preprocess import Preprocess


def fitted_on(name: str) -> str | None:
    """The photos that the key points of a test set called `name` are fitted on; None for datasets
    without key points, and for other splits."""
    kind, _, rest = name.partition(":")
    if kind == "waterbird200":
        return f"cub:{rest}:trainval"
    return (
        f"cub:{rest.removesuffix(':test')}:trainval"
        if kind == "cub" and rest.endswith(":test")
        else None
    )


def key_points(
    net: IFAM,
    fit: Dataset,
    test: Dataset,
    *,
    batch: int = 32,
    workers: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, float]:
    """`keypoints`: the mean error in percent of the bird's box, lower is better. `nmi` and `ari`:
    how well parts and key points agree.

    Empty where no key point is visible in both sets.
    """
    fitted, tested = (
        locate_parts(net, data, batch=batch, workers=workers, advance=advance)
        for data in (fit, test)
    )
    if not (
        fitted.visible.any(dim=0) & tested.visible.any(dim=0)
    ).any():  # nothing to fit or to test
        return {}
    nmi, ari = part_agreement(tested)
    return {"keypoints": keypoint_error(fitted, tested).mean, "nmi": nmi, "ari": ari}


@torch.no_grad()
def locate_parts(
    net: IFAM,
    data: Dataset,
    *,
    batch: int = 32,
    workers: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> Located:
    """Parts and key points of every photo, by stage 1 as it is; `workers` processes read ahead."""
    frame, found = frame_of(net), []
    keys: list[list[Any]] = [
        list(range(start, min(start + batch, len(data)))) for start in range(0, len(data), batch)
    ]
    with evaluating(net):
        for images, marks in read(
            data,
            keys,
            partial(_framed, frame.preprocess),
            workers=workers,
            pin=frame.device.type == "cuda",
        ):
            images = images.to(frame.device, frame.dtype)
            found.append(
                located(net.maps(images).double().cpu(), Marks(*marks), frame.preprocess.size)
            )
            advance(len(images))
    return together(found)


def _framed(frame: Preprocess, samples: list[Sample]) -> tuple[Tensor, Marks]:
    """Normalised images [B, 3, h, w], and what is marked in them."""
    return frame.normalise(
        torch.stack([seen(frame, sample.image) for sample in samples])
    ), marks_of(frame, samples)
