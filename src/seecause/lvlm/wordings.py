"""Does the same question in other words use the same heads? (head attribution, section 4.3 and
appendix C.3)

cosine(beta_first, beta_other) for every other wording. Coefficients are noisy, so the cosine to
expect is not 1 but that of the first wording with itself, fitted again on fresh masks: the ceiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from seecause.errors import BadOption
from seecause.lvlm.analysis import cosines
from seecause.lvlm.attribute import HeadAttribution, attribute_heads
from seecause.lvlm.bank import MeanBank
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.view import LVLM


@dataclass(frozen=True, eq=False)
class Wordings:
    questions: tuple[str, ...]
    found: tuple[HeadAttribution, ...]  # one for each question
    cosines: Tensor  # [Q - 1] float64: of every other wording with the first
    ceiling: float  # of the first with itself, on fresh masks


def compare_wordings(
    lvlm: LVLM,
    image: Image.Image,
    questions: Sequence[str],
    bank: MeanBank,
    *,
    answer: str | None = None,
    masks: int = 10_000,
    floor: float | None = 1.0,
    seed: int = 0,
) -> Wordings:
    """Head attributions of one picture for several wordings of a question; without `answer`, of
    whatever the model says to the first one."""
    if len(questions) < 2:
        raise BadOption("questions", len(questions), "at least two wordings")
    first = MaskEngine(lvlm, image, questions[0], bank, answer=answer, floor=floor)
    engines = [
        first,
        *(
            MaskEngine(lvlm, image, question, bank, answer=[first.target], floor=floor)
            for question in questions[1:]
        ),
    ]
    found = [
        attribute_heads(engine, masks=masks, seed=seed + place)
        for place, engine in enumerate(engines)
    ]
    again = attribute_heads(first, masks=masks, seed=seed + len(engines))
    vectors = torch.stack([one.coefficients for one in (*found, again)])
    alike = cosines(vectors[:1].expand_as(vectors[1:]), vectors[1:])
    return Wordings(tuple(questions), tuple(found), alike[:-1], float(alike[-1]))
