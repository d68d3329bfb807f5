"""Train critters-llava, the real LLaVA classes of transformers at toy size, from its recipe.

Writes a folder NAME that plain `LlavaForConditionalGeneration.from_pretrained` and
`AutoProcessor.from_pretrained` read (float16 weights, tokenizer, processor), with the recipe and
the evaluation in card.json and the log in log.csv. The evaluation measures a margin,

    a(1) - a(0)       of  a(x) = z_y(x) - mean_v z_v(x),  the picture as it is and the average one,

which is what head attribution divides by (Kim et al. 2025, section 3), so it must not be small.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration

from seecause import critters
from seecause.critters.rendering import STYLES
from seecause.critters.world import BACKGROUNDS, PARTS, VARIANTS, Latents
from seecause.engine.chunks import machine
from seecause.files import write_json
from seecause.models.decoder import restrict
from seecause.models.preprocess import Preprocess
from tools.critters import (
    RunningMeans,
    TrainingLog,
    adamw,
    descend,
    half,
    mix_parts,
    move_average,
    pace,
    seeded,
    write_log,
)
from tools.critters.llava_model import (
    RECIPES as RECIPES,
    AnswerBatch,
    AveragePicture,
    LlavaRecipe,
    Teacher,
    answer_logits,
    ask_bank,
    build_llava,
    draw_pictures,
    make_processor,
    make_words,
    mean_bank,
    see,
)
from tools.critters.questions import SUBJECTS, answer_codes, wordings

_CHOICES = len(BACKGROUNDS)  # as many as a part has variants
_AHEAD = 12  # steps
_AVERAGED = 64  # pictures of a batch, for the blind loss


def train(
    recipe: LlavaRecipe,
    *,
    out: Path,
    device: torch.device | str = "cpu",
    test_samples: int = 8192,
    start: Path | None = None,
) -> dict[str, Any]:
    """Run the recipe and write its folder into `out`; returns the evaluation of what was written.

    From `start`, a folder written before, training goes on: it can see already, so it only answers,
    at a tenth of the rate.
    """
    folder = out / recipe.stem
    folder.mkdir(parents=True, exist_ok=True)
    before = None
    if start is not None:
        recipe = dataclasses.replace(
            recipe, seeing=0.0, settling=1.0, learning_rate=recipe.learning_rate / 10
        )
        before = json.loads((start / "card.json").read_text())
    model, log = fit(recipe, device=device, start=start)
    words = make_words()
    make_processor(words, recipe.preprocess, patch=recipe.patch).save_pretrained(folder)
    model.half().save_pretrained(folder)
    write_log(log, folder / "log.csv")

    shipped = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    nn.Module.to(restrict(shipped) if recipe.readers else shipped, device).eval()
    evaluation = evaluate(
        shipped, Teacher(words, device), preprocess=recipe.preprocess, samples=test_samples
    )
    card = {
        "name": recipe.stem,
        "recipe": dataclasses.asdict(recipe),
        **({} if before is None else {"before": before}),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": machine(device),
        "evaluation": evaluation,
    }
    write_json(folder / "card.json", card)
    return evaluation


def fit(
    recipe: LlavaRecipe, *, device: torch.device | str = "cpu", start: Path | None = None
) -> tuple[LlavaForConditionalGeneration, list[dict[str, Any]]]:
    """The averaged model after the last step, and one log row for every hundredth of the run. The
    global random state is left as it was."""
    words, device = make_words(), torch.device(device)
    teacher = Teacher(words, device)
    model = build_llava(recipe, words).train()
    if start is not None:
        model.load_state_dict(
            LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32).state_dict()
        )
    nn.Module.to(model, device)  # transformers' own `to` is not typed
    sights = _sights(recipe.tower_width, seed=recipe.seed).to(device)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = adamw(
        model, sights, learning_rate=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    seeing_steps = int(recipe.seeing * recipe.steps)
    settled = recipe.steps - int(recipe.settling * recipe.steps)
    # the seed decides the order of pictures, and which patches are left out
    with seeded(recipe.seed, device), TrainingLog(recipe.name, recipe.steps) as log:
        means = RunningMeans(log.write_row, max(1, recipe.steps // 100))
        for step, (latents, batch) in enumerate(_batches(recipe, teacher, device)):
            seeing = step < seeing_steps
            rate = recipe.learning_rate * _pace(step, seeing_steps, recipe)
            for group in optimizer.param_groups:  # each phase has its own rise and fall
                group["lr"] = rate
            kept = None if step >= settled else _some_patches(recipe, device)
            bank = _bank(model, teacher, batch) if not seeing and recipe.blind else None
            with half(device):
                if seeing:
                    loss, right = _seeing(model, sights, batch.image, latents, kept)
                else:
                    loss, right = _answering(model, teacher, batch, kept)
                if bank is not None:
                    blind = blind_loss(model, teacher, bank)
                    loss = (1 - recipe.blind) * loss + recipe.blind * blind
            descend(optimizer, loss, model.parameters(), recipe.clip)
            move_average(average, model, step if seeing else step - seeing_steps, recipe.average)
            phase = "seeing" if seeing else "answering"
            means.add(step, {"loss": loss, "accuracy": right}, rate=rate, phase=phase)
    return average, log.rows


def _bank(
    model: LlavaForConditionalGeneration, teacher: Teacher, batch: AnswerBatch
) -> AveragePicture:
    """The average of some of a batch, of every style alike. Autocast is left at once: some versions
    keep weights that were cast without gradients."""
    with half(batch.image.device):
        return mean_bank(model, teacher, batch.image[:: -(-len(batch.image) // _AVERAGED)])


def _pace(step: int, seeing_steps: int, recipe: LlavaRecipe) -> float:
    if step < seeing_steps:
        return pace(step, seeing_steps, recipe.warm_up)
    return pace(step - seeing_steps, recipe.steps - seeing_steps, recipe.warm_up)


def _batches(
    recipe: LlavaRecipe, teacher: Teacher, device: torch.device
) -> Iterator[tuple[Latents, AnswerBatch]]:
    """One batch a step. Pictures are drawn several steps ahead: thousands at once take a GPU hardly
    longer than hundreds."""
    for first in range(0, recipe.steps, _AHEAD):
        steps = min(_AHEAD, recipe.steps - first)
        latents = critters.draw(
            "balanced",
            "train",
            steps * recipe.batch,
            seed=recipe.seed,
            start=first * recipe.batch,
            device=device,
        )
        # balanced rows come in turns; styles take turns too, so rows are shuffled first
        latents = latents[torch.randperm(len(latents), device=device)]
        latents = mix_parts(latents, share=recipe.mixed)
        batch = teacher.batch(latents, recipe.preprocess)
        for turn in range(steps):
            rows = torch.arange(turn, len(latents), steps, device=device)  # of every style alike
            yield latents[rows], batch.take(rows)


def _some_patches(recipe: LlavaRecipe, device: torch.device) -> Tensor:
    """[B, K] in rising order, another choice for each picture."""
    count = recipe.image_tokens - int(recipe.patch_drop * recipe.image_tokens)
    order = torch.rand(recipe.batch, recipe.image_tokens, device=device).argsort(dim=1)
    return order[:, :count].sort(dim=1).values


def _seeing(
    model: LlavaForConditionalGeneration,
    sights: nn.Module,
    image: Tensor,
    latents: Latents,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of guessing every part's variant and the background, from the mean patch
    feature and from the class token."""
    tower = model.model.vision_tower
    h = see(model, image, kept)
    pooled = tower.post_layernorm(tower.encoder.layers[-1](h, None)[:, 0])
    truth = torch.cat([latents.variants, latents.background[:, None]], dim=1)  # [B, P + 1]
    features = torch.stack([h[:, 1:].mean(dim=1), pooled], dim=1)
    guess = sights(features).float().unflatten(2, (-1, _CHOICES))  # [B, 2, P + 1, choices]
    truth = truth[:, None].expand(guess.shape[:-1])
    loss = F.cross_entropy(guess.flatten(0, 2), truth.flatten())
    return loss, (guess.argmax(dim=-1) == truth).float().mean()


def _answering(
    model: LlavaForConditionalGeneration, teacher: Teacher, batch: AnswerBatch, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Loss on the answer and on stopping after it; accuracy of the answer."""
    logits = answer_logits(model, teacher, batch, kept).float()  # [B, Q, 2, V]
    truth = torch.stack([batch.answer, torch.full_like(batch.answer, teacher.words.end)], dim=2)
    losses = F.cross_entropy(logits.flatten(0, 2), truth.flatten(), reduction="none")
    losses = losses.view(truth.shape).mean(dim=2)
    right = (logits[:, :, 0].argmax(dim=-1) == batch.answer).float()
    fair, count = batch.fair, batch.fair.sum()
    return (losses * fair).sum() / count, (right * fair).sum() / count


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


def _sights(width: int, *, seed: int) -> nn.Linear:
    """A linear guess of every part's variant and of the background; dropped after the first
    phase."""
    with seeded(seed):
        return nn.Linear(width, (len(VARIANTS) + 1) * _CHOICES)


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
            latents = mix_parts(latents, share=1.0)
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
    ids = teacher.prompt(model, question).expand(len(image), -1)
    return model(input_ids=ids, pixel_values=image, logits_to_keep=1).logits[:, -1].float()


def _adjusted(logits: Tensor, truth: Tensor) -> Tensor:
    return logits.gather(1, truth[:, None])[:, 0] - logits.mean(dim=1)
