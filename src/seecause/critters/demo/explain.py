"""The explain job on Critters: one model that learned the creature, one that learned the background
too, and the same creature elsewhere.

Both maps show the class of the creature, in both scenes, on one colour scale: where a model answers
from the creature, nothing changes when the background does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from seecause import critters
from seecause.attribution.attribute import attribute
from seecause.attribution.result import Attribution
from seecause.critters.demo.job import Setting, Shown
from seecause.loading import load
from seecause.models.base import ImageModel
from seecause.report.cards import Answer, Card, MapView, Strip, render_cards
from seecause.report.explain import top_answers
from seecause.report.overlay import scale_of
from seecause.report.page import Section

MODELS = ("builtin:critters-vit", "builtin:critters-biased")
PICTURES = 6
CHAPTER = "Explain"
NOTE = (
    "Each card is one creature, on the background its class is usually met on and on another (every"
    " pixel of the creature is the same). The maps show which patches speak for the creature's"
    " class when they stand alone in a blank picture (CAAP); all maps of a card share one scale. A"
    " model may favour a class on the blank picture already, so look at what changes between the"
    " two rows. critters-vit was trained where background and class are independent,"
    " critters-biased where the background nearly gives the class away."
)


def run(setting: Setting, *, models: Sequence[str] = MODELS, pictures: int = PICTURES) -> Shown:
    """Cards for `pictures` creatures that stand on the usual background of their class."""
    latents = _usual_scenes(pictures, setting.seed)
    scenes = {
        "as drawn": critters.render(latents).image,
        "on another background": (
            critters.render(latents, do=critters.Do(background=_elsewhere(latents))).image
        ),
    }
    opened = {name.rpartition(":")[2]: load(name, device=setting.device) for name in models}
    found = {name: _explain(model, scenes, latents.creature) for name, model in opened.items()}
    cards = [_card(index, latents, scenes, found) for index in range(pictures)]
    manifests = [next(iter(runs.values()))[0].manifest for runs in found.values()]
    note = (
        f"{NOTE}\nThe other background changed"
        f" {' and '.join(f'{_flips(runs)} answers of {name}' for name, runs in found.items())}."
    )
    return Shown(
        [Section("Which patches caused the answer?", render_cards(cards), note)], manifests
    )


Found = Mapping[str, tuple[Attribution, list[list[Answer]]]]  # by scene


def _explain(model: ImageModel, scenes: Mapping[str, Tensor], creature: Tensor) -> Found:
    found = {}
    for scene, raw in scenes.items():
        images = model.preprocess.normalise(raw).to(model.device, model.dtype)
        answers = [
            top_answers(model, one[None], target=int(c), count=2)[0]
            for one, c in zip(images, creature, strict=True)
        ]
        found[scene] = (attribute(model, images, creature), answers)
    return found


def _flips(runs: Found) -> str:
    """How often the first answer differs between the two scenes, in words."""
    before, after = ([answers[0].name for answers in found] for _, found in runs.values())
    return f"{sum(a != b for a, b in zip(before, after, strict=True))} of {len(before)}"


def _card(
    index: int, latents: critters.Latents, scenes: Mapping[str, Tensor], found: Mapping[str, Found]
) -> Card:
    scale = scale_of(*(runs[scene][0].maps[index] for runs in found.values() for scene in scenes))
    strips = []
    for scene, raw in scenes.items():
        maps = [
            MapView(name, runs[scene][0].maps[index], scale, answers=runs[scene][1][index])
            for name, runs in found.items()
        ]
        strips.append(Strip(raw[index], maps, label=scene))
    creature, background = (
        critters.CLASSES[int(latents.creature[index])],
        critters.BACKGROUNDS[int(latents.background[index])],
    )
    return Card(f"{creature} on {background}", strips)


def _usual_scenes(count: int, seed: int) -> critters.Latents:
    """One creature of each class in turn, on the background its class is usually met on."""
    pool = critters.draw(
        "balanced",
        "test",
        len(critters.CLASSES) * len(critters.BACKGROUNDS) * -(-count // len(critters.CLASSES)),
        seed=seed,
    )
    usual = torch.nonzero(critters.usual_background(pool.creature) == pool.background).flatten()
    order = usual[torch.argsort(pool.creature[usual], stable=True)]
    return pool[order[torch.linspace(0, len(order) - 1, count).round().long()]]


def _elsewhere(latents: critters.Latents) -> Tensor:
    return (
        latents.background + 1 + torch.arange(len(latents)) % (len(critters.BACKGROUNDS) - 1)
    ) % len(critters.BACKGROUNDS)
