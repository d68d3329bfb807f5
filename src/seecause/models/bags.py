"""Bags of instances, as slides are read: attention pooling (ABMIL, Ilse et al. 2018) as a readout.

    a = softmax(w (tanh(V h) * sigmoid(U h))),    z = sum_i a_i h_i,    answer = classifier(z)

A bag is a picture of N rows whose pixels are instances, and its pool a latent one whose query is
constant: keys hold the scores, values the instances. So each instance is a patch, and every method
that a latent pool takes works. There is no block; one that does nothing stands in its place.

What the answer would be without an instance needs no run: z without i is (z - a_i h_i) / (1 - a_i).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.errors import BadImage, BadOption
from seecause.models.block import Block, Fn, chain, same, silent
from seecause.models.layout import TokenLayout
from seecause.models.parts import Parts
from seecause.models.signals import BagSteps
from seecause.models.view import LatentPool, VisionModel

CERTAIN = 1e-3  # the others' share of attention from which on the quotient is exact enough


@dataclass(eq=False, kw_only=True, repr=False)
class BagModel(VisionModel):
    """A view of a module that pools a bag by attention."""

    @torch.no_grad()
    def without(self, features: Tensor) -> Tensor:
        """Logits [B, N, C] of bags [B, N, D] (or one, [N, D]) without each instance in turn:
        exact, at the price of one run."""
        images = self.prepare(features)
        with self.settled():
            self.check(images)
            if images.shape[-2] < 2:
                raise BadImage("a bag of one instance", "without it nothing is left", "give more")
            pool = self.readout.latent
            assert pool is not None
            k, v = pool.kv(self.embed(images))  # [B, K, N, M]
            share = torch.softmax(k[..., 0], dim=-1)[..., None]
            whole = (share * v).sum(dim=2, keepdim=True)
            left = (whole - share * v) / (1 - share)  # [B, K, N, M]
            for b, branch, place in (share[..., 0] > 1 - CERTAIN).nonzero().tolist():
                scores = k[b, branch, :, 0].clone()
                scores[place] = -torch.inf
                left[b, branch, place] = torch.softmax(scores, dim=0) @ v[b, branch]
            rows = left.permute(0, 2, 1, 3).flatten(0, 1)  # [B * N, K, M]
            return self.readout.head(pool.finish(rows[:, None])).unflatten(0, (len(images), -1))


def bag_parts(
    module: nn.Module,
    *,
    value: nn.Module,
    weight: nn.Module,
    classifier: nn.Module,
    gate: nn.Module | None,
    encoder: nn.Module | None,
    width: int | None,
    blank: Tensor | None,
) -> Parts:
    """The parts of a module that pools by attention."""
    width = width or _width(encoder or value)
    if blank is not None and blank.numel() != width:
        raise BadOption("blank", f"{blank.numel()} features", f"one instance of {width}")
    steps = BagSteps.of_width(width, () if blank is None else blank.flatten().tolist())
    through = nn.Identity()  # what the verified wrap listens to in place of a block

    def features(images: Tensor) -> Tensor:
        return steps.raw(images)[..., 0].transpose(1, 2)  # [B, N, D]

    def embed(images: Tensor) -> Tensor:
        return features(images) if encoder is None else encoder(features(images))

    def native_logits(images: Tensor) -> Tensor:
        through(embed(images))
        return _answers(module, features(images))

    opens = None if gate is None else _activated(gate, torch.sigmoid)
    like = next(module.parameters())
    with torch.no_grad():
        row = embed(torch.zeros(1, width, 1, 1, device=like.device, dtype=like.dtype))
        pool = _pool(_activated(value, torch.tanh), opens, weight, row)

    return Parts(
        family=f"{type(module).__module__}.{type(module).__name__}",
        embed=embed,
        layout_at=TokenLayout.of_cells((1, 1)),
        blocks=[_idle(through)],
        norm=same,
        patch=(1, 1),
        native_tokens=embed,
        preprocess=steps,
        pool="latent",
        latent=pool,
        head=classifier,
        native_logits=native_logits,
        fixed_size=False,
        view=BagModel,
    )


def _pool(value: Fn, gate: Fn | None, weight: nn.Module, rows: Tensor) -> LatentPool:
    """Scores lie in the first lane of keys, which the query reads. `rows` [1, 1, M] are like those
    that come."""

    def kv(rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = value(rows) if gate is None else value(rows) * gate(rows)
        scores = weight(hidden).transpose(1, 2)[..., None]  # [B, K, N, 1]
        values = rows[:, None].expand(-1, scores.shape[1], -1, -1)
        return F.pad(scores, (0, rows.shape[-1] - 1)), values

    first = F.one_hot(torch.tensor(0), rows.shape[-1])
    branches = kv(rows)[0].shape[1]

    def query() -> Tensor:
        like = next(weight.parameters())
        return first.to(like).expand(1, branches, 1, -1)

    return LatentPool(scale=1.0, query=query, kv=kv, finish=lambda o: o[:, 0].flatten(1))


def _activated(layer: nn.Module, activation: Fn) -> Fn:
    """A bare linear layer with what follows it; anything else has it already."""
    return chain(layer, activation) if isinstance(layer, nn.Linear) else layer


def _idle(through: nn.Module) -> Block:
    """A block that adds nothing to its rows."""
    attention = silent(lambda heads: heads.new_zeros(*heads.shape[:-1], 1))
    return Block(name="blocks.0", native=through, **attention, feed=lambda x: 0 * x)


def _width(layer: nn.Module) -> int:
    for part in layer.modules():
        if isinstance(part, nn.Linear):
            return part.in_features
    raise BadOption("width", None, "how many features an instance has: no layer tells")


def _answers(module: nn.Module, bags: Tensor) -> Tensor:
    """Logits [B, C] of bags [B, N, D], one after the other where the module takes one alone."""
    return torch.cat([_answer(module, bag) for bag in bags.split(1)])


def _answer(module: nn.Module, bag: Tensor) -> Tensor:
    """Of one bag [1, N, D], which many modules take as [N, D]."""
    for features in (bag[0], bag):
        try:
            logits: Any = module(features)
        except (RuntimeError, ValueError, IndexError):
            continue
        logits = logits[0] if isinstance(logits, tuple | list) else logits
        logits = getattr(logits, "logits", logits)
        if isinstance(logits, Tensor) and (logits.ndim == 1 or logits.shape[:-1] == (1,)):
            return logits.reshape(1, -1)
    raise BadOption(
        "module", type(module).__name__, "one that takes features [N, D] and gives logits, or first"
    )
