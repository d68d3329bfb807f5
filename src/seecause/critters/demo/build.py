"""The build job: a classifier that cannot look elsewhere. Its parts, its mask, a part removed, and
whether another background changes the answer."""

from __future__ import annotations

import torch

from seecause import critters
from seecause.attribution.attribute import protocol
from seecause.critters.demo.job import Setting, Shown
from seecause.data.dataset import evenly
from seecause.faithful.interventions import leave_one_out, network
from seecause.faithful.net import IFAM
from seecause.loading import load
from seecause.models.sources import ZOO
from seecause.report.faithful import PartCard, note_of, part_cards, parts_section

MODEL = "builtin:critters-ifam"
PICTURES = 4
CHAPTER = "Build"


def run(setting: Setting, *, model: str = MODEL, pictures: int = PICTURES) -> Shown:
    """Cards for `pictures` creatures, and how often another background changes the answer. Nothing
    where the network is not installed."""
    library, _, name = model.partition(":")
    if library == "builtin" and not (ZOO / f"{name}.json").is_file():
        return Shown([], [])
    view = load(model, device=setting.device)
    net = network(view)
    latents = critters.draw("balanced", "test", 8 * pictures, seed=setting.seed)
    size = view.preprocess.size[0]

    def images(rows: critters.Latents, do: critters.Do | None = None) -> torch.Tensor:
        return view.preprocess.normalise(critters.render(rows, size=size, do=do).image).to(
            view.device, view.dtype
        )

    changing = _changing(net, images(latents))
    rows = [
        *evenly(changing.nonzero()[:, 0].tolist(), pictures),
        *evenly((~changing).nonzero()[:, 0].tolist(), pictures),
    ][:pictures]
    shown = latents[torch.tensor(rows)]
    titles = [
        f"{critters.CLASSES[c]} on {critters.BACKGROUNDS[b]}"
        for c, b in zip(shown.creature.tolist(), shown.background.tolist(), strict=True)
    ]
    cards: list[PartCard] = part_cards(net, images(shown), titles=titles)
    elsewhere = (latents.background + 1) % len(critters.BACKGROUNDS)
    with torch.no_grad():
        before, after = (
            view(images(latents, do)).argmax(dim=1)
            for do in (None, critters.Do(background=elsewhere))
        )
    flips = int((before != after).sum())
    count = len(latents)
    note = (
        f"{note_of(net)}\nOf {count} creatures drawn, {int(changing.sum())} get another answer when"
        f" some part is taken out; those are shown first. Another background changed {flips} of"
        f" {count} answers. It can: stage 1 sees it when it chooses, and patches at the creature's"
        " border show some of both."
    )
    manifest = {
        "method": "iFAM",
        "options": {"parts": net.parts, "pictures": count},
        **protocol(view, images(latents)),
    }
    return Shown([parts_section(cards, net.parts, note=note)], [manifest])


def _changing(net: IFAM, images: torch.Tensor) -> torch.Tensor:
    """[B] bool: another answer without one of the parts."""
    found = leave_one_out(net, [(images, torch.zeros(len(images), dtype=torch.int64))])
    return (found.without.argmax(dim=-1) != found.logits.argmax(dim=-1)).any(dim=0)
