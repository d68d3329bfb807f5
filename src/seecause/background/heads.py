"""A score for every head: the registry of selectors, what they return, and the short selectors.

A selector is a decorated function here, in `scoring`, or in another package (entry points
`seecause.selectors`):

    @selector("name", cost="1 forward", needs="labels")
    def name(model, data, *, option=default) -> HeadScores: ...

`data` is a `LabelledImages` on the model's device with labels (where the data has none, the model's
predictions). A higher score means more worth removing. These are compared with CIGMA:

    random          every order of heads is equally likely: the control for all others
    weight-norm     |W_O[:, S_h]|_F: how much a head can write, whatever it writes
    taylor          -|g_h dL/dg_h| at g = 1, the first-order change of the loss without the head
                    (Michel et al. 2019; the head term of MDP, 2504.02168), plus a constant: pruning
                    removes the heads that matter least
    attention-mass  how much of a head's attention, in the rows that are read out, falls on
                    background patches
    gating          Causal Head Gating (Nam et al. 2025, 2505.13737)

Causal Head Gating fits soft gates of all heads at once, under opposite pressures:

    G = sigmoid(theta),   loss = NLL(G) - strength * mean(clip(theta, -4, 4))

There are three fits: strength 0 from uniform gates, then +strength (G+, gates are pushed up) and
-strength (G-, pushed down), both from the first and on the same batches.

    facilitating   stays open under either pressure         soft: G-
    irrelevant     follows the pressure                     soft: G+ (1 - G-)
    interfering    shut even when pushed open               soft: 1 - G+

"Open" is a mean over fits above 0.5. As scores, only heads called interfering are above 0: 1 - G+
for them, -G+ for all others. Written from the equations. It learns from labels: on biased data a
head that reads the background *facilitates*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.background.images import LabelledImages, images_of, logits_of
from seecause.engine.chunks import run_in_chunks
from seecause.engine.forks import gated_logits
from seecause.engine.trace import attention_probs, need_gradients, read_rows
from seecause.errors import BadOption, NotDefined
from seecause.metrics.statistics import standard_error
from seecause.models.base import ImageModel
from seecause.models.block import wide, wide_dtype
from seecause.models.view import VisionModel
from seecause.options import Count, Positive, check_options, keyword_options, summary_of
from seecause.registry import Registry

Head = tuple[int, int]  # (layer, head), both from 0
OPEN = 0.5  # a gate above this is open
CLIP = 4.0  # of logits of gates
NORM = 1.0  # of the gradient of each set of gates


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores:
    """A score for each head; higher means more worth removing. A head that a block does not have,
    or that was not scored, is NaN."""

    value: Tensor  # [L, H] float64, on the CPU
    error: Tensor | None = None  # [L, H], standard error of the mean over images
    after: dict[str, Tensor] = field(default_factory=dict)  # [L, H] each: accuracy ... without it
    before: dict[str, float] = field(default_factory=dict)  # the same of the whole model
    protocol: dict[str, Any] = field(default_factory=dict)
    effects: Tensor | None = None  # [B, L, H], of each image; `value` is their mean
    fig_drops: Tensor | None = None  # [B, L, H], what FIG of each image loses, if it was measured
    data: LabelledImages | None = None  # the images, where `score_heads` chose them

    def __repr__(self) -> str:
        scored = int((~self.value.isnan()).sum())
        best = [f"{head} {float(self.value[head]):.3g}" for head in self.order()[:3]]
        return f"HeadScores({scored} heads, highest: {', '.join(best) or 'none above 0'})"

    def order(self, *, positive: bool = True) -> list[Head]:
        """Heads from the highest score down; with `positive`, only those above zero."""
        flat = self.value.flatten().nan_to_num(nan=-torch.inf)
        least = 0 if positive else -torch.inf
        order = flat.argsort(descending=True, stable=True).tolist()
        return [divmod(place, self.value.shape[1]) for place in order if flat[place] > least]

    def top(self, k: int, *, positive: bool = True) -> list[Head]:
        """The `k` highest heads; fewer when fewer were scored or are above zero."""
        return self.order(positive=positive)[:k]


def penalised(scores: HeadScores) -> HeadScores:
    """Subtract from each score what the object loses without the head:
    score - max(0, mean(FIG - FIG^(-h))). Without this guard, a head whose removal makes all
    predictions alike gets the highest CIGMA score."""
    if scores.effects is None or scores.fig_drops is None:
        reason = "FIG without each head was not measured"
        raise NotDefined("the guard", reason, "Score with masks and guard=True")
    drop = scores.after["fig_drop"]
    # the mean decides whether a head pays: image by image, the penalty would have another mean
    effects = scores.effects - (drop > 0) * scores.fig_drops
    value, error = scores.value - drop.clamp_min(0), standard_error(effects)
    return replace(scores, value=value, error=error, effects=effects)


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


_HOMES = {name: "seecause.background.scoring" for name in ("cigma", "interchange", "loss-gain")}
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
        ['attention-mass', 'cigma', 'gating']
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
        data = images_of(view, data)
        view.check(data.images)
        if data.labels is None:
            if "labels" in chosen.needs:
                raise BadOption("data", data.name, f"data with labels: {by} needs them")
            data = replace(data, labels=logits_of(view, data.images).argmax(dim=1))
        scores = chosen.run(view, data, **options)
    return replace(scores, protocol={**scores.protocol, "selector": by})


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
    view, chosen = need_heads(model, "head ablation"), set[Head]()
    known = set(all_heads(view))
    for head in heads:
        if not isinstance(head, tuple | list) or tuple(head) not in known:
            expected = f"layers 0-{view.n_layers - 1}, heads 0-{view.n_heads - 1}"
            raise BadOption("heads", head, f"pairs (layer, head): {expected}")
        chosen.add((int(head[0]), int(head[1])))
    return sorted(chosen)


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


def mean_scores(model: VisionModel, per_image: Tensor) -> HeadScores:
    """Means over images of per_image [N, L, H], with their standard errors."""
    values, missing = per_image.detach().double().cpu(), absent(model)
    return HeadScores(
        values.mean(dim=0).masked_fill(missing, torch.nan),
        standard_error(values).masked_fill(missing, torch.nan),
        protocol={"images": len(values)},
    )


@selector("random", cost="none", needs="nothing")
def random_heads(model: VisionModel, data: LabelledImages, *, seed: int = 0) -> HeadScores:
    """Every order of heads is as likely as any other: the control for all others."""
    missing, generator = absent(model), torch.Generator().manual_seed(seed)
    value = torch.rand(missing.shape, generator=generator, dtype=torch.float64) + 1e-9
    return HeadScores(value.masked_fill(missing, torch.nan), protocol={"seed": seed})


def random_sets(model: VisionModel, k: int, *, draws: int = 20, seed: int = 0) -> list[list[Head]]:
    """`draws` independent sets of `k` heads."""
    none = LabelledImages(torch.empty(0, 3, 1, 1))
    return [
        sorted(random_heads(model, none, seed=seed * 1_000_003 + draw).top(k))
        for draw in range(draws)
    ]


@selector("weight-norm", cost="none", needs="nothing")
@torch.no_grad()
def weight_norm(model: VisionModel, data: LabelledImages) -> HeadScores:
    """Frobenius norm of each head's columns of the output projection."""
    norms = []
    for block in model.blocks:  # read through the block, so that it is right for every library
        width = block.heads * block.head_dim
        rows = torch.cat([torch.zeros(1, width), torch.eye(width)])[None]
        mixed = block.mix(rows.to(model.device, model.dtype))[0]  # a bias is in every row
        norms.append((mixed[1:] - mixed[:1]).unflatten(0, (block.heads, -1)).flatten(1).norm(dim=1))
    return mean_scores(model, padded(model, norms)[None])


@selector("taylor", cost="1 forward, 1 backward", needs="labels")
def taylor(model: VisionModel, data: LabelledImages) -> HeadScores:
    """First-order change of the loss without each head; the least important heads go first."""
    need_gradients(model, "a gradient of gates", remedy="Measure every head: sc.background.score")
    labels = data.need_labels()

    @torch.enable_grad()
    def run_chunk(start: int, stop: int) -> Tensor:
        images = data.images[start:stop]
        gates = images.new_ones(len(images), model.n_layers, model.n_heads, requires_grad=True)
        logits = gated_logits(model, images, gates)
        loss = F.cross_entropy(logits, labels[start:stop], reduction="sum")
        return torch.autograd.grad(loss, gates)[0].abs()

    per_image = over_images(run_chunk, model, data.images, holds=2 * model.n_layers)
    scores = mean_scores(model, per_image)
    most = scores.value[~absent(model)].max()
    return replace(scores, value=most - scores.value)


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
        for probs in attention_probs(model, data.images[start:stop]):  # [B, H, T, T] each
            row = read_rows(model, layout, probs)  # [B, H, T]
            masses.append((row[..., layout.patches] * share[start:stop, None]).sum(dim=-1))
        return padded(model, masses)

    per_image = over_images(run_chunk, model, data.images, holds=2 + layout.tokens // 64)
    return mean_scores(model, per_image)


@selector(
    "gating", cost="3 * steps * fits forwards and backwards of a batch, in all", needs="labels"
)
def gating(
    model: VisionModel,
    data: LabelledImages,
    *,
    fits: Count = 10,
    steps: Count = 500,
    strength: Positive = 0.1,
    rate: Positive = 1.0,
    batch: Count = 32,
    seed: int = 0,
) -> HeadScores:
    """Interference under Causal Head Gating. Only heads that it calls interfering are above 0: shut
    even when all are pushed open."""
    schedule: dict[str, Any] = {"steps": steps, "rate": rate, "batch": batch}
    opened, shut = fitted_gates(model, data, fits=fits, strength=strength, seed=seed, **schedule)
    interfering = (opened.mean(dim=0) <= OPEN) & (shut.mean(dim=0) <= OPEN)
    closed = 1 - opened.mean(dim=0)
    return HeadScores(
        torch.where(interfering, closed, closed - 1),
        standard_error(opened),  # over fits
        after={
            "facilitation": shut.mean(dim=0),
            "irrelevance": (opened * (1 - shut)).mean(dim=0),
            "interference": closed,
        },
        protocol={"open": OPEN, "fits": fits, "strength": strength, "seed": seed, **schedule},
    )


def fitted_gates(
    model: VisionModel,
    data: LabelledImages,
    *,
    fits: int,
    strength: float,
    seed: int,
    **schedule: Any,
) -> tuple[Tensor, Tensor]:
    """Gates G+ and G- of Causal Head Gating [fits, L, H], float64 on the CPU; NaN where a block has
    no such head. Each fit has its own start: (1) free, (2) pushed open and (3) pushed shut."""
    need_gradients(model, "gating", remedy="Measure every head: sc.background.score")
    generator = torch.Generator().manual_seed(seed)
    missing = absent(model)
    uniform = torch.rand(fits, *missing.shape, generator=generator, dtype=torch.float64)
    start = uniform.logit().clamp(-CLIP, CLIP).to(model.device, wide_dtype(model.dtype))
    schedule["generator"] = generator
    free = fit_gates(model, data, start, start.new_zeros(fits), **schedule)
    pressure = start.new_tensor([strength, -strength]).repeat_interleave(fits)
    # side by side, on the same batches
    pushed = fit_gates(model, data, free.repeat(2, 1, 1), pressure, **schedule)
    opened, shut = pushed.sigmoid().double().cpu().masked_fill(missing, torch.nan).chunk(2)
    return opened, shut


def fit_gates(
    model: VisionModel,
    data: LabelledImages,
    start: Tensor,
    strengths: Tensor,
    *,
    steps: int,
    rate: float,
    batch: int,
    generator: torch.Generator,
) -> Tensor:
    """Logits of gates [M, L, H] after `steps` updates on random batches, the same ones for every
    set of gates; `strengths` [M] push them open."""
    theta = start.clone().requires_grad_()
    adam = torch.optim.Adam([theta], lr=rate)
    exists = ~absent(model).to(theta.device)
    # [M, L, H]: the slope of the pressure where it is not clipped
    push = exists.to(theta.dtype) / exists.sum() * strengths[:, None, None]
    labels = data.need_labels()
    for _ in range(steps):
        rows = torch.randperm(len(labels), generator=generator)[:batch].to(labels.device)
        adam.zero_grad()
        within = (theta.detach().abs() <= CLIP).to(theta.dtype)
        theta.grad = _loss_slopes(model, data.images[rows], labels[rows], theta) - within * push
        norm = theta.grad.flatten(1).norm(dim=1).clamp_min(1e-12)
        theta.grad *= (NORM / norm).clamp(max=1.0)[:, None, None]
        adam.step()
    return theta.detach()


def _loss_slopes(model: VisionModel, images: Tensor, labels: Tensor, theta: Tensor) -> Tensor:
    """The gradient of the mean NLL in `theta` [M, L, H]; as many sets of gates at once as fit."""
    count = len(images)
    each = count * model.forward_bytes(model.check(images)) * model.n_layers * 2

    @torch.enable_grad()
    def run_chunk(start: int, stop: int) -> Tensor:
        part = theta[start:stop].detach().requires_grad_()
        gates = part.sigmoid().to(images.dtype).repeat_interleave(count, dim=0)  # [m * B, L, H]
        logits = gated_logits(model, images.repeat(stop - start, 1, 1, 1), gates)
        loss = F.cross_entropy(wide(logits), labels.repeat(stop - start), reduction="sum") / count
        return torch.autograd.grad(loss, part)[0]

    return run_in_chunks(run_chunk, len(theta), each, images.device, what="gates")
