"""Everything up to the last image token, run once: no mask changes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seecause.lvlm.prompt import Prompt
from seecause.models.decoder import Decoder, run

KeyValues = list[tuple[Tensor, Tensor]]  # for each block, unrotated keys and values [B, Hkv, P, dh]


@torch.no_grad()
def run_prefix(decoder: Decoder, prompts: Sequence[Prompt]) -> KeyValues:
    """Keys (before rotation) and values of every row up to the last image token, for prompts of one
    shape at once."""
    first = prompts[0]
    end = first.image.stop
    found: KeyValues = []
    states = torch.cat([prompt.embeddings[:, :end] for prompt in prompts])
    deepstack = tuple(
        torch.cat(features)
        for features in zip(*(prompt.deepstack for prompt in prompts), strict=True)
    )
    at = first.at.take(first.at.index[:end])
    run(
        decoder,
        states,
        at,
        deepstack=deepstack,
        image=first.image,
        record=lambda _, k, v: found.append((k, v)),
    )
    return found
