"""The average picture: what a head sees when it is not allowed to see the picture (head
attribution, section 3.1).

Keys and values of image tokens, averaged over calibration pictures. Keys are averaged before
rotation, so they can be put at any position. Pictures of different shapes have different tokens,
and there are four ways to average them (`mode`):

    shape   token by token, calibration pictures with other tokens resized to the explained
    picture's size (default; exact; needs the pictures)
    fixed   every picture, also the explained one, is resized to one size
    mean    one average over all tokens: no place survives
    grid    one average on the shape of `size`, stretched to other shapes; newline tokens get their
    own average

The explained picture is left out of the average if it is one of the calibration pictures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.engine.chunks import fit
from seecause.errors import BadOption, BankMismatch, DataMissing
from seecause.lvlm.prefix import run_prefix
from seecause.lvlm.prompt import Prompt
from seecause.lvlm.stretch import stretch
from seecause.lvlm.view import LVLM
from seecause.models.image_tokens import Grid, ImageTokens
from seecause.types import wide_dtype

Mode = Literal["shape", "fixed", "mean", "grid"]
Size = tuple[int, int]  # height, width
Sums = tuple[Tensor, Tensor]  # keys and values [L, Hkv, N, dh], added up
QUESTION = "What is this?"  # image tokens come before the question, so any will do
FILE, CARD = "bank.safetensors", "bank.json"


@dataclass(eq=False, repr=False)
class MeanBank:
    """Sums over calibration pictures for each token layout met so far."""

    mode: Mode
    model: str  # its fingerprint
    size: Size | None
    digests: tuple[str, ...]  # of the calibration pictures
    sums: dict[ImageTokens, Sums] = field(default_factory=dict)
    weights: dict[ImageTokens, int] = field(default_factory=dict)  # how many were added
    pictures: tuple[Image.Image, ...] = ()  # to make averages of new shapes; not saved

    def __repr__(self) -> str:
        return (
            f"MeanBank({self.mode}, {len(self.digests)} pictures, image tokens"
            f" {', '.join(map(str, self.sums)) or 'none yet'})"
        )

    def __len__(self) -> int:
        return len(self.digests)

    def resized(self, picture: Image.Image) -> Image.Image:
        """The picture as this bank wants to see it."""
        return _resize(picture, self.size) if self.mode == "fixed" else picture

    @torch.no_grad()
    def means(self, lvlm: LVLM, prompt: Prompt, picture: Image.Image | None = None) -> Sums:
        """Unrotated average keys and values [L, Hkv, N, dh] for a prompt; `picture` is left out of
        them if it is in them."""
        layout = self._layout(lvlm, prompt)
        keys, values = (sums.to(lvlm.device) for sums in self.sums[layout])
        weight = self.weights[layout]
        times = 0 if picture is None else self.digests.count(digest(picture))
        if picture is not None and times:
            (own_keys, own_values), own = self._collect(lvlm, [picture], prompt)
            if weight == times * own:
                raise BankMismatch(
                    "a bank of this picture alone",
                    "leaving it out leaves nothing",
                    "calibrate with more pictures",
                )
            keys, values, weight = (
                keys - times * own_keys,
                values - times * own_values,
                weight - times * own,
            )
        if self.mode == "grid":
            keys, values = (stretch(sums, layout, prompt.tokens) for sums in (keys, values))
        shape = (*keys.shape[:2], prompt.n_image, keys.shape[-1])
        return (keys / weight).to(lvlm.device, lvlm.dtype).expand(shape), (values / weight).to(
            lvlm.device, lvlm.dtype
        ).expand(shape)

    def save(self, folder: str | Path) -> Path:
        """Write the sums (safetensors) and what they are (JSON)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        kept = {
            f"{i}.{what}": t.cpu().contiguous()
            for i, pair in enumerate(self.sums.values())
            for what, t in zip(("k", "v"), pair, strict=True)
        }
        (folder / FILE).write_bytes(save(kept))
        shapes = [
            {"parts": [vars(part) for part in layout.parts], "weight": self.weights[layout]}
            for layout in self.sums
        ]
        card = {
            "mode": self.mode,
            "model": self.model,
            "size": self.size,
            "digests": self.digests,
            "shapes": shapes,
        }
        (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> MeanBank:
        """Read what `save` wrote. Without the pictures, only the shapes it has can be served."""
        folder = Path(folder)
        if not (folder / CARD).is_file() or not (folder / FILE).is_file():
            raise DataMissing(
                str(folder), f"no {FILE} and {CARD} there", "give a folder that MeanBank.save wrote"
            )
        try:
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
            tensors = load_file(folder / FILE)
            bank = cls(
                card["mode"],
                card["model"],
                tuple(card["size"]) if card["size"] else None,
                tuple(card["digests"]),
            )
            for index, shape in enumerate(card["shapes"]):
                layout = ImageTokens(
                    tuple(
                        Grid(**{**part, "box": part["box"] and tuple(part["box"])})
                        for part in shape["parts"]
                    )
                )
                bank.sums[layout], bank.weights[layout] = (
                    (
                        tensors[f"{index}.k"],
                        tensors[f"{index}.v"],
                    ),
                    shape["weight"],
                )
        except (ValueError, KeyError, TypeError, SafetensorError) as damage:
            raise DataMissing(
                str(folder),
                f"{FILE} or {CARD} is damaged",
                "make the bank again with `seecause lvlm bank`",
            ) from damage
        return bank

    def _layout(self, lvlm: LVLM, prompt: Prompt) -> ImageTokens:
        """Which of the sums to use, made now if the pictures are at hand."""
        if self.model != lvlm.fingerprint():
            raise BankMismatch(
                f"a bank of model {self.model}",
                "it was made with another model or other weights",
                "make one with this model",
            )
        if self.mode in ("mean", "grid"):
            return next(iter(self.sums))
        if prompt.tokens not in self.sums:
            if not self.pictures:
                known = "; ".join(map(str, self.sums)) or "none"
                raise BankMismatch(
                    f"a bank for image tokens {known}",
                    f"this picture has {prompt.tokens}",
                    "resize the picture, make the bank with pictures at hand, or use mode='fixed',"
                    " 'mean' or 'grid'",
                )
            self.sums[prompt.tokens], self.weights[prompt.tokens] = self._collect(
                lvlm, self.pictures, prompt
            )
        return prompt.tokens

    def _collect(
        self, lvlm: LVLM, pictures: Iterable[Image.Image], prompt: Prompt | None = None
    ) -> tuple[Sums, int]:
        """Sums over pictures seen the way this bank sees them: as they are, in the bank's size, or
        with the tokens of `prompt`."""
        expected = prompt.tokens if prompt is not None and self.mode in ("shape", "fixed") else None
        prompts = (lvlm.prompt(_resize(picture, self.size), QUESTION) for picture in pictures)
        if self.mode == "shape" and prompt is not None:
            prompts = (_like(lvlm, prompt, picture) for picture in pictures)
        return add_up(lvlm, prompts, pooled=self.mode == "mean", expected=expected)


def make_bank(
    lvlm: LVLM,
    pictures: Sequence[Image.Image],
    *,
    mode: Mode = "shape",
    size: Size | None = None,
    sizes: Sequence[Size] = (),
) -> MeanBank:
    """A bank from calibration pictures (about a hundred). `size` is for modes `fixed` and `grid`;
    `sizes` of pictures to prepare for now, in mode `shape`."""
    if mode not in get_args(Mode):
        raise BadOption("mode", mode, f"one of {', '.join(get_args(Mode))}")
    if (size is None) == (mode in ("fixed", "grid")):
        raise BadOption(
            "size", size, f"{'a height and width' if size is None else 'None'} with mode={mode!r}"
        )
    pictures = tuple(pictures)
    if not pictures:
        raise BadOption("pictures", [], "at least one calibration picture")
    bank = MeanBank(mode, lvlm.fingerprint(), size, tuple(map(digest, pictures)), pictures=pictures)
    if mode == "shape":
        for height, width in sizes:
            prompt = lvlm.prompt(_resize(pictures[0], (height, width)), QUESTION)
            bank._layout(lvlm, prompt)
        return bank
    sums, weight = bank._collect(lvlm, pictures)
    layout = lvlm.prompt(_resize(pictures[0], size), QUESTION).tokens
    bank.sums[layout], bank.weights[layout] = sums, weight
    return bank


def bank_of_prompts(lvlm: LVLM, prompts: Iterable[Prompt]) -> MeanBank:
    """A bank from prompts of one shape, for models without a processor. It cannot tell whether the
    explained picture is among them."""
    prompts = list(prompts)
    sums, weight = add_up(lvlm, prompts)
    unknown = tuple("" for _ in prompts)
    return MeanBank(
        "shape",
        lvlm.fingerprint(),
        None,
        unknown,
        {prompts[0].tokens: sums},
        {prompts[0].tokens: weight},
    )


@torch.no_grad()
def add_up(
    lvlm: LVLM,
    prompts: Iterable[Prompt],
    *,
    pooled: bool = False,
    expected: ImageTokens | None = None,
) -> tuple[Sums, int]:
    """Keys and values of image tokens added up over prompts, [L, Hkv, N, dh], and how many there
    were; pooled: over tokens, too, N = 1."""
    kind = wide_dtype(lvlm.dtype)
    keys: Tensor | None = None
    values: Tensor | None = None
    weight, waiting = 0, []  # type: int, list[Prompt]

    def flush() -> None:
        nonlocal keys, values, weight
        image = waiting[0].image
        found = run_prefix(lvlm.decoder, waiting)
        k, v = (
            torch.stack([pair[i][:, :, image].sum(dim=0, dtype=kind) for pair in found])
            for i in (0, 1)
        )  # [L, Hkv, N, dh]
        if pooled:
            k, v = k.sum(dim=2, keepdim=True), v.sum(dim=2, keepdim=True)
        keys, values = (k, v) if keys is None or values is None else (keys + k, values + v)
        weight += len(waiting) * (image.stop - image.start if pooled else 1)
        waiting.clear()

    for prompt in prompts:
        expected = expected or (None if pooled else prompt.tokens)
        if expected is not None and prompt.tokens != expected:
            raise BankMismatch(
                f"a calibration picture with image tokens {prompt.tokens}",
                f"expected {expected}",
                "give pictures of one shape, or a size",
            )
        if waiting and (
            waiting[0].tokens != prompt.tokens or len(waiting) >= _together(lvlm, prompt)
        ):
            flush()
        waiting.append(prompt)
    if waiting:
        flush()
    if keys is None or values is None:
        raise BadOption("pictures", [], "at least one calibration picture")
    return (keys, values), weight


def digest(picture: Image.Image) -> str:
    """Tells pictures apart by their pixels."""
    return hashlib.sha256(
        repr(picture.size).encode() + picture.convert("RGB").tobytes()
    ).hexdigest()[:16]


def _like(lvlm: LVLM, prompt: Prompt, picture: Image.Image) -> Prompt:
    """A picture with the same image tokens as `prompt`: as it is if it has them, else resized."""
    found = lvlm.prompt(picture, QUESTION)
    if found.tokens == prompt.tokens:
        return found
    if prompt.size is None:
        raise BankMismatch(
            "a bank that resizes its pictures",
            "the prompt does not tell its picture's size",
            "make the prompt from a picture",
        )
    return lvlm.prompt(_resize(picture, prompt.size), QUESTION)


def _resize(picture: Image.Image, size: Size | None) -> Image.Image:
    return (
        picture
        if size is None or (picture.height, picture.width) == size
        else picture.convert("RGB").resize((size[1], size[0]), Image.Resampling.BICUBIC)
    )


def _together(lvlm: LVLM, prompt: Prompt) -> int:
    """How many prefixes run at once: they keep keys and values of every block."""
    block = lvlm.blocks[0]
    each = prompt.image.stop * (
        lvlm.n_layers * 2 * block.kv_heads * block.head_dim + 20 * block.heads * block.head_dim
    )
    return fit(16, each * (torch.finfo(lvlm.dtype).bits // 8), lvlm.device)
