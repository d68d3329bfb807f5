"""New last layers, and directions folded out of old ones: pure functions on features [N, P], and
the remedies that they are.

    last-layer        a new last layer on versions, classes balanced, ridge
    directions        directions in which versions differ, folded out of the old last layer
    directions-refit  the same, then a new last layer on plain pictures
    dfr, group-dro    last layers that need group labels

Features enter the last layer: logits = features W' + b. All arithmetic is float64.

    ridge logistic   min  C sum_i w_i nll_i + |W|^2 / 2            w: classes balanced
    least squares    the same with half squared distance to one-hot labels: closed form
    group DRO        min_W max_q sum_g q_g nll_g (Sagawa et al. 2020), which needs group labels
    directions       V of the singular vectors of what changes between versions of a picture,
                     folded in:  W <- W (I - V'V),  b <- b + W V'V mean(features)

Features are standardised before a fit, and that is folded back into the layer, so that C means the
same whatever the model. With an anchor the penalty is |W - anchor|^2, and classes without a picture
keep their rows: without one a new layer would forget them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.background._remedies import Lesson, Mended, remedy, with_layer
from seecause.background.baselines import LastLayer, fit_head, last_layer
from seecause.errors import BadOption
from seecause.models.view import VisionModel

LossForm = Literal["logistic", "squares"]
STRENGTH = 0.01  # C: of the likelihood against the ridge
MOST = 8  # directions, at most
CONTROLS = 5  # draws of random directions


@dataclass(frozen=True, eq=False)
class _Frame:
    """Standardised features, and the way back."""

    mean: Tensor  # [P]
    deviation: Tensor  # [P]

    @classmethod
    def of(cls, features: Tensor) -> _Frame:
        deviation = features.std(dim=0, correction=0)
        return cls(features.mean(dim=0), deviation.masked_fill(deviation == 0, 1.0))

    def into(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.deviation

    def layer_into(self, layer: LastLayer) -> LastLayer:
        weight = layer.weight.double()
        return LastLayer(weight * self.deviation, layer.bias.double() + weight @ self.mean)

    def layer_back(self, weight: Tensor, bias: Tensor) -> LastLayer:
        weight = weight / self.deviation
        return LastLayer(weight, bias - weight @ self.mean)


def new_layer(
    features: Tensor,
    labels: Tensor,
    *,
    classes: int,
    strength: float = STRENGTH,
    form: LossForm = "logistic",
    anchor: LastLayer | None = None,
) -> LastLayer:
    """A last layer for features [N, P] and labels [N]; every class counts the same.

    >>> import torch
    >>> features = torch.tensor([[0.0, 1.0], [0.2, 0.9], [1.0, 0.0], [0.9, 0.1]])
    >>> layer = new_layer(features, torch.tensor([0, 0, 1, 1]), classes=2)
    >>> layer(features.double()).argmax(dim=1).tolist()
    [0, 0, 1, 1]
    """
    x, y = _checked(features, labels, classes, strength, anchor)
    frame = _Frame.of(x)
    z, weights = frame.into(x), class_weights(y, classes)
    start = LastLayer(z.new_zeros(classes, z.shape[1]), z.new_zeros(classes))
    if anchor is not None:
        start = frame.layer_into(anchor)
    present = torch.bincount(y, minlength=classes) > 0
    if form == "squares":
        return frame.layer_back(*_least_squares(z, y, weights, strength, start, present))
    return frame.layer_back(*_logistic(z, y, weights, strength, start, present))


def class_weights(labels: Tensor, classes: int) -> Tensor:
    """[N] float64: every class that occurs weighs the same, and the mean is 1."""
    counts = torch.bincount(labels, minlength=classes)
    return len(labels) / (int((counts > 0).sum()) * counts.double()[labels])


def _checked(
    features: Tensor, labels: Tensor, classes: int, strength: float, anchor: LastLayer | None
) -> tuple[Tensor, Tensor]:
    x, y = features.detach().double().cpu(), labels.detach().long().cpu()
    if len(x) != len(y) or len(x) == 0:
        raise BadOption("labels", f"{len(y)} of them", f"one for each of {len(x)} pictures")
    if strength <= 0:
        raise BadOption("strength", strength, "a number above 0")
    occurring = len(y.unique())
    if occurring < 2:
        raise BadOption("labels", "one class only", "pictures of two classes at least")
    if occurring < classes and anchor is None:
        raise BadOption(
            "labels",
            f"{occurring} of {classes} classes",
            "pictures of every class, or an old last layer to hold on to (anchor)",
        )
    return x, y


def _logistic(
    z: Tensor, y: Tensor, weights: Tensor, strength: float, start: LastLayer, present: Tensor
) -> tuple[Tensor, Tensor]:
    """L-BFGS on a convex problem: the start does not matter. Classes without a picture are one
    column that does not change: the log-sum-exp of their old logits."""
    old, shift = start.weight[present], start.bias[present]
    weight, bias = old.clone().requires_grad_(True), shift.clone().requires_grad_(True)
    absent = z @ start.weight[~present].T + start.bias[~present]
    rest = absent.logsumexp(dim=1, keepdim=True) if absent.shape[1] else absent  # [N, 1] or [N, 0]
    places = present.long().cumsum(0)[y] - 1
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=500,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = torch.cat([z @ weight.T + bias, rest], dim=1)
        nll = F.cross_entropy(logits, places, reduction="none")
        ridge = (weight - old).square().sum() / (2 * strength * len(z))
        total = (weights * nll).mean() + ridge
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    new_weight, new_bias = start.weight.clone(), start.bias.clone()
    new_weight[present], new_bias[present] = weight.detach(), bias.detach()
    return new_weight, new_bias


def _least_squares(
    z: Tensor, y: Tensor, weights: Tensor, strength: float, start: LastLayer, present: Tensor
) -> tuple[Tensor, Tensor]:
    """Ridge regression of what one-hot labels leave over, with an intercept of its own."""
    rest = F.one_hot(y, len(present)).double() - (z @ start.weight.T + start.bias)
    share = (weights / weights.sum())[:, None]
    middle, level = (share * z).sum(dim=0), (share * rest).sum(dim=0)
    x, r = z - middle, rest - level
    gram = x.T @ (weights[:, None] * x) + torch.eye(x.shape[1], dtype=x.dtype) / strength
    change = torch.linalg.solve(gram, x.T @ (weights[:, None] * r)).T  # [C, P]
    change = torch.where(present[:, None], change, 0.0)
    moved = torch.where(present, level - change @ middle, 0.0)
    return start.weight + change, start.bias + moved


def group_dro(
    features: Tensor,
    labels: Tensor,
    groups: Tensor,
    *,
    classes: int,
    strength: float = STRENGTH,
    steps: int = 500,
    rate: float = 0.05,
    step_size: float = 0.05,
) -> LastLayer:
    """A last layer for the worst group: groups [N] or [N, k] with large losses gain weight."""
    x, y = _checked(features, labels, classes, strength, None)
    codes = groups.cpu() if groups.ndim > 1 else groups.cpu()[:, None]
    member = codes.unique(dim=0, return_inverse=True)[1]
    sizes = torch.bincount(member).double()
    frame = _Frame.of(x)
    z = frame.into(x)
    weight = z.new_zeros(classes, z.shape[1]).requires_grad_(True)
    bias = z.new_zeros(classes).requires_grad_(True)
    share = torch.full_like(sizes, 1 / len(sizes))
    optimizer = torch.optim.Adam([weight, bias], lr=rate)
    with torch.enable_grad():
        for _ in range(steps):
            nll = F.cross_entropy(z @ weight.T + bias, y, reduction="none")
            means = torch.zeros_like(sizes).index_add(0, member, nll) / sizes
            share = share * (step_size * means.detach()).exp()
            share = share / share.sum()
            ridge = weight.square().sum() / (2 * strength * len(z))
            optimizer.zero_grad()
            ((share * means).sum() + ridge).backward()
            optimizer.step()
    return frame.layer_back(weight.detach(), bias.detach())


@dataclass(frozen=True, eq=False)
class Directions:
    """In which features change between versions of a picture, the strongest first."""

    vectors: Tensor  # [R, P] float64, orthonormal
    values: Tensor  # [R] singular values
    mean: Tensor  # [P], of all features

    @property
    def rank(self) -> int:
        """Read off the spectrum: where it falls by the largest factor, among the first `MOST`."""
        values = self.values[: MOST + 1]
        if len(values) < 2:
            return len(values)
        floor = 1e-12 * values[0].clamp_min(1e-300)
        return 1 + int((values[:-1] / values[1:].clamp_min(floor)).argmax())

    def fold(self, layer: LastLayer, rank: int) -> LastLayer:
        """The layer blind to the first `rank` directions: they stay at their mean."""
        return blind(layer, self.vectors[:rank], self.mean)


def change_directions(features: Tensor, pictures: Tensor) -> Directions:
    """From features [N, P] of versions of pictures [N]: singular vectors of how far each version is
    from the mean of its picture's versions."""
    x, pictures = features.detach().double().cpu(), pictures.cpu()
    which = pictures.unique(return_inverse=True)[1]
    counts = torch.bincount(which).double()
    if bool((counts < 2).all()):
        raise BadOption("pictures", "one version each", "two versions of a picture at least")
    sums = x.new_zeros(len(counts), x.shape[1]).index_add(0, which, x)
    moved = x - (sums / counts[:, None])[which]
    _, values, vectors = torch.linalg.svd(moved, full_matrices=False)
    return Directions(vectors, values, x.mean(dim=0))


def blind(layer: LastLayer, vectors: Tensor, mean: Tensor) -> LastLayer:
    """The layer with orthonormal vectors [r, P] folded out: W (I - V'V), and the mean kept."""
    lost = (layer.weight.double() @ vectors.T) @ vectors  # [C, P]
    return LastLayer(layer.weight.double() - lost, layer.bias.double() + lost @ mean)


def random_directions(rank: int, width: int, *, seed: int) -> Tensor:
    """`rank` orthonormal vectors [r, P], by lot: the control."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randn(width, rank, generator=draw, dtype=torch.float64)
    return torch.linalg.qr(numbers).Q.T


@remedy("last-layer", cost="1 forward of each version")
def fit_last_layer(
    model: VisionModel,
    lesson: Lesson,
    *,
    strength: float = STRENGTH,
    form: LossForm = "logistic",
    anchor: bool | None = None,
) -> Mended:
    """A new last layer on versions, classes balanced, ridge. With `anchor` it stays near the old
    one; by default where the pictures lack some classes, which a new one would forget."""
    features, labels = lesson.learn.features(model).moved, lesson.learn.moved.labels
    lacking = len(labels.unique()) < model.n_classes
    anchored = lacking if anchor is None else anchor
    old = last_layer(model) if anchored else None
    layer = new_layer(
        features,
        labels,
        classes=model.n_classes,
        strength=strength,
        form=form,
        anchor=old,
    )
    near = ", held near the old one" if anchored else ""
    done = f"A new last layer ({form}, C = {strength:g}{near}) on {len(features)} versions."
    return with_layer(model, layer, done, {"versions": len(features), "anchored": anchored})


@remedy("directions", cost="1 forward of each version")
def fold_directions(
    model: VisionModel, lesson: Lesson, *, rank: int | None = None, most: int = MOST
) -> Mended:
    """Directions in which versions differ, folded out of the old last layer; the rank by the
    spectrum or by held-out versions, whichever is better on these."""
    old = last_layer(model)
    seen = lesson.learn.features(model).moved
    directions = change_directions(seen, lesson.learn.moved.source_index)
    layers = {r: directions.fold(old, r) for r in _ranks(rank, most, len(directions.values))}
    chosen, details = _best_rank(lesson, model, layers, directions)
    lots = [random_directions(chosen, seen.shape[1], seed=draw) for draw in range(CONTROLS)]
    by_lot = [blind(old, lot, directions.mean) for lot in lots]
    spectrum = (directions.values / directions.values[0])[: most + 1].tolist()
    details["spectrum"] = [round(value, 4) for value in spectrum]
    details["transplant-worst of random directions"] = [
        round(lesson.worst(lesson.choose.under(model, layer)), 4) for layer in by_lot
    ]
    done = f"{chosen} of {seen.shape[1]} directions folded out of the last layer."
    return with_layer(model, layers[chosen], done, details)


@remedy("directions-refit", cost="1 forward of each version")
def fold_and_refit(
    model: VisionModel,
    lesson: Lesson,
    *,
    rank: int | None = None,
    most: int = MOST,
    strength: float = STRENGTH,
) -> Mended:
    """Directions in which versions differ taken out, then a new last layer on plain pictures."""
    seen = lesson.learn.features(model)
    directions = change_directions(seen.moved, lesson.learn.moved.source_index)
    labels, classes = lesson.learn.labels, model.n_classes
    anchor = last_layer(model) if len(labels.unique()) < classes else None
    middle = directions.mean
    layers = {}
    for r in _ranks(rank, most, len(directions.values)):
        vectors = directions.vectors[:r]
        flat = seen.plain - ((seen.plain - middle) @ vectors.T) @ vectors
        held = None if anchor is None else directions.fold(anchor, r)
        layer = new_layer(flat, labels, classes=classes, strength=strength, anchor=held)
        layers[r] = blind(layer, vectors, middle)
    chosen, details = _best_rank(lesson, model, layers, directions)
    done = f"{chosen} directions taken out, and a new last layer on {len(labels)} plain pictures."
    return with_layer(model, layers[chosen], done, details)


@remedy("dfr", cost="1 forward of each picture", needs="group labels")
def retrain_by_groups(model: VisionModel, lesson: Lesson, *, refits: int = 20) -> Mended:
    """DFR (Kirichenko et al. 2023): a new last layer on group-balanced pictures."""
    groups = lesson.group_codes
    plain = lesson.learn.features(model).plain
    head = fit_head(
        plain, lesson.learn.labels, groups, classes=model.n_classes, refits=refits, seed=lesson.seed
    )
    done = f"DFR: a new last layer on {len(plain)} pictures with group labels (C = {head.strength})"
    return with_layer(model, head, f"{done}.", {})


@remedy("group-dro", cost="1 forward of each picture", needs="group labels")
def robust_last_layer(
    model: VisionModel, lesson: Lesson, *, strength: float = STRENGTH, steps: int = 500
) -> Mended:
    """Group DRO (Sagawa et al. 2020) of the last layer."""
    groups = lesson.group_codes
    plain = lesson.learn.features(model).plain
    layer = group_dro(
        plain, lesson.learn.labels, groups, classes=model.n_classes, strength=strength, steps=steps
    )
    done = f"Group DRO: a new last layer on {len(plain)} pictures with group labels."
    return with_layer(model, layer, done, {})


def _ranks(rank: int | None, most: int, available: int) -> list[int]:
    if rank is not None and rank > available:
        raise BadOption("rank", rank, f"1 to {available} directions")
    return [rank] if rank is not None else list(range(1, min(most, available) + 1))


def _best_rank(
    lesson: Lesson, model: VisionModel, layers: Mapping[int, LastLayer], directions: Directions
) -> tuple[int, dict[str, Any]]:
    """The rank whose layer has the best transplant-worst; of equals the spectrum's, else the
    lowest."""
    tried = {r: lesson.worst(lesson.choose.under(model, layer)) for r, layer in layers.items()}
    chosen = max(tried, key=lambda r: (tried[r], r == directions.rank, -r))
    by_rank = {str(r): round(worst, 4) for r, worst in tried.items()}
    about = {"rank": chosen, "rank of the spectrum": directions.rank}
    return chosen, {**about, "transplant-worst by rank": by_rank}
