"""A score for every head: the ways to choose heads, what they return, and what they share. A new
way is a decorated function in a file that `_FILES` names:

    @selector("name", cost="1 forward", needs="labels")
    def name(model, images, labels, *, option=default) -> HeadScores: ...

It gets normalised images [N, 3, H, W] and class indices [N] on the model's device. Higher scores
mean more worth removing.

A score may be fooled: a head whose removal makes all answers alike gets the highest CIGMA score
there is. Each rule takes scores and returns scores.

    penalised    score - alpha max(0, mean(FIG - FIG^(-h)))
    protected    heads whose removal costs more than a share of FIG, or more than some accuracy,
                 must stay (-inf)
    above_noise  scores within the noise floor of the measurement are 0: the error of JS has one
                 sign and does not average out
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.chunks import run_in_chunks
from seecause.errors import BadImage, BadOption, NotDefined, UnknownName
from seecause.metrics.statistics import standard_error
from seecause.models.base import ImageModel
from seecause.models.block import is_silent
from seecause.models.view import VisionModel
from seecause.options import check_options, keyword_options, summary_of

Head = tuple[int, int]  # (layer, head), both from 0
Remove = Literal["most", "least"]
Guard = Literal["penalty", "protect", "none"]


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores:
    """Higher means more worth removing. A head that a block does not have, or that was not scored,
    is NaN; one that must stay is -inf."""

    value: Tensor  # [L, H] float64, on the CPU
    error: Tensor | None = None  # [L, H], standard error of the mean over images
    after: dict[str, Tensor] = field(default_factory=dict)  # [L, H] each: accuracy ... without it
    before: dict[str, float] = field(default_factory=dict)  # the same of the whole model
    protocol: dict[str, Any] = field(default_factory=dict)
    total: int | None = None  # heads of the model, scored or not; None: as many as have a score
    effects: Tensor | None = None  # [B, L, H], of each image; `value` is their mean
    fig_drops: Tensor | None = None  # [B, L, H], what FIG of each image loses, if it was measured

    def __repr__(self) -> str:
        scored = int((~self.value.isnan()).sum())
        best = [f"{head} {float(self.value[head]):.3g}" for head in self.order()[:3]]
        return f"HeadScores({scored} heads, highest: {', '.join(best) or 'none above 0'})"

    def order(self, *, positive: bool = True) -> list[Head]:
        """Heads from the highest score down; with `positive`, only those above zero."""
        flat = self.value.flatten().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        least = 0 if positive else -torch.inf
        order = flat.argsort(descending=True, stable=True).tolist()
        return [divmod(place, self.value.shape[1]) for place in order if flat[place] > least]

    def top(self, k: int | float, *, positive: bool = True) -> list[Head]:
        """The `k` highest heads: a count, or a share of all heads of the model between 0 and 1.
        Fewer, when fewer were scored or are above zero."""
        total = int((~self.value.isnan()).sum()) if self.total is None else self.total
        return self.order(positive=positive)[: head_count(k, total)]


def penalised(scores: HeadScores, *, alpha: float = 1.0) -> HeadScores:
    """Subtract what the foreground loses.

    Errors and effects become those of the penalised score where scores know what each image
    loses; else errors of penalised heads are NaN, since they are not known.
    """
    drop = _fig_drop(scores)
    cost, protocol = drop.clamp_min(0), {**scores.protocol, "penalty": alpha}
    value, error, effects = scores.value - alpha * cost, scores.error, None
    if scores.effects is not None and scores.fig_drops is not None:
        # the mean decides whether a head pays
        effects = scores.effects - alpha * (drop > 0) * scores.fig_drops
        error = standard_error(effects)
    elif error is not None:
        error = torch.where(cost > 0, torch.nan, error)
    return replace(scores, value=value, error=error, effects=effects, protocol=protocol)


def protected(scores: HeadScores, *, fig: float = 0.05, accuracy: float = 0.01) -> HeadScores:
    """Keep heads without which FIG falls by more than a share `fig` of itself, or accuracy by more
    than `accuracy`."""
    harmed = _fig_drop(scores) > fig * scores.before["fig"]
    harmed |= scores.before["accuracy"] - scores.after["accuracy"] > accuracy
    value = torch.where(harmed & ~scores.value.isnan(), -torch.inf, scores.value)
    return replace(
        scores,
        value=value,
        protocol={**scores.protocol, "protected": {"fig": fig, "accuracy": accuracy}},
    )


def above_noise(scores: HeadScores, floor: float) -> HeadScores:
    """Scores whose size is below `floor` (`Gains.noise_floor`) become 0."""
    value = torch.where(scores.value.abs() < floor, 0.0, scores.value)
    return replace(scores, value=value, protocol={**scores.protocol, "noise_floor": floor})


GUARDS: Mapping[str, Callable[[HeadScores], HeadScores]] = {
    "penalty": penalised,
    "protect": protected,
    "none": lambda scores: scores,
}


def _fig_drop(scores: HeadScores) -> Tensor:
    if "fig_drop" not in scores.after:
        raise NotDefined(
            "the guard", "FIG without each head was not measured", "Score with masks and guard=True"
        )
    return scores.after["fig_drop"]


@dataclass(frozen=True)
class Selector:
    """One entry of the registry."""

    name: str
    run: Callable[..., HeadScores]
    cost: str  # of one image
    needs: str
    summary: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options and their defaults."""
        return keyword_options(self.run, leave_out=("progress",))

    @property
    def tells_progress(self) -> bool:
        return "progress" in keyword_options(self.run)


_SELECTORS: dict[str, Selector] = {}
_FILES = ("cigma", "_interchange", "other_selectors", "gating")


def selector(
    name: str, *, cost: str, needs: str
) -> Callable[[Callable[..., HeadScores]], Callable[..., HeadScores]]:
    """Register a function under `name`."""

    def register(run: Callable[..., HeadScores]) -> Callable[..., HeadScores]:
        _SELECTORS[name] = Selector(name, run, cost, needs, summary_of(run))
        return run

    return register


def selectors() -> dict[str, Selector]:
    """All ways to choose heads, by name."""
    for file in _FILES:
        importlib.import_module(f"seecause.background.{file}")
    return dict(_SELECTORS)


def find_selector(name: str) -> Selector:
    """The one of that name; files are imported until one of them has it."""
    for file in _FILES:
        if name not in _SELECTORS:
            importlib.import_module(f"seecause.background.{file}")
    if name not in _SELECTORS:
        raise UnknownName("head selector", name, _SELECTORS)
    return _SELECTORS[name]


def select(
    by: str, model: ImageModel, images: Tensor, labels: Tensor, **options: Any
) -> HeadScores:
    """Scores of all heads by a selector; `scores.top(k)` gives those to remove first.

    `by` is its name, `options` its own (`sc.background.selectors()` lists both; CIGMA takes `masks`).
    `images` [N, 3, H, W] are normalised, `labels` [N] their classes.
    """
    chosen = find_selector(by)
    check_options(by, chosen.run, options)
    view = need_heads(model, f"choosing heads by {by}")
    with view.eval_mode(frozen=True):
        images = images.to(view.device, view.dtype)
        view.check(images)
        scores = chosen.run(view, images, checked_labels(view, images, labels), **options)
    return replace(scores, protocol={**scores.protocol, "selector": by})


def checked_labels(model: ImageModel, images: Tensor, labels: Tensor) -> Tensor:
    """Class indices [N] on the model's device, one for each image."""
    labels = torch.as_tensor(labels)
    if labels.shape != images.shape[:1] or labels.dtype.is_floating_point:
        raise BadImage(
            f"labels of shape {list(labels.shape)}",
            f"expected a class index for each of the {len(images)} images",
            "give whole numbers [N]",
        )
    if not bool(((labels >= 0) & (labels < model.n_classes)).all()):
        raise BadOption(
            "labels",
            f"{int(labels.min())} to {int(labels.max())}",
            f"class indices 0-{model.n_classes - 1}",
        )
    return labels.long().to(images.device)


def head_count(k: int | float, total: int) -> int:
    """`k` of `total` heads: a count, or a share between 0.0 and 1.0."""
    count = round(k * total) if isinstance(k, float) and 0 <= k <= 1 else k
    if isinstance(count, float) or not 0 <= count <= total:
        raise BadOption("k", k, f"a count up to {total}, or a share between 0.0 and 1.0")
    return count


def need_heads(model: ImageModel, what: str) -> VisionModel:
    """The model, or a refusal where it is not read by its heads."""
    if not isinstance(model, VisionModel):
        raise NotDefined(
            what,
            f"{model.family} is read by its stages, not by heads",
            "Use a vision transformer; sc.attribute maps this one (caap, mosaic, grad-cam ...)",
        )
    return model


def all_heads(model: VisionModel) -> list[Head]:
    """Every head there is; a block that lost all of its own has none."""
    heads = []
    for layer, block in enumerate(model.blocks):
        if not is_silent(block):
            heads += [(layer, head) for head in range(block.heads)]
    return heads


def gates_without(model: VisionModel, heads: Iterable[Head]) -> Tensor:
    """Ones [L, H], zero at `heads`."""
    removed = checked_heads(model, heads)
    gates = torch.ones(model.n_layers, model.n_heads)
    for head in removed:
        gates[head] = 0
    return gates


@contextmanager
def ablate(model: VisionModel, heads: Iterable[Head]) -> Iterator[VisionModel]:
    """Inside the block, `model` answers without `heads`, pairs (layer, head) from 0: in
    `model(images)` and in every method."""
    gates = gates_without(model, heads)
    with model.gated(gates):
        yield model


def checked_heads(model: ImageModel, heads: Iterable[Head]) -> list[Head]:
    """`heads` in order and without repeats, or which of them the model does not have."""
    view, unique = need_heads(model, "head ablation"), set[Head]()
    for pair in heads:
        if not (
            isinstance(pair, tuple | list)
            and len(pair) == 2
            and all(isinstance(part, SupportsIndex) for part in pair)
        ):
            raise BadOption("heads", pair, "pairs (layer, head) of whole numbers from 0")
        layer, head = (operator.index(part) for part in pair)
        if not 0 <= layer < view.n_layers:
            raise BadOption("heads", (layer, head), f"layers 0-{view.n_layers - 1}")
        count = view.blocks[layer].heads
        if not 0 <= head < count:
            raise BadOption("heads", (layer, head), f"heads 0-{count - 1} in layer {layer}")
        unique.add((layer, head))
    return sorted(unique)


def absent(model: VisionModel) -> Tensor:
    """[L, H], true where a block has no such head."""
    need_heads(model, "choosing heads")
    exists = torch.zeros(model.n_layers, model.n_heads, dtype=torch.bool)
    for head in all_heads(model):
        exists[head] = True
    return ~exists


def padded(model: VisionModel, blocks: list[Tensor]) -> Tensor:
    """One tensor [..., H_l] for each block -> [..., L, H]."""
    return torch.stack(
        [F.pad(values, (0, model.n_heads - values.shape[-1])) for values in blocks], dim=-2
    )


def over_images(
    run: Callable[[int, int], Tensor], model: VisionModel, images: Tensor, *, holds: int
) -> Tensor:
    """`run(start, stop)` over as many images at once as fit, when a run holds `holds` times what a
    plain forward does."""
    each = model.forward_bytes(model.check(images)) * holds
    return run_in_chunks(run, len(images), each, images.device, what="images")


def mean_scores(
    model: VisionModel, per_image: Tensor, *, remove: Remove | None = None
) -> HeadScores:
    """Means over images of per_image [N, L, H], with their standard errors. `remove="least"` turns
    them round: the largest gets 0."""
    values, missing = per_image.detach().double().cpu(), absent(model)
    mean, error = values.mean(dim=0), standard_error(values)
    mean = mean[~missing].max() - mean if remove == "least" else mean
    return HeadScores(
        mean.masked_fill(missing, torch.nan),
        error.masked_fill(missing, torch.nan),
        protocol=({} if remove is None else {"remove": remove}) | {"images": len(values)},
    )


@selector("random", cost="none", needs="nothing")
def random_heads(
    model: VisionModel, images: Tensor, labels: Tensor, *, seed: int = 0
) -> HeadScores:
    """Every order of heads is as likely as any other: the control for all others."""
    missing, generator = absent(model), torch.Generator().manual_seed(seed)
    value = torch.rand(missing.shape, generator=generator, dtype=torch.float64) + 1e-9
    return HeadScores(value.masked_fill(missing, torch.nan), protocol={"seed": seed})


def random_sets(
    model: VisionModel, k: int | float, *, draws: int = 20, seed: int = 0
) -> list[list[Head]]:
    """`draws` independent sets of `k` heads (a count, or a share of all)."""
    if draws < 1:
        raise BadOption("draws", draws, "a count above 0")
    nothing = torch.empty(0)
    return [
        sorted(random_heads(model, nothing, nothing, seed=seed * 1_000_003 + draw).top(k))
        for draw in range(draws)
    ]
