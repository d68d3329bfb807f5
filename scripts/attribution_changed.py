"""Kept maps, changed and placed again: would other methods find the object better without their
signs, or smoothed?

AUPR ranks signed values, so evidence against the class counts as background; |map| leaves the sign
out. CAAP moves a patch together with its eight neighbours (box1), which smooths its maps; the mean
over the same neighbours does that to any map. A finished part keeps the patch map of every method,
and localization needs no model. Each file of scores is named by the shards that its maps come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from scripts.attribution_parts import PIXELS, Done
from scripts.attribution_patches import Patched, spread
from seecause._files import write_atomic
from seecause.attribution.select import selection
from seecause.bench.work import read_samples
from seecause.data.batch import to_batch
from seecause.metrics import localization
from seecause.models.base import ImageModel

ALONE = "none"  # the setting of CAAP that moves each patch by itself
MOST = 0.5  # share of a method's maps that must have both signs for it to be a signed method
WITHOUT = "caap without neighbours"  # what that setting is called beside other methods
PATCHES, ABSOLUTE, SMOOTHED = "patches", "absolute", "smoothed"
PLACE = ("aupr1", "aupr0", "pointing")
BOTH = f"{ABSOLUTE}, {SMOOTHED}"


def smoothed(maps: Tensor) -> Tensor:
    """The mean over each patch and its neighbours within the grid, as CAAP's box1 selects them.
    Maps [B, gh, gw]."""
    box = selection((maps.shape[1], maps.shape[2]), "box1").double()
    return (maps.double().flatten(1) @ (box / box.sum(dim=1, keepdim=True)).T).view(maps.shape)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    PATCHES: lambda maps: maps,
    ABSOLUTE: torch.abs,
    SMOOTHED: smoothed,
    BOTH: lambda maps: smoothed(maps.abs()),
}


def changes(method: str, maps: Tensor) -> list[str]:
    """What is asked of a method with such maps [B, gh, gw]: maps of pixels on patches, signed maps
    without signs, and all smoothed."""
    signed = bool(
        ((maps.amin(dim=(1, 2)) < 0) & (maps.amax(dim=(1, 2)) > 0)).double().mean() >= MOST
    )
    return [*[PATCHES] * (method in PIXELS), *[ABSOLUTE] * signed, SMOOTHED, *[BOTH] * signed]


def score_changed(done: Done, model: ImageModel, enough: Callable[[], object]) -> None:
    """The scores that are not there yet, of methods that are finished."""
    todo = {
        (method, change): file
        for (method, change), file in _files(done).items()
        if not file.is_file()
    }
    if not todo or enough():
        return
    samples, _ = read_samples(done.part.data, 0, len(done.part.data))
    masks, kept = to_batch(model, list(samples.values())).masks, done.store.maps(done.plan)
    assert masks is not None
    for (method, change), file in todo.items():
        if enough():
            return
        maps = CHANGES[change](torch.stack([kept[method][index] for index in samples])).to(
            model.device
        )
        placed = localization(maps, masks, **done.plan.request.measures["localization"])
        file.parent.mkdir(exist_ok=True)
        write_atomic(
            file,
            save(
                {
                    name: spread(getattr(placed, name), list(samples), len(done.part.data))
                    for name in PLACE
                }
            ),
        )


def read_changed(done: Done) -> Patched:
    """What `score_changed` wrote of this plan, by `method, change`."""
    files = {f"{method}, {change}": file for (method, change), file in _files(done).items()}
    found = {name: load_file(file) for name, file in files.items() if file.is_file()}
    return Patched(found, len(files) - len(found))


def _files(done: Done) -> dict[tuple[str, str], Path]:
    """Where the scores of each method and change are kept, where there are masks: of all methods of
    a table, and of CAAP without neighbours."""
    request, found = done.plan.request, {}
    if "localization" not in request.measures or request.study not in ("", "select"):
        return {}
    kept = done.store.maps(done.plan)
    for method in done.finished():
        if kept[method] and (not request.study or method == ALONE):
            shards = "".join(shard.id for shard in done.plan.shards if shard.method == method)
            digest = hashlib.sha256(shards.encode()).hexdigest()[:16]
            for change in changes(method, torch.stack(list(kept[method].values()))):
                found[method, change] = (
                    done.store.folder
                    / "changed"
                    / f"{method}-{change.replace(', ', '-')}-{digest}.safetensors"
                )
    return found
