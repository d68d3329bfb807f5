"""Pixels shown or hidden, and the class score that is left: one neighbourhood at a time, random
masks, or masks of the model's own features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause._options import Count, NotNegative, Positive, Share
from seecause.attribution.caap import ONE_CLASS, Classes, take_classes
from seecause.attribution.gradients import bind_target, on_cells
from seecause.attribution.registry import EVERY_VIEW, Maps, method
from seecause.engine.blanks import Blank, blank_image
from seecause.engine.chunks import fit, in_chunks, plain_logits, run_in_chunks
from seecause.engine.token_sets import Select, selection
from seecause.engine.trace import record
from seecause.metrics._pixels import spread_out
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel
from seecause.target import Score, Target, spread


@method("simple-insertion", forwards="N", needs="logits", architectures=EVERY_VIEW)
@torch.no_grad()
def simple_insertion(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The class score of the blank with one neighbourhood of pixels pasted in.

    CAAP's control (table 12 of its paper): the same neighbourhoods S(i), moved as pixels. For patch
    embeddings without overlap this is activation patching at the embedding (l_s = l_e = 0,
    tail = all), which the tests use as a cross-check of the engine.
    """
    bound = bind_target(model, images, target)
    size = (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    return Maps(_pasted(model, images, empty.expand_as(images), select, bound, score), bound)


@method("simple-deletion", forwards="N + 1", needs="logits", architectures=EVERY_VIEW, signed=True)
@torch.no_grad()
def simple_deletion(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The drop of the class score when one neighbourhood is covered."""
    logits = plain_logits(model, images)
    bound = target.bind(logits)
    plain = bound.score(logits, score, sigmoid=model.sigmoid)[:, None]
    size = (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    return Maps(
        plain - _pasted(model, empty.expand_as(images), images, select, bound, score), bound
    )


def _pasted(
    model: ImageModel,
    above: Tensor,
    below: Tensor,
    select: Select | Tensor,
    target: Target,
    score: Score,
) -> Tensor:
    """Scores [B, N] of `below` [B, 3, H, W] with the pixels of `above` pasted at each S(i)."""
    layout, size = model.check(below), (below.shape[-2], below.shape[-1])
    chosen = selection(layout.cells, select).to(below.device).unflatten(1, layout.grid)
    marks = spread_out(chosen, size)  # [N, H, W]

    def run_patches(a: int, b: int) -> Tensor:
        item = torch.arange(a, b, device=below.device)  # of B * N
        image, patch = item // len(marks), item % len(marks)
        mixed = torch.where(marks[patch][:, None], above[image], below[image])  # [m, 3, H, W]
        return target.take(image).score(model(mixed), score, sigmoid=model.sigmoid)

    total, each = len(below) * len(marks), model.forward_bytes(layout)
    scores = run_in_chunks(run_patches, total, each, below.device, what="patches")
    return scores.view(-1, len(marks))


@method(
    "rise",
    forwards="4000",
    needs="logits",
    architectures=EVERY_VIEW,
    unset={"classes": ONE_CLASS},
)
@torch.no_grad()
def rise(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    masks: Count = 4000,
    cells: Count = 7,
    p: Share = 0.5,
    normalise: Literal["expected", "mask"] = "expected",
    score: Score = "prob",
    classes: Classes = None,
    seed: int = 0,
) -> Maps:
    """The mean of random masks, weighted by the class score of what they leave visible.

    RISE (Petsiuk et al. 2018): a coarse grid of cells, each open with probability p, is enlarged
    smoothly and shifted at random into a mask m_k (eq. 6):

        S = sum_k f(x * m_k) m_k / (n p)

    or, with `normalise="mask"`, divided by sum_k m_k at each pixel, which is steadier for few
    masks. Covered pixels are 0 in normalised space. Masks come from `seed` alone, so every image
    meets the same ones. Not done: no early stop, and no estimate of the error (try two seeds).
    """
    layout, size = model.check(images), (images.shape[-2], images.shape[-1])
    each = model.forward_bytes(layout)
    fitting = fit(len(images), each, images.device)  # images together, each behind `together` masks
    together = fit(masks, fitting * each, images.device)
    bound = bind_target(model, images, target)
    draw = random_masks(masks, cells, p, size, seed=seed, device=images.device)
    weight: Tensor | float = masks * p
    if normalise == "mask":
        sums = in_chunks(lambda a, b: draw(a, b).sum(dim=0), masks, together)
        weight = reduce(torch.add, sums).clamp_min(torch.finfo(torch.float64).tiny)  # [H, W]

    def run_masks(shown: Tensor, goal: Target, a: int, b: int) -> list[Tensor]:
        chosen = draw(a, b)  # [m, H, W]
        pictures = (shown[:, None] * chosen.to(shown)[None, :, None]).flatten(0, 1)
        logits = model(pictures).unflatten(0, (len(shown), b - a))  # [B, m, C]
        scores = goal.score(logits, score, sigmoid=model.sigmoid)
        weighted = (chosen / weight).to(scores)
        native = torch.einsum("bm,mhw->bhw", scores, weighted)
        if classes is None:
            return [native]
        answers = spread(logits.to(scores.dtype), score, sigmoid=model.sigmoid)
        answers = take_classes(model, answers, classes)
        return [native, torch.einsum("bmc,mn->bnc", answers, on_cells(weighted, layout))]

    def over_masks(first: int, last: int) -> list[Tensor]:
        run = partial(run_masks, images[first:last], bound.take(slice(first, last)))
        parts = in_chunks(run, masks, together, what="masks")
        return reduce(lambda total, part: list(map(torch.add, total, part)), parts)

    parts = in_chunks(over_masks, len(images), fitting, what="images")
    native, *every = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Maps(
        on_cells(native, layout), bound, native=native, class_maps=every[0] if every else None
    )


def random_masks(
    count: int,
    cells: int,
    p: float,
    size: tuple[int, int],
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> Callable[[int, int], Tensor]:
    """`draw(a, b)` gives masks a..b of `count`, [b - a, H, W] in [0, 1], whatever was drawn
    before."""
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


@method("vit-cx", forwards="1 + 2 M (M masks, by picture)", needs="activations")
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
    scaled again, is a mask m_k. What it covers gets faint noise e_k ~ N(0, 0.1^2) (1 - m_k), whose
    own effect is taken off again, pixel by pixel:

        c_k = f(x m_k + e_k) - f(x + e_k) + f(x),     S = (1 / M) sum_k c_k m_k / sum_k m_k

    M depends on the picture. A flat channel makes an empty mask, and a pixel no mask shows gets 0.
    Noise comes from `seed` alone.
    """
    layout, size = model.check(images), (images.shape[-2], images.shape[-1])
    channels, plain = _features(model, images)  # [B, D, gh, gw], [B, C]
    bound = target.bind(plain)
    clusters = [cluster(own, size, threshold=threshold) for own in channels]  # [M, gh, gw] each
    counts = torch.tensor([len(own) for own in clusters])
    owner = torch.arange(len(images)).repeat_interleave(counts).to(images.device)
    number = torch.cat([torch.arange(len(own)) for own in clusters]).tolist()
    coarse = torch.cat(clusters)
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**31, (channels.shape[1],), generator=generator).tolist()

    def run_masks(a: int, b: int) -> tuple[Tensor, Tensor]:
        mine, pictures = owner[a:b], images[owner[a:b]]
        masks = scaled(_enlarge(coarse[a:b], size))[:, None]  # [m, 1, H, W]
        faint = noise * (1 - masks) * _noise([seeds[k] for k in number[a:b]], pictures)
        logits = model(torch.cat([pictures * masks + faint, pictures + faint]))
        goal = bound.take(mine)
        shown, disturbed = (
            goal.score(part, score, sigmoid=model.sigmoid) for part in logits.split(b - a)
        )
        return shown - disturbed, masks[:, 0]

    whole = bound.score(plain, score, sigmoid=model.sigmoid)
    total, cover = whole.new_zeros(2, len(images), *size)
    together = fit(len(owner), 2 * model.forward_bytes(layout), images.device)
    start = 0
    for change, masks in in_chunks(run_masks, len(owner), together, what="masks"):
        mine = owner[start : start + len(masks)]
        cause = change + whole[mine]
        total.index_add_(0, mine, cause[:, None, None] * masks.to(total.dtype))
        cover.index_add_(0, mine, masks.to(total.dtype))
        start += len(masks)
    count = torch.bincount(owner, minlength=len(images))[:, None, None]
    native = total / (count * cover.clamp_min(torch.finfo(cover.dtype).tiny))
    scores = on_cells(native, layout)
    return Maps(scores, bound, native=native, used={"masks": count.flatten().tolist()})


def _features(model: VisionModel, images: Tensor) -> tuple[Tensor, Tensor]:
    """The channels of the last block's normed input [B, D, gh, gw], and the logits [B, C]."""
    layout, last = model.check(images), model.n_layers - 1

    def run_images(a: int, b: int) -> tuple[Tensor, ...]:
        trace = record(model, images[a:b], states=[last])
        assert trace.logits is not None
        normed = model.blocks[last].norm(trace.states[last])[:, layout.patches]  # [b, N, D]
        return normed.transpose(1, 2).unflatten(2, layout.grid), trace.logits

    each = model.forward_bytes(layout)
    channels, logits = run_in_chunks(run_images, len(images), each, images.device, what="images")
    return channels, logits


def cluster(channels: Tensor, size: tuple[int, int], *, threshold: float) -> Tensor:
    """Channels [D, gh, gw] of one image -> sums of alike ones, [M, gh, gw]; alike at full size,
    where masks are used.

    Enlarging is linear and keeps constants, so a channel scaled by its enlarged range can be summed
    while it is small.
    """
    from sklearn.cluster import AgglomerativeClustering

    large = _enlarge(channels, size).flatten(1)  # [D, H*W]
    low, high = large.amin(dim=1, keepdim=True), large.amax(dim=1, keepdim=True)
    flat = high <= low
    small = ((channels.flatten(1) - low) / (high - low)).masked_fill(flat, 0)  # [D, N]
    masks = F.normalize(((large - low) / (high - low)).masked_fill(flat, 0), dim=1)
    distance = (1 - masks @ masks.T).double().cpu().numpy()
    if len(distance) == 1:
        return small.unflatten(1, channels.shape[1:])
    options: dict[str, Any] = {"n_clusters": None, "distance_threshold": threshold}
    clusters = AgglomerativeClustering(metric="precomputed", linkage="complete", **options)
    labels = clusters.fit_predict(distance)
    member = F.one_hot(torch.from_numpy(labels)).to(small)  # [D, M]
    return (member.T @ small).unflatten(1, channels.shape[1:])


def scaled(maps: Tensor) -> Tensor:
    """Each map of [M, H, W] to [0, 1]; a flat one to 0."""
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    return ((maps - low) / (high - low)).masked_fill(high <= low, 0)


def _enlarge(maps: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(maps[None], size=size, mode="bilinear")[0]


def _noise(seeds: Sequence[int], like: Tensor) -> Tensor:
    """One draw of N(0, 1) for each seed, shaped like a picture: [m, 3, H, W]. Pictures share their
    seeds, so each is drawn once."""
    drawn: dict[int, Tensor] = {}
    for seed in dict.fromkeys(seeds):
        generator = torch.Generator().manual_seed(seed)
        drawn[seed] = torch.randn(like.shape[1:], generator=generator, dtype=torch.float32).to(like)
    return torch.stack([drawn[seed] for seed in seeds])
