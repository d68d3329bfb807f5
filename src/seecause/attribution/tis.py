"""TIS, transformer input sampling (Englebert et al. 2023): which patches are there when half of
them are enough?

The channels of all block outputs, each seen as a picture of N patches, are clustered by k-means;
each centre keeps the share `keep` of the patches where it is highest, the others are dropped after
the position embedding, and the map is the mean score of the choices that kept a patch:
    S_j = sum_m f_m M_mj / sum_m M_mj
k-means is seeded anew for each image, so the place in a batch does not matter. Means and latent
pools read kept patches only. Not done: no min-max scaling; a patch that no choice keeps gets 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from seecause.attribution.registry import Maps, method
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.trace import kept_logits_each, record
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from seecause.target import Score, Target


@method("tis", forwards="1 + 1024 on half of the patches", needs="activations, token removal")
@torch.no_grad()
def tis(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    masks: int = 1024,
    keep: float | Sequence[float] = (0.5,),
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The mean score of runs on half of the patches, over those runs that had the patch."""
    layout, shares = model.check(images), [keep] if isinstance(keep, int | float) else list(keep)
    counts = [int(share * layout.n_patches) for share in shares]
    valid = all(0 < share <= 1 for share in shares) and all(count > 0 for count in counts)
    if masks < 1 or not counts or not valid:
        raise BadOption(
            "masks, keep",
            (masks, keep),
            "at least one mask, and shares in (0, 1] that keep a patch",
        )

    def choose(a: int, b: int) -> tuple[Tensor, Tensor]:
        trace = record(model, images[a:b], states=range(1, model.n_layers + 1))
        assert trace.logits is not None
        outputs = [h[:, layout.patches] for h in trace.states.values()]
        channels = torch.cat(outputs, dim=-1).transpose(1, 2)  # [b, L*D, N]
        choices = [top(rows, counts) for rows in centres_each(channels, masks, seed=seed)]
        return torch.stack(choices).to(images.device), trace.logits

    width = model.blocks[0].heads * model.blocks[0].head_dim
    held = model.n_layers * layout.tokens * width * images.element_size() * 2
    together = fit(len(images), held + model.forward_bytes(layout), images.device)
    parts = list(in_chunks(choose, len(images), together, what="images"))
    chosen = torch.cat([choices for choices, _ in parts])  # [B, M, N]
    bound = target.bind(torch.cat([logits for _, logits in parts]))
    logits = kept_logits_each(model, images, chosen)
    scores = bound.score(logits, score, sigmoid=model.sigmoid)  # [B, M]
    there = chosen.to(scores.dtype)
    return Maps((scores[..., None] * there).sum(dim=1) / there.sum(dim=1).clamp_min(1), bound)


def centres_each(channels: Tensor, count: int, *, seed: int) -> list[Tensor]:
    """`centres` of every image [b, L*D, N], on the CPU. Beside a GPU k-means would be nearly all of
    the time, so each of torch's threads takes an image; within one nothing is shared out, so their
    number does not change a bit."""
    import sklearn.cluster  # noqa: F401  its libraries must be there when threads are limited

    with (
        threadpool_limits(1, user_api="blas"),
        ThreadPoolExecutor(torch.get_num_threads(), initializer=_one_thread) as pool,
    ):
        return list(pool.map(lambda own: centres(own, count, seed=seed), channels.cpu()))


def _one_thread() -> None:
    """For what OpenMP does in this thread, and in no other."""
    threadpool_limits(1, user_api="openmp")


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
