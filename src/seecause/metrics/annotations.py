"""Maps and discovered parts against human annotations: object masks, boxes, key points.

Does a map lie on the object? With pixels P, the object's mask M and the map A, higher is better:

    AUPR_1 = AP(M, A)      AUPR_0 = AP(1 - M, -A)      AP = sum_k (R_k - R_{k-1}) P_k
    pointing = whether the first maximum lies on the object, without tolerance

AP is over the distinct values of the map, ties taken together (scikit-learn's average precision,
not the trapezoid). Ranks alone matter, so maps are not normalised; a random map scores the share of
the object, a constant one exactly that.

Overlap of a mask with the object, of each image or of a whole dataset:

    IoU = |mask and object| / |mask or object|

`Overlap` counts pixels over all images first, so large objects weigh more. That of their part maps
(`foreground`) is the foreground mIoU of PDiscoFormer and iFAM.

Are discovered parts the parts a person would name? Key points of CUB against part maps (Huang & Li
2020; PDiscoFormer, Aniraj et al. 2024). The centre of part k is the mean position weighted by its
map A_k. For each key point, over the images where it is visible: standardise the centres [N, 2K]
and the key point [N, 2] with the statistics of the fitted images, set the centres of absent parts
(max A_k <= 0.5) to 0, fit linear least squares without intercept, predict, undo the scaling; the
error is the mean distance of predicted and true position in units of the object's box. The final
number is 100 times the mean over key points, weighted by how often each is visible; lower is
better. Agreement is between the part that wins at each visible key point and the number of that key
point: NMI and ARI (higher is better; 1 is the same partition).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.data.batch import to_batch
from seecause.data.dataset import IGNORE, Dataset, Sample, Size
from seecause.engine.chunks import run_in_chunks
from seecause.errors import BadOption
from seecause.metrics.pixels import checked, to_pixels
from seecause.metrics.registry import Scores, metric
from seecause.metrics.statistics import tie_ends
from seecause.models.preprocess import Framed, Preprocess

_PIXEL_BYTES = 128  # float64 and int64 values held for each pixel while a map is sorted
_READ = 16  # images read at once
ACTIVE = 0.5  # a part whose map nowhere exceeds this is absent


@metric("localization")
@torch.no_grad()
def localization(maps: Tensor, masks: Tensor) -> Scores:
    """Does the map lie on the object? Average precision of object and background, and the pointing
    game.

    Args:
        maps: Attribution maps [B, gh, gw], which are enlarged bilinearly, or [B, H, W].
        masks: Object masks [B, H, W]: bool, or integers: 1 object, 0 background, 255 neither.

    Returns:
        `Scores` with "aupr1", "aupr0" and "pointing". Images without any object or background are
        NaN, and `details["reasons"]` says why ("" for images with a score).

    Example:
        >>> import torch
        >>> maps = torch.tensor([[[0.9, 0.1], [0.8, 0.0]]])
        >>> left = torch.tensor([[[True, False], [True, False]]])
        >>> result = localization(maps, left)
        >>> result["aupr1"], result["pointing"]
        (tensor([1.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    maps = checked(maps)
    if masks.ndim != 3 or len(masks) != len(maps):
        raise BadOption("masks", list(masks.shape), f"[{len(maps)}, H, W], one for each map")
    size = (masks.shape[1], masks.shape[2])
    wanted, counted = object_and_counted(masks.to(maps.device))

    def run_maps(a: int, b: int) -> Tensor:
        pixels = to_pixels(maps[a:b], size).flatten(1)  # [b, H * W]
        on, valid = wanted[a:b].flatten(1), counted[a:b].flatten(1)
        best = pixels.masked_fill(~valid, -torch.inf).argmax(dim=1, keepdim=True)
        hit = on.gather(1, best)[:, 0].double()
        return torch.stack(
            [average_precision(pixels, on, valid), average_precision(-pixels, ~on, valid), hit]
        )

    each = masks[0].numel() * _PIXEL_BYTES
    scores = run_in_chunks(run_maps, len(maps), each, maps.device, what="maps", dim=1).cpu()
    reasons = [
        "every pixel is ignored"
        if not valid.any()
        else "no object in the frame"
        if not on.any()
        else "no background in the frame"
        if on.sum() == valid.sum()
        else ""
        for on, valid in zip(wanted, counted, strict=True)
    ]
    scores[:, [reason != "" for reason in reasons]] = torch.nan
    columns: dict[str, Tensor] = dict(zip(("aupr1", "aupr0", "pointing"), scores, strict=True))
    return Scores(columns, {"reasons": tuple(reasons)}, {"metric": "localization"})


def object_and_counted(masks: Tensor) -> tuple[Tensor, Tensor]:
    """Where the object is, and which pixels are object or background, of masks as in `Sample`."""
    counted = masks != IGNORE  # holds for every bool
    return (masks != 0) & counted, counted


def average_precision(scores: Tensor, positive: Tensor, counted: Tensor) -> Tensor:
    """AP [B] of scores [B, P] for the positives among the counted entries, both [B, P] bool; NaN
    without positives."""
    ordered, order = scores.sort(dim=1, descending=True)
    positives = (positive & counted).gather(1, order).double()
    hits, seen = positives.cumsum(dim=1), counted.gather(1, order).double().cumsum(dim=1)
    precision = (hits / seen.clamp(min=1)).gather(1, tie_ends(ordered))  # of a whole run of equals
    return (positives * precision).sum(dim=1) / hits[:, -1]


@dataclass(frozen=True)
class Overlap:
    """Pixels of mask and object, over any number of images; add those of several batches."""

    both: int = 0
    either: int = 0

    def __add__(self, other: Overlap) -> Overlap:
        return Overlap(self.both + other.both, self.either + other.either)

    @property
    def iou(self) -> float:
        """NaN where there is neither mask nor object."""
        return self.both / self.either if self.either else math.nan


def overlap(masks: Tensor, truth: Tensor) -> Overlap:
    """Masks [B, H, W] against objects [B, H, W] (bool, or integers: 1 object, 0 background, IGNORE
    neither), counted over all images."""
    both, either = _counts(masks, truth)
    return Overlap(int(both.sum()), int(either.sum()))


def iou(masks: Tensor, truth: Tensor) -> Tensor:
    """[B] float64: IoU of each image, NaN where there is neither mask nor object."""
    both, either = _counts(masks, truth)
    return both.double() / either


def _counts(masks: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels [B] in both and in either, ignored ones in neither."""
    wanted, counted = object_and_counted(truth.to(masks.device))
    mask = (masks != 0) & counted
    return (mask & wanted).sum(dim=(1, 2)), (mask | wanted).sum(dim=(1, 2))


def foreground(maps: Tensor, size: Size) -> Tensor:
    """[B, H, W] bool: where a part wins over the background, which is the last channel of the part
    maps [B, K + 1, h, w]."""
    return part_labels(maps, size) != maps.shape[1] - 1


def part_labels(maps: Tensor, size: Size) -> Tensor:
    """[B, H, W] int64: the channel of part maps [B, K + 1, h, w] that wins at each pixel.

    Maps are upsampled first, bilinearly with corners aligned, as in the public code.
    """
    return F.interpolate(maps.detach(), size, mode="bilinear", align_corners=True).argmax(dim=1)


class Marks(NamedTuple):
    """Boxes and key points of some images, in a model's frame. Boxes are not cut at its edge."""

    boxes: Tensor  # [B, 4] x, y, width, height
    points: Tensor  # [B, P, 2]
    visible: Tensor  # [B, P] bool: annotated as visible, and in the frame


def marks_of(frame: Preprocess, samples: Sequence[Sample]) -> Marks:
    """Boxes and key points of samples; raises if a sample has none."""
    height, width = frame.size
    boxes, points, seen = [], [], []
    for sample in samples:
        if sample.box is None or sample.points is None:
            raise BadOption("data", sample.id, "images with box and key points, such as cub")
        size = (sample.image.shape[1], sample.image.shape[2])
        x, y, wide, high = sample.box
        ends = torch.tensor([[x, y], [x + wide, y + high]], dtype=torch.float64)
        corners = frame.points(ends, *size)
        place = frame.points(sample.points[:, :2].double(), *size)
        inside = ((place >= 0) & (place < place.new_tensor([width, height]))).all(dim=1)
        boxes.append(torch.cat([corners[0], corners[1] - corners[0]]))
        points.append(place)
        seen.append(inside & (sample.points[:, 2] > 0))
    return Marks(torch.stack(boxes), torch.stack(points), torch.stack(seen))


class Located(NamedTuple):
    """Parts and key points of N images, float64 on the CPU; positions are x, y with (0, 0) and
    (1, 1) the corners of the object's box."""

    centers: Tensor  # [N, K, 2]
    active: Tensor  # [N, K] bool
    points: Tensor  # [N, P, 2]
    visible: Tensor  # [N, P] bool
    winners: Tensor  # [N, P] int64: the part at each key point, K for the background


def located(maps: Tensor, marks: Marks, size: Size) -> Located:
    """Locate parts in maps [B, K + 1, h, w] of images of `size`, on the CPU."""
    centers, active = part_centers(maps, size)
    labels = part_labels(maps, size)
    x, y = (
        marks.points[..., axis].long().clamp(0, side - 1)
        for axis, side in ((0, size[1]), (1, size[0]))
    )
    winners = labels[torch.arange(len(labels))[:, None], y, x]
    corner, extent = marks.boxes[:, None, :2], marks.boxes[:, None, 2:]
    points = (marks.points - corner) / extent
    return Located((centers - corner) / extent, active, points, marks.visible, winners)


@torch.no_grad()
def locate(model: Framed, data: Dataset, part_maps: Callable[[Tensor], Tensor]) -> Located:
    """`part_maps(images [B, 3, H, W]) -> [B, K + 1, h, w]`, background last, over images with box
    and key points, in the model's frame. Both public codes give images in [0, 1] here, unlike in
    training; this package normalises them.
    """
    frame, parts = model.preprocess, []
    for start in range(0, len(data), _READ):
        samples = [data[place] for place in range(start, min(start + _READ, len(data)))]
        images = to_batch(model, samples).images
        maps = part_maps(images).double().cpu()
        parts.append(located(maps, marks_of(frame, samples), frame.size))
    return Located(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def part_centers(maps: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """Centres x, y [B, K, 2] in pixels of an image of `size`, and whether each part is present [B,
    K], from maps [B, K + 1, h, w].

    As in the public code the position of a cell is its upper left corner. A part with no mass is at
    0, 0.
    """
    parts = maps[:, :-1].double()
    high, wide = parts.shape[-2:]
    mass = parts.sum(dim=(2, 3)).clamp(min=torch.finfo(torch.float64).tiny)
    y = (parts.sum(dim=3) @ torch.arange(high).to(parts)) / mass * (size[0] / high)
    x = (parts.sum(dim=2) @ torch.arange(wide).to(parts)) / mass * (size[1] / wide)
    return torch.stack([x, y], dim=-1), parts.amax(dim=(2, 3)) > ACTIVE


def keypoint_error(fit: Located, test: Located) -> float:
    """The mean distance in percent of the box, fitted on one set of images (CUB train) and measured
    on another (CUB or Waterbird200 test), over the key points that are visible in both; NaN if none
    is."""
    from sklearn.linear_model import LinearRegression
    from sklearn.preprocessing import StandardScaler

    def features(located: Located, rows: Tensor, centers: StandardScaler) -> Any:
        """[n, 2 K]: standardised x and y of each part, 0 where it is absent."""
        active = located.active[rows].repeat_interleave(2, dim=1).double().numpy()
        return centers.transform(located.centers[rows].flatten(1).numpy()) * active

    distances: list[np.ndarray] = []  # of each key point, [images where it is visible]
    for point, (seen, tested) in enumerate(zip(fit.visible.T, test.visible.T, strict=True)):
        if not seen.any() or not tested.any():
            continue
        centers = StandardScaler().fit(fit.centers[seen].flatten(1).numpy())
        places = StandardScaler().fit(fit.points[seen, point].numpy())
        regression = LinearRegression(fit_intercept=False)
        true = places.transform(fit.points[seen, point].numpy())
        regression.fit(features(fit, seen, centers), true)
        predicted = places.inverse_transform(regression.predict(features(test, tested, centers)))
        off = predicted - test.points[tested, point].numpy()
        distances.append(np.linalg.norm(off, axis=1))
    return 100 * float(np.concatenate(distances).mean()) if distances else math.nan


def part_agreement(located: Located) -> tuple[float, float]:
    """NMI and ARI of the winning part and the key point's number, over all visible key points."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    number = torch.arange(located.visible.shape[1]).expand_as(located.visible)
    true, predicted = number[located.visible].numpy(), located.winners[located.visible].numpy()
    nmi = normalized_mutual_info_score(true, predicted)
    return float(nmi), float(adjusted_rand_score(true, predicted))
