"""Heads taken out for good: a smaller native module that answers as if they were ablated (CIGMA
section 1.8), or for as long as a block of code runs (`ablate`).

A head is multiplied by zero at the input of the output projection W_O, which is the same as zeroing
its columns of W_O, or its rows of W_V and b_V:
    W_O concat_h(o_h) + b_O = sum_h W_O[:, S_h] o_h + b_O      (section 1.7; b_O belongs to no head)

Rows of Q, K and V and columns of O go; the bias of O stays. At the usual sizes this saves little
(16 of a ViT-B/16's 144 heads are 4 % of its arithmetic): the point is a model that no longer has
the heads at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from seecause.errors import NotDefined, UnsupportedModel
from seecause.heads.scores import Head, checked_heads, gates_without
from seecause.loading import rewrap
from seecause.models.slicing import ZEROED, slice_heads, zero_heads
from seecause.models.view import VisionModel


@contextmanager
def ablate(model: VisionModel, heads: Iterable[Head]) -> Iterator[VisionModel]:
    """Inside the block, `model` answers without `heads`, pairs (layer, head) from 0: in
    `model(images)` and in every method."""
    gates = gates_without(model, heads)
    with model.gated(gates):
        yield model


def prune(model: VisionModel, heads: Iterable[Head]) -> VisionModel:
    """A verified view of a copy without `heads`, pairs (layer, head) from 0. Its `module` is
    smaller and works without this package."""
    removed = _removable(model, heads)
    check_sliceable(model)
    keep = kept_heads(model, removed)

    def cut(block: nn.Module, layer: int) -> None:
        if len(keep[layer]) < model.blocks[layer].heads:
            slice_heads(block, keep[layer])

    pruned = edited_copy(model, cut)
    pruned.origin = {**model.origin, "kept": original_heads(model, keep)}
    return pruned


def check_sliceable(model: VisionModel) -> None:
    """Refuse a model whose heads cannot be cut out, whichever they are."""
    if any(getattr(part, "rope_mixed", False) for part in model.module.modules()):
        raise UnsupportedModel(
            f"cutting heads out of {model.family}",
            "every head has rotary frequencies of its own",
            ZEROED,
        )
    if any(block.additive is not None for block in model.blocks):
        raise UnsupportedModel(
            f"cutting heads out of {model.family}",
            "every head has relative position biases of its own",
            ZEROED,
        )
    if hasattr(model.module, "view_parts"):
        raise UnsupportedModel(
            f"cutting heads out of {model.family}",
            "it decides by itself what each head sees",
            ZEROED,
        )


def zero(model: VisionModel, heads: Iterable[Head]) -> VisionModel:
    """A verified view of a copy whose output projections no longer read `heads`; the architecture
    is the same."""
    removed = _removable(model, heads)

    def cut(block: nn.Module, layer: int) -> None:
        zero_heads(
            block, [head for at, head in removed if at == layer], of=model.blocks[layer].heads
        )

    return edited_copy(model, cut)


def kept_heads(model: VisionModel, removed: Iterable[Head]) -> list[list[int]]:
    """The heads that stay, layer by layer."""
    gone = set(removed)
    return [
        [head for head in range(block.heads) if (layer, head) not in gone]
        for layer, block in enumerate(model.blocks)
    ]


def original_heads(model: VisionModel, keep: list[list[int]]) -> list[list[int] | None]:
    """`keep`, numbered as in the module before anything was cut out of it; None where a layer is
    whole."""
    before = model.origin.get("kept", [None] * model.n_layers)
    original: list[list[int] | None] = []
    for earlier, now, block in zip(before, keep, model.blocks, strict=True):
        if earlier is None:
            original.append(None if len(now) == block.heads else now)
        else:
            original.append([earlier[head] for head in now] if earlier else [])
    return original


def _removable(model: VisionModel, heads: Iterable[Head]) -> list[Head]:
    removed = checked_heads(model, heads)
    if model.gates is not None:
        raise NotDefined(
            "cutting heads out",
            "this model has gates on its heads, which a copy would not have",
            "Leave the `ablate` block first",
        )
    return removed


def edited_copy(model: VisionModel, edit: Callable[[nn.Module, int], None]) -> VisionModel:
    """A verified view of a copy of the native module, after `edit(native block, layer)` of every
    block."""
    memo: dict[int, Any] = {}
    module = copy.deepcopy(model.module, memo)
    for layer, block in enumerate(model.blocks):
        edit(memo[id(block.owner)], layer)
    return rewrap(model, module)
