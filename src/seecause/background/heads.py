"""A score for every head: the registry of selectors, what they return, and guards on scores.

A selector is a decorated function here, in `scoring`, in `gating`, or of a plug-in (entry points
`seecause.selectors`):

    @selector("name", cost="1 forward", needs="labels")
    def name(model, data, *, option=default) -> HeadScores: ...

`data` is a `LabelledImages` on the model's device with labels (where the data has none, the model's
predictions). A higher score means more worth removing.

Here are the short selectors, which CIGMA is compared with (section 1.9); the others are in
`scoring` and `gating`.

    random          every order of heads is as likely: the control for all others
    weight-norm     |W_O[:, S_h]|_F: how much a head can write, whatever it writes
    taylor          |g_h dL/dg_h| at g = 1, the first-order change of the loss without the head
                    (Michel et al. 2019; the head term of MDP, 2504.02168). Pruning removes what
                    matters least, so `remove="least"` is the default; `"most"` is the control
    attention-mass  how much of a head's attention, in the rows that are read out, falls on
                    background patches

A score can mislead: a head whose removal makes all predictions alike gets the highest CIGMA score.
Guards take scores and return scores:

    penalised    score - alpha max(0, mean(FIG - FIG^(-h)))
    protected    heads whose removal costs more than a share of FIG, or more than some accuracy,
                 must stay (-inf)
    above_noise  scores within the noise floor of the measurement are 0: the error of JS has one
                 sign and does not average out
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.background.images import LabelledImages, as_labelled, logits_of
from seecause.engine.chunks import run_in_chunks
from seecause.engine.forks import gated_logits
from seecause.engine.mixture import need_gradients
from seecause.engine.trace import attention_probs, read_rows
from seecause.errors import BadOption, NotDefined
from seecause.metrics.statistics import standard_error
from seecause.models.base import ImageModel
from seecause.models.block import Block
from seecause.models.view import VisionModel
from seecause.options import Count, check_options, keyword_options, summary_of
from seecause.registry import Registry

Head = tuple[int, int]  # (layer, head), both from 0
Remove = Literal["most", "least"]
Guard = Literal["penalty", "protect", "none"]


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores:
    """A score for each head; higher means more worth removing. A head that a block does not have,
    or that was not scored, is NaN; one that must stay is -inf."""

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
    """Subtract what the object loses without each head.

    Errors and effects become those of the penalised score where scores know what each image loses;
    otherwise errors of penalised heads are NaN, since they are not known.
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
    about = {**scores.protocol, "protected": {"fig": fig, "accuracy": accuracy}}
    return replace(scores, value=value, protocol=about)


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
        reason = "FIG without each head was not measured"
        raise NotDefined("the guard", reason, "Score with masks and guard=True")
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
    def takes_progress(self) -> bool:
        return "progress" in keyword_options(self.run)


_SCORING = ("cigma", "greedy", "interchange", "loss-gain")
_HOMES = {name: "seecause.background.scoring" for name in _SCORING}
_HOMES |= {name: "seecause.background.gating" for name in ("gating", "contrastive-gating")}
SELECTORS: Registry[Selector] = Registry("head selector", group="seecause.selectors", homes=_HOMES)


def selector(
    name: str, *, cost: str, needs: str
) -> Callable[[Callable[..., HeadScores]], Callable[..., HeadScores]]:
    """Register a function under `name`."""

    def register(run: Callable[..., HeadScores]) -> Callable[..., HeadScores]:
        SELECTORS.add(name, Selector(name, run, cost, needs, summary_of(run)))
        return run

    return register


def selectors() -> dict[str, Selector]:
    """All ways to choose heads, by name.

    Example:
        >>> sorted(selectors())[:3]
        ['attention-mass', 'cigma', 'contrastive-gating']
    """
    return SELECTORS.all()


def select(by: str, model: ImageModel, data: LabelledImages, **options: Any) -> HeadScores:
    """Score all heads by a selector; `scores.top(k)` are those to remove first.

    Args:
        by: A name of `selectors()`.
        model: A vision transformer.
        data: Images, with labels, masks or other versions as the selector needs them.
        **options: Options of the selector.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=4)
        >>> data = sc.background.read_images(model, data)
        >>> select("taylor", model, data).top(2)[0]
        (5, 3)
    """
    chosen = SELECTORS.get(by)
    check_options(by, chosen.run, options)
    view = need_heads(model, f"choosing heads by {by}")
    with view.eval_mode(frozen=True):
        data = as_labelled(view, data)
        view.check(data.images)
        if data.labels is None:
            if "labels" in chosen.needs:
                raise BadOption("data", data.name, f"data with labels: {by} needs them")
            data = replace(data, labels=logits_of(view, data.images).argmax(dim=1))
        scores = chosen.run(view, data, **options)
    return replace(scores, protocol={**scores.protocol, "selector": by})


def head_count(k: int | float, total: int) -> int:
    """`k` of `total` heads: a count, or a share between 0.0 and 1.0."""
    count = round(k * total) if isinstance(k, float) and 0 <= k <= 1 else k
    if isinstance(count, float) or not 0 <= count <= total:
        raise BadOption("k", k, f"a count up to {total}, or a share between 0.0 and 1.0")
    return count


def need_heads(model: ImageModel, what: str) -> VisionModel:
    """The model, if it is a vision transformer; other models are refused."""
    if not isinstance(model, VisionModel):
        raise NotDefined(
            what,
            f"{model.family} is read by its stages, not by heads",
            "Use a vision transformer; sc.attribute maps this one (caap, mosaic, grad-cam ...)",
        )
    return model


def all_heads(model: VisionModel) -> list[Head]:
    """Every head of the model."""
    return [
        (layer, head) for layer, block in enumerate(model.blocks) for head in range(block.heads)
    ]


def gates_without(model: VisionModel, heads: Iterable[Head]) -> Tensor:
    """Ones [L, H], zero at `heads`."""
    removed = checked_heads(model, heads)
    gates = torch.ones(model.n_layers, model.n_heads)
    for head in removed:
        gates[head] = 0
    return gates


@contextmanager
def ablate(model: VisionModel, heads: Iterable[Head]) -> Iterator[VisionModel]:
    """Inside the block, `model` runs without `heads`, pairs (layer, head) from 0: in
    `model(images)` and in every method.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> with sc.background.ablate(model, [(2, 1)]):
        ...     logits = model(model.zeros((96, 96)))
    """
    gates = gates_without(model, heads)
    with model.gated(gates):
        yield model


def checked_heads(model: ImageModel, heads: Iterable[Head]) -> list[Head]:
    """`heads` in order and without repeats; heads that the model does not have are refused."""
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
    """Means over images of per_image [N, L, H], with their standard errors. `remove="least"`
    reverses them: the largest gets 0."""
    values, missing = per_image.detach().double().cpu(), absent(model)
    mean, error = values.mean(dim=0), standard_error(values)
    mean = mean[~missing].max() - mean if remove == "least" else mean
    return HeadScores(
        mean.masked_fill(missing, torch.nan),
        error.masked_fill(missing, torch.nan),
        protocol=({} if remove is None else {"remove": remove}) | {"images": len(values)},
    )


@selector("random", cost="none", needs="nothing")
def random_heads(model: VisionModel, data: LabelledImages, *, seed: int = 0) -> HeadScores:
    """Every order of heads is as likely as any other: the control for all others."""
    missing, generator = absent(model), torch.Generator().manual_seed(seed)
    value = torch.rand(missing.shape, generator=generator, dtype=torch.float64) + 1e-9
    return HeadScores(value.masked_fill(missing, torch.nan), protocol={"seed": seed})


def random_sets(
    model: VisionModel, k: int | float, *, draws: Count = 20, seed: int = 0
) -> list[list[Head]]:
    """`draws` independent sets of `k` heads (a count, or a share of all)."""
    check_options("random_sets", random_sets, {"draws": draws, "seed": seed})
    none = LabelledImages(torch.empty(0, 3, 1, 1))
    return [
        sorted(random_heads(model, none, seed=seed * 1_000_003 + draw).top(k))
        for draw in range(draws)
    ]


@selector("weight-norm", cost="none", needs="nothing")
@torch.no_grad()
def weight_norm(model: VisionModel, data: LabelledImages, *, remove: Remove = "most") -> HeadScores:
    """Frobenius norm of each head's columns of the output projection."""
    norms = [_output_weights(block, model).flatten(1).norm(dim=1) for block in model.blocks]
    return mean_scores(model, padded(model, norms)[None], remove=remove)


def _output_weights(block: Block, model: VisionModel) -> Tensor:
    """W_O' head by head, [H, dh, D], read through the block, so that it is right for every
    library."""
    width = block.heads * block.head_dim
    rows = torch.cat([torch.zeros(1, width), torch.eye(width)]).to(model.device, model.dtype)[None]
    mixed = block.mix(rows)[0]  # a bias is in every row
    return (mixed[1:] - mixed[:1]).unflatten(0, (block.heads, block.head_dim))


@selector("taylor", cost="1 forward, 1 backward", needs="labels")
def taylor(model: VisionModel, data: LabelledImages, *, remove: Remove = "least") -> HeadScores:
    """First-order change of the loss without each head; the least important go first."""
    labels = data.need_labels()

    def run_chunk(start: int, stop: int) -> Tensor:
        return gate_gradients(model, data.images[start:stop], labels[start:stop]).abs()

    per_image = over_images(run_chunk, model, data.images, holds=2 * model.n_layers)
    return mean_scores(model, per_image, remove=remove)


def gate_gradients(model: VisionModel, images: Tensor, labels: Tensor) -> Tensor:
    """dNLL / dg at g = 1, image by image: [B, L, H]."""
    need_gradients(model, "a gradient of gates", remedy="Measure every head: sc.background.score")
    gates = images.new_ones(len(images), model.n_layers, model.n_heads, requires_grad=True)
    with torch.enable_grad():
        loss = F.cross_entropy(gated_logits(model, images, gates), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, gates)
    return gradient


@selector("attention-mass", cost="1 forward", needs="masks")
@torch.no_grad()
def attention_mass(model: VisionModel, data: LabelledImages) -> HeadScores:
    """Share of attention on the background. Pixels of which nothing is known do not count."""
    if data.masks is None:
        raise BadOption("masks", None, "object masks: data.with_masks(object_masks(...))")
    layout = model.check(data.images)
    background = ~data.masks.hard
    if data.masks.inside is not None:
        background &= data.masks.inside
    pixels = background.to(data.images.device, data.images.dtype)
    share = F.adaptive_avg_pool2d(pixels[:, None], layout.grid).flatten(1)  # [N, patches]

    def run_chunk(start: int, stop: int) -> Tensor:
        masses = []
        every = attention_probs(model, data.images[start:stop])  # [B, H, T, T] each
        for _, probs in zip(model.blocks, every, strict=False):
            row = read_rows(model, layout, probs)  # [B, H, T]
            masses.append((row[..., layout.patches] * share[start:stop, None]).sum(dim=-1))
        return padded(model, masses)

    per_image = over_images(run_chunk, model, data.images, holds=2 + layout.tokens // 64)
    return mean_scores(model, per_image)
