"""Methods that explain pixels, scored on patches too: a second opinion on equal terms with the
methods that explain patches.

A finished part keeps the patch map of every method (sums or means of its pixels), so only the
metrics are taken again: upsampled bilinearly, like the maps of all other methods. Each file of
scores is named by the shards that its maps come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from scripts.attribution_parts import PIXELS, Done
from scripts.tables import Values
from seecause._files import write_atomic
from seecause.bench.measures import group_of, run_group
from seecause.bench.work import read_samples
from seecause.data.batch import Batch, to_batch
from seecause.engine.chunks import budget
from seecause.metrics import MetricInputs, metrics
from seecause.models.base import ImageModel


@dataclass(frozen=True)
class Patched:
    """Scores [photos of the part] by method and metric of what is done, and how many files of
    scores are not."""

    values: Values
    missing: int = 0


def score_patches(
    done: Done, model: ImageModel, enough: Callable[[], object], *, answers: bool = True
) -> None:
    """The scores that are not there yet, of methods that are finished. `answers=False`: only what
    needs no answer of the model."""
    batch: Batch | None = None
    for method in _pixel_methods(done):
        todo = [
            group
            for group in done.plan.request.measures
            if not _file(done, method, group).is_file()
        ]
        todo = [group for group in todo if answers or "model" not in metrics()[group].takes]
        if not todo or method not in done.finished():
            continue
        maps = done.store.maps(done.plan)[method]
        samples, _ = read_samples(done.part.data, 0, len(done.part.data))
        for group in todo:
            if enough():
                return
            batch = batch or to_batch(model, list(samples.values()))
            found = _scored(
                done, model, batch, torch.stack([maps[index] for index in samples]), group
            )
            whole = {
                metric: spread(values, list(samples), len(done.part.data))
                for metric, values in found.items()
            }
            _file(done, method, group).parent.mkdir(exist_ok=True)
            write_atomic(_file(done, method, group), save(whole))


def read_patches(done: Done) -> Patched:
    """What `score_patches` wrote of this plan."""
    found: Values = {}
    missing = 0
    for method in _pixel_methods(done):
        for group in done.plan.request.measures:
            file = _file(done, method, group)
            if file.is_file():
                read = load_file(file)
                found.setdefault(method, {}).update(
                    {
                        metric: read[metric]
                        for metric in done.plan.request.metrics
                        if group_of(metric) == group
                    }
                )
            else:
                missing += 1
    return Patched(found, missing)


def _pixel_methods(done: Done) -> list[str]:
    return [method for method in done.plan.request.methods if method in PIXELS]


def _scored(
    done: Done, model: ImageModel, batch: Batch, maps: Tensor, group: str
) -> dict[str, Tensor]:
    assert batch.labels is not None
    target = torch.tensor(done.plan.places, device=batch.labels.device)[batch.labels]
    with budget(done.plan.request.memory):
        given = MetricInputs(model, batch.images, maps.to(model.device), target, batch.masks)
        return run_group(group, given, done.plan.request.measures[group]).values


def spread(values: Tensor, places: list[int], count: int) -> Tensor:
    """Values of readable photos among all, [count]; NaN for the others."""
    return torch.full((count,), torch.nan, dtype=torch.float64).index_copy(
        0, torch.tensor(places), values.cpu().double()
    )


def _file(done: Done, method: str, group: str) -> Path:
    shards = "".join(shard.id for shard in done.plan.shards if shard.method == method)
    return (
        done.store.folder
        / "patches"
        / f"{method}-{group}-{hashlib.sha256(shards.encode()).hexdigest()[:16]}.safetensors"
    )
