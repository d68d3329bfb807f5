"""What the heads of one masked run do: how much of the picture they attend to, and what they write.

The share of attention that falls on the picture needs no attention matrix: exp(lse of image keys -
lse of all keys)        (eq. 10)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.engine.attend import Bank, attend, merge
from seecause.errors import BadOption
from seecause.lvlm.attention import Part, read_own
from seecause.lvlm.stage import Stage
from seecause.lvlm.view import LVLM
from seecause.models.decoder import causal
from seecause.types import wide


@dataclass(frozen=True, eq=False)
class Look:
    """All text rows of one run, block by block."""

    lvlm: LVLM
    mass: Tensor  # [L, T, H] share of attention on image tokens
    heads: Tensor  # [L, T, H, dh] outputs, before the output projection
    from_image: Tensor  # [L, T, H, dh] the part of them that comes from image tokens
    states: Tensor  # [L + 1, T, D] entering each block, and leaving the last
    queries: list[Tensor]  # [H, T, dh]
    keys: list[Tensor]  # [Hkv, N, dh] of the picture
    lse: Tensor  # [L, T, H] over all keys
    bias: list[Tensor | None]  # [H, T, N] what hides image keys from rows, where a model has that

    def image_attention(self) -> Tensor:
        """[L, H]: attention on the picture, averaged over text rows (eq. 10)."""
        return self.mass.mean(dim=1)

    def attention(self, layer: int, head: int) -> Tensor:
        """[T, N]: attention of one head's text rows on image tokens. The run must be the intact one
        at this head."""
        block = self.lvlm.blocks[layer]
        if not 0 <= head < block.heads:
            raise BadOption("head", head, f"0 to {block.heads - 1}")
        keys = self.keys[layer][head * block.kv_heads // block.heads]
        scores = wide(self.queries[layer][head]) @ wide(keys).T * block.scale
        bias = self.bias[layer]
        if bias is not None:
            scores = scores + bias[head % len(bias)]  # one serves all heads
        return torch.exp(scores - self.lse[layer, :, head, None])

    @torch.no_grad()
    def written(self, *, row: int = -1, image_only: bool = False) -> Tensor:
        """[L, H, D]: what each head adds to the residual stream at one text row, through its slice
        of the output projection."""
        outputs = (self.from_image if image_only else self.heads)[:, row]  # [L, H, dh]
        found = []
        for block, heads in zip(self.lvlm.blocks, outputs, strict=True):
            alone = (
                torch.diag_embed(heads.T).permute(1, 2, 0).flatten(1)[None]
            )  # [1, H, H*dh]: one head at a time, the others silent
            found.append((block.mix(alone) - block.mix(torch.zeros_like(alone[:, :1])))[0])
        return torch.stack(found)

    @torch.no_grad()
    def lens(self, layer: int, head: int, *, row: int = -1, image_only: bool = False) -> Tensor:
        """[V]: the logit lens on one head's output (final norm, then vocabulary)."""
        vector = self.written(row=row, image_only=image_only)[layer, head]
        return wide(self.lvlm.decoder.head(self.lvlm.decoder.norm(vector[None])))[0]


@torch.no_grad()
def look(lvlm: LVLM, stage: Stage, on: Tensor) -> Look:
    """Run one mask `on` [L, H] and keep what its heads do."""
    image, h = stage.image, stage.states
    mass, heads, from_image, states, queries, keys, lses, biases = (
        [],
        [],
        [],
        [h[0]],
        [],
        [],
        [],
        [],
    )
    for index, block in enumerate(lvlm.blocks):
        q, k, v = block.qkv(h, stage.at)
        bias = None if block.additive is causal else block.bias(stage.at, stage.keys_at)

        def read(
            bank: tuple[Tensor, Tensor],
            columns: slice,
            q: Tensor = q,
            bias: Tensor | None = bias,
            scale: float = block.scale,
        ) -> Part:
            hidden = None if bias is None else bias[..., columns]
            return attend(
                q, [Bank(bank[0][:, :, columns], bank[1][:, :, columns], bias=hidden)], scale=scale
            )

        true, mean = read(stage.picture[index], image), read(stage.average[index], image)
        seen = (
            torch.where(on[index][:, None], true[0], mean[0]),
            torch.where(on[index], true[1], mean[1]),
        )
        parts = [seen, read_own(q, k, v, scale=block.scale)]
        if image.start:
            parts.append(read(stage.picture[index], slice(0, image.start)))
        o, lse = merge([wide(o) for o, _ in parts], [lse for _, lse in parts])
        share = torch.exp(seen[1] - lse)
        mass.append(share[0])
        from_image.append((share[..., None] * wide(seen[0]))[0].to(q.dtype))
        heads.append(o[0].to(q.dtype))
        queries.append(q[0])
        keys.append(stage.picture[index][0][0, :, image])
        lses.append(lse[0])
        biases.append(None if bias is None else bias[0, :, :, image])
        h = block.finish(h, o.to(q.dtype))
        states.append(h[0])
    return Look(
        lvlm,
        torch.stack(mass),
        torch.stack(heads),
        torch.stack(from_image),
        torch.stack(states),
        queries,
        keys,
        torch.stack(lses),
        biases,
    )
