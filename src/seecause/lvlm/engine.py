"""Thousands of partly blinded copies of one answer, from one run of the picture (head attribution,
sections 3.1 and 3.2).

A mask says which heads (x), for which text rows (u), see which image tokens (v); whoever may not
see a token sees the average picture's instead:

    text row i at head n reads image token j truly where x_n = u_i = v_j = 1, else its average
    (eq. 8, appendix A.4)
    a = logit of the answer - mean logit of the vocabulary,    F = (a - a(0)) / (a(1) - a(0))

Nothing up to the last image token depends on a mask, so it runs once. What remains are the text
rows of each mask: rows of ordinary matrix products, two shared banks of image keys, and one dot
product instead of logits. Masks that agree in the first blocks share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from seecause import __version__
from seecause.engine.attend import Bank, Mask, attend
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.mixture import part_without_gradient
from seecause.engine.walk import walk
from seecause.errors import BadOption, NotDefined, WeakAnswer
from seecause.lvlm._cache import (
    Part,
    PrefixCache,
    has_fused_read,
    prefix_cache,
    read_shared,
    with_own_text,
)
from seecause.lvlm.activations import HeadActivations, head_activations
from seecause.lvlm.bank import MeanBank
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


class MaskEngine:
    """One picture, one question, one word of the answer, ready for masks.

    `answer` (text or token ids) and `position` choose the word: the k-th token of the answer, those
    before it taken as said. Without an answer it is the model's own. `floor` is the least the
    picture must move the answer towards itself, in logits; None, for models that are not trained,
    takes any effect, against the answer too. `vocabulary` cuts the mean logit to the first words,
    where a model pads its vocabulary. A `Prompt` in place of the picture needs no question.
    """

    @torch.no_grad()
    def __init__(
        self,
        lvlm: LVLM,
        image: Image.Image | Prompt,
        question: str | None,
        bank: MeanBank,
        *,
        answer: str | Sequence[int] | None = None,
        position: int = 0,
        floor: float | None = 1.0,
        vocabulary: int | None = None,
        block_size: int | None = None,
    ):
        self.lvlm, self.question, self.position = lvlm, question, position
        self.floor, self.vocabulary, self.block_size = floor, vocabulary, block_size
        seen = image if isinstance(image, Prompt) else bank.resized(image)
        self.prompt, target = _sequence(lvlm, seen, question, answer, position)
        original = image if isinstance(image, Image.Image) else None
        means = bank.means(lvlm, self.prompt, original)
        self.cache = prefix_cache(lvlm.decoder, self.prompt, *means)
        self._later_cache: PrefixCache | None = None  # from a later text row on, for the next call
        self._differentiable = False  # until it was looked at
        self.bank = {"mode": bank.mode, "pictures": len(bank), "size": bank.size}
        self.target = int(self._intact_logits().argmax()) if target is None else target
        self.readout = lvlm.readout(self.target, vocabulary)
        ends = self.adjusted(torch.tensor([[False], [True]]).expand(2, self.n_components))
        self.ablated, self.intact = (float(a) for a in ends)  # a(0), a(1)
        enough = self.span != 0 if floor is None else self.span > 0 and self.span >= floor
        if not enough or not torch.isfinite(ends).all():
            raise WeakAnswer(self.answer, self.span, floor or 0)

    @property
    def span(self) -> float:
        """a(1) - a(0): how far the picture moves the answer, in logits."""
        return self.intact - self.ablated

    @property
    def answer(self) -> str:
        """The explained token."""
        return self.lvlm.pieces(torch.tensor([self.target]))[0]

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

    def evaluate(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """F [M] of masks heads [M, L*H] (or [M, L, H]), text [M, T] and image [M, N]; one row
        serves all. Not clipped: F may leave [0, 1]."""
        return (self.adjusted(heads, text, image) - self.ablated) / self.span

    @torch.no_grad()
    def adjusted(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """a [M]: the answer's logit less the vocabulary's mean, in float32 (float64 for a float64
        model)."""
        masks = check_masks(heads, text, image, self._grid, self.n_text, self.n_image)
        order = masks.order()
        masks, cache = masks.take(order), self._cache_for(masks.text)
        size = width = self.at_once(len(masks), cache, mixed=masks.image is not None)
        sent = masks.to(self.lvlm.device)  # at once: a copy for each block waits for the one before

        def run_chunk(start: int, stop: int) -> Tensor:
            nonlocal width
            if stop < len(masks):
                width = stop - start  # halved when memory ran out
            part = (start, stop, width if self._pads else stop - start)
            return self._run(masks.block(*part), sent.block(*part), cache)[: stop - start]

        answers = torch.cat(list(in_chunks(run_chunk, len(masks), size, what="masks")))
        return torch.empty_like(answers).scatter_(0, order.to(answers.device), answers)

    def slopes(
        self,
        heads: Tensor | None = None,
        text: Tensor | None = None,
        image: Tensor | None = None,
        *,
        of: MaskKind = "heads",
    ) -> tuple[Tensor, Tensor]:
        """F [M] of soft masks, entries from 0 to 1, and its derivative with respect to those `of`
        heads [M, L*H], text [M, T] or image [M, N].

        Between 0 and 1 a head brings so much of what it would bring with the picture, and the rest
        of what it would bring with the average; a text row likewise; an image token's two keys
        weigh so much in the softmax. At 0 and 1, F is that of `evaluate`.
        """
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
            x.is_inference() for x in (self.readout, cache.states, self.lvlm.decoder.head.weight)
        ):
            raise _no_slope("they were made in inference mode")
        self._need_gradients()

        def run_chunk(start: int, stop: int) -> Tensor:
            with torch.inference_mode(False), torch.enable_grad():
                chunk = masks.block(start, stop, stop - start).to(self.lvlm.device)
                variable = getattr(chunk, of).clone().requires_grad_()
                answers = self._run(chunk, replace(chunk, **{of: variable}), cache)
                slopes = _gradient(answers, variable).flatten(1)
            return torch.cat([answers.detach()[:, None], slopes], dim=1)

        both = torch.cat(list(in_chunks(run_chunk, len(masks), size, what="masks")))  # [M, 1 + P]
        return (both[:, 0] - self.ablated) / self.span, both[:, 1:] / self.span

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

    def protocol(self) -> dict[str, Any]:
        """What a result must say about its making."""
        lvlm = self.lvlm
        return {
            "model": lvlm.name, "fingerprint": lvlm.fingerprint(), "question": self.question,
            "answer": self.answer, "target": self.target,
            "position": self.position, "bank": self.bank, "image_tokens": str(self.prompt.tokens),
            "text": list(self.prompt.pieces),
            "vocabulary": self.vocabulary, "floor": self.floor, "intact": self.intact,
            "ablated": self.ablated,
            "dtype": str(lvlm.dtype).removeprefix("torch."), "device": str(lvlm.device),
            "seecause": __version__, "torch": torch.__version__,
        }  # fmt: skip

    @property
    def _grid(self) -> tuple[int, int]:
        return self.lvlm.n_layers, self.lvlm.n_heads

    def _run(self, masks: MaskBatch, sent: MaskBatch, cache: PrefixCache) -> Tensor:
        """a [B] of one block of masks; `sent` are the same on the device."""
        need_settled([self.lvlm.module], self.lvlm.device)
        text = None if sent.text is None else sent.text[:, cache.start :]  # [1|B, R]
        soft = isinstance(masks, SoftMasks)
        mixed: Mixed | None = None
        if sent.image is not None and soft:
            mixed = cache.softly_mixed(sent.image)
        elif sent.image is not None:
            mixed = {rows: cache.mixed(sent.image, rows) for rows in (len(cache.at.index), 1)}
        shared = masks.shared_layers()
        sees_picture, sees_average = masks.sees_picture(), masks.sees_average()
        steps = walk(self.lvlm, cache.states, cache.at)  # states [1, R, D] until masks part
        for step in steps:
            index, last = step.index, step.index == self.lvlm.n_layers - 1
            masks_here = slice(0, 1 if index < shared else None)
            choose = sent.heads[masks_here, index, None, :]  # [1|B, 1, H]
            if text is not None:
                choose = choose * text[masks_here, :, None]
            if last:  # only the last row is read
                step.take(slice(-1, None))
                choose = choose[:, -1:]
            q, scale = step.q, step.block.scale
            bias = cache.bias(step.block, rows=q.shape[2])
            picture = self._picture(cache, index, q, bias, mixed) if sees_picture[index] else None
            average = None
            if sees_average[index]:
                average = read_shared(q, *cache.average[index], scale=scale, bias=bias)
            choose = choose.expand(-1, q.shape[2], -1).contiguous()
            step.o = with_own_text(q, step.k, step.v, picture, average, choose, scale=scale)
        states = wide(self.lvlm.decoder.norm(steps.h[:, -1]))
        return (states @ self.readout).expand(len(masks))

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
        seeing = text.any(dim=0)
        start = int(seeing.int().argmax()) if bool(seeing.any()) else self.n_text - 1
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

    def _intact_logits(self) -> Tensor:
        """The native answer at the last row, [V]."""
        inputs = self.prompt.inputs
        return self.lvlm.module(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1]


def _gradient(answers: Tensor, variable: Tensor) -> Tensor:
    """Of every answer [B] with respect to its own row of `variable` [B, ...]."""
    if not answers.requires_grad:
        raise _no_slope("quantised layers, or others, pass none on")
    return torch.autograd.grad(answers.sum(), variable)[0]


def _no_slope(reason: str) -> NotDefined:
    return NotDefined(
        "a derivative", f"this model's weights allow none ({reason})",
        "Ask with how='fit' (--how fit), which needs answers only",
    )  # fmt: skip


def _sequence(
    lvlm: LVLM,
    image: Image.Image | Prompt,
    question: str | None,
    answer: str | Sequence[int] | None,
    position: int,
) -> tuple[Prompt, int | None]:
    """The prompt, with the answer's tokens before `position` behind it, and the token to explain
    (None: whatever the model says next)."""
    if position < 0:
        raise BadOption("position", position, "a token of the answer, from 0 on")
    if isinstance(image, Prompt):
        if isinstance(answer, str) or (answer is not None and len(answer) != 1) or position:
            raise BadOption(
                "answer",
                answer,
                "None or one token id with a Prompt, which holds everything said before it",
            )
        return image, None if answer is None else int(answer[0])
    if question is None:
        raise BadOption("question", question, "a question about the picture")
    if answer is None:
        prompt = lvlm.prompt(image, question)
        if position == 0:
            return prompt, None
        ids, whose = lvlm.speak(prompt, position + 1), "the model's own answer"
    elif isinstance(answer, str):
        ids, whose = lvlm.answer_ids(image, question, answer), f"the answer {answer!r}"
    else:
        ids, whose = [int(i) for i in answer], f"the answer {answer!r}"
    if position >= len(ids):
        raise BadOption("position", position, f"below {len(ids)}, the number of tokens in {whose}")
    prompt = lvlm.prompt(image, question, ids[:position] or None)
    return prompt, None if answer is None else ids[position]
