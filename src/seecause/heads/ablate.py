"""A model without some of its heads, for as long as a block of code runs.

A head is multiplied by zero at the input of the output projection W_O, which is the same as zeroing
its columns of W_O, or its rows of W_V and b_V:

    W_O concat_h(o_h) + b_O = sum_h W_O[:, S_h] o_h + b_O          (CIGMA section 1.7; b_O belongs
    to no head and stays)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import SupportsIndex

import torch
from torch import Tensor

from seecause.errors import BadOption, NotDefined
from seecause.heads.result import Head
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel


@contextmanager
def ablate(model: VisionModel, heads: Iterable[Head]) -> Iterator[VisionModel]:
    """Inside the block, `model` answers without `heads`, pairs (layer, head) from 0: in
    `model(images)` and in every method."""
    gates = gates_without(model, heads)
    with model.gated(gates):
        yield model


def gates_without(model: VisionModel, heads: Iterable[Head]) -> Tensor:
    """Ones [L, H], zero at `heads`."""
    removed = checked(model, heads)
    gates = torch.ones(model.n_layers, model.n_heads)
    for layer, head in removed:
        gates[layer, head] = 0
    return gates


def checked(model: ImageModel, heads: Iterable[Head]) -> list[Head]:
    """`heads` in order and without repeats, or which of them the model does not have."""
    if not isinstance(model, VisionModel):
        raise NotDefined(
            "head ablation", f"{model.family} has no attention heads", "Use a vision transformer"
        )
    found = set()
    for pair in heads:
        if not (
            isinstance(pair, tuple | list)
            and len(pair) == 2
            and all(isinstance(part, SupportsIndex) for part in pair)
        ):
            raise BadOption("heads", pair, "pairs (layer, head) of whole numbers from 0")
        layer, head = (operator.index(part) for part in pair)
        if not 0 <= layer < model.n_layers:
            raise BadOption("heads", (layer, head), f"layers 0-{model.n_layers - 1}")
        if not 0 <= head < model.blocks[layer].heads:
            raise BadOption(
                "heads", (layer, head), f"heads 0-{model.blocks[layer].heads - 1} in layer {layer}"
            )
        found.add((layer, head))
    return sorted(found)
