"""From part logits to the mask of stage 2: which patches may be read (iFAM, arXiv 2506.08915,
section 3).

A token is selected if some part that was not dropped beats the background. Parts are merged by
their maximum where the decision is taken, and by their sum in the surrogate that carries the
gradient:

    hard = [max_k Y_k >= Y_background],    s = hard + S - stop_gradient(S),   S = sum_k Y_k

At test time tokens can be rejected by a limit for every part. A limit is a quantile, as a rule some
token's own value, and the last bits of that value change with the batch and the processor: a token
within `TIE` of its limit is at it, and passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TIE = 1e-5  # of |z|^2 + |p|^2, whose rounding errors distances and dot products have


@dataclass(frozen=True, eq=False)
class Assignment:
    """Patches against prototypes: z.p and |z - p|^2, both [B, K + 1, N]."""

    dots: Tensor
    distances: Tensor

    @property
    def slack(self) -> Tensor:
        """How far beyond its limit a token still counts as at it."""
        return TIE * (self.distances + 2 * self.dots)


@dataclass(frozen=True, eq=False)
class Selection:
    """`hard` [B, N] bool; `pair` [B, 2, N]: the best part and the background; `surrogate` [B, N]:
    S."""

    hard: Tensor
    pair: Tensor
    surrogate: Tensor

    @property
    def relaxed(self) -> Tensor:
        """0 or 1, exactly, with the gradient of S."""
        return self.hard.to(self.surrogate.dtype) + (self.surrogate - self.surrogate.detach())


def select(maps: Tensor, kept: Tensor | None = None) -> Selection:
    """Soft maps Y [B, K + 1, N] -> the tokens that some kept part [B, K] wins; ties go to the
    foreground."""
    parts, background = maps[:, :-1], maps[:, -1]
    if kept is not None:
        parts = parts * kept[..., None]
    best = parts.amax(dim=1)
    pair = torch.stack([best, background], dim=1)
    alive = (
        True if kept is None else kept.any(dim=1, keepdim=True)
    )  # 0 >= 0 is no part, where the background rounds to zero
    return Selection((best >= background) & alive, pair, parts.sum(dim=1))


def select_without(maps: Tensor, removed: Tensor) -> Selection:
    """The tokens whose winner is a part that was not removed [K] bool: tokens of a removed part
    become background, the others keep their status."""
    winner = maps.argmax(dim=1)  # [B, N]
    stays = ~F.pad(removed, (0, 1), value=True)  # the background never does
    pair = torch.stack([(maps[:, :-1] * ~removed[:, None]).amax(dim=1), maps[:, -1]], dim=1)
    return Selection(stays[winner], pair, maps[:, :-1].sum(dim=1))


def reject_far(maps: Tensor, assigned: Assignment, limits: Tensor) -> Tensor:
    """Tokens further from the part they are assigned to than its limit [K] become background, whole
    (the paper's rule)."""
    winner = maps.argmax(dim=1, keepdim=True)
    allowed = _for_all_parts(limits, torch.inf, maps) + assigned.slack
    far = assigned.distances.gather(1, winner) > allowed.gather(1, winner)  # [B, 1, N]
    background = torch.zeros_like(maps)
    background[:, -1] = 1
    return torch.where(far, background, maps)


def reject_unlike(assigned: Assignment, floors: Tensor) -> Tensor:
    """Logits of the released code: dot products instead of distances, and -inf for a part whose
    floor [K] is not reached, so that a token may move to another part; the background has no
    floor."""
    needed = _for_all_parts(floors, -torch.inf, assigned.dots) - assigned.slack
    return assigned.dots.masked_fill(assigned.dots < needed, -torch.inf)


def _for_all_parts(limits: Tensor, background: float, like: Tensor) -> Tensor:
    """[K] -> [K + 1, 1]"""
    return F.pad(limits, (0, 1), value=background).to(like.dtype)[:, None]
