"""Thousands of masked copies of one answer, from one run of the image (head attribution, sections
4.1, A.2 and A.3).

A mask selects heads (x), text rows (u) and image tokens (v); other combinations attend to the
average image's token instead:

    text row i at head n reads image token j where x_n = u_i = v_j = 1, else its average (eq. 8)
    a = logit of the answer - mean logit of the vocabulary,    F = (a - a(0)) / (a(1) - a(0))

Nothing up to the last image token depends on a mask, so it runs once. Per mask, only the text rows
are computed: matrix products, attention to two shared key/value banks, and one dot product per
output token in place of the full vocabulary. Masks that agree in the first blocks share their
states. Rows of an answer attend to earlier rows only, so one run gives all words at the end of the
prompt (`words.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from seecause import __version__
from seecause.engine.attend import Bank, attend, attention_weights
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.trace import part_without_gradient
from seecause.engine.walk import walk
from seecause.errors import BadInput, BadOption, NotDefined
from seecause.lvlm.bank import MeanBank
from seecause.lvlm.cache import (
    PrefixCache,
    has_fused_read,
    prefix_cache,
    read_shared,
    with_own_text,
)
from seecause.lvlm.model import LVLM
from seecause.lvlm.prompt import Prompt
from seecause.models.base import Contents, check_eval_mode
from seecause.models.block import Named, wide, wide_dtype
from seecause.models.decoder import sees_all_before
from seecause.options import Whole, checked

# masks per run of all text rows; more are not faster, and thousands divide evenly
MOST = {"cuda": 500, "cpu": 64}
FEW_IMAGES = 20  # fewer calibration images give a warning
MaskKind = Literal["heads", "text", "image"]
Read = Callable[[Tensor], Tensor]  # normed states [B, W, D] -> [B, anything]


@dataclass(frozen=True, eq=False)
class Masks:
    """M masks: heads [M, L, H], text [M, T] or None (all), image [M, N] or None (all). A first axis
    of 1 serves all. Bool, or soft masks with entries from 0 to 1, which can be differentiated."""

    heads: Tensor
    text: Tensor | None = None
    image: Tensor | None = None

    def __len__(self) -> int:
        return max(len(mask) for mask in (self.heads, self.text, self.image) if mask is not None)

    def take(self, rows: Tensor) -> Masks:
        return self._changed(lambda mask: mask if len(mask) == 1 else mask[rows.to(mask.device)])

    def to(self, device: torch.device) -> Masks:
        return self._changed(lambda mask: mask.to(device))

    def _changed(self, do: Callable[[Tensor], Tensor]) -> Masks:
        return replace(self, **{n: do(mask) for n, mask in vars(self).items() if mask is not None})

    def order(self) -> Tensor:
        """[M]: masks that agree in the first blocks come together."""
        if len(self.heads) == 1:
            return torch.arange(len(self))
        _, alike = self.heads.flatten(1).unique(dim=0, return_inverse=True)
        return alike.argsort(stable=True)

    def shared_layers(self) -> int:
        """How many of the first blocks give every mask the same states: the heads agree, and no row
        or token mask matters yet. 0 for soft masks, because each has its own gradient."""
        if self.heads.is_floating_point():
            return 0
        same = (self.heads == self.heads[:1]).flatten(2).all(dim=2).all(dim=0)  # [L]
        if any(mask is not None and len(mask) > 1 for mask in (self.text, self.image)):
            same &= ~self.heads.flatten(2).any(dim=2).any(dim=0)
        return int(same.int().cumprod(dim=0).sum())


@dataclass(frozen=True, eq=False)
class HeadActivations:
    """Attention and outputs of every head of the intact model."""

    lvlm: LVLM
    attention: Tensor  # [L, H, T, N] of text rows on image tokens
    outputs: Tensor  # [L, H, dh] at the last text row, before the output projection

    @torch.no_grad()
    def lens(self, layer: int, head: int) -> Tensor:
        """[V]: the logit lens on one head's output (final norm, then vocabulary)."""
        block, decoder = self.lvlm.blocks[layer], self.lvlm.decoder
        alone = torch.zeros_like(self.outputs[layer])
        alone[head] = self.outputs[layer, head]
        both = torch.stack([alone, torch.zeros_like(alone)]).flatten(1)[None]  # [1, 2, H*dh]
        mixed = block.mix(both)
        return wide(decoder.logits(decoder.norm(mixed[:, :1] - mixed[:, 1:])))[0, 0]


class MaskedRows:
    """The last text rows of a prompt, each before one of W tokens that it predicts."""

    def __init__(
        self,
        lvlm: LVLM,
        prompt: Prompt,
        question: str | None,
        bank: MeanBank,
        image: Image.Image | None,
        targets: list[int],
    ):
        self.lvlm, self.prompt, self.question = lvlm, prompt, question
        self.n_words, self.n_text, self.n_image = len(targets), prompt.n_text, prompt.n_image
        self.n_components = lvlm.n_layers * lvlm.n_heads  # L * H, layer by layer
        self.bank_images = len(bank)
        self.block_size: int | None = None  # how many masks run at once; None: as the memory holds
        self.cache = prefix_cache(lvlm.decoder, prompt, *bank.means(lvlm, prompt, image))
        self._later_cache: PrefixCache | None = None  # from a later text row on, for the next call
        # called with the number of masks that have run
        self.progress: Callable[[int], None] = lambda done: None
        # [W, D]: their dot products with normed states are the words' adjusted logits
        self.readouts = torch.stack([lvlm.readout(token) for token in targets])

    def protocol(self) -> Named:
        """The settings of the computation, for manifests."""
        lvlm, tokens = self.lvlm, str(self.prompt.tokens)
        return {
            "model": lvlm.name, "fingerprint": lvlm.fingerprint(), "question": self.question,
            "bank": {"images": self.bank_images}, "image_tokens": tokens,
            "dtype": str(lvlm.dtype).removeprefix("torch."), "device": str(lvlm.device),
            "seecause": __version__, "torch": torch.__version__,
        }  # fmt: skip

    def concerns(self) -> list[str]:
        """Warnings for every answer to this question: words that the model does not know, and an
        average of few calibration images."""
        lines = []
        unknown = self.lvlm.unknown_words(self.question or "")
        if unknown:
            words = ", ".join(unknown)
            lines.append(f"the model has no token for {words}: it reads them as one word")
        if self.bank_images < FEW_IMAGES:
            lines.append(
                f"{self.bank_images} calibration images make the average image: about a hundred"
                " are better"
            )
        return lines

    @torch.no_grad()
    def activations(self) -> HeadActivations:
        """Attention and outputs of every head of the intact model."""
        cache = self.cache
        everything = cache.at.take(torch.cat([cache.keys_at.index, cache.at.index]))
        attention, outputs = [], []
        for step in walk(self.lvlm, cache.states, cache.at):
            k, v = (
                torch.cat(both, dim=2)
                for both in zip(cache.image_bank[step.index], (step.k, step.v), strict=True)
            )
            bank = Bank(k, v, bias=step.block.bias(cache.at, everything))
            weights = attention_weights(step.q, bank, scale=step.block.scale)  # [1, H, T, K]
            attention.append(weights[0, :, :, cache.image])
            step.o, _ = attend(step.q, [bank], scale=step.block.scale)
            outputs.append(step.o[0, -1])
        return HeadActivations(self.lvlm, torch.stack(attention), torch.stack(outputs))

    def adjusted(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """a [M, W] of masks heads [M, L*H], text [M, T] and image [M, N], of which one row serves
        all: each word's logit less the vocabulary's mean, in float32 or float64."""
        return self._answers(self._masks(heads, text, image))

    def logits(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """[M, W, V]: the logits from which each word is chosen, after the words before it."""
        masks = self._masks(heads, text, image)
        return self._answers(masks, lambda h: wide(self.lvlm.decoder.logits(h)))

    def _ends(self) -> Tensor:
        """[2, P]: masks in which no head sees the image, and in which all do."""
        return torch.tensor([[False], [True]]).expand(2, self.n_components)

    def _masks(
        self,
        heads: Tensor | None,
        text: Tensor | None,
        image: Tensor | None,
        *,
        soft: torch.dtype | None = None,
    ) -> Masks:
        """A user's masks [M, L*H], [M, T] and [M, N] on the CPU, all heads where none are given;
        with `soft`, entries from 0 to 1 in that dtype."""
        if heads is None:
            heads = torch.ones(1, self.n_components, dtype=torch.bool)
        sent: dict[str, Tensor] = {}
        for name, mask, size in (
            ("heads", heads, self.n_components),
            ("text", text, self.n_text),
            ("image", image, self.n_image),
        ):
            if mask is None:
                continue
            mask = torch.atleast_2d(mask)
            if mask.ndim != 2 or mask.shape[1] != size or len(mask) == 0:
                raise BadOption(name, list(mask.shape), f"masks of shape [M, {size}]")
            valid = (mask >= 0) & (mask <= 1) if soft else (mask == 0) | (mask == 1)
            if not bool(valid.all()):
                expected = "masks of 0 and 1; engine.slopes takes values from 0 to 1"
                raise BadOption(name, "other values", expected)
            sent[name] = mask.detach().cpu().to(soft or torch.bool)
        counts = {len(mask) for mask in sent.values()} - {1}
        if len(counts) > 1:
            expected = "equally many masks of heads, text and image, or one mask for all"
            raise BadOption("masks", sorted(counts), expected)
        sent["heads"] = sent["heads"].unflatten(1, (self.lvlm.n_layers, self.lvlm.n_heads))
        return Masks(**sent)

    @torch.no_grad()
    def _answers(self, masks: Masks, read: Read | None = None) -> Tensor:
        """[M, W]: the words' adjusted logits, or what else is `read` of the states, [M, ...]."""
        order = masks.order()
        masks, cache = masks.take(order), self._cache_for(masks.text)
        size = width = self._at_once(len(masks), cache, mixed=masks.image is not None)
        sent = masks.to(self.lvlm.device)  # one copy; a copy for each block would synchronise
        # a GPU picks its kernels by shape: the last block is padded, so that all round alike
        pads = self.lvlm.device.type == "cuda"

        def run_chunk(start: int, stop: int) -> Tensor:
            nonlocal width
            if stop < len(masks):
                width = stop - start  # halved when memory ran out
            rows = torch.arange(start, start + (width if pads else stop - start))
            rows = rows.clamp(max=stop - 1)
            values = self._run(masks.take(rows), sent.take(rows), cache, read)
            self.progress(stop - start)
            return values[: stop - start]

        answers = torch.cat(list(in_chunks(run_chunk, len(masks), size, what="masks")))
        return torch.empty_like(answers).index_copy_(0, order.to(answers.device), answers)

    @checked
    def slopes(
        self,
        heads: Tensor | None = None,
        text: Tensor | None = None,
        image: Tensor | None = None,
        *,
        of: MaskKind = "heads",
    ) -> tuple[Tensor, Tensor]:
        """Adjusted logits [M, W] of soft masks, and their derivatives [M, W, P] with respect to
        one kind of mask. One run, and one backward pass for each word."""
        dtype = wide_dtype(self.lvlm.dtype)
        masks = self._masks(heads, text, image, soft=dtype)
        leaf = getattr(masks, of)
        if leaf is None:
            leaf = torch.ones(1, self.n_text if of == "text" else self.n_image, dtype=dtype)
        masks = replace(masks, **{of: leaf.expand(len(masks), *leaf.shape[1:])})  # a slope each
        cache = self.cache if of == "text" else self._cache_for(masks.text)
        size = self._at_once(len(masks), cache, mixed=masks.image is not None, gradient=True)
        self._need_gradients()

        def run_chunk(start: int, stop: int) -> Tensor:
            with torch.inference_mode(False), torch.enable_grad():
                chunk = masks.take(torch.arange(start, stop)).to(self.lvlm.device)
                variable = getattr(chunk, of).clone().requires_grad_()
                answers = self._run(chunk, replace(chunk, **{of: variable}), cache)
                slopes = [  # of every word with respect to its own masks, [B, ...] each
                    torch.autograd.grad(word, variable, retain_graph=place < self.n_words - 1)[0]
                    for place, word in enumerate(answers.sum(dim=0))
                ]
            self.progress(stop - start)
            return torch.cat(
                [answers.detach()[..., None], torch.stack(slopes, 1).flatten(2)], dim=2
            )

        both = torch.cat(list(in_chunks(run_chunk, len(masks), size, what="masks")))
        return both[..., 0], both[..., 1:]

    def _need_gradients(self) -> None:
        """Raises for a model that loses gradients, whose slopes would be wrong. Each model is
        checked once."""
        if "passes gradients" in self.lvlm.memo:
            return
        first = self.cache.at.take(self.cache.at.index[:1])
        part = part_without_gradient(self.lvlm.blocks, self.cache.states[:, :1], first)
        if part is not None:
            reason = f"no gradient passes the {part}, as in quantised layers"
            remedy = "Use how='fit' (--how fit), which needs no derivative"
            raise NotDefined("a derivative", reason, remedy)
        self.lvlm.memo["passes gradients"] = True

    def _run(
        self, masks: Masks, sent: Masks, cache: PrefixCache, read: Read | None = None
    ) -> Tensor:
        """a [B, W] of one block of masks, or what is `read`; `sent` are the same on the device."""
        check_eval_mode(Contents([self.lvlm.module]), self.lvlm.device)
        text = None if sent.text is None else sent.text[:, cache.start :]  # [1|B, R]
        mixed = None if sent.image is None else cache.mixed(sent.image, self.n_words)
        shared = masks.shared_layers()
        steps = walk(self.lvlm, cache.states, cache.at)  # states [1, R, D] until masks differ
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
            every = q if sent.image is None else q.expand(max(len(q), len(sent.image)), -1, -1, -1)
            image = cache.read_image(index, every, mixed, scale=scale, bias=bias)
            average = read_shared(q, *cache.average_bank[index], scale=scale, bias=bias)
            choose = choose.expand(-1, q.shape[2], -1).contiguous()
            own = {"scale": scale, "keep": cache.own_keep(q.shape[2])}
            step.o = with_own_text(q, step.k, step.v, image, average, choose, **own)
        states = self.lvlm.decoder.norm(steps.h[:, -self.n_words :])  # [1|B, W, D]
        values = (wide(states) * self.readouts).sum(dim=-1) if read is None else read(states)
        return values.expand(len(masks), *values.shape[1:])

    def _cache_for(self, text: Tensor | None) -> PrefixCache:
        """The cache from the first text row that may see the image; earlier rows are identical for
        all masks."""
        if text is None:
            return self.cache
        seeing, last = text.any(dim=0), self.n_text - self.n_words  # words are read from here on
        start = min(last, int(seeing.int().argmax())) if bool(seeing.any()) else last
        if start == 0 or self.prompt.image.stop + start < self.prompt.prefix:
            return self.cache  # earlier rows read later ones there
        if self._later_cache is None or self._later_cache.start != start:
            self._later_cache = self.cache.from_row(self.lvlm, start)
        return self._later_cache

    def _at_once(
        self, total: int, cache: PrefixCache, *, mixed: bool, gradient: bool = False
    ) -> int:
        """How many of `total` masks run at once; with a gradient everything is held for the
        backward pass."""
        if self.block_size is not None:
            return self.block_size
        lvlm, block, device = self.lvlm, self.lvlm.blocks[0], self.lvlm.device
        bytes_each, width = torch.finfo(lvlm.dtype).bits // 8, block.heads * block.head_dim
        hidden = lvlm.decoder.native.config.intermediate_size
        rows, scores = self.n_text - cache.start, 2 * block.heads * self.prompt.image.stop
        fused = not mixed and sees_all_before(block) and has_fused_read(cache.image_bank[0][0])
        if gradient:
            states = bytes_each * (20 * width + 5 * hidden) + 60 * width
            held = lvlm.n_layers * (states + 30 * block.heads * self.n_text)
            # the fused kernel stores no scores: its backward pass recomputes them block by block
            return fit(total, rows * (held + 30 * scores * (1 if fused else lvlm.n_layers)), device)
        states = bytes_each * (12 * width + 3 * hidden) + 16 * width
        most = MOST.get(device.type, 64) * self.n_text // rows
        size = fit(most, rows * (states + (0 if fused else 12 * scores)), device)
        return min(size, 1 << max(3, (total - 1).bit_length()))


def weak(answer: str, moved: float, floor: float) -> BadInput:
    """The error for an image that hardly changes the answer: shares of a small effect are noise."""
    expected = f"at least floor={floor:g}" if floor else "more than 0"
    return BadInput(
        f"answer {answer!r}",
        f"the image moves its logit by {moved:.3g} only; expected {expected}",
        "ask a question that needs the image, name another answer, or lower floor",
    )


class MaskEngine(MaskedRows):
    """One image, one question and one token of the answer, ready for masks.

    Args:
        lvlm: A model returned by `sc.lvlm.load` or `sc.lvlm.wrap`.
        image: The image, or a `Prompt` that holds it (then no question is needed).
        question: What is asked about it.
        bank: The average image, returned by `sc.lvlm.make_bank`, which ablated heads attend to.
        answer: Text or token ids; None: the model's own answer.
        position: Index of the explained token of the answer; earlier tokens are given.
        floor: The least effect of the image towards the answer, in logits; None: any effect.

    Raises:
        BadInput: If the image moves the answer by less than `floor`.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> image = sc.data.open_image("critters:clean:test#3")
        >>> bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3))
        >>> engine = sc.lvlm.MaskEngine(lvlm, image, "What is this creature?", bank)
        >>> engine.evaluate(torch.eye(48)).shape        # F of each head alone
        torch.Size([48])
    """

    @checked
    @torch.no_grad()
    def __init__(
        self,
        lvlm: LVLM,
        image: Image.Image | Prompt,
        question: str | None,
        bank: MeanBank,
        *,
        answer: str | Sequence[int] | None = None,
        position: Whole = 0,
        floor: float | None = 1.0,
    ):
        if isinstance(image, Prompt):
            if isinstance(answer, str) or (answer is not None and len(answer) != 1) or position:
                expected = "None or one token id with a Prompt, which contains earlier tokens"
                raise BadOption("answer", answer, expected)
            prompt, shown = image, None
            self.target = int(lvlm.next_logits(image).argmax() if answer is None else answer[0])
        elif question is None:
            raise BadOption("question", question, "a question about the image")
        else:
            ids = lvlm.answer_ids(image, question, answer, position + 1)
            if position >= len(ids):
                expected = f"an index below {len(ids)}, the number of tokens of the answer"
                raise BadOption("position", position, expected)
            prompt, shown = lvlm.prompt(image, question, ids[:position] or None), image
            self.target = ids[position]
        super().__init__(lvlm, prompt, question, bank, shown, [self.target])
        self.position, self.floor = position, floor
        ends = self.adjusted(self._ends())
        self.ablated, self.intact = (float(a) for a in ends)  # a(0), a(1)
        enough = self.span != 0 if floor is None else self.span > 0 and self.span >= floor
        if not enough or not torch.isfinite(ends).all():
            raise weak(self.answer, self.span, floor or 0)

    @property
    def span(self) -> float:
        """a(1) - a(0): how far the image moves the answer, in logits."""
        return self.intact - self.ablated

    @property
    def answer(self) -> str:
        """The explained token."""
        return self.lvlm.pieces(torch.tensor([self.target]))[0]

    def evaluate(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """F [M] of masks heads [M, L*H], text [M, T] and image [M, N]; one row serves all. Not
        clipped: F may leave [0, 1]."""
        return (self.adjusted(heads, text, image) - self.ablated) / self.span

    def adjusted(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """a [M]: the answer's logit less the vocabulary's mean, in float32 or float64."""
        return super().adjusted(heads, text, image)[:, 0]

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

        Between 0 and 1 the output of a head is a mixture with this weight of its output for the
        image, and the rest for the average; a text row likewise; an image token's two keys have
        these weights in the softmax. At 0 and 1, F is that of `evaluate`.
        """
        answers, slopes = super().slopes(heads, text, image, of=of)
        return (answers[:, 0] - self.ablated) / self.span, slopes[:, 0] / self.span

    def protocol(self) -> Named:
        return {
            **super().protocol(), "answer": self.answer, "target": self.target,
            "position": self.position, "text": list(self.prompt.pieces), "floor": self.floor,
            "intact": self.intact, "ablated": self.ablated,
        }  # fmt: skip
