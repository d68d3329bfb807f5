"""CAAP: patch attribution by activation patching (arXiv 2603.13652).

For every patch i, the source image's activations at S(i) (i and its neighbours) are put into a
blank image's run for layers l_s..l_e; the class score that comes out is the attribution of i (eq.
1-3). Only the class token is propagated, one copy per patch, so that all patches cost about one
more forward pass. `tail` decides what happens to the patched tokens after l_e, where the paper
contradicts itself: Algorithm 1 computes them again (`patched`), its section 3.3.1 keeps the
source's keys (`source`) and claims both are equal; they are not, but they rank patches nearly alike
(docs/results), and `source` costs half as much. `direction="delete"` swaps the roles: the blank's
tokens are put into the image's run, and the drop of the score is the attribution.

E-CAAP (appendix B.1, `approx`) reads the blank context through its own class token, once, instead
of by every copy: that part of the softmax does not depend on the image.

    z_i = [Z_0 v_0 + sum_{S(i)} e^{s_ij} v_j + e^{s_self} v_self]
          / [Z_0 + sum_{S(i)} e^{s_ij} + e^{s_self}]

`e-caap` keeps Z_0 per patch (S(i) left out) and weights v_0 by the blank's attention: an empty
selection gives back f(blank) exactly. `e-caap-printed` is the paper's formula, with the plain mean
of the blank's values; it does not have that property.

Networks of stages, convolutional ones (appendix B.3), Swin and others, have no class token that
could see earlier layers, so that patching stages l_s..l_e is the same as patching the map after
l_e alone:

    F*_i = F(blank), with the cells S(i) taken from F(source);   a_i = score(rest on F*_i)

The default l_e is the stage at two thirds of the depth. Sets are of layout cells: at another stage,
every feature that overlaps a chosen cell is taken. The blank's features come from a real run: zero
padding makes them differ at the borders. Each cell costs a run of the part after l_e.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.registry import BlankLike, Maps, blanks, method, size_of
from seecause.engine.attend import attend
from seecause.engine.chunks import fit, in_chunks, joined
from seecause.engine.sweep import (
    BlankSummary,
    Select,
    Sweep,
    SweepPlan,
    Tail,
    TokenSets,
    live_tokens,
    selection,
    token_sets,
)
from seecause.engine.trace import Trace, blank_trace, record, trace_bytes
from seecause.engine.walk import walk
from seecause.errors import BadOption, NotDefined
from seecause.models.base import ImageModel
from seecause.models.block import TokenLayout, span, wide
from seecause.models.view import VisionModel
from seecause.target import Score, Target, spread

Direction = Literal["insert", "delete"]
Approx = Literal["none", "e-caap", "e-caap-printed"]
Layers = tuple[int, int | None] | None
Classes = Literal["all"] | Sequence[int | str] | None
Tensors = tuple[Tensor, ...]
Run = Callable[..., Tensors]  # of images and their blanks
Recorded = dict[str, Any]  # sets of states, and of blocks whose keys and values a run keeps


@dataclass(frozen=True)
class Swept:
    """Logits of every intervention [B, N, C] and of the two plain runs [B, C], [1|B, C]."""

    interventions: Tensor
    source: Tensor
    blank: Tensor


@method("caap", forwards="2 (tail=source) to 4 (tail=patched)", needs="activations")
@torch.no_grad()
def caap(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    tail: Tail | None = None,
    layers: Layers = None,
    select: Select | Tensor = "box1",
    blank: BlankLike = "white",
    score: Score = "prob",
    approx: Approx = "none",
    direction: Direction = "insert",
    propagate_registers: bool = False,
    classes: Classes = None,
    seed: int = 0,
) -> Maps:
    """Activation patching into a blank context: the class score each patch causes on its own.

    By default `tail` is source, or patched where the model reads no class token, and `layers` go
    from 0 (the embedding) to the last block, or to two thirds of the depth where `tail` is not
    source. The paper's are patched and layers from 1. `classes` ("all", or a list) selects classes
    whose maps are returned too (`class_maps`).
    """
    layout = model.check(images)
    plan = make_plan(
        model, layout, tail=tail, layers=layers, propagate_registers=propagate_registers
    )
    chosen = selection(layout.cells, select)
    empty = blanks(model, images, blank, seed)
    swept = sweep(model, images, empty, chosen, plan, approx=approx, direction=direction)
    used = {"tail": plan.tail, "layers": [plan.start, plan.stop]}
    return to_maps(
        model, swept, target, score=score, direction=direction, classes=classes, used=used
    )


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
    bound = target.bind(swept.source)

    def attribution(values: Tensor, plain: Tensor) -> Tensor:  # a drop when something is taken away
        return values if direction == "insert" else plain[:, None] - values

    both = (swept.interventions, swept.source)
    scores = attribution(*(bound.score(x, score) for x in both))
    if classes is None:
        return Maps(scores, bound, used=used)
    every = attribution(*(spread(wide(x), score, sigmoid=model.sigmoid) for x in both))
    if classes != "all":
        every = every[..., [model.class_index(name) for name in classes]]
    return Maps(scores, bound, class_maps=every, used=used)


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
    if tail == "blank" and not reads_live:
        raise NotDefined(
            "CAAP with tail=blank",
            f"a {readout.kind} readout reads no class token, so every map would be constant",
            "Use tail='patched'",
        )
    start, stop = (0, None) if layers is None else layers
    if tail == "source" and stop is not None:
        raise BadOption(
            "layers", layers, f"({start}, None): with tail=source the last layer has no effect"
        )
    stop = depth if tail == "source" else math.ceil(2 * depth / 3) if stop is None else stop
    if not 0 <= start <= stop <= depth:
        ends = f"(0 = embedding, {depth} = output of the last block)"
        raise BadOption("layers", layers, f"0 <= first <= last <= {depth} {ends}")
    return SweepPlan(tail, start, stop, live)


def recorded(plan: SweepPlan, model: VisionModel) -> tuple[Recorded, Recorded]:
    """States, keys and values that are used of the context's run and of the donor's."""
    depth = model.n_layers
    context = {"states": {*plan.context_states(model)}, "kv": {*plan.context_blocks(depth)}}
    return context, {"states": {*plan.donor_states(model)}, "kv": {*plan.donor_blocks(depth)}}


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
    layout = model.layout_at(*size_of(images))
    usual = plan.tail in ("source", "blank") and direction == "insert" and len(blank) == 1
    if approx != "none" and not (usual and plan.live):
        needs = "direction=insert, tail=source or blank, a class token and one blank for all images"
        raise BadOption("approx", approx, f"'none': E-CAAP exists for {needs}")
    each = min(2, len(blank)) * trace_bytes(model, layout)
    each += min(len(chosen), 32) * _intervention_bytes(model, layout, chosen, plan)

    def prepare(count: int) -> Run:
        of_blank, of_image = recorded(plan, model)
        if direction == "delete":
            of_blank, of_image = of_image, of_blank
        if approx != "none":
            of_blank["states"] |= of_blank["kv"]
        sets, summary = token_sets(model, chosen, layout, plan.live), None
        shared = blank_trace(model, blank, **of_blank) if len(blank) == 1 else None
        if shared is not None and approx != "none":
            printed = approx == "e-caap-printed"
            summary = cache(partial(_blank_parts, model, shared, sets, plan, printed))
        together = patches_at_once(model, layout, chosen, plan, count)

        def run(sources: Tensor, own_blanks: Tensor) -> Tensors:
            source = record(model, sources, **of_image)
            empty = shared or record(model, own_blanks, **of_blank)
            context, donor = (empty, source) if direction == "insert" else (source, empty)
            assert source.logits is not None and empty.logits is not None
            logits = swept_logits(Sweep(model, context, donor, plan), sets, together, summary)
            return logits, source.logits, empty.logits

        return run

    key = ("caap", plan, approx, direction, id(chosen), chosen._version)
    interventions, source, bare = chunked(model, key, prepare, images, blank, bytes_each=each)
    return Swept(interventions, source, bare[: len(blank)])


def chunked(
    model: ImageModel,
    key: tuple[Hashable, ...] | None,
    prepare: Callable[[int], Run],
    images: Tensor,
    blank: Tensor,
    *more: Tensor,
    bytes_each: int,
) -> Tensors:
    """Results of the function that `prepare(count)` returns, for as many images at a time as fit.

    The function is called with images, their blanks (or the one of all) and `more` tensors with a
    row for each image; `prepare` does all that does not depend on an image. On a GPU the function
    is recorded by `key`, unless that is None.
    """
    total, device, known = len(images), images.device, False
    shared = [blank] if len(blank) == 1 else []
    tensors = [images, *more] if shared else [images, blank, *more]
    recorded = key is not None and device.type == "cuda"
    if key is not None and recorded:
        from seecause.engine.graphs import captured, ready

        if shared:  # a recording holds the one blank; others come with the images
            key = (*key, id(blank), blank._version)
        known = ready(model, key, *tensors)

    def ready_run(count: int) -> Run:
        run = prepare(count)
        return lambda sources, *others: run(sources, *shared, *others)

    def some_images(a: int, b: int) -> Tensors:
        parts, made = [tensor[a:b] for tensor in tensors], partial(ready_run, b - a)
        return captured(model, key, made, *parts) if recorded else made()(*parts)

    size = total if known else fit(total, bytes_each, device)
    return joined(list(in_chunks(some_images, total, size, what="images")))


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
    each = _intervention_bytes(model, layout, chosen, plan)
    return fit(len(chosen), count * each, model.device, share=0.6)


def _intervention_bytes(
    model: VisionModel, layout: TokenLayout, chosen: Tensor, plan: SweepPlan
) -> int:
    """Activations of the rows that one intervention computes in a block: projections and MLP, and
    scores where attention is not fused."""
    extra = {"patched": int(chosen.sum(dim=1).max()), "all": layout.tokens}
    block, element = model.blocks[0], torch.finfo(model.dtype).bits // 8
    explicit = 0 if model.device.type == "cuda" else block.heads * layout.tokens * 4 * 6
    each = block.heads * block.head_dim * element * 16 + explicit
    return max(1, len(plan.live) + extra.get(plan.tail, 0)) * each


def _blank_parts(
    model: VisionModel,
    blank: Trace,
    every: TokenSets,
    plan: SweepPlan,
    printed: bool,
    first: int,
    last: int,
) -> BlankSummary:
    """E-CAAP's part of the blank for token sets `first` to `last`: what the blank's own class query
    reads of the blank beside each set, block by block. It does not depend on an image."""
    sets = every.part(first, last)
    special, n = span(plan.live), len(sets)
    at = blank.at.take(blank.at.index[special])
    donor_blocks = plan.donor_blocks(model.n_layers)
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    layers = plan.context_blocks(model.n_layers)
    start = blank.states[layers.start][:, special]
    for step in walk(model, start, at, start=layers.start, stop=layers.stop):
        index = step.index
        step.h = step.out = blank.states[index][:, special]  # recorded: nothing runs again
        keep = sets.context_mask if index in donor_blocks else sets.whole_mask
        bias = step.block.bias(at, blank.at)
        bias = None if bias is None else bias.repeat(1, 1, n, 1)
        queries = step.q.repeat(1, 1, n, 1)
        o, lse = attend(queries, [blank.bank(index, keep, bias)], scale=step.block.scale)
        if printed:
            o = blank.kv[index][1][:, :, ~sets.is_special].mean(dim=2)[:, None].expand_as(o)
        parts[index] = (o.to(lse.dtype), lse)
    return BlankSummary(parts)


@method(
    "caap",
    forwards="2 + N x the part after the stage",
    needs="activations",
    architectures=("staged", "dense"),
)
@torch.no_grad()
def caap_staged(
    model: Any,  # StagedModel or DenseModel
    images: Tensor,
    target: Target,
    *,
    stage: str | None = None,
    select: Select | Tensor = "box1",
    blank: BlankLike = "white",
    score: Score = "prob",
    direction: Direction = "insert",
    classes: Classes = None,
    seed: int = 0,
) -> Maps:
    """Feature patching into a blank context: the class score each cell causes on its own.

    The default stage is the one at two thirds of the depth.
    """
    stage = str(stage or model.cells)
    chosen = selection(model.check(images).grid, select)
    empty = blanks(model, images, blank, seed)
    swept = sweep_features(model, images, empty, chosen, stage, direction=direction)
    used = {"stage": stage}
    return to_maps(
        model, swept, target, score=score, direction=direction, classes=classes, used=used
    )


def sweep_features(
    model: Any,  # StagedModel or DenseModel
    images: Tensor,
    blank: Tensor,
    chosen: Tensor,
    stage: str,
    *,
    direction: Direction = "insert",
) -> Swept:
    """Logits of all interventions chosen [N, N], in chunks of images and of cells that fit the
    memory budget."""
    layout = model.check(images)

    def prepare(count: int) -> Run:
        shared = model.run_to(stage, blank) if len(blank) == 1 else None  # [1, C, h, w]
        cells = chosen.to(model.device).unflatten(1, layout.grid)  # [N, gh, gw]
        after = count * model.forward_bytes(layout, after=stage)
        together = fit(len(cells), after, model.device, share=0.8)

        def run(sources: Tensor, own_blanks: Tensor) -> Tensors:
            features = model.run_to(stage, sources)  # [b, C, h, w]
            empty = model.run_to(stage, own_blanks) if shared is None else shared
            context, donor = (empty, features) if direction == "insert" else (features, empty)

            def some_cells(a: int, b: int) -> Tensor:
                mixed = patched(cells[a:b], donor, context)
                return model.run_from(stage, mixed).unflatten(0, (len(sources), b - a))

            logits = list(in_chunks(some_cells, len(cells), together, what="cells"))
            plain, bare = model.run_from(stage, features), model.run_from(stage, empty)
            return joined(logits, dim=1), plain, bare

        return run

    key, each = ("staged caap", stage, direction, id(chosen), chosen._version), 2
    each *= model.forward_bytes(layout)
    interventions, source, bare = chunked(model, key, prepare, images, blank, bytes_each=each)
    return Swept(interventions, source, bare[: len(blank)])


def patched(cells: Tensor, donor: Any, context: Any) -> Any:
    """Features [B * n, C, h, w] of contexts (or one for all) in which sets of cells [n, gh, gw] are
    the donors'; of every level, where rows read several."""
    if not isinstance(donor, Tensor):  # features of several levels
        return donor.over(context, partial(patched, cells))
    size = (donor.shape[-2], donor.shape[-1])
    marks = F.adaptive_max_pool2d(cells.float()[:, None], size)[:, 0] > 0  # [n, h, w]
    return torch.where(marks[None, :, None], donor[:, None], context[:, None]).flatten(0, 1)
