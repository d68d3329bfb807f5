"""What heads do in one run, rankings of heads and whether they hold (Kim et al. 2025, section 4.1),
and head attributions of many samples (sections 4.2 to 4.5).

The share of attention that falls on the picture needs no attention matrix (eq. 10):

    exp(lse of image keys - lse of all keys)

For the logit lens, a head's output at one text row goes through the final norm and the vocabulary,
and the words with the largest logits are read. The paper leaves row and norm open: here the last
row, with the norm; `image_only` reads the part of the output that comes from image tokens.

attention   Img(l, h): attention on the picture, averaged over text rows                   (eq. 10)
causal      Delta_n = 1 - F(all heads but n): what it costs to take one head away
random      any order

Heads are switched on, or off, one after the other, the best first; x^(k) has the top k on:

faithfulness F(x^(k)) -> 1        k_faith = min {k : F(x^(k)) > 0.8}: the heads that are enough
completeness F(1 - x^(k)) -> 0    k_comp = min {k : F(1 - x^(k)) < 0.2}: the heads that are needed

The curves are not monotone, so both counts are the first crossing of a scan from k = 1 on.

Of many samples the paper shows t-SNE plots; numbers say whether they mean anything: purity of the
nearest neighbours, next to chance, and the silhouette.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from seecause.engine.attend import Bank, attend, merge
from seecause.engine.walk import walk
from seecause.errors import BadOption
from seecause.lvlm._cache import Part, PrefixCache, read_own
from seecause.lvlm.fit import correlation
from seecause.lvlm.model import LVLM
from seecause.types import wide

if TYPE_CHECKING:
    from seecause.lvlm.attribute import HeadAttribution
    from seecause.lvlm.engine import MaskEngine

Head = tuple[int, int]  # (layer, head), both from 0
FAITHFUL, COMPLETE = 0.8, 0.2
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)  # of faithfulness; of completeness 1 - level
RATIOS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # shares of heads that are ablated
STRONG = 0.1  # a head counts if its coefficient is larger in some sample


@dataclass(frozen=True, eq=False)
class HeadActivations:
    """All text rows of one run, block by block."""

    lvlm: LVLM
    mass: Tensor  # [L, T, H] share of attention on image tokens
    heads: Tensor  # [L, T, H, dh] outputs, before the output projection
    from_image: Tensor  # [L, T, H, dh] the part of them that comes from image tokens
    states: Tensor  # [L + 1, T, D] entering each block, and leaving the last
    queries: list[Tensor]  # [H, T, dh]
    keys: list[Tensor]  # [Hkv, N, dh] of the picture
    lse: Tensor  # [L, T, H] over all keys
    bias: list[Tensor | None]  # [H, T, N] what hides image keys from rows, where a model has that

    def image_attention(self) -> Tensor:
        """[L, H]: attention on the picture, averaged over text rows (eq. 10)."""
        return self.mass.mean(dim=1)

    def attention(self, layer: int, head: int) -> Tensor:
        """[T, N]: attention of one head's text rows on image tokens. The run must be the intact one
        at this head."""
        block = self.lvlm.blocks[layer]
        if not 0 <= head < block.heads:
            raise BadOption("head", head, f"0 to {block.heads - 1}")
        keys = self.keys[layer][head * block.kv_heads // block.heads]
        scores = wide(self.queries[layer][head]) @ wide(keys).T * block.scale
        bias = self.bias[layer]
        if bias is not None:
            scores = scores + bias[head % len(bias)]  # one serves all heads
        return torch.exp(scores - self.lse[layer, :, head, None])

    @torch.no_grad()
    def written(self, *, row: int = -1, image_only: bool = False) -> Tensor:
        """[L, H, D]: what each head adds to the residual stream at one text row, through its slice
        of the output projection."""
        outputs = (self.from_image if image_only else self.heads)[:, row]  # [L, H, dh]
        written = []
        for block, heads in zip(self.lvlm.blocks, outputs, strict=True):
            # [1, H, H*dh]: one head at a time, the others silent
            alone = torch.diag_embed(heads.T).permute(1, 2, 0).flatten(1)[None]
            written.append((block.mix(alone) - block.mix(torch.zeros_like(alone[:, :1])))[0])
        return torch.stack(written)

    @torch.no_grad()
    def lens(self, layer: int, head: int, *, row: int = -1, image_only: bool = False) -> Tensor:
        """[V]: the logit lens on one head's output (final norm, then vocabulary)."""
        vector = self.written(row=row, image_only=image_only)[layer, head]
        return wide(self.lvlm.decoder.head(self.lvlm.decoder.norm(vector[None])))[0]


@torch.no_grad()
def head_activations(lvlm: LVLM, cache: PrefixCache, on: Tensor) -> HeadActivations:
    """Run one mask `on` [L, H] and keep what its heads do."""
    image, states, columns = cache.image, [cache.states[0]], []
    queries, keys, biases = [], [], []
    for step in walk(lvlm, cache.states, cache.at):
        q, scale, index = step.q, step.block.scale, step.index
        bias = cache.bias(step.block, rows=q.shape[2])
        picture, average = cache.picture[index], cache.average[index]
        true, mean = (_read(q, bank, image, bias, scale) for bank in (picture, average))
        seen = torch.where(on[index][:, None], true[0], mean[0])
        seen_lse = torch.where(on[index], true[1], mean[1])
        keep = cache.own_keep(q.shape[2])
        parts = [(seen, seen_lse), read_own(q, step.k, step.v, scale=scale, keep=keep)]
        if image.start:
            parts.append(_read(q, picture, slice(0, image.start), bias, scale))
        o, lse = merge([wide(o) for o, _ in parts], [lse for _, lse in parts])
        share = torch.exp(seen_lse - lse)
        from_image = share[..., None] * wide(seen)
        columns.append((share[0], o[0].to(q.dtype), from_image[0].to(q.dtype), lse[0]))
        queries.append(q[0])
        keys.append(picture[0][0, :, image])
        biases.append(None if bias is None else bias[0, :, :, image])
        step.o = o.to(q.dtype)
        states.append(step.out[0])
    mass, heads, from_images, lses = map(torch.stack, zip(*columns, strict=True))
    stacked = torch.stack(states)
    return HeadActivations(lvlm, mass, heads, from_images, stacked, queries, keys, lses, biases)


def _read(
    q: Tensor, bank: tuple[Tensor, Tensor], columns: slice, bias: Tensor | None, scale: float
) -> Part:
    """Rows q [1, H, R, dh] over some columns of a bank."""
    hidden = None if bias is None else bias[..., columns]
    k, v = (tensor[:, :, columns] for tensor in bank)
    return attend(q, [Bank(k, v, bias=hidden)], scale=scale)


@dataclass(frozen=True, eq=False)
class RankingCurves:
    """F along a ranking, P heads; one row for each order where there are several (random)."""

    faithfulness: Tensor  # [O, P + 1] float64; column k: only the top k on
    completeness: Tensor  # [O, P + 1] float64; column k: all but the top k on

    def enough(self, level: float = FAITHFUL) -> Tensor:
        """[O] k_faith: how many heads alone bring more than `level` of the effect."""
        return _first(self.faithfulness > _share("level", level))

    def needed(self, level: float = COMPLETE) -> Tensor:
        """[O] k_comp: how many heads must go until less than `level` of the effect is left."""
        return _first(self.completeness < _share("level", level))

    def rows(self, rows: slice) -> RankingCurves:
        return RankingCurves(self.faithfulness[rows], self.completeness[rows])


def scan(engine: MaskEngine, orders: Tensor, *, points: int | None = None) -> RankingCurves:
    """Both curves for orders [P] or [O, P] of component indices, the best first. Orders share the
    masks' common blocks. In full, or with `points` at about so many counts (`curve_counts`) and
    straight between them."""
    orders = torch.atleast_2d(orders.cpu())
    in_order = torch.arange(engine.n_components).expand(len(orders), -1)
    if not torch.equal(orders.sort(dim=-1).values, in_order):
        expected = f"orders of all {engine.n_components} heads, each of them once"
        raise BadOption("orders", list(orders.shape), expected)
    counts = curve_counts(engine.n_components, points)
    on = torch.stack([_top(order, counts) for order in orders])  # [O, K, P]
    responses = engine.evaluate(heads=torch.cat([on, ~on]).flatten(0, 1)).double().cpu()
    curves = responses.reshape(2, len(orders), -1)
    if len(counts) <= engine.n_components:
        every = np.arange(engine.n_components + 1)
        rows = [np.interp(every, counts, row) for row in curves.flatten(0, 1).numpy()]
        curves = torch.from_numpy(np.stack(rows)).reshape(2, len(orders), -1)
    return RankingCurves(*curves)


def curve_counts(size: int, points: int | None = None) -> list[int]:
    """How many of `size` heads are on at each place of a curve: any number, or about `points` of
    them, close together where heads are few."""
    if points is None or points > size:
        return list(range(size + 1))
    if points < 2:
        raise BadOption("points", points, "at least two counts of heads")
    return sorted({round(size * (place / (points - 1)) ** 2) for place in range(points)})


def first_crossing(
    engine: MaskEngine,
    order: Tensor,
    *,
    level: float = FAITHFUL,
    completeness: bool = False,
    chunk: int = 128,
) -> int:
    """One of the counts without the rest of the curve: masks are asked `chunk` at a time until it
    is there. For models with a thousand heads."""
    _share("level", level)
    order = order.flatten().cpu()
    for start in range(1, len(order) + 1, chunk):
        on = _top(order, range(start, min(start + chunk, len(order) + 1)))
        responses = engine.evaluate(heads=~on if completeness else on)
        crossed = responses < level if completeness else responses > level
        if bool(crossed.any()):
            return start + int(crossed.int().argmax())
    return len(order)


def essential_heads(
    attribution: HeadAttribution, curves: RankingCurves, level: float = FAITHFUL
) -> Tensor:
    """x* [L*H]: the fewest heads, in order of their coefficients, that alone bring more than
    `level` of the effect."""
    return attribution.mask(int(curves.enough(level)[0]))


def threshold_study(curves: RankingCurves, levels: Sequence[float] = LEVELS) -> Tensor:
    """[levels, 2] float64: heads that are enough for a level, and heads to take away until 1 -
    level is left; means over orders."""
    enough = torch.stack([curves.enough(level) for level in levels])  # [levels, O]
    needed = torch.stack([curves.needed(1 - level) for level in levels])
    return torch.stack([enough.double().mean(dim=1), needed.double().mean(dim=1)], dim=1)


def _top(order: Tensor, counts: Sequence[int]) -> Tensor:
    """[counts, P] bool: the first k of an order on, for each k."""
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return rank < torch.tensor(counts)[:, None]


def _first(crossed: Tensor) -> Tensor:
    """The first True of each row [O, P + 1], from k = 1 on; the last k where there is none."""
    crossed = crossed[:, 1:]
    return torch.where(crossed.any(dim=1), crossed.int().argmax(dim=1) + 1, crossed.shape[1])


def _share(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise BadOption(name, value, "a share between 0 and 1")
    return value


def attention_scores(engine: MaskEngine) -> Tensor:
    """[L, H] float64: how much of its attention a head of the intact model has on the picture."""
    return engine.activations().image_attention().double().cpu()


def causal_scores(engine: MaskEngine) -> Tensor:
    """[L, H] float64: the share of the picture's effect that is lost without this head, all others
    seeing."""
    all_but_one = ~torch.eye(engine.n_components, dtype=torch.bool)
    lost = 1 - engine.evaluate(heads=all_but_one).double().cpu()
    return lost.reshape(engine.lvlm.n_layers, engine.lvlm.n_heads)


def random_orders(engine: MaskEngine, count: int, *, seed: int = 0) -> Tensor:
    """[count, L*H]: component indices in orders drawn by lot."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(engine.n_components, generator=generator) for _ in range(count)]
    return torch.stack(orders)


def importance_map(chosen: Tensor) -> Tensor:
    """[L, H] float64: in which share of the samples a head is one of x*; chosen [S, L, H] bool."""
    return chosen.double().mean(dim=0)


def correlations(first: Tensor, second: Tensor) -> Tensor:
    """[S] float64: Pearson's correlation over heads, sample by sample; [S, L, H] each."""
    pairs = zip(first.flatten(1), second.flatten(1), strict=True)
    return torch.tensor([correlation(a, b) for a, b in pairs], dtype=torch.float64)


def cosines(first: Tensor, second: Tensor) -> Tensor:
    """[S] float64: cosine of coefficients, sample by sample; [S, ...] each."""
    return torch.nn.functional.cosine_similarity(
        first.double().flatten(1), second.double().flatten(1), dim=1
    )


@dataclass(frozen=True)
class Grouping:
    """Do vectors with the same label lie together?"""

    purity: float  # share of the nearest neighbours with a sample's own label, mean over samples
    chance: float  # the same for neighbours drawn by lot
    silhouette: float


def grouping(vectors: Tensor, labels: Sequence[Hashable], *, neighbours: int = 5) -> Grouping:
    """How far vectors [S, P] fall into the groups that `labels` name, by Euclidean distance."""
    from sklearn.metrics import silhouette_score
    from sklearn.neighbors import NearestNeighbors

    codes = _codes(labels)
    if len(codes) != len(vectors):
        raise BadOption("labels", len(codes), f"one for each of the {len(vectors)} samples")
    kinds = len(set(codes.tolist()))
    if not 2 <= kinds < len(codes) or not 1 <= neighbours < len(codes):
        raise BadOption(
            "labels",
            f"{kinds} kinds in {len(codes)} samples",
            f"at least two kinds, fewer than samples, and more than neighbours={neighbours}",
        )
    points = vectors.double().flatten(1).cpu().numpy()
    nearest = NearestNeighbors(n_neighbors=neighbours).fit(points)
    near = nearest.kneighbors(return_distance=False)  # [S, k], a sample is not its own neighbour
    purity = (codes[near] == codes[:, None]).mean()
    chance = ((codes[:, None] == codes[None]).sum(axis=1) - 1).mean() / (len(codes) - 1)
    return Grouping(float(purity), float(chance), float(silhouette_score(points, codes)))


def embed(vectors: Tensor, *, perplexity: float = 30, seed: int = 0) -> Tensor:
    """[S, 2]: t-SNE from the principal components; perplexity is lowered where there are few
    samples."""
    from sklearn.manifold import TSNE

    points = vectors.double().flatten(1).cpu().numpy()
    if len(points) < 4:
        raise BadOption("vectors", len(points), "at least 4 samples")
    perplexity = min(perplexity, (len(points) - 1) / 3)
    embedded = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(points)
    return torch.from_numpy(embedded).double()


@dataclass(frozen=True, eq=False)
class HeadGroups:
    """Heads that matter somewhere, by how alike they are used over samples."""

    heads: tuple[Head, ...]
    vectors: Tensor  # [K, S]: each head's coefficient in every sample
    groups: Tensor  # [K]: 0 for the group used most, then by mean use
    order: Tensor  # [K]: leaves of the tree, alike beside alike

    def use(self, group: int) -> Tensor:
        """[heads of the group]: in which share of the samples each is strong."""
        return (self.vectors[self.groups == group] > STRONG).double().mean(dim=1)


def group_heads(coefficients: Tensor, *, groups: int = 2, threshold: float = STRONG) -> HeadGroups:
    """Heads with a coefficient over `threshold` in some sample of coefficients [S, L, H], clustered
    by average linkage of Euclidean distances."""
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage

    width = coefficients.shape[2]
    strong = (coefficients.flatten(1) > threshold).any(dim=0).nonzero()[:, 0]
    if len(strong) <= groups:
        raise BadOption(
            "threshold", threshold, f"a value that more than {groups} heads pass; {len(strong)} do"
        )
    vectors = coefficients.flatten(1).T[strong].double()  # [K, S]
    tree = linkage(vectors.numpy(), method="average", metric="euclidean")
    clusters = torch.from_numpy(fcluster(tree, groups, criterion="maxclust").astype(np.int64))
    by_use = sorted(set(clusters.tolist()), key=lambda g: -float(vectors[clusters == g].mean()))
    ranked = torch.tensor([by_use.index(g) for g in clusters.tolist()])
    heads = tuple(divmod(i, width) for i in strong.tolist())
    return HeadGroups(heads, vectors, ranked, torch.from_numpy(leaves_list(tree).astype(np.int64)))


def depth_of_use(chosen: Tensor) -> float:
    """The mean layer of the heads in x*, as a share of the depth: 0 all in the first layer, 1 all
    in the last; chosen [S, L, H]."""
    layers = chosen.shape[1]
    if layers < 2 or not bool(chosen.any()):
        return math.nan
    use = chosen.double().sum(dim=(0, 2))  # [L]
    return float((use * torch.arange(layers)).sum() / use.sum() / (layers - 1))


def _codes(labels: Sequence[Hashable]) -> np.ndarray:
    code_of = {label: code for code, label in enumerate(dict.fromkeys(labels))}
    return np.array([code_of[label] for label in labels])
