"""CAAP: patch attribution by activation patching (arXiv 2603.13652).

For every patch i, the source picture's activations at S(i) (i and its neighbours) are put into a
blank picture's run for layers l_s..l_e; the class score that comes out is the attribution of i (eq.
1-3). Only the class token is propagated, one copy per patch, so that all patches cost about one
more forward pass. `tail` says what the patched tokens do after l_e, where the paper contradicts
itself: Algorithm 1 computes them again (`patched`), its section 3.3.1 keeps the source's keys
(`source`) and claims both are equal; they are not, but they rank patches nearly alike
(docs/results), and `source` costs half as much. `direction="delete"` swaps the roles: the blank's
tokens are put into the picture's run, and the drop of the score is the attribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause.attribution.e_caap import Approx, summarise
from seecause.attribution.registry import Maps, method
from seecause.attribution.select import Select, interpolate, selection
from seecause.engine.blanks import Blank, blank_image, blank_trace
from seecause.engine.chunks import fit, in_chunks, joined
from seecause.engine.graphs import captured, ready
from seecause.engine.sweep import BlankSummary, Sweep, SweepPlan, Tail, live_tokens
from seecause.engine.token_sets import TokenSets, token_sets
from seecause.engine.trace import record, trace_bytes
from seecause.errors import BadOption, NotDefined
from seecause.models.base import ImageModel
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.target import Score, Target, spread
from seecause.types import wide

Direction = Literal["insert", "delete"]
Layers = tuple[int, int | None] | None
Classes = Literal["all"] | Sequence[int | str] | None
ONE_CLASS = "only the explained one"


@dataclass(frozen=True)
class Swept:
    """Logits of every intervention [B, N, C] and of the two plain runs [B, C], [1|B, C]."""

    interventions: Tensor
    picture: Tensor
    blank: Tensor


@method(
    "caap",
    forwards="2 (tail=source) to 4 (tail=patched)",
    needs="activations",
    unset={
        "tail": "source; patched where the model reads no class token",
        "layers": (
            "0 (embedding) to the last block; to two thirds of the depth where tail is not source"
        ),
        "classes": ONE_CLASS,
    },
)
@torch.no_grad()
def caap(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    tail: Tail | None = None,
    layers: Layers = None,
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    score: Score = "prob",
    approx: Approx = "none",
    direction: Direction = "insert",
    propagate_registers: bool = False,
    stride: int = 1,
    classes: Classes = None,
    seed: int = 0,
) -> Maps:
    """Activation patching into a blank context: the class score each patch causes on its own.

    `stride=2` does so for every second patch each way and interpolates the others.
    """
    if direction not in get_args(Direction):
        raise BadOption("direction", direction, "insert or delete")
    plan = make_plan(
        model,
        model.check(images),
        tail=tail,
        layers=layers,
        propagate_registers=propagate_registers,
    )
    grid = model.check(images).cells
    chosen = selection(grid, select, stride=stride)
    size = (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    swept = sweep(model, images, empty, chosen, plan, approx=approx, direction=direction)
    maps = to_maps(
        model,
        swept,
        target,
        score=score,
        direction=direction,
        classes=classes,
        used={"tail": plan.tail, "layers": [plan.start, plan.stop]},
    )
    if stride == 1:
        return maps
    every = None if maps.class_maps is None else interpolate(maps.class_maps, grid, stride)
    return replace(maps, scores=interpolate(maps.scores, grid, stride), class_maps=every)


def to_maps(
    model: ImageModel,
    swept: Swept,
    target: Target,
    *,
    score: Score,
    direction: Direction,
    classes: Classes,
    used: dict[str, Any],
) -> Maps:
    """Maps of the target, and of other classes on request, from the logits of all interventions."""
    bound = target.bind(swept.picture)

    def attribution(values: Tensor, plain: Tensor) -> Tensor:  # a drop when something is taken away
        return values if direction == "insert" else plain[:, None] - values

    both = (swept.interventions, swept.picture)
    scores = attribution(*(bound.score(x, score, sigmoid=model.sigmoid) for x in both))
    if classes is None:
        return Maps(scores, bound, used=used)
    every = attribution(*(spread(wide(x), score, sigmoid=model.sigmoid) for x in both))
    return Maps(scores, bound, class_maps=take_classes(model, every, classes), used=used)


def take_classes(model: ImageModel, values: Tensor, classes: Classes) -> Tensor:
    """Of values [.., C], those of the classes that are wanted."""
    if classes is None or classes == "all":
        return values
    wanted = [classes] if isinstance(classes, str | int) else classes
    if not wanted:
        raise BadOption("classes", classes, "at least one class, or 'all'")
    return values[..., [model.class_index(name) for name in wanted]]


def make_plan(
    model: VisionModel,
    layout: TokenLayout,
    *,
    tail: Tail | None,
    layers: Layers,
    propagate_registers: bool = False,
) -> SweepPlan:
    """Check tail and layers against the model and fill in the defaults."""
    depth, readout = model.n_layers, model.readout
    live = live_tokens(layout, registers=propagate_registers)
    reads_live = bool(readout.read_prefix(layout)) or (readout.over_prefix and bool(live))
    tail = tail or ("source" if reads_live else "patched")
    if tail not in get_args(Tail):
        raise BadOption("tail", tail, f"one of {', '.join(get_args(Tail))}")
    if tail == "blank" and not reads_live:
        raise NotDefined(
            "CAAP with tail=blank",
            f"a {readout.kind} readout reads no class token, so every map would be constant",
            "Use tail='patched'",
        )
    if layers is not None and not (
        isinstance(layers, tuple | list)
        and len(layers) == 2
        and isinstance(layers[0], int)
        and isinstance(layers[1], int | None)
    ):
        raise BadOption("layers", layers, "a pair (first, last) of layers, last may be None")
    start, stop = (0, None) if layers is None else layers
    if tail == "source" and stop is not None:
        raise BadOption(
            "layers", layers, f"({start}, None): with tail=source the last layer has no effect"
        )
    stop = depth if tail == "source" else math.ceil(2 * depth / 3) if stop is None else stop
    if not 0 <= start <= stop <= depth:
        raise BadOption(
            "layers",
            layers,
            f"0 <= first <= last <= {depth} (0 = embedding, {depth} = output of the last block)",
        )
    return SweepPlan(tail, start, stop, live)


def recorded(plan: SweepPlan, model: VisionModel) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """States, and blocks whose keys and values are read: of the context, of the donor."""
    context = (plan.context_states(model), plan.context_blocks(model.n_layers))
    return context, (plan.donor_states(model), plan.donor_blocks(model.n_layers))


def _rows_each(plan: SweepPlan, chosen: Tensor, layout: TokenLayout) -> int:
    """Rows that one intervention computes in a block."""
    extra = {"patched": int(chosen.sum(dim=1).max()), "all": layout.tokens}
    return max(1, len(plan.live) + extra.get(plan.tail, 0))


def sweep(
    model: VisionModel,
    images: Tensor,
    blank: Tensor,
    chosen: Tensor,
    plan: SweepPlan,
    *,
    approx: Approx = "none",
    direction: Direction = "insert",
) -> Swept:
    """Logits of all interventions, in chunks of images and of patches that fit the memory
    budget."""
    layout, shared = model.check(images), len(blank) == 1
    if approx != "none" and not shared:
        raise BadOption("approx", approx, "'none': E-CAAP reads one blank for all images")
    one_blank = (id(blank), blank._version) if shared else ()
    key = ("caap", plan, approx, direction, id(chosen), chosen._version, *one_blank)
    tensors = (images,) if shared else (images, blank)

    def some_images(first: int, last: int) -> tuple[Tensor, ...]:
        parts = [tensor[first:last] for tensor in tensors]
        same_blank = blank if shared else None
        prepare = partial(
            _prepare, model, last - first, layout, same_blank, chosen, plan, approx, direction
        )
        return captured(model, key, prepare, *parts)

    size = len(images)
    if not ready(model, key, *tensors):
        each = _rows_each(plan, chosen, layout) * row_bytes(model, layout)
        traces = len(tensors) * trace_bytes(model, layout)
        size = fit(size, traces + min(len(chosen), 32) * each, images.device)
    parts = in_chunks(some_images, len(images), size, what="images")
    interventions, plain, bare = zip(*parts, strict=True)
    return Swept(joined(interventions), joined(plain), bare[0] if shared else joined(bare))


def _prepare(
    model: VisionModel,
    count: int,
    layout: TokenLayout,
    blank: Tensor | None,
    chosen: Tensor,
    plan: SweepPlan,
    approx: Approx,
    direction: Direction,
) -> Callable[..., tuple[Tensor, ...]]:
    """All that no picture changes. The function turns `count` pictures (and a blank for each, where
    they do not share one) into the logits of all interventions, of the pictures and of blanks."""
    insert, (context, donor) = direction == "insert", recorded(plan, model)
    (blank_states, blank_kv), (image_states, image_kv) = (
        (context, donor) if insert else (donor, context)
    )
    if approx != "none":
        blank_states = {*blank_states, *blank_kv}
    sets, summary, shared = token_sets(model, chosen, layout, plan.live), None, None
    if blank is not None:
        shared = blank_trace(model, blank, states=blank_states, kv=blank_kv)
        summary = summarise(model, shared, sets, plan, approx, direction)
    together = patches_at_once(model, layout, chosen, plan, count)

    def run(images: Tensor, *blanks: Tensor) -> tuple[Tensor, ...]:
        source = record(model, images, states=image_states, kv=image_kv)
        empty = shared or record(model, blanks[0], states=blank_states, kv=blank_kv)
        runner = Sweep(model, empty, source, plan) if insert else Sweep(model, source, empty, plan)
        assert source.logits is not None and empty.logits is not None
        return swept_logits(runner, sets, together, summary), source.logits, empty.logits

    return run


def swept_logits(
    run: Sweep,
    sets: TokenSets,
    together: int,
    summary: Callable[[int, int], BlankSummary] | None = None,
) -> Tensor:
    """Logits [B, n, C] of all token sets, `together` at a time."""

    def some_patches(a: int, b: int) -> Tensor:
        return run.logits(sets.part(a, b), None if summary is None else summary(a, b))

    return joined(list(in_chunks(some_patches, len(sets), together, what="patches")), dim=1)


def patches_at_once(
    model: VisionModel, layout: TokenLayout, chosen: Tensor, plan: SweepPlan, count: int
) -> int:
    """How many interventions of `count` images run together."""
    each = _rows_each(plan, chosen, layout) * row_bytes(model, layout)
    return fit(len(chosen), count * each, model.device, share=0.6)


def row_bytes(model: VisionModel, layout: TokenLayout) -> int:
    """Activations of one live row: projections and MLP, and its scores where attention is not
    fused."""
    block, element = model.blocks[0], torch.finfo(model.dtype).bits // 8
    width = block.heads * block.head_dim
    explicit = 0 if model.device.type == "cuda" else block.heads * layout.tokens * 4 * 6
    return width * element * 16 + explicit
