"""Thousands of partly blinded copies of one answer, from one run of the picture (head attribution,
sections 3.1 and 3.2).

A mask says which heads (x), for which text rows (u), see which image tokens (v); whoever may not
see a token sees the average picture's instead:

    text row i at head n reads image token j where x_n = u_i = v_j = 1, else its average (eq. 8)
    a = logit of the answer - mean logit of the vocabulary,    F = (a - a(0)) / (a(1) - a(0))

Nothing up to the last image token depends on a mask, so it runs once. What remains are the text
rows of each mask: rows of ordinary matrix products, two shared banks of image keys, and one dot
product a word instead of logits. Masks that agree in the first blocks share them. Rows of an answer
look back only, so one run answers for every word at the end of the prompt (`words.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torch import Tensor

from seecause import __version__
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.sweep import part_without_gradient
from seecause.engine.walk import walk
from seecause.errors import BadInput, BadOption, NotDefined
from seecause.lvlm._cache import (
    PrefixCache,
    has_fused_read,
    prefix_cache,
    read_shared,
    with_own_text,
)
from seecause.lvlm.analysis import HeadActivations, head_activations
from seecause.lvlm.bank import MeanBank, checked_bank
from seecause.lvlm.masks import MaskBatch, check_masks
from seecause.lvlm.model import LVLM
from seecause.lvlm.prompt import Prompt
from seecause.models.decoder import sees_all_before
from seecause.models.eval_mode import check_eval_mode
from seecause.types import wide, wide_dtype

# masks at once, when all text rows run; more is not faster, and thousands divide evenly
MOST = {"cuda": 500, "cpu": 64}
MaskKind = Literal["heads", "text", "image"]
Read = Callable[[Tensor], Tensor]  # normed states [B, W, D] -> [B, anything]


class MaskedRows:
    """The last text rows of a prompt, each before one of W tokens that it foretells."""

    def __init__(
        self,
        lvlm: LVLM,
        prompt: Prompt,
        question: str | None,
        bank: MeanBank,
        picture: Image.Image | None,
        targets: list[int],
        vocabulary: int | None,
        block_size: int | None,
    ):
        self.lvlm, self.prompt, self.question = lvlm, prompt, question
        self.n_words, self.n_text, self.n_image = len(targets), prompt.n_text, prompt.n_image
        self.n_components = lvlm.n_layers * lvlm.n_heads  # L * H, layer by layer
        if block_size is not None and block_size < 1:
            raise BadOption("block_size", block_size, "at least one mask at once")
        self.vocabulary, self.block_size = vocabulary, block_size
        self.bank = {"mode": checked_bank(bank).mode, "pictures": len(bank), "size": bank.size}
        self.cache = prefix_cache(lvlm.decoder, prompt, *bank.means(lvlm, prompt, picture))
        self._later_cache: PrefixCache | None = None  # from a later text row on, for the next call
        self._differentiable = False  # until it was looked at
        self.progress: Callable[[int], None] = lambda done: None  # hears how many masks have run
        # [W, D]: their dot products with normed states are the words' adjusted logits
        self.readouts = torch.stack([lvlm.readout(token, vocabulary) for token in targets])

    def protocol(self) -> dict[str, Any]:
        """What a result must say about its making."""
        lvlm, tokens = self.lvlm, str(self.prompt.tokens)
        return {
            "model": lvlm.name, "fingerprint": lvlm.fingerprint(), "question": self.question,
            "bank": self.bank, "image_tokens": tokens, "vocabulary": self.vocabulary,
            "dtype": str(lvlm.dtype).removeprefix("torch."), "device": str(lvlm.device),
            "seecause": __version__, "torch": torch.__version__,
        }  # fmt: skip

    def _ends(self) -> Tensor:
        """[2, P]: masks in which no head sees the picture, and in which all do."""
        return torch.tensor([[False], [True]]).expand(2, self.n_components)

    @torch.no_grad()
    def _answers(self, masks: MaskBatch, read: Read | None = None) -> Tensor:
        """[M, W]: the words' adjusted logits, or what else is `read` of the states, [M, ...]."""
        order = masks.order()
        masks, cache = masks.take(order), self._cache_for(masks.text)
        size = width = self.at_once(len(masks), cache, mixed=masks.image is not None)
        sent = masks.to(self.lvlm.device)  # at once: a copy for each block waits for the one before

        def run_chunk(start: int, stop: int) -> Tensor:
            nonlocal width
            if stop < len(masks):
                width = stop - start  # halved when memory ran out
            part = (start, stop, width if self._pads else stop - start)
            values = self._run(masks.block(*part), sent.block(*part), cache, read)
            self.progress(stop - start)
            return values[: stop - start]

        answers = torch.cat(list(in_chunks(run_chunk, len(masks), size, what="masks")))
        return torch.empty_like(answers).index_copy_(0, order.to(answers.device), answers)

    def slopes(
        self,
        heads: Tensor | None = None,
        text: Tensor | None = None,
        image: Tensor | None = None,
        *,
        of: MaskKind = "heads",
    ) -> tuple[Tensor, Tensor]:
        """Adjusted logits [M, W] of soft masks, and their derivatives [M, W, P] with respect to
        one kind of mask. One run, and one run back for each word."""
        if of not in get_args(MaskKind):
            raise BadOption("of", of, "heads, text or image")
        dtype = wide_dtype(self.lvlm.dtype)
        masks = self._checked(heads, text, image, soft=dtype)
        leaf = getattr(masks, of)
        if leaf is None:
            leaf = torch.ones(1, self.n_text if of == "text" else self.n_image, dtype=dtype)
        masks = replace(masks, **{of: leaf.expand(len(masks), *leaf.shape[1:])})  # a slope each
        size = self._with_gradient_at_once(len(masks), mixed=masks.image is not None)
        cache = self.cache if of == "text" else self._cache_for(masks.text)
        self._need_gradients(cache)

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

    def _need_gradients(self, cache: PrefixCache) -> None:
        """Refuse a model that loses gradients on the way; its blocks are looked at once."""
        made = (self.readouts, cache.states, self.lvlm.decoder.head.weight)
        if any(tensor.is_inference() for tensor in made):
            raise _no_slope("they were made in inference mode")
        if self._differentiable:
            return
        first = self.cache.at.take(self.cache.at.index[:1])
        part = part_without_gradient(self.lvlm.blocks, self.cache.states[:, :1], first)
        if part is not None:
            raise _no_slope(f"no gradient passes the {part}, as in quantised layers")
        self._differentiable = True

    @torch.no_grad()
    def activations(self, heads: Tensor | None = None) -> HeadActivations:
        """What every head does at every text row, for one mask [L*H] (None: the intact model)."""
        row = None if heads is None else heads.reshape(1, -1)
        masks = self._checked(row, None, None)
        return head_activations(self.lvlm, self.cache, masks.heads[0].to(self.lvlm.device))

    def _checked(
        self, heads: Tensor | None, text: Tensor | None, image: Tensor | None, **soft: torch.dtype
    ) -> MaskBatch:
        grid = (self.lvlm.n_layers, self.lvlm.n_heads)
        return check_masks(heads, text, image, grid, self.n_text, self.n_image, **soft)

    def _run(
        self, masks: MaskBatch, sent: MaskBatch, cache: PrefixCache, read: Read | None = None
    ) -> Tensor:
        """a [B, W] of one block of masks, or what is `read`; `sent` are the same on the device."""
        check_eval_mode([self.lvlm.module], self.lvlm.device)
        text = None if sent.text is None else sent.text[:, cache.start :]  # [1|B, R]
        mixed = None if sent.image is None else cache.mixed(sent.image, self.n_words)
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
                step.take(slice(-self.n_words, None))
                choose = choose[:, -self.n_words :]
            q, scale = step.q, step.block.scale
            bias = cache.bias(step.block, rows=q.shape[2])
            picture = average = None
            if sees_picture[index]:
                picture = cache.read_picture(index, q, mixed, scale=scale, bias=bias)
            if sees_average[index]:
                average = read_shared(q, *cache.average[index], scale=scale, bias=bias)
            choose = choose.expand(-1, q.shape[2], -1).contiguous()
            own = {"scale": scale, "keep": cache.own_keep(q.shape[2])}
            step.o = with_own_text(q, step.k, step.v, picture, average, choose, **own)
        states = self.lvlm.decoder.norm(steps.h[:, -self.n_words :])  # [1|B, W, D]
        values = (wide(states) * self.readouts).sum(dim=-1) if read is None else read(states)
        return values.expand(len(masks), *values.shape[1:])

    def _cache_for(self, text: Tensor | None) -> PrefixCache:
        """The rows that masks can change: those before the first that may see the picture are the
        same in every mask."""
        if text is None:
            return self.cache
        seeing, last = text.any(dim=0), self.n_text - self.n_words  # words are read from here on
        start = min(last, int(seeing.int().argmax())) if bool(seeing.any()) else last
        if start == 0 or self.prompt.image.stop + start < self.prompt.prefix:
            return self.cache  # earlier rows read later ones there
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
        explicit = not sees_all_before(block) or (mixed and not self._pads)  # no fused kernel
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
        again = not mixed and sees_all_before(block) and has_fused_read(self.cache.picture[0][0])
        picture = 60 * block.heads * self.prompt.image.stop * (1 if again else layers)
        text = 30 * block.heads * self.n_text * layers
        each = self.n_text * (layers * states + picture + text)
        return self.block_size or fit(total, each, lvlm.device)


def _gradients(answers: Tensor, variable: Tensor) -> Tensor:
    """[B, W, ...]: of words' answers [B, W] with respect to their own row of `variable`."""
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


def weak(answer: str, moved: float, floor: float) -> BadInput:
    """The error for an image that hardly changes the answer: shares of so little are noise."""
    expected = f"at least floor={floor:g}" if floor else "more than 0"
    return BadInput(
        f"answer {answer!r}",
        f"the image moves its logit by {moved:.3g} only; expected {expected}",
        "ask a question that needs the image, name another answer, or lower floor",
    )


class MaskEngine(MaskedRows):
    """One picture, one question, one word of the answer, ready for masks.

        engine = sc.lvlm.MaskEngine(lvlm, picture, "Which critter is this?", bank)
        heads = sc.lvlm.attribute_heads(engine)
        engine.evaluate(heads.mask(5)[None])    # F of five heads: 0 is no head's, 1 is all heads'

    image       the picture, or a `Prompt` that holds it (then no question is needed)
    bank        the average picture, for whoever may not see this one: `make_bank`
    answer      text or token ids; None: the model's own
    position    which token of the answer is explained; those before it are taken as said
    floor       the least effect of the picture towards the answer, in logits; None: any effect
    vocabulary  takes the mean logit over so many first words, where a model pads its vocabulary
    block_size  masks at once; None: as memory allows
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
        seen = image if isinstance(image, Prompt) else checked_bank(bank).resized(image)
        prompt, self.target = _sequence(lvlm, seen, question, answer, position)
        picture = image if isinstance(image, Image.Image) else None
        targets = [self.target]
        super().__init__(lvlm, prompt, question, bank, picture, targets, vocabulary, block_size)
        self.position, self.floor = position, floor
        ends = self.adjusted(self._ends())
        self.ablated, self.intact = (float(a) for a in ends)  # a(0), a(1)
        enough = self.span != 0 if floor is None else self.span > 0 and self.span >= floor
        if not enough or not torch.isfinite(ends).all():
            raise weak(self.answer, self.span, floor or 0)

    @property
    def span(self) -> float:
        """a(1) - a(0): how far the picture moves the answer, in logits."""
        return self.intact - self.ablated

    @property
    def answer(self) -> str:
        """The explained token."""
        return self.lvlm.pieces(torch.tensor([self.target]))[0]

    def evaluate(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """F [M] of masks heads [M, L*H] (or [M, L, H]), text [M, T] and image [M, N]; one row
        serves all. Not clipped: F may leave [0, 1]."""
        return (self.adjusted(heads, text, image) - self.ablated) / self.span

    def adjusted(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """a [M]: the answer's logit less the vocabulary's mean, in float32 or float64."""
        return self._answers(self._checked(heads, text, image))[:, 0]

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
        answers, slopes = super().slopes(heads, text, image, of=of)
        return (answers[:, 0] - self.ablated) / self.span, slopes[:, 0] / self.span

    def protocol(self) -> dict[str, Any]:
        return {
            **super().protocol(), "answer": self.answer, "target": self.target,
            "position": self.position, "text": list(self.prompt.pieces), "floor": self.floor,
            "intact": self.intact, "ablated": self.ablated,
        }  # fmt: skip


def _sequence(
    lvlm: LVLM,
    image: Image.Image | Prompt,
    question: str | None,
    answer: str | Sequence[int] | None,
    position: int,
) -> tuple[Prompt, int]:
    """The prompt, with the answer's tokens before `position` behind it; and the one to explain."""
    if position < 0:
        raise BadOption("position", position, "a token of the answer, from 0 on")
    if isinstance(image, Prompt):
        if isinstance(answer, str) or (answer is not None and len(answer) != 1) or position:
            expected = "None or one token id with a Prompt, which holds everything said before it"
            raise BadOption("answer", answer, expected)
        return image, _next_token(lvlm, image) if answer is None else lvlm.token_ids(answer)[0]
    if question is None:
        raise BadOption("question", question, "a question about the picture")
    if answer is not None:
        ids = lvlm.answer_ids(image, question, answer)
    else:
        prompt = lvlm.prompt(image, question)
        if position == 0:  # also where the model would say nothing
            return prompt, _next_token(lvlm, prompt)
        ids = lvlm.speak(prompt, position + 1)
    if position >= len(ids):
        whose = "the model's own answer" if answer is None else f"the answer {answer!r}"
        raise BadOption("position", position, f"below {len(ids)}, the number of tokens in {whose}")
    return lvlm.prompt(image, question, ids[:position] or None), ids[position]


def _next_token(lvlm: LVLM, prompt: Prompt) -> int:
    """What the native model says next."""
    logits = lvlm.module(**prompt.inputs, use_cache=False, logits_to_keep=1).logits
    return int(logits[0, -1].argmax())
