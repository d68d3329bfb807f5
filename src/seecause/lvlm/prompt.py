"""A picture and a question as the sequence a decoder sees.

    [tokens before the picture] [image tokens] [text rows: everything after]

Only text rows can be told what to see of the picture; what comes before it cannot see it, and image
tokens are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from seecause.errors import BadPrompt
from seecause.models.decoder import arriving, planted_span
from seecause.models.image_tokens import ImageTokens, image_tokens
from seecause.models.layout import At

if TYPE_CHECKING:
    from seecause.lvlm.view import LVLM

PLAIN = "USER: {image}\n{question} ASSISTANT:"  # for processors without a chat template


@dataclass(frozen=True, eq=False)
class Prompt:
    """One sequence of S tokens with one picture in it."""

    ids: Tensor  # [S]
    embeddings: Tensor  # [1, S, D] what enters the first block, the picture's features in place
    at: At  # the positions of all S tokens
    image: slice  # the N image tokens
    tokens: ImageTokens  # and where in the picture they come from
    pieces: tuple[str, ...]  # of the text rows, readable
    deepstack: tuple[
        Tensor, ...
    ] = ()  # [1, N, D] each: added to image rows behind the first blocks
    inputs: Mapping[str, Any] = field(
        default_factory=dict, repr=False
    )  # what the native model takes
    size: tuple[int, int] | None = None  # height and width of the picture

    @property
    def text(self) -> slice:
        """The text rows: every token after the last image token."""
        return slice(self.image.stop, len(self.ids))

    @property
    def n_text(self) -> int:
        return len(self.ids) - self.image.stop

    @property
    def n_image(self) -> int:
        return self.image.stop - self.image.start


def render(processor: Any, question: str, template: str | None = None) -> str:
    """The text of a prompt: the chat template, or a plain one with {image} and {question}."""
    if not question.strip():
        raise BadPrompt(
            "an empty question", "text rows are what heads carry the picture into", "ask something"
        )
    token = processor.image_token
    if token in question:
        raise BadPrompt(
            f"a question with {token} in it",
            "the picture's place is set by the template, and there is one picture",
            f"leave {token} out",
        )
    if template is None and getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": question}]
        return processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    return (template or PLAIN).format(image=token, question=question)


def native_inputs(
    lvlm: LVLM, picture: Image.Image | Sequence[Image.Image], text: str
) -> dict[str, Any]:
    """The processor's tensors for one picture and a rendered text, on the model's device and in its
    dtype."""
    if not isinstance(picture, Image.Image):
        raise BadPrompt(
            f"a picture of type {type(picture).__name__}",
            "expected one PIL image",
            "open a file with seecause.data.images.read_image",
        )
    made = lvlm.processor(images=picture.convert("RGB"), text=text, return_tensors="pt")
    return lvlm.send(made)


def prompt_ids(lvlm: LVLM, picture: Image.Image, text: str) -> list[int]:
    """The tokens of a rendered text with its picture."""
    return native_inputs(lvlm, picture, text)["input_ids"][0].tolist()


def answer_ids(
    lvlm: LVLM, picture: Image.Image, text: str, answer: str, *, before: list[int] | None = None
) -> list[int]:
    """The tokens of an answer as they follow the prompt; `before` are the prompt's own, where they
    are known."""
    joined = text + answer if text[-1].isspace() else f"{text} {answer}"
    before, both = (
        prompt_ids(lvlm, picture, text) if before is None else before,
        prompt_ids(lvlm, picture, joined),
    )
    if not answer.strip() or both[: len(before)] != before or len(both) == len(before):
        raise BadPrompt(
            f"answer {answer!r}",
            "its tokens do not continue the prompt's",
            "give the answer as the model would write it",
        )
    said = both[len(before) :]
    unknown = getattr(getattr(lvlm.processor, "tokenizer", None), "unk_token_id", None)
    if unknown is not None and unknown in said:
        raise BadPrompt(
            f"answer {answer!r}",
            "it has words that the model's tokenizer does not know",
            "give an answer in words that the model can say",
        )
    return said


def extended(inputs: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    """Native inputs with tokens appended, as if they had been said already."""
    more = torch.tensor([list(ids)], device=inputs["input_ids"].device)
    filled = {
        "input_ids": more,
        "attention_mask": torch.ones_like(more),
        "mm_token_type_ids": torch.zeros_like(more),
    }
    return {
        name: torch.cat([value, filled[name].to(value)], dim=1) if name in filled else value
        for name, value in inputs.items()
    }


@torch.no_grad()
def read(lvlm: LVLM, inputs: Mapping[str, Any], *, size: tuple[int, int] | None = None) -> Prompt:
    """A prompt from native inputs: one sequence, one picture."""
    ids = inputs["input_ids"][0]
    places = (ids == lvlm.module.config.image_token_id).nonzero()[:, 0]
    if len(places) == 0 or inputs.get("pixel_values") is None:
        raise BadPrompt(
            "a prompt without image tokens",
            "there is no picture to trace",
            "give a picture, and a template that has a place for it",
        )
    image = slice(int(places[0]), int(places[-1]) + 1)
    pictures = next(
        (len(inputs[name]) for name in ("image_grid_thw", "image_sizes") if name in inputs), 1
    )
    if len(places) != image.stop - image.start or pictures > 1 or len(inputs["input_ids"]) > 1:
        raise BadPrompt(
            "a prompt with more than one picture",
            "heads are traced for one picture at a time",
            "give one picture and one question",
        )
    if image.stop == len(ids):
        raise BadPrompt(
            "a prompt that ends with the picture",
            "no text row follows that could see it",
            "use a template with the question after the picture",
        )
    span = planted_span(lvlm.decoder.native.config)
    if span is not None and span != (image.start, image.stop):
        raise BadPrompt(
            f"image tokens {image.start} to {image.stop}",
            f"this planted model expects {span[0]} to {span[1]}",
            "use its own template",
        )
    if lvlm.decoder.window is not None and len(ids) > lvlm.decoder.window:
        raise BadPrompt(
            f"a prompt of {len(ids)} tokens",
            f"this decoder's sliding window holds {lvlm.decoder.window}",
            "shorten it, or use a smaller picture",
        )
    arrived = arriving(lvlm.module, lvlm.decoder.native, dict(inputs))
    embeddings, positions = arrived["inputs_embeds"], arrived.get("position_ids")
    if positions is None:
        positions = torch.arange(len(ids), device=ids.device)[None]
    if positions.ndim == 3 and len(positions) == 4:  # the first axis is for packing only
        positions = positions[1:]
    tiling = getattr(lvlm.processor, "image_processor", None)
    return Prompt(
        ids=ids,
        embeddings=embeddings,
        at=lvlm.decoder.at(positions, embeddings),
        image=image,
        tokens=image_tokens(lvlm.module.config, inputs, len(places), size, tiling),
        pieces=lvlm.pieces(ids[image.stop :]),
        deepstack=tuple(feature[None] for feature in arrived.get("deepstack_visual_embeds") or ()),
        inputs=inputs,
        size=size,
    )
