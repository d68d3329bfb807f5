"""MDA, metric-driven attributions (Walker et al.): search for the order of patches that insertion
and deletion reward, then read a map off it.

 1. Insertion search. From the blurred picture, try the s best patches left by a guide map and show
   the one that gives the highest score, until
    (p - p_blur) / |p_picture - p_blur| >= reach: an ordered beginning of m patches.
 2. Deletion search. From the empty picture (0 in normalised space), try the s worst patches left
   and show the one that gives the lowest score, until
    only the beginning is left out. Read backwards, this is the rest of the order.
 3. With the drops d_i of a convex curve fitted to the mean of the deletion curve and one minus the
   insertion curve, each normalised to fall from 1 to 0,
        sparse_i = d_i / |patch| + d_i (n - i) / n;    dense_i = (n - i) / n  where sparse_i >=
        kappa, up to the sparse maximum
    and the map is (1 - gamma) sparse + gamma dense.
The blur is a box of 31 px upwards, until the blurred picture scores at most `faint`. Unlike the
authors' code, no image is dropped: one whose blur never gets faint keeps the widest, one that never
reaches 90 % is ordered by insertion alone (both are said in the manifest). Curves move whole
patches, so they depend on the order only and are measured once. Every image takes N steps, whatever
its m, so that all advance together. Note what it optimises: metrics that it is then scored on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.registry import Maps, find, method
from seecause.engine.chunks import plain_logits, run_in_chunks
from seecause.errors import BadOption
from seecause.metrics.pixels import spread_out
from seecause.models.view import VisionModel
from seecause.options import Count, Limit
from seecause.target import Score, Target

KERNELS = range(31, 102, 2)  # px
HEAVY = 1e4
Blend = Annotated[float, Limit(lambda share: 0 <= share <= 1, "a share from 0 to 1")]
# pictures [m, 3, H, W] and which image each is of -> scores [m]
ScorePictures = Callable[[Tensor, Tensor], Tensor]


@method(
    "mda",
    forwards="about N min(28, 2 sqrt N) + 2 N (5600 for 196 patches)",
    needs="logits, a guide map",
    unset={"candidates": "min(28, 2 sqrt N)"},
)
@torch.no_grad()
def mda(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    guide: str | Tensor = "bt",
    candidates: Count | None = None,
    reach: float = 0.9,
    faint: float = 0.01,
    gamma: Blend = 0.0,
    kappa: float = 0.005,
    score: Score = "prob",
) -> Maps:
    """The order of patches that insertion and deletion reward most, found by search."""
    layout = model.check(images)
    n, tries = layout.n_patches, candidates or min(28, 2 * math.isqrt(layout.n_patches))
    bound = target.bind(plain_logits(model, images))
    hints = (
        find(guide).run(model, images, bound).scores
        if isinstance(guide, str)
        else guide.to(images.device).flatten(1)
    )
    if hints.shape != (len(images), n):
        expected = f"a map of {layout.grid[0]} x {layout.grid[1]} for each image"
        raise BadOption("guide", list(hints.shape), f"a method's name, or {expected}")
    scene = Scene(images, *layout.grid, each=model.forward_bytes(layout))

    def answer(pictures: Tensor, rows: Tensor) -> Tensor:
        return bound.take(rows).score(model(pictures), score, sigmoid=model.sigmoid)

    soft, is_faint = blur(scene, answer, faint)
    places, beginning = search(scene, answer, soft, hints, tries=tries, reach=reach)
    fallen = curves(scene, answer, soft, places)
    by_image = [convex_drops(curve) for curve in fallen.double().cpu().numpy()]
    drops = torch.from_numpy(np.stack(by_image)).to(fallen)  # [B, N], by place
    height = torch.arange(n, 0, -1).to(drops) / n  # (n - i) / n
    sparse = drops / (images[0, 0].numel() / n) + drops * height
    dense = torch.where(sparse >= kappa, height, 0)
    highest = dense.amax(dim=1, keepdim=True).clamp_min(torch.finfo(dense.dtype).tiny)
    dense = dense * sparse.amax(dim=1, keepdim=True) / highest
    scores = ((1 - gamma) * sparse + gamma * dense).gather(1, places)  # from places to patches
    used = {"beginning": beginning.tolist(), "blur is faint": is_faint.tolist()}
    return Maps(scores, bound, used=used)


@dataclass(frozen=True, eq=False)
class Scene:
    """Pictures [B, 3, H, W] whose patches are shown or hidden. `each`: bytes of one run."""

    images: Tensor
    high: int  # patches
    wide: int
    each: int

    def scores(self, answer: ScorePictures, rows: Tensor, shown: Tensor, behind: Tensor) -> Tensor:
        """Scores [m] of images `rows` [m] with patches shown [m, N], in front of `behind` [B, 3, H,
        W]."""

        def picture(a: int, b: int) -> Tensor:
            patches = shown[a:b].view(-1, self.high, self.wide)
            pixels = spread_out(patches, (self.images.shape[-2], self.images.shape[-1]))
            return torch.where(pixels[:, None], self.images[rows[a:b]], behind[rows[a:b]])

        return self.run(answer, rows, picture)

    def run(
        self, answer: ScorePictures, rows: Tensor, picture: Callable[[int, int], Tensor]
    ) -> Tensor:
        """Scores [m] of `picture(a, b)`, which shows images rows[a:b]; as many at a time as fit."""

        def run_pictures(a: int, b: int) -> Tensor:
            return answer(picture(a, b), rows[a:b])

        return run_in_chunks(run_pictures, len(rows), self.each, rows.device, what="pictures")


def blur(scene: Scene, answer: ScorePictures, faint: float) -> tuple[Tensor, Tensor]:
    """Pictures behind the narrowest box that makes their score faint (else the widest), and whether
    it did, [B]."""
    batch = len(scene.images)
    item = torch.arange(len(KERNELS) * batch, device=scene.images.device)

    def boxed(items: Tensor) -> Tensor:
        pairs = [(i % batch, i // batch) for i in items.tolist()]
        return torch.stack([box(scene.images[own], KERNELS[kernel]) for own, kernel in pairs])

    scores = scene.run(answer, item % batch, lambda a, b: boxed(item[a:b]))
    hidden = scores.view(-1, batch) <= faint  # [kernels, B]
    first = torch.where(hidden.any(dim=0), hidden.byte().argmax(dim=0), len(KERNELS) - 1)
    return boxed(first * batch + item[:batch]), hidden.any(dim=0)


def box(image: Tensor, side: int) -> Tensor:
    """The mean over side x side pixels of [3, H, W], one axis after the other; zeros beyond the
    edge."""
    across = F.avg_pool2d(image, (1, side), stride=1, padding=(0, side // 2))
    return F.avg_pool2d(across, (side, 1), stride=1, padding=(side // 2, 0))


def search(
    scene: Scene, answer: ScorePictures, soft: Tensor, hints: Tensor, *, tries: int, reach: float
) -> tuple[Tensor, Tensor]:
    """The place [B, N] of each patch (0 = most important) and the length m [B] of the beginning.
    Each image is in one of the two searches."""
    (batch, n), device = hints.shape, hints.device
    every = torch.arange(batch, device=device)
    shown = torch.zeros_like(hints, dtype=torch.bool)
    start, goal = (scene.scores(answer, every, patches, soft) for patches in (shown, ~shown))
    places = torch.full((batch, n), -1, device=device)
    inserting = torch.ones(batch, dtype=torch.bool, device=device)
    beginning = torch.zeros(batch, dtype=torch.long, device=device)
    for step in range(n):
        wish = torch.where(inserting[:, None], hints, -hints).masked_fill(places >= 0, -torch.inf)
        order = wish.argsort(dim=1, descending=True, stable=True)
        patch = order[:, : min(tries, n - step)]  # [B, s]; n - step are left in every image
        rows = every.repeat_interleave(patch.shape[1])
        trial = shown[rows].scatter(1, patch.flatten()[:, None], True)
        behind = torch.where(inserting[:, None, None, None], soft, 0)
        values = scene.scores(answer, rows, trial, behind).view_as(patch)
        best = torch.where(inserting[:, None], values, -values).argmax(dim=1, keepdim=True)
        chosen, value = patch.gather(1, best), values.gather(1, best)[:, 0]
        later = n - 1 - (step - beginning)  # the deletion search fills the order from its end
        places.scatter_(1, chosen, torch.where(inserting, step, later)[:, None])
        shown = shown.scatter(1, chosen, True)
        beginning = beginning + inserting.long()
        done = inserting & ((value - start) >= reach * (goal - start).abs())
        shown = shown & ~done[:, None]  # from here on, on the empty picture
        inserting = inserting & ~done
    return places, beginning


def curves(scene: Scene, answer: ScorePictures, soft: Tensor, places: Tensor) -> Tensor:
    """The mean of the deletion curve and one minus the insertion curve, [B, N + 1], each from 1 to
    0."""
    batch, n = places.shape
    rows = torch.arange(batch, device=places.device).repeat_interleave(n + 1)
    taken = torch.arange(n + 1, device=places.device).repeat(batch)[:, None]
    first = places[rows] < taken  # [B * (N + 1), N]
    back = scene.scores(answer, rows, first, soft)
    gone = scene.scores(answer, rows, ~first, torch.zeros_like(soft))
    line = torch.linspace(1, 0, n + 1, dtype=back.dtype, device=back.device)

    def falling(values: Tensor) -> Tensor:  # [B, N + 1], signs and range taken off
        values = values.view(batch, n + 1)
        span = values[:, :1] - values[:, -1:]
        scaled = (values - values[:, -1:]) / span.masked_fill(span == 0, 1)
        return torch.where(span == 0, line, scaled)

    return (falling(back) + falling(gone)) / 2


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
