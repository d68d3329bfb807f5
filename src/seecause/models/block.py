"""The layout of tokens, and a transformer block that is split where interventions happen.

    qkv -> attend -> finish

Nothing is re-implemented: every field holds a native module, or a short chain of native modules.
Both halves work on any set of rows (tokens), so an engine can run a few rows against keys of
another run.

A block may read facts about tokens beside their states (`At.facts`) and hide keys by them, token by
token and head by head. Keys get an extra channel with 0 or a large negative number, and queries
a 1 there, so hidden keys have weight 0 exactly:

    q' = [q, 1, 0 ...],    k' = [k, 0 or HIDDEN, 0 ...],    v' = [v, 0 ...]

So visibility is part of the keys, also in other runs that use them, and fused attention works.

`slice_heads` cuts heads out of the attention of a native block, in place: rows of Q, K and V and
columns of O. The bias of O belongs to no head and stays. Projections are found by structure, since
releases rename them:

    packed qkv        timm
    q, k, v apart     transformers, timm without fusion
    in_proj_weight    `nn.MultiheadAttention` (torchvision, open_clip), which fixes its own width,
                      so that `Packed` takes its place
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.errors import UnsupportedModel

Size = tuple[int, int]  # height and width
Fn = Callable[[Tensor], Tensor]
Named = dict[str, Any]  # options and other values by name


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """A tensor in its `wide_dtype`."""
    return x.to(wide_dtype(x.dtype))


def span(tokens: Sequence[int]) -> slice | list[int]:
    """Neighbouring tokens as a slice: an index by a list is copied from the host."""
    start, stop = (tokens[0], tokens[0] + len(tokens)) if tokens else (0, 0)
    return slice(start, stop) if list(tokens) == list(range(start, stop)) else list(tokens)


def pair(side: int | Sequence[int]) -> Size:
    """Height and width as configs of transformers write them: one number is both."""
    return (side, side) if isinstance(side, int) else (side[0], side[1])


def pixel_cells(pixels: int, cells: int, device: torch.device | str = "cpu") -> Tensor:
    """Which of so many cells each pixel of a side lies in, [pixels]."""
    return torch.arange(pixels, device=device) * cells // pixels


def spread_out(patches: Tensor, size: Size) -> Tensor:
    """Values of patches [m, gh, gw] at their pixels [m, H, W]."""
    rows, columns = (
        pixel_cells(side, cells, patches.device)
        for cells, side in zip(patches.shape[1:], size, strict=True)
    )
    return patches[:, rows[:, None], columns]


@dataclass(frozen=True)
class TokenLayout:
    """The order of tokens: `prefix` special ones, then the patch grid row by row.

    For video, `grid` stacks the grids of all time steps vertically; `times` is their number.
    `class_index`, `distill_index` and `registers` are positions inside the prefix.
    """

    grid: Size
    prefix: int
    class_index: int | None = None
    distill_index: int | None = None
    registers: tuple[int, ...] = ()
    times: int = 1

    @property
    def cells(self) -> tuple[int, ...]:
        """The shape of maps: rows and columns; of a film times, rows and columns."""
        if self.times == 1:
            return self.grid
        return (self.times, self.grid[0] // self.times, self.grid[1])

    @property
    def n_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        return self.prefix + self.n_patches

    @property
    def patches(self) -> slice:
        return slice(self.prefix, self.tokens)

    @staticmethod
    def of_cells(cell: Size) -> Callable[[int, int], TokenLayout]:
        """`layout_at` of images that are cut into cells of so many pixels."""
        return lambda height, width: TokenLayout((height // cell[0], width // cell[1]), prefix=0)

    @staticmethod
    def of_special(grid: Size, special: int, registers: int = 0) -> TokenLayout:
        """A layout whose `special` tokens (class, distillation) and then registers come first."""
        return TokenLayout(
            grid,
            prefix=special + registers,
            class_index=0 if special else None,
            distill_index=1 if special > 1 else None,
            registers=tuple(range(special, special + registers)),
        )

    def at(self, device: torch.device | str = "cpu") -> At:
        """The positions of the whole sequence, in order."""
        return At(torch.arange(self.tokens, device=device), self)


@dataclass(frozen=True, eq=False)
class At:
    """The tokens of some rows: index [R] or [B, R] into the sequence of `layout`.

    `memo` lets rotary tables be computed once per run; rows taken from one run share it. `facts`
    are properties of the tokens of each image that blocks may use beside their states.
    """

    index: Tensor
    layout: TokenLayout
    memo: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    facts: Tensor | None = None  # [1|B, T, F], of the whole sequence

    def take(self, index: Tensor) -> At:
        """Other rows of the same run."""
        return replace(self, index=index)

    @cached_property
    def row_facts(self) -> Tensor:
        """The facts of these rows, [1|B, R, F]."""
        assert self.facts is not None, "blocks ask for facts, and the run has none"
        if self.index.ndim == 1:
            return self.facts[:, self.index]
        images = torch.arange(len(self.index), device=self.index.device) % len(self.facts)
        return self.facts[images[:, None], self.index]

    def with_facts(self, change: Callable[[Tensor], Tensor]) -> At:
        """These rows with other facts, if there are any."""
        return self if self.facts is None else replace(self, facts=change(self.facts))

    def of(self, images: Tensor | slice) -> At:
        """These rows of some of the images."""
        return self.with_facts(lambda facts: facts if len(facts) == 1 else facts[images])

    def copies(self, count: int) -> At:
        """These rows of `count` copies of all images, one copy after the other."""
        return self.with_facts(lambda facts: facts.repeat(count, 1, 1))

    def where(self, mark: Tensor, other: At) -> At:
        """The other run's facts for tokens that are marked [T] or [B, T]."""
        theirs = other.facts
        if theirs is None:
            return self
        return self.with_facts(lambda facts: torch.where(mark[..., None], theirs, facts))


# ---------------------------------------------------------------- blocks

Project = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
LANES = 8  # extra channels: fused kernels need head widths that are multiples of 8


def same(x: Tensor) -> Tensor:
    """The identity, for steps that a block lacks."""
    return x


def chain(*steps: Fn) -> Fn:
    """Native modules in sequence, without identities."""
    steps = tuple(step for step in steps if not isinstance(step, nn.Identity))

    def run(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return run


def mean_of_halves(first: Fn, second: Fn) -> Fn:
    """Two classifiers, each of one half of the pooled features, averaged."""

    def read(pooled: Tensor) -> Tensor:
        left, right = pooled.chunk(2, dim=-1)
        return (first(left) + second(right)) / 2

    return read


def spliced(module: nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> nn.Module:
    """A copy of `module` that shares every weight, in which modules run other functions. The module
    itself stays as it is, so that threads may share it."""
    top = shell(module)
    for path, forward in forwards.items():
        here = top
        for name in path.split("."):
            here._modules[name] = inner = shell(here._modules[name])
            here = inner
        here.forward = forward
    return top


def shell(module: nn.Module | None) -> nn.Module:
    """A shallow copy whose children can be replaced without changing the module."""
    assert module is not None
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


def first_or_none(module: Any, *names: str) -> Any:
    """The first attribute that exists, under any of the names it has had; dots reach inside."""
    for name in names:
        part = module
        for step in name.split("."):
            part = getattr(part, step, None)
        if part is not None:
            return part
    return None


def times(owner: Any, name: str) -> Fn:
    """Multiplication by a parameter that may be absent, read at each call so that edits are
    seen."""
    return lambda x: x if getattr(owner, name) is None else getattr(owner, name) * x


@dataclass(eq=False)
class Block:
    """A block `h + scale1(mix(attention(norm(h))))`, then `+ feed(.)` of that (or, in `parallel`,
    of h), in native parts.

    `native` is the module whose output must equal this block's output; `verify` puts a forward hook
    on it. Its weights are in `owner`.
    """

    name: str
    native: nn.Module
    heads: int
    head_dim: int
    scale: float
    project: Project  # [B, R, D] -> q [B, R, H, dh], k, v [B, R, Hkv, dh]
    mix: Fn  # output projection, [B, R, H*dh] -> [B, R, D]
    feed: Fn  # the whole MLP branch with its norm and LayerScale, [B, R, D] -> [B, R, D]
    kv_heads: int = 0  # 0: as many as heads
    norm: Fn = same  # before attention; identity in post-norm blocks
    q_norm: Fn = same  # on the last axis, per head
    k_norm: Fn = same
    rotate: Callable[[Tensor, At], Tensor] | None = None  # [B, H, R, dh] and its positions
    additive: Callable[[At, At], Tensor | None] | None = None  # attention bias for (rows, keys)
    # extra channels of queries and keys, [1|B, R, 1|H, n] each, from the facts [B, R, F] of tokens
    lanes: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    sub_norm: Fn = same  # between heads and output projection, [B, R, H*dh]
    branch: Fn = same  # LayerScale or post-norm of the attention branch
    parallel: bool = False  # the MLP branch reads the block's input, not the attention's output
    # the module that owns the weights, if `native` is only a hook point (`nn.Identity`)
    holder: nn.Module | None = None

    def __post_init__(self) -> None:
        self.kv_heads = self.kv_heads or self.heads

    @property
    def owner(self) -> nn.Module:
        """The native block whose weights these are."""
        return self.native if self.holder is None else self.holder

    def qkv(self, h: Tensor, at: At) -> tuple[Tensor, Tensor, Tensor]:
        """Rows h [B, R, D] -> q [B, H, R, dh], k and v [B, Hkv, R, dh], after every norm and
        rotation; unscaled."""
        q, k, v = self.unrotated(h)
        if self.rotate is not None:
            q, k = self.rotate(q, at), self.rotate(k, at)
        if self.lanes is not None:
            asking, telling = self.lanes(at.row_facts)
            q, k, v = _beside(q, asking), _beside(k, telling), F.pad(v, (0, LANES))
        return q, k, v

    def unrotated(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`qkv` before rotation, where keys of different positions can be averaged."""
        q, k, v = self.project(self.norm(h))
        return self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)

    def bias(self, rows: At, keys: At) -> Tensor | None:
        """The bias of the scores of `rows` against `keys`: [1|B, 1|H, R, K], or None."""
        return None if self.additive is None else self.additive(rows, keys)

    def finish(self, h: Tensor, o: Tensor, gate: Tensor | None = None) -> Tensor:
        """Rows h [B, R, D] and their head outputs o [B, R, H, dh] -> the block's output [B, R, D].

        `gate`, broadcast to [B, R, H], multiplies each head at the input of the output projection.
        """
        return self.close(h, self.carried(h, o), gate)

    def carried(self, h: Tensor, o: Tensor) -> Tensor:
        """The input of each head to the output projection, [B, R, H, dh]: the first half of
        `finish`. Zeroing it removes the head exactly."""
        if self.lanes is not None:
            o = o[..., : self.head_dim]
        return self.sub_norm(o.flatten(2)).unflatten(2, (self.heads, self.head_dim))

    def close(self, h: Tensor, carried: Tensor, gate: Tensor | None = None) -> Tensor:
        """The second half of `finish`: rows h [B, R, D] and inputs of their heads to the output
        projection [B, R, H, dh] -> the block's output [B, R, D]."""
        carried = carried if gate is None else carried * gate[..., None]
        middle = h + self.branch(self.mix(carried.flatten(2)))
        return middle + self.feed(h if self.parallel else middle)

    def __call__(self, h: Tensor, at: At, gate: Tensor | None = None) -> Tensor:
        """The plain block: all rows attend to all rows, with the fused kernel."""
        q, k, v = self.qkv(h, at)
        o = fused(q, k, v, self.scale, self.bias(at, at))
        return self.finish(h, o, gate)


def _beside(x: Tensor, lanes: Tensor) -> Tensor:
    """[B, H, R, dh] and [1|B, R, 1|H, n] -> [B, H, R, dh + LANES]."""
    lanes = F.pad(lanes.to(x.dtype).transpose(1, 2), (0, LANES - lanes.shape[-1]))
    return torch.cat([x, lanes.expand(*x.shape[:-1], LANES)], dim=-1)


def fused(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Plain attention of q [B, H, R, dh] on k, v [B, Hkv, K, dh] -> [B, R, H, dh]."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped
    ).transpose(1, 2)


HIDDEN = -3e4  # within the range of float16; exp(scale * HIDDEN) is exactly 0


def hiding(block: Block, hides: Callable[[Tensor], Tensor] = same) -> Block:
    """`block` without the keys that `hides` names: it turns facts [B, R, F] (bool) into hidden keys
    [B, R, 1 or Hkv]."""

    def lanes(facts: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hides(facts).float()[..., None] * HIDDEN  # [B, R, 1 or Hkv, 1]
        return torch.ones_like(hidden[..., :1, :]), hidden

    return replace(block, lanes=lanes)


def apart(q: Fn, k: Fn, v: Fn, head_dim: int) -> Project:
    """`Block.project` of three layers."""

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (-1, head_dim)
        return q(x).unflatten(-1, shape), k(x).unflatten(-1, shape), v(x).unflatten(-1, shape)

    return project


def packed(attention: Any) -> Named:
    """Arguments of `Block` for `nn.MultiheadAttention` and its subclasses. These never call their
    output projection as a module, so hooks there never fire; weights are read at each call."""
    return {
        "heads": attention.num_heads,
        "head_dim": attention.head_dim,
        "scale": attention.head_dim**-0.5,
        "project": partial(project_packed, attention, 0, 3),
        "mix": partial(mix_packed, attention),
    }


def project_packed(attention: Any, start: int, stop: int, x: Tensor) -> tuple[Tensor, ...]:
    """Rows [B, R, D] -> those of q, k and v from `start` to before `stop`, [B, R, H, dh] each."""
    heads, width = attention.num_heads, attention.head_dim
    part = slice(start * heads * width, stop * heads * width)
    bias = attention.in_proj_bias
    rows = F.linear(x, attention.in_proj_weight[part], None if bias is None else bias[part])
    return rows.unflatten(-1, (stop - start, heads, width)).unbind(-3)


def mix_packed(attention: Any, x: Tensor) -> Tensor:
    """The output projection, [B, R, H*dh] -> [B, R, D]."""
    return F.linear(x, attention.out_proj.weight, attention.out_proj.bias)


# ---------------------------------------------------------------- attention with fewer heads

PLACES = ("attn", "attention", "self_attn", "self_attention")
QUERY, KEY, VALUE = ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")
OUTPUT = ("proj", "o_proj", "out_proj", "output.dense", "projection_layer")
# whichever a module keeps
COUNTS = ("num_heads", "num_attention_heads", "num_kv_heads", "attn_dim", "all_head_size")
ZEROED = "zero its columns of the output projection instead: ablate, or export"


def _uncut(module: nn.Module, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"cutting heads out of {type(module).__name__}", reason, ZEROED)


def find_attention(block: nn.Module) -> tuple[str, Any]:
    """The name and the module of a native block's attention."""
    for name in PLACES:
        if isinstance(getattr(block, name, None), nn.Module):
            return name, getattr(block, name)
    raise _uncut(block, "its attention is not a module of its own")


def find_output(attention: nn.Module) -> Any:
    """The output projection of an attention module."""
    projection = first_or_none(attention, *OUTPUT)
    if not isinstance(projection, nn.Linear):
        raise _uncut(attention, "no linear output projection is in it")
    return projection


def slice_heads(block: nn.Module, keep: Sequence[int]) -> None:
    """Leave only the heads `keep` (in this order) in the attention of a native block. A block that
    would lose its last head keeps one whose columns of O are zero."""
    name, attention = find_attention(block)
    norm = getattr(attention, "norm", None)
    if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
        raise _uncut(attention, "a norm before its output projection sees all heads at once")
    if type(attention).__name__ == "EvaAttention":
        raise _uncut(attention, "its forward fixes the width of all heads together")
    inner = getattr(attention, "attention", attention)  # DINOv2 keeps the output outside of it
    left, out = keep or [0], find_output(attention)
    if hasattr(inner, "in_proj_weight"):
        setattr(block, name, _packed(inner, left))
    else:
        _slice(inner, out, left)
    if not keep:
        zero_heads(block, [0], of=1)


def zero_heads(block: Any, heads: Sequence[int], *, of: int) -> None:
    """Zero the columns of the output projection that read `heads`; `of` is how many heads the block
    has. The architecture stays, and so does the bias of O."""
    weight = output_weight(block)  # [D, H * dh]
    with torch.no_grad():
        weight[:, columns(heads, weight.shape[1] // of).to(weight.device)] = 0


def columns(heads: Sequence[int], head_dim: int) -> Tensor:
    """The indices of the features of `heads` among H * dh."""
    first = torch.tensor(list(heads), dtype=torch.long)[:, None] * head_dim
    return (first + torch.arange(head_dim)).flatten()


def output_weight(block: Any) -> Tensor:
    """The weights [D, H * dh] that read a native block's heads."""
    return find_output(find_attention(block)[1]).weight


def _slice(attention: Any, out: nn.Linear, keep: Sequence[int]) -> None:
    """Rows of Q, K and V, columns of O, and the numbers a module keeps about its heads."""
    heads = int(first_or_none(attention, "num_heads", "num_attention_heads"))
    head_dim = out.in_features // heads
    kept = columns(keep, head_dim)
    if getattr(attention, "qkv", None) is not None:  # timm: rows [Q | K | V], each (H, dh)
        _keep_rows(attention.qkv, torch.cat([kept + part * out.in_features for part in range(3)]))
    else:
        for names in (QUERY, KEY, VALUE):
            layer = first_or_none(attention, *names)
            if not isinstance(layer, nn.Linear) or layer.out_features != out.in_features:
                raise _uncut(attention, "its query, key and value projections are not as expected")
            _keep_rows(layer, kept)
    _keep_columns(out, kept)
    for name in COUNTS:
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, getattr(attention, name) * len(keep) // heads)


class Packed(nn.Module):
    """`nn.MultiheadAttention` (batch first, self-attention) whose heads need not fill its width."""

    batch_first = True

    def __init__(
        self, weight: Tensor, bias: Tensor | None, out: nn.Linear, *, heads: int, head_dim: int
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.out_proj = heads, head_dim, out
        self.in_proj_weight = nn.Parameter(weight, requires_grad=False)  # [3 * H * dh, D]
        self.in_proj_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        q, k, v = (part.transpose(1, 2) for part in project_packed(self, 0, 3, query))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.out_proj(o.transpose(1, 2).flatten(2)), None


def _packed(attention: Any, keep: Sequence[int]) -> Packed:
    weight, bias, width = attention.in_proj_weight, attention.in_proj_bias, attention.head_dim
    kept = columns(keep, width)
    rows = torch.cat([kept + part * attention.num_heads * width for part in range(3)])
    rows = rows.to(weight.device)
    _keep_columns(attention.out_proj, kept)
    kept_bias = None if bias is None else bias[rows].clone()
    sizes = {"heads": len(keep), "head_dim": width}
    return Packed(weight[rows].clone(), kept_bias, attention.out_proj, **sizes)


def _keep_rows(layer: nn.Linear, rows: Tensor) -> None:
    rows = rows.to(layer.weight.device)
    layer.weight = nn.Parameter(layer.weight.detach()[rows].clone(), requires_grad=False)
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[rows].clone(), requires_grad=False)
    layer.out_features = len(rows)


def _keep_columns(layer: nn.Linear, kept: Tensor) -> None:
    kept = kept.to(layer.weight.device)
    layer.weight = nn.Parameter(layer.weight.detach()[:, kept].clone(), requires_grad=False)
    layer.in_features = len(kept)
