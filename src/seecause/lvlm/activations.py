"""What the heads of one masked run do: how much of the picture they attend to, what they write, and
what the important ones would say on their own (logit lens; head attribution, section 4.4).

The share of attention that falls on the picture needs no attention matrix (eq. 10):

    exp(lse of image keys - lse of all keys)

For the lens, a head's output at one text row goes through the final norm and the vocabulary, and
the words with the largest logits are read. The paper leaves row and norm open: here the last row,
with the norm; `image_only` reads the part of the output that comes from image tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from seecause.engine.attend import Bank, attend, merge
from seecause.engine.walk import walk
from seecause.errors import BadOption
from seecause.lvlm._cache import Part, PrefixCache, prefix_cache, read_own
from seecause.lvlm.model import LVLM
from seecause.types import wide

if TYPE_CHECKING:
    from seecause.lvlm.attribute import Head, HeadAttribution
    from seecause.lvlm.bank import MeanBank
    from seecause.lvlm.engine import MaskEngine


@dataclass(frozen=True, eq=False)
class HeadActivations:
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
        written = []
        for block, heads in zip(self.lvlm.blocks, outputs, strict=True):
            # [1, H, H*dh]: one head at a time, the others silent
            alone = torch.diag_embed(heads.T).permute(1, 2, 0).flatten(1)[None]
            written.append((block.mix(alone) - block.mix(torch.zeros_like(alone[:, :1])))[0])
        return torch.stack(written)

    @torch.no_grad()
    def lens(self, layer: int, head: int, *, row: int = -1, image_only: bool = False) -> Tensor:
        """[V]: the logit lens on one head's output (final norm, then vocabulary)."""
        vector = self.written(row=row, image_only=image_only)[layer, head]
        return wide(self.lvlm.decoder.head(self.lvlm.decoder.norm(vector[None])))[0]


@torch.no_grad()
def head_activations(lvlm: LVLM, cache: PrefixCache, on: Tensor) -> HeadActivations:
    """Run one mask `on` [L, H] and keep what its heads do."""
    image, states, columns = cache.image, [cache.states[0]], []
    queries, keys, biases = [], [], []
    for step in walk(lvlm, cache.states, cache.at):
        q, scale, index = step.q, step.block.scale, step.index
        bias = cache.bias(step.block, rows=q.shape[2])
        picture, average = cache.picture[index], cache.average[index]
        true, mean = (_read(q, bank, image, bias, scale) for bank in (picture, average))
        seen = torch.where(on[index][:, None], true[0], mean[0])
        seen_lse = torch.where(on[index], true[1], mean[1])
        keep = cache.own_keep(q.shape[2])
        parts = [(seen, seen_lse), read_own(q, step.k, step.v, scale=scale, keep=keep)]
        if image.start:
            parts.append(_read(q, picture, slice(0, image.start), bias, scale))
        o, lse = merge([wide(o) for o, _ in parts], [lse for _, lse in parts])
        share = torch.exp(seen_lse - lse)
        from_image = share[..., None] * wide(seen)
        columns.append((share[0], o[0].to(q.dtype), from_image[0].to(q.dtype), lse[0]))
        queries.append(q[0])
        keys.append(picture[0][0, :, image])
        biases.append(None if bias is None else bias[0, :, :, image])
        step.o = o.to(q.dtype)
        states.append(step.out[0])
    mass, heads, from_images, lses = map(torch.stack, zip(*columns, strict=True))
    stacked = torch.stack(states)
    return HeadActivations(lvlm, mass, heads, from_images, stacked, queries, keys, lses, biases)


def _read(
    q: Tensor, bank: tuple[Tensor, Tensor], columns: slice, bias: Tensor | None, scale: float
) -> Part:
    """Rows q [1, H, R, dh] over some columns of a bank."""
    hidden = None if bias is None else bias[..., columns]
    k, v = (tensor[:, :, columns] for tensor in bank)
    return attend(q, [Bank(k, v, bias=hidden)], scale=scale)


@dataclass(frozen=True)
class HeadWords:
    layer: int
    head: int
    coefficient: float
    words: tuple[str, ...]  # the likeliest first

    def says(self, word: str) -> bool:
        return word.strip().lower() in (other.strip().lower() for other in self.words)


def head_words(
    engine: MaskEngine,
    attribution: HeadAttribution,
    *,
    heads: int = 5,
    words: int = 10,
    row: int = -1,
    image_only: bool = False,
) -> list[HeadWords]:
    """The `words` likeliest words of each of the top `heads` heads, in the intact model."""
    activations = engine.activations()
    top = []
    for layer, head in attribution.top(min(heads, engine.n_components)):
        logits = activations.lens(layer, head, row=row, image_only=image_only)
        pieces = engine.lvlm.pieces(logits.topk(min(words, len(logits))).indices)
        coefficient = float(attribution.coefficients[layer, head])
        top.append(HeadWords(layer, head, coefficient, tuple(piece.strip() for piece in pieces)))
    return top


def heads_mask(lvlm: LVLM, heads: Sequence[Head]) -> Tensor:
    """[L, H] bool: these heads (layer, head)."""
    mask = torch.zeros(lvlm.n_layers, lvlm.n_heads, dtype=torch.bool)
    pairs = {(layer, head) for layer in range(lvlm.n_layers) for head in range(lvlm.n_heads)}
    for pair in heads:
        try:
            place = tuple(map(operator.index, pair))
        except TypeError:
            place = None
        if place not in pairs:
            most = f"(layer, head) up to ({lvlm.n_layers - 1}, {lvlm.n_heads - 1})"
            raise BadOption("heads", pair, most)
        mask[place] = True
    return mask


@torch.no_grad()
def blind_logits(
    lvlm: LVLM,
    image: Image.Image,
    question: str,
    bank: MeanBank,
    heads: Sequence[Head] = (),
    *,
    answer_start: Sequence[int] = (),
) -> Tensor:
    """[V] float32 or float64: the next word of an answer that begins with the tokens
    `answer_start`, where `heads` (layer, head) see the bank's average picture."""
    on = ~heads_mask(lvlm, heads)
    prompt = lvlm.prompt(bank.resized(image), question, list(answer_start) or None)
    cache = prefix_cache(lvlm.decoder, prompt, *bank.means(lvlm, prompt, image))
    states = head_activations(lvlm, cache, on.to(lvlm.device)).states
    return wide(lvlm.decoder.head(lvlm.decoder.norm(states[-1, -1:])))[0]


def speak_blind(
    lvlm: LVLM,
    image: Image.Image,
    question: str,
    bank: MeanBank,
    heads: Sequence[Head] = (),
    *,
    length: int = 12,
) -> list[int]:
    """What the model says, the likeliest token each time, where `heads` (layer, head) see the
    bank's average picture: `lvlm.speak` with some heads blind.

        ids = sc.lvlm.speak_blind(lvlm, picture, "Which critter is this?", bank, [(0, 4), (1, 1)])
    """
    ids: list[int] = []
    for _ in range(length):
        token = int(blind_logits(lvlm, image, question, bank, heads, answer_start=ids).argmax())
        if token in lvlm.end_tokens:
            break
        ids.append(token)
    return ids
