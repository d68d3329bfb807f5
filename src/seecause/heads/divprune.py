"""DivPrune (Alvar et al. 2025, 2503.02175): keep the patch tokens that differ most from one
another, drop the others.

Max-min diversity over cosine distance d = 1 - cos, solved greedily:

    first   the token whose nearest neighbour is farthest
    then    argmax_j min_{s in S} d(j, s), until round(keep * N) tokens are in S

It removes tokens, not heads, and knows nothing of a label: the cheap token-level baseline. Here it
acts after `after` blocks of a vision transformer; in the paper, before the first layer of a
language model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.subset import kept_logits
from seecause.engine.walk import walk
from seecause.errors import BadOption, NotDefined
from seecause.heads.values import over_images
from seecause.models.view import VisionModel


@dataclass(frozen=True, eq=False)
class Kept:
    """What a model answers from some of its patches."""

    logits: Tensor  # [B, C]
    tokens: Tensor  # [B, N] bool, over patches


@torch.no_grad()
def divprune(model: VisionModel, images: Tensor, *, keep: float = 0.25, after: int = 0) -> Kept:
    """Answer from the `keep` share of patch tokens that differ most after `after` blocks."""
    layout = model.check(images)
    if model.architecture != "transformer":
        raise NotDefined(
            "divprune",
            "this model's tokens are read by a language model",
            "Use a vision transformer",
        )
    if not 0 < keep <= 1:
        raise BadOption("keep", keep, "a share above 0, up to 1")
    if not 0 <= after < model.n_layers:
        raise BadOption("after", after, f"0-{model.n_layers - 1} blocks")
    count = max(1, round(keep * layout.n_patches))

    def some(start: int, stop: int) -> Tensor:
        h = walk(model, model.embed(images[start:stop]), layout.at(images.device), stop=after).end()
        tokens = most_diverse(h[:, layout.patches], count)
        return torch.cat(
            [kept_logits(model, h, tokens, layout, start=after), tokens.to(h.dtype)], dim=1
        )

    both = over_images(some, model, images, holds=1)
    return Kept(both[:, : -layout.n_patches], both[:, -layout.n_patches :].bool())


def most_diverse(features: Tensor, count: int) -> Tensor:
    """Which `count` of the tokens features [B, N, D] the greedy rule keeps, [B, N] bool. Ties go to
    the first token."""
    unit = F.normalize(features.float() if features.dtype != torch.float64 else features, dim=-1)
    distance = 1 - unit @ unit.mT  # [B, N, N]
    apart = distance + torch.diag(
        distance.new_full((distance.shape[-1],), torch.inf)
    )  # no token is its own neighbour
    rows = torch.arange(len(features), device=features.device)
    nearest = apart.amin(dim=-1)  # [B, N], to the nearest of those chosen; at first, to any other
    nearest = nearest.nan_to_num(posinf=0.0) if distance.shape[-1] == 1 else nearest
    kept = torch.zeros(nearest.shape, dtype=torch.bool, device=features.device)
    for step in range(count):
        chosen = nearest.masked_fill(kept, -torch.inf).argmax(dim=-1)
        kept[rows, chosen] = True
        nearest = (
            distance[rows, chosen] if step == 0 else torch.minimum(nearest, distance[rows, chosen])
        )
    return kept
