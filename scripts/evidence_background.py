"""Does a real ViT answer from the background, and does removing heads change that? ViT-Ti/16 on pet
photos with trimaps, and on ImageNet photos.

    python scripts/evidence_background.py --real PATH --device cuda     # writes
    docs/results/evidence-background.md, .csv and two .png
    python scripts/evidence_background.py --real PATH --limit 40          # small: the same code on
    two cores in about a quarter of an hour
    python scripts/evidence_background.py --real PATH --device cuda --only-page      # the page
    again from what that run made, on any machine

PATH holds vit_tiny_patch16_224.safetensors, pets/ (images, trimaps, imagenet_labels.csv) and
imagenet/val/. Every finished piece is a JSON file under
--work: the same command again goes on where it stopped. No piece begins after --minutes; while
something is missing, the exit code is 1 and the page has holes. Heads are scored on one half of the
pets (each breed cut in two), numbers are those of the other half: nothing is chosen on what is
reported. `background/composites.py` makes the photos, `background/words.py` puts the numbers into
words.
"""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import timm
import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

import seecause as sc
from scripts.background import figures, page
from scripts.background.audit import (
    MASKED,
    audited,
    masks_of,
    of_composites,
    plain,
    searched,
    verdict,
)
from scripts.background.numbers import removed
from scripts.background.photos import SMALL, Sizes, Study, opened
from scripts.background.removal import Bench, Heads, best, methods, records, scorers, spelled
from scripts.kept_pieces import OutOfTime, Pieces
from seecause.engine.machine import machine
from seecause.heads import random_sets
from seecause.models.view import VisionModel

NETWORK, WEIGHTS = "timm:vit_tiny_patch16_224", "vit_tiny_patch16_224.safetensors"


def main(
    real: Annotated[Path, typer.Option(help=f"Folder with {WEIGHTS}, pets/ and imagenet/.")],
    limit: Annotated[
        int | None,
        typer.Option(
            help="A small run: about so many pets, four of a breed, and so many of ImageNet."
        ),
    ] = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    minutes: Annotated[float, typer.Option(help="Begin no piece after so many minutes.")] = 9.0,
    tf32: Annotated[
        bool,
        typer.Option(
            help=(
                "On a GPU, multiply in TF32 in mask search, gating and removals; audit and scores"
                " are always float32."
            )
        ),
    ] = True,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder of the page, the CSV and the pictures.")] = Path(
        "docs/results"
    ),
    work: Annotated[Path, typer.Option(help="Where finished pieces are kept.")] = Path(
        "out/evidence"
    ),
    only_page: Annotated[
        bool,
        typer.Option(
            help=(
                "Make no piece: write the page of those that a run with this --device left, on a"
                " machine without it."
            )
        ),
    ] = False,
) -> None:
    """Run what is missing and write the page."""
    ends = -math.inf if only_page else time.monotonic() + 60 * minutes
    for part in (
        WEIGHTS,
        "pets/images",
        "pets/annotations/trimaps",
        "pets/imagenet_labels.csv",
        "imagenet/val",
    ):
        if not (real / part).exists():
            raise typer.BadParameter(
                f"{real / part} is not there; expected a folder with {WEIGHTS}, pets/ and"
                " imagenet/",
                param_hint="--real",
            )
    sizes, fast, here = (
        Sizes() if limit is None else SMALL,
        tf32 and device.startswith("cuda"),
        "cpu" if only_page else device,
    )
    study = opened(
        load(real, here), real, sizes=sizes, limit=limit, seed=seed, fast=fast, device=device
    )
    pieces = Pieces(
        work / f"background-{study.state}",
        ends,
        f"torch {torch.__version__}, timm {timm.__version__}, {machine(here)}",
    )
    missing = None
    try:
        run(study, pieces)
    except OutOfTime as late:
        missing = str(late)
        print(f"out of time before {missing!r}: run the same command again to go on", flush=True)
    command = (
        "python scripts/evidence_background.py --real"
        f" PATH{'' if limit is None else f' --limit {limit}'} --seed {seed} --device"
        f" {device.split(':')[0]}"
    )
    masks, removals = (
        masks_of(study, pieces),
        removed(pieces.found, study.sizes.ks, single_heads(study.model)),
    )
    said = (
        verdict(study, masks, pieces.found)
        if masks is not None and "audit" in pieces.found
        else None
    )
    page.write(
        pieces,
        {**study.about, "command": command, "missing": missing, "verdict": said},
        removals,
        out,
    )
    figures.write(study.pets, study.composites, masks, pieces.found, removals, out)
    raise typer.Exit(1 if missing else 0)


def load(real: Path, device: str) -> VisionModel:
    model = sc.load(NETWORK, weights=real / WEIGHTS, device=device)
    assert isinstance(model, VisionModel)
    return model


def single_heads(model: VisionModel) -> list[Heads]:
    return [
        ((layer, head),) for layer, block in enumerate(model.blocks) for head in range(block.heads)
    ]


def run(study: Study, pieces: Pieces) -> None:
    """Every piece, the cheapest and most wanted first. A removal is a piece by the heads that go,
    so no set is measured twice."""
    pieces.look()
    known = pieces.get("plain", partial(plain, study))
    pieces.get("composites", partial(of_composites, study))
    for start in range(0, len(study.pets), MASKED):
        pieces.get(f"masks {start}", partial(searched, study, slice(start, start + MASKED)))
    masks = masks_of(study, pieces)
    assert masks is not None
    pieces.get("audit", partial(audited, study, masks))
    bench = Bench.of(study, masks, pieces.found)
    pieces.get("nothing removed", partial(bench.without, [()]))

    def remove(sets: list[Heads]) -> None:
        for heads in sets:
            if heads not in bench.known:
                pieces.get(f"without {spelled(heads)}", partial(bench.without, [heads]))

    sizes = set[int]()
    for name, make in scorers(study, masks, known).items():
        piece = f"scores, {name}"
        scored = methods({piece: pieces.get(piece, partial(records, make))})
        sets = [best(record, k) for record in scored.values() for k in study.sizes.ks]
        remove(sets)
        sizes |= {len(heads) for heads in sets if heads}
        for size in sorted(
            sizes
        ):  # as many as are really removed: heads with scores of 0 or less stay
            pieces.get(
                f"random {size}",
                partial(
                    bench.without,
                    random_sets(study.model, size, draws=study.sizes.draws, seed=study.seed),
                ),
            )
    remove(single_heads(study.model))


if __name__ == "__main__":
    typer.run(main)
