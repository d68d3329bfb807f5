"""The text rows of one prompt under many masks: what engines of one word and of a whole answer
share (see `engine.py`).

Nothing up to the last image token depends on a mask, so it runs once. What remains are the text
rows of each mask: rows of ordinary matrix products, two shared banks of image keys, and one dot
product a word instead of logits. Masks that agree in the first blocks share them. Rows look back
only, so one run answers for every word at the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from seecause.engine.attend import Bank, Mask, attend
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.mixture import part_without_gradient
from seecause.engine.walk import walk
from seecause.errors import BadOption, NotDefined
from seecause.lvlm._cache import (
    Part,
    PrefixCache,
    has_fused_read,
    prefix_cache,
    read_shared,
    with_own_text,
)
from seecause.lvlm.activations import HeadActivations, head_activations
from seecause.lvlm.masks import MaskBatch, SoftMasks, check_masks, check_soft_masks
from seecause.lvlm.model import LVLM
from seecause.lvlm.prompt import Prompt
from seecause.models._settled import need_settled
from seecause.models.decoder import causal
from seecause.types import wide, wide_dtype

# masks at once, when all text rows run; more is not faster, and thousands divide evenly
MOST = {"cuda": 500, "cpu": 64}
MaskKind = Literal["heads", "text", "image"]
# which image keys are read: masks by the number of rows, or weights of both banks' keys
Mixed = dict[int, tuple[Mask, Mask]] | tuple[Tensor, Tensor]
Read = Callable[[Tensor], Tensor]  # normed states [B, W, D] -> [B, anything]


class MaskedRows:
    """The last `n_words` text rows of a prompt, each before the word it foretells."""

    n_words = 1

    def __init__(
        self, lvlm: LVLM, prompt: Prompt, means: tuple[Tensor, Tensor], block_size: int | None
    ):
        self.lvlm, self.prompt, self.block_size = lvlm, prompt, block_size
        self.cache = prefix_cache(lvlm.decoder, prompt, *means)
        self._later_cache: PrefixCache | None = None  # from a later text row on, for the next call
        self._differentiable = False  # until it was looked at
        self.progress: Callable[[int], None] = lambda done: None  # hears how many masks have run

    @property
    def _readouts(self) -> Tensor:
        """[W, D] or [1, D]: their dot products with normed states are the words' adjusted
        logits."""
        raise NotImplementedError

    @property
    def n_components(self) -> int:
        """L * H, layer by layer."""
        return self.lvlm.n_layers * self.lvlm.n_heads

    @property
    def n_text(self) -> int:
        return self.prompt.n_text

    @property
    def n_image(self) -> int:
        return self.prompt.n_image

    @torch.no_grad()
    def _answers(
        self,
        heads: Tensor | None = None,
        text: Tensor | None = None,
        image: Tensor | None = None,
        read: Read | None = None,
    ) -> Tensor:
        """[M, W]: the words' logits less the vocabulary's mean, in float32 (float64 for a float64
        model); or what else is `read` of the states, [M, ...]."""
        masks = check_masks(heads, text, image, self._grid, self.n_text, self.n_image)
        order = masks.order()
        masks, cache = masks.take(order), self._cache_for(masks.text)
        size = width = self.at_once(len(masks), cache, mixed=masks.image is not None)
        sent = masks.to(self.lvlm.device)  # at once: a copy for each block waits for the one before
        other = () if read is None else (read,)

        def run_chunk(start: int, stop: int) -> Tensor:
            nonlocal width
            if stop < len(masks):
                width = stop - start  # halved when memory ran out
            part = (start, stop, width if self._pads else stop - start)
            values = self._run(masks.block(*part), sent.block(*part), cache, *other)
            self.progress(stop - start)
            return values[: stop - start]

        answers = torch.cat(list(in_chunks(run_chunk, len(masks), size, what="masks")))
        return torch.empty_like(answers).index_copy_(0, order.to(answers.device), answers)

    def _slopes(
        self,
        heads: Tensor | None,
        text: Tensor | None,
        image: Tensor | None,
        of: MaskKind,
    ) -> tuple[Tensor, Tensor]:
        """Adjusted logits [M, W] of soft masks, and their derivatives [M, W, P] with respect to
        those `of` heads, text or image. One run, and one run back for each word."""
        dtype = wide_dtype(self.lvlm.dtype)
        given = {"heads": heads, "text": text, "image": image}
        widths = {"heads": self.n_components, "text": self.n_text, "image": self.n_image}
        if of not in widths:
            raise BadOption("of", of, "heads, text or image")
        count = max((len(mask) for mask in given.values() if mask is not None), default=1)
        mask = given[of]
        leaf = torch.ones(1, widths[of]) if mask is None else mask
        if len(leaf) == 1:
            leaf = leaf.expand(count, *leaf.shape[1:])  # a derivative for each mask
        heads, text, image = (given | {of: leaf}).values()
        shape = (self._grid, self.n_text, self.n_image)
        masks = check_soft_masks(heads, text, image, *shape, dtype)
        size = self._with_gradient_at_once(len(masks), mixed=masks.image is not None)
        cache = self.cache if of == "text" else self._cache_for(masks.text)
        if any(
            x.is_inference() for x in (self._readouts, cache.states, self.lvlm.decoder.head.weight)
        ):
            raise _no_slope("they were made in inference mode")
        self._need_gradients()

        def run_chunk(start: int, stop: int) -> Tensor:
            with torch.inference_mode(False), torch.enable_grad():
                chunk = masks.block(start, stop, stop - start).to(self.lvlm.device)
                variable = getattr(chunk, of).clone().requires_grad_()
                answers = self._run(chunk, replace(chunk, **{of: variable}), cache)
                slopes = _gradients(answers, variable).flatten(2)  # [B, W, P]
            self.progress(stop - start)
            return torch.cat([answers.detach()[..., None], slopes], dim=2)

        both = torch.cat(list(in_chunks(run_chunk, len(masks), size, what="masks")))
        return both[..., 0], both[..., 1:]

    def _need_gradients(self) -> None:
        """Refuse a model that loses gradients on the way; looked at once."""
        if self._differentiable:
            return
        first = self.cache.at.take(self.cache.at.index[:1])
        part = part_without_gradient(self.lvlm.blocks, self.cache.states[:, :1], first)
        if part is not None:
            raise _no_slope(f"no gradient passes the {part}, as in quantised layers")
        self._differentiable = True

    @torch.no_grad()
    def activations(self, heads: Tensor | None = None) -> HeadActivations:
        """What every head does at every text row, for one mask [L*H] (None: the intact model):
        attention on the picture, outputs."""
        row = None if heads is None else heads.reshape(1, -1)
        masks = check_masks(row, None, None, self._grid, self.n_text, self.n_image)
        return head_activations(self.lvlm, self.cache, masks.heads[0].to(self.lvlm.device))

    @property
    def _grid(self) -> tuple[int, int]:
        return self.lvlm.n_layers, self.lvlm.n_heads

    def _run(
        self, masks: MaskBatch, sent: MaskBatch, cache: PrefixCache, read: Read | None = None
    ) -> Tensor:
        """a [B, W] of one block of masks, or what is `read`; `sent` are the same on the device."""
        words = self.n_words
        need_settled([self.lvlm.module], self.lvlm.device)
        text = None if sent.text is None else sent.text[:, cache.start :]  # [1|B, R]
        soft = isinstance(masks, SoftMasks)
        mixed: Mixed | None = None
        if sent.image is not None and soft:
            mixed = cache.softly_mixed(sent.image)
        elif sent.image is not None:
            mixed = {rows: cache.mixed(sent.image, rows) for rows in (len(cache.at.index), words)}
        shared = masks.shared_layers()
        sees_picture, sees_average = masks.sees_picture(), masks.sees_average()
        steps = walk(self.lvlm, cache.states, cache.at)  # states [1, R, D] until masks part
        for step in steps:
            index, last = step.index, step.index == self.lvlm.n_layers - 1
            masks_here = slice(0, 1 if index < shared else None)
            choose = sent.heads[masks_here, index, None, :]  # [1|B, 1, H]
            if text is not None:
                choose = choose * text[masks_here, :, None]
            if last:  # only the last rows are read
                step.take(slice(-words, None))
                choose = choose if choose.shape[1] == 1 else choose[:, -words:]
            q, scale = step.q, step.block.scale
            bias = cache.bias(step.block, rows=q.shape[2])
            picture = self._picture(cache, index, q, bias, mixed) if sees_picture[index] else None
            average = None
            if sees_average[index]:
                average = read_shared(q, *cache.average[index], scale=scale, bias=bias)
            choose = choose.expand(-1, q.shape[2], -1).contiguous()
            step.o = with_own_text(q, step.k, step.v, picture, average, choose, scale=scale)
        states = self.lvlm.decoder.norm(steps.h[:, -words:])  # [1|B, W, D]
        values = (wide(states) * self._readouts).sum(dim=-1) if read is None else read(states)
        return values.expand(len(masks), *values.shape[1:])

    def _picture(
        self,
        cache: PrefixCache,
        index: int,
        q: Tensor,
        bias: Tensor | None,
        mixed: Mixed | None,
    ) -> Part:
        """What rows see of the picture where they may: all of it, or the tokens that are not
        averaged."""
        scale = self.lvlm.blocks[index].scale
        if mixed is None:
            return read_shared(q, *cache.picture[index], scale=scale, bias=bias)
        both = (cache.picture[index], cache.average[index])
        if isinstance(mixed, tuple):
            weights = [weight if bias is None else weight + bias for weight in mixed]
            banks = [Bank(*kv, bias=weight) for kv, weight in zip(both, weights, strict=True)]
            many = len(mixed[0])
        else:
            masks = mixed[q.shape[2]]
            banks = [Bank(*kv, keep=keep, bias=bias) for kv, keep in zip(both, masks, strict=True)]
            many = len(masks[0].keep)
        return attend(q.expand(max(len(q), many), -1, -1, -1), banks, scale=scale)

    def _cache_for(self, text: Tensor | None) -> PrefixCache:
        """The rows that masks can change: those before the first that may see the picture are the
        same in every mask."""
        if text is None:
            return self.cache
        seeing, last = text.any(dim=0), self.n_text - self.n_words  # words are read from here on
        start = min(last, int(seeing.int().argmax())) if bool(seeing.any()) else last
        if start == 0:
            return self.cache
        if self._later_cache is None or self._later_cache.start != start:
            self._later_cache = self.cache.from_row(self.lvlm, start)
        return self._later_cache

    @property
    def _pads(self) -> bool:
        """A GPU picks its kernels by shape: blocks of one size round alike."""
        return self.lvlm.device.type == "cuda"

    def at_once(self, total: int, cache: PrefixCache | None = None, *, mixed: bool = False) -> int:
        """How many of `total` masks run at once; a few are padded to a power of two."""
        lvlm, block = self.lvlm, self.lvlm.blocks[0]
        bytes_each, width = torch.finfo(lvlm.dtype).bits // 8, block.heads * block.head_dim
        hidden = lvlm.decoder.native.config.intermediate_size
        explicit = block.additive is not causal or (mixed and not self._pads)  # no fused kernel
        scores = 12 * block.heads * 2 * self.prompt.image.stop if explicit else 0
        rows = self.n_text - (cache or self.cache).start
        each = rows * (bytes_each * (12 * width + 3 * hidden) + 16 * width + scores)
        most = MOST["cuda" if self._pads else "cpu"] * self.n_text // rows
        size = self.block_size or fit(most, each, lvlm.device)
        return min(size, 1 << max(3, (total - 1).bit_length()))

    def _with_gradient_at_once(self, total: int, *, mixed: bool) -> int:
        """How many of `total` masks run at once where everything is held for the way back."""
        lvlm, block, layers = self.lvlm, self.lvlm.blocks[0], self.lvlm.n_layers
        bytes_each, width = torch.finfo(lvlm.dtype).bits // 8, block.heads * block.head_dim
        hidden = lvlm.decoder.native.config.intermediate_size
        states = bytes_each * (20 * width + 5 * hidden) + 60 * width
        # a fused read of the picture makes its scores again on the way back, a block at a time
        again = not mixed and block.additive is causal and has_fused_read(self.cache.picture[0][0])
        picture = 60 * block.heads * self.prompt.image.stop * (1 if again else layers)
        text = 30 * block.heads * self.n_text * layers
        each = self.n_text * (layers * states + picture + text)
        return self.block_size or fit(total, each, lvlm.device)


def _gradients(answers: Tensor, variable: Tensor) -> Tensor:
    """[B, W, ...]: of every word's answers [B, W] with respect to their own row of `variable`
    [B, ...]."""
    if not answers.requires_grad:
        raise _no_slope("quantised layers, or others, pass none on")
    words = answers.sum(dim=0).unbind()
    return torch.stack(
        [
            torch.autograd.grad(word, variable, retain_graph=index < len(words) - 1)[0]
            for index, word in enumerate(words)
        ],
        dim=1,
    )


def _no_slope(reason: str) -> NotDefined:
    return NotDefined(
        "a derivative", f"this model's weights allow none ({reason})",
        "Ask with how='fit' (--how fit), which needs answers only",
    )  # fmt: skip
