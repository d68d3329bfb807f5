"""The rows that run for every mask, and the keys that no mask changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.engine.mask import Mask
from seecause.lvlm.attention import blend, read_own, read_shared
from seecause.lvlm.prefix import run_prefix
from seecause.lvlm.prompt import Prompt
from seecause.models.block import Block
from seecause.models.decoder import Decoder, causal, rotate
from seecause.models.layout import At

KeyValue = tuple[Tensor, Tensor]  # [1, Hkv, K, dh]


@dataclass(frozen=True, eq=False)
class Stage:
    """Text rows from `start` on, and two banks for each block: what came before them, with the
    picture or with its average."""

    start: int
    states: Tensor  # [1, R, D] entering the first block
    at: At  # their positions, [R]
    keys_at: At  # positions of the keys, [K]
    image: slice  # image tokens among the keys
    picture: list[KeyValue]
    average: list[KeyValue]

    def mixed(self, image: Tensor, rows: int) -> tuple[Mask, Mask]:
        """Which keys of the picture's and of the average's bank `rows` rows read, where some image
        tokens [B, N] are averaged."""
        picture = torch.ones(
            len(image), len(self.keys_at.index), dtype=torch.bool, device=image.device
        )
        picture[:, self.image] = image
        spread = picture[:, None, None].expand(-1, 1, rows, -1)  # [B, 1, R, K]
        return Mask(spread), Mask(~spread)

    @torch.no_grad()
    def from_row(self, blocks: Sequence[Block], row: int) -> Stage:
        """The stage of text rows `row` and later, when no row before may see the picture: those run
        once, and their keys join both banks."""
        h, at = self.states[:, :row], self.at.take(self.at.index[:row])
        picture: list[KeyValue] = []
        average: list[KeyValue] = []
        for index, block in enumerate(blocks):
            q, k, v = block.qkv(h, at)
            bias = None if block.additive is causal else block.bias(at, self.keys_at)
            seen = read_shared(q, *self.average[index], scale=block.scale, bias=bias)
            own = read_own(q, k, v, scale=block.scale)
            h = block.finish(h, blend(own, None, seen, torch.zeros_like(own[1], dtype=torch.bool)))
            for banks, old in ((picture, self.picture[index]), (average, self.average[index])):
                banks.append((torch.cat([old[0], k], dim=2), torch.cat([old[1], v], dim=2)))
        return Stage(
            start=self.start + row,
            states=self.states[:, row:],
            at=self.at.take(self.at.index[row:]),
            keys_at=self.at.take(torch.cat([self.keys_at.index, at.index])),
            image=self.image,
            picture=picture,
            average=average,
        )


def first_stage(decoder: Decoder, prompt: Prompt, mean_keys: Tensor, mean_values: Tensor) -> Stage:
    """Both banks, rotated: keys before the picture, then the picture or its average."""
    before, image, text = slice(0, prompt.image.start), prompt.image, prompt.text
    at = prompt.at.take(prompt.at.index[: image.stop])
    image_at = prompt.at.take(prompt.at.index[image])
    picture, average = [], []
    for index, (unrotated, values) in enumerate(run_prefix(decoder, [prompt])):
        keys = rotate(unrotated, at)
        picture.append((keys, values))
        mean = rotate(mean_keys[None, index], image_at)
        average.append(
            (
                torch.cat([keys[:, :, before], mean], dim=2),
                torch.cat([values[:, :, before], mean_values[None, index]], dim=2),
            )
        )
    return Stage(
        start=0,
        states=prompt.embeddings[:, text],
        at=prompt.at.take(prompt.at.index[text]),
        keys_at=at,
        image=image,
        picture=picture,
        average=average,
    )
