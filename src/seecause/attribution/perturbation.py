"""Perturbation methods: parts of the image are shown or hidden, and the class score is read. Only
forward passes are used.

Simple insertion and deletion move one neighbourhood of pixels; RISE and ViT-CX weigh masks of
pixels by the score that they leave; MDA searches for an order of patches. TIS and MUTEX run choices
M_m of patches, the others dropped after the position embedding, and a patch has the mean class
score of the choices that kept it:

    S_j = sum_m f_m M_mj / max(1, sum_m M_mj)

Prefix tokens stay in every run; means and latent pools read kept patches only. A patch that no
choice keeps gets 0.

Random, center and sobel are controls that know nothing of the model: a method must beat
them.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from functools import partial, reduce
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.gradients import bind_target, on_cells, one_block
from seecause.attribution.registry import EVERY_VIEW, BlankLike, Maps, blanks, find, method, size_of
from seecause.data.dataset import Size
from seecause.engine.chunks import fit, in_chunks, plain_logits, run_in_chunks
from seecause.engine.sweep import Select, selection
from seecause.engine.trace import attention_probs, kept_logits_each, record
from seecause.models.base import ImageModel
from seecause.models.block import spread_out
from seecause.models.view import VisionModel
from seecause.options import Count, NotNegative, Positive, Share
from seecause.target import Score, Target


@method("simple-insertion", forwards="N", needs="logits", architectures=EVERY_VIEW)
@torch.no_grad()
def simple_insertion(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    select: Select | Tensor = "box1",
    blank: BlankLike = "white",
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The class score of the blank with one neighbourhood of pixels pasted in.

    CAAP's control (table 12 of its paper): the same neighbourhoods S(i), moved as pixels. For patch
    embeddings without overlap this is activation patching at the embedding (l_s = l_e = 0,
    tail = all), which the tests use as a cross-check of the engine.
    """
    return _moved(model, images, target, select, blank, score, seed, inserted=True)


@method("simple-deletion", forwards="N + 1", needs="logits", architectures=EVERY_VIEW, signed=True)
@torch.no_grad()
def simple_deletion(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    select: Select | Tensor = "box1",
    blank: BlankLike = "white",
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The drop of the class score when one neighbourhood is covered."""
    return _moved(model, images, target, select, blank, score, seed, inserted=False)


def _moved(
    model: ImageModel,
    images: Tensor,
    target: Target,
    select: Select | Tensor,
    blank: BlankLike,
    score: Score,
    seed: int,
    *,
    inserted: bool,
) -> Maps:
    """Class scores with the pixels of each S(i) put into the blank, or their drop with the blank's
    put into the image."""
    layout, size = model.check(images), size_of(images)
    logits = plain_logits(model, images)
    bound = target.bind(logits)
    empty = blanks(model, images, blank, seed).expand_as(images)
    above, below = (images, empty) if inserted else (empty, images)  # [B, 3, H, W]
    chosen = selection(layout.cells, select).to(images.device).unflatten(1, layout.grid)
    marks = spread_out(chosen, size)  # [N, H, W]

    def run_patches(a: int, b: int) -> Tensor:
        item = torch.arange(a, b, device=images.device)  # of B * N
        image, patch = item // len(marks), item % len(marks)
        mixed = torch.where(marks[patch][:, None], above[image], below[image])  # [m, 3, H, W]
        return bound.take(image).score(model(mixed), score)

    total, each = len(images) * len(marks), model.forward_bytes(layout)
    scores = run_in_chunks(run_patches, total, each, images.device, what="patches")
    scores = scores.view(-1, len(marks))
    plain = bound.score(logits, score)[:, None]
    return Maps(scores if inserted else plain - scores, bound)


@method("rise", forwards="4000", needs="logits", architectures=EVERY_VIEW)
@torch.no_grad()
def rise(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    masks: Count = 4000,
    cells: Count = 7,
    p: Share = 0.5,
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The mean of random masks, weighted by the class score of what they leave visible.

    RISE (Petsiuk et al. 2018): a coarse grid of cells, each open with probability p, is enlarged
    smoothly and shifted at random into a mask m_k (eq. 6):

        S = sum_k f(x * m_k) m_k / (n p)

    Covered pixels are 0 in normalised space. Masks come from `seed` alone and are the same for
    every image.
    """
    size, each = size_of(images), model.forward_bytes(model.check(images))
    bound = bind_target(model, images, target)
    draw = random_masks(masks, cells, p, size, seed=seed, device=images.device)

    def one_image(place: int) -> Tensor:
        goal = bound.take(slice(place, place + 1))

        def run_masks(a: int, b: int) -> Tensor:
            chosen = draw(a, b)
            logits = model(images[place] * chosen[:, None].to(images))
            scores = goal.score(logits, score)
            return torch.einsum("m,mhw->hw", scores, (chosen / (masks * p)).to(scores))

        together = fit(masks, each, images.device)
        return reduce(torch.add, in_chunks(run_masks, masks, together, what="masks"))

    native = torch.stack([one_image(place) for place in range(len(images))])
    return Maps(on_cells(native, model.check(images)), bound, native=native)


def random_masks(
    count: int,
    cells: int,
    p: float,
    size: Size,
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> Callable[[int, int], Tensor]:
    """`draw(a, b)` returns masks a to b of `count`, [b - a, H, W] in [0, 1], independent of earlier
    draws."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(count, 1, cells, cells, generator=generator, dtype=torch.float64)
    open_cells = (noise < p).double()
    cell = [math.ceil(side / cells) for side in size]  # pixels
    shifts = [torch.randint(pixels, (count,), generator=generator).tolist() for pixels in cell]

    def draw(a: int, b: int) -> Tensor:
        large = [(cells + 1) * pixels for pixels in cell]
        smooth = F.interpolate(open_cells[a:b].to(device), size=large, mode="bilinear")[:, 0]
        corners = zip(smooth, *(shift[a:b] for shift in shifts), strict=True)
        return torch.stack([mask[y : y + size[0], x : x + size[1]] for mask, y, x in corners])

    return draw


@method("tis", forwards="1 + 1024 on half of the patches", needs="activations, token removal")
@torch.no_grad()
def tis(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    masks: Count = 1024,
    keep: Share = 0.5,
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The mean score of runs on half of the patches, over those runs that had the patch.

    Transformer input sampling (Englebert et al. 2023): the channels of all block outputs, each seen
    as an image of N patches, are clustered by k-means, and each centre keeps the share `keep` of
    the patches where it is highest. k-means is seeded anew for each image, so the index in a batch
    does not matter. Maps are not scaled to 0..1.
    """
    layout = model.check(images)
    count = max(1, int(keep * layout.n_patches))

    def choose(image: Tensor) -> tuple[Tensor, Tensor]:
        trace = record(model, image, states=range(1, model.n_layers + 1))
        assert trace.logits is not None
        outputs = [h[0, layout.patches] for h in trace.states.values()]  # each [N, D]
        channels = torch.cat(outputs, dim=-1).T  # [L*D, N]
        return top(centres(channels, masks, seed=seed), count).to(image.device), trace.logits

    chosen, logits = zip(*map(choose, images.split(1)), strict=True)
    bound = target.bind(torch.cat(logits))
    return _mean_over_choices(model, images, torch.stack(chosen), bound, score)


def centres(channels: Tensor, count: int, *, seed: int) -> Tensor:
    """k-means centres [k, N] of one image's channels [L*D, N], at most one for each channel; on the
    CPU."""
    from sklearn.cluster import KMeans

    points = channels.to(torch.promote_types(channels.dtype, torch.float32)).cpu().numpy()
    options: dict[str, Any] = {"n_init": 1, "random_state": seed}
    clusters = KMeans(min(count, len(points)), **options).fit(points)
    return torch.from_numpy(clusters.cluster_centers_)


def top(values: Tensor, count: int) -> Tensor:
    """The `count` highest patches of each row of values [k, N], as bool [k, N]."""
    return values.argsort(dim=1, descending=True, stable=True).argsort(dim=1) < count


EDGE = 0.01  # edges of the attention graph below this share of a block's largest weight are cut


@method("mutex", forwards="1 + 54 on half of the patches", needs="attention, token removal")
@torch.no_grad()
def mutex(
    model: VisionModel, images: Tensor, target: Target, *, keep: Share = 0.5, score: Score = "prob"
) -> Maps:
    """The mean score of runs on half of the patches, chosen by 54 statistics of the attention
    graph.

    MUTEX (Traini et al.): attention between patches is a graph in each block (heads fused by min,
    max or sum; edges below 1 % of the block's largest are cut). A node's in- or out-degree over
    blocks is summarised by nine statistics: 3 fusions x 2 degrees x 9 = 54 vectors. Each keeps the
    nodes at or above its lower median. The map is coarse: few masks, many ties.
    """

    layout = model.check(images)

    def choose(a: int, b: int) -> Tensor:
        blocks, parts = attention_probs(model, images[a:b]), []
        for probs in islice(blocks, model.n_layers):  # a latent pool is no block
            between = probs[..., layout.patches, layout.patches]  # [B, H, N, N]
            fused = [between.amin(dim=1), between.amax(dim=1), between.sum(dim=1)]
            graph = torch.stack(fused, dim=1)  # [B, 3, N, N]
            faint = graph < EDGE * graph.amax(dim=(-1, -2), keepdim=True)
            graph = graph.masked_fill(faint, 0)
            parts.append(torch.stack([graph.sum(dim=-2), graph.sum(dim=-1)], dim=2))
        degrees = torch.stack(parts, dim=3)  # [B, 3 fusions, 2 (in, out), L, N]
        nine = torch.from_numpy(statistics(degrees.cpu().numpy())).to(degrees)
        return upper(nine.flatten(1, 3), keep)

    each = one_block(model, layout)
    chosen = run_in_chunks(choose, len(images), each, images.device, what="images")  # [B, 54, N]
    return _mean_over_choices(model, images, chosen, bind_target(model, images, target), score)


def statistics(table: np.ndarray) -> np.ndarray:
    """Nine numbers for each node of tables [..., L, N] over its L values: [..., 9, N]. 0/0 is
    0."""
    from scipy import stats

    count, total = table.shape[-2], table.sum(axis=-2)
    spread = table.std(axis=-2, ddof=1) if count > 1 else np.zeros_like(total)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns about nodes whose values are all equal
        rows = [
            stats.entropy(table, axis=-2),
            table.max(axis=-2),
            table.min(axis=-2),
            total,
            spread,
            total / (spread + 1e-8),
            np.sort(table, axis=-2)[..., (count - 1) // 2, :],  # the lower median
            stats.skew(table, axis=-2),
            stats.kurtosis(table, axis=-2),
        ]
    return np.nan_to_num(np.stack(rows, axis=-2), nan=0, posinf=0, neginf=0)


def upper(values: Tensor, keep: float) -> Tensor:
    """The share `keep` of the patches with the highest values [..., N]: those at or above the
    threshold, so ties keep more."""
    n = values.shape[-1]
    place = max(0, math.ceil((1 - keep) * n) - 1)
    return values >= values.sort(dim=-1).values[..., place, None]


def _mean_over_choices(
    model: VisionModel, images: Tensor, chosen: Tensor, bound: Target, score: Score
) -> Maps:
    """The mean score over those of the choices [B, M, N] that kept a patch."""
    logits = kept_logits_each(model, images, chosen)
    scores = bound.score(logits, score)  # [B, M]
    there = chosen.to(scores.dtype)
    return Maps((scores[..., None] * there).sum(dim=1) / there.sum(dim=1).clamp_min(1), bound)


@method("vit-cx", forwards="1 + 2 M (M masks, by image)", needs="activations")
@torch.no_grad()
def vit_cx(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    threshold: Positive = 0.1,
    noise: NotNegative = 0.1,
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The model's own features as masks, weighted by the score they cause.

    ViT-CX (Xie et al. 2023): the channels of the last block's normed input, enlarged to pixels and
    scaled to [0, 1], are clustered (cosine distance, complete linkage); the sum of a cluster,
    scaled again, is a mask m_k. Covered pixels get faint noise e_k ~ N(0, 0.1^2) (1 - m_k), whose
    own effect is subtracted:
        c_k = f(x m_k + e_k) - f(x + e_k) + f(x),     S = (1 / M) sum_k c_k m_k / sum_k m_k
        (pixel by pixel)
    M depends on the image. A flat channel makes an empty mask, and a pixel no mask shows gets 0.
    Noise comes from `seed` alone.
    """
    layout, last = model.check(images), model.n_layers - 1
    size, each = size_of(images), 2 * model.forward_bytes(layout)

    def one_image(place: int) -> tuple[Tensor, Tensor, int]:
        image = images[place : place + 1]
        trace = record(model, image, states=[last])
        assert trace.logits is not None
        normed = model.blocks[last].norm(trace.states[last])[0, layout.patches]  # [N, D]
        every = cluster(normed.T.unflatten(1, layout.grid), size, threshold=threshold)
        generator = torch.Generator().manual_seed(seed)
        seeds = torch.randint(2**31, (normed.shape[1],), generator=generator).tolist()
        goal = target.take(slice(place, place + 1)).bind(trace.logits)
        whole = goal.score(trace.logits, score)

        def run_masks(a: int, b: int) -> tuple[Tensor, Tensor]:
            masks = every[a:b, None]  # [m, 1, H, W]
            faint = noise * (1 - masks) * _noise(seeds[a:b], image)
            mixed = torch.cat([image * masks + faint, image + faint])
            shown, disturbed = goal.score(model(mixed), score).split(b - a)
            cause, pixels = shown - disturbed + whole, masks[:, 0].to(shown)
            return torch.einsum("m,mhw->hw", cause, pixels), pixels.sum(dim=0)

        together = fit(len(every), each, image.device)
        parts = in_chunks(run_masks, len(every), together, what="masks")
        total, cover = (reduce(torch.add, sums) for sums in zip(*parts, strict=True))
        tiny = torch.finfo(cover.dtype).tiny
        return total / (len(every) * cover.clamp_min(tiny)), trace.logits, len(every)

    maps, logits, counts = zip(*map(one_image, range(len(images))), strict=True)
    native, bound = torch.stack(maps), target.bind(torch.cat(logits))
    return Maps(on_cells(native, layout), bound, native=native, used={"masks": list(counts)})


def cluster(channels: Tensor, size: Size, *, threshold: float) -> Tensor:
    """Masks [M, H, W] from channels [D, gh, gw] of one image: each is the sum of channels that are
    alike at full size, scaled to [0, 1]."""
    from sklearn.cluster import AgglomerativeClustering

    masks = scaled(F.interpolate(channels[None], size=size, mode="bilinear")[0])  # [D, H, W]
    unit = F.normalize(masks.flatten(1), dim=1)
    distance = (1 - unit @ unit.T).double().cpu().numpy()
    options: dict[str, Any] = {"n_clusters": None, "distance_threshold": threshold}
    clusters = AgglomerativeClustering(metric="precomputed", linkage="complete", **options)
    labels = torch.from_numpy(clusters.fit_predict(distance)).to(masks.device)
    sums = masks.new_zeros(int(labels.max()) + 1, *size).index_add_(0, labels, masks)
    return scaled(sums)


def scaled(maps: Tensor) -> Tensor:
    """Each map of [M, H, W] to [0, 1]; a flat one to 0."""
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    return ((maps - low) / (high - low)).masked_fill(high <= low, 0)


def _noise(seeds: list[int], like: Tensor) -> Tensor:
    """One draw of N(0, 1) for each seed, of the shape of the image `like` [1, 3, H, W]."""
    generator, shape = torch.Generator(), like.shape[1:]
    draws = [
        torch.randn(shape, generator=generator.manual_seed(seed), dtype=torch.float32)
        for seed in seeds
    ]
    return torch.stack(draws).to(like)


KERNELS = range(31, 102, 2)  # px
HEAVY = 1e4
# patches that are shown [m, N], and what is behind the image [3, H, W] -> scores [m]
ScoreShown = Callable[[Tensor, Tensor], Tensor]


@method(
    "mda",
    forwards="about N min(28, 2 sqrt N) + 2 N (5600 for 196 patches)",
    needs="logits, a guide map",
)
@torch.no_grad()
def mda(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    guide: str = "bt",
    candidates: Count | None = None,
    reach: float = 0.9,
    faint: float = 0.01,
    score: Score = "prob",
) -> Maps:
    """The order of patches that insertion and deletion reward most, found by search.

    MDA, metric-driven attributions (Walker et al.):

    1. Insertion search. From the blurred image, try the s best patches left by the map of the
       method `guide` and show the one that gives the highest score, until
            (p - p_blur) / |p_image - p_blur| >= reach: an ordered beginning of m patches.
       (s = `candidates`, by default min(28, 2 sqrt N)).
    2. Deletion search. From the empty image (0 in normalised space), try the s worst patches left
       and show the one that gives the lowest score, until only the beginning is left out. Read
       backwards, this is the rest of the order.
    3. With the drops d_i of a convex curve fitted to the mean of the deletion curve and one minus
       the insertion curve, each normalised to fall from 1 to 0, the map is the sparse one,
            S_i = d_i / |patch| + d_i (n - i) / n

    The blur is a box of 31 px upwards, until the blurred image scores at most `faint`. Unlike the
    authors' code, no image is dropped: one whose blur never gets faint keeps the widest, one that
    never reaches 90 % is ordered by insertion alone (both are recorded in the manifest). Curves
    move whole patches, so they depend on the order only and are measured once. MDA optimises
    metrics that it is then scored on.
    """
    layout, size = model.check(images), size_of(images)
    n, tries = layout.n_patches, candidates or min(28, 2 * math.isqrt(layout.n_patches))
    bound = target.bind(plain_logits(model, images))
    hints = find(guide).run(model, images, bound).scores
    height = torch.arange(n, 0, -1).to(hints) / n  # (n - i) / n

    def one_image(place: int) -> tuple[Tensor, int, bool]:
        goal = bound.take(slice(place, place + 1))

        def scores(shown: Tensor, behind: Tensor) -> Tensor:
            def run(a: int, b: int) -> Tensor:
                pixels = spread_out(shown[a:b].unflatten(1, layout.grid), size)[:, None]
                logits = model(torch.where(pixels, images[place], behind))
                return goal.score(logits, score)

            each = model.forward_bytes(layout)
            return run_in_chunks(run, len(shown), each, images.device, what="images")

        soft, is_faint = blur(scores, images[place], n, faint)
        order, beginning = search(scores, soft, hints[place], tries=tries, reach=reach)
        # the mean of the deletion curve and one minus the insertion curve, each from 1 to 0
        first = order.argsort() < torch.arange(n + 1, device=order.device)[:, None]  # [N + 1, N]
        both = torch.stack([scores(first, soft), scores(~first, torch.zeros_like(soft))])
        span = both[:, :1] - both[:, -1:]
        line = torch.linspace(1, 0, n + 1, dtype=both.dtype, device=both.device)
        fallen = (both - both[:, -1:]) / span.masked_fill(span == 0, 1)
        curve = torch.where(span == 0, line, fallen).mean(dim=0)
        drops = torch.from_numpy(convex_drops(curve.double().cpu().numpy())).to(hints)
        sparse = drops / (images[0, 0].numel() / n) + drops * height
        return torch.zeros_like(sparse).scatter(0, order, sparse), beginning, is_faint

    maps, beginning, is_faint = zip(*map(one_image, range(len(images))), strict=True)
    used = {"beginning": list(beginning), "blur is faint": list(is_faint)}
    return Maps(torch.stack(maps), bound, used=used)


def blur(scores: ScoreShown, image: Tensor, n: int, faint: float) -> tuple[Tensor, bool]:
    """An image behind the narrowest box that makes its score faint (else the widest), and whether
    it did."""
    nothing = torch.zeros(1, n, dtype=torch.bool, device=image.device)
    soft = image
    for side in KERNELS:
        soft = box(image, side)
        if float(scores(nothing, soft)) <= faint:
            return soft, True
    return soft, False


def box(images: Tensor, side: int) -> Tensor:
    """The mean over side x side pixels, one axis after the other; zeros beyond the edge."""
    across = F.avg_pool2d(images, (1, side), stride=1, padding=(0, side // 2))
    return F.avg_pool2d(across, (side, 1), stride=1, padding=(side // 2, 0))


def search(
    scores: ScoreShown, soft: Tensor, hints: Tensor, *, tries: int, reach: float
) -> tuple[Tensor, int]:
    """The patches [N] of an image, the most important first, and the length m of the beginning."""
    n = len(hints)
    nothing = torch.zeros(1, n, dtype=torch.bool, device=hints.device)
    start, goal = scores(torch.cat([nothing, ~nothing]), soft).tolist()

    def grow(left: list[int], behind: Tensor, *, inserting: bool) -> list[int]:
        chosen: list[int] = []
        while left:
            tried = left[:tries]
            shown = nothing.repeat(len(tried), 1)
            shown[:, chosen] = True
            shown[range(len(tried)), tried] = True
            values = scores(shown, behind)
            best = int(values.argmax() if inserting else values.argmin())
            chosen.append(tried[best])
            left.remove(tried[best])
            if inserting and float(values[best]) - start >= reach * abs(goal - start):
                break
        return chosen

    beginning = grow(hints.argsort(descending=True, stable=True).tolist(), soft, inserting=True)
    rest = [patch for patch in hints.argsort(stable=True).tolist() if patch not in beginning]
    end = grow(rest, torch.zeros_like(soft), inserting=False)
    return torch.tensor(beginning + end[::-1], device=hints.device), len(beginning)


def convex_drops(curve: np.ndarray) -> np.ndarray:
    """Drops [n] of the convex curve from 1 to 0 that fits `curve` [n + 1] best, after it was
    clipped and made to fall.

    Falling convex curves are mixtures of ramps that reach 0 after k steps, so the fit is a
    least-squares problem with weights >= 0 that sum to one.
    """
    from scipy.optimize import nnls

    goal = np.minimum.accumulate(np.clip(curve, 0, 1))
    n = len(goal) - 1
    ramps = 1 - np.arange(n + 1)[:, None] / np.arange(1, n + 1)
    ramps = np.clip(ramps, 0, None)  # [n + 1, n]; row 0 is all ones
    sure = np.r_[HEAVY, np.ones(n)]  # so that a heavy first point makes weights sum to one
    weights, _ = nnls(ramps * sure[:, None], np.r_[1, goal[1:]] * sure, maxiter=100 * n)
    return -np.diff(ramps @ (weights / weights.sum()))


_control = partial(
    method, forwards="0", needs="nothing", class_specific=False, architectures=EVERY_VIEW
)


@_control("random")
def random(model: ImageModel, images: Tensor, target: Target, *, seed: int = 0) -> Maps:
    """Uniform noise, drawn for each image from its pixels and `seed`: the index in the batch
    does not matter."""
    n = model.check(images).n_patches
    raw = model.preprocess.raw(images).detach().cpu().float()
    pixels = (raw * 255).round().clamp(0, 255).to(torch.uint8)  # the same on every device
    noise = []
    for own in pixels:
        bits = hashlib.sha256(f"{seed} ".encode() + own.contiguous().numpy().tobytes()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(bits[:7]))
        noise.append(torch.rand(n, generator=generator, dtype=torch.float32))
    return Maps(torch.stack(noise).to(images.device), target)


@_control("center")
def center(model: ImageModel, images: Tensor, target: Target) -> Maps:
    """A Gaussian at the middle, a quarter of each side wide."""
    rows, columns = (
        torch.linspace(-0.5, 0.5, n, dtype=torch.float32) for n in model.check(images).grid
    )
    bump = torch.exp(-(rows[:, None] ** 2 + columns**2) / (2 * 0.25**2)).flatten()
    return Maps(bump.to(images.device).repeat(len(images), 1), target)


@_control("sobel")
def sobel(model: ImageModel, images: Tensor, target: Target) -> Maps:
    """Mean edge strength of the grey image in each patch."""
    grey = model.preprocess.raw(images).float().mean(dim=1, keepdim=True)
    kernel = grey.new_tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
    padded = F.pad(grey, (1, 1, 1, 1), mode="replicate")
    edges = F.conv2d(padded, torch.stack([kernel, kernel.T])[:, None]).norm(dim=1)  # [B, H, W]
    scores = F.adaptive_avg_pool2d(edges[:, None], model.check(images).grid).flatten(1)
    return Maps(scores, target, native=edges)
