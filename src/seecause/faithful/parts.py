"""Stage 1: parts as prototypes (PDiscoFormer, Aniraj et al., ECCV 2024), and the mask they make
(iFAM, arXiv 2506.08915, section 3).

A patch feature z belongs to part k by its distance to a prototype, and the embedding of a part is
the average of its patches:

    l_k = -|z - p_k|^2,    A = softmax_k(l + Gumbel noise),    v_k = mean over patches of A_k z

The last of the K + 1 parts is the background. Distances and maps are in float32 or better: |z|^2 is
of the order of 1000, and their differences decide.

A token is selected if some part that was not dropped beats the background. Parts are merged by
their maximum where the decision is taken, and by their sum in the surrogate that carries the
gradient:

    hard = [max_k Y_k >= Y_background],    s = hard + S - stop_gradient(S),   S = sum_k Y_k

At test time tokens can be rejected by a limit for each part. Limits are quantiles, so they often
equal the value of one token. Tokens within `TIE` of the limit are accepted, so that rounding does
not change the result.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause._random import bits, lattice
from seecause.errors import BadOption
from seecause.models.block import wide, wide_dtype

TIE = 1e-5  # tolerance relative to |z|^2 + |p|^2, the scale of rounding errors of distances


def mean_vote(votes: Tensor, removed: Tensor) -> Tensor:
    """Votes [B, C, K] -> the mean [B, C] over parts that are not removed [K] (bool); zero where
    none is left."""
    stay = (~removed).to(votes.dtype)
    return (votes * stay).sum(dim=-1) / stay.sum().clamp_min(1)


class Modulation(nn.Module):
    """Part embeddings [B, D, K + 1], normalised, then scaled and shifted by weights of their own
    for every part.

    `joint` normalises all D (K + 1) numbers of an image together, background included, as the
    released code does; otherwise each part by itself, as the paper writes it.
    """

    def __init__(self, width: int, channels: int, *, joint: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, channels))
        self.bias = nn.Parameter(torch.zeros(width, channels))
        self.joint = joint

    def forward(self, embeddings: Tensor) -> Tensor:
        weight, bias = wide(self.weight), wide(self.bias)
        if self.joint:
            return F.layer_norm(embeddings, tuple(weight.shape), weight, bias)
        normalised = F.layer_norm(embeddings.transpose(1, 2), weight.shape[:1])
        return normalised.transpose(1, 2) * weight + bias


class Assignment(NamedTuple):
    """Patches against prototypes: z.p and |z - p|^2, both [B, K + 1, N]."""

    dots: Tensor
    distances: Tensor

    @property
    def slack(self) -> Tensor:
        """The tolerance of each token's limit."""
        return TIE * (self.distances + 2 * self.dots)


class Selection(NamedTuple):
    """The tokens that stage 2 reads, and the maps that decided it."""

    hard: Tensor  # [B, N] bool
    pair: Tensor  # [B, 2, N] the best part and the background
    surrogate: Tensor  # [B, N] S

    @property
    def relaxed(self) -> Tensor:
        """The hard mask, exactly 0 or 1, with the gradient of S (straight-through)."""
        return self.hard.to(self.surrogate.dtype) + (self.surrogate - self.surrogate.detach())


def select(maps: Tensor, kept: Tensor | None = None) -> Selection:
    """Soft maps Y [B, K + 1, N] -> the tokens that some kept part [B, K] wins; ties go to the
    foreground."""
    parts, background = maps[:, :-1], maps[:, -1]
    if kept is not None:
        parts = parts * kept[..., None]
    best = parts.amax(dim=1)
    hard = best >= background
    if kept is not None:  # 0 >= 0 is no part, where the background rounds to zero
        hard = hard & kept.any(dim=1, keepdim=True)
    return Selection(hard, torch.stack([best, background], dim=1), parts.sum(dim=1))


def select_without(maps: Tensor, removed: Tensor) -> Selection:
    """The tokens whose winner is a part that was not removed [K] bool: tokens of a removed part
    become background, the others keep their status."""
    winner = maps.argmax(dim=1)  # [B, N]
    stays = ~F.pad(removed, (0, 1), value=True)  # the background never does
    return select(maps, ~removed[None])._replace(hard=stays[winner])


def selection_of(mask: Tensor, maps: Tensor) -> Selection:
    """The selection with a given mask [B, gh, gw], for maps [B, K + 1, N]."""
    if mask.dtype != torch.bool or mask.flatten(1).shape != (len(maps), maps.shape[2]):
        expected = f"bool, one value for each of {len(maps)} x {maps.shape[2]} patches"
        raise BadOption("mask", f"{mask.dtype} {list(mask.shape)}", expected)
    return select(maps)._replace(hard=mask.flatten(1).to(maps.device))


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


class Purpose(IntEnum):
    """Purposes of random draws; draws of different purposes are independent."""

    MAPS = 1  # Gumbel noise of the part maps
    MASK = 2  # Gumbel noise of the stage-2 mask
    WARPED = 3  # Gumbel noise of the warped image's maps
    DROP_EMBEDDINGS = 4  # parts dropped from the stage-1 classifier
    DROP_MASK = 5  # parts dropped from the stage-2 mask


@dataclass(frozen=True, eq=False)
class Noise:
    """Training noise as a function: each draw is a hash of (seed, step, sample id, purpose), not
    of the state of a generator. `ids` [B] (int64) are the indices of the samples in the dataset.

    The noise of a sample does not depend on its batch or process, so one process and many with the
    same global batch take the same steps, and so does a resumed run.
    """

    seed: int
    step: int
    ids: Tensor

    @classmethod
    def fresh(cls, batch: int, device: torch.device) -> Noise:
        """Noise keyed by torch's global generator."""
        seed, step = torch.randint(2**30, (2,)).tolist()
        return cls(seed, step, torch.arange(batch, device=device))

    @classmethod
    def of(cls, images: Tensor) -> Noise:
        """Noise keyed by the pixels of each image, so that it does not depend on the batch."""
        rows = images.detach().flatten(1).float().cpu().numpy()
        digests = [
            int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=7).digest()) for row in rows
        ]
        return cls(0, 0, torch.tensor(digests, device=images.device))

    @cached_property
    def _sample(self) -> Tensor:
        """[B] the key of each sample in this step, made once for all purposes."""
        return bits(self.ids, self.seed) | (self.step << 32)

    def uniform(self, purpose: Purpose, rows: int, columns: int, like: Tensor) -> Tensor:
        """[B, rows, columns] in (0, 1), without its ends."""
        return (
            lattice(self._sample.to(like.device), purpose, rows, columns)
            .to(wide_dtype(like.dtype))
            .add(2.0**-25)
            .clamp(max=1 - 2.0**-24)
        )

    def gumbel(self, purpose: Purpose, like: Tensor) -> Tensor:
        """Gumbel(0, 1) noise for logits [B, K + 1, N]."""
        return -(-self.uniform(purpose, like.shape[1], like.shape[2], like).log()).log()

    def kept(self, purpose: Purpose, parts: int, drop: float, like: Tensor) -> Tensor:
        """Which parts stay when each is dropped with probability `drop`: [B, K] bool."""
        return self.uniform(purpose, 1, parts, like)[:, 0] >= drop


@dataclass(frozen=True, eq=False)
class IFAMOutput:
    """Grids are [gh, gw]; channel K of K + 1 is the background."""

    logits: Tensor  # [B, C] of stage 2, or of the parts where there is one stage
    maps: Tensor  # [B, K + 1, gh, gw] soft part maps, sum to 1
    mask: Tensor  # [B, gh, gw] bool: patches that stage 2 reads; with one stage, patches of parts
    pair: Tensor  # [B, 2, gh, gw] the best part and the background, which the mask compares
    embeddings: Tensor  # [B, D, K + 1] modulated part embeddings
    part_logits: Tensor  # [B, C, K] the vote of each part
    dots: Tensor  # [B, K + 1, gh, gw] feature . prototype (the released code's "part logits")
    distances: Tensor  # [B, K + 1, gh, gw] squared distance to each prototype
    warped_maps: Tensor | None = None  # [B, K + 1, gh, gw] of the second view that `warped` brought

    @property
    def stage1_logits(self) -> Tensor:
        """[B, C]: the mean over parts."""
        return self.part_logits.mean(dim=-1)

    @property
    def empty(self) -> Tensor:
        """[B] bool: nothing was selected, so the prediction does not depend on the image."""
        return ~self.mask.flatten(1).any(dim=1)
