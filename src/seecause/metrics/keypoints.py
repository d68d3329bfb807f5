"""Are discovered parts the parts a person would name? Key points of CUB against part maps (Huang &
Li 2020; PDiscoFormer, Aniraj et al. 2024).

Regression: the centre of part k is the mean place weighted by its map A_k. For each key point, over
the photos where it is visible:
    standardise the centres [N, 2K] and the key point [N, 2] with the statistics of the fitted
    photos set the centres of absent parts (max A_k <= 0.5) to 0, fit linear least squares without
    intercept, predict, undo the scaling error = mean distance of predicted and true place, in units
    of the object's box
The final number is 100 times the mean over key points, weighted by how often each is visible; lower
is better.

Agreement: which part wins at each visible key point, against which key point it is: NMI and ARI
(higher is better; 1 is the same partition).

Both public codes feed images that are not normalised by mean and std here, unlike in training;
`locate(normalised=False)` reproduces that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seecause.data.batch import to_batch
from seecause.data.dataset import Dataset, Sample
from seecause.errors import BadOption
from seecause.metrics._localization import part_labels
from seecause.models.base import ImageModel
from seecause.models.preprocess import Preprocess

ACTIVE = 0.5
_READ = 16  # photos at once


@dataclass(frozen=True, eq=False)
class Located:
    """Parts and key points of N photos, float64 on the CPU; places are x, y with (0, 0) and (1, 1)
    the corners of the object's box."""

    centers: Tensor  # [N, K, 2]
    active: Tensor  # [N, K] bool
    points: Tensor  # [N, P, 2]
    visible: Tensor  # [N, P] bool
    winners: Tensor  # [N, P] int64: the part at each key point, K for the background


@dataclass(frozen=True, eq=False)
class KeyPointError:
    """Of each key point: its mean distance [P] (NaN where none is visible), and in how many tested
    photos it is visible [P]."""

    distance: Tensor
    visible: Tensor

    @property
    def mean(self) -> float:
        """In percent of the box, weighted by visibility, over the key points that could be
        measured; NaN where none could."""
        measured = ~self.distance.isnan()
        return 100 * float(
            (self.distance * self.visible)[measured].sum() / self.visible[measured].sum()
        )


@torch.no_grad()
def locate(
    model: ImageModel,
    data: Dataset,
    part_maps: Callable[[Tensor], Tensor],
    *,
    normalised: bool = True,
) -> Located:
    """`part_maps(images [B, 3, H, W]) -> [B, K + 1, h, w]`, background last, over photos with box
    and key points, in the model's frame."""
    parts = []
    for start in range(0, len(data), _READ):
        samples = [data[place] for place in range(start, min(start + _READ, len(data)))]
        images = to_batch(model, samples).images
        maps = part_maps(images if normalised else model.preprocess.raw(images)).double().cpu()
        parts.append(located(maps, marks_of(model.preprocess, samples), model.preprocess.size))
    if not parts:
        raise BadOption("data", data.name, "at least one photo")
    return together(parts)


def together(parts: Sequence[Located]) -> Located:
    """Photos of several batches, as one."""
    fields = zip(*(vars(part).values() for part in parts), strict=True)
    return Located(*(torch.cat(tensors) for tensors in fields))


def part_centers(maps: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Centres x, y [B, K, 2] in pixels of an image of `size`, and whether each part is there [B,
    K], from maps [B, K + 1, h, w].

    As in the public code a cell stands at its upper left corner. A part with no mass lies at 0, 0.
    """
    parts = maps[:, :-1].double()
    grid = parts.shape[-2:]
    mass = parts.sum(dim=(2, 3)).clamp(min=torch.finfo(torch.float64).tiny)
    centres = []
    for cells, side, other in zip(grid, size, (3, 2), strict=True):
        places = torch.arange(cells, dtype=torch.float64, device=parts.device)
        centres.append((parts.sum(dim=other) * places).sum(dim=2) / mass * (side / cells))
    y, x = centres
    return torch.stack([x, y], dim=-1), parts.amax(dim=(2, 3)) > ACTIVE


def keypoint_error(fit: Located, test: Located) -> KeyPointError:
    """Fit on one set of photos (CUB train), measure on another (CUB or Waterbird200 test)."""
    counts, fitted = ((each.centers.shape[1], each.points.shape[1]) for each in (test, fit))
    if counts != fitted:
        seen = f"{counts[0]} parts, {counts[1]} key points"
        raise BadOption("test", seen, "as many as in the photos fitted")
    distance = [_distance(fit, test, point) for point in range(test.points.shape[1])]
    return KeyPointError(torch.tensor(distance, dtype=torch.float64), test.visible.sum(dim=0))


def part_agreement(located: Located) -> tuple[float, float]:
    """NMI and ARI of the winning part and the key point's number, over all visible key points."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    if not located.visible.any():
        raise BadOption("located", "no visible key point", "photos that show some")
    number = torch.arange(located.visible.shape[1]).expand_as(located.visible)
    true, predicted = number[located.visible].numpy(), located.winners[located.visible].numpy()
    return float(normalized_mutual_info_score(true, predicted)), float(
        adjusted_rand_score(true, predicted)
    )


def _distance(fit: Located, test: Located, point: int) -> float:
    """Of one key point; NaN where it is never visible in either set."""
    from sklearn.linear_model import LinearRegression
    from sklearn.preprocessing import StandardScaler

    seen, tested = fit.visible[:, point], test.visible[:, point]
    if not seen.any() or not tested.any():
        return float("nan")
    centers = StandardScaler().fit(fit.centers[seen].flatten(1).numpy())
    places = StandardScaler().fit(fit.points[seen, point].numpy())

    def features(located: Located, rows: Tensor) -> Any:
        """[n, 2 K]: standardised x and y of each part, 0 where it is absent."""
        active = located.active[rows].repeat_interleave(2, dim=1).double().numpy()
        return centers.transform(located.centers[rows].flatten(1).numpy()) * active

    regression = LinearRegression(fit_intercept=False)
    regression.fit(features(fit, seen), places.transform(fit.points[seen, point].numpy()))
    predicted = places.inverse_transform(regression.predict(features(test, tested)))
    return float(np.linalg.norm(predicted - test.points[tested, point].numpy(), axis=1).mean())


class Marks(NamedTuple):
    """What is known about some photos, in a model's frame. Boxes are not cut at its edge."""

    boxes: Tensor  # [B, 4] x, y, width, height
    points: Tensor  # [B, P, 2]
    visible: Tensor  # [B, P] bool: marked so, and in the frame


def marks_of(frame: Preprocess, samples: Sequence[Sample]) -> Marks:
    height, width = frame.size
    boxes, points, seen = [], [], []
    for sample in samples:
        if sample.box is None or sample.points is None:
            raise BadOption("data", sample.id, "photos with box and key points, such as cub")
        size = (sample.image.shape[1], sample.image.shape[2])
        x, y, wide, high = sample.box
        corners = frame.points(
            torch.tensor([[x, y], [x + wide, y + high]], dtype=torch.float64), *size
        )
        place = frame.points(sample.points[:, :2].double(), *size)
        inside = ((place >= 0) & (place < place.new_tensor([width, height]))).all(dim=1)
        boxes.append(torch.cat([corners[0], corners[1] - corners[0]]))
        points.append(place)
        seen.append(inside & (sample.points[:, 2] > 0))
    return Marks(torch.stack(boxes), torch.stack(points), torch.stack(seen))


def located(maps: Tensor, marks: Marks, size: tuple[int, int]) -> Located:
    """Of part maps [B, K + 1, h, w] of photos of `size`, on the CPU."""
    centers, active = part_centers(maps, size)
    labels = part_labels(maps, size)
    x, y = (
        marks.points[..., axis].long().clamp(0, side - 1)
        for axis, side in ((0, size[1]), (1, size[0]))
    )
    winners = labels[torch.arange(len(labels))[:, None], y, x]
    corner, extent = marks.boxes[:, None, :2], marks.boxes[:, None, 2:]
    return Located(
        (centers - corner) / extent,
        active,
        (marks.points - corner) / extent,
        marks.visible,
        winners,
    )
