"""Training for repairs: of the last layer of a classifier, on its features, or of all weights.

Features [N, P] are what enters the last layer: logits = features W' + b. All fits are in float64.

    ridge logistic   min  C sum_i w_i nll_i + |W|^2 / 2             w_i: classes balanced
    directions       V: first right singular vectors of how features change between versions of an
                     image; folded into the layer:  W <- W (I - V'V),  b <- b + W V'V mean(features)
    least squares    min  mean |V f(x') - W f(x)|^2 + mean |V f(x) - W f(x)|^2 + ridge |V - W|^2
                     x a plain image, x' its versions: V = W (I + A), A [P, P] is the same for every
                     class, so classes without images keep what they read; it needs no label
    DFR              L1 logistic regression on group-balanced subsets, the mean of 20 fits; C by the
                     accuracy of the worst group on the other half of the data
                     (Kirichenko et al. 2023, 2204.02937); it needs group labels

Features are standardised before a fit, and the standardisation is folded back into the layer, so C
means the same for every model. With an anchor the ridge penalty is |W - anchor|^2, and classes
without an image keep their rows.

Fine-tuning trains all weights on versions of images, each with the label of its object, classes
balanced, or with probabilities that are given. AdamW with a low learning rate, random crops of at
least `LEAST` of each version (whole versions where probabilities are given), half of them mirrored,
bfloat16 on a GPU. After each epoch `score` evaluates the model; training stops when the score has
not risen for `PATIENCE` epochs. With a checkpoint file, a killed training continues from its last
whole epoch and ends with the same weights. Under `torchrun` processes share each batch and add
their gradients; the first process decides and writes.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.background.heads import need_heads, over_images
from seecause.background.images import Advance, no_advance
from seecause.errors import BadInput, BadOption, NotDefined
from seecause.faithful.training import joined_processes
from seecause.files import write_atomic
from seecause.loading import rewrap
from seecause.metrics.statistics import group_accuracy
from seecause.models.base import in_eval_mode
from seecause.models.block import spliced, wide, wide_dtype
from seecause.models.parts import CosineHead, UnitLinear
from seecause.models.view import VisionModel

if TYPE_CHECKING:
    from seecause.background.transplant import Versions

STRENGTH = 0.01  # C of the ridge regression
MOST = 8  # maximum number of directions that are removed
STRENGTHS = (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01)  # values of C that DFR tries
REFITS = 20  # fits that DFR averages
DECAY, CLIP, PATIENCE, LEAST = 0.05, 1.0, 2, 0.35  # of fine-tuning


@dataclass(frozen=True, eq=False)
class LastLayer:
    """logits = features @ weight' + bias."""

    weight: Tensor  # [C, P] float64
    bias: Tensor  # [C]

    def __call__(self, features: Tensor) -> Tensor:
        return features @ self.weight.to(features).T + self.bias.to(features)

    def towards(self, other: LastLayer, share: float) -> LastLayer:
        """The layer that is `share` of the way from this one to another."""
        return LastLayer(
            torch.lerp(self.weight.double(), other.weight.double(), share),
            torch.lerp(self.bias.double(), other.bias.double(), share),
        )


def last_layer(model: VisionModel) -> LastLayer:
    """The current last layer, float64 on the CPU; for a text head, the scaled text embeddings.

    Raises:
        NotDefined: If the model ends in something else than one linear layer or a text head.
    """
    own = _native_classifier(model, model.module) if model.extra is None else model.extra
    if isinstance(own, CosineHead):
        weight, bias = own.factor * own.matrix, own.bias
    elif isinstance(own, nn.Linear):
        weight, bias = own.weight, own.bias
    else:
        reason = f"{model.name} does not end in one linear layer"
        raise NotDefined("the last layer", reason, "Use remedies that change heads or all weights")
    weight = weight.detach().double().cpu()
    shift = weight.new_zeros(len(weight))  # a text head has one bias for all
    return LastLayer(weight, shift if bias is None else shift + bias.detach().double().cpu())


def with_last_layer(model: VisionModel, layer: LastLayer, *, check: bool = True) -> VisionModel:
    """A copy of the model with another last layer: in place of the native one where it fits,
    otherwise as a head beside the module. `check=False` skips the verification of the view."""
    weight, bias = layer.weight, layer.bias
    module = copy.deepcopy(model.module)
    own = _native_classifier(model, module) if model.extra is None else None
    if own is not None and own.weight.shape == weight.shape and own.bias is not None:
        with torch.no_grad():
            own.weight.copy_(weight)
            own.bias.copy_(bias)
        return rewrap(model, module, check=check)
    kind = UnitLinear if _by_angle(model) else nn.Linear
    head = kind(weight.shape[1], weight.shape[0], dtype=model.dtype, device=model.device)
    head.load_state_dict({"weight": weight, "bias": bias})
    return rewrap(model, module, head=head, check=check)


@in_eval_mode
@torch.no_grad()
def features(model: VisionModel, images: Tensor) -> Tensor:
    """The input of the last layer, [N, P] float64 on the CPU; of unit length if the layer computes
    cosines."""
    need_heads(model, "a new last layer")
    images = images.to(model.device, model.dtype)
    module: nn.Module = model.module
    head: nn.Module | None = nn.Identity()
    if model.last and model.extra is None:
        module, head = spliced(module, {model.last: lambda states: states}), None
    bare = rewrap(model, module, head=head, check=False, freeze=False)
    bare.gates = model.gates
    pooled = over_images(lambda a, b: bare(images[a:b]), model, images, holds=1).double().cpu()
    return F.normalize(pooled, dim=-1) if _by_angle(model) else pooled


def _by_angle(model: VisionModel) -> bool:
    """Whether the head reads features of unit length: texts, prototypes, or their replacement."""
    return isinstance(model.extra, CosineHead | UnitLinear)


def _native_classifier(model: VisionModel, module: Any) -> nn.Linear | None:
    """The native last layer if it is one linear layer; `module` may be a copy of the model's."""
    parts = dict(module.named_modules())
    own = ["head", "classifier", "heads.head"] if model.last is None else [model.last]
    for name in own:
        if isinstance(parts.get(name), nn.Linear) and not hasattr(module, "head_dist"):
            return parts[name]
    return None


def class_weights(labels: Tensor, classes: int) -> Tensor:
    """[N] float64: every class that occurs has the same total weight, and the mean is 1."""
    counts = torch.bincount(labels, minlength=classes)
    return len(labels) / (int((counts > 0).sum()) * counts.double()[labels])


def new_layer(
    features: Tensor,
    labels: Tensor,
    *,
    classes: int,
    strength: float = STRENGTH,
    anchor: LastLayer | None = None,
) -> LastLayer:
    """Fit a last layer by ridge logistic regression with balanced classes.

    Args:
        features: What enters the layer, [N, P].
        labels: Class of each row, [N].
        classes: Number of classes of the layer.
        strength: C, the weight of the likelihood against the ridge penalty.
        anchor: An old layer to stay near. Required if some class has no image.

    Example:
        >>> import torch
        >>> features = torch.tensor([[0.0, 1.0], [0.2, 0.9], [1.0, 0.0], [0.9, 0.1]])
        >>> layer = new_layer(features, torch.tensor([0, 0, 1, 1]), classes=2)
        >>> layer(features.double()).argmax(dim=1).tolist()
        [0, 0, 1, 1]
    """
    x, y = features.detach().double().cpu(), labels.detach().long().cpu()
    present = torch.bincount(y, minlength=classes) > 0
    occurring = int(present.sum())
    if occurring < 2 or (occurring < classes and anchor is None):
        expected = "images of every class, or an old layer as anchor"
        raise BadOption("labels", f"{occurring} of {classes} classes", expected)
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0)
    deviation = deviation.masked_fill(deviation == 0, 1.0)
    z, weights = (x - mean) / deviation, class_weights(y, classes)
    new_weight, new_bias = z.new_zeros(classes, z.shape[1]), z.new_zeros(classes)
    if anchor is not None:  # in standardised features
        wide = anchor.weight.double()
        new_weight, new_bias = wide * deviation, anchor.bias.double() + wide @ mean
    # Classes without an image are one column that does not change: log-sum-exp of their old logits.
    absent = z @ new_weight[~present].T + new_bias[~present]
    rest = absent.logsumexp(dim=1, keepdim=True) if absent.shape[1] else absent  # [N, 1] or [N, 0]
    places = present.long().cumsum(0)[y] - 1
    old = new_weight[present]
    weight, bias = old.clone().requires_grad_(True), new_bias[present].requires_grad_(True)
    optimizer = torch.optim.LBFGS(  # the problem is convex: the start does not matter
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
    new_weight[present], new_bias[present] = weight.detach(), bias.detach()
    new_weight = new_weight / deviation
    return LastLayer(new_weight, new_bias - new_weight @ mean)


@dataclass(frozen=True, eq=False)
class Directions:
    """Directions in which features change between versions of an image, the strongest first."""

    vectors: Tensor  # [R, P] float64, orthonormal
    mean: Tensor  # [P] of all features

    def fold(self, layer: LastLayer, rank: int) -> LastLayer:
        """The layer that predicts as the old one does from features whose first `rank` directions
        are set to their mean."""
        weight, vectors = layer.weight.double(), self.vectors[:rank]
        lost = (weight @ vectors.T) @ vectors  # [C, P]
        return LastLayer(weight - lost, layer.bias.double() + lost @ self.mean)


def change_directions(features: Tensor, images: Tensor) -> Directions:
    """Singular vectors of how far each version is from the mean of its image's versions.

    Args:
        features: Of all versions, [M, P].
        images: Index of the image that each version belongs to, [M].
    """
    x = features.detach().double().cpu()
    which = images.cpu().unique(return_inverse=True)[1]
    counts = torch.bincount(which).double()
    if bool((counts < 2).all()):
        raise BadOption("images", "one version each", "at least two versions of an image")
    sums = x.new_zeros(len(counts), x.shape[1]).index_add(0, which, x)
    moved = x - (sums / counts[:, None])[which]
    vectors = torch.linalg.svd(moved, full_matrices=False).Vh
    return Directions(vectors, x.mean(dim=0))


def corrected_layer(
    old: LastLayer, plain: Tensor, moved: Tensor, images: Tensor, *, ridge: float
) -> LastLayer:
    """Correct a last layer by least squares, so that versions get the logits of their image.

    Args:
        old: The layer.
        plain: Features of plain images, [n, P].
        moved: Features of versions, [M, P].
        images: The image of each version, [M].
        ridge: The penalty, relative to the mean variance of a feature.

    Example:
        >>> import torch
        >>> old = LastLayer(torch.eye(2).double(), torch.zeros(2).double())
        >>> plain = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)).double()
        >>> moved = plain + torch.tensor([0.0, 3.0])  # the second feature has the mark
        >>> layer = corrected_layer(old, plain, moved, torch.arange(50), ridge=1e-3)
        >>> float(layer.weight[0, 0]) > 0.9 and float(layer.weight[1, 1]) < 0.5
        True
    """
    x = torch.cat([plain, moved]).double()
    share = torch.tensor([1 / len(plain), 1 / max(1, len(moved))], dtype=torch.float64)
    weights = share.repeat_interleave(torch.tensor([len(plain), len(moved)]))[:, None] / 2
    wanted = torch.cat([torch.zeros_like(plain), plain[images.cpu()] - moved]).double()
    mean, shift = (weights * x).sum(dim=0), (weights * wanted).sum(dim=0)
    centred, scaled = x - mean, (x - mean) * weights
    gram = centred.T @ scaled
    penalty = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    change = torch.linalg.solve(gram + penalty, scaled.T @ (wanted - shift)).T  # A
    weight = old.weight.double()
    bias = old.bias.double() + weight @ (shift - change @ mean)
    return LastLayer(weight + weight @ change, bias)


def balanced_layer(
    features: Tensor,
    labels: Tensor,
    groups: Tensor,
    *,
    classes: int,
    refits: int = REFITS,
    strengths: Sequence[float] = STRENGTHS,
    seed: int = 0,
) -> tuple[LastLayer, dict[float, float]]:
    """Fit a last layer by DFR.

    Args:
        features: What enters the layer, [N, P].
        labels: Class of each row, [N].
        groups: Group of each row: [N], or [N, k] for combinations of k codes.
        classes: Number of classes of the layer.
        refits: Group-balanced subsets whose layers are averaged.
        strengths: Values of C; one half of the data chooses.
        seed: Of halves and subsets.

    Returns:
        The layer, and the accuracy of the worst group for each C; the highest was chosen.
    """
    from sklearn.preprocessing import StandardScaler

    x, y = features.double().cpu().numpy(), labels.cpu().numpy()
    codes = torch.as_tensor(groups).cpu()
    if len(np.unique(y)) < classes:
        raise BadOption("labels", np.unique(y).tolist(), f"images of all {classes} classes")
    codes = codes[:, None] if codes.ndim == 1 else codes
    member = codes.unique(dim=0, return_inverse=True)[1].numpy()
    smallest = np.bincount(member).min()
    if smallest < 2:
        raise BadOption("groups", f"a group of {smallest}", "at least two images of every group")
    scaler = StandardScaler().fit(x)
    z: Any = scaler.transform(x)
    draw = np.random.default_rng(seed)
    halves = [np.array_split(rows, [len(rows) // 2]) for rows in _shuffled(member, draw)]
    first, second = (np.concatenate(half) for half in zip(*halves, strict=True))
    tried = {}
    for strength in strengths:
        rows = first[_balanced(member[first], draw)]
        weight, bias = _l1_logistic(z[rows], y[rows], strength, classes)
        right = (z[second] @ weight.T + bias).argmax(axis=1) == y[second]
        of = torch.from_numpy(member[second])
        tried[strength] = group_accuracy(torch.from_numpy(right), of).worst
    best = max(tried, key=tried.__getitem__)
    drawn = [_balanced(member, draw) for _ in range(refits)]
    fitted = [_l1_logistic(z[rows], y[rows], best, classes) for rows in drawn]
    weight, bias = (np.mean(part, axis=0) for part in zip(*fitted, strict=True))
    weight = weight / scaler.scale_
    bias = bias - weight @ scaler.mean_
    return LastLayer(torch.from_numpy(weight), torch.from_numpy(bias)), tried


def _l1_logistic(
    x: np.ndarray, y: np.ndarray, strength: float, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """L1 logistic regression: weight [C, P] and bias [C]."""
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(y)) < classes:
        halved = "a group-balanced half that lacks a class"
        raise BadOption("groups", halved, "groups within classes, or more images of each")
    options: dict[str, Any] = {"C": strength, "l1_ratio": 1.0, "random_state": 0}
    if classes == 2:
        model = LogisticRegression(solver="liblinear", max_iter=1000, **options).fit(x, y)
        half = np.array([-0.5, 0.5])
        return half[:, None] * model.coef_, half * model.intercept_
    options |= {"solver": "saga", "max_iter": 2000, "tol": 1e-3}
    model = LogisticRegression(**options).fit(x, y)
    return model.coef_, model.intercept_


def _balanced(member: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Rows of a random subset with as many of each group as the smallest group has."""
    size = np.bincount(member).min()
    return np.concatenate([rows[:size] for rows in _shuffled(member, draw)])


def _shuffled(member: np.ndarray, draw: np.random.Generator) -> list[np.ndarray]:
    """Rows of each group, in random order."""
    return [draw.permutation(np.flatnonzero(member == group)) for group in range(member.max() + 1)]


def random_crops(images: Tensor, chances: Tensor) -> Tensor:
    """Crops of images [n, 3, H, W], enlarged to their size. `chances` [4, n] in [0, 1] decide how
    large each is, where it is (across, down), and whether it is mirrored."""
    whole = wide(images)  # a grid in half precision misses pixels
    area, *places, mirrored = chances.to(whole)
    side = (LEAST + (1 - LEAST) * area).sqrt()
    zero, turned = torch.zeros_like(side), torch.where(mirrored < 0.5, -side, side)
    across, down = ((2 * place - 1) * (1 - side) for place in places)
    rows = torch.stack([turned, zero, across, zero, side, down], dim=1)
    grid = F.affine_grid(rows.unflatten(1, (2, 3)), list(images.shape), align_corners=False)
    return F.grid_sample(whole, grid, padding_mode="border", align_corners=False).to(images)


def fine_tune(
    model: VisionModel,
    versions: Versions,
    score: Callable[[VisionModel], float],
    *,
    targets: Tensor | None = None,
    passes: int = 1,
    epochs: int = 5,
    rate: float = 5e-5,
    batch: int = 64,
    seed: int = 0,
    checkpoint: Path | None = None,
    progress: Advance = no_advance,
) -> tuple[VisionModel, list[float]]:
    """Train a copy of the model on versions.

    Args:
        model: The model to start from; it is not changed.
        versions: What to learn from.
        score: Judges the model after each epoch; higher is better.
        targets: Probabilities [M, C] that versions should get. None: their labels, with balanced
            classes.
        passes: Passes over all versions in an epoch.
        epochs: At most so many.
        rate: The highest learning rate.
        batch: Versions per step.
        seed: Of the order of versions, of crops and of mirroring.
        checkpoint: A file from which a killed training continues.
        progress: Is called with the number of versions of each finished step.

    Returns:
        The model of the best epoch, and the score of every epoch.
    """
    view = rewrap(model, copy.deepcopy(model.module), check=False)
    module = nn.ModuleList([view.module] if view.extra is None else [view.module, view.extra])
    module.requires_grad_(True)
    device, processes = view.device, joined_processes(view.device)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=DECAY, fused=on_gpu)
    if targets is None:
        goals = versions.labels.to(device)
        weights = class_weights(goals.cpu(), view.n_classes).to(device)
    else:
        goals = targets.to(device, wide_dtype(view.dtype))
        weights = torch.ones(len(goals), device=device)
    curve, best = list[float](), dict[str, Tensor]()

    def train_epoch(epoch: int) -> None:
        """Each version once for each pass, in an order drawn from (seed, epoch)."""
        draw = torch.Generator().manual_seed(1000 * seed + epoch)
        orders = [torch.randperm(len(versions), generator=draw) for _ in range(passes)]
        order = torch.cat(orders).split(batch)
        for number, rows in enumerate(order):
            done = (epoch + number / len(order)) / epochs
            for group in optimizer.param_groups:  # a short warm-up, then linearly to 0
                group["lr"] = rate * min(1.0, 20 * done + 0.05) * (1 - done)
            chances = torch.rand(4, len(rows), generator=draw, dtype=torch.float32)
            if targets is not None:  # probabilities are those of whole versions
                chances[0] = 1
            mine = torch.arange(processes.rank, len(rows), processes.world)
            share = weights[rows[mine].to(device)] / len(rows)
            if len(mine) == 0:  # a small last batch: this process adds a gradient of 0
                mine, share = mine.new_zeros(1), weights.new_zeros(1)
            images = versions[rows[mine].to(versions.source.device)]
            images = random_crops(images.to(device), chances[:, mine])
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
                logits = wide(view.native(images))
            nll = F.cross_entropy(logits, goals[rows[mine].to(device)], reduction="none")
            optimizer.zero_grad()
            (share.to(nll) * nll).sum().backward()
            processes.add_gradients(module.parameters())
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            progress(len(rows))
        if not all(bool(value.isfinite().all()) for value in module.parameters()):
            raise BadInput("fine-tuning", "weights are not finite any more", "give a lower rate")

    content = None
    if checkpoint is not None and checkpoint.is_file():
        content = checkpoint.read_bytes()
    if (content := processes.from_first(content)) is not None:
        state = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        curve, best = state["curve"], state["best"]
        progress(len(curve) * passes * len(versions))
    while len(curve) < epochs:
        if curve and len(curve) - 1 - curve.index(max(curve)) >= PATIENCE:
            break
        train_epoch(len(curve))
        curve.append(processes.from_first(score(view)))
        if curve.index(max(curve)) == len(curve) - 1:
            best = {name: value.detach().clone() for name, value in module.state_dict().items()}
        if checkpoint is not None and processes.first:
            state = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
            buffer = io.BytesIO()
            torch.save({**state, "curve": curve, "best": best}, buffer)
            write_atomic(checkpoint, buffer.getvalue())
    module.load_state_dict(best)
    module.requires_grad_(False)
    return rewrap(model, view.module, head=view.extra), curve
