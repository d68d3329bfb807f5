"""Ask: what a vision-language model answers, which heads and image tokens cause each of its
words, and its answer if some heads attend to an average image instead."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.panels import (
    Index,
    OnPicture,
    Panel,
    as_script,
    bars,
    counting,
    heat,
    rounded,
)
from seecause.app.state import SHOWN_SIDE, ActionContext
from seecause.data.dataset import to_pil
from seecause.errors import BadOption
from seecause.lvlm import (
    AnswerTrace,
    MaskEngine,
    MeanBank,
    calibration_critters,
    edited_heads,
    image_map,
    make_bank,
    seen_image,
    trace_answer,
)
from seecause.lvlm.attribute import masked_runs
from seecause.lvlm.prompt import Prompt
from seecause.models.block import wide
from seecause.report.figures import data_uri

LENGTH = 24  # tokens of an answer
SHOWN = 5  # words whose probabilities are compared
TOP = 8  # heads that are listed


class Asked(OnPicture):
    """`position`: which token of the answer, from 0 on; `blind`: heads that attend to the average
    image, as layer * heads + head."""

    question: Annotated[str, Field(min_length=1, max_length=300)]
    position: Annotated[int, Field(ge=0, lt=LENGTH)] = 0
    blind: Annotated[tuple[Index, ...], Field(max_length=16_384)] = ()


class Spoken:
    """Reports the answer word by word; what `generate` calls a streamer."""

    def __init__(self, context: ActionContext, asked: int):
        self.context, self.asked, self.ids = context, asked, list[int]()

    def put(self, ids: Tensor) -> None:
        self.ids += ids.flatten().tolist()
        said = self.ids[self.asked :] if len(self.ids) > self.asked else []
        self.context.progress(len(said) / LENGTH, "".join(_pieces(self.context, said)))

    def end(self) -> None:
        """The end of the answer, which the reply tells."""


def answer(context: ActionContext, request: Asked) -> Reply:
    """The image as the model receives it, and the model's answer."""
    lvlm, picture = context.lvlm, context.picture(request.picture)
    prompt = lvlm.prompt(picture.shown, request.question)
    ids = _answer_ids(context, request, streamer=Spoken(context, len(prompt.ids)))
    seen = seen_image(lvlm, prompt, picture.shown)
    return {
        "name": picture.name,
        "picture": data_uri(to_pil(seen), photo=True),
        "size": list(seen.shape[-2:]),
        "grid": list(image_map(prompt.tokens, torch.zeros(prompt.n_image)).shape),
        "words": _pieces(context, ids),
        "unknown": lvlm.unknown_words(request.question),
    }


def behind(context: ActionContext, request: Asked) -> Reply:
    """Heads and image tokens behind one word: mean derivatives over 64 masks."""
    ids = _answer_ids(context, request)
    _check_position(request, ids)
    engine = MaskEngine(
        context.lvlm, _shown(context, request), request.question, _bank(context),
        answer=ids, position=request.position,
    )  # fmt: skip
    engine.progress = counting(context, masked_runs(engine), lambda done: "heads and image tokens")
    trace = trace_answer(engine)
    assert trace.tokens is not None
    heads, tokens = trace.heads, trace.tokens.attribution
    values = image_map(engine.prompt.tokens, tokens.coefficients)
    return {
        "word": engine.answer,
        "span": round(engine.span, 4),
        "heads": [rounded(row) for row in heads.coefficients],
        "errors": [rounded(row) for row in heads.standard_error],
        "top": _top(trace),
        "enough": trace.chosen.nonzero()[:, 0].tolist(),
        "r2": round(heads.r2, 4),
        "tokens": heat(values),
        "token_error": float(tokens.standard_error.median()),
        "token_r2": round(tokens.r2, 4),
    }


def hear(context: ActionContext, request: Asked) -> Reply:
    """The answer with some heads ablated, and the likeliest words at the chosen position, before
    and after the ablation, given the same earlier words."""
    ids, heads = _answer_ids(context, request), _heads(context, request.blind)
    _check_position(request, ids)
    lvlm, image = context.lvlm, _shown(context, request)
    whole = lvlm.prompt(image, request.question)
    prompt = lvlm.prompt(image, request.question, ids[: request.position] or None)
    context.progress(0.2, "listening")
    before = _chances(context, prompt)
    after, new = before, ids
    if heads:
        with edited_heads(lvlm, heads, blind=_bank(context), image=image):
            after, new = _chances(context, prompt), lvlm.speak(whole, LENGTH)
    return {
        "words": _pieces(context, new),
        "same": new == ids,
        "before": _weighed(context, before, before),
        "after": _weighed(context, after, before),
        "blind": len(heads),
    }


def _bank(context: ActionContext) -> MeanBank:
    """The average image for ablated heads: of Critters for embedded models, of the sample images
    for others."""
    lvlm, served = context.lvlm, context.served
    if "bank" not in served.memo:
        context.progress(0.02, "averaging images")
        if served.spec.startswith("builtin:"):
            pictures = calibration_critters()
        else:
            pictures = [picture.shown for picture in context.averaged_pictures()]
        served.memo["bank"] = make_bank(lvlm, pictures)
    return served.memo["bank"]


def _shown(context: ActionContext, request: Asked) -> Image.Image:
    return context.picture(request.picture).shown


def _answer_ids(context: ActionContext, request: Asked, **options: Any) -> list[int]:
    """The model's own answer; `options` of `generate`."""
    lvlm, picture = context.lvlm, _shown(context, request)
    ids = lvlm.speak(lvlm.prompt(picture, request.question), LENGTH, **options)
    if not ids:
        raise BadOption("question", request.question, "one to which the model generates tokens")
    return ids


def _check_position(request: Asked, ids: list[int]) -> None:
    if request.position >= len(ids):
        expected = f"an index below {len(ids)}, the number of tokens of the answer"
        raise BadOption("position", request.position, expected)


def _heads(context: ActionContext, places: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pairs (layer, head) of flat indices, each once."""
    width, count = context.lvlm.n_heads, context.lvlm.n_layers * context.lvlm.n_heads
    if any(place >= count for place in places):
        raise BadOption("blind", max(places), f"heads 0-{count - 1}")
    return [divmod(place, width) for place in sorted(set(places))]


def _pieces(context: ActionContext, ids: list[int]) -> list[str]:
    return list(context.lvlm.pieces(torch.tensor(ids, dtype=torch.long)))


def _top(trace: AnswerTrace) -> list[dict[str, Any]]:
    """The heads with the largest effects, with errors and the words of their logit lens."""
    heads = trace.heads
    words = {(each.layer, each.head): each.words for each in trace.words}
    return [
        {
            "layer": layer,
            "head": head,
            "value": float(heads.coefficients[layer, head]),
            "error": float(heads.standard_error[layer, head]),
            "words": list(words.get((layer, head), ())[:3]),
        }
        for layer, head in heads.top(min(TOP, heads.coefficients.numel()))
    ]


@torch.no_grad()
def _chances(context: ActionContext, prompt: Prompt) -> Tensor:
    """[V]: probabilities of the next word."""
    return wide(context.lvlm.next_logits(prompt)).softmax(dim=0)


def _weighed(context: ActionContext, chances: Tensor, whole: Tensor) -> list[dict[str, Any]]:
    """The likeliest words with all heads, then the two most probable ones now."""
    first = whole.topk(min(SHOWN, len(whole))).indices.tolist()
    return bars(
        chances, first, lambda places: [n.strip() or repr(n) for n in _pieces(context, places)]
    )


def copy(context: ActionContext, request: Asked) -> Reply:
    """Python code that computes these results without the app."""
    heads = _heads(context, request.blind)
    return as_script("ask", context, request, heads=heads, side=SHOWN_SIDE, length=LENGTH)


PANEL = Panel(
    "ask",
    "Ask",
    "Which heads, and what in the image, are behind this word?",
    actions=(answer, behind, hear, copy),
    kinds=("lvlm",),
)
