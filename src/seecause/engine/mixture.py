"""Runs between two runs: rows that read a mixture of a picture's keys and a blank's.

A mask m in [0, 1]^N weighs every patch's two keys inside one softmax (spec: mosaic):

    scores of the picture's key i + log m_i,   scores of the blank's key i + log(1 - m_i)

m = 1 is the picture's run, m = 0 the blank's, and m in {0, 1} are the token sets of `Sweep`;
between them the answer can be differentiated. What is computed anew for each mask:

    source   the special tokens (class, distillation, registers), and the readout: final patch
             states enter an average as m_i x_i + (1 - m_i) b_i, an attention pool by their two keys
    all      every token, from states mixed as m_i x_i + (1 - m_i) b_i at layer `start`: one whole
             run for each mask
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seecause.engine.attend import Bank, Groups, Own, attend, attend_groups
from seecause.engine.blanks import blank_image
from seecause.engine.chunks import in_chunks
from seecause.engine.trace import Trace, suffix
from seecause.engine.walk import walk
from seecause.errors import NotDefined
from seecause.models.base import ImageModel
from seecause.models.block import Block
from seecause.models.layout import At, TokenLayout
from seecause.models.view import VisionModel
from seecause.types import wide

MixedTail = Literal["source", "all"]
Scores = Callable[[Tensor], Tensor]  # logits [B, n, C] -> what is differentiated, [B, n]


@dataclass(eq=False)
class Mixture:
    """Two recorded runs and what lies between them; `blank` may serve all images with batch 1.
    Needs the blank's state `start`; for all, the picture's, too; for source, keys and values from
    block `start` on, and both final states where more than rows are read."""

    model: VisionModel
    blank: Trace
    picture: Trace
    tail: MixedTail = "source"
    start: int = 0

    def logits(self, masks: Tensor) -> Tensor:
        """Masks [B, n, N] in [0, 1] -> logits [B, n, C], differentiable in the masks."""
        if self.tail == "all":
            return self._recompute(masks)
        live = special_rows(self.model, self.picture.layout)
        z = self._special(masks, live) if live else masks.new_zeros(*masks.shape[:2], 0, 0)
        return self._read(masks, z)

    def _special(self, masks: Tensor, live: range) -> Tensor:
        """The special tokens under each mask from state `start` to the end, [B, n, p, D]."""
        batch, count, p = len(masks), masks.shape[1], len(live)
        z = self.blank.states[self.start][:, live.start : live.stop]
        z = z.repeat(1, count, 1).expand(batch, -1, -1)  # [B, n * p, D]
        groups = Groups.even(count, p, z.device)
        at = self.blank.at.take(torch.arange(p, device=z.device).repeat(count))
        weights = _log_weights(masks.repeat_interleave(p, dim=1))
        first = self.picture.layout.prefix
        steps = walk(self.model, z, at, start=self.start)
        for step in steps:
            bias = step.block.bias(step.at, self.blank.at)
            bias = None if bias is None else bias[..., first:]
            banks = [
                _weighted(trace.kv[step.index], weight if bias is None else weight + bias, first)
                for trace, weight in zip((self.blank, self.picture), weights, strict=True)
            ]
            attend_groups(step, banks, groups, groups)
        return steps.h.unflatten(1, (count, p))

    def _read(self, masks: Tensor, special: Tensor) -> Tensor:
        """Logits [B, n, C] from special tokens [B, n, p, D] and the final states of both runs."""
        readout, layout = self.model.readout, self.picture.layout
        normed = special
        if special.numel():
            normed = readout.norm(special.flatten(1, 2)).unflatten(1, special.shape[1:3])
        if readout.latent is not None:
            return self._read_latent(masks, normed)
        parts = [normed[:, :, t] for t in readout.read_prefix(layout)]
        if readout.has_mean:
            blank, picture = (wide(x) for x in self._final_patches())
            total = blank.sum(dim=1, keepdim=True) + masks @ picture - masks @ blank  # [B, n, D]
            count = layout.n_patches
            if readout.over_prefix:
                total, count = total + wide(normed).sum(dim=2), count + layout.prefix
            parts.append((total / count).to(self.model.dtype))
        return readout.head(torch.cat(parts, dim=-1))

    def _read_latent(self, masks: Tensor, normed: Tensor) -> Tensor:
        """The pool's queries are the rows: they read both runs' final keys under every mask."""
        readout, pool = self.model.readout, self.model.readout.latent
        assert pool is not None
        batch, count = masks.shape[:2]
        queries = pool.query()
        each = queries.shape[2]
        weights = _log_weights(masks.repeat_interleave(each, dim=1))
        banks = [
            _weighted(pool.kv(states), weight)
            for states, weight in zip(self._final_patches(), weights, strict=True)
        ]
        own = None
        if readout.over_prefix and normed.numel():
            asking, telling = (
                Groups.even(count, size, masks.device) for size in (each, normed.shape[2])
            )
            own = Own(*pool.kv(normed.flatten(1, 2)), asking, telling)
        q = queries.repeat(1, 1, count, 1).expand(batch, -1, -1, -1)
        o, _ = attend(q, banks, own, scale=pool.scale)
        pooled = pool.finish(o.unflatten(1, (count, each)).flatten(0, 1))
        return readout.head(pooled).unflatten(0, (batch, count))

    def _final_patches(self) -> tuple[Tensor, Tensor]:
        """Normed patch states that the readout reads: the blank's [1, N, D], the picture's."""
        final, patches = self.model.n_layers, self.picture.layout.patches
        norm = self.model.readout.norm
        blank, picture = (norm(run.states[final]) for run in (self.blank, self.picture))
        return blank[:, patches], picture[:, patches]

    def _recompute(self, masks: Tensor) -> Tensor:
        if self.picture.at.facts is not None:
            raise NotDefined(
                "mosaic with tail=all",
                "blocks of this model hide keys by facts about tokens, which cannot be mixed",
                "Use tail='source'",
            )
        blank, picture = self.blank.states[self.start], self.picture.states[self.start]
        layout = self.picture.layout
        share = masks.to(picture.dtype)[..., None]  # [B, n, N, 1]
        ground = blank[:, None, layout.patches]
        mixed = ground + share * (picture[:, None, layout.patches] - ground)
        special = blank[:, None, : layout.prefix].expand(*mixed.shape[:2], -1, -1)
        states = torch.cat([special, mixed], dim=2).flatten(0, 1)
        return suffix(self.model, states, self.blank.at, self.start).unflatten(0, masks.shape[:2])


def special_rows(model: VisionModel, layout: TokenLayout) -> range:
    """The special tokens that are computed under every mask: all of them, where one is read."""
    read = bool(model.readout.read_prefix(layout)) or model.readout.over_prefix
    return range(layout.prefix if read else 0)


def slopes(run: Mixture, masks: Tensor, score: Scores, *, together: int) -> Tensor:
    """Derivatives [B, n, N] of scores [B, n] at masks [n, N], the same for every image; `together`
    masks at a time."""

    def some_masks(a: int, b: int) -> Tensor:
        with torch.enable_grad():
            mixed = masks[a:b].expand(run.picture.batch, -1, -1).clone().requires_grad_()
            total = score(run.logits(mixed)).sum()  # images do not see each other
            return torch.autograd.grad(total, mixed)[0]

    return torch.cat(list(in_chunks(some_masks, len(masks), together, what="masks")), dim=1)


def mask_bytes(model: VisionModel, layout: TokenLayout, tail: MixedTail) -> int:
    """What one mask of one image holds for its step back: every block's activations of its rows."""
    if tail == "all":
        return (model.n_layers + 1) * model.forward_bytes(layout)
    block, element = model.blocks[0], torch.finfo(model.dtype).bits // 8
    rows = max(1, len(special_rows(model, layout)))
    scores = block.heads * layout.n_patches * 2 * max(4, element) * 5  # where attention is explicit
    return model.n_layers * rows * (block.heads * block.head_dim * element * 24 + scores)


@torch.no_grad()
def need_gradients(
    model: ImageModel,
    name: str,
    *,
    start: int = 0,
    remedy: str = "Use method='caap', which takes no gradient",
) -> None:
    """Refuse a model of which some part from block `start` on returns what has no gradient: a
    residual path passes one around it, so that results would be wrong without an error. Each state
    of the model is checked once."""
    if not isinstance(model, VisionModel):
        return
    key = model.state_key()
    known, least = model.memo.get("passes gradients", (None, 0))
    if known == key and least <= start:
        return
    blank = blank_image(model, model.preprocess.size)
    state, at = model.embed(blank), model.at(blank)  # hooks of others may expect all rows
    try:
        part = part_without_gradient(model.blocks[start:], state, at)
        with torch.enable_grad():
            h = state.detach().clone().requires_grad_()
            if part is None and not model.readout(h, at.layout).requires_grad:
                part = "readout"
    except RuntimeError as failure:
        if "Inference tensors" not in str(failure):
            raise
        reason = f"weights of {model.name} were made under torch.inference_mode"
        raise NotDefined(name, reason, remedy) from failure
    if part is not None:
        reason = f"no gradient passes the {part} of {model.name}, as in quantised layers"
        raise NotDefined(name, reason, remedy)
    model.memo["passes gradients"] = (key, start)


def part_without_gradient(blocks: Sequence[Block], state: Tensor, at: At) -> str | None:
    """The first part of a block that no gradient passes, tried with rows [1, R, D]."""
    with torch.inference_mode(False), torch.enable_grad():
        h = state.detach().clone().requires_grad_()
        for block in blocks:
            q, k, v = block.qkv(h, at)
            o = v.detach().repeat_interleave(block.heads // block.kv_heads, dim=1).transpose(1, 2)
            after = block.finish(h.detach(), o.requires_grad_())
            parts = {"queries": q, "keys": k, "values": v, "output": after, "MLP": block.feed(h)}
            for part, result in parts.items():
                if not result.requires_grad and bool(result.any()):  # zeros lose nothing
                    return f"{part} of {block.name}"
    return None


def _log_weights(masks: Tensor) -> tuple[Tensor, Tensor]:
    """Masks [B, R, N] -> log(1 - m) and log m, [B, 1, R, N] each: of the blank, of the picture."""
    spread = wide(masks)[:, None]
    return torch.log1p(-spread), torch.log(spread)


def _weighted(kv: tuple[Tensor, Tensor], weight: Tensor, first: int = 0) -> Bank:
    """Keys and values from token `first` on, with log-weights."""
    return Bank(kv[0][:, :, first:], kv[1][:, :, first:], bias=weight)
