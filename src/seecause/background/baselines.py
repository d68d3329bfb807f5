"""What removing heads is compared with.

Last-layer retraining, DFR (Kirichenko et al. 2023, 2204.02937): frozen features, a new linear head
fitted on data in which all groups are equally frequent.
    standardise -> L1 logistic regression on group-balanced subsets -> C by worst-group accuracy on
    the other half -> mean of `refits` heads
It needs group labels, which CIGMA does not: the reference to beat. The standardisation is folded
into the head.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.background.heads import need_heads, over_images
from seecause.background.images import checked_labels
from seecause.errors import BadOption, NotDefined
from seecause.loading import rewrap
from seecause.metrics.accuracy import group_accuracy
from seecause.models.eval_mode import in_eval_mode
from seecause.models.heads import CosineHead, TextHead, UnitLinear
from seecause.models.view import VisionModel

# of the likelihood against the L1 penalty: scikit-learn's C
STRENGTHS = (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01)


@dataclass(frozen=True, eq=False)
class LastLayer:
    """logits = features @ weight' + bias."""

    weight: Tensor  # [C, P] float64
    bias: Tensor  # [C]

    def __call__(self, features: Tensor) -> Tensor:
        return features @ self.weight.to(features).T + self.bias.to(features)


@dataclass(frozen=True, eq=False)
class BalancedLayer(LastLayer):
    """With the C that was chosen, and the worst-group accuracy that each C had."""

    strength: float
    tried: dict[float, float]


@in_eval_mode
def retrain_last_layer(
    model: VisionModel,
    images: Tensor,
    labels: Tensor,
    groups: Tensor,
    *,
    refits: int = 20,
    strengths: Sequence[float] = STRENGTHS,
    seed: int = 0,
) -> VisionModel:
    """The model with a new last layer. `images` are held-out ones, `groups` [N] (or [N, k]) says
    which group each belongs to."""
    labels = checked_labels(model, images, labels)
    fitted = fit_head(
        features(model, images),
        labels,
        groups,
        classes=model.n_classes,
        refits=refits,
        strengths=strengths,
        seed=seed,
    )
    return with_last_layer(model, fitted)


def with_last_layer(model: VisionModel, layer: LastLayer, *, check: bool = True) -> VisionModel:
    """A view of a copy with another last layer: in the native one's place where it fits, else as a
    head of its own."""
    weight, bias = layer.weight, layer.bias
    module = copy.deepcopy(model.module)
    own = _own_classifier(module) if model.extra is None else None
    if own is not None and own.weight.shape == weight.shape and own.bias is not None:
        with torch.no_grad():
            own.weight.copy_(weight)
            own.bias.copy_(bias)
        return rewrap(model, module, check=check)
    kind = UnitLinear if _by_angle(model) else nn.Linear
    head = kind(weight.shape[1], weight.shape[0], dtype=model.dtype, device=model.device)
    head.load_state_dict({"weight": weight, "bias": bias})
    return rewrap(model, module, head=head, check=check)


def _by_angle(model: VisionModel) -> bool:
    """Whether the head reads features of unit length: texts, prototypes, or what became of them."""
    return isinstance(model.extra, TextHead | CosineHead | UnitLinear)


def last_layer(model: VisionModel) -> LastLayer:
    """What reads `features`, float64 on the CPU; of texts, their scaled embeddings. Refused where
    it is neither those nor one linear layer."""
    own = _own_classifier(model.module) if model.extra is None else model.extra
    if isinstance(own, TextHead | CosineHead):
        scale = own.scale.exp() if isinstance(own, TextHead) else own.scale
        weight = (scale * own.matrix).detach().double().cpu()
        bias = getattr(own, "bias", None)
        shift = 0.0 if bias is None else float(bias.detach())
        return LastLayer(weight, weight.new_full((len(weight),), shift))
    if not isinstance(own, nn.Linear):
        raise NotDefined(
            "the last layer",
            f"{model.name} does not end in one linear layer",
            "A new last layer can take its place: retrain it",
        )
    weight = own.weight.detach().double().cpu()
    bias = weight.new_zeros(len(weight)) if own.bias is None else own.bias.detach().double().cpu()
    return LastLayer(weight, bias)


@in_eval_mode
@torch.no_grad()
def features(model: VisionModel, images: Tensor) -> Tensor:
    """What enters the last layer, [N, P], float64 on the CPU; of unit length where it reads
    angles."""
    need_heads(model, "a new last layer")
    images = images.to(model.device, model.dtype)
    bare = rewrap(model, model.module, head=nn.Identity(), check=False, freeze=False)
    bare.gates = model.gates
    pooled = over_images(lambda a, b: bare(images[a:b]), model, images, holds=1).double().cpu()
    return F.normalize(pooled, dim=-1) if _by_angle(model) else pooled


def fit_head(
    features: Tensor,
    labels: Tensor,
    groups: Tensor,
    *,
    classes: int,
    refits: int = 20,
    strengths: Sequence[float] = STRENGTHS,
    seed: int = 0,
) -> BalancedLayer:
    """DFR on features [N, P]. One half of the data chooses C, then all of it gives the head,
    averaged over `refits` balanced subsets."""
    x, y = features.double().cpu().numpy(), labels.cpu().numpy()
    codes = torch.as_tensor(groups).cpu()
    if len(codes) != len(y) or len(y) != len(x):
        raise BadOption("groups", f"{len(codes)} of them", f"one for each of the {len(x)} images")
    member = (
        (codes[:, None] if codes.ndim == 1 else codes).unique(dim=0, return_inverse=True)[1].numpy()
    )
    if set(y.tolist()) != set(range(classes)):
        raise BadOption(
            "labels", f"classes {sorted(set(y.tolist()))}", f"images of all {classes} classes"
        )
    if refits < 1 or not strengths or min(strengths) <= 0:
        raise BadOption(
            "refits, strengths",
            (refits, tuple(strengths)),
            "at least one refit and strengths above 0",
        )
    smallest = np.bincount(member).min()
    if smallest < 2:
        raise BadOption(
            "groups",
            f"a group of {smallest}",
            "at least two images of every group: one half chooses C",
        )
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    deviation[deviation == 0] = 1
    z = (x - mean) / deviation
    draw = np.random.default_rng(seed)
    first, second = _halves(member, draw)
    tried = {}
    for strength in strengths:
        rows = first[_balanced(member[first], draw)]
        weight, bias = _logistic(z[rows], y[rows], strength, classes)
        right = (z[second] @ weight.T + bias).argmax(axis=1) == y[second]
        tried[strength] = group_accuracy(
            torch.from_numpy(right), torch.from_numpy(member[second])
        ).worst
    best = max(tried, key=lambda strength: tried[strength])
    fitted = [
        _logistic(z[rows], y[rows], best, classes)
        for rows in (_balanced(member, draw) for _ in range(refits))
    ]
    weight = np.mean([w for w, _ in fitted], axis=0) / deviation
    bias = np.mean([b for _, b in fitted], axis=0) - weight @ mean
    return BalancedLayer(torch.from_numpy(weight), torch.from_numpy(bias), best, tried)


def _logistic(
    x: np.ndarray, y: np.ndarray, strength: float, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """L1 logistic regression: weight [C, P] and bias [C]."""
    from sklearn.linear_model import LogisticRegression

    lacking = sorted(set(range(classes)) - set(y.tolist()))
    if lacking:
        halved = f"a group-balanced half with no picture of class {lacking[0]}"
        raise BadOption("groups", halved, "groups within classes, or more pictures of each")
    if classes == 2:
        model = LogisticRegression(C=strength, l1_ratio=1.0, solver="liblinear", max_iter=1000)
        weight, bias = model.fit(x, y).coef_ / 2, model.intercept_ / 2
        return np.concatenate([-weight, weight]), np.concatenate([-bias, bias])
    model = LogisticRegression(
        C=strength, l1_ratio=1.0, solver="saga", max_iter=2000, tol=1e-3, random_state=0
    ).fit(x, y)
    return model.coef_, model.intercept_


def _balanced(member: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Rows of a random subset with as many of each group as the smallest group has."""
    size = np.bincount(member).min()
    return np.concatenate([rows[:size] for rows in _shuffled(member, draw)])


def _halves(member: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two halves of every group."""
    groups = _shuffled(member, draw)
    first = np.concatenate([rows[: len(rows) // 2] for rows in groups])
    return first, np.concatenate([rows[len(rows) // 2 :] for rows in groups])


def _shuffled(member: np.ndarray, draw: np.random.Generator) -> list[np.ndarray]:
    """Rows of each group, in random order."""
    return [draw.permutation(np.flatnonzero(member == group)) for group in range(member.max() + 1)]


def _own_classifier(module: Any) -> nn.Linear | None:
    """The native last layer, if it is one linear layer."""
    for name in ("head", "classifier", "heads.head"):
        part = module
        for step in name.split("."):
            part = getattr(part, step, None)
        if isinstance(part, nn.Linear) and not hasattr(module, "head_dist"):
            return part
    return None
