"""A picture and a question as the sequence a decoder sees, and where its image tokens lie in the
picture, against a mask of the object (head attribution, section 5.2).

    [tokens before the picture] [image tokens] [text rows: everything after]

Only text rows can be told what to see of the picture; what comes before it cannot see it, and image
tokens are left alone. Marks of rows and tiles, or words between two pictures, have seen a part of
them: they count as image tokens without a place.

In a prefix language model (PaliGemma) image tokens also read the question. There they keep the
states that they have where everybody sees the picture, whatever a mask says to the text rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from seecause.data.dataset import IGNORE
from seecause.errors import BadInput, BadOption
from seecause.models.decoder import (
    ImageBox as Box,
    ImageTokens,
    arriving,
    image_tokens,
    planted_span,
)
from seecause.models.eval_mode import check_eval_mode
from seecause.models.layout import At

if TYPE_CHECKING:
    from seecause.lvlm.model import LVLM

PLAIN = "USER: {image}\n{question} ASSISTANT:"  # for processors without a chat template
BARE = "{image}{question}"  # for those that put in what else belongs there (PaliGemma)


@dataclass(frozen=True, eq=False)
class Prompt:
    """One sequence of S tokens with a picture in it, or several."""

    ids: Tensor  # [S]
    embeddings: Tensor  # [1, S, D] what enters the first block, the picture's features in place
    at: At  # the positions of all S tokens
    image: slice  # the N image tokens
    tokens: ImageTokens  # and where in the picture they come from
    pieces: tuple[str, ...]  # of the text rows, readable
    # [1, N, D] each: added to image rows behind the first blocks
    deepstack: tuple[Tensor, ...] = ()
    # what the native model takes
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    size: tuple[int, int] | None = None  # height and width of the picture
    prefix: int = 0  # so many first tokens see each other both ways (PaliGemma)

    @property
    def read_words(self) -> tuple[int, ...]:
        """The words behind the picture that its image tokens read; none in a causal decoder."""
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


def check_template(template: str) -> None:
    """Refuse a template without the two fields, or with others."""
    try:
        fields = {field for _, field, _, _ in Formatter().parse(template)} - {None}
    except ValueError:  # a brace by itself
        fields = set()
    if fields != {"image", "question"}:
        expected = "a text with {image} and {question} in it, and no other braces but {{ and }}"
        raise BadOption("template", template, expected)


def render(processor: Any, question: str, template: str | None = None) -> str:
    """The text of a prompt: the chat template, or a plain one with {image} and {question}."""
    if not isinstance(question, str) or not question.strip():
        what = "an empty question" if isinstance(question, str) else f"the question {question!r}"
        raise BadInput(what, "heads carry the picture into words", "ask something in words")
    token = processor.image_token
    if token in question:
        raise BadInput(
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
    lvlm: LVLM, picture: Image.Image | Sequence[Image.Image], text: str, **options: str
) -> dict[str, Any]:
    """The processor's tensors for one picture and a rendered text, on the model's device and in its
    dtype."""
    pixels = checked_picture(picture).convert("RGB")
    return lvlm.send(lvlm.processor(images=pixels, text=text, return_tensors="pt", **options))


def checked_picture(picture: object) -> Image.Image:
    """A PIL image, or what is wrong with it."""
    if isinstance(picture, Image.Image):
        return picture
    what = f"a picture of type {type(picture).__name__}"
    raise BadInput(what, "expected one PIL image", "open files with sc.data.open_image(path)")


def prompt_ids(lvlm: LVLM, picture: Image.Image, text: str) -> list[int]:
    """The tokens of a rendered text with its picture."""
    return native_inputs(lvlm, picture, text)["input_ids"][0].tolist()


def answer_ids(
    lvlm: LVLM, picture: Image.Image, text: str, answer: str, *, before: list[int] | None = None
) -> list[int]:
    """The tokens of an answer as they follow the prompt; `before` are the prompt's own, where they
    are known."""
    before = prompt_ids(lvlm, picture, text) if before is None else before
    if lvlm.decoder.reads_prefix:  # its processor ends the question, and the answer
        *both, _ = native_inputs(lvlm, picture, text, suffix=answer)["input_ids"][0].tolist()
    else:
        joined = text + answer if text[-1].isspace() else f"{text} {answer}"
        both = prompt_ids(lvlm, picture, joined)
    if not answer.strip() or both[: len(before)] != before or len(both) == len(before):
        raise BadInput(
            f"answer {answer!r}",
            "its tokens do not continue the prompt's",
            "give the answer as the model would write it",
        )
    ids = both[len(before) :]
    unknown = getattr(getattr(lvlm.processor, "tokenizer", None), "unk_token_id", None)
    if unknown is not None and unknown in ids:
        raise BadInput(
            f"answer {answer!r}",
            "it has words that the model's tokenizer does not know",
            "give an answer in words that the model can say",
        )
    return ids


def extended(
    inputs: Mapping[str, Any], ids: Sequence[int], *, token_type: int = 0
) -> dict[str, Any]:
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
def read(lvlm: LVLM, inputs: Mapping[str, Any], *, size: tuple[int, int] | None = None) -> Prompt:
    """A prompt from native inputs: one sequence."""
    check_eval_mode([lvlm.module], lvlm.device)
    ids, places = inputs["input_ids"][0], _image_places(lvlm, inputs)
    image = slice(int(places.nonzero()[0]), int(places.nonzero()[-1]) + 1)
    prefix = _prefix_length(inputs, image) if lvlm.decoder.reads_prefix else 0
    check_span(lvlm, image, len(ids), prefix)
    tiling = getattr(lvlm.processor, "image_processor", None)
    tokens = image_tokens(lvlm.module.config, inputs, places[image].cpu(), size, tiling)
    arrived = arriving(lvlm.module, lvlm.decoder.native, dict(inputs))
    embeddings, positions = arrived["inputs_embeds"].to(ids.device), arrived.get("position_ids")
    if positions is None:
        positions = torch.arange(len(ids))[None]
    positions = positions.to(ids.device)
    if positions.ndim == 3 and len(positions) == 4:  # the first axis is for packing only
        positions = positions[1:]
    pictures = torch.where(places, (places.diff(prepend=places[:1]) != 0).cumsum(dim=0), -1)
    return Prompt(
        ids=ids,
        embeddings=embeddings,
        at=lvlm.decoder.at(positions, embeddings, pictures, prefix),
        image=image,
        tokens=tokens,
        pieces=lvlm.pieces(ids[image.stop :]),
        deepstack=tuple(
            _in_place(feature.to(ids.device), places[image])
            for feature in arrived.get("deepstack_visual_embeds") or ()
        ),
        inputs=inputs,
        size=size,
        prefix=prefix,
    )


def _prefix_length(inputs: Mapping[str, Any], image: slice) -> int:
    """How many first tokens, picture and question, a prefix language model reads both ways."""
    kinds = inputs.get("token_type_ids")
    if kinds is None:
        raise BadInput(
            "a prompt without token_type_ids",
            "they say where the question ends, up to which this model reads both ways",
            "give them as its processor does: 0 for picture and question, 1 for an answer",
        )
    in_answer = kinds[0] != 0
    prefix = int((~in_answer).sum())
    if bool(in_answer[:prefix].any()) or image.start > 0 or image.stop > prefix:
        raise BadInput(
            "another order than picture, question, answer",
            "in this model whatever stands before the answer reads the picture, so the picture must"
            " come first",
            "use a template that begins with {image}",
        )
    return prefix


def _in_place(features: Tensor, places: Tensor) -> Tensor:
    """Features of image tokens [n, D] among those between them, which get none: [1, N, D]."""
    spread = features.new_zeros(len(places), features.shape[-1])
    spread[places] = features
    return spread[None]


def _image_places(lvlm: LVLM, inputs: Mapping[str, Any]) -> Tensor:
    """[S] bool: the image tokens of one sequence, or why it cannot be traced."""
    ids = inputs["input_ids"][0]
    config = lvlm.module.config
    tokens = [config.image_token_id, getattr(config, "video_token_id", None)]
    places = torch.isin(ids, torch.tensor([t for t in tokens if t is not None], device=ids.device))
    seen = [inputs.get(name) is not None for name in ("pixel_values", "pixel_values_videos")]
    if not bool(places.any()) or not any(seen):
        raise BadInput(
            "a prompt without image tokens",
            "there is no picture to trace",
            "give a picture, and a template that has a place for it",
        )
    if len(inputs["input_ids"]) > 1:
        raise BadInput(
            f"{len(inputs['input_ids'])} sequences",
            "heads are traced for one at a time",
            "give one question",
        )
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
        raise BadInput(
            f"{int((mask == 0).sum())} tokens of padding (attention_mask)",
            "tokens that nobody may see would be seen here",
            "give the sequence without padding",
        )
    return places


def check_span(lvlm: LVLM, image: slice, length: int, prefix: int = 0) -> None:
    """Refuse a place of the picture that this model cannot have. Windows do not cut the `prefix`,
    which is read both ways."""
    if image.stop == length:
        raise BadInput(
            "a prompt that ends with the picture",
            "no text row follows that could see it",
            "use a template with the question after the picture",
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
            "shorten it, or use a smaller picture",
        )


@dataclass(frozen=True)
class ObjectShare:
    """How much of what counts lies on the object, and how much of the picture the object is."""

    share: float  # of the positive values
    area: float  # of the tokens: what values spread evenly would have
    hit: bool  # whether the largest value lies on a token that the object covers by half or more


def coverage(tokens: ImageTokens, mask: Tensor) -> Tensor:
    """[N] float64: the share of each token's box that the object covers; NaN for tokens without a
    place (newlines, class token).

    mask [H, W]: bool, or integers with 1 on the object. Pixels that are neither (IGNORE) do not
    count; NaN where a box has no others.
    """
    if mask.ndim != 2:
        raise BadOption("mask", list(mask.shape), "one value for each pixel, [H, W]")
    both = torch.stack([mask == 1, mask != IGNORE]).cpu().double()
    parts = []
    for part in tokens.parts:
        shape = (part.rows, part.columns + part.newline)
        covered = torch.full(shape, torch.nan, dtype=torch.float64)
        if part.box is not None:
            top, left, bottom, right = _scaled(part.box, *mask.shape)
            shown = both[:, top:bottom, left:right]
            on, counted = F.adaptive_avg_pool2d(shown, (part.rows, part.columns))
            covered[:, : part.columns] = on / counted  # 0 / 0 is NaN
        parts.append(covered.flatten())
    return torch.cat(parts)


def _scaled(box: Box, height: int, width: int) -> list[int]:
    """Top, left, bottom and right in pixels or cells."""
    return [round(share * side) for share, side in zip(box, (height, width) * 2, strict=True)]


def object_share(values: Tensor, tokens: ImageTokens, mask: Tensor) -> ObjectShare | None:
    """The share of the positive part of values [N] that lies on the object; mask [H, W] in the
    frame that the image tokens cover (`seen_mask`).

    None where no value is positive: there is nothing to share out.
    """
    covered = coverage(tokens, mask)
    placed = ~covered.isnan()
    weight, covered = values.double().cpu()[placed].clamp(min=0), covered[placed]
    if not bool((weight > 0).any()):
        return None
    return ObjectShare(
        float((weight * covered).sum() / weight.sum()),
        float(covered.mean()),
        bool(covered[weight.argmax()] >= 0.5),
    )


def picture_map(tokens: ImageTokens, values: Tensor) -> Tensor:
    """Values [N] of all grids as one map [gh, gw] of the finest grid: a coarse token's
    value is shared out over its box. One grid stays as it is."""
    shown = tokens.maps(values.double().cpu())
    if not shown:
        raise BadOption("tokens", str(tokens), "image tokens with known places")
    boxes = [part.box for part, _ in shown if part.box is not None]
    placed = [(part, piece, box) for (part, piece), box in zip(shown, boxes, strict=True)]
    rows = max(round(part.rows / (box[2] - box[0])) for part, _, box in placed)
    columns = max(round(part.columns / (box[3] - box[1])) for part, _, box in placed)
    total = torch.zeros(rows, columns, dtype=torch.float64)
    for part, piece, box in placed:
        top, left, bottom, right = _scaled(box, rows, columns)
        size = (bottom - top, right - left)
        spread = F.interpolate(piece[None, None], size=size, mode="nearest")[0, 0]
        total[top:bottom, left:right] += spread * (part.rows * part.columns / spread.numel())
    return total


def seen_picture(lvlm: LVLM, prompt: Prompt, picture: Image.Image) -> Tensor:
    """The picture [3, H, W] in [0, 1] in the frame that image tokens cover: what the model gets
    where it crops and gets one, else the picture as it is."""
    pixels = prompt.inputs.get("pixel_values")
    reader = getattr(lvlm.processor, "image_processor", None)
    mean, deviation = (getattr(reader, name, None) for name in ("image_mean", "image_std"))
    if _is_picture(pixels) and mean is not None and deviation is not None:
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (mean, deviation))
        return (pixels[0].float().cpu() * deviation + mean).clamp(0, 1)
    return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1) / 255


def seen_mask(lvlm: LVLM, prompt: Prompt, mask: Tensor) -> Tensor:
    """A mask [H, W] of the picture in the frame that image tokens cover: resized and cropped as the
    picture was, without new values in between."""
    reader = getattr(lvlm.processor, "image_processor", None)
    if reader is None or not _is_picture(prompt.inputs.get("pixel_values")):
        return mask
    picture = Image.fromarray(mask.cpu().to(torch.uint8).numpy())
    if prompt.size is not None:  # a bank may have had the picture resized
        picture = picture.resize((prompt.size[1], prompt.size[0]), Image.Resampling.NEAREST)
    plain = {"do_rescale": False, "do_normalize": False, "resample": Image.Resampling.NEAREST}
    three = Image.merge("RGB", [picture] * 3)
    pixels = reader(images=three, **plain, return_tensors="pt")["pixel_values"]
    seen = pixels[0, 0].round().to(torch.uint8)
    return seen == 1 if mask.dtype == torch.bool else seen


def _is_picture(pixels: object) -> TypeGuard[Tensor]:
    """One whole picture, not its tiles or patches."""
    return isinstance(pixels, Tensor) and pixels.ndim == 4 and tuple(pixels.shape[:2]) == (1, 3)
