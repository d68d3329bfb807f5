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
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from seecause import __version__
from seecause.engine.attend import Bank, attend
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.mask import Mask
from seecause.errors import BadOption, WeakAnswer
from seecause.lvlm.attention import Part, blend, compiled_blend, read_own, read_shared
from seecause.lvlm.bank import MeanBank
from seecause.lvlm.look import Look, look
from seecause.lvlm.masks import Masks, check_masks
from seecause.lvlm.prompt import Prompt
from seecause.lvlm.stage import Stage, first_stage
from seecause.lvlm.view import LVLM
from seecause.models.block import CompiledBlock
from seecause.models.decoder import causal
from seecause.types import wide

MOST = {
    "cuda": 500,
    "cpu": 64,
}  # masks at once, when all text rows run; more is not faster, and thousands divide evenly


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
        compile: bool = False,
        block_size: int | None = None,
    ):
        self.lvlm, self.question, self.position, self.floor, self.vocabulary = (
            lvlm,
            question,
            position,
            floor,
            vocabulary,
        )
        picture = None if isinstance(image, Prompt) else bank.resized(image)
        self.prompt, target = _sequence(
            lvlm, image if picture is None else picture, question, answer, position
        )
        original = image if isinstance(image, Image.Image) else None
        self.stage = first_stage(
            lvlm.decoder, self.prompt, *bank.means(lvlm, self.prompt, original)
        )
        self.bank = {"mode": bank.mode, "pictures": len(bank), "size": bank.size}
        self.compiled: list[CompiledBlock] = (
            [CompiledBlock(**vars(block)) for block in lvlm.blocks] if compile else []
        )
        self.block_size = block_size
        self._later: Stage | None = (
            None  # the stage from a later text row on, kept for the next call
        )
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
        masks = check_masks(
            heads, text, image, (self.lvlm.n_layers, self.lvlm.n_heads), self.n_text, self.n_image
        )
        order = masks.order()
        masks, stage = masks.take(order), self._stage(masks.text)
        size = width = self.at_once(len(masks), stage, mixed=masks.image is not None)
        sent = masks.to(
            self.lvlm.device
        )  # all at once: a copy for each block would wait for the one before

        def run(start: int, stop: int) -> Tensor:
            nonlocal width
            if stop < len(masks):
                width = stop - start  # halved when memory ran out
            part = (start, stop, width if self._pads else stop - start)
            return self._run(masks.block(*part), sent.block(*part), stage)[: stop - start]

        found = torch.cat(list(in_chunks(run, len(masks), size, what="masks")))
        return torch.empty_like(found).scatter_(0, order.to(found.device), found)

    @torch.no_grad()
    def look(self, heads: Tensor | None = None) -> Look:
        """What every head does at every text row, for one mask [L*H] (None: the intact model):
        attention on the picture, outputs."""
        shape = (self.lvlm.n_layers, self.lvlm.n_heads)
        on = (
            torch.ones(shape, dtype=torch.bool)
            if heads is None
            else check_masks(
                heads.reshape(1, -1), None, None, shape, self.n_text, self.n_image
            ).heads[0]
        )
        return look(self.lvlm, self.stage, on.to(self.lvlm.device))

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

    def _run(self, masks: Masks, sent: Masks, stage: Stage) -> Tensor:
        """a [B] of one block of masks; `sent` are the same on the device."""
        heads, text = (
            sent.heads,
            (None if sent.text is None else sent.text[:, stage.start :]),
        )  # [1|B, L, H], [1|B, R]
        mixed = (
            {}
            if sent.image is None
            else {rows: stage.mixed(sent.image, rows) for rows in (len(stage.at.index), 1)}
        )
        shared, sees_picture, sees_average = (
            masks.shared_layers(),
            masks.sees_picture(),
            masks.sees_average(),
        )
        h = stage.states  # [1, R, D] until masks part
        for index, block in enumerate(self.lvlm.blocks):
            last = index == self.lvlm.n_layers - 1
            usual = (
                bool(self.compiled)
                and 8 < len(h) == len(masks)
                and not last
                and sees_picture[index]
                and sees_average[index]
            )  # one shape, one graph
            half = self.compiled[index] if usual else block
            q, k, v = half.qkv(h, stage.at)
            choose = heads[: 1 if index < shared else None, index, None, :]  # [1|B, 1, H]
            if text is not None:
                choose = choose & text[: 1 if index < shared else None, :, None]
            if last:  # only the last row is read
                q, h, choose = q[:, :, -1:], h[:, -1:], choose[:, -1:]
            bias = (
                None
                if block.additive is causal
                else block.bias(stage.at, stage.keys_at)[:, :, -q.shape[2] :]
            )  # type: ignore[index]
            picture = self._picture(stage, index, q, bias, mixed) if sees_picture[index] else None
            average = (
                read_shared(q, *stage.average[index], scale=block.scale, bias=bias)
                if sees_average[index]
                else None
            )
            own = read_own(q, k, v, scale=block.scale)
            merged = (compiled_blend() if usual else blend)(
                own, picture, average, choose.expand(-1, q.shape[2], -1).contiguous()
            )
            h = half.finish(h, merged)
        states = wide(self.lvlm.decoder.norm(h[:, -1]))
        return (states @ self.readout).expand(len(masks))

    def _picture(
        self,
        stage: Stage,
        index: int,
        q: Tensor,
        bias: Tensor | None,
        mixed: dict[int, tuple[Mask, Mask]],
    ) -> Part:
        """What rows see of the picture where they may: all of it, or the tokens that are not
        averaged."""
        scale = self.lvlm.blocks[index].scale
        if not mixed:
            return read_shared(q, *stage.picture[index], scale=scale, bias=bias)
        picture, average = mixed[q.shape[2]]
        banks = (
            Bank(*stage.picture[index], keep=picture, bias=bias),
            Bank(*stage.average[index], keep=average, bias=bias),
        )
        return attend(q.expand(max(len(q), len(picture.keep)), -1, -1, -1), banks, scale=scale)

    def _stage(self, text: Tensor | None) -> Stage:
        """The rows that masks can change: those before the first that may see the picture are the
        same in every mask."""
        start = (
            0
            if text is None
            else int(text.any(dim=0).int().argmax())
            if bool(text.any())
            else self.n_text - 1
        )
        if start == 0:
            return self.stage
        if self._later is None or self._later.start != start:
            self._later = self.stage.from_row(self.lvlm.blocks, start)
        return self._later

    @property
    def _pads(self) -> bool:
        """A GPU picks its kernels by shape: blocks of one size round alike, and compile once."""
        return self.lvlm.device.type == "cuda"

    def at_once(self, total: int, stage: Stage | None = None, *, mixed: bool = False) -> int:
        """How many of `total` masks run at once; a few are padded to a power of two."""
        lvlm, block = self.lvlm, self.lvlm.blocks[0]
        bytes_each, width = torch.finfo(lvlm.dtype).bits // 8, block.heads * block.head_dim
        hidden = lvlm.decoder.native.config.intermediate_size
        explicit = block.additive is not causal or (
            mixed and not self._pads
        )  # attention without a fused kernel
        scores = 12 * block.heads * 2 * self.prompt.image.stop if explicit else 0
        rows = self.n_text - (stage or self.stage).start
        each = rows * (bytes_each * (12 * width + 3 * hidden) + 16 * width + scores)
        most = self.block_size or fit(
            MOST["cuda" if self._pads else "cpu"] * self.n_text // rows, each, lvlm.device
        )
        return min(most, 1 << max(3, (total - 1).bit_length()))

    def _intact_logits(self) -> Tensor:
        """The native answer at the last row, [V]."""
        return self.lvlm.module(**self.prompt.inputs, use_cache=False, logits_to_keep=1).logits[
            0, -1
        ]


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
        said = lvlm.speak(prompt, position + 1)
        if position >= len(said):
            raise BadOption(
                "position",
                position,
                f"below {len(said)}, the number of tokens in the model's own answer",
            )
        return lvlm.prompt(image, question, said[:position]), None
    ids = (
        lvlm.answer_ids(image, question, answer)
        if isinstance(answer, str)
        else [int(i) for i in answer]
    )
    if position >= len(ids):
        raise BadOption(
            "position", position, f"below {len(ids)}, the number of tokens in the answer {answer!r}"
        )
    return lvlm.prompt(image, question, ids[:position] or None), ids[position]
