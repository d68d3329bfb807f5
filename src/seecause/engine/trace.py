"""Plain runs of a model: recorded, so that other runs can use their keys, values and states;
started at any block; with explicit attention probabilities; or on some of the patches.

Blank images are the neutral context that a patch is put into. Their runs are recorded once per
model state, size and blank, and reused; any change of a weight or gate is noticed.

    white | black   raw pixels 1 or 0
    mean            the channel mean the model subtracts
    noise           independent Gaussian pixels with the mean and deviation the model expects
    blur-noise      the same noise, blurred by a Gaussian of 1/28 of the side and brought back to
                    that deviation
    tensor          one image for all inputs, or one per input, for example the second image of
                    each pair

Attentions are numbered like blocks, 0 to L-1. A latent pool is one more, number L: its queries are
no tokens, so its matrix [B, H, Q, T] is not square and nothing is added to it by a residual path.
Every matrix has one column per token; tokens a pool does not read get 0.

Patches that are left out are dropped after the position embedding, as if they had never been there.
Special tokens always stay, and every kept patch keeps its own position (also a rotary one).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.attend import Bank, Mask, attention_weights
from seecause.engine.chunks import fit, in_chunks, run_in_chunks
from seecause.engine.walk import Step, walk
from seecause.errors import BadImage, BadOption, NotDefined
from seecause.files import digest
from seecause.models.base import ImageModel
from seecause.models.block import At, Block, Size, TokenLayout, wide
from seecause.models.view import VisionModel

Blank = Literal["white", "black", "mean", "noise", "blur-noise"]
_KEPT = 8  # number of cached blank images; half as many of their runs


@dataclass(eq=False)
class Trace:
    """One run of a model. `states[l]` is the output of block l (1-based, 0 = embedding), [B, T, D];
    `kv[b]` what block b (0-based) computed from `states[b]`."""

    at: At
    logits: Tensor | None
    states: dict[int, Tensor] = field(default_factory=dict)
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def layout(self) -> TokenLayout:
        return self.at.layout

    @property
    def batch(self) -> int:
        kept = [*self.states.values(), *(k for k, _ in self.kv.values())]
        return len(kept[0] if self.logits is None else self.logits)

    def bank(self, block: int, keep: Mask | None = None, bias: Tensor | None = None) -> Bank:
        k, v = self.kv[block]
        return Bank(k, v, keep, bias=bias)


def record(
    model: VisionModel,
    images: Tensor,
    *,
    states: Collection[int] = (),
    kv: Collection[int] = (),
    until: int | None = None,
) -> Trace:
    """Run the model with fused attention and keep the requested states, keys and values. Stops
    after block `until` (without logits)."""
    layout = model.check(images)
    trace = Trace(model.at(images), None)
    # of the last block, only rows that are read
    narrow = None if model.n_layers in states else model.readout.rows(layout)
    steps = walk(model, model.embed(images), trace.at)
    for step in steps:
        if step.index in states:
            trace.states[step.index] = step.h
        if step.index in kv:
            trace.kv[step.index] = (step.k, step.v)
        if until is not None and step.index >= until:
            return trace
        if step.index == model.n_layers - 1 and narrow is not None:
            step.take(narrow)
    if model.n_layers in states:
        trace.states[model.n_layers] = steps.h
    if until is None:
        read = model.readout if narrow is None else model.readout.of_rows
        trace.logits = read(steps.h, layout)
    return trace


def blank_image(
    model: ImageModel,
    size: Size,
    blank: Blank | Tensor = "white",
    *,
    seed: int = 0,
    count: int = 1,
) -> Tensor:
    """A normalised blank [1, 3, H, W] on the model's device; the same object for the same blank, so
    that its run can be kept. `blank` may be one for each of `count` images: [count, 3, H, W]."""
    channels = len(model.preprocess.mean)
    if isinstance(blank, Tensor):
        shape = (channels, *size)
        if blank.shape[-3:] != shape or blank.shape[:-3] not in ((), (1,), (count,)):
            each = f", or one for each image: {[count, *shape]}" if count > 1 else ""
            raise BadImage(
                f"blank of shape {list(blank.shape)}",
                f"expected {[1, *shape]}, normalised like the images{each}",
                "resize it",
            )
        if blank.ndim == 4 and len(blank) > 1:
            return blank.detach().to(model.device, model.dtype)
        pixels = wide(blank).detach().cpu().contiguous()
        content = digest(pixels.numpy().tobytes())
        key: tuple[Any, ...] = (content, size, model.dtype, model.device)
    elif blank in get_args(Blank):
        key = (blank, size, seed, model.preprocess, model.dtype, model.device)
    else:
        raise BadOption("blank", blank, f"one of {', '.join(get_args(Blank))}, or a tensor")
    made: dict[tuple[Any, ...], Tensor] = model.memo.setdefault("blank images", {})
    if key not in made:
        if len(made) >= _KEPT:
            made.pop(next(iter(made)))
        shape = (1, channels, *size)
        with torch.inference_mode(False):  # so that it can be used outside such a block, too
            drawn = pixels if isinstance(blank, Tensor) else _draw(model, shape, blank, seed)
            made[key] = drawn.reshape(shape).to(model.device, model.dtype, copy=True)
    return made[key]


def _draw(model: ImageModel, shape: tuple[int, ...], blank: Blank, seed: int) -> Tensor:
    """A normalised blank in float64 on the CPU."""
    if blank in ("white", "black"):
        level = torch.full(shape, float(blank == "white"), dtype=torch.float64)
        return model.preprocess.normalise(level)
    if blank == "mean":
        return torch.zeros(shape, dtype=torch.float64)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if blank == "noise":
        return noise
    from torchvision.transforms.functional import gaussian_blur  # a second to import

    sigma = max(shape[-2:]) / 28
    reach = round(2 * sigma)
    soft = gaussian_blur(noise, [2 * reach + 1] * 2, [sigma] * 2)
    return (soft - soft.mean()) / soft.std()


@torch.inference_mode(False)
@torch.no_grad()
def blank_trace(
    model: VisionModel, blank: Tensor, *, states: Collection[int], kv: Collection[int]
) -> Trace:
    """The recorded run of a blank image [1, 3, H, W], kept in the model's memo while neither the
    image nor the model changes."""
    known: dict[Any, tuple[Tensor, Trace]] = model.memo.setdefault("blanks", {})
    key = (model.state_key(), id(blank), blank._version)
    states, kv = set(states), set(kv)
    if key in known:
        held = known[key][1]
        if states <= set(held.states) and kv <= set(held.kv):
            return held
        states, kv = states | set(held.states), kv | set(held.kv)  # the cached values are kept
    trace = record(model, blank, states=states, kv=kv)
    for old in [old for old in known if old[0] != key[0]]:  # recorded with other weights
        del known[old]
    while key not in known and len(known) >= _KEPT // 2:
        known.pop(next(iter(known)))
    known[key] = (blank, trace)  # the blank is kept alive, so that its id means the same pixels
    return trace


def enter(model: VisionModel, images: Tensor) -> tuple[Tensor, At]:
    """What enters the first block [B, T, D], and at which tokens; as many images at a time as
    fit."""
    size = fit(len(images), model.forward_bytes(model.check(images)), images.device)

    def run_images(a: int, b: int) -> tuple[Tensor, At]:
        return model.embed(images[a:b]), model.at(images[a:b])

    parts = list(in_chunks(run_images, len(images), size, what="images"))
    facts = [at.facts for _, at in parts if at.facts is not None]
    return torch.cat([h for h, _ in parts]), parts[0][1].with_facts(lambda _: torch.cat(facts))


def suffix(model: VisionModel, h: Tensor, at: At, start: int) -> Tensor:
    """Logits of states h [B, T, D] that enter block `start` (0-based)."""
    if start >= model.n_layers:
        return model.readout(h, at.layout)
    steps = walk(model, h, at, start=start, last=model.readout.rows(at.layout))
    return model.readout.of_rows(steps.end(), at.layout)


def trace_bytes(model: VisionModel, layout: TokenLayout) -> int:
    """Memory that recording every key and value of one image takes (queries stay alive beside
    packed projections)."""
    element = torch.finfo(model.dtype).bits // 8
    return sum(
        layout.tokens * (b.heads + 2 * b.kv_heads) * b.head_dim * element for b in model.blocks
    )


def kept_logits(model: VisionModel, h0: Tensor, keep: Tensor, at: At, *, start: int = 0) -> Tensor:
    """Logits [B, C] of tokens h0 [B, T, D] that enter block `start`, whose patches outside keep [B,
    N] (bool) are dropped. Images that keep equally many patches run together."""
    layout, counts = at.layout, keep.sum(dim=1)
    prefix = torch.arange(layout.prefix, device=keep.device).expand(len(keep), -1)
    patches = (~keep).byte().argsort(dim=1, stable=True) + layout.prefix  # kept ones first
    order, parts = [], []
    for count in counts.unique().tolist():
        images = (counts == count).nonzero()[:, 0]
        index = torch.cat([prefix, patches[:, :count]], dim=1)[images]  # [b, R]
        h = h0[images].gather(1, index[..., None].expand(-1, -1, h0.shape[-1]))
        steps = walk(model, h, at.of(images).take(index), start=start)
        parts.append(model.readout(steps.end(), layout))
        order.append(images)
    return torch.cat(parts)[torch.cat(order).argsort()]


def kept_logits_each(model: VisionModel, images: Tensor, keep: Tensor) -> Tensor:
    """Logits [B, M, C] for M choices keep [B, M, N] of patches for each image; images and choices
    run together, as many as fit."""
    layout, (h0, at) = model.check(images), enter(model, images)
    batch, many = keep.shape[:2]
    share = int(keep.sum(dim=-1).max()) + layout.prefix
    each = model.forward_bytes(layout) * share // layout.tokens

    def run_chunk(a: int, b: int) -> Tensor:
        item = torch.arange(a, b, device=images.device)  # of B * M
        image = item // many
        return kept_logits(model, h0[image], keep[image, item % many], at.of(image))

    what = "choices of patches"
    logits = run_in_chunks(run_chunk, batch * many, each, images.device, what=what)
    return logits.unflatten(0, (batch, many))


class Explicit(NamedTuple):
    """Logits [B, C] as a differentiable function of the probabilities, each [B, H, T, T] (of a pool
    [B, H, Q, T]), in order of depth."""

    logits: Tensor
    probs: list[Tensor]


def explicit_run(model: VisionModel, images: Tensor, *, start: int = 0) -> Explicit:
    """Run with explicit attention from number `start` on. Earlier blocks use fused attention,
    without a graph."""
    layout = model.check(images)
    at = model.at(images)
    with torch.no_grad():
        h = _run_to(model, images, at, start)
    h = h.detach().requires_grad_(torch.is_grad_enabled())
    probs: list[Tensor] = []
    steps = walk(model, h, at, start=start)
    for step in steps:
        probs.append(probabilities(step))
        step.o = weigh(probs[-1], step.v)
    if model.readout.latent is None:
        return Explicit(model.readout(steps.h, layout), probs)
    weights, v = pool_probabilities(model, steps.h, layout)
    return Explicit(pool_logits(model, weights, v), [*probs, weights])


@torch.no_grad()
def attention_probs(model: VisionModel, images: Tensor, *, start: int = 0) -> Iterator[Tensor]:
    """The probabilities of every attention from number `start` on, one at a time."""
    layout = model.check(images)
    at = model.at(images)
    steps = walk(model, _run_to(model, images, at, start), at, start=start)
    for step in steps:
        probs = probabilities(step)
        yield probs
        step.o = weigh(probs, step.v)
    if model.readout.latent is not None:
        yield pool_probabilities(model, steps.h, layout)[0]


def n_attentions(model: VisionModel) -> int:
    """The number of attentions: blocks, and the latent pool if there is one."""
    return model.n_layers + (model.readout.latent is not None)


def probabilities(step: Step) -> Tensor:
    """The attention probabilities of a block, [B, H, R, K]."""
    return attention_weights(step.q, Bank(step.k, step.v, bias=step.bias), scale=step.block.scale)


def weigh(probs: Tensor, v: Tensor) -> Tensor:
    """Probabilities [B, H, R, K] of values [B, Hkv, K, dh] -> head outputs [B, R, H, dh]."""
    shared = probs.shape[1] // v.shape[1]
    v = v if shared == 1 else v.repeat_interleave(shared, dim=1)
    return (probs.to(v.dtype) @ v).transpose(1, 2)


def pool_probabilities(model: VisionModel, h: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
    """Final states h [B, T, D] -> the latent pool's probabilities [B, H, Q, T] and values [B, H, T,
    dh]."""
    readout, pool = model.readout, model.readout.latent
    assert pool is not None
    k, v = pool.kv(readout.norm(h)[:, readout.averaged(layout)])
    q = pool.query().expand(len(h), -1, -1, -1)
    unread = layout.tokens - k.shape[-2]
    weights = attention_weights(q, Bank(k, v), scale=pool.scale)
    return F.pad(weights, (unread, 0)), F.pad(v, (0, 0, unread, 0))


def pool_logits(model: VisionModel, probs: Tensor, v: Tensor) -> Tensor:
    """Logits [B, C] from the latent pool's probabilities and values."""
    assert model.readout.latent is not None
    return model.readout.head(model.readout.latent.finish(weigh(probs, v)))


def read_rows(model: VisionModel, layout: TokenLayout, attention: Tensor) -> Tensor:
    """The rows of attention [..., R, T] that the logits are read from, as one row [..., T].

    The class token's row; the mean of the class and distillation rows; the mean over averaged
    tokens; for class + mean, half of each. The classifier may weigh these parts differently, which
    attention does not show. The rows of a latent pool (R = Q) are averaged.
    """
    if model.readout.latent is not None:
        return attention.mean(dim=-2)
    weights = attention.new_zeros(layout.tokens)
    special, mean = list(model.readout.read_prefix(layout)), model.readout.averaged(layout)
    parts = len(special) + model.readout.has_mean
    weights[special] = 1 / parts
    if model.readout.has_mean:
        weights[mean] += 1 / parts / (mean.stop - mean.start)
    return weights @ attention


def _run_to(model: VisionModel, images: Tensor, at: At, start: int) -> Tensor:
    """States that enter block `start`."""
    if not 0 <= start < (count := n_attentions(model)):
        raise BadOption("start", start, f"0-{count - 1}, the index of the first attention to use")
    return walk(model, model.embed(images), at, stop=start).end()


def walk_back(model: VisionModel, layout: TokenLayout, steps: list[Tensor]) -> Tensor:
    """Row [B, T] of (I + S_L) ... (I + S_1) that is read out, for steps S [B, T, T] in order of
    depth: from the last to the first, a row at a time.

    A latent pool's step comes last and has no identity beside it: its query is no token.
    """
    if model.readout.latent is None:
        eye = torch.eye(layout.tokens, dtype=steps[0].dtype, device=steps[0].device)
        row = read_rows(model, layout, eye).expand(len(steps[0]), -1)
    else:
        *steps, pool = steps
        row = read_rows(model, layout, pool)
    for step in reversed(steps):
        row = row + (row[:, None] @ step)[:, 0]
    return row


def special_rows(model: VisionModel, layout: TokenLayout) -> range:
    """The special tokens that are computed under every mask: all of them, where one is read."""
    read = bool(model.readout.read_prefix(layout)) or model.readout.over_prefix
    return range(layout.prefix if read else 0)


@torch.no_grad()
def need_gradients(
    model: ImageModel,
    name: str,
    *,
    remedy: str = "Use method='caap', which takes no gradient",
) -> None:
    """Raises if a submodule returns a tensor that is detached from the graph (as quantised layers
    do). Gradients would still flow through the residual connection, so that results would be wrong
    without an error. Each state of the model is checked once."""
    if not isinstance(model, VisionModel):
        return
    key = model.state_key()
    if model.memo.get("passes gradients") == key:
        return
    blank = blank_image(model, model.preprocess.size)
    state, at = model.embed(blank), model.at(blank)  # other libraries' hooks may expect all rows
    part = part_without_gradient(model.blocks, state, at)
    with torch.enable_grad():
        h = state.detach().clone().requires_grad_()
        if part is None and not model.readout(h, at.layout).requires_grad:
            part = "readout"
    if part is not None:
        reason = f"no gradient passes the {part} of {model.name}, as in quantised layers"
        raise NotDefined(name, reason, remedy)
    model.memo["passes gradients"] = key


def part_without_gradient(blocks: Sequence[Block], state: Tensor, at: At) -> str | None:
    """Returns the name of the first submodule whose output has no gradient, or None. `state`
    [1, R, D] is the test input."""
    with torch.inference_mode(False), torch.enable_grad():
        h = state.detach().clone().requires_grad_()
        for block in blocks:
            q, k, v = block.qkv(h, at)
            o = v.detach().repeat_interleave(block.heads // block.kv_heads, dim=1).transpose(1, 2)
            after = block.finish(h.detach(), o.requires_grad_()) - h.detach()
            parts = {"queries": q, "keys": k, "values": v, "output": after, "MLP": block.feed(h)}
            for part, result in parts.items():
                if not result.requires_grad and bool(result.any()):  # zeros lose nothing
                    return f"{part} of {block.name}"
    return None
