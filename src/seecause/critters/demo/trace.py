"""The trace job: one question about one picture, from image tokens through heads into words, on the
embedded vision-language model."""

from __future__ import annotations

from dataclasses import replace

from PIL import Image

from seecause import critters
from seecause.critters.demo.job import Setting, Shown
from seecause.data.images import to_pil
from seecause.errors import WeakAnswer
from seecause.lvlm import (
    LVLM,
    MaskEngine,
    MeanBank,
    calibration_critters,
    load,
    make_bank,
    trace_heads,
    trace_tokens,
)
from seecause.models.sources import ZOO
from seecause.report.lvlm import (
    curves_section,
    heads_section,
    one_answer_counts,
    tokens_section,
    trace_manifest,
)

MODEL = "builtin:critters-llava"
QUESTION = "What is the name of this creature?"
CHAPTER = "Trace"
MASKS = 1500  # the paper and `seecause lvlm` take 10,000
PICTURES = 32  # in the average picture; elsewhere 100
PLACE, TRIED = (
    2,
    8,
    # the first picture of the test split that is tried, and how many are: one must move the answer
    # enough
)
FEWER = (
    f" For the demo {MASKS:,} masks and {PICTURES} calibration pictures; seecause lvlm tokens takes"
    " 10,000 and 100."
)


def run(
    setting: Setting,
    *,
    model: str = MODEL,
    masks: int = MASKS,
    pictures: int = PICTURES,
    floor: float | None = 1.0,
) -> Shown:
    """Heads, curves, words and image tokens of one answer; nothing where the model is not in the
    package."""
    kind, _, name = model.partition(":")
    if kind == "builtin" and not (ZOO / name / "config.json").is_file():
        return Shown([], [])
    from transformers.utils import logging

    logging.disable_progress_bar()
    lvlm = load(model, device=setting.device)
    engine, shown = _first_that_sees(
        lvlm, make_bank(lvlm, calibration_critters(pictures)), setting.seed, floor
    )
    heads = trace_heads(engine, masks=masks, seed=setting.seed)
    tokens = trace_tokens(
        engine, heads.heads.coefficients, heads.chosen, masks=masks, seed=setting.seed
    )
    first = tokens_section(engine, tokens, shown)
    sections = [
        replace(first, note=first.note + FEWER),
        heads_section(engine, heads),
        curves_section(heads.curves, one_answer_counts(heads)),
    ]
    return Shown(sections, [trace_manifest(engine, heads, tokens.tokens)])


def _first_that_sees(
    lvlm: LVLM, bank: MeanBank, seed: int, floor: float | None
) -> tuple[MaskEngine, Image.Image]:
    """The first picture that moves the answer by the floor; if none does, that of the last is the
    error."""
    pictures = [
        to_pil(image)
        for image in critters.render(
            critters.draw("balanced", "test", TRIED, start=PLACE, seed=seed)
        ).image
    ]
    for shown in pictures[:-1]:
        try:
            return MaskEngine(lvlm, shown, QUESTION, bank, floor=floor), shown
        except WeakAnswer:
            continue
    return MaskEngine(lvlm, pictures[-1], QUESTION, bank, floor=floor), pictures[-1]
