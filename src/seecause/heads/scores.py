"""A score for every head: what selectors return, and what they share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.chunks import fit, in_chunks
from seecause.errors import BadOption, NotDefined
from seecause.metrics import standard_error
from seecause.models.base import ImageModel
from seecause.models.block import is_silent
from seecause.models.view import VisionModel

Head = tuple[int, int]  # (layer, head), both from 0
Remove = Literal["most", "least"]


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Higher means more worth removing. A head that a block does not have, or that was not scored,
    is NaN; one that must stay is -inf."""

    value: Tensor  # [L, H] float64, on the CPU
    error: Tensor | None = None  # [L, H], standard error of the mean over images
    after: dict[str, Tensor] = field(default_factory=dict)  # [L, H] each: accuracy ... without it
    before: dict[str, float] = field(default_factory=dict)  # the same of the whole model
    protocol: dict[str, Any] = field(default_factory=dict)
    total: int | None = None  # heads of the model, scored or not; None: as many as have a score
    effects: Tensor | None = None  # [B, L, H], of each image; `value` is their mean
    fig_drops: Tensor | None = None  # [B, L, H], what FIG of each image loses, if it was measured

    def order(self, *, positive: bool = True) -> list[Head]:
        """Heads from the highest score down; with `positive`, only those above zero."""
        flat = self.value.flatten().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        least = 0 if positive else -torch.inf
        order = flat.argsort(descending=True, stable=True).tolist()
        return [divmod(place, self.value.shape[1]) for place in order if flat[place] > least]

    def top(self, k: int | float, *, positive: bool = True) -> list[Head]:
        """The `k` highest heads: a count, or a share of all heads of the model between 0 and 1.
        Fewer, when fewer were scored or are above zero."""
        total = int((~self.value.isnan()).sum()) if self.total is None else self.total
        return self.order(positive=positive)[: head_count(k, total)]


def head_count(k: int | float, total: int) -> int:
    """`k` of `total` heads: a count, or a share between 0.0 and 1.0."""
    count = round(k * total) if isinstance(k, float) and 0 <= k <= 1 else k
    if isinstance(count, float) or not 0 <= count <= total:
        raise BadOption("k", k, f"a count up to {total}, or a share between 0.0 and 1.0")
    return count


def need_heads(model: ImageModel, what: str) -> None:
    """Refuse a model that is not read by its heads."""
    if not isinstance(model, VisionModel):
        raise NotDefined(
            what,
            f"{model.family} is read by its stages, not by heads",
            "Use a vision transformer; sc.attribute maps this one (caap, mosaic, grad-cam ...)",
        )


def all_heads(model: VisionModel) -> list[Head]:
    """Every head there is; a block that lost all of its own has none."""
    heads = []
    for layer, block in enumerate(model.blocks):
        if not is_silent(block):
            heads += [(layer, head) for head in range(block.heads)]
    return heads


def gates_without(model: VisionModel, heads: Iterable[Head]) -> Tensor:
    """Ones [L, H], zero at `heads`."""
    removed = checked_heads(model, heads)
    gates = torch.ones(model.n_layers, model.n_heads)
    for layer, head in removed:
        gates[layer, head] = 0
    return gates


def checked_heads(model: ImageModel, heads: Iterable[Head]) -> list[Head]:
    """`heads` in order and without repeats, or which of them the model does not have."""
    need_heads(model, "head ablation")
    assert isinstance(model, VisionModel)
    unique = set()
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
        unique.add((layer, head))
    return sorted(unique)


def absent(model: VisionModel) -> Tensor:
    """[L, H], true where a block has no such head."""
    exists = torch.zeros(model.n_layers, model.n_heads, dtype=torch.bool)
    for head in all_heads(model):
        exists[head] = True
    return ~exists


def padded(model: VisionModel, blocks: list[Tensor]) -> Tensor:
    """One tensor [..., H_l] for each block -> [..., L, H]."""
    return torch.stack(
        [F.pad(values, (0, model.n_heads - values.shape[-1])) for values in blocks], dim=-2
    )


def over_images(
    run: Callable[[int, int], Tensor], model: VisionModel, images: Tensor, *, holds: int
) -> Tensor:
    """`run(start, stop)` over as many images at once as fit, when a run holds `holds` times what a
    plain forward does."""
    each = model.forward_bytes(model.check(images)) * holds
    return torch.cat(
        list(in_chunks(run, len(images), fit(len(images), each, images.device), what="images"))
    )


def mean_scores(
    model: VisionModel, per_image: Tensor, *, remove: Remove = "most", protocol: dict[str, Any]
) -> HeadScores:
    """Means over images of per_image [N, L, H], with their standard errors. `remove="least"` turns
    them round: the largest gets 0."""
    values, missing = per_image.detach().double().cpu(), absent(model)
    mean, error = values.mean(dim=0), standard_error(values)
    mean = mean if remove == "most" else mean[~missing].max() - mean
    return HeadScores(
        mean.masked_fill(missing, torch.nan),
        error.masked_fill(missing, torch.nan),
        protocol={**protocol, "images": len(values)},
    )
