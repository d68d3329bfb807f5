"""Bags by definition: an instance is put into a bag of blanks, or taken out of its own, and the
module is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def caap(answer: Callable[[Tensor], Tensor], bag: Tensor, blank: Tensor, direction: str) -> Tensor:
    """What each instance of a bag [N, D] causes alone among blanks, or how far the answer falls
    when it is blank, [N]."""
    values = []
    for place in range(len(bag)):
        if direction == "insert":
            mixed = blank.repeat(len(bag), 1)
            mixed[place] = bag[place]
            values.append(answer(mixed))
        else:
            mixed = bag.clone()
            mixed[place] = blank
            values.append(answer(bag) - answer(mixed))
    return torch.stack(values)


def without(net: Any, bag: Tensor) -> Tensor:
    """Logits [N, C] without each instance."""
    places = range(len(bag))
    return torch.stack([net(torch.cat([bag[:p], bag[p + 1 :]]))[0] for p in places])


def mosaic_path(net: Any, bag: Tensor, blank: Tensor, label: int, *, masks: int) -> Tensor:
    """Slopes [N] of a logit along mixtures t of a bag and its blank: each place holds both
    instances, with attention e^s t and e^s (1 - t)."""
    both = net.encoder(torch.cat([bag, blank.repeat(len(bag), 1)]))  # [2N, M]
    hidden = net.value(both) if net.gate is None else net.value(both) * net.gate(both)
    total = torch.zeros(len(bag), dtype=bag.dtype)
    u = (torch.arange(masks, dtype=bag.dtype) + 0.5) / masks
    shares = (u**3 * (10 - 15 * u + 6 * u**2)).tolist()
    speeds = u**2 * (1 - u) ** 2
    for share, weight in zip(shares, (speeds / speeds.sum()).tolist(), strict=True):
        m = torch.full((len(bag),), share, dtype=bag.dtype, requires_grad=True)
        scores = net.weight(hidden).T + torch.cat([m.log(), (1 - m).log()])
        logits = net.classifier((torch.softmax(scores, dim=1) @ both).flatten())
        total += torch.autograd.grad(logits[label], m)[0] * weight
    return total
