"""The build job: a classifier that cannot look elsewhere. Its parts, its mask, a part removed, and whether another background changes the answer."""

from __future__ import annotations

import torch

from seecause.data import critters
from seecause.demo.job import Setting, Shown
from seecause.faithful.interventions import network
from seecause.loading import load
from seecause.models.sources import ZOO
from seecause.report.faithful import NOTE, PartCard, part_cards, parts_section

MODEL = "builtin:critters-ifam"
PICTURES = 4


def run(setting: Setting, *, model: str = MODEL, pictures: int = PICTURES) -> Shown:
    """Cards for `pictures` creatures, and how often another background changes the answer. Nothing where the network is not installed."""
    library, _, name = model.partition(":")
    if library == "builtin" and not (ZOO / f"{name}.json").is_file():
        return Shown([], [])
    view = load(model, device=setting.device)
    net = network(view)
    latents = critters.draw("balanced", "test", 8 * pictures, seed=setting.seed)
    size = view.preprocess.size[0]

    def images(rows: critters.Latents, do: critters.Do | None = None) -> torch.Tensor:
        return view.preprocess.normalise(critters.render(rows, size=size, do=do).image).to(view.device, view.dtype)

    shown = latents[torch.arange(0, len(latents), 8) + torch.arange(pictures) % 8]
    titles = [f"{critters.CLASSES[c]} on {critters.BACKGROUNDS[b]}" for c, b in zip(shown.creature.tolist(), shown.background.tolist(), strict=True)]
    cards: list[PartCard] = part_cards(net, images(shown), titles=titles)
    elsewhere = (latents.background + 1) % len(critters.BACKGROUNDS)
    with torch.no_grad():
        before, after = (view(images(latents, do)).argmax(dim=1) for do in (None, critters.Do(background=elsewhere)))
    flips = int((before != after).sum())
    note = (
        f"{NOTE}\nAnother background changed {flips} of {len(latents)} answers. It still can: stage 1 sees the whole picture when it chooses, and "
        "patches at the creature's border show some of both."
    )
    manifest = {"method": "iFAM", "model": model, "model_fingerprint": view.fingerprint(), "device": str(view.device), "dtype": str(view.dtype)}
    return Shown([parts_section(cards, net.parts, note=note)], [manifest])
