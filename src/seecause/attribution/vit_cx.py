"""ViT-CX (Xie et al. 2023): masks made of the model's own features, weighted by what they cause.

The channels of the last block's normed input, enlarged to pixels and scaled to [0, 1], are
clustered (cosine distance, complete linkage); the sum of a cluster, scaled again, is a mask m_k.
What it covers gets faint noise e_k ~ N(0, 0.1^2) (1 - m_k), whose own effect is taken off again:
    c_k = f(x m_k + e_k) - f(x + e_k) + f(x),     S = (1 / M) sum_k c_k m_k / sum_k m_k
    (pixel by pixel)
M depends on the picture. A flat channel makes an empty mask, and a pixel no mask shows gets 0.
Noise comes from `seed` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.gradients import on_cells
from seecause.attribution.registry import Maps, method
from seecause.engine.chunks import fit, in_chunks, run_in_chunks
from seecause.engine.trace import record
from seecause.models.view import VisionModel
from seecause.options import NotNegative, Positive
from seecause.target import Score, Target


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
    """The model's own features as masks, weighted by the score they cause."""
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
