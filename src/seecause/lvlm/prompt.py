"""An image and a question as the sequence of a decoder, and the positions of image tokens in the
image (head attribution, section 5.2).

    [tokens before the image] [image tokens] [text rows: everything after]

Masks select the image tokens that text rows attend to; earlier tokens cannot attend to the image,
and image tokens are unchanged. Marks of rows and tiles, or words between two images, have attended
to part of the image: they count as image tokens without a position.

In a prefix language model (PaliGemma) image tokens also read the question. There they keep the
states that they have where everybody sees the image, whatever a mask says to the text rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from seecause.errors import BadInput
from seecause.models.base import Contents, check_eval_mode
from seecause.models.block import At, Named, Size
from seecause.models.decoder import (
    ImageTokens,
    arriving,
    image_tokens,
    planted_span,
    with_deepstack,
)

if TYPE_CHECKING:
    from seecause.lvlm.model import LVLM

PLAIN = "USER: {image}\n{question} ASSISTANT:"  # for processors without a chat template
BARE = "{image}{question}"  # for those that put in what else belongs there (PaliGemma)


@dataclass(frozen=True, eq=False)
class Prompt:
    """One sequence of S tokens with an image in it."""

    ids: Tensor  # [S]
    embeddings: Tensor  # [1, S, D] what enters the first block, image features in place
    at: At  # the positions of all S tokens
    image: slice  # the N image tokens
    tokens: ImageTokens  # the grids of the image tokens
    pieces: tuple[str, ...]  # of the text rows, readable
    # [1, N, D] each: added to image rows behind the first blocks
    deepstack: tuple[Tensor | None, ...] = ()
    # what the native model takes
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    size: Size | None = None  # of the image
    prefix: int = 0  # number of first tokens with bidirectional attention (PaliGemma)

    @property
    def read_words(self) -> tuple[int, ...]:
        """The words after the image that its tokens read; none in a causal decoder."""
        return tuple(self.ids[self.image.stop : self.prefix].tolist())

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
        raise BadInput("an empty question", "heads carry the image into words", "ask something")
    token = processor.image_token
    if token in question:
        raise BadInput(
            f"a question with {token} in it",
            "the image's place is set by the template, and there is one image",
            f"remove {token}",
        )
    if template is None and getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": question}]
        return processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    return (template or PLAIN).format(image=token, question=question)


def native_inputs(lvlm: LVLM, image: Image.Image, text: str, **options: Any) -> Named:
    """The processor's tensors for one image and a rendered text, on the model's device and in its
    dtype."""
    options |= {"images": image.convert("RGB"), "text": text, "return_tensors": "pt"}
    return lvlm.send(lvlm.processor(**options))


def answer_ids(
    lvlm: LVLM, image: Image.Image, text: str, answer: str, *, before: list[int] | None = None
) -> list[int]:
    """The tokens of an answer as they follow a rendered prompt; `before` are the prompt's own,
    where they are known."""
    known: list[int] = before or native_inputs(lvlm, image, text)["input_ids"][0].tolist()
    if lvlm.decoder.reads_prefix:  # its processor ends the question, and the answer
        *both, _ = native_inputs(lvlm, image, text, suffix=answer)["input_ids"][0].tolist()
    else:
        joined = text + answer if text[-1].isspace() else f"{text} {answer}"
        both = native_inputs(lvlm, image, joined)["input_ids"][0].tolist()
    ids = both[len(known) :]
    if not answer.strip() or both[: len(known)] != known or not ids:
        raise BadInput(
            f"answer {answer!r}",
            "its tokens do not continue the prompt's",
            "give the answer as the model would write it",
        )
    unknown = getattr(getattr(lvlm.processor, "tokenizer", None), "unk_token_id", None)
    if unknown is not None and unknown in ids:
        raise BadInput(
            f"answer {answer!r}",
            "it has words that the model's tokenizer does not know",
            "give an answer in words that the model can say",
        )
    return ids


def extended(inputs: Mapping[str, Any], ids: Sequence[int], *, token_type: int = 0) -> Named:
    """Native inputs with tokens appended, as if they had been said already. Prefix language models
    tell them from the question by their `token_type`, 1."""
    more = torch.tensor([list(ids)], device=inputs["input_ids"].device)
    filled = {
        "input_ids": more,
        "attention_mask": torch.ones_like(more),
        "mm_token_type_ids": torch.zeros_like(more),
        "token_type_ids": torch.full_like(more, token_type),
    }
    return {
        name: torch.cat([value, filled[name].to(value)], dim=1) if name in filled else value
        for name, value in inputs.items()
    }


@torch.no_grad()
def read(lvlm: LVLM, inputs: Mapping[str, Any], *, size: Size | None = None) -> Prompt:
    """A prompt from native inputs: one sequence."""
    check_eval_mode(Contents([lvlm.module]), lvlm.device)
    ids, places = inputs["input_ids"][0], _image_places(lvlm, inputs)
    image = slice(int(places.nonzero()[0]), int(places.nonzero()[-1]) + 1)
    prefix = _prefix_length(inputs, image) if lvlm.decoder.reads_prefix else 0
    check_span(lvlm, image, len(ids), prefix)
    tiling = getattr(lvlm.processor, "image_processor", None)
    tokens = image_tokens(lvlm.module.config, inputs, places[image].cpu(), size, tiling)
    arrived = arriving(lvlm.module, lvlm.decoder.native, dict(inputs))
    embeddings, positions = arrived["inputs_embeds"].to(ids.device), arrived.get("position_ids")
    embeddings = embeddings * lvlm.decoder.multiplier
    if positions is None:
        positions = torch.arange(len(ids))[None]
    positions = positions.to(ids.device)
    if positions.ndim == 3 and len(positions) == 4:  # the first axis is for packing only
        positions = positions[1:]
    before: Mapping[int, Tensor] = arrived.get("deepstack_features") or {}  # added before a layer
    behind = arrived.get("deepstack_visual_embeds") or [
        before.get(layer) for layer in range(1, 1 + max(before, default=0))
    ]
    deepstack = tuple(_spread(feature, places[image], embeddings) for feature in behind)
    if 0 in before:
        first = (_spread(before[0], places[image], embeddings),)
        embeddings = with_deepstack(embeddings, first, 0, image)
    images = torch.where(places, (places.diff(prepend=places[:1]) != 0).cumsum(dim=0), -1)
    return Prompt(
        ids=ids,
        embeddings=embeddings,
        at=lvlm.decoder.at(positions, embeddings, images, prefix),
        image=image,
        tokens=tokens,
        pieces=lvlm.pieces(ids[image.stop :]),
        deepstack=deepstack,
        inputs=inputs,
        size=size,
        prefix=prefix,
    )


def _spread(feature: Tensor | None, places: Tensor, like: Tensor) -> Tensor | None:
    """Features of image tokens [n, D] as rows of the image [1, N, D]; zeros for tokens between."""
    if feature is None:
        return None
    spread = like.new_zeros(1, len(places), feature.shape[-1])
    spread[0, places] = feature.to(spread)
    return spread


def _prefix_length(inputs: Mapping[str, Any], image: slice) -> int:
    """How many first tokens, image and question, a prefix language model reads both ways."""
    kinds = inputs.get("token_type_ids")
    if kinds is None:
        raise BadInput(
            "a prompt without token_type_ids",
            "they say where the question ends, up to which this model reads both ways",
            "give them as its processor does: 0 for image and question, 1 for an answer",
        )
    in_answer = kinds[0] != 0
    prefix = int((~in_answer).sum())
    if bool(in_answer[:prefix].any()) or image.start > 0 or image.stop > prefix:
        raise BadInput(
            "another order than image, question, answer",
            "in this model everything before the answer reads the image, so the image must come"
            " first",
            "use a template that begins with {image}",
        )
    return prefix


def _image_places(lvlm: LVLM, inputs: Mapping[str, Any]) -> Tensor:
    """[S] bool: the image tokens of one sequence; raises if it cannot be traced."""
    ids = inputs["input_ids"][0]
    places = ids == lvlm.module.config.image_token_id
    if "image_grids" in inputs:  # Molmo 2: marks also see all of the image
        places = inputs["mm_token_type_ids"][0] == 1
    if not bool(places.any()) or inputs.get("pixel_values") is None:
        raise BadInput(
            "a prompt without image tokens",
            "there is no image to trace",
            "give an image, and a template that has a place for it",
        )
    mask = inputs.get("attention_mask")
    padded = isinstance(mask, Tensor) and not bool(mask.all())
    if len(inputs["input_ids"]) > 1 or padded:
        raise BadInput(
            f"input_ids {list(inputs['input_ids'].shape)}{' with padding' if padded else ''}",
            "heads are traced for one sequence at a time, in which every token is seen",
            "give one question, without padding",
        )
    return places


def check_span(lvlm: LVLM, image: slice, length: int, prefix: int = 0) -> None:
    """Raises if the model does not support this position of the image. Windows do not cut the
    `prefix`, which has bidirectional attention."""
    if image.stop == length:
        raise BadInput(
            "a prompt that ends with the image",
            "no text row follows that could see it",
            "use a template with the question after the image",
        )
    span, window = planted_span(lvlm.decoder.native.config), lvlm.decoder.window
    if span is not None and span != (image.start, image.stop):
        raise BadInput(
            f"image tokens {image.start} to {image.stop}",
            f"this planted model expects {span[0]} to {span[1]}",
            "use its own template",
        )
    if window is not None and length > max(window, prefix):
        raise BadInput(
            f"a prompt of {length} tokens",
            f"this decoder's sliding window holds {window}",
            "shorten it, or use a smaller image",
        )


def image_map(tokens: ImageTokens, values: Tensor) -> Tensor:
    """Combine values of image tokens into one map of the image.

    Args:
        tokens: Where the tokens lie, such as `engine.prompt.tokens`.
        values: [N], one value for each token.

    Returns:
        A map [rows, columns] in the finest grid that shows the image; the value of a coarser token
        is shared out over its box.

    Example:
        >>> from seecause.models.decoder import Grid
        >>> two = ImageTokens((Grid(1, 1), Grid(2, 2)))      # a coarse grid, then a fine one
        >>> image_map(two, torch.tensor([4.0, 1, 2, 3, 4])).tolist()
        [[2.0, 3.0], [4.0, 5.0]]
    """
    shown = [(p, piece, p.box) for p, piece in tokens.maps(values.double().cpu()) if p.box]
    rows = max(round(part.rows / (box[2] - box[0])) for part, _, box in shown)
    columns = max(round(part.columns / (box[3] - box[1])) for part, _, box in shown)
    total = torch.zeros(rows, columns, dtype=torch.float64)
    for part, piece, box in shown:
        top, left, bottom, right = (
            round(share * side) for share, side in zip(box, (rows, columns) * 2, strict=True)
        )
        spread = F.interpolate(piece[None, None], size=(bottom - top, right - left))[0, 0]
        total[top:bottom, left:right] += spread * (part.rows * part.columns / spread.numel())
    return total


def seen_image(lvlm: LVLM, prompt: Prompt, image: Image.Image) -> Tensor:
    """The image as the model sees it, to draw maps on.

    Args:
        lvlm: The model.
        prompt: The prompt with the image.
        image: The image itself.

    Returns:
        [3, H, W] in [0, 1]: the crop that the model receives, if it crops and takes one image;
        otherwise the image itself.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> image = sc.data.open_image("critters:clean:test#3")
        >>> sc.lvlm.seen_image(lvlm, lvlm.prompt(image, "What is this?"), image).shape
        torch.Size([3, 96, 96])
    """
    pixels = prompt.inputs.get("pixel_values")
    reader = getattr(lvlm.processor, "image_processor", None)
    mean, deviation = (getattr(reader, name, None) for name in ("image_mean", "image_std"))
    known = mean is not None and deviation is not None
    whole = (1, 3)  # one image of three channels: no tiles or patches
    if isinstance(pixels, Tensor) and pixels.ndim == 4 and pixels.shape[:2] == whole and known:
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (mean, deviation))
        return (pixels[0].float().cpu() * deviation + mean).clamp(0, 1)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) / 255
