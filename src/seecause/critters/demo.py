"""The demo: the main functions of this package on the embedded models, on one page.

`JOBS` maps the title of each chapter to its job; `run_job` returns the sections of a chapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seecause.attribution.attribute import explain as explain_images
from seecause.background.audit import audit as audit_model
from seecause.background.images import critter_images
from seecause.background.repair import repair as repair_model
from seecause.critters.rendering import render
from seecause.critters.world import (
    BACKGROUNDS,
    CLASSES,
    QUESTION,
    Latents,
    draw,
    usual_background,
)
from seecause.data.dataset import to_pil
from seecause.faithful.evaluation import part_examples
from seecause.faithful.interventions import network
from seecause.loading import load
from seecause.models.base import protocol
from seecause.report import Section, verdict_box
from seecause.report.background import (
    audit_lines,
    before_after_section,
    parts_section,
    remedies_section,
    repair_change_section,
)
from seecause.report.explain import explain_section

TWO_MODELS = ("builtin:critters-vit", "builtin:critters-biased")
EXPLAIN_NOTE = (
    "Each creature is shown on the usual background of its class, then on another (every pixel of"
    " the creature is the same). critters-vit was trained where background and class are"
    " independent, critters-biased where the background nearly gives the class away."
)
# balanced images run through creatures, then backgrounds: steps of this size mix both
_STRIDE = 13

_SHOWN = 2  # index of the test image in the question


@dataclass(frozen=True)
class DemoSections:
    """Sections of the page, the protocols of their results, and lines for the terminal."""

    sections: Sequence[Section]
    manifests: Sequence[Mapping[str, Any]]
    lines: Sequence[str] = ()


def explain(device: str, *, models: Sequence[str] = TWO_MODELS, count: int = 3) -> DemoSections:
    """Maps of two models for the same creatures on two backgrounds."""
    sections, manifests, flips, both = [], [], [], pairs_of_scenes(count)
    raw = render(both).image
    for name in models:
        model, short = load(name, device=device), name.rpartition(":")[2]
        images = model.preprocess.normalise(raw).to(model.device, model.dtype)
        found = explain_images(model, images, target=both.creature)
        titles = [_title(both, index) for index in range(len(both))]
        section = explain_section(replace(found, names=titles))
        first = [answers[0].name for answers in found.answers]
        changed = sum(here != there for here, there in zip(first[::2], first[1::2], strict=True))
        flips.append(f"{changed} of {count} predictions of {short}")
        sections.append(replace(section, title=f"{section.title} ({short})"))
        manifests.append(found.first.manifest)
    moved = f"The same creature elsewhere: the other background changed {' and '.join(flips)}."
    sections[0] = replace(sections[0], note=f"{moved} {EXPLAIN_NOTE}\n{sections[0].note}")
    return DemoSections(sections, manifests)


def pairs_of_scenes(count: int) -> Latents:
    """Creatures one after the other, each on the usual background of its class, then on another."""
    scenes = draw("balanced", "test", count)  # one of each class in turn
    usual, step = usual_background(scenes.creature), 1 + torch.arange(count) % 3
    both = torch.stack([usual, (usual + step) % len(BACKGROUNDS)], dim=1)
    pairs = scenes[torch.arange(count).repeat_interleave(2)]
    return pairs.replace(background=both.flatten())


def _title(latents: Latents, index: int) -> str:
    background = BACKGROUNDS[int(latents.background[index])]
    return f"{CLASSES[int(latents.creature[index])]} on {background}"


def audit(device: str, *, models: Sequence[str] = TWO_MODELS, count: int = 96) -> DemoSections:
    """A verdict on each model."""
    latents, sections, manifests = _balanced(count, device), [], []
    for name in models:
        model = load(name, device=device)
        images = critter_images(model, latents, name="critters:balanced:test")
        result = audit_model(model, images, per_image=1)
        title = f"Does {name.rpartition(':')[2]} predict from the background?"
        sections.append(Section(title, verdict_box(audit_lines(result)), ""))
        manifests.append(result.protocol)
    return DemoSections(sections, manifests)


def _balanced(count: int, device: str) -> Latents:
    """Test scenes in which creature and background are independent."""
    every = draw("balanced", "test", _STRIDE * count, device=device)
    return every[torch.arange(0, _STRIDE * count, _STRIDE, device=device)]


def repair(
    device: str,
    *,
    model: str = TWO_MODELS[-1],
    count: int = 48,
    tested: int = 32,
    shown: int = 3,
) -> DemoSections:
    """A model that predicts from the background, repaired without group labels."""
    view = load(model, device=device)
    train = draw("certified", "train", count, device=device)
    scenes = {
        "critters:certified:train": train,
        "critters:balanced:test": _balanced(tested, device),
    }
    images, test = (critter_images(view, latents, name=name) for name, latents in scenes.items())
    result = repair_model(view, images, test=test, per_image=3)
    gallery = before_after_section(result, count=shown)
    sections = [
        replace(gallery, note=f"{result.sentence}\n{gallery.note}"),
        replace(repair_change_section(result), fold="Numbers before and after"),
        replace(remedies_section(result), fold="All that was tried"),
    ]
    manifest = {**result.before.protocol, "method": "repair"}
    return DemoSections(sections, [manifest], [result.sentence])


def parts(device: str, *, count: int = 4) -> DemoSections:
    """The parts of some creatures, and predictions without each part."""
    view = load("builtin:critters-ifam", device=device)
    latents = draw("balanced", "test", count)
    raw = render(latents, size=view.preprocess.size[0]).image
    images: Tensor = view.preprocess.normalise(raw).to(view.device, view.dtype)
    titles = [_title(latents, index) for index in range(count)]
    section = parts_section(part_examples(network(view), images, titles))
    return DemoSections([section], [{"method": "iFAM", **protocol(view, images)}])


def words(
    device: str,
    *,
    masks: int | None = None,
    count: int = 32,
    floor: float | None = 1.0,
) -> DemoSections:
    """Image tokens and heads behind an answer of a vision-language model."""
    from transformers.utils import logging

    from seecause.lvlm.attribute import trace_answer
    from seecause.lvlm.bank import make_bank
    from seecause.lvlm.engine import MaskEngine
    from seecause.lvlm.model import calibration_critters, load as load_lvlm
    from seecause.report.lvlm import curves_section, heads_section, tokens_section

    logging.disable_progress_bar()
    lvlm = load_lvlm("builtin:critters-llava", device=device)
    image = to_pil(render(draw("balanced", "test", 1, start=_SHOWN)).image[0])
    bank = make_bank(lvlm, calibration_critters(count))
    engine = MaskEngine(lvlm, image, QUESTION, bank, floor=floor)
    answer = trace_answer(engine, masks=masks)
    tokens = tokens_section(answer, image)
    fewer = f" For the demo {count} calibration images; seecause lvlm trace takes 100."
    sections = [replace(tokens, note=tokens.note + fewer), heads_section(answer)]
    return DemoSections([*sections, curves_section(answer)], [answer.heads.protocol])


# chapter -> job, of a device
JOBS: dict[str, Callable[[str], DemoSections]] = {
    "Explain": explain,
    "Audit": audit,
    "Repair": repair,
    "Parts": parts,
    "Words": words,
}


def run_job(chapter: str, device: str) -> DemoSections:
    """The sections of a job; the first one opens the chapter."""
    shown = JOBS[chapter](device)
    first = [replace(section, chapter=chapter) for section in shown.sections[:1]]
    return replace(shown, sections=[*first, *shown.sections[1:]])
