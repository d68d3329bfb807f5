"""Does the prediction come and go with the pixels that the map ranks first?

Insertion and deletion (RISE, Petsiuk et al. 2018). Deletion starts from the image and covers its
most important pixels with a constant, step by step; insertion starts from the blurred image and
uncovers them. With class scores y_0 .. y_n,

    area = (y_0 / 2 + y_1 + ... + y_{n-1} + y_n / 2) / n

so every step weighs the same, also a short last one. Low deletion and high insertion are good; the
difference is taken for each image. Curves are not normalised or made monotone, and misclassified
images are not left out.

Region perturbation (Samek et al. 2017) removes patches most important first (MoRF) or least
important first (LeRF). With x_k the image after k steps,

    AOPC = mean_{k=0..n} [f(x) - f(x_k)]
    ABPC = AOPC_MoRF - AOPC_LeRF = mean_k [f(x_k^LeRF) - f(x_k^MoRF)]

Higher AOPC_MoRF, lower AOPC_LeRF and higher ABPC are better. The MoRF curve is also pixel flipping
(Bach et al. 2015): a low area is good.

Does the sum of a map over some patches say how much the score falls without them? With a set S of
patches,

    a(S) = sum_{j in S} A_j,      d(S) = f(x) - f(x without S)

single_deletion  Spearman's correlation of a and d over the cells of a coarse grid, S = one cell, of
                 logits (IDSDS: Hesse et al. 2024, arXiv 2407.11910; higher is better). Their models
                 were fine-tuned on images without one cell; on others this is their plain single
                 deletion score
saco             Are groups of patches as influential as the map says, by as much? (Wu et al. 2024;
                 -1 to 1, higher is better). Patches in descending order are cut into K groups of
                 equal size, s_i is the mean of the map over the i-th:
                     w_ij = s_i - s_j if d_i >= d_j else -(s_i - s_j)          i < j
                     SaCo = sum_{i<j} w_ij / sum_{i<j} |w_ij|

A map or score that never varies has no correlation: NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics.pixels import (
    Fill,
    Order,
    Steps,
    blurred,
    filled,
    image_scorer,
    importance_ranks,
    thresholds,
    to_pixels,
)
from seecause.metrics.registry import Scores, metric
from seecause.metrics.statistics import rank_correlation
from seecause.models.base import ImageModel
from seecause.models.block import spread_out
from seecause.options import Count
from seecause.target import Score, Spec


@metric("insertion-deletion")
def insertion_deletion(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    steps: Steps = "rise",
    order: Order = "pixel",
    fill: float = 0.0,
    score: Score = "prob",
) -> Scores:
    """Does the score rise with the pixels that the map ranks first, and fall without them?

    Args:
        model: The model that made the prediction.
        images: Normalised images [B, 3, H, W].
        maps: Attribution maps [B, gh, gw], which are enlarged bilinearly, or [B, H, W].
        target: The class, as in `sc.attribute`. None is the predicted class.
        steps: "rise" (8 rows of pixels each), "patch", or the number of steps.
        order: Whether single pixels or whole patches change.
        fill: What covers pixels, in normalised units: 0 is the mean colour.
        score: Probability, log probability or logit.

    Returns:
        `Scores` with the areas "insertion", "deletion" and "ins-del". Its details are the curves
        "insertion curve" and "deletion curve" [B, n + 1] and the "shares" [n + 1] of the image
        changed by then.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> data = sc.data.open_data("critters:clean", limit=2)
        >>> images, labels, _ = sc.data.to_batch(model, list(data))
        >>> maps = sc.attribute(model, images, labels).maps
        >>> scores = insertion_deletion(model, images, maps, labels, steps=8)
        >>> scores["insertion curve"].shape, (scores["ins-del"] > 0).all()
        (torch.Size([2, 9]), tensor(True))
    """
    scorer = image_scorer(model, images, target, score=score)
    ranks, count = scorer.ranks(maps, order)
    taken = thresholds(count, scorer.size, scorer.grid, steps)
    images, plain = scorer.images, scorer.plain[:, None]
    covered = scorer.same(("covered", fill), lambda: filled(images, fill))
    soft = scorer.same("blurred", lambda: blurred(images))
    deletion = scorer.mixed(images, filled(images, fill), ranks, taken[1:-1])
    insertion = scorer.mixed(blurred(images), images, ranks, taken[1:-1])
    deletion = torch.cat([plain, deletion, covered], dim=1)
    insertion = torch.cat([soft, insertion, plain], dim=1)
    areas = {"insertion": area(insertion), "deletion": area(deletion)}
    shares = taken.double() / count
    options = {"steps": steps, "evaluations": len(taken), "order": order, "fill": fill}
    return Scores(
        {**areas, "ins-del": areas["insertion"] - areas["deletion"]},
        {"insertion curve": insertion, "deletion curve": deletion, "shares": shares},
        scorer.protocol("insertion-deletion", **options),
    )


def area(curves: Tensor) -> Tensor:
    """The area under curves [B, n + 1] by the trapezoid rule on even steps, [B]."""
    return torch.trapezoid(curves, dim=1) / (curves.shape[1] - 1)


@metric("perturbation")
def perturbation(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    steps: Steps = "patch",
    fill: Fill = 0.0,
    score: Score = "prob",
) -> Scores:
    """The score while patches are removed, most and least important first.

    Details are the curves "morf" and "lerf" [B, n + 1] and the "shares" [n + 1] of the image
    removed by then.
    """
    scorer = image_scorer(model, images, target, score=score)
    ranks, count = scorer.ranks(maps, "patch")
    taken = thresholds(count, scorer.size, scorer.grid, steps)
    plain, empty = scorer.plain[:, None], filled(scorer.images, fill)
    covered = scorer.same(("covered", fill), lambda: empty)
    morf, lerf = (
        torch.cat([plain, scorer.mixed(scorer.images, empty, places, taken[1:-1]), covered], dim=1)
        for places in (ranks, count - 1 - ranks)
    )
    return Scores(
        {
            "aopc-morf": (plain - morf).mean(dim=1),
            "aopc-lerf": (plain - lerf).mean(dim=1),
            "abpc": (lerf - morf).mean(dim=1),
            "pixel-flipping": area(morf),
        },
        {"morf": morf, "lerf": lerf, "shares": taken.double() / count},
        scorer.protocol("perturbation", steps=steps, fill=fill),
    )


@metric("idsds")
def single_deletion(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    cells: Count = 4,
    fill: Fill = 0.0,
    score: Score = "logit",
) -> Tensor:
    """Are the cells of a coarse grid ranked as the logit falls without them?

    The result [B], from -1 to 1, is the rank correlation over `cells` x `cells` cells.
    """
    scorer = image_scorer(model, images, target, score=score)
    pixels = to_pixels(scorer.one_each(maps), scorer.size)
    single = torch.eye(cells**2, dtype=torch.bool, device=pixels.device).unflatten(1, (cells, -1))
    covers = spread_out(single, scorer.size)  # [cells^2, H, W]
    sums = exact_sums(pixels.flatten(1), covers.flatten(1))
    return rank_correlation(sums.cpu(), scorer.drops(single[None], fill))


@metric("saco")
def saco(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    groups: Count = 10,
    fill: Fill = "mean",
    score: Score = "prob",
) -> Tensor:
    """Do groups of patches matter in the order and proportion that the map claims?

    The result [B] goes from -1 to 1. Where the number of patches is no multiple of `groups`, groups
    differ by one patch: salience is therefore their mean, not their sum. A constant map gives
    NaN.
    """
    scorer = image_scorer(model, images, target, score=score)
    cells = scorer.cells(maps)
    grid, count = (cells.shape[1], cells.shape[2]), cells[0].numel()
    if not 2 <= groups <= count:
        raise BadOption("groups", groups, f"2 to {count}, the number of patches")
    places, _ = importance_ranks(cells, grid, grid)  # [B, gh, gw]
    numbers = torch.arange(groups, device=places.device)[:, None, None]
    member = (places[:, None] * groups // count) == numbers  # [B, K, gh, gw]
    salience = (cells[:, None] * member).sum(dim=(2, 3)) / member.sum(dim=(2, 3))
    flat = (cells == cells[:, :1, :1]).flatten(1).all(dim=1).cpu()
    return coefficient(salience.cpu(), scorer.drops(member, fill)).masked_fill(flat, torch.nan)


def coefficient(salience: Tensor, drops: Tensor) -> Tensor:
    """SaCo [B] of groups in descending order, from their salience and drops, both [B, K]."""
    first, second = torch.triu_indices(salience.shape[1], salience.shape[1], offset=1)
    gap = salience[:, first] - salience[:, second]
    weight = torch.where(drops[:, first] >= drops[:, second], gap, -gap)
    return weight.sum(dim=1) / weight.abs().sum(dim=1)


def exact_sums(values: Tensor, sets: Tensor) -> Tensor:
    """Sums [B, M] of values [B, N] over sets [M, N] bool, in which equal sums are equal to the
    last bit: rounding would rank them. Values are taken as whole multiples of so small a part of
    the largest that float64 holds the sum of all N."""
    values = values.double()
    unit = values.abs().amax(dim=1, keepdim=True) / 2 ** (52 - sets.shape[1].bit_length())
    whole = (values / unit.where(unit > 0, 1)).round()
    return whole @ sets.to(whole.dtype).T * unit
