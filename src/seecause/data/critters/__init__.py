"""Critters: a generated world with known causes.

Small creatures made of parts on textured backgrounds; every picture comes with its mask, its part
map and its exact counterfactuals.

    from seecause.data import critters

    latents = critters.draw("certified", "test", 16)
    picture = critters.render(latents)
    elsewhere = critters.render(latents, do=critters.Do(background=2))   # the creature keeps every
    bit
"""

from seecause.data.critters.anatomy import (
    CLASSES,
    CODEWORDS,
    COLOURS,
    PARTS,
    VARIANTS,
    minimal_sufficient_sets,
)
from seecause.data.critters.backgrounds import BACKGROUNDS
from seecause.data.critters.latents import (
    Latents,
    compatible_classes,
    concatenate,
    drop_parts,
    mix_parts,
)
from seecause.data.critters.picture import Do, Picture, Style, intervene, render
from seecause.data.critters.questions import Exam, Question, ask, draw_exam, vocabulary
from seecause.data.critters.regimes import (
    REGIMES,
    Certificate,
    Regime,
    certificate,
    joint,
    usual_background,
)
from seecause.data.critters.world import SPLITS, draw, samples

__all__ = [
    "BACKGROUNDS",
    "CLASSES",
    "CODEWORDS",
    "COLOURS",
    "PARTS",
    "REGIMES",
    "SPLITS",
    "VARIANTS",
    "Certificate",
    "Do",
    "Exam",
    "Latents",
    "Picture",
    "Question",
    "Regime",
    "Style",
    "ask",
    "certificate",
    "compatible_classes",
    "concatenate",
    "draw",
    "draw_exam",
    "drop_parts",
    "intervene",
    "joint",
    "minimal_sufficient_sets",
    "mix_parts",
    "render",
    "samples",
    "usual_background",
    "vocabulary",
]
