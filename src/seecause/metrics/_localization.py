"""Does the map lie on the object, and how sparse is it? No model is run.

With pixels P, the object's mask M and the map A, all from 0 to 1, higher is better:

    AUPR_1 = AP(M, A)      AUPR_0 = AP(1 - M, -A)      AP = sum_k (R_k - R_{k-1}) P_k
    pointing              = whether the first maximum lies on the object, without tolerance
    energy pointing game  = sum_M max(A, 0) / sum_P max(A, 0)   (Wang et al. 2020, Score-CAM)
    relevance mass        = sum_M |A| / sum_P |A|               (Arras et al. 2022, CLEVR-XAI)
    relevance rank        = |top_|M|(A) and M| / |M|            (the same)
    top-k intersection    = |top_k(A) and M| / k    (Theiner et al. 2022; k = 1000 as in Quantus)

AP is over the distinct values of the map, ties taken together (scikit-learn's average precision,
not the trapezoid). Ranks alone matter there, so maps are not normalised; a random map scores the
share of the object, a constant one exactly that. In a block-constant map the first maximum would be
the corner of a patch, so the middle of the patch is taken. Mass depends on the scale and zero of
the map: A + c scores otherwise, unlike in ranks, and a flat map scores the object's share.

Of the sizes a = |A| of a map's values, whatever it explains, with p = a / sum(a):

    Gini    = 1 - 2 sum_k p_(k) (n - k + 1/2) / n,   p_(1) <= ... <= p_(n)  (Chalasani et al. 2020)
    entropy = - sum_k p_k ln p_k                                            (Bhatt et al. 2020)

Gini is 0 for a flat map and 1 - 1/n for one patch (higher is sparser); entropy is ln n and 0 (lower
is simpler). Simple is not the same as right: read both beside a faithfulness metric.

Overlap of a mask with the object, of each image or of a whole dataset:

    IoU = |mask and object| / |mask or object|

`Overlap` counts pixels over all images first, so large objects weigh more. The foreground mIoU of
PDiscoFormer and iFAM is the latter, of their part maps (`foreground`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.data.dataset import IGNORE
from seecause.engine.chunks import run_in_chunks
from seecause.errors import BadOption
from seecause.metrics.pixels import Upsampling, checked, patch_centres, to_pixels
from seecause.metrics.registry import Scores, higher, lower, metric
from seecause.metrics.statistics import tie_ends

_PIXEL_BYTES = 128  # float64 and int64 values held for each pixel while a map is sorted


@metric(
    "localization",
    family="place of the object",
    columns={
        "aupr1": higher(
            "does the map rank the object's pixels first? Average precision; a random map scores "
            "the object's share of the image"
        ),
        "aupr0": higher("does it rank the background's pixels last? Average precision"),
        "pointing": higher("share of images whose highest point lies on the object"),
    },
)
@torch.no_grad()
def localization(
    maps: Tensor,
    masks: Tensor | None,
    *,
    upsample: Upsampling = "bilinear",
    ignore: int | None = IGNORE,
) -> Scores:
    """Does the map lie on the object? Average precision of object and background, and the pointing
    game.

    Args:
        maps: Attribution maps [B, gh, gw] or [B, H, W].
        masks: Object masks [B, H, W]: bool, or integers where `ignore` is neither object nor
            background.
        upsample: How maps become pixels.
        ignore: The value of pixels that count nowhere.

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
    wanted, counted = _object(maps, masks, ignore)
    size, grid = (wanted.shape[1], wanted.shape[2]), (maps.shape[1], maps.shape[2])
    blocks = upsample == "nearest" and grid != size
    spots = counted & patch_centres(grid, size, maps.device) if blocks else counted

    def run_maps(a: int, b: int) -> Tensor:
        pixels = to_pixels(maps[a:b], size, upsample).flatten(1)  # [b, H * W]
        on, valid = wanted[a:b].flatten(1), counted[a:b].flatten(1)
        best = pixels.masked_fill(~spots[a:b].flatten(1), -torch.inf).argmax(dim=1, keepdim=True)
        hit = on.gather(1, best)[:, 0].double()
        return torch.stack(
            [average_precision(pixels, on, valid), average_precision(-pixels, ~on, valid), hit]
        )

    scores = _over_maps(run_maps, wanted)  # [3, B]
    reasons = _reasons(wanted, counted, spots)
    scores[:, [reason != "" for reason in reasons]] = torch.nan
    protocol = {
        "metric": "localization",
        "upsample": upsample,
        "ignore": ignore,
        "pointing": "patch centre" if blocks else "first maximum",
    }
    columns = dict(zip(("aupr1", "aupr0", "pointing"), scores, strict=True))
    return Scores(columns, {"reasons": reasons}, protocol)


def average_precision(scores: Tensor, positive: Tensor, counted: Tensor) -> Tensor:
    """AP [B] of scores [B, P] for the positives among the counted entries, both [B, P] bool; NaN
    without positives."""
    ordered, order = scores.sort(dim=1, descending=True)
    positives = (positive & counted).gather(1, order).double()
    hits, seen = positives.cumsum(dim=1), counted.gather(1, order).double().cumsum(dim=1)
    precision = (hits / seen.clamp(min=1)).gather(1, tie_ends(ordered))  # of a whole run of equals
    return (positives * precision).sum(dim=1) / hits[:, -1]


def _reasons(wanted: Tensor, counted: Tensor, spots: Tensor) -> tuple[str, ...]:
    unscored = {
        "every pixel is ignored": ~counted.flatten(1).any(dim=1),
        "no object in the frame": ~wanted.flatten(1).any(dim=1),
        "no background in the frame": ~(counted & ~wanted).flatten(1).any(dim=1),
        "every patch centre is ignored": ~spots.flatten(1).any(dim=1),
    }
    reasons = [""] * len(wanted)
    for reason, rows in reversed(unscored.items()):  # the first one that holds wins
        for image in rows.nonzero()[:, 0].tolist():
            reasons[image] = reason
    return tuple(reasons)


@metric(
    "energy",
    family="place of the object",
    columns={
        "energy-pointing": higher("share of the positive values that lies on the object"),
        "relevance-mass": higher("share of all values, by size, that lies on the object"),
        "relevance-rank": higher(
            "share of the object that the highest values cover, as many as it has pixels",
        ),
        "top-k": higher("share of the k highest values that lies on the object"),
    },
)
@torch.no_grad()
def energy(
    maps: Tensor,
    masks: Tensor,
    *,
    k: int = 1000,
    upsample: Upsampling = "bilinear",
    ignore: int | None = IGNORE,
) -> Scores:
    """How much of the map's mass, and of its highest values, lies on the object?

    Maps and masks are those of `localization`. Of equals, the first goes first.
    """
    wanted, counted = _object(maps, masks, ignore)
    if not 1 <= k <= wanted[0].numel():
        raise BadOption("k", k, f"1 to {wanted[0].numel()} pixels")

    def run_maps(a: int, b: int) -> Tensor:
        pixels = to_pixels(maps[a:b], (wanted.shape[1], wanted.shape[2]), upsample).flatten(1)
        on, valid = wanted[a:b].flatten(1), counted[a:b].flatten(1)
        order = pixels.masked_fill(~valid, -torch.inf).argsort(dim=1, descending=True, stable=True)
        hits = on.gather(1, order).cumsum(dim=1)  # [b, P]: object pixels among the first
        ranks = [
            _among_first(hits, on.sum(dim=1)),
            _among_first(hits, valid.sum(dim=1).clamp(max=k)),
        ]
        masses = [_share(values, on, valid) for values in (pixels.clamp(min=0), pixels.abs())]
        return torch.stack(masses + ranks)

    scores = _over_maps(run_maps, wanted)  # [4, B]
    scores[:, ~wanted.flatten(1).any(dim=1).cpu()] = torch.nan
    protocol = {"metric": "energy", "k": k, "upsample": upsample, "ignore": ignore}
    names = ("energy-pointing", "relevance-mass", "relevance-rank", "top-k")
    return Scores(dict(zip(names, scores, strict=True)), protocol=protocol)


def _share(values: Tensor, on: Tensor, valid: Tensor) -> Tensor:
    """The part of the counted values that lies on the object, [B]."""
    return (values * on).sum(dim=1) / (values * valid).sum(dim=1)


def _among_first(hits: Tensor, count: Tensor) -> Tensor:
    """Hits among the first `count` [B], as a share of them."""
    return hits.gather(1, (count[:, None] - 1).clamp(min=0))[:, 0].double() / count


def _object(maps: Tensor, masks: Tensor | None, ignore: int | None) -> tuple[Tensor, Tensor]:
    """Where the object is and which pixels count, [B, H, W] bool on the maps' device."""
    if masks is None:
        raise BadOption("masks", None, "the masks of a dataset that has some")
    if masks.ndim != 3 or len(masks) != len(maps):
        raise BadOption("masks", list(masks.shape), f"[{len(maps)}, H, W], one for each map")
    masks = masks.to(maps.device)
    counted = torch.ones_like(masks, dtype=torch.bool) if ignore is None else masks != ignore
    return (masks != 0) & counted, counted


def _over_maps(run_maps: Callable[[int, int], Tensor], masks: Tensor) -> Tensor:
    """Scores [k, B] on the CPU, as many maps at a time as fit."""
    each = masks[0].numel() * _PIXEL_BYTES
    return run_in_chunks(run_maps, len(masks), each, masks.device, what="maps", dim=1).cpu()


@metric(
    "complexity",
    family="the map itself",
    columns={
        "gini": higher("how few patches hold the map: 0 flat, near 1 a single patch"),
        "entropy": lower("how widely the map is spread, in nats"),
    },
)
@torch.no_grad()
def complexity(maps: Tensor) -> Scores:
    """How few patches hold the map (Gini), and how widely it is spread (entropy).

    Of maps [B, gh, gw] or [B, H, W], at their own resolution.

    >>> import torch
    >>> flat, single = torch.ones(1, 2, 2), torch.eye(4)[0].view(1, 2, 2)
    >>> complexity(torch.cat([flat, single]))["gini"].tolist()
    [0.0, 0.75]
    """
    sizes = checked(maps).abs().flatten(1).cpu()
    shares = (sizes / sizes.sum(dim=1, keepdim=True)).sort(dim=1).values
    count = shares.shape[1]
    below = (count - torch.arange(1, count + 1, dtype=torch.float64) + 0.5) / count
    gini = 1 - 2 * (shares * below).sum(dim=1)
    return Scores({"gini": gini, "entropy": torch.special.entr(shares).sum(dim=1)})


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


def overlap(masks: Tensor, truth: Tensor, *, ignore: int | None = IGNORE) -> Overlap:
    """Masks [B, H, W] against objects [B, H, W] (bool, or integers: 1 object, 0 background,
    `ignore` neither), counted over all images."""
    both, either = _counts(masks, truth, ignore)
    return Overlap(int(both.sum()), int(either.sum()))


def iou(masks: Tensor, truth: Tensor, *, ignore: int | None = IGNORE) -> Tensor:
    """[B] float64: IoU of each image, NaN where there is neither mask nor object."""
    both, either = _counts(masks, truth, ignore)
    return both.double() / either


def foreground(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, H, W] bool: where a part wins over the background, which is the last channel of the part
    maps [B, K + 1, h, w].

    Maps are upsampled first, bilinearly with corners aligned, as in the public code.
    """
    return part_labels(maps, size) != maps.shape[1] - 1


def part_labels(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, H, W] int64: the channel that wins at each pixel."""
    if maps.ndim != 4 or maps.shape[1] < 2:
        raise BadOption(
            "maps",
            list(maps.shape),
            "[B, K + 1, h, w] with at least one part and the background last",
        )
    return F.interpolate(maps.detach(), size, mode="bilinear", align_corners=True).argmax(dim=1)


def box_mask(box: tuple[float, float, float, float], size: tuple[int, int]) -> Tensor:
    """[H, W] bool: the pixels whose centre lies in a box x, y, width, height. A box is a coarse
    stand-in for an object."""
    x, y, width, height = box
    rows, columns = (torch.arange(side, dtype=torch.float64) + 0.5 for side in size)
    return ((rows >= y) & (rows < y + height))[:, None] & ((columns >= x) & (columns < x + width))


def _counts(masks: Tensor, truth: Tensor, ignore: int | None) -> tuple[Tensor, Tensor]:
    """Pixels [B] in both and in either, ignored ones in neither."""
    if masks.ndim != 3 or masks.shape != truth.shape:
        raise BadOption(
            "masks", list(masks.shape), f"[B, H, W] like the objects, {list(truth.shape)}"
        )
    truth = truth.to(masks.device)
    counted = (
        torch.ones_like(truth, dtype=torch.bool)
        if ignore is None or truth.dtype == torch.bool
        else truth != ignore
    )
    mask, wanted = (masks != 0) & counted, (truth != 0) & counted
    return (mask & wanted).sum(dim=(1, 2)), (mask | wanted).sum(dim=(1, 2))
