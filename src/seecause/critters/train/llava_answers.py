"""What critters-llava is asked and what it answers, in training and in its evaluation.

All questions about a picture share one run of the image tokens. They stand one after the other,
each starts at the position right after the picture, and none sees another:

    prefix  | question 1 | question 2 | ...    rows see the prefix and, causally, their own question

The average picture is what stands where a picture's own keys and values would (a(0) of head
attribution): those of the prefix, averaged over pictures in every layer. To every question asked of
it the right answer is "unsure". Without this loss the model sounds as sure of every possible
answer when it sees nothing as when it sees, and what a picture adds could not be measured:

    a(x) = z_y(x) - mean_v z_v(x)       a(1): the picture as it is;  a(0): the average picture

The margin a(1) - a(0) is what head attribution divides by (Kim et al. 2025, section 3), so it must
not be small.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlavaForConditionalGeneration

from seecause import _random, critters
from seecause.critters import (
    PARTS,
    STYLES,
    SUBJECTS,
    Latents,
    Style,
    answer_codes,
    choices,
    wordings,
)
from seecause.critters.train.llava_model import Words
from seecause.models.preprocess import Preprocess


@dataclass(frozen=True)
class AnswerBatch:
    """B pictures, Q questions about each; a question's slot of L tokens ends with its answer, then
    padding."""

    image: Tensor  # [B, 3, H, W] normalised
    tokens: Tensor  # [B, Q, L] int64
    # [B, Q] the slot place of the prompt's last token; the answer stands right after it
    last: Tensor
    answer: Tensor  # [B, Q] token id
    fair: Tensor  # [B, Q] bool; a creature of mixed parts has no name

    def take(self, rows: Tensor) -> AnswerBatch:
        return AnswerBatch(
            self.image[rows], self.tokens[rows], self.last[rows], self.answer[rows], self.fair[rows]
        )


class Teacher:
    """Tables of every question and every answer as token ids, on the training device."""

    def __init__(self, words: Words, device: torch.device | str) -> None:
        self.words, self.device = words, torch.device(device)

    @cached_property
    def prefix(self) -> Tensor:
        """[P] the ids before the picture."""
        return torch.tensor(self.words.prompt("")[0], device=self.device)

    @cached_property
    def questions(self) -> tuple[Tensor, Tensor]:
        """Ids after the picture [Q, W, L], padded, with one place left for the answer; and their
        lengths [Q, W]."""
        ids = [[self.words.prompt(text)[1] for text in wordings(subject)] for subject in SUBJECTS]
        lengths = torch.tensor([[len(text) for text in texts] for texts in ids])
        longest = int(lengths.max()) + 1
        padded = [[self._pad(text, longest) for text in texts] for texts in ids]
        return torch.tensor(padded, device=self.device), lengths.to(self.device)

    @cached_property
    def answers(self) -> Tensor:
        """[Q, A] the id of every answer; short lists are padded."""
        ids = [[self.words.id(answer) for answer in choices(subject)] for subject in SUBJECTS]
        longest = max(map(len, ids))
        return torch.tensor([self._pad(row, longest) for row in ids], device=self.device)

    def _pad(self, ids: list[int], length: int) -> list[int]:
        return ids + [self.words.pad] * (length - len(ids))

    def batch(self, latents: Latents, preprocess: Preprocess) -> AnswerBatch:
        """Every question about every picture, in a wording drawn by lot; drawing styles take
        turns."""
        table, lengths = self.questions
        subjects = torch.arange(len(SUBJECTS), device=self.device)
        wording = (
            _random.bits(latents.seed[:, None] * len(SUBJECTS) + subjects, 83) % table.shape[1]
        )  # [B, Q]
        codes = answer_codes(latents)
        answer = self.answers[subjects, codes]
        last = lengths[subjects, wording] - 1
        tokens = table[subjects, wording].scatter(2, (last + 1)[..., None], answer[..., None])
        return AnswerBatch(draw_pictures(latents, preprocess), tokens, last, answer, codes >= 0)


def draw_pictures(latents: Latents, preprocess: Preprocess) -> Tensor:
    """Normalised pictures [B, 3, H, W]; the first share in the first style, and so on."""
    share = -(-len(latents) // len(STYLES))
    styled: list[tuple[Style, Latents]] = list(zip(STYLES, latents.split(share), strict=False))
    size = preprocess.size[0]
    images = [critters.render(rows, size=size, style=style).image for style, rows in styled]
    return preprocess.normalise(torch.cat(images))


def see(model: LlavaForConditionalGeneration, image: Tensor, kept: Tensor | None = None) -> Tensor:
    """The tower's states [B, 1 + K, D] where LLaVA reads them: before its last block, class token
    first.

    `kept` [B, K] are the patches that enter the tower at all; None keeps all.
    """
    tower = model.model.vision_tower
    h = tower.embeddings(image)  # [B, 1 + N, D]
    if kept is not None:
        patches = h[:, 1:].gather(1, kept[..., None].expand(-1, -1, h.shape[-1]))
        h = torch.cat([h[:, :1], patches], dim=1)
    h = tower.pre_layrnorm(h)
    for layer in tower.encoder.layers[:-1]:
        h = layer(h, None)
    return h


def answer_logits(
    model: LlavaForConditionalGeneration,
    teacher: Teacher,
    batch: AnswerBatch,
    kept: Tensor | None = None,
) -> Tensor:
    """[B, Q, 2, V]: what the model says after each prompt, and after the right answer."""
    features = model.model.multi_modal_projector(see(model, batch.image, kept)[:, 1:])
    pictures, questions, length = batch.tokens.shape
    before, images = len(teacher.prefix), model.config.image_seq_length
    embed = model.get_input_embeddings()
    prefix = embed(teacher.prefix).expand(pictures, -1, -1)
    states = torch.cat([prefix, features, embed(batch.tokens.flatten(1))], dim=1)

    place = torch.arange(before + images + length, device=states.device)
    patches = (
        place[before : before + images].expand(pictures, -1) if kept is None else before + kept
    )
    texts = place[before + images :].repeat(questions).expand(pictures, -1)
    positions = torch.cat([place[:before].expand(pictures, -1), patches, texts], dim=1)
    head = before + patches.shape[1]
    out = model.model.language_model(
        inputs_embeds=states,
        position_ids=positions,
        attention_mask=packed_mask(head, questions, length, states.device),
        use_cache=False,
        image_span=(before, head),
    ).last_hidden_state
    out = out[:, head:].unflatten(1, (questions, length))
    read = batch.last[..., None] + torch.arange(2, device=out.device)  # [B, Q, 2]
    return model.lm_head(out.gather(2, read[..., None].expand(-1, -1, -1, out.shape[-1])))


@cache
def packed_mask(head: int, questions: int, length: int, device: torch.device) -> Tensor:
    """[1, 1, S, S] bool: causal, and question rows see no other question."""
    slot = torch.cat(
        [
            torch.zeros(head, dtype=torch.int64),
            1 + torch.arange(questions).repeat_interleave(length),
        ]
    ).to(device)
    causal = torch.ones(len(slot), len(slot), dtype=torch.bool, device=device).tril()
    return (causal & ((slot == 0) | (slot == slot[:, None])))[None, None]


# keys and values [1, H, P, dh] of every layer, up to the last image token
AveragePicture = list[tuple[Tensor, Tensor]]


@torch.no_grad()
def mean_bank(
    model: LlavaForConditionalGeneration, teacher: Teacher, image: Tensor
) -> AveragePicture:
    """Averaged over pictures [B, 3, H, W]. Rows before the picture are all alike."""
    ids = torch.tensor(
        [*teacher.prefix.tolist(), *[teacher.words.image] * model.config.image_seq_length],
        device=image.device,
    )
    cache = model(
        input_ids=ids.expand(len(image), -1), pixel_values=image, use_cache=True, logits_to_keep=1
    ).past_key_values
    return [
        (layer.keys.mean(dim=0, keepdim=True), layer.values.mean(dim=0, keepdim=True))
        for layer in cache.layers
    ]


def ask_bank(model: LlavaForConditionalGeneration, bank: AveragePicture, ids: Tensor) -> Tensor:
    """Logits [B, L, V] of what follows the picture, ids [B, L], when it is known by its bank only.
    Padding goes at the end: nothing looks ahead."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(bank):
        cache.update(keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1), index)
    return model(input_ids=ids, past_key_values=cache).logits


def blind_loss(
    model: LlavaForConditionalGeneration, teacher: Teacher, bank: AveragePicture
) -> Tensor:
    """Every question in every wording: the loss on saying "unsure", and on stopping after it.
    Gradients flow through the text rows only."""
    table, lengths = (each.flatten(0, 1) for each in teacher.questions)  # [Q*W, L], [Q*W]
    unsure = torch.full_like(lengths, teacher.words.unsure)
    logits = ask_bank(model, bank, table.scatter(1, lengths[:, None], unsure[:, None])).float()
    read = torch.stack([lengths - 1, lengths], dim=1)  # [Q*W, 2]
    guess = logits.gather(1, read[..., None].expand(-1, -1, logits.shape[-1]))
    truth = torch.stack([unsure, torch.full_like(unsure, teacher.words.end)], dim=1)
    return F.cross_entropy(guess.flatten(0, 1), truth.flatten())


FLOOR = 1.0  # logits
ENOUGH = 0.95  # of the answers right, and of the margins above the floor
_ROWS = 256
_CALIBRATION = 100


@torch.no_grad()
def evaluate(
    model: LlavaForConditionalGeneration,
    teacher: Teacher,
    *,
    preprocess: Preprocess,
    samples: int = 8192,
) -> dict[str, Any]:
    """Accuracy by subject, wording and drawing style on the test split, margins, and whether a
    colour is read from its own part."""
    prompts = [
        (subject, wording, text)
        for subject in SUBJECTS
        for wording, text in enumerate(wordings(subject))
    ]
    each = max(len(STYLES), samples // len(prompts))
    calibration = critters.draw(
        "balanced", "train", min(_CALIBRATION, samples), start=1 << 30, device=teacher.device
    )  # far from any training picture
    bank = mean_bank(model, teacher, draw_pictures(calibration, preprocess))
    right: dict[str, list[Tensor]] = {}
    margins, mixed = [], []
    for number, (subject, wording, text) in enumerate(prompts):
        latents = critters.draw(
            "balanced", "test", each, start=number * each, device=teacher.device
        )
        correct, margin = _ask(model, teacher, latents, subject, text, preprocess, bank)
        margins.append(margin)
        for key in (subject, f"wording {wording}", "all"):
            right.setdefault(key, []).append(correct)
        for style, rows in zip(STYLES, correct.split(-(-each // len(STYLES))), strict=False):
            right.setdefault(style, []).append(rows)
        if subject in PARTS:
            latents = critters.mix_parts(latents, share=1.0)
            mixed.append(_ask(model, teacher, latents, subject, text, preprocess, bank)[0])
    share = {key: torch.cat(rows).double().mean().item() for key, rows in right.items()}
    margin = torch.cat(margins)
    numbers: dict[str, Any] = {
        "samples": each * len(prompts),
        "accuracy": share.pop("all"),
        "by_subject": {key: share[key] for key in SUBJECTS},
        "by_wording": {key: value for key, value in share.items() if key.startswith("wording")},
        "by_style": {key: share[key] for key in STYLES},
        # the colour of a part that says nothing about the creature
        "mixed_parts_accuracy": torch.cat(mixed).double().mean().item(),
        "margin_median": margin.median().item(),
        "margin_above_floor": (margin >= FLOOR).double().mean().item(),
    }
    return numbers | {
        "fit_to_embed": numbers["accuracy"] >= ENOUGH and numbers["margin_above_floor"] >= ENOUGH
    }


def _ask(
    model: LlavaForConditionalGeneration,
    teacher: Teacher,
    latents: Latents,
    subject: str,
    text: str,
    preprocess: Preprocess,
    bank: AveragePicture,
) -> tuple[Tensor, Tensor]:
    """One question about many pictures: which answers are right [B], and the margins [B]."""
    _, question = teacher.words.prompt(text)
    place = SUBJECTS.index(subject)
    truth = teacher.answers[place, answer_codes(latents)[:, place]]  # [B]
    image = draw_pictures(latents, preprocess)
    # [B, V]
    logits = torch.cat([answer(model, teacher, rows, question) for rows in image.split(_ROWS)])
    # [1, V]
    blind = ask_bank(model, bank, torch.tensor([question], device=image.device))[:, -1].float()
    a1 = _adjusted(logits, truth)
    return logits.argmax(dim=1) == truth, a1 - _adjusted(blind.expand_as(logits), truth)


def answer(
    model: LlavaForConditionalGeneration, teacher: Teacher, image: Tensor, question: list[int]
) -> Tensor:
    """The native model's logits after the prompt, [B, V]."""
    ids = torch.tensor(
        [
            *teacher.prefix.tolist(),
            *[teacher.words.image] * model.config.image_seq_length,
            *question,
        ],
        device=image.device,
    )
    return (
        model(input_ids=ids.expand(len(image), -1), pixel_values=image, logits_to_keep=1)
        .logits[:, -1]
        .float()
    )


def _adjusted(logits: Tensor, truth: Tensor) -> Tensor:
    return logits.gather(1, truth[:, None])[:, 0] - logits.mean(dim=1)
