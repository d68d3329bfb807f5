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

In a prefix language model (PaliGemma) image tokens read the question: calibration pictures are run
with it, so there is an average for each question.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.engine.chunks import fit
from seecause.errors import BadInput, BadOption
from seecause.files import digest, write_atomic, write_json
from seecause.lvlm._cache import run_prefix
from seecause.lvlm.model import LVLM
from seecause.lvlm.prompt import Prompt, checked_picture
from seecause.models.decoder import Grid, ImageTokens
from seecause.models.load import reading
from seecause.types import wide_dtype

Mode = Literal["shape", "fixed", "mean", "grid"]
Size = tuple[int, int]  # height, width
KeyValueSums = tuple[Tensor, Tensor]  # [L, Hkv, N, dh], added up over pictures
QUESTION = "What is this?"  # any will do, but where image tokens read it (`asked_alike`)
FILE, CARD = "bank.safetensors", "bank.json"


class Averaged(NamedTuple):
    """What an average is of: image tokens, and the words that they read, if any."""

    tokens: ImageTokens
    words: tuple[int, ...] = ()


@dataclass(eq=False, repr=False)
class MeanBank:
    """Sums over calibration pictures for each layout of image tokens (and, in a prefix language
    model, question) met so far."""

    mode: Mode
    model: str  # its fingerprint
    size: Size | None
    digests: tuple[str, ...]  # of the calibration pictures
    sums: dict[Averaged, KeyValueSums] = field(default_factory=dict)
    weights: dict[Averaged, int] = field(default_factory=dict)  # how many were added
    pictures: tuple[Image.Image, ...] = ()  # to make averages of new shapes; not saved

    def __repr__(self) -> str:
        return f"MeanBank({self.mode}, {len(self.digests)} pictures, image tokens {self._shapes()})"

    def __len__(self) -> int:
        return len(self.digests)

    def resized(self, picture: Image.Image) -> Image.Image:
        """The picture as this bank wants to see it."""
        return _resize(picture, self.size) if self.mode == "fixed" else picture

    @torch.no_grad()
    def means(self, lvlm: LVLM, prompt: Prompt, picture: Image.Image | None = None) -> KeyValueSums:
        """Unrotated average keys and values [L, Hkv, N, dh] for a prompt; `picture` is left out of
        them if it is in them."""
        averaged = self._averaged(lvlm, prompt)
        keys, values = (sums.to(lvlm.device) for sums in self.sums[averaged])
        weight = self.weights[averaged]
        times = 0 if picture is None else self.digests.count(picture_digest(picture))
        if picture is not None and times:
            (own_keys, own_values), own = self._collect(lvlm, [picture], prompt)
            if weight == times * own:
                raise BadInput(
                    "a bank of this picture alone",
                    "leaving it out leaves nothing",
                    "calibrate with more pictures",
                )
            keys, values = keys - times * own_keys, values - times * own_values
            weight -= times * own
        if self.mode == "grid":
            have, want = averaged.tokens, prompt.tokens
            keys, values = (stretch(sums, have, want) for sums in (keys, values))
        shape = (*keys.shape[:2], prompt.n_image, keys.shape[-1])
        keys, values = ((x / weight).to(lvlm.dtype).expand(shape) for x in (keys, values))
        return keys, values

    def save(self, folder: str | Path) -> Path:
        """Write the sums (safetensors) and what they are (JSON)."""
        if not self.sums:
            remedy = "ask about a picture with it first, or `prepare` it for one"
            raise BadInput("a bank to save", "it has no average yet", remedy)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors, shapes = {}, []
        for index, (averaged, (keys, values)) in enumerate(self.sums.items()):
            tensors[f"{index}.k"] = keys.cpu().contiguous()
            tensors[f"{index}.v"] = values.cpu().contiguous()
            parts, weight = [vars(part) for part in averaged.tokens.parts], self.weights[averaged]
            shapes.append({"parts": parts, "words": averaged.words, "weight": weight})
        card = {name: getattr(self, name) for name in ("mode", "model", "size", "digests")}
        write_atomic(folder / FILE, save(tensors))
        write_json(folder / CARD, {**card, "shapes": shapes})
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> MeanBank:
        """Read what `save` wrote. Without the pictures, only the shapes (and, in a prefix language
        model, questions) it has can be served."""
        folder = Path(folder)
        with reading(folder, FILE, CARD, writer="`seecause lvlm bank` or MeanBank.save"):
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
            tensors = load_file(folder / FILE)
            size = tuple(card["size"]) if card["size"] else None
            bank = cls(card["mode"], card["model"], size, tuple(card["digests"]))
            for index, shape in enumerate(card["shapes"]):
                tokens = ImageTokens(tuple(_grid_of(part) for part in shape["parts"]))
                averaged = Averaged(tokens, tuple(shape.get("words", ())))
                bank.sums[averaged] = tensors[f"{index}.k"], tensors[f"{index}.v"]
                bank.weights[averaged] = shape["weight"]
            return bank

    def prepare(self, lvlm: LVLM, prompt: Prompt) -> None:
        """Make the sums for the image tokens of a prompt now, not when it is asked about."""
        self._averaged(lvlm, prompt)

    def _shapes(self) -> str:
        tokens = dict.fromkeys(str(averaged.tokens) for averaged in self.sums)
        return ", ".join(tokens) or "none yet"

    def _averaged(self, lvlm: LVLM, prompt: Prompt) -> Averaged:
        """Which of the sums to use, made now if the pictures are at hand."""
        if self.model != lvlm.fingerprint():
            raise BadInput(
                f"a bank of model {self.model}",
                "it was made with another model or other weights",
                "make one with this model",
            )
        wanted = Averaged(prompt.tokens, prompt.read_words)
        if self.mode in ("mean", "grid"):  # one for all shapes
            same_words = (each for each in self.sums if each.words == wanted.words)
            wanted = next(same_words, wanted)
        if wanted not in self.sums:
            self._need_pictures(wanted)
            sums, weight = self._collect(lvlm, self.pictures, prompt)
            if self.mode == "grid":
                wanted = wanted._replace(tokens=self._seen(lvlm, self.pictures[0], prompt).tokens)
            self.sums[wanted], self.weights[wanted] = sums, weight
        return wanted

    def _need_pictures(self, wanted: Averaged) -> None:
        if self.pictures:
            return
        remedy = "make the bank with pictures at hand"
        if wanted.tokens in (averaged.tokens for averaged in self.sums):
            reason = "image tokens of this model read the question, so each has its own average"
            raise BadInput("a bank for other questions", reason, remedy)
        raise BadInput(
            f"a bank for image tokens {self._shapes()}",
            f"this picture has {wanted.tokens}",
            f"resize the picture, {remedy}, or use mode='fixed', 'mean' or 'grid'",
        )

    def _collect(
        self, lvlm: LVLM, pictures: Iterable[Image.Image], prompt: Prompt
    ) -> tuple[KeyValueSums, int]:
        """Sums over pictures for a prompt."""
        expected = prompt.tokens if self.mode in ("shape", "fixed") else None
        prompts = (self._seen(lvlm, picture, prompt) for picture in pictures)
        return add_up(lvlm, prompts, pooled=self.mode == "mean", expected=expected)

    def _seen(self, lvlm: LVLM, picture: Image.Image, prompt: Prompt) -> Prompt:
        """A picture the way this bank sees it: as it is, in the bank's size, or with the tokens of
        `prompt`; behind it the words of `prompt`, where its tokens read them."""
        if self.mode == "shape":
            own = _like(lvlm, prompt, picture)
        else:
            own = lvlm.prompt(_resize(picture, self.size), QUESTION)
        return asked_alike(own, prompt)


def checked_bank(bank: object) -> MeanBank:
    """A bank, or what to give as one."""
    if isinstance(bank, MeanBank):
        return bank
    raise BadOption("bank", bank, "an average picture: sc.lvlm.make_bank(lvlm, pictures)")


def make_bank(
    lvlm: LVLM,
    pictures: Sequence[Image.Image],
    *,
    mode: Mode = "shape",
    size: Size | None = None,
    sizes: Sequence[Size] = (),
) -> MeanBank:
    """The average picture, which ablated heads see in place of the explained one.

    pictures    PIL images like those the model is asked about, about a hundred of them
    mode        how pictures of other shapes are averaged: "shape" (token by token, resized to the
                explained picture's), "fixed" (all in one size), "mean" (over all tokens) or "grid"
    size        height and width, for modes "fixed" and "grid"
    sizes       of pictures to prepare for now, in mode "shape"; others are when they are asked for
    """
    if mode not in get_args(Mode):
        raise BadOption("mode", mode, f"one of {', '.join(get_args(Mode))}")
    if (size is None) == (mode in ("fixed", "grid")):
        expected = "a height and width" if size is None else "None"
        raise BadOption("size", size, f"{expected} with mode={mode!r}")
    if sizes and (mode != "shape" or lvlm.decoder.reads_prefix):
        expected = f"none with mode={mode!r}"
        if lvlm.decoder.reads_prefix:
            expected = "none: image tokens of this model read the question, so each question has"
            expected += " an average of its own, made of calibration pictures when it is asked"
        raise BadOption("sizes", list(sizes), expected)
    pictures = tuple(map(checked_picture, pictures))
    if not pictures:
        raise BadOption("pictures", [], "at least one calibration picture")
    digests = tuple(map(picture_digest, pictures))
    bank = MeanBank(mode, lvlm.fingerprint(), size, digests, pictures=pictures)
    ready = () if lvlm.decoder.reads_prefix else sizes if mode == "shape" else (size,)
    for shape in ready:
        bank.prepare(lvlm, lvlm.prompt(_resize(pictures[0], shape), QUESTION))
    return bank


def bank_of_prompts(lvlm: LVLM, prompts: Iterable[Prompt]) -> MeanBank:
    """A bank from prompts of one shape (in a prefix language model, of one question too), for
    models without a processor. It cannot tell whether the explained picture is among them."""
    prompts = list(prompts)
    if len({prompt.read_words for prompt in prompts}) > 1:
        reason = "image tokens of this model read the question, so that they cannot be averaged"
        remedy = "give prompts with one question"
        raise BadInput("calibration prompts with several questions", reason, remedy)
    sums, weight = add_up(lvlm, prompts)
    bank = MeanBank("shape", lvlm.fingerprint(), None, ("",) * len(prompts))
    averaged = Averaged(prompts[0].tokens, prompts[0].read_words)
    bank.sums[averaged], bank.weights[averaged] = sums, weight
    return bank


@torch.no_grad()
def add_up(
    lvlm: LVLM,
    prompts: Iterable[Prompt],
    *,
    pooled: bool = False,
    expected: ImageTokens | None = None,
) -> tuple[KeyValueSums, int]:
    """Keys and values of image tokens added up over prompts, [L, Hkv, N, dh], and how many there
    were; pooled: over tokens, too, N = 1."""
    total: Tensor | None = None  # [2, L, Hkv, N, dh]
    weight = 0
    for batch in _batches(lvlm, prompts, pooled=pooled, expected=expected):
        sums = _batch_sums(lvlm, batch)
        tokens = sums.shape[3]
        if pooled:
            sums = sums.sum(dim=3, keepdim=True)
        total = sums if total is None else total + sums
        weight += len(batch) * (tokens if pooled else 1)
    if total is None:
        raise BadOption("pictures", [], "at least one calibration picture")
    return (total[0], total[1]), weight


def _batches(
    lvlm: LVLM, prompts: Iterable[Prompt], *, pooled: bool, expected: ImageTokens | None
) -> Iterable[list[Prompt]]:
    """Prompts of one shape that fit in memory together; another shape than `expected` (or, unless
    pooled, than the first) is refused."""
    batch: list[Prompt] = []
    for prompt in prompts:
        expected = expected or (None if pooled else prompt.tokens)
        if expected is not None and prompt.tokens != expected:
            raise BadInput(
                f"a calibration picture with image tokens {prompt.tokens}",
                f"expected {expected}",
                "give pictures of one shape, or a size",
            )
        full = len(batch) >= _together(lvlm, prompt)
        if batch and (full or batch[0].tokens != prompt.tokens or batch[0].image != prompt.image):
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


def _batch_sums(lvlm: LVLM, batch: list[Prompt]) -> Tensor:
    """Keys and values of image tokens, added up over prompts of one shape: [2, L, Hkv, N, dh]."""
    image, kind = batch[0].image, wide_dtype(lvlm.dtype)
    sums = [
        torch.stack([tensor[:, :, image].sum(dim=0, dtype=kind) for tensor in keys_values])
        for keys_values in run_prefix(lvlm.decoder, batch)
    ]
    return torch.stack(sums, dim=1)


def picture_digest(picture: Image.Image) -> str:
    """Tells pictures apart by their pixels."""
    return digest(repr(picture.size), picture.convert("RGB").tobytes())


def stretch(values: Tensor, have: ImageTokens, want: ImageTokens) -> Tensor:
    """Values [L, Hkv, N, dh] of tokens `have` at the places of tokens `want`, bilinearly, grid by
    grid; every newline token gets the newlines' mean."""
    if [replace(p, rows=1, columns=1) for p in have.parts] != [
        replace(p, rows=1, columns=1) for p in want.parts
    ]:
        reason = f"this picture has {want}, other grids or at other places"
        raise BadInput(f"a bank for image tokens {have}", reason, "use mode='shape' or 'mean'")
    pieces = values.split([part.tokens for part in have.parts], dim=2)
    stretched = map(_stretch_grid, pieces, have.parts, want.parts)
    return torch.cat(list(stretched), dim=2)


def _stretch_grid(piece: Tensor, have: Grid, want: Grid) -> Tensor:
    layers, heads, _, width = piece.shape
    rows = piece.unflatten(2, (have.rows, have.columns + have.newline))  # [L, Hkv, rows, +, dh]
    flat = rows[:, :, :, : have.columns].permute(0, 1, 4, 2, 3).flatten(1, 2)
    if (have.rows, have.columns) != (want.rows, want.columns):
        size = (want.rows, want.columns)
        flat = F.interpolate(flat, size=size, mode="bilinear", align_corners=False)
    grid = flat.unflatten(1, (heads, width)).permute(0, 1, 3, 4, 2)
    if have.newline:
        line = rows[:, :, :, have.columns :].mean(dim=2, keepdim=True)
        grid = torch.cat([grid, line.expand(layers, heads, want.rows, 1, width)], dim=3)
    return grid.flatten(2, 3)


def _grid_of(part: dict) -> Grid:
    """A grid as `save` wrote it."""
    return Grid(**{**part, "box": part["box"] and tuple(part["box"])})


def _like(lvlm: LVLM, prompt: Prompt, picture: Image.Image) -> Prompt:
    """A picture with the same image tokens as `prompt`: as it is if it has them, else resized."""
    own = lvlm.prompt(picture, QUESTION)
    if own.tokens == prompt.tokens:
        return own
    if prompt.size is None:
        raise BadInput(
            "a bank that resizes its pictures",
            "the prompt does not tell its picture's size",
            "make the prompt from a picture",
        )
    return lvlm.prompt(_resize(picture, prompt.size), QUESTION)


def asked_alike(own: Prompt, prompt: Prompt) -> Prompt:
    """The picture of `own` with the words of `prompt`, where image tokens read words."""
    if own.read_words == prompt.read_words:
        return own
    if own.tokens != prompt.tokens:
        raise BadInput(
            f"a calibration picture with image tokens {own.tokens}",
            f"expected {prompt.tokens}",
            "give prompts of one picture",
        )
    embeddings = prompt.embeddings.clone()
    embeddings[:, prompt.image] = own.embeddings[:, own.image]
    return replace(prompt, embeddings=embeddings)


def _resize(picture: Image.Image, size: Size | None) -> Image.Image:
    if size is None or (picture.height, picture.width) == size:
        return picture
    return picture.convert("RGB").resize((size[1], size[0]), Image.Resampling.BICUBIC)


def _together(lvlm: LVLM, prompt: Prompt) -> int:
    """How many prefixes run at once: they keep keys and values of every block."""
    block = lvlm.blocks[0]
    held = lvlm.n_layers * 2 * block.kv_heads * block.head_dim + 20 * block.heads * block.head_dim
    rows = max(prompt.image.stop, prompt.prefix)
    return fit(16, rows * held * (torch.finfo(lvlm.dtype).bits // 8), lvlm.device)
