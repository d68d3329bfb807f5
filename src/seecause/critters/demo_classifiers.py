"""The demo's jobs on classifiers: explain, compare, audit, remove heads. Each gives sections of a
page and the manifests of what they show.

Explain shows one model that learned the creature, one that learned the background too, and the same
creature elsewhere. Both maps show the class of the creature, in both scenes, on one colour scale:
where a model answers from the creature, nothing changes when the background does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seecause import critters
from seecause.attribution.attribute import attribute, top_answers
from seecause.attribution.result import Attribution
from seecause.background.audit import audit as audit_model
from seecause.background.heads import penalised
from seecause.background.images import critter_images
from seecause.background.prune import curve
from seecause.background.scoring import screen
from seecause.bench.cells import Request
from seecause.bench.runner import run as run_bench
from seecause.bench.tables import read_results, table_of
from seecause.loading import load
from seecause.models.base import ImageModel, protocol
from seecause.models.view import VisionModel
from seecause.report.background import (
    audit_lines,
    change_section,
    curves_section as removal_section,
    scores_section,
    worst_section,
)
from seecause.report.bench import curves_section, gallery_section, table_section
from seecause.report.figures import scale_of
from seecause.report.pages import Card, MapView, Section, Strip, cards_html, verdict_box
from seecause.target import Answer

SceneMaps = Mapping[str, tuple[Attribution, list[list[Answer]]]]  # by scene


@dataclass(frozen=True)
class DemoSetting:
    """Where and with which seed all jobs run."""

    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class DemoSections:
    """Sections of the page, and the manifests of what they show."""

    sections: Sequence[Section]
    manifests: Sequence[dict[str, Any]]
    lines: Sequence[str] = ()  # what the command says at its end


TWO_MODELS = ("builtin:critters-vit", "builtin:critters-biased")
EXPLAINED = 6
EXPLAIN_NOTE = (
    "Each card is one creature, on the background its class is usually met on and on another (every"
    " pixel of the creature is the same). The maps show which patches speak for the creature's"
    " class when they stand alone in a blank picture (CAAP); all maps of a card share one scale. A"
    " model may favour a class on the blank picture already, so look at what changes between the"
    " two rows. critters-vit was trained where background and class are independent,"
    " critters-biased where the background nearly gives the class away."
)


def explain(
    setting: DemoSetting, *, models: Sequence[str] = TWO_MODELS, pictures: int = EXPLAINED
) -> DemoSections:
    """Cards for `pictures` creatures that stand on the usual background of their class."""
    latents = _usual_scenes(pictures, setting.seed)
    scenes = {
        "as drawn": critters.render(latents).image,
        "on another background": (
            critters.render(latents, do=critters.Do(background=_elsewhere(latents))).image
        ),
    }
    opened = {name.rpartition(":")[2]: load(name, device=setting.device) for name in models}
    maps = {
        name: _explain_scenes(model, scenes, latents.creature) for name, model in opened.items()
    }
    cards = [_card(index, latents, scenes, maps) for index in range(pictures)]
    manifests = [next(iter(runs.values()))[0].manifest for runs in maps.values()]
    flips = " and ".join(f"{_flips(runs)} answers of {name}" for name, runs in maps.items())
    note = f"The same creature elsewhere: the other background changed {flips}. {EXPLAIN_NOTE}"
    return DemoSections(
        [Section("Which patches caused the answer?", cards_html(cards), note)], manifests
    )


def _explain_scenes(model: ImageModel, scenes: Mapping[str, Tensor], creature: Tensor) -> SceneMaps:
    by_scene = {}
    for scene, raw in scenes.items():
        images = model.preprocess.normalise(raw).to(model.device, model.dtype)
        answers = [
            top_answers(model, image[None], target=int(c), count=2)[0]
            for image, c in zip(images, creature, strict=True)
        ]
        by_scene[scene] = (attribute(model, images, creature), answers)
    return by_scene


def _flips(runs: SceneMaps) -> str:
    """How often the first answer differs between the two scenes, in words."""
    before, after = ([row[0].name for row in answers] for _, answers in runs.values())
    return f"{sum(a != b for a, b in zip(before, after, strict=True))} of {len(before)}"


def _card(
    index: int,
    latents: critters.Latents,
    scenes: Mapping[str, Tensor],
    by_model: Mapping[str, SceneMaps],
) -> Card:
    shown = [runs[scene][0].maps[index] for runs in by_model.values() for scene in scenes]
    scale, strips = scale_of(*shown), []
    for scene, raw in scenes.items():
        views = [
            MapView(name, runs[scene][0].maps[index], scale, answers=runs[scene][1][index])
            for name, runs in by_model.items()
        ]
        strips.append(Strip(raw[index], views, label=scene))
    creature = critters.CLASSES[int(latents.creature[index])]
    background = critters.BACKGROUNDS[int(latents.background[index])]
    return Card(f"{creature} on {background}", strips)


def _usual_scenes(count: int, seed: int) -> critters.Latents:
    """One creature of each class in turn, on the background its class is usually met on."""
    classes = len(critters.CLASSES)
    rounds = len(critters.BACKGROUNDS) * -(-count // classes)
    pool = critters.draw("balanced", "test", classes * rounds, seed=seed)
    usual = torch.nonzero(critters.usual_background(pool.creature) == pool.background).flatten()
    order = usual[torch.argsort(pool.creature[usual], stable=True)]
    return pool[order[torch.linspace(0, len(order) - 1, count).round().long()]]


def _elsewhere(latents: critters.Latents) -> Tensor:
    step = 1 + torch.arange(len(latents)) % (len(critters.BACKGROUNDS) - 1)
    return (latents.background + step) % len(critters.BACKGROUNDS)


COMPARED_METHODS = ("caap", "gae", "rollout", "random")
COMPARED_METRICS = ("aupr1", "pointing", "deletion", "ins-del")
COMPARED = 8
COMPARE_NOTE = (
    "CAAP is behind gae and rollout on this model of six blocks; on a real ViT and 300"
    " photos it finds the object best (AUPR_1 92.5; gae 87.3, rollout 81.8). Rollout gives every"
    " class the same map, which none of these columns sees. Which method is best hangs on the"
    " model: measure it on yours (docs/trust.md). "
)


def compare(
    setting: DemoSetting, *, methods: tuple[str, ...] = COMPARED_METHODS, pictures: int = COMPARED
) -> DemoSections:
    """A table and curves of `methods` on critters-vit; `seecause bench run` does the same at any
    size."""
    request = Request(
        model="builtin:critters-vit",
        data="critters:clean:test",
        methods={name: {} for name in methods},
        metrics=COMPARED_METRICS,
        measures={"insertion-deletion": {"order": "patch", "steps": 8}},
        limit=pictures,
        seed=setting.seed,
        device=setting.device,
        threads=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        run_bench(folder, request)
        results = read_results(folder)
        plan = results.plan
        pictures_first = gallery_section(results, methods[0], shown=1)
        table = table_section(table_of(results.values), plan)
        sections = [
            pictures_first,
            replace(table, note=COMPARE_NOTE + table.note),
            *curves_section(results, plan),
        ]
    return DemoSections(sections, [])


AUDITED = 96  # of which the biased model predicts a quarter correctly
# balanced pictures run through creatures, then backgrounds: steps of this size mix both
STRIDE = 13


def balanced_scenes(setting: DemoSetting, count: int) -> critters.Latents:
    """Test scenes in which a creature says nothing about its background."""
    every = STRIDE * count
    latents = critters.draw("balanced", "test", every, seed=setting.seed, device=setting.device)
    return latents[torch.arange(0, every, STRIDE, device=latents.seed.device)]


def audit(
    setting: DemoSetting, *, models: tuple[str, ...] = TWO_MODELS, pictures: int = AUDITED
) -> DemoSections:
    """A verdict on each model, and where the last one goes wrong."""
    latents = balanced_scenes(setting, pictures)
    sections: list[Section] = []
    manifests = []
    for name in models:
        model = load(name, device=setting.device)
        cases = critter_images(model, latents, name="critters:balanced:test")
        result = audit_model(model, cases, per_picture=1)
        title = f"Does {name.rpartition(':')[2]} answer from the background?"
        sections.append(Section(title, verdict_box(audit_lines(result)), ""))
        manifests.append(result.protocol)
    return DemoSections([*sections, worst_section([model], [result], [""], count=4)], manifests)


BIASED = TWO_MODELS[-1]
HEADS_PICTURES, HEADS_TOP, HEADS_DRAWS = 8, 6, 3


def remove_heads(
    setting: DemoSetting,
    *,
    model: str = BIASED,
    pictures: int = HEADS_PICTURES,
    top: int = HEADS_TOP,
    draws: int = HEADS_DRAWS,
) -> DemoSections:
    """Heads are chosen on training pictures with grey in place of the background, and judged on
    others. `seecause heads prune` saves the result."""
    opened = load(model, device=setting.device)
    assert isinstance(opened, VisionModel)
    train = critter_images(
        opened,
        critters.draw("certified", "train", pictures, seed=setting.seed, device=setting.device),
        name="critters:certified:train",
    )
    latents = balanced_scenes(setting, pictures)
    test = critter_images(opened, latents, name="critters:balanced:test")
    scores = screen(
        opened,
        train.with_masks(train.truth),
        top=top,
        verify=2 * top,
        seed=setting.seed,
    )
    scores = penalised(scores)
    heads = scores.top(min(top, int(scores.value.isfinite().sum())))
    counts = sorted({0, len(heads) // 2, len(heads)})
    removal = curve(opened, test, scores, counts, ["swap"], draws=draws, seed=setting.seed)
    first, last = removal.chosen[0], removal.chosen[-1]
    change = change_section(first, last, test)
    sections = [
        scores_section(scores, by="cigma", chosen=heads),
        removal_section(removal, by="cigma"),
        replace(change, fold="Numbers before and after"),
    ]
    options = {"top": top, "pictures": pictures, "fill": "grey"}
    return DemoSections(
        sections, [{"method": "cigma", "options": options, **protocol(opened, train.images)}]
    )
