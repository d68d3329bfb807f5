"""Head attribution of a prefix language model (PaliGemma) by definition: native runs of the whole
sequence, listened to and changed where the model attends.

Image tokens read the question, so their keys and values hang on it. Those of a picture are what a
plain run of this picture with this question has; those of the average picture are their mean over
plain runs of other pictures with the same question. Then, pair by pair, every text row at every
head reads one or the other, and the text of its own run by the native mask. What image rows
compute in that run is read by nobody.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference.hear import image_span, replaced_attention

KeyValues = list[tuple[Tensor, ...]]  # for each layer, of image tokens, rotated: [Hkv, N, dh]


def _scores(query: Tensor, keys: Tensor, scaling: float, mask: Tensor) -> Tensor:
    return keys @ query * scaling + mask


@torch.no_grad()
def image_keys(module: Any, inputs: dict[str, Any]) -> KeyValues:
    """What a plain run has at its image tokens."""
    start, stop = image_span(module, inputs)
    heard: KeyValues = []

    def attention(
        _: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float,
        **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        heard.append((key[0, :, start:stop].clone(), value[0, :, start:stop].clone()))
        groups = query.shape[1] // key.shape[1]
        out = torch.empty_like(query)
        for head in range(query.shape[1]):
            for row in range(query.shape[2]):
                keys = key[0, head // groups]
                scores = _scores(query[0, head, row], keys, scaling, mask[0, 0, row])
                out[0, head, row] = torch.softmax(scores, dim=0) @ value[0, head // groups]
        return out.transpose(1, 2), None

    with replaced_attention(module, attention):
        module(**inputs, use_cache=False)
    return heard


def average_keys(module: Any, calibration: Sequence[dict[str, Any]]) -> KeyValues:
    """The mean over pictures; all have the same question and the same positions."""
    runs = [image_keys(module, inputs) for inputs in calibration]
    return [
        tuple(torch.stack([run[layer][part] for run in runs]).mean(dim=0) for part in (0, 1))
        for layer in range(len(runs[0]))
    ]


@torch.no_grad()
def blinded(
    module: Any,
    inputs: dict[str, Any],
    average: KeyValues,
    x: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    """Logits [S, V] of all rows for heads x [L, H], text rows u [T] and image tokens v [N]."""
    start, stop = image_span(module, inputs)
    length = inputs["input_ids"].shape[1]
    rows = torch.ones(length - stop, dtype=torch.bool) if u is None else u
    tokens = torch.ones(stop - start, dtype=torch.bool) if v is None else v
    picture = image_keys(module, inputs)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        layer, groups = module.layer_idx, query.shape[1] // key.shape[1]
        out = torch.zeros_like(query)
        for head in range(query.shape[1]):
            for row in range(stop, length):
                keys, values = key[0, head // groups].clone(), value[0, head // groups].clone()
                for token in range(stop - start):
                    sees = bool(x[layer, head] and rows[row - stop] and tokens[token])
                    bank = picture if sees else average
                    keys[start + token] = bank[layer][0][head // groups, token]
                    values[start + token] = bank[layer][1][head // groups, token]
                scores = _scores(query[0, head, row], keys, scaling, mask[0, 0, row])
                out[0, head, row] = torch.softmax(scores, dim=0) @ values
        return out.transpose(1, 2), None

    with replaced_attention(module, attention):
        return module(**inputs, use_cache=False).logits[0]
