"""In which precision a device learns."""

from __future__ import annotations

import torch

from seecause.faithful.config import Precision


def precision_for(asked: Precision, device: str, *, native: bool) -> torch.dtype:
    """`auto` on a GPU: bfloat16 where its arithmetic is `native`, else float16, which needs a loss
    scaler; float32 elsewhere."""
    if asked != "auto":
        return getattr(torch, asked)
    if device != "cuda":
        return torch.float32
    return torch.bfloat16 if native else torch.float16


def native_bfloat16(device: torch.device) -> bool:
    """Whether a GPU computes in bfloat16 itself; older ones emulate it, slowly."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)
