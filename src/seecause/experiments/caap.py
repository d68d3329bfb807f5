"""Causal Attribution via Activation Patching (CAAP): its variants, and other methods on Critters.

caap               every reading of CAAP on 512 test images of `clean` (docs/results/caap.md)
methods-critters   every method on 256 of them, or 64 where a map takes thousands of forward passes
                   (docs/results/methods-critters.md)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from seecause.attribution.attribute import attribute
from seecause.data.batch import to_batch
from seecause.data.dataset import evenly, open_data
from seecause.experiments.base import Row, experiment
from seecause.loading import load
from seecause.metrics import MetricInputs, measure

BATCH = 50
CURVES = {"order": "patch", "steps": 16}
VALUES = {
    "insertion": "higher",
    "deletion": "lower",
    "ins-del": "higher",
    "idsds": "higher",
    "aupr1": "higher",
    "aupr0": "higher",
    "pointing": "higher",
    "ms": "lower",
}
READINGS: dict[str, dict[str, Any]] = {
    "caap, source": {"tail": "source"},
    "caap, source, from block 1": {"tail": "source", "layers": [1, None]},
    "caap, patched": {"tail": "patched"},
    "caap, blank": {"tail": "blank"},
    "caap, all": {"tail": "all"},
    "caap, source, logit": {"tail": "source", "score": "logit"},
    "caap, patched, from block 1": {"tail": "patched", "layers": [1, None]},
    "e-caap": {"approx": "e-caap"},
    "e-caap as printed": {"approx": "e-caap-printed"},
    "caap, source, delete": {"tail": "source", "direction": "delete"},
}
BESIDE = ("simple-insertion", "simple-deletion", "random", "center", "sobel")
CHEAP = (
    "caap", "mosaic", "caap+mosaic", "atman", "attcat", "attn-grad", "bt", "center", "gae",
    "grad-cam", "integrated-gradients", "ixg", "ixg+", "legrad", "libra-ixg+", "mutex", "random",
    "raw-attention", "rollout", "simple-deletion", "simple-insertion", "smoothgrad", "sobel",
    "t-attr", "tam", "vit-cx",
)  # fmt: skip
EXPENSIVE = ("mda", "rise", "tis")


def cell(name: str, method: str, options: dict[str, Any], count: int | None) -> dict[str, Any]:
    return {"method": name, "asked": {"method": method, **options}, "count": count}


@experiment(
    "caap",
    question="Which reading of CAAP is right, and how well does it find the object?",
    cells=[
        *(cell(name, "caap", options, None) for name, options in READINGS.items()),
        *(cell(name, name, {}, None) for name in BESIDE),
    ],
    by="method",
    values=VALUES,
    against="caap, source",
)
@experiment(
    "methods-critters",
    question="How does every attribution method score on the embedded model?",
    cells=[
        *(cell(name, name, {}, 256) for name in CHEAP),
        *(cell(name, name, {}, 64) for name in EXPENSIVE),
    ],
    by="method",
    values=VALUES,
    against="caap",
)
def scored(
    *, method: str, asked: dict[str, Any], count: int | None, limit: int | None, device: str
) -> list[Row]:
    """Insertion, deletion, single deletions and localization of one method on critters-vit, and
    milliseconds for a map. `count` images are drawn with seed 0, the same for all methods."""
    if "layers" in asked:
        asked = {**asked, "layers": tuple(asked["layers"])}
    model, data = load("builtin:critters-vit", device=device), open_data("critters:clean:test")
    rows: list[Row] = []
    for chunk in torch.tensor(chosen(len(data), count, limit)).split(BATCH):
        samples = [data[place] for place in chunk.tolist()]
        batch = to_batch(model, samples)
        began = time.perf_counter()
        found = attribute(model, batch.images, batch.labels, **asked)
        spent = 1000 * (time.perf_counter() - began) / len(samples)
        maps = found.maps if found.native is None else found.native
        inputs = MetricInputs(model, batch.images, maps, batch.labels, batch.masks)
        columns = {
            **measure("insertion-deletion", inputs, **CURVES),
            **measure("idsds", inputs),
            **measure("localization", inputs),
        }
        numbers = {name: columns[name].tolist() for name in VALUES if name in columns}
        for place, sample in enumerate(samples):
            row = {name: values[place] for name, values in numbers.items()}
            rows.append({"image": sample.id, **row, "ms": spent})
    return rows


def chosen(total: int, count: int | None, limit: int | None) -> Sequence[int]:
    """Indices of `count` images, drawn with seed 0; with a limit, evenly spread ones of these."""
    drawn = list(range(total))
    if count is not None and count < total:
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
        drawn = sorted(order[:count].tolist())
    return evenly(drawn, limit)
