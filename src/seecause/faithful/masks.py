"""From part logits to the mask of stage 2: which patches may be read (iFAM, arXiv 2506.08915,
section 3).

A token is selected if some part that was not dropped beats the background. Parts are merged by
their maximum where the decision is taken, and by their sum in the surrogate that carries the
gradient:

    hard = [max_k Y_k >= Y_background],    s = hard + S - stop_gradient(S),   S = sum_k Y_k
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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


def reject_far(maps: Tensor, distances: Tensor, limits: Tensor) -> Tensor:
    """Tokens further from the part they are assigned to than its limit [K] become background, whole
    (the paper's rule)."""
    winner = maps.argmax(dim=1, keepdim=True)
    far = (
        distances.gather(1, winner)
        > F.pad(limits, (0, 1), value=torch.inf).to(distances.dtype)[winner]
    )  # [B, 1, N]
    background = F.one_hot(torch.tensor(maps.shape[1] - 1, device=maps.device), maps.shape[1]).to(
        maps.dtype
    )
    return torch.where(far, background[:, None], maps)


def reject_unlike(dots: Tensor, floors: Tensor) -> Tensor:
    """Logits of the released code: dot products instead of distances, and -inf for a part whose
    floor [K] is not reached, so that a token may move to another part; the background has no
    floor."""
    return dots.masked_fill(
        dots < F.pad(floors, (0, 1), value=-torch.inf).to(dots.dtype)[:, None], -torch.inf
    )
