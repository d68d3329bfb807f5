"""Head attributions of many samples (head attribution, sections 4.2 to 4.5). Pure functions on
coefficients [S, L, H] or vectors [S, P].

The paper shows t-SNE plots; numbers say whether they mean anything: purity of the nearest
neighbours, next to chance, and the silhouette.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.lvlm.regress import correlation

Head = tuple[int, int]
STRONG = 0.1  # a head counts if its coefficient is larger in some sample


def importance_map(chosen: Tensor) -> Tensor:
    """[L, H] float64: in which share of the samples a head is one of x*; chosen [S, L, H] bool."""
    return chosen.double().mean(dim=0)


def correlations(first: Tensor, second: Tensor) -> Tensor:
    """[S] float64: Pearson's correlation over heads, sample by sample; [S, L, H] each."""
    return torch.tensor(
        [correlation(a.flatten(), b.flatten()) for a, b in zip(first, second, strict=True)],
        dtype=torch.float64,
    )


def cosines(first: Tensor, second: Tensor) -> Tensor:
    """[S] float64: cosine of coefficients, sample by sample; [S, ...] each."""
    return torch.nn.functional.cosine_similarity(
        first.double().flatten(1), second.double().flatten(1), dim=1
    )


@dataclass(frozen=True)
class Grouping:
    """Do vectors with the same label lie together?"""

    purity: (
        float  # share of the nearest neighbours that have a sample's own label, mean over samples
    )
    chance: float  # the same for neighbours drawn by lot
    silhouette: float

    @property
    def excess(self) -> float:
        """0 by chance, 1 where all neighbours are of one's own."""
        return (self.purity - self.chance) / (1 - self.chance)


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
    near = (
        NearestNeighbors(n_neighbors=neighbours).fit(points).kneighbors(return_distance=False)
    )  # [S, k], a sample is not its own neighbour
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
    made = TSNE(
        perplexity=min(perplexity, (len(points) - 1) / 3), init="pca", random_state=seed
    ).fit_transform(points)
    return torch.from_numpy(made).double()


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
    kept = (coefficients.flatten(1) > threshold).any(dim=0).nonzero()[:, 0]
    if len(kept) <= groups:
        raise BadOption(
            "threshold", threshold, f"a value that more than {groups} heads pass; {len(kept)} do"
        )
    vectors = coefficients.flatten(1).T[kept].double()  # [K, S]
    tree = linkage(vectors.numpy(), method="average", metric="euclidean")
    found = torch.from_numpy(fcluster(tree, groups, criterion="maxclust").astype(np.int64))
    by_use = sorted(set(found.tolist()), key=lambda g: -float(vectors[found == g].mean()))
    ranked = torch.tensor([by_use.index(g) for g in found.tolist()])
    heads = tuple(divmod(i, width) for i in kept.tolist())
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
    known = {label: code for code, label in enumerate(dict.fromkeys(labels))}
    return np.array([known[label] for label in labels])
