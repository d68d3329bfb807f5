"""A vision-language model as a classifier, by definition: one picture, one prompt and one native
forward at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def next_words(module: Any, ids: Sequence[int], image: Tensor) -> Tensor:
    """Log-probabilities [S, V] of what follows each token of a prompt about one picture [3, H,
    W]."""
    tokens = torch.tensor([list(ids)])
    shown = {"pixel_values": image[None]}
    if hasattr(module.config, "image_grid_pinpoints"):  # the whole, and one tile that is the whole
        shown = {"pixel_values": image.repeat(1, 2, 1, 1, 1)}
        shown["image_sizes"] = torch.tensor([image.shape[1:]])
    out = module(input_ids=tokens, **shown, attention_mask=torch.ones_like(tokens), use_cache=False)
    return out.logits[0].log_softmax(dim=-1)


def by_names(
    module: Any,
    prompt: Sequence[int],
    names: Sequence[Sequence[int]],
    images: Tensor,
    *,
    mean: bool = True,
) -> Tensor:
    """[B, C]: the mean (or summed) log-likelihood of each name as the answer."""
    table = torch.zeros(len(images), len(names), dtype=images.dtype)
    for i, image in enumerate(images):
        for c, name in enumerate(names):
            said = next_words(module, [*prompt, *name], image)
            steps = [float(said[len(prompt) - 1 + t, token]) for t, token in enumerate(name)]
            table[i, c] = sum(steps) / (len(steps) if mean else 1)
    return table


def by_labels(
    module: Any, prompts: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], images: Tensor
) -> Tensor:
    """[B, C]: log-probabilities among the label tokens at the end of each prompt, averaged over
    prompts. `labels[o][c]` is class c's in prompt o."""
    table = torch.zeros(len(images), len(labels[0]), dtype=images.dtype)
    for i, image in enumerate(images):
        for prompt, tokens in zip(prompts, labels, strict=True):
            among = torch.stack([next_words(module, prompt, image)[-1, token] for token in tokens])
            table[i] += among.log_softmax(dim=0) / len(prompts)
    return table
