"""A vision transformer whose heads have known roles: planted truth for head scores (spec:
region-restricted attention).

Every patch is `object` or `background`, decided by its pixels: it is object if one of them is more
vivid than any background. Then

    local blocks    a token sees tokens of its own kind only: object, background, or the class token
    alone
    router blocks   patches see themselves; the class token reads through heads with roles:
    `background` heads see background
                    patches only, `object` heads object patches only, the others only the class
                    token

So everything the answer knows of the background came through background heads. A head whose region
is empty sees the class token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor

from seecause.errors import BadOption
from seecause.models.parts import Parts

CLASS, OBJECT, BACKGROUND = 0, 1, 2  # kinds of tokens; a head's role is the kind it reads
ROLES = ("self", "object", "background")
_VIVID = 0.41  # saturation between the most colourful background and the palest creature
_STEP = 0.006  # 1.5 / 255: rounding to whole pixel values makes nothing vivid


class PlantedViT(VisionTransformer):
    """timm's network with attention restricted. `routers` lists blocks with their heads: {"block":
    3, "background": [0], "object": [1, 2]}."""

    def __init__(
        self,
        *,
        routers: Sequence[dict[str, Any]],
        mean: Sequence[float],
        std: Sequence[float],
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if self.num_prefix_tokens != 1 or self.cls_token is None:
            raise BadOption(
                "reg_tokens",
                self.num_prefix_tokens - 1,
                "0 and a class token: registers would mix regions",
            )
        self.mean, self.std = tuple(mean), tuple(std)
        self.readers: dict[
            int, tuple[int, ...]
        ] = {}  # router block -> the kind of token each head reads
        for router in routers:
            if set(router["background"]) & set(router["object"]):
                raise BadOption("routers", router, "heads with one role each")
            heads = range(arguments["num_heads"])
            kinds = [
                (
                    BACKGROUND
                    if head in router["background"]
                    else OBJECT
                    if head in router["object"]
                    else CLASS
                )
                for head in heads
            ]
            self.readers[router["block"]] = tuple(kinds)

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

    def forward_features(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Images [B, 3, H, W] -> final tokens; each block gets its own mask, so none can be
        given."""
        if attn_mask is not None or is_causal:
            raise BadOption("attn_mask", "a mask", "None: this network makes its own")
        tokens = self._pos_embed(self.patch_embed(x))
        tagged = self.patch_drop(
            torch.cat([tokens, self.kinds(x)[..., None].to(tokens.dtype)], dim=-1)
        )  # a patch that is left out takes its kind along
        h, kinds = self.norm_pre(tagged[..., :-1]), tagged[..., -1].detach().round().long()
        for index, block in enumerate(self.blocks):
            h = block(h, attn_mask=self.visible(kinds, index))
        return self.norm(h)

    def view_parts(self) -> Parts:
        """What `sc.wrap` builds its view from."""
        from seecause.critters.planted_view import planted_parts

        return planted_parts(self)


def vivid_patches(raw: Tensor, patch: tuple[int, int]) -> Tensor:
    """[B, N] bool: patches of pictures [B, 3, H, W] with raw pixels in [0, 1] that hold a vivid
    pixel. A flat mean colour is not vivid."""
    high, low = raw.amax(dim=1), raw.amin(dim=1)  # [B, H, W]
    vivid = high - low > _VIVID * high + _STEP
    return F.max_pool2d(vivid[:, None].float(), patch).flatten(1) > 0
