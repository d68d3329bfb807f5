"""Low-level functions for experiments: record intermediate values of a run, and patch them into
another run. Names are the same for every library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from seecause.engine.canary import once, prove_patch
from seecause.engine.chunks import run_in_chunks
from seecause.engine.trace import probabilities
from seecause.engine.walk import Step, walk
from seecause.errors import BadOption, NotDefined
from seecause.models.base import ImageModel
from seecause.models.preprocess import Images, as_images
from seecause.models.view import VisionModel

Kind = Literal["resid", "heads", "kv"]
_PLACE = re.compile(r"^blocks\.(\d+)\.(in|out|heads|kv|probs)$")


@dataclass(frozen=True)
class Site:
    """A location of an intervention inside a block.

    Args:
        layer: The block, counted from 0.
        kind: What is replaced: the input of the block ("resid"), outputs of heads ("heads"), or
            keys and values ("kv").
        tokens: Indices of tokens; None means all.
        heads: Indices of heads; None means all. "resid" takes none.
        source_tokens: For "resid" only: the tokens of the other image that are put in the places
            `tokens`, in this order. None means the same places.

    Example:
        >>> Site(3, "heads", heads=[1]).layer
        3
    """

    layer: int
    kind: Kind = "resid"
    tokens: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    source_tokens: Sequence[int] | None = None


def _heads(step: Step) -> Tensor:
    """Head outputs [B, R, H, dh], and the block goes on from these very ones."""
    if step.block.lanes is not None:  # extra channels widen head outputs (block.py)
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


def run(model: ImageModel, images: Images, *, cache: Sequence[str] = ()) -> tuple[Tensor, Cached]:
    """Run a model and record intermediate values. Differentiable.

    Args:
        model: A vision transformer.
        images: Normalised images [B, 3, H, W], or what `sc.attribute` takes.
        cache: Names of values:

            - `embed`: tokens that enter the first block [B, T, D]
            - `blocks.3.in`, `blocks.3.out`: states that enter and leave block 3 [B, T, D]
            - `blocks.3.heads`: head outputs before the output projection and its norm
              [B, T, H, dh]
            - `blocks.3.kv`: keys and values, [B, H, T, dh] each
            - `blocks.3.probs`: attention probabilities [B, H, T, T]; all others keep fused
              attention

    Returns:
        Logits [B, C], and a dictionary of recorded values by name.

    Example:
        >>> import torch, seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> logits, cached = sc.run(model, torch.zeros(1, 3, 96, 96), cache=["blocks.3.heads"])
        >>> cached["blocks.3.heads"].shape  # images, tokens, heads, width of a head
        torch.Size([1, 149, 8, 16])
    """
    model = _with_blocks(model)
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


# what each kind of site overwrites, in the order of the computation
_PARTS: dict[Kind, tuple[str, ...]] = {"resid": ("h",), "kv": ("k", "v"), "heads": ("o",)}


def patch(
    model: ImageModel, images: Images, source: Images, site_sets: Sequence[Sequence[Site]]
) -> Tensor:
    """Activation patching: overwrite values of a run with those of the plain run of other images.

    Sets are independent interventions. They run together from the first block that any of them
    touches; nothing before it is computed twice.

    Args:
        model: A vision transformer.
        images: Normalised images [B, 3, H, W], or what `sc.attribute` takes.
        source: As many images, from whose runs values are taken.
        site_sets: S sets of sites: [[Site, ...], ...].

    Returns:
        Logits [S, B, C].

    Example:
        >>> import torch, seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> here, there = torch.zeros(1, 3, 96, 96), torch.ones(1, 3, 96, 96)
        >>> logits = sc.patch(model, here, there, [[], [sc.Site(3, "heads", heads=[1])]])
        >>> bool(torch.allclose(logits[0], model(here))), bool((logits[1] == logits[0]).all())
        (True, False)
    """
    model = _with_blocks(model)
    once(model, "patch", partial(prove_patch, model))
    with model.eval_mode():
        images, source = as_images(model, images), as_images(model, source)
    return run_patched(model, images, source, site_sets)


def run_patched(
    model: VisionModel, images: Tensor, source: Tensor, site_sets: Sequence[Sequence[Site]]
) -> Tensor:
    """`patch`, without the check that it works on this model."""
    with model.eval_mode():
        layout, batch = model.check(images), len(images)
        if not site_sets or any(isinstance(sites, Site) for sites in site_sets):
            raise BadOption("site_sets", site_sets, "sets of sites, at least one: [[site], ...]")
        for site in (site for sites in site_sets for site in sites):
            _check(model, site, layout.tokens)
        if source.shape != images.shape:
            expected = f"one source for each image, {list(images.shape)}"
            raise BadOption("source", list(source.shape), expected)
        at, source_at = model.at(images), model.at(source)
        places = {(site.layer, site.kind) for sites in site_sets for site in sites}
        first = min((layer for layer, _ in places), default=0)
        last = max((layer for layer, _ in places), default=-1)
        h = walk(model, model.embed(images), at, stop=first).end()
        other = walk(model, model.embed(source), source_at, stop=first).end()
        donor: dict[tuple[int, str], list[Tensor]] = {}
        for step in walk(model, other, source_at, start=first, stop=last + 1):
            for kind, parts in _PARTS.items():
                if (step.index, kind) in places:
                    donor[step.index, kind] = [getattr(step, part) for part in parts]

        def run_chunk(a: int, b: int) -> Tensor:
            sets = b - a
            steps = walk(model, h.repeat(sets, 1, 1), at.copies(sets), start=first)
            for step in steps:
                for kind, parts in _PARTS.items():
                    if (step.index, kind) not in places:
                        continue
                    mark = _mark(model, site_sets[a:b], step.index, kind, layout.tokens)
                    mark, values = mark.to(h.device), donor[step.index, kind]
                    if kind == "resid":
                        moved = partial(_moved, _origin(site_sets[a:b], step.index, h), batch)
                        values = [moved(states) for states in values]
                        theirs = source_at.with_facts(lambda x, m=moved: m(x).flatten(0, 1))
                    for part, new in zip(parts, values, strict=True):
                        old = getattr(step, part).unflatten(0, (sets, batch))
                        setattr(step, part, torch.where(mark, new, old).flatten(0, 1))
                    if kind == "resid":
                        tokens = mark[:, 0, :, 0].repeat_interleave(batch, dim=0)  # [S * B, T]
                        step.at = step.keys_at = step.at.where(tokens, theirs)
            return model.readout(steps.h, layout).unflatten(0, (sets, batch))

        each = batch * model.forward_bytes(layout)
        return run_in_chunks(run_chunk, len(site_sets), each, images.device, what="site sets")


def _origin(site_sets: Sequence[Sequence[Site]], index: int, h: Tensor) -> Tensor:
    """Which of the source's tokens each set puts at each token of states h [B, T, D] that enter
    block `index`, [S, T]."""
    origin = torch.arange(h.shape[1]).repeat(len(site_sets), 1)
    for row, sites in zip(origin, site_sets, strict=True):
        for site in sites:
            if site.layer == index and site.source_tokens is not None:
                places = range(h.shape[1]) if site.tokens is None else site.tokens
                row[_indices(places)] = _indices(site.source_tokens)
    return origin.to(h.device)


def _moved(origin: Tensor, batch: int, states: Tensor) -> Tensor:
    """States or facts [1|B, T, D] of the source -> [S, B, T, D], tokens where each set puts
    them."""
    return states.expand(batch, -1, -1)[:, origin].transpose(0, 1)


def _indices(given: Sequence[int]) -> Tensor:
    """Indices as a tensor; torch raises if they are not whole numbers."""
    return torch.as_tensor(given) if len(given) else torch.empty(0, dtype=torch.long)


def _mark(
    model: VisionModel, site_sets: Sequence[Sequence[Site]], index: int, kind: Kind, tokens: int
) -> Tensor:
    """Mask of the values that each set overwrites, shaped to broadcast over [S, B, ...]."""
    heads = model.blocks[index].kv_heads if kind == "kv" else model.blocks[index].heads
    mark = torch.zeros(len(site_sets), tokens, heads, dtype=torch.bool)
    for part, sites in zip(mark, site_sets, strict=True):
        for site in (s for s in sites if (s.layer, s.kind) == (index, kind)):
            rows, columns = (
                _indices(range(count) if indices is None else indices)
                for indices, count in ((site.tokens, tokens), (site.heads, heads))
            )
            part[rows[:, None], columns] = True
    if kind == "resid":
        return mark[:, None, :, :1]  # [S, 1, T, 1]
    mark = mark.transpose(1, 2) if kind == "kv" else mark
    return mark[:, None, ..., None]  # [S, 1, Hkv, T, 1] or [S, 1, T, H, 1]


def _with_blocks(model: ImageModel) -> VisionModel:
    if isinstance(model, VisionModel):
        return model
    raise NotDefined(
        "run and patch",
        f"{type(model).__name__} is no view with transformer blocks",
        "Use model.run_to(model.cells, images) and model.run_from(model.cells, ...)",
    )


def _check(model: VisionModel, site: Site, tokens: int) -> None:
    """Raises for settings of a site that would be ignored or would change other values."""
    if site.kind not in get_args(Kind):
        raise BadOption("kind", site.kind, f"one of {', '.join(get_args(Kind))}")
    if not 0 <= site.layer < model.n_layers:
        raise BadOption("layer", site.layer, f"a block 0-{model.n_layers - 1}")
    if site.kind == "resid" and site.heads is not None:
        raise BadOption("heads", site.heads, "None: the residual stream has no heads")
    if site.source_tokens is not None:
        places = tokens if site.tokens is None else len(site.tokens)
        if site.kind != "resid" or len(site.source_tokens) != places:
            expected = f"as many source tokens as tokens ({places}), at a site of kind resid"
            raise BadOption("source_tokens", site.source_tokens, expected)


def _place(model: VisionModel, name: str) -> tuple[int, str]:
    match = _PLACE.match(name)
    if match is None or int(match[1]) >= model.n_layers:
        raise BadOption(
            "cache", name, f"'embed' or 'blocks.0-{model.n_layers - 1}.in|out|heads|kv|probs'"
        )
    return int(match[1]), match[2]
