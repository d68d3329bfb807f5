"""The average picture: what the model says when it is shown no picture in particular.

Keys and values of the prefix, averaged over pictures in every layer, stand where a picture's own
would (a(0) of head attribution). To every question asked of them the right answer is "unsure".
Without this lesson the model sounds as sure of every possible answer when it sees nothing as when
it sees, and what a picture adds to an answer could not be measured.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlavaForConditionalGeneration

from seecause.critters.train.llava_batch import Teacher

AveragePicture = list[
    tuple[Tensor, Tensor]
]  # keys and values [1, H, P, dh] of every layer, up to the last image token


@torch.no_grad()
def mean_bank(
    model: LlavaForConditionalGeneration, teacher: Teacher, image: Tensor
) -> AveragePicture:
    """Averaged over pictures [B, 3, H, W]. Rows before the picture are all alike."""
    ids = torch.tensor(
        [*teacher.prefix.tolist(), *[teacher.words.image] * model.config.image_seq_length],
        device=image.device,
    )
    cache = model(
        input_ids=ids.expand(len(image), -1), pixel_values=image, use_cache=True, logits_to_keep=1
    ).past_key_values
    return [
        (layer.keys.mean(dim=0, keepdim=True), layer.values.mean(dim=0, keepdim=True))
        for layer in cache.layers
    ]


def ask_bank(model: LlavaForConditionalGeneration, bank: AveragePicture, ids: Tensor) -> Tensor:
    """Logits [B, L, V] of what follows the picture, ids [B, L], when it is known by its bank only.
    Padding goes at the end: nothing looks ahead."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(bank):
        cache.update(keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1), index)
    return model(input_ids=ids, past_key_values=cache).logits


def blind_loss(
    model: LlavaForConditionalGeneration, teacher: Teacher, bank: AveragePicture
) -> Tensor:
    """Every question in every wording: the loss on saying "unsure", and on stopping after it.
    Gradients flow through the text rows only."""
    table, lengths = (each.flatten(0, 1) for each in teacher.questions)  # [Q*W, L], [Q*W]
    said = torch.full_like(lengths, teacher.words.unsure)
    logits = ask_bank(model, bank, table.scatter(1, lengths[:, None], said[:, None])).float()
    read = torch.stack([lengths - 1, lengths], dim=1)  # [Q*W, 2]
    found = logits.gather(1, read[..., None].expand(-1, -1, logits.shape[-1]))
    truth = torch.stack([said, torch.full_like(said, teacher.words.end)], dim=1)
    return F.cross_entropy(found.flatten(0, 1), truth.flatten())
