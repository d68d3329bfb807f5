"""Thousands of partly blinded copies of one answer, from one run of the picture (head attribution,
sections 3.1 and 3.2).

A mask says which heads (x), for which text rows (u), see which image tokens (v); whoever may not
see a token sees the average picture's instead:

    text row i at head n reads image token j truly where x_n = u_i = v_j = 1, else its average
    (eq. 8, appendix A.4)
    a = logit of the answer - mean logit of the vocabulary,    F = (a - a(0)) / (a(1) - a(0))

How that is made fast is in `_masked.py`; `words.py` asks about every word of an answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from seecause import __version__
from seecause.errors import BadOption, WeakAnswer
from seecause.lvlm._masked import MaskedRows, MaskKind
from seecause.lvlm.bank import MeanBank
from seecause.lvlm.model import LVLM
from seecause.lvlm.prompt import Prompt


class MaskEngine(MaskedRows):
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
        self.question, self.position = question, position
        self.floor, self.vocabulary = floor, vocabulary
        seen = image if isinstance(image, Prompt) else bank.resized(image)
        prompt, target = _sequence(lvlm, seen, question, answer, position)
        original = image if isinstance(image, Image.Image) else None
        super().__init__(lvlm, prompt, bank.means(lvlm, prompt, original), block_size)
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

    def evaluate(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """F [M] of masks heads [M, L*H] (or [M, L, H]), text [M, T] and image [M, N]; one row
        serves all. Not clipped: F may leave [0, 1]."""
        return (self.adjusted(heads, text, image) - self.ablated) / self.span

    def adjusted(
        self, heads: Tensor | None = None, text: Tensor | None = None, image: Tensor | None = None
    ) -> Tensor:
        """a [M]: the answer's logit less the vocabulary's mean, in float32 (float64 for a float64
        model)."""
        return self._answers(heads, text, image)[:, 0]

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
        answers, slopes = self._slopes(heads, text, image, of)
        return (answers[:, 0] - self.ablated) / self.span, slopes[:, 0] / self.span

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
    def _readouts(self) -> Tensor:
        return self.readout[None]

    def _intact_logits(self) -> Tensor:
        """The native answer at the last row, [V]."""
        inputs = self.prompt.inputs
        return self.lvlm.module(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1]


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
