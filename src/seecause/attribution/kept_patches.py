"""Which patches are there when half of them are enough? Choices M_m of patches are run, the others
dropped after the position embedding, and a patch has the mean class score of the choices that kept
it:

    S_j = sum_m f_m M_mj / max(1, sum_m M_mj)

Prefix tokens stay in every run; means and latent pools read kept patches only. A patch that no
choice keeps gets 0. No gradient is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from seecause.attribution.gradients import bind_target, one_block
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import attention_probs
from seecause.engine.chunks import run_in_chunks
from seecause.engine.trace import kept_logits_each, record
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from seecause.options import Count, Share
from seecause.target import Score, Target


@method("tis", forwards="1 + 1024 on half of the patches", needs="activations, token removal")
@torch.no_grad()
def tis(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    masks: Count = 1024,
    keep: float | Sequence[float] = (0.5,),
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The mean score of runs on half of the patches, over those runs that had the patch.

    Transformer input sampling (Englebert et al. 2023): the channels of all block outputs, each seen
    as a picture of N patches, are clustered by k-means, and each centre keeps the share `keep` of
    the patches where it is highest. k-means is seeded anew for each image, so the place in a batch
    does not matter. Not done: no min-max scaling.
    """
    layout, shares = model.check(images), [keep] if isinstance(keep, int | float) else list(keep)
    counts = [int(share * layout.n_patches) for share in shares]
    if not counts or not all(0 < count <= layout.n_patches for count in counts):
        raise BadOption("keep", keep, "shares above 0 and up to 1 that keep a patch")

    def choose(a: int, b: int) -> tuple[Tensor, ...]:
        trace = record(model, images[a:b], states=range(1, model.n_layers + 1))
        assert trace.logits is not None
        outputs = [h[:, layout.patches] for h in trace.states.values()]
        channels = torch.cat(outputs, dim=-1).transpose(1, 2)  # [b, L*D, N]
        choices = [top(rows, counts) for rows in centres_each(channels, masks, seed=seed)]
        return torch.stack(choices).to(images.device), trace.logits

    width = model.blocks[0].heads * model.blocks[0].head_dim
    held = model.n_layers * layout.tokens * width * images.element_size() * 2
    each = held + model.forward_bytes(layout)
    # [B, M, N] and [B, C]
    chosen, logits = run_in_chunks(choose, len(images), each, images.device, what="images")
    return _mean_over_choices(model, images, chosen, target.bind(logits), score)


def centres_each(channels: Tensor, count: int, *, seed: int) -> list[Tensor]:
    """`centres` of every image [b, L*D, N], on the CPU. Beside a GPU k-means would be nearly all of
    the time, so each of torch's threads takes an image; within one nothing is shared out, so their
    number does not change a bit."""
    import sklearn.cluster  # noqa: F401  its libraries must be there when threads are limited
    from threadpoolctl import threadpool_limits

    def one_thread() -> None:  # for what OpenMP does in this thread, and in no other
        threadpool_limits(1, user_api="openmp")

    with (
        threadpool_limits(1, user_api="blas"),
        ThreadPoolExecutor(torch.get_num_threads(), initializer=one_thread) as pool,
    ):
        return list(pool.map(lambda own: centres(own, count, seed=seed), channels.cpu()))


def centres(channels: Tensor, count: int, *, seed: int) -> Tensor:
    """k-means centres [k, N] of one image's channels [L*D, N]; there are no more centres than
    channels."""
    from sklearn.cluster import KMeans

    points = channels.to(torch.promote_types(channels.dtype, torch.float32)).cpu().numpy()
    options: dict[str, Any] = {"n_init": 1, "random_state": seed}
    clusters = KMeans(min(count, len(points)), **options).fit(points)
    return torch.from_numpy(clusters.cluster_centers_)


def top(values: Tensor, counts: Sequence[int]) -> Tensor:
    """For each row of values [k, N] and each count, its highest patches: bool [k * len(counts),
    N]."""
    ranks = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return torch.cat([ranks < count for count in counts])


@method("mutex", forwards="1 + 54 on half of the patches", needs="attention, token removal")
@torch.no_grad()
def mutex(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    keep: Share = 0.5,
    edge: float = 0.01,
    start: int = 0,
    score: Score = "prob",
) -> Maps:
    """The mean score of runs on half of the patches, chosen by 54 statistics of the attention
    graph.

    MUTEX (Traini et al.): attention between patches is a graph in each block (heads fused by min,
    max or sum; edges below 1 % of the block's largest are cut). A node's in- or out-degree over
    blocks is summarised by nine statistics: 3 fusions x 2 degrees x 9 = 54 vectors. Each keeps the
    nodes at or above its lower median. The map is coarse: few masks, many ties.
    """
    if not 0 <= start < model.n_layers:
        raise BadOption("start", start, f"a block 0-{model.n_layers - 1}")

    def choose(a: int, b: int) -> Tensor:
        degrees = _degrees(model, images[a:b], edge=edge, start=start)
        return upper(statistics(degrees).flatten(1, 3), keep)

    each = one_block(model, model.check(images))
    chosen = run_in_chunks(choose, len(images), each, images.device, what="images")  # [B, 54, N]
    return _mean_over_choices(model, images, chosen, bind_target(model, images, target), score)


def _degrees(model: VisionModel, images: Tensor, *, edge: float, start: int) -> Tensor:
    """Degrees [B, 3 fusions, 2 (in, out), L', N] of every patch in the blocks from `start` on."""
    patches, degrees = model.check(images).patches, []
    blocks = islice(attention_probs(model, images, start=start), model.n_layers - start)
    for probs in blocks:  # each [B, H, T, T]; a latent pool is no block
        between = probs[..., patches, patches]
        fused = [between.amin(dim=1), between.amax(dim=1), between.sum(dim=1)]
        graph = torch.stack(fused, dim=1)  # [B, 3, N, N]
        graph = graph.masked_fill(graph < edge * graph.amax(dim=(-1, -2), keepdim=True), 0)
        degrees.append(torch.stack([graph.sum(dim=-2), graph.sum(dim=-1)], dim=2))  # [B, 3, 2, N]
    return torch.stack(degrees, dim=3)


def statistics(table: Tensor) -> Tensor:
    """Nine numbers for each node of tables [..., L, N] over its L values: [..., 9, N]. What has no
    meaning (0/0) is 0."""
    total, mean = table.sum(dim=-2), table.mean(dim=-2)
    spread = table.std(dim=-2) if table.shape[-2] > 1 else torch.zeros_like(total)
    share = table / total[..., None, :]
    centred = table - mean[..., None, :]
    second, third, fourth = ((centred**power).mean(dim=-2) for power in (2, 3, 4))
    rows = [
        -torch.special.xlogy(share, share).sum(dim=-2),
        table.amax(dim=-2),
        table.amin(dim=-2),
        total,
        spread,
        total / (spread + 1e-8),
        table.median(dim=-2).values,  # the lower one
        third / second**1.5,
        fourth / second**2 - 3,
    ]
    return torch.stack(rows, dim=-2).nan_to_num(0, 0, 0)


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
    scores = bound.score(logits, score, sigmoid=model.sigmoid)  # [B, M]
    there = chosen.to(scores.dtype)
    return Maps((scores[..., None] * there).sum(dim=1) / there.sum(dim=1).clamp_min(1), bound)
