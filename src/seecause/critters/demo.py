"""The demo: every job on the embedded models, for one page. `JOBS` lists them by the chapter that
each opens; `run_job` gives a chapter's sections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from PIL import Image

from seecause import critters
from seecause.background.images import critter_images
from seecause.background.repair import repair as sc_repair
from seecause.critters.demo_classifiers import (
    BIASED,
    DemoSections,
    DemoSetting,
    audit,
    balanced_scenes,
    compare,
    explain,
    remove_heads,
)
from seecause.data.dataset import evenly
from seecause.data.images import to_pil
from seecause.errors import BadInput
from seecause.faithful.evaluation import part_examples
from seecause.faithful.interventions import leave_one_out, network
from seecause.faithful.net import IFAM
from seecause.loading import load
from seecause.lvlm import (
    LVLM,
    MaskEngine,
    MeanBank,
    calibration_critters,
    load as load_lvlm,
    make_bank,
    trace_answer,
)
from seecause.models.base import protocol
from seecause.models.load import ZOO
from seecause.report.background import (
    before_after_section,
    parts_section,
    remedies_section,
    repair_change_section,
)
from seecause.report.lvlm import curves_section, heads_section, tokens_section

BUILT = "builtin:critters-ifam"
BUILD_PICTURES = 4


def build(
    setting: DemoSetting, *, model: str = BUILT, pictures: int = BUILD_PICTURES
) -> DemoSections:
    """Cards for `pictures` creatures, and how often another background changes the answer. Nothing
    where the network is not installed."""
    library, _, name = model.partition(":")
    if library == "builtin" and not (ZOO / f"{name}.json").is_file():
        return DemoSections([], [])
    view = load(model, device=setting.device)
    net = network(view)
    latents = critters.draw("balanced", "test", 8 * pictures, seed=setting.seed)
    size = view.preprocess.size[0]

    def images(rows: critters.Latents, do: critters.Do | None = None) -> torch.Tensor:
        picture = critters.render(rows, size=size, do=do)
        return view.preprocess.normalise(picture.image).to(view.device, view.dtype)

    changing = _changing(net, images(latents))
    first, others = (
        evenly(rows.nonzero()[:, 0].tolist(), pictures) for rows in (changing, ~changing)
    )
    shown = latents[torch.tensor([*first, *others][:pictures])]
    titles = [
        f"{critters.CLASSES[c]} on {critters.BACKGROUNDS[b]}"
        for c, b in zip(shown.creature.tolist(), shown.background.tolist(), strict=True)
    ]
    elsewhere = (latents.background + 1) % len(critters.BACKGROUNDS)
    with torch.no_grad():
        before, after = (
            view(images(latents, do)).argmax(dim=1)
            for do in (None, critters.Do(background=elsewhere))
        )
    flips = int((before != after).sum())
    section = parts_section(part_examples(net, images(shown), titles))
    count = len(latents)
    note = (
        f"{section.note}\nOf {count} creatures drawn, {int(changing.sum())} get another answer when"
        f" some part is taken out; those are shown first. Another background changed {flips} of"
        f" {count} answers. It can: stage 1 sees it when it chooses, and patches at the creature's"
        " border show some of both."
    )
    manifest = {
        "method": "iFAM",
        "options": {"parts": net.parts, "pictures": count},
        **protocol(view, images(latents)),
    }
    return DemoSections([replace(section, note=note)], [manifest])


def _changing(net: IFAM, images: torch.Tensor) -> torch.Tensor:
    """[B] bool: another answer without one of the parts."""
    answers = leave_one_out(net, [(images, torch.zeros(len(images), dtype=torch.int64))])
    return (answers.without.argmax(dim=-1) != answers.logits.argmax(dim=-1)).any(dim=0)


TRACED = "builtin:critters-llava"
QUESTION = "What is the name of this creature?"
CALIBRATION_PICTURES = 32  # in the average picture; elsewhere 100
# the first picture of the test split that is tried, and how many are: one must move the answer
# enough
PLACE, TRIED = 2, 8
FEWER = f" For the demo {CALIBRATION_PICTURES} calibration pictures; seecause lvlm trace takes 100."


def trace(
    setting: DemoSetting,
    *,
    model: str = TRACED,
    masks: int | None = None,
    pictures: int = CALIBRATION_PICTURES,
    floor: float | None = 1.0,
) -> DemoSections:
    """Heads, curves, words and image tokens of one answer; nothing where the model is not in the
    package."""
    kind, _, name = model.partition(":")
    if kind == "builtin" and not (ZOO / name / "config.json").is_file():
        return DemoSections([], [])
    from transformers.utils import logging

    logging.disable_progress_bar()
    lvlm = load_lvlm(model, device=setting.device)
    engine, shown = _first_that_sees(
        lvlm, make_bank(lvlm, calibration_critters(pictures)), setting.seed, floor
    )
    answer = trace_answer(engine, masks=masks, token_masks=masks, seed=setting.seed)
    first = tokens_section(answer, shown)
    sections = [
        replace(first, note=first.note + FEWER),
        heads_section(answer),
        curves_section(answer.heads),
    ]
    return DemoSections(sections, [answer.heads.heads.protocol])


def _first_that_sees(
    lvlm: LVLM, bank: MeanBank, seed: int, floor: float | None
) -> tuple[MaskEngine, Image.Image]:
    """The first picture that moves the answer by the floor; if none does, that of the last is the
    error."""
    latents = critters.draw("balanced", "test", TRIED, start=PLACE, seed=seed)
    pictures = [to_pil(image) for image in critters.render(latents).image]
    for shown in pictures[:-1]:
        try:
            return MaskEngine(lvlm, shown, QUESTION, bank, floor=floor), shown
        except BadInput:
            continue
    return MaskEngine(lvlm, pictures[-1], QUESTION, bank, floor=floor), pictures[-1]


REPAIR_PICTURES, REPAIR_TESTED, REPAIR_SHOWN = 48, 16, 3


def repair(
    setting: DemoSetting,
    *,
    model: str = BIASED,
    pictures: int = REPAIR_PICTURES,
    tested: int = REPAIR_TESTED,
    shown: int = REPAIR_SHOWN,
) -> DemoSections:
    """A model that answers from the background, mended without a group label; the same balanced
    pictures before and after. `seecause repair` does the same at any size."""
    view = load(model, device=setting.device)
    train = critters.draw("certified", "train", pictures, seed=setting.seed, device=setting.device)
    drawn = {
        "critters:certified:train": train,
        "critters:balanced:test": balanced_scenes(setting, tested),
    }
    cases, test = (
        critter_images(view, latents, name=name, swaps=False) for name, latents in drawn.items()
    )
    result = sc_repair(view, cases, test=test, per_picture=3, seed=setting.seed)
    gallery = before_after_section(result, count=shown)
    sections = [
        replace(gallery, note=f"{result.sentence}\n{gallery.note}"),
        replace(repair_change_section(result), fold="Numbers before and after"),
        replace(remedies_section(result), fold="All that was tried"),
    ]
    manifest = {**result.before.protocol, "method": "repair"}
    return DemoSections(sections, [manifest], [result.sentence])


# chapter -> job
JOBS: dict[str, Callable[[DemoSetting], DemoSections]] = {
    "Explain": explain,
    "Compare": compare,
    "Audit": audit,
    "Repair": repair,
    "Heads": remove_heads,
    "Build": build,
    "Trace": trace,
}


def run_job(chapter: str, setting: DemoSetting) -> DemoSections:
    """What a job shows, its first section opening a chapter."""
    shown = JOBS[chapter](setting)
    first = [replace(section, chapter=chapter) for section in shown.sections[:1]]
    return replace(shown, sections=[*first, *shown.sections[1:]])
