"""The repair job: which heads of critters-biased carry the background, and what if they go?"""

from __future__ import annotations

import torch

from seecause import critters
from seecause.attribution.attribute import protocol
from seecause.critters.demo.audit import STRIDE
from seecause.critters.demo.job import Setting, Shown
from seecause.heads.cases import critter_cases
from seecause.heads.guard import penalised
from seecause.heads.removal import Look, curve
from seecause.heads.screen import screen
from seecause.loading import load
from seecause.models.view import VisionModel
from seecause.report.heads import change_section, curves_section, scores_section
from seecause.report.heads_gallery import repair_gallery

MODEL = "builtin:critters-biased"
PICTURES, TOP, DRAWS, SHOWN = 8, 6, 3, 4
CHAPTER = "Repair"


def run(
    setting: Setting,
    *,
    model: str = MODEL,
    pictures: int = PICTURES,
    top: int = TOP,
    draws: int = DRAWS,
) -> Shown:
    """Heads are chosen on training pictures with grey in place of the background, and judged on
    others. `seecause heads prune` saves the result."""
    opened = load(model, device=setting.device)
    assert isinstance(opened, VisionModel)
    train = critter_cases(
        opened,
        critters.draw("certified", "train", pictures, seed=setting.seed, device=setting.device),
        name="critters:certified:train",
    )
    latents = critters.draw(
        "balanced", "test", STRIDE * pictures, seed=setting.seed, device=setting.device
    )[::STRIDE]  # type: ignore[misc]
    test = critter_cases(opened, latents, name="critters:balanced:test")
    found = screen(
        opened,
        train.images,
        train.oracle,
        top=top,
        verify=2 * top,
        baseline="grey",
        target=train.labels,
        seed=setting.seed,
    )
    scores = penalised(found.scores)
    heads = scores.top(min(top, int(scores.value.isfinite().sum())))
    look = Look(None, test.swapped) if test.swapped is not None else None
    line = curve(
        opened,
        test,
        scores,
        sorted({0, len(heads) // 2, len(heads)}),
        [look] if look else [],
        draws=draws,
        seed=setting.seed,
    )
    sections = [
        scores_section(scores, by="cigma", chosen=heads),
        change_section(line.chosen[0], line.chosen[-1], test, title="What changed when they went?"),
        curves_section(line, by="cigma", title="Would any heads do?"),
        repair_gallery(opened, test.take(torch.arange(min(SHOWN, len(test)))), heads, None),
    ]
    return Shown(
        sections,
        [
            {
                "method": "cigma",
                "options": {"top": top, "pictures": pictures, "fill": "grey"},
                **protocol(opened, train.images),
            }
        ],
    )
