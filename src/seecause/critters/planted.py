"""A vision transformer whose heads have known roles: planted truth for head scores.

Every patch is `object` or `background`, decided by its pixels: it is object if one of them is more
vivid than any background. Then

    local blocks    a token sees tokens of its own kind only: object, background, or the class
                    token alone
    router blocks   patches see themselves; the class token reads through heads with roles:
                    `background` heads see background patches only, `object` heads object patches
                    only, the others only the class token

So the background reaches the prediction through background heads only. A head whose region is empty
sees the class token.

In its view, visibility is part of the tokens, as extra channels of queries and keys
(models/block.py). The facts of a token are its kind (class, object, background) and its position,
row and column (a, b) counted from the middle of the grid. Extra channels of a key hide it from
some kinds of queries, head by head. That a patch sees itself only is a distance, exact in small
whole numbers:

    - s |(a, b) - (a', b')|^2 = s [2a, 2b, -(a^2 + b^2), -1] . [a', b', 1, a'^2 + b'^2]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor

from seecause.loading import Source, fill
from seecause.models import timm as timm_adapter
from seecause.models.block import HIDDEN, Named, Size
from seecause.models.parts import Parts

CLASS, OBJECT, BACKGROUND = 0, 1, 2  # kinds of tokens; the role of a head is the kind that it reads
ROLES = ("self", "object", "background")
_VIVID = 0.41  # saturation between the most colourful background and the palest creature
_STEP = 0.006  # 1.5 / 255: rounding to whole pixel values makes nothing vivid


class PlantedViT(VisionTransformer):
    """timm's network with attention restricted. `routers` lists blocks with their heads: {"block":
    3, "background": [0], "object": [1, 2]}."""

    def __init__(
        self,
        *,
        routers: Sequence[Named],
        mean: Sequence[float],
        std: Sequence[float],
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.mean, self.std = tuple(mean), tuple(std)
        # router block -> the kind of token each head reads
        self.readers: dict[int, tuple[int, ...]] = {}
        for router in routers:
            kinds = dict.fromkeys(range(arguments["num_heads"]), CLASS)
            kinds |= dict.fromkeys(router["background"], BACKGROUND)
            kinds |= dict.fromkeys(router["object"], OBJECT)
            self.readers[router["block"]] = tuple(kinds.values())

    @property
    def roles(self) -> dict[tuple[int, int], str]:
        """(block, head) -> background, object or self, for every head of the router blocks."""
        return {
            (block, head): ROLES[kind]
            for block, kinds in self.readers.items()
            for head, kind in enumerate(kinds)
        }

    def kinds(self, images: Tensor) -> Tensor:
        """Normalised images [B, 3, H, W] -> the kind of every token [B, 1 + N]."""
        mean, std = (images.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        patches = vivid_patches(images.detach() * std + mean, self.patch_embed.patch_size)  # [B, N]
        return F.pad(torch.where(patches, OBJECT, BACKGROUND), (1, 0), value=CLASS)

    def visible(self, kinds: Tensor, block: int) -> Tensor:
        """[B, 1 or H, T, T] bool: which keys each row sees in a block."""
        if block not in self.readers:
            return (kinds[:, :, None] == kinds[:, None, :])[:, None]
        reads = torch.tensor(self.readers[block], device=kinds.device)
        match = kinds[:, None, :] == reads[:, None]  # [B, H, T]
        empty = ~match.any(dim=-1, keepdim=True)
        match = match | (empty & (kinds == CLASS)[:, None])
        itself = torch.eye(kinds.shape[1], dtype=torch.bool, device=kinds.device)
        return torch.where((kinds == CLASS)[:, None, :, None], match[:, :, None, :], itself)

    def forward_features(self, x: Tensor, **_: Any) -> Tensor:
        """Images [B, 3, H, W] -> final tokens; each block gets a mask of its own."""
        tokens = self._pos_embed(self.patch_embed(x))
        kinds = self.kinds(x)[..., None].to(tokens.dtype)
        tagged = self.patch_drop(torch.cat([tokens, kinds], dim=-1))  # drops kinds with patches
        h, kinds = self.norm_pre(tagged[..., :-1]), tagged[..., -1].detach().round().long()
        for index, block in enumerate(self.blocks.children()):
            h = block(h, attn_mask=self.visible(kinds, index))
        return self.norm(h)

    def view_parts(self) -> Parts:
        """timm's parts, with facts about tokens and restricted blocks: `sc.wrap` calls this."""
        parts = timm_adapter.find(self, "VisionTransformer")
        parts.family, parts.facts = "seecause.PlantedViT", partial(_facts, self)
        for index, block in enumerate(parts.blocks):
            reads = self.readers.get(index)
            block.lanes = _local_lanes if reads is None else partial(_router_lanes, reads)
        return parts


def vivid_patches(raw: Tensor, patch: Size) -> Tensor:
    """[B, N] bool: patches of images [B, 3, H, W] with raw pixels in [0, 1] that hold a vivid
    pixel. A flat mean colour is not vivid."""
    high, low = raw.amax(dim=1), raw.amin(dim=1)  # [B, H, W]
    vivid = high - low > _VIVID * high + _STEP
    return F.max_pool2d(vivid[:, None].float(), patch).flatten(1) > 0


_KINDS = len(ROLES)
# s = 4096: the next patch is hidden, and products of coordinates stay whole numbers in float32
_ASK, _TELL = 32.0, 128.0


def from_card(card: Named, state: dict[str, Tensor], name: str) -> Source:
    """A stored network, from its card and weights."""
    module = PlantedViT(**card["architecture"]["arguments"])
    fill(module, state, name)
    facts = {name: card[name] for name in ("classes", "mean", "std")}
    return Source(module, facts, {**card["architecture"], "library": "seecause"})


def _facts(module: PlantedViT, images: Tensor) -> Tensor:
    """Kind and position of every token, [B, T, 3 + 2]."""
    kinds = F.one_hot(module.kinds(images), _KINDS)  # [B, T, 3]
    rows, columns = module.patch_embed.grid_size
    place = torch.cartesian_prod(
        torch.arange(rows) - rows // 2, torch.arange(columns) - columns // 2
    ).to(images.device)  # [N, 2]
    place = torch.cat([place.new_zeros(1, 2), place]).expand(len(images), -1, -1)
    return torch.cat([kinds, place], dim=-1).float()


def _local_lanes(facts: Tensor) -> tuple[Tensor, Tensor]:
    """Every kind of query sees its own kind of keys."""
    kind = facts[..., None, :_KINDS]  # [B, R, 1, 3]
    return kind, (1 - kind) * HIDDEN


def _router_lanes(reads: tuple[int, ...], facts: Tensor) -> tuple[Tensor, Tensor]:
    """Class queries see what their head reads, or else the class token; patch queries see their own
    position.

    The class token is half hidden from heads that read another kind: it has weight 0 beside a key
    of that kind, and weight 1 if there is none.
    """
    kind, place = facts[..., :_KINDS], facts[..., _KINDS:]
    is_class, is_patch = kind[..., CLASS, None], 1 - kind[..., CLASS, None]  # [B, R, 1]
    # [B, R, H], 1 where the token is of the kind that the head reads
    wanted = kind[..., list(reads)]
    from_class = (1 - wanted) * (HIDDEN - is_class * HIDDEN / 2)
    square = place.square().sum(dim=-1, keepdim=True)
    one = torch.ones_like(square)
    where = is_patch * _ASK * torch.cat([2 * place, -square, -one], dim=-1)
    asking = torch.cat([is_class, is_patch, where], dim=-1)[:, :, None]
    telling = torch.cat([is_class * HIDDEN, _TELL * place, _TELL * one, _TELL * square], dim=-1)
    telling = telling[:, :, None].expand(-1, -1, len(reads), -1)
    return asking, torch.cat([from_class[..., None], telling], dim=-1)
