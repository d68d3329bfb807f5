"""The low-level pair for people's own experiments: record anything, put anything from one run into
another. Places are named alike for every library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause.engine.chunks import run_in_chunks
from seecause.engine.trace import probabilities
from seecause.engine.walk import Step, walk
from seecause.errors import BadOption, NotDefined
from seecause.models.base import ImageModel, whole_number
from seecause.models.layout import At
from seecause.models.preprocess import Pictures, as_images
from seecause.models.view import VisionModel

Kind = Literal["resid", "heads", "kv"]
_PLACE = re.compile(r"^blocks\.(\d+)\.(in|out|heads|kv|probs)$")


@dataclass(frozen=True)
class Site:
    """One place of an intervention: what enters (`resid`), which heads' outputs, or which keys and
    values, of block `layer` (0-based).

    `tokens` and `heads` are indices; None means all. `resid` takes no heads, and it alone may move
    things: `source_tokens` are the source's tokens that are put there, in the order of `tokens`.
    """

    layer: int
    kind: Kind = "resid"
    tokens: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    source_tokens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "source_tokens"):
            indices = getattr(self, name)
            if indices is not None:
                object.__setattr__(self, name, _indices(name, indices))


def _indices(name: str, given: Any) -> tuple[int, ...]:
    """Whole numbers of a list, range, array or tensor."""
    try:
        indices = [whole_number(index) for index in given]
    except TypeError:  # one number, a slice
        indices = [None]
    whole = tuple(index for index in indices if index is not None)
    if len(whole) != len(indices):
        raise BadOption(name, given, "a list of whole numbers, such as [3]")
    return whole


def _heads(step: Step) -> Tensor:
    """Head outputs [B, R, H, dh], and the block goes on from these very ones."""
    if step.block.lanes is not None:  # which widen what attention gives (block.py)
        step.o = step.o[..., : step.block.head_dim]
    return step.o


Cached = dict[str, Tensor | tuple[Tensor, Tensor]]
_READ: dict[str, Callable[[Step], Tensor | tuple[Tensor, Tensor]]] = {
    "in": lambda step: step.h,
    "kv": lambda step: (step.k, step.v),
    "probs": probabilities,
    "heads": _heads,
    "out": lambda step: step.out,
}


def run(model: ImageModel, images: Pictures, *, cache: Sequence[str] = ()) -> tuple[Tensor, Cached]:
    """Logits [B, C], and what the run had at the places that `cache` names:

        embed               tokens that enter the first block [B, T, D]
        blocks.3.in, .out   states that enter and leave block 3 [B, T, D]
        blocks.3.heads      head outputs before the output projection and its norm [B, T, H, dh]
        blocks.3.kv         keys and values, [B, H, T, dh] each
        blocks.3.probs      attention probabilities [B, H, T, T]; all others keep fused attention

    Differentiable.

    >>> import torch, seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> logits, cached = sc.run(model, torch.zeros(1, 3, 96, 96), cache=["blocks.3.heads"])
    >>> cached["blocks.3.heads"].shape  # pictures, tokens, heads, width of a head
    torch.Size([1, 149, 8, 16])
    """
    model = _with_blocks(model)
    if isinstance(cache, str):
        raise BadOption("cache", cache, f"a list of names: [{cache!r}]")
    wanted = {name: _place(model, name) for name in cache if name != "embed"}
    with model.eval_mode():
        images = as_images(model, images)
        layout = model.check(images)
        steps = walk(model, model.embed(images), model.at(images))
        cached: Cached = {"embed": steps.h} if "embed" in cache else {}
        for step in steps:
            for name in (name for name, (layer, _) in wanted.items() if layer == step.index):
                cached[name] = _READ[wanted[name][1]](step)
        return model.readout(steps.h, layout), cached


def patch(
    model: ImageModel, images: Pictures, source: Pictures, site_sets: Sequence[Sequence[Site]]
) -> Tensor:
    """Activation patching: logits [S, B, C] of `images`, for each of S sets of sites overwritten
    with what the plain run of `source` (as many pictures) has there.

    Sets are independent interventions, [[Site, ...], ...], and run together from the first block
    that any of them touches; nothing before it is computed twice.

    >>> import torch, seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> here, there = torch.zeros(1, 3, 96, 96), torch.ones(1, 3, 96, 96)
    >>> logits = sc.patch(model, here, there, [[], [sc.Site(3, "heads", heads=[1])]])
    >>> bool(torch.allclose(logits[0], model(here))), bool((logits[1] == logits[0]).all())
    (True, False)
    """
    model = _with_blocks(model)
    with model.eval_mode():
        return _patch(model, as_images(model, images), as_images(model, source), site_sets)


def _patch(
    model: VisionModel, images: Tensor, source: Tensor, site_sets: Sequence[Sequence[Site]]
) -> Tensor:
    layout = model.check(images)
    _check_sets(model, site_sets, layout.tokens)
    if source.shape != images.shape:
        raise BadOption(
            "source", list(source.shape), f"one source for each image, {list(images.shape)}"
        )
    at, source_at = model.at(images), model.at(source)
    first = min((site.layer for sites in site_sets for site in sites), default=0)
    h = walk(model, model.embed(images), at, stop=first).end()
    other = walk(model, model.embed(source), source_at, stop=first).end()
    donor = _donor(model, other, source_at, first, site_sets)
    each = len(images) * model.forward_bytes(layout)

    def run_chunk(a: int, b: int) -> Tensor:
        chosen, sets, batch = site_sets[a:b], b - a, len(images)

        def mark(step: Step, kind: Kind) -> Tensor:
            return _mark(model, chosen, step.index, kind, layout.tokens).to(h.device)

        def put(mark: Tensor, new: Tensor, old: Tensor) -> Tensor:
            return torch.where(mark, new, old.unflatten(0, (sets, batch))).flatten(0, 1)

        steps = walk(model, h.repeat(sets, 1, 1), at.copies(sets), start=first)
        for step in steps:
            if (step.index, "resid") in donor:
                here, origin = mark(step, "resid"), _origin(chosen, step.index, layout.tokens)
                step.h = put(here, _moved(donor[step.index, "resid"][0], origin), step.h)
                theirs = source_at.copies(sets)
                if origin is not None:
                    theirs = _facts(source_at, origin, batch)
                tokens = here[:, 0, :, 0].repeat_interleave(batch, dim=0)  # [S * B, T]
                step.at = step.keys_at = step.at.where(tokens, theirs)
            if (step.index, "kv") in donor:
                here, (k, v) = mark(step, "kv"), donor[step.index, "kv"]
                step.k, step.v = put(here, k, step.k), put(here, v, step.v)
            if (step.index, "heads") in donor:
                step.o = put(mark(step, "heads"), donor[step.index, "heads"][0], step.o)
        return model.readout(steps.h, layout).unflatten(0, (sets, batch))

    return run_in_chunks(run_chunk, len(site_sets), each, images.device, what="site sets")


Held = dict[tuple[int, str], tuple[Tensor, ...]]


def _donor(
    model: VisionModel, h: Tensor, at: At, first: int, site_sets: Sequence[Sequence[Site]]
) -> Held:
    """What the source's run has at every place that some set names."""
    named = {(site.layer, site.kind) for sites in site_sets for site in sites}
    held: Held = {}
    stop = max((layer for layer, _ in named), default=-1) + 1
    for step in walk(model, h, at, start=first, stop=stop):
        if (step.index, "resid") in named:
            held[step.index, "resid"] = (step.h,)
        if (step.index, "heads") in named:
            held[step.index, "heads"] = (step.o,)
        if (step.index, "kv") in named:
            held[step.index, "kv"] = (step.k, step.v)
    return held


def _mark(
    model: VisionModel, site_sets: Sequence[Sequence[Site]], index: int, kind: Kind, tokens: int
) -> Tensor:
    """What each set overwrites at one place, shaped to broadcast over [S, B, ...] of that kind."""
    heads = model.blocks[index].kv_heads if kind == "kv" else model.blocks[index].heads
    mark = torch.zeros(len(site_sets), tokens, heads, dtype=torch.bool)
    for part, sites in zip(mark, site_sets, strict=True):
        for site in (s for s in sites if (s.layer, s.kind) == (index, kind)):
            rows, columns = (
                torch.tensor(list(range(count) if indices is None else indices), dtype=torch.long)
                for indices, count in ((site.tokens, tokens), (site.heads, heads))
            )
            part[rows[:, None], columns] = True
    if kind == "resid":
        return mark[:, None, :, :1]  # [S, 1, T, 1]
    mark = mark.transpose(1, 2) if kind == "kv" else mark
    return mark[:, None, ..., None]  # [S, 1, Hkv, T, 1] or [S, 1, T, H, 1]


def _origin(site_sets: Sequence[Sequence[Site]], index: int, tokens: int) -> Tensor | None:
    """Which of the source's tokens each set puts at each token of block `index`, [S, T]; None where
    every one stays at its place."""
    here = (site for sites in site_sets for site in sites if site.layer == index)
    if all(site.source_tokens is None for site in here):
        return None
    origin = torch.arange(tokens).repeat(len(site_sets), 1)
    for row, sites in zip(origin, site_sets, strict=True):
        for site in (s for s in sites if s.layer == index and s.source_tokens is not None):
            places = range(tokens) if site.tokens is None else site.tokens
            row[list(places)] = torch.tensor(list(site.source_tokens or ()), dtype=torch.long)
    return origin


def _moved(states: Tensor, origin: Tensor | None) -> Tensor:
    """States [B, T, D] of the source -> [S, B, T, D] with tokens where each set puts them."""
    if origin is None:
        return states
    return states[:, origin.to(states.device)].transpose(0, 1)


def _facts(at: At, origin: Tensor, batch: int) -> At:
    """Facts [S * B, T, F] of the source's tokens where each set puts them."""
    return at.with_facts(lambda facts: _moved(facts.expand(batch, -1, -1), origin).flatten(0, 1))


def _with_blocks(model: ImageModel) -> VisionModel:
    if isinstance(model, VisionModel):
        return model
    if not isinstance(model, ImageModel):
        raise BadOption("model", type(model).__name__, "what sc.load or sc.wrap(module) gives")
    raise NotDefined(
        "run and patch",
        f"{model.family} has no transformer blocks",
        "Use model.run_to(model.cells, images) and model.run_from(model.cells, ...)",
    )


def _check_sets(model: VisionModel, site_sets: Sequence[Sequence[Site]], tokens: int) -> None:
    if any(isinstance(sites, Site) for sites in site_sets):
        raise BadOption("site_sets", site_sets, "a list of sets, each a list of sites: [[site]]")
    for site in (site for sites in site_sets for site in sites):
        _check(model, site, tokens)
    if not site_sets:
        raise BadOption("site_sets", site_sets, "at least one set of sites (it may be empty)")


def _check(model: VisionModel, site: Site, tokens: int) -> None:
    if site.kind not in get_args(Kind):
        raise BadOption("kind", site.kind, f"one of {', '.join(get_args(Kind))}")
    if not 0 <= site.layer < model.n_layers:
        raise BadOption("layer", site.layer, f"a block 0-{model.n_layers - 1}")
    if site.kind == "resid" and site.heads is not None:
        raise BadOption("heads", site.heads, "None: the residual stream has no heads")
    if site.source_tokens is not None:
        places = tokens if site.tokens is None else len(site.tokens)
        if site.kind != "resid" or len(site.source_tokens) != places:
            expected = f"of kind resid, as many as tokens ({places})"
            raise BadOption("source_tokens", list(site.source_tokens), expected)
    block = model.blocks[site.layer]
    heads = block.kv_heads if site.kind == "kv" else block.heads
    indices = (("tokens", site.tokens, tokens), ("heads", site.heads, heads))
    for what, given, count in (*indices, ("source_tokens", site.source_tokens, tokens)):
        if given is not None and not all(0 <= i < count for i in given):
            raise BadOption(what, list(given), f"indices 0-{count - 1}")


def _place(model: VisionModel, name: str) -> tuple[int, str]:
    match = _PLACE.match(name)
    if match is None or int(match[1]) >= model.n_layers:
        raise BadOption(
            "cache", name, f"'embed' or 'blocks.0-{model.n_layers - 1}.in|out|heads|kv|probs'"
        )
    return int(match[1]), match[2]
