"""Head attributions of many samples or many wordings (head attribution, sections 4.2 to 4.5 and
appendix C.3). Pure functions on coefficients [S, L, H] or vectors [S, P], and `compare_wordings`.

The paper shows t-SNE plots; numbers say whether they mean anything: purity of the nearest
neighbours, next to chance, and the silhouette.

Does the same question in other words use the same heads? cosine(beta_first, beta_other) for every
other wording. Coefficients are noisy, so the cosine to expect is not 1 but that of the first
wording with itself, fitted again on fresh masks: the ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause.errors import BadOption
from seecause.lvlm.attribute import HeadAttribution, attribute_heads
from seecause.lvlm.bank import MeanBank
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.fit import How, correlation
from seecause.lvlm.model import LVLM

Head = tuple[int, int]
STRONG = 0.1  # a head counts if its coefficient is larger in some sample


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


@dataclass(frozen=True, eq=False)
class WordingComparison:
    questions: tuple[str, ...]
    attributions: tuple[HeadAttribution, ...]  # one for each question
    cosines: Tensor  # [Q - 1] float64: of every other wording with the first
    ceiling: float  # of the first with itself, on fresh masks


def compare_wordings(
    lvlm: LVLM,
    image: Image.Image,
    questions: Sequence[str],
    bank: MeanBank,
    *,
    answer: str | Sequence[int] | None = None,
    how: How = "derivative",
    masks: int | None = None,
    p: float = 0.75,
    floor: float | None = 1.0,
    seed: int = 0,
) -> WordingComparison:
    """Head attributions of one picture for several wordings of a question, `how`, by how many
    `masks` and with which share `p` of ablated heads as in `attribute_heads`; without `answer`, of
    whatever the model says to the first one."""
    if len(questions) < 2:
        raise BadOption("questions", len(questions), "at least two wordings")
    first = MaskEngine(lvlm, image, questions[0], bank, answer=answer, floor=floor)
    engines = [first]
    for question in questions[1:]:
        engines.append(MaskEngine(lvlm, image, question, bank, answer=[first.target], floor=floor))
    attributions = [
        attribute_heads(engine, how=how, masks=masks, p=p, seed=seed + place)
        for place, engine in enumerate([*engines, first])
    ]  # the last: the first wording again
    vectors = torch.stack([attribution.coefficients for attribution in attributions])
    alike = cosines(vectors[:1].expand_as(vectors[1:]), vectors[1:])
    return WordingComparison(
        tuple(questions), tuple(attributions[:-1]), alike[:-1], float(alike[-1])
    )
