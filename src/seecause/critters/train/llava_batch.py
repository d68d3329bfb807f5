"""Lessons: a batch of pictures with every question about each, and the packed run that answers
them.

All questions about a picture share one run of the image tokens. They stand one after the other,
each starts at the position right after the picture, and none sees another:

    prefix  | question 1 | question 2 | ...        question rows see the prefix and, causally, their
    own question
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from seecause import _random, critters
from seecause.critters import STYLES, SUBJECTS, Latents, Style, answer_codes, choices, wordings
from seecause.critters.train.llava_words import Words
from seecause.models.preprocess import Preprocess


@dataclass(frozen=True)
class Lesson:
    """B pictures, Q questions about each; a question's slot of L tokens ends with its answer, then
    padding."""

    image: Tensor  # [B, 3, H, W] normalised
    tokens: Tensor  # [B, Q, L] int64
    last: (
        Tensor  # [B, Q] the slot place of the prompt's last token; the answer stands right after it
    )
    answer: Tensor  # [B, Q] token id
    fair: Tensor  # [B, Q] bool; a creature of mixed parts has no name

    def take(self, rows: Tensor) -> Lesson:
        return Lesson(
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
        asked = [[self.words.prompt(text)[1] for text in wordings(subject)] for subject in SUBJECTS]
        longest = max(len(ids) for each in asked for ids in each) + 1
        rows = [[ids + [self.words.pad] * (longest - len(ids)) for ids in each] for each in asked]
        return torch.tensor(rows, device=self.device), torch.tensor(
            [[len(ids) for ids in each] for each in asked], device=self.device
        )

    @cached_property
    def answers(self) -> Tensor:
        """[Q, A] the id of every answer; short lists are padded."""
        known = [[self.words.id(answer) for answer in choices(subject)] for subject in SUBJECTS]
        longest = max(map(len, known))
        return torch.tensor(
            [ids + [self.words.pad] * (longest - len(ids)) for ids in known], device=self.device
        )

    def lesson(self, latents: Latents, preprocess: Preprocess) -> Lesson:
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
        return Lesson(draw_pictures(latents, preprocess), tokens, last, answer, codes >= 0)


def draw_pictures(latents: Latents, preprocess: Preprocess) -> Tensor:
    """Normalised pictures [B, 3, H, W]; the first share in the first style, and so on."""
    share = -(-len(latents) // len(STYLES))
    styled: list[tuple[Style, Latents]] = list(zip(STYLES, latents.split(share), strict=False))
    return preprocess.normalise(
        torch.cat(
            [
                critters.render(rows, size=preprocess.size[0], style=style).image
                for style, rows in styled
            ]
        )
    )


def see(model: LlavaForConditionalGeneration, image: Tensor, kept: Tensor | None = None) -> Tensor:
    """The tower's states [B, 1 + K, D] where LLaVA reads them: before its last block, class token
    first.

    `kept` [B, K] are the patches that enter the tower at all; None keeps all.
    """
    tower = model.model.vision_tower
    h = tower.embeddings(image)  # [B, 1 + N, D]
    if kept is not None:
        h = torch.cat(
            [h[:, :1], h[:, 1:].gather(1, kept[..., None].expand(-1, -1, h.shape[-1]))], dim=1
        )
    h = tower.pre_layrnorm(h)
    for layer in tower.encoder.layers[:-1]:
        h = layer(h, None)
    return h


def answer_logits(
    model: LlavaForConditionalGeneration,
    teacher: Teacher,
    lesson: Lesson,
    kept: Tensor | None = None,
) -> Tensor:
    """[B, Q, 2, V]: what the model says after each prompt, and after the right answer."""
    features = model.model.multi_modal_projector(see(model, lesson.image, kept)[:, 1:])
    batch, questions, length = lesson.tokens.shape
    before, images = len(teacher.prefix), model.config.image_seq_length
    embed = model.get_input_embeddings()
    prefix = embed(teacher.prefix).expand(batch, -1, -1)
    states = torch.cat([prefix, features, embed(lesson.tokens.flatten(1))], dim=1)

    place = torch.arange(before + images + length, device=states.device)
    patches = place[before : before + images].expand(batch, -1) if kept is None else before + kept
    asked = place[before + images :].repeat(questions).expand(batch, -1)
    positions = torch.cat([place[:before].expand(batch, -1), patches, asked], dim=1)
    head = before + patches.shape[1]
    out = model.model.language_model(
        inputs_embeds=states,
        position_ids=positions,
        attention_mask=packed_mask(head, questions, length, states.device),
        use_cache=False,
        image_span=(before, head),
    ).last_hidden_state
    out = out[:, head:].unflatten(1, (questions, length))
    read = lesson.last[..., None] + torch.arange(2, device=out.device)  # [B, Q, 2]
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
