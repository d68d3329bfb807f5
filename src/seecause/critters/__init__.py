"""Critters: a generated world with known causes.

Small creatures made of parts on textured backgrounds; every picture comes with its mask, its part
map and its exact counterfactuals.

    from seecause import critters

    latents = critters.draw("certified", "test", 16)
    picture = critters.render(latents)
    elsewhere = critters.render(latents, do=critters.Do(background=2))  # the creature is the same
"""

from seecause.critters.dataset import samples
from seecause.critters.latents import (
    CLASSES,
    CODEWORDS,
    COLOURS,
    PARTS,
    VARIANTS,
    Latents,
    compatible_classes,
    concatenate,
    drop_parts,
    minimal_sufficient_sets,
    mix_parts,
)
from seecause.critters.picture import BACKGROUNDS, STYLES, Do, Picture, Style, intervene, render
from seecause.critters.questions import (
    SUBJECTS,
    Exam,
    Question,
    answer_codes,
    answers,
    ask,
    choices,
    draw_exam,
    vocabulary,
    wordings,
)
from seecause.critters.regimes import (
    REGIMES,
    SPLITS,
    Certificate,
    Regime,
    certificate,
    draw,
    find_regime,
    joint,
    usual_background,
)

__all__ = [
    "BACKGROUNDS",
    "CLASSES",
    "CODEWORDS",
    "COLOURS",
    "PARTS",
    "REGIMES",
    "SPLITS",
    "STYLES",
    "SUBJECTS",
    "VARIANTS",
    "Certificate",
    "Do",
    "Exam",
    "Latents",
    "Picture",
    "Question",
    "Regime",
    "Style",
    "answer_codes",
    "answers",
    "ask",
    "certificate",
    "choices",
    "compatible_classes",
    "concatenate",
    "draw",
    "draw_exam",
    "drop_parts",
    "find_regime",
    "intervene",
    "joint",
    "minimal_sufficient_sets",
    "mix_parts",
    "render",
    "samples",
    "usual_background",
    "vocabulary",
    "wordings",
]
