"""The audit job: does it answer from the background? The same question to a model that does not and
to one that does."""

from __future__ import annotations

from seecause import critters
from seecause.critters.demo.job import Setting, Shown
from seecause.heads.audit import audit
from seecause.heads.cases import critter_cases
from seecause.loading import load
from seecause.report.heads import verdict_section
from seecause.report.heads_gallery import audit_gallery
from seecause.report.page import Section

MODELS = ("builtin:critters-vit", "builtin:critters-biased")
PICTURES = 8
CHAPTER = "Audit"
STRIDE = (
    13  # balanced pictures run through creatures, then backgrounds: steps of this size mix both
)


def run(setting: Setting, *, models: tuple[str, ...] = MODELS, pictures: int = PICTURES) -> Shown:
    """A verdict on each model with true masks and exact swaps, and where the last one goes wrong.
    `seecause heads audit` discovers masks too."""
    latents = critters.draw(
        "balanced", "test", STRIDE * pictures, seed=setting.seed, device=setting.device
    )[::STRIDE]  # type: ignore[misc]
    sections: list[Section] = []
    manifests = []
    for name in models:
        model = load(name, device=setting.device)
        cases = critter_cases(model, latents, name="critters:balanced:test")
        found = audit(
            model, cases, masks="oracle", count="all"
        )  # of eight, the biased one has few right
        sections.append(
            verdict_section(
                found,
                title=f"Does {name.rpartition(':')[2]} answer from the background?",
                explained=not sections,
            )
        )
        manifests.append(found.protocol)
    return Shown([*sections, audit_gallery(model, found, count=4)], manifests)
