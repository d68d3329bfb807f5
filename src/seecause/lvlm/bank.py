"""The average image, to which an ablated head attends in place of the image (mean ablation; head
attribution, section A.2).

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
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from seecause.errors import BadInput, BadOption
from seecause.files import digest, write_atomic
from seecause.loading import reading
from seecause.lvlm.cache import run_prefix
from seecause.lvlm.model import LVLM
from seecause.lvlm.prompt import Prompt
from seecause.models.block import Size, wide_dtype
from seecause.options import checked

QUESTION = "What is this?"  # no effect, unless image tokens read it (`with_words_of`)
FILE = "bank.safetensors"


@dataclass(eq=False, repr=False)
class MeanBank:
    """The average image, returned by `make_bank`.

    Holds sums over calibration images for each layout of image tokens (and, in a prefix language
    model, each question) used so far; others are computed on demand, while the images are
    available.

    Attributes:
        model: Fingerprint of the model.
        digests: Of the calibration images.
        images: The calibration images, which are not saved.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(3))
        >>> len(bank.digests)
        3
    """

    model: str
    digests: tuple[str, ...]
    sums: dict[str, Tensor] = field(default_factory=dict)  # keys, values [2, L, Hkv, N, dh]
    images: tuple[Image.Image, ...] = ()

    def __repr__(self) -> str:
        tokens = ", ".join(dict.fromkeys(key.partition(" #")[0] for key in self.sums))
        return f"MeanBank({len(self)} images, image tokens {tokens or 'none yet'})"

    def __len__(self) -> int:
        return len(self.digests)

    @torch.no_grad()
    def means(self, lvlm: LVLM, prompt: Prompt, image: Image.Image | None = None) -> Tensor:
        """Unrotated average keys and values [2, L, Hkv, N, dh] for a prompt; `image` is left out of
        them if it is in them."""
        if self.model != lvlm.fingerprint():
            raise BadInput(
                f"a bank of model {self.model}",
                "it was made with another model or other weights",
                "make one with this model",
            )
        key = key_of(prompt)
        if key not in self.sums:
            if not self.images:
                reason = f"this image has image tokens {prompt.tokens}"
                if prompt.read_words:
                    reason += ", and its image tokens read the question"
                remedy = "make the bank with images at hand, or for this size"
                raise BadInput(f"{self!r} without its calibration images", reason, remedy)
            self.sums[key] = add_up(lvlm, (_seen(lvlm, each, prompt) for each in self.images))
        total = self.sums[key].to(lvlm.device)
        times = 0 if image is None else self.digests.count(image_digest(image))
        if image is not None and times:
            if times == len(self):
                raise BadInput(
                    "a bank of this image alone",
                    "leaving it out leaves nothing",
                    "calibrate with more images",
                )
            total = total - times * add_up(lvlm, [_seen(lvlm, image, prompt)])
        return (total / (len(self) - times)).to(lvlm.dtype)

    def save(self, folder: str | Path) -> Path:
        """Write the sums and their description as safetensors."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: sums.cpu().contiguous() for key, sums in self.sums.items()}
        write_atomic(
            folder / FILE,
            save(tensors, {"model": self.model, "digests": json.dumps(self.digests)}),
        )
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> MeanBank:
        """Read what `save` wrote. Without the images, it serves only the shapes (and, in a prefix
        language model, questions) that it has."""
        folder = Path(folder)
        with (
            reading(folder, FILE, writer="`seecause lvlm bank` or MeanBank.save"),
            safe_open(folder / FILE, "pt") as file,
        ):
            card, sums = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return cls(card["model"], tuple(json.loads(card["digests"])), sums)


def key_of(prompt: Prompt) -> str:
    """The key of an average, shared by prompts with equal grids of image tokens and equal words
    that these read."""
    return f"{prompt.tokens} #{digest(repr((prompt.tokens, prompt.read_words)))}"


@checked
def make_bank(lvlm: LVLM, images: Sequence[Image.Image], *, sizes: Sequence[Size] = ()) -> MeanBank:
    """Make the average image, which ablated heads see in place of the explained one.

    Args:
        lvlm: A model returned by `sc.lvlm.load` or `sc.lvlm.wrap`.
        images: About a hundred PIL images, similar to the explained ones.
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
    sums = {key_of(prompts[0]): add_up(lvlm, prompts)}
    return MeanBank(lvlm.fingerprint(), ("",) * len(prompts), sums)


@torch.no_grad()
def add_up(lvlm: LVLM, prompts: Iterable[Prompt]) -> Tensor:
    """Keys and values of image tokens [2, L, Hkv, N, dh], added up over prompts that agree in their
    image tokens and in the words that these read."""
    total = torch.zeros((), dtype=wide_dtype(lvlm.dtype), device=lvlm.device)
    first: Prompt | None = None
    for prompt in prompts:
        first = first or prompt
        if key_of(prompt) != key_of(first):
            raise BadInput(
                f"a calibration image with image tokens {prompt.tokens}",
                f"expected {first.tokens}, which read the same words if any",
                "give images of one shape, and one question",
            )
        keys, values = zip(*run_prefix(lvlm.decoder, prompt), strict=True)
        both = torch.stack([torch.cat(keys), torch.cat(values)])  # [2, L, Hkv, K, dh]
        total = total + both[:, :, :, prompt.image].to(total.dtype)
    return total


def image_digest(image: Image.Image) -> str:
    """Tells images apart by their pixels."""
    return digest(repr(image.size), image.convert("RGB").tobytes())


def _seen(lvlm: LVLM, image: Image.Image, prompt: Prompt) -> Prompt:
    """A calibration image with the image tokens of `prompt`, as it is if it has them, else resized;
    after it the words of `prompt`, where its tokens read them."""
    own = lvlm.prompt(image, QUESTION)
    if own.tokens != prompt.tokens and prompt.size is not None:
        own = lvlm.prompt(_resize(image, prompt.size), QUESTION)
    if own.tokens != prompt.tokens:
        raise BadInput(
            f"a calibration image with image tokens {own.tokens}",
            f"expected {prompt.tokens}",
            "make the prompt from the image itself, whose size places its tiles",
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
    return image.convert("RGB").resize((size[1], size[0]), Image.Resampling.BICUBIC)
