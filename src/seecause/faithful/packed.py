"""Stage 2 on the selected tokens alone, packed end to end without padding: hidden tokens cost
nothing.

Rows of all images form one long sequence [1, R, D] for everything that works on rows; attention
keeps images apart, with a kernel for sequences of different lengths where there is one, and image
by image elsewhere. Same answer as the masked run, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.faithful.tower import Tower, tokens_of
from seecause.models.block import fused


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of different lengths, end to end."""

    counts: Tensor  # [B], on the device
    most: int  # no sequence is longer

    @cached_property
    def starts(self) -> Tensor:
        """[B + 1] int32, on the device."""
        return F.pad(self.counts.cumsum(0), (1, 0)).int()

    @cached_property
    def lengths(self) -> list[int]:
        return self.counts.tolist()


def packed_class_rows(tower: Tower, images: Tensor, visible: Tensor) -> Tensor:
    """The class token's row after the last block, [B, D], when only tokens visible [B, T] (bool)
    exist."""
    layout, blocks = tower.layout(images), tower.parts.blocks
    assert layout.class_index is not None
    ragged = Ragged(visible.sum(dim=1), layout.tokens)
    places = visible.flatten().nonzero()[:, 0]  # the only time a GPU is waited for
    h = tokens_of(tower, images).flatten(0, 1)[places][None]  # [1, R, D]
    at = layout.at(images.device).take(places % layout.tokens)
    read = ragged.starts[:-1].long() + layout.class_index
    for block in blocks:
        q, k, v = block.qkv(h, at)
        o = apart(q, k, v, block.scale, ragged)
        if block is blocks[-1]:  # no other row is read
            h, o = h[:, read], o[:, read]
        h = block.finish(h, o)
    return h[0]


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether sequences of different lengths have a kernel of their own: half precision, on a GPU
    from Ampere on."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def apart(q: Tensor, k: Tensor, v: Tensor, scale: float, ragged: Ragged) -> Tensor:
    """Attention of packed rows q, k, v [1, H, R, dh] to their own sequence -> [1, R, H, dh]."""
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms widen them under autocast
    if has_kernel(q.device, q.dtype) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        from torch.nn.attention.varlen import varlen_attn

        rows_q, rows_k, rows_v = (x[0].transpose(0, 1) for x in (q, k, v))  # [R, H, dh]
        o = varlen_attn(
            rows_q,
            rows_k,
            rows_v,
            ragged.starts,
            ragged.starts,
            ragged.most,
            ragged.most,
            scale=scale,
        )
        assert isinstance(o, Tensor)
        return o[None]
    each_q, each_k, each_v = (x.split(ragged.lengths, dim=2) for x in (q, k, v))
    return torch.cat(
        [fused(a, b, c, scale) for a, b, c in zip(each_q, each_k, each_v, strict=True)], dim=1
    )
