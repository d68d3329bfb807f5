"""The average image: what a head sees when it may not see the image (head attribution, section
3.1).

Keys and values of image tokens, averaged token by token over calibration images. Keys are averaged
before rotation, so they can be put at any position. Images of different shapes have different
tokens, so each shape has its own average, for which calibration images with other tokens are
resized to the explained image's size. The explained image is left out of the average if it is one
of the calibration images.

In a prefix language model (PaliGemma) image tokens read the question: calibration images are run
with it, so there is an average for each question.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.engine.chunks import fit
from seecause.errors import BadInput, BadOption
from seecause.files import digest, write_atomic, write_json
from seecause.loading import reading
from seecause.lvlm.cache import run_prefix
from seecause.lvlm.model import LVLM
from seecause.lvlm.prompt import Prompt
from seecause.models.block import wide_dtype
from seecause.models.decoder import Grid, ImageTokens
from seecause.options import checked

Size = tuple[int, int]  # height, width
KeyValueSums = tuple[Tensor, Tensor]  # [L, Hkv, N, dh], added up over images
Averaged = tuple[ImageTokens, tuple[int, ...]]  # image tokens, and the words that they read, if any
QUESTION = "What is this?"  # any will do, except where image tokens read it (`with_words_of`)
FILE, CARD = "bank.safetensors", "bank.json"


@dataclass(eq=False, repr=False)
class MeanBank:
    """The average image, returned by `make_bank`.

    Holds sums over calibration images for each layout of image tokens (and, in a prefix language
    model, each question) met so far; others are made when they are needed, while the images are at
    hand.

    Attributes:
        model: Fingerprint of the model.
        digests: Of the calibration images.
        images: The calibration images, which are not saved.
    """

    model: str
    digests: tuple[str, ...]
    sums: dict[Averaged, KeyValueSums] = field(default_factory=dict)
    images: tuple[Image.Image, ...] = ()

    def __repr__(self) -> str:
        tokens = ", ".join(dict.fromkeys(str(tokens) for tokens, _ in self.sums)) or "none yet"
        return f"MeanBank({len(self)} images, image tokens {tokens})"

    def __len__(self) -> int:
        return len(self.digests)

    @torch.no_grad()
    def means(self, lvlm: LVLM, prompt: Prompt, image: Image.Image | None = None) -> KeyValueSums:
        """Unrotated average keys and values [L, Hkv, N, dh] for a prompt; `image` is left out of
        them if it is in them."""
        keys, values = (sums.to(lvlm.device) for sums in self._sums(lvlm, prompt))
        times = 0 if image is None else self.digests.count(image_digest(image))
        if image is not None and times:
            if times == len(self):
                raise BadInput(
                    "a bank of this image alone",
                    "leaving it out leaves nothing",
                    "calibrate with more images",
                )
            own_keys, own_values = add_up(lvlm, [_seen(lvlm, image, prompt)])
            keys, values = keys - times * own_keys, values - times * own_values
        weight = len(self) - times
        return (keys / weight).to(lvlm.dtype), (values / weight).to(lvlm.dtype)

    def _sums(self, lvlm: LVLM, prompt: Prompt) -> KeyValueSums:
        """The sums for a prompt, made now if there are none."""
        if self.model != lvlm.fingerprint():
            raise BadInput(
                f"a bank of model {self.model}",
                "it was made with another model or other weights",
                "make one with this model",
            )
        wanted = (prompt.tokens, prompt.read_words)
        if wanted not in self.sums:
            if not self.images:
                reason = f"this image has image tokens {prompt.tokens}"
                if prompt.read_words:
                    reason += ", and its image tokens read the question"
                remedy = "make the bank with images at hand, or for this size"
                raise BadInput(f"{self!r} without its calibration images", reason, remedy)
            self.sums[wanted] = add_up(lvlm, (_seen(lvlm, each, prompt) for each in self.images))
        return self.sums[wanted]

    def save(self, folder: str | Path) -> Path:
        """Write the sums (safetensors) and what they are of (JSON)."""
        if not self.sums:
            remedy = "use it for an image first, or make it with sizes="
            raise BadInput("a bank to save", "it has no average yet", remedy)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors, shapes = {}, []
        for index, ((tokens, words), (keys, values)) in enumerate(self.sums.items()):
            tensors[f"{index}.k"] = keys.cpu().contiguous()
            tensors[f"{index}.v"] = values.cpu().contiguous()
            shapes.append({"parts": [vars(part) for part in tokens.parts], "words": words})
        write_atomic(folder / FILE, save(tensors))
        write_json(folder / CARD, {"model": self.model, "digests": self.digests, "shapes": shapes})
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> MeanBank:
        """Read what `save` wrote. Without the images, it serves only the shapes (and, in a prefix
        language model, questions) that it has."""
        folder = Path(folder)
        with reading(folder, FILE, CARD, writer="`seecause lvlm bank` or MeanBank.save"):
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
            tensors = load_file(folder / FILE)
            bank = cls(card["model"], tuple(card["digests"]))
            for index, shape in enumerate(card["shapes"]):
                parts = [
                    part | {"box": part["box"] and tuple(part["box"])} for part in shape["parts"]
                ]
                tokens = ImageTokens(tuple(Grid(**part) for part in parts))
                pair = tensors[f"{index}.k"], tensors[f"{index}.v"]
                bank.sums[tokens, tuple(shape["words"])] = pair
            return bank


@checked
def make_bank(lvlm: LVLM, images: Sequence[Image.Image], *, sizes: Sequence[Size] = ()) -> MeanBank:
    """Make the average image, which ablated heads see in place of the explained one.

    Args:
        lvlm: A model returned by `sc.lvlm.load` or `sc.lvlm.wrap`.
        images: PIL images like those the model is asked about, about a hundred of them.
        sizes: Heights and widths of images to prepare for now, such as for a bank that is saved;
            others are prepared when they are needed.

    Returns:
        A `MeanBank`.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3), sizes=[(96, 96)])
        MeanBank(3 images, image tokens 12 x 12)
    """
    if not images:
        raise BadOption("images", [], "at least one calibration image")
    bank = MeanBank(lvlm.fingerprint(), tuple(map(image_digest, images)), images=tuple(images))
    for size in sizes:
        bank.means(lvlm, lvlm.prompt(_resize(images[0], size), QUESTION))
    return bank


def bank_of_prompts(lvlm: LVLM, prompts: Sequence[Prompt]) -> MeanBank:
    """A bank from prompts of one shape (in a prefix language model, of one question too), for
    models without a processor. It cannot tell whether the explained image is among them."""
    if len({prompt.read_words for prompt in prompts}) > 1:
        reason = "image tokens of this model read the question, so that they cannot be averaged"
        remedy = "give prompts with one question"
        raise BadInput("calibration prompts with several questions", reason, remedy)
    bank = MeanBank(lvlm.fingerprint(), ("",) * len(prompts))
    bank.sums[prompts[0].tokens, prompts[0].read_words] = add_up(lvlm, prompts)
    return bank


@torch.no_grad()
def add_up(lvlm: LVLM, prompts: Iterable[Prompt]) -> KeyValueSums:
    """Keys and values of image tokens added up over prompts with the same image tokens,
    [L, Hkv, N, dh]."""
    batch, total, kind = list[Prompt](), None, wide_dtype(lvlm.dtype)

    def added(total: Tensor | None) -> Tensor:
        """Sums [2, L, Hkv, N, dh] with those of the batch."""
        sums = [
            torch.stack([tensor[:, :, batch[0].image].sum(dim=0, dtype=kind) for tensor in both])
            for both in run_prefix(lvlm.decoder, batch)
        ]
        stacked = torch.stack(sums, dim=1)
        return stacked if total is None else total + stacked

    for prompt in prompts:
        if batch and prompt.tokens != batch[0].tokens:
            raise BadInput(
                f"a calibration image with image tokens {prompt.tokens}",
                f"expected {batch[0].tokens}",
                "give images of one shape",
            )
        if batch and (len(batch) >= _together(lvlm, prompt) or batch[0].image != prompt.image):
            total = added(total)
            batch = []
        batch.append(prompt)
    total = added(total)
    return total[0], total[1]


def image_digest(image: Image.Image) -> str:
    """Tells images apart by their pixels."""
    return digest(repr(image.size), image.convert("RGB").tobytes())


def _seen(lvlm: LVLM, image: Image.Image, prompt: Prompt) -> Prompt:
    """A calibration image with the image tokens of `prompt`, as it is if it has them, else resized;
    after it the words of `prompt`, where its tokens read them."""
    own = lvlm.prompt(image, QUESTION)
    if own.tokens != prompt.tokens:
        if prompt.size is None:
            raise BadInput(
                "a bank that resizes its images",
                "the prompt does not tell its image's size",
                "make the prompt from an image",
            )
        own = lvlm.prompt(_resize(image, prompt.size), QUESTION)
        if own.tokens != prompt.tokens:
            raise BadInput(
                f"a calibration image with image tokens {own.tokens}",
                f"expected {prompt.tokens}",
                "give the image that is asked about, whose size places its tiles",
            )
    return with_words_of(own, prompt)


def with_words_of(own: Prompt, prompt: Prompt) -> Prompt:
    """The image of `own` with the words of `prompt`, where image tokens read words."""
    if own.read_words == prompt.read_words:
        return own
    embeddings = prompt.embeddings.clone()
    embeddings[:, prompt.image] = own.embeddings[:, own.image]
    return replace(prompt, embeddings=embeddings)


def _resize(image: Image.Image, size: Size) -> Image.Image:
    if (image.height, image.width) == size:
        return image
    return image.convert("RGB").resize((size[1], size[0]), Image.Resampling.BICUBIC)


def _together(lvlm: LVLM, prompt: Prompt) -> int:
    """How many prefixes run at once: they keep keys and values of every block."""
    block = lvlm.blocks[0]
    held = lvlm.n_layers * 2 * block.kv_heads * block.head_dim + 20 * block.heads * block.head_dim
    rows = max(prompt.image.stop, prompt.prefix)
    return fit(16, rows * held * (torch.finfo(lvlm.dtype).bits // 8), lvlm.device)
