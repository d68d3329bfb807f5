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

ERASER (DeYoung et al. 2020), averaged over shares k of the patches, 10 to 90 %:

    comprehensiveness = f(x) - f(x without the top k)           (higher is better)
    sufficiency       = f(x) - f(only the top k)                (lower is better)
    log-odds          = log p(x without the top k) - log p(x)   (lower is better)

ROAD, remove and debias (Rong et al. 2022), removes patches by interpolating them from what is left,
so that the hole itself carries little information. Each missing pixel is the weighted mean of its
eight neighbours, 1/6 for those beside it and 1/12 for those across a corner (those beyond the edge
of the image are left out). That is one sparse linear system for each image, with i missing and j
its neighbours,

    sum_j w_ij x_i - sum_{j missing} w_ij x_j = sum_{j known} w_ij x_j

solved for all channels; then Gaussian noise of deviation 0.01, the same for every image, is added
to what was filled in. MoRF (lower is better) and LeRF (higher is better) are means over shares of
10 to 90 %, and combined = (LeRF - MoRF) / 2 (higher is better; pytorch-grad-cam).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics.pixels import (
    Blur,
    Fill,
    Order,
    Steps,
    Ties,
    Upsampling,
    blurred,
    filled,
    image_scorer,
    thresholds,
)
from seecause.metrics.registry import Scores, higher, lower, metric
from seecause.models.base import ImageModel
from seecause.target import Score, Spec

TENTHS = tuple(tenth / 10 for tenth in range(1, 10))
_NEIGHBOURS = (  # of a missing pixel, in raster order, each with its weight
    (-1, -1, 1 / 12), (-1, 0, 1 / 6), (-1, 1, 1 / 12), (0, -1, 1 / 6),
    (0, 1, 1 / 6), (1, -1, 1 / 12), (1, 0, 1 / 6), (1, 1, 1 / 12),
)  # fmt: skip


@metric(
    "insertion-deletion",
    family="curves",
    columns={
        "insertion": higher(
            "class score while the patches the map puts first are uncovered in a blurred image, "
            "area under the curve"
        ),
        "deletion": lower(
            "class score while the patches the map puts first are covered, area under the curve"
        ),
        "ins-del": higher("insertion less deletion: one number for faithfulness"),
    },
)
def insertion_deletion(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    steps: Steps = "rise",
    order: Order = "pixel",
    upsample: Upsampling = "bilinear",
    blur: Blur = "rise",
    fill: float = 0.0,
    score: Score = "prob",
    ties: Ties = "raster",
) -> Scores:
    """Does the score rise with the pixels that the map ranks first, and fall without them?

    Args:
        model: The model that made the prediction.
        images: Normalised images [B, 3, H, W].
        maps: Attribution maps [B, gh, gw] or [B, H, W].
        target: The class, as in `sc.attribute`. None is the predicted class.
        steps: "rise" (8 rows of pixels each), "patch", or the number of steps.
        order: Whether single pixels or whole patches change.
        upsample: How maps become pixels.
        blur: The blurred image that insertion starts from.
        fill: What covers pixels, in normalised units: 0 is the mean colour.
        score: Probability, log probability or logit.
        ties: Raster order among equal values, or the seed of a random one.

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
    ranks, count = scorer.ranks(maps, order=order, upsample=upsample, ties=ties)
    taken = thresholds(count, scorer.size, scorer.grid, steps)
    images, plain = scorer.images, scorer.plain[:, None]
    deletion = scorer.mixed(images, filled(images, fill), ranks, taken[1:])
    insertion = scorer.mixed(blurred(images, blur), images, ranks, taken[:-1])
    deletion, insertion = torch.cat([plain, deletion], dim=1), torch.cat([insertion, plain], dim=1)
    areas = {"insertion": area(insertion), "deletion": area(deletion)}
    return Scores(
        {**areas, "ins-del": areas["insertion"] - areas["deletion"]},
        {
            "insertion curve": insertion,
            "deletion curve": deletion,
            "shares": taken.double() / count,
        },
        scorer.protocol(
            "insertion-deletion", steps=steps, evaluations=len(taken), order=order,
            upsample=upsample, blur=blur, fill=fill, ties=ties,
        ),
    )  # fmt: skip


def area(curves: Tensor) -> Tensor:
    """The area under curves [B, n + 1] by the trapezoid rule on even steps, [B]."""
    return torch.trapezoid(curves, dim=1) / (curves.shape[1] - 1)


@metric(
    "perturbation",
    family="curves",
    columns={
        "aopc-morf": higher(
            "mean drop of the score while patches are removed, most important first"
        ),
        "aopc-lerf": lower(
            "mean drop of the score while patches are removed, least important first"
        ),
        "abpc": higher("area between the curves of patches removed least and most important first"),
        "pixel-flipping": lower(
            "area under the score's curve while patches are removed, most important first"
        ),
    },
)
def perturbation(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    steps: Steps = "patch",
    order: Order = "patch",
    upsample: Upsampling = "bilinear",
    fill: Fill = 0.0,
    score: Score = "prob",
    ties: Ties = "raster",
) -> Scores:
    """The score while patches are removed, most and least important first.

    Options are those of `insertion_deletion`; `fill` may also be "mean" or "blur" of the image.
    Details are the curves "morf" and "lerf" [B, n + 1] and "shares" [n + 1].
    """
    scorer = image_scorer(model, images, target, score=score)
    ranks, count = scorer.ranks(maps, order=order, upsample=upsample, ties=ties)
    taken = thresholds(count, scorer.size, scorer.grid, steps)
    plain, empty = scorer.plain[:, None], filled(scorer.images, fill)
    morf, lerf = (
        torch.cat([plain, scorer.mixed(scorer.images, empty, places, taken[1:])], dim=1)
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
        scorer.protocol(
            "perturbation", steps=steps, order=order, upsample=upsample, fill=fill, ties=ties
        ),
    )


@metric(
    "removal",
    family="removal",
    columns={
        "comprehensiveness": higher("drop of the score without the patches the map puts first"),
        "sufficiency": lower("drop of the score with only the patches the map puts first"),
        "log-odds": lower("change of the log probability without the patches the map puts first"),
    },
)
def removal(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    shares: Sequence[float] = TENTHS,
    fill: Fill = 0.0,
    ties: Ties = "raster",
) -> Scores:
    """The loss of the class without the top patches, and with them alone, averaged over `shares`.

    Details hold the loss at each share, [B, K].
    """
    scorer = image_scorer(model, images, target, score="logprob")
    if scorer.target.classes is None or scorer.target.against is not None:
        raise BadOption("target", target, "a class: a contrast or a function has no log-odds")
    ranks, count = scorer.ranks(maps, order="patch", ties=ties)
    taken = patch_counts(shares, count)
    whole, empty = scorer.plain[:, None], filled(scorer.images, fill)
    without_top = scorer.mixed(scorer.images, empty, ranks, taken)
    only_top = scorer.mixed(scorer.images, empty, count - 1 - ranks, count - taken)
    details = {
        "lost without top": whole.exp() - without_top.exp(),
        "lost with top only": whole.exp() - only_top.exp(),
        "log lost without top": whole - without_top,
        "shares": tuple(shares),
    }
    return Scores(
        {
            "comprehensiveness": details["lost without top"].mean(dim=1),
            "sufficiency": details["lost with top only"].mean(dim=1),
            "log-odds": -details["log lost without top"].mean(dim=1),
        },
        details,
        scorer.protocol("removal", shares=list(shares), fill=fill, ties=ties),
    )


def patch_counts(shares: Sequence[float], count: int) -> Tensor:
    """How many of `count` patches each share is, at least one, [K]."""
    if not shares or not all(0 < share < 1 for share in shares):
        raise BadOption("shares", shares, "shares of the image between 0 and 1")
    return torch.tensor([max(1, round(share * count)) for share in shares])


@metric(
    "road",
    family="removal",
    columns={
        "road-morf": lower(
            "score after patches are removed, most important first, and filled from what is "
            "around them"
        ),
        "road-lerf": higher(
            "score after patches are removed, least important first, and filled from what is "
            "around them"
        ),
        "road": higher("half the difference of road-lerf and road-morf"),
    },
)
def road(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    shares: Sequence[float] = TENTHS,
    noise: float = 0.01,
    score: Score = "prob",
    ties: Ties = "raster",
    seed: int = 0,
) -> Scores:
    """The score after patches are removed and filled from what is around them.

    `noise` is in normalised units. Solves two sparse systems for each image and share, on the CPU.
    Details are "morf" and "lerf" [B, K] for each of "shares".
    """
    scorer = image_scorer(model, images, target, score=score)
    ranks, count = scorer.ranks(maps, order="patch", ties=ties)
    taken = patch_counts(shares, count).to(ranks.device)
    if int(taken.max()) == count:
        expected = "shares that leave at least one patch to interpolate from"
        raise BadOption("shares", list(shares), expected)
    generator, shape = torch.Generator().manual_seed(seed), scorer.images.shape[1:]
    grain = noise * torch.randn(shape, generator=generator, dtype=torch.float64)

    def after(places: Tensor) -> Tensor:
        def image_at(image: Tensor, step: Tensor) -> Tensor:
            gone = places[image] < taken[step][:, None, None]  # [m, H, W]
            pairs = zip(scorer.images[image], gone, strict=True)
            return torch.stack([impute(own, hole, grain) for own, hole in pairs])

        return scorer.each(len(taken), image_at)

    morf, lerf = after(ranks), after(count - 1 - ranks)
    return Scores(
        {
            "road-morf": morf.mean(dim=1),
            "road-lerf": lerf.mean(dim=1),
            "road": (lerf - morf).mean(dim=1) / 2,
        },
        {"morf": morf, "lerf": lerf, "shares": tuple(shares)},
        scorer.protocol("road", shares=list(shares), noise=noise, ties=ties, seed=seed),
    )


def impute(image: Tensor, gone: Tensor, grain: Tensor | None = None) -> Tensor:
    """Interpolate the pixels `gone` [H, W] of an image [C, H, W] from the others, and add `grain`
    [C, H, W] to them."""
    from scipy.sparse import csc_matrix
    from scipy.sparse.linalg import splu

    hole = gone.cpu().numpy()
    if not hole.any():
        return image
    pixels = image.detach().cpu().double().numpy()
    (rows, columns), (height, width) = np.nonzero(hole), hole.shape
    count = len(rows)
    unknown = np.full(hole.shape, -1)
    unknown[rows, columns] = np.arange(count)
    total, right_side = np.zeros(count), np.zeros((count, len(pixels)))
    entries, equations, variables = [], [], []
    for down, right, weight in _NEIGHBOURS:
        y, x = rows + down, columns + right
        inside = np.flatnonzero((y >= 0) & (y < height) & (x >= 0) & (x < width))
        y, x = y[inside], x[inside]
        missing = hole[y, x]
        total[inside] += weight
        right_side[inside[~missing]] += weight * pixels[:, y[~missing], x[~missing]].T
        entries.append(np.full(missing.sum(), -weight))
        equations.append(inside[missing])
        variables.append(unknown[y[missing], x[missing]])
    where = (
        np.concatenate([*equations, np.arange(count)]),
        np.concatenate([*variables, np.arange(count)]),
    )
    matrix = csc_matrix((np.concatenate([*entries, total]), where), shape=(count, count))
    # The matrix is symmetric (w_ij = w_ji), so no pivoting is needed.
    solver = splu(
        matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
    )
    solved = solver.solve(right_side)  # [n, C]
    pixels[:, hole] = solved.T if grain is None else solved.T + grain.numpy()[:, hole]
    return torch.from_numpy(pixels).to(image)
