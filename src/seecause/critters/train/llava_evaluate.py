"""What critters-llava answers, and how much of it comes from the picture.

    a(x) = z_y(x) - mean_v z_v(x)        a(1): the picture as it is;  a(0): image keys and values
    are means over other pictures

The margin a(1) - a(0) is what head attribution divides by (Kim et al. 2025, section 3), so it must
not be small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from seecause import critters
from seecause.critters import PARTS, STYLES, SUBJECTS, Latents, answer_codes, wordings
from seecause.critters.train.llava_batch import Teacher, draw_pictures
from seecause.critters.train.llava_blind import AveragePicture, ask_bank, mean_bank
from seecause.models.preprocess import Preprocess

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
            mixed.append(
                _ask(
                    model,
                    teacher,
                    critters.mix_parts(latents, share=1.0),
                    subject,
                    text,
                    preprocess,
                    bank,
                )[0]
            )
    share = {key: torch.cat(rows).double().mean().item() for key, rows in right.items()}
    margin = torch.cat(margins)
    found: dict[str, Any] = {
        "samples": each * len(prompts),
        "accuracy": share.pop("all"),
        "by_subject": {key: share[key] for key in SUBJECTS},
        "by_wording": {key: value for key, value in share.items() if key.startswith("wording")},
        "by_style": {key: share[key] for key in STYLES},
        "mixed_parts_accuracy": (
            torch.cat(mixed).double().mean().item()
        ),  # the colour of a part that says nothing about the creature
        "margin_median": margin.median().item(),
        "margin_above_floor": (margin >= FLOOR).double().mean().item(),
    }
    return found | {
        "fit_to_embed": found["accuracy"] >= ENOUGH and found["margin_above_floor"] >= ENOUGH
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
    logits = torch.cat(
        [answer(model, teacher, rows, question) for rows in image.split(_ROWS)]
    )  # [B, V]
    blind = ask_bank(model, bank, torch.tensor([question], device=image.device))[
        :, -1
    ].float()  # [1, V]
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
