"""Cells about mosaic: on a real model that was fine-tuned, on pictures without one cell of a coarse
grid, to name the breeds of pets, so that single deletions are nothing strange to it (IDSDS, arXiv
2407.11910); with a class token, and with an average over tokens. And in whose order the sets of
`sc.evidence` are smallest."""

from __future__ import annotations

from math import cos, pi
from typing import Any

import timm
import torch
import torch.nn.functional as F
from cells_attribution import BATCH, Row, _rows, _scores, explained, named, pictures
from torch import Tensor
from training import descend, trained_once, with_faster_head

import seecause as sc
from seecause.bench.study import StudyContext
from seecause.critters.train import half, seeded
from seecause.background.images import logits_of
from seecause.metrics._pixels import spread_out

CELLS = 4  # deleted ones are of CELLS x CELLS
EPOCHS, RATE = 12, 5e-5
HEAD_RATE = 20  # the new last layer learns so many times faster


def in_domain(
    context: StudyContext,
    *,
    model: str,
    weights: str,
    data: str,
    pool: str,
    variant: str | Row,
    curves: Row,
    count: int | None = None,
) -> list[Row]:
    """Insertion less deletion, IDSDS, place and sets of maps of the fine-tuned model, by label."""
    view = fine_tuned(context, model, weights, data, pool)
    cases = sc.background.read_pictures(view, context.data(f"{data}:test", context.limit or count))
    right = logits_of(view, cases.images).argmax(dim=1) == cases.labels
    name, asked = named(variant)
    rows: list[Row] = []
    for places in torch.arange(len(cases)).split(BATCH):
        some = cases.take(places)
        maps, patches = explained(view, some.images, some.labels, asked)
        columns = _scores(view, some, some.labels, maps, curves)
        columns |= set_sizes(view, some.images, some.labels, patches)
        columns["right"] = right[places.to(right.device)]
        rows += _rows(some, columns, method=name)
    return rows


def fine_tuned(context: StudyContext, model: str, weights: str, data: str, pool: str) -> Any:
    """The model with a new last layer, fine-tuned once for all processes of a run."""
    view = new_head(context, model, weights, data, pool)

    def train(module: Any) -> None:
        cases = sc.background.read_pictures(view, context.data(f"{data}:trainval", context.limit))
        _train(module, cases.images, cases.labels)

    key = [model, data, pool, EPOCHS, RATE]
    trained_once(context, f"tuned-{pool}", key, view.module, train).requires_grad_(False)
    context.fingerprints[view.name] = view.fingerprint()
    return view


def sets(
    context: StudyContext,
    *,
    model: str,
    weights: str,
    data: str,
    variant: str | Row,
    pool: str = "",
    first: int = 0,
    place: str = "",
) -> list[Row]:
    """How many patches are enough for the answer and how many must go, in the order of a map. With
    a `pool`, of the fine-tuned model, on photos from `first` on: those before may choose."""
    if pool:
        view = fine_tuned(context, model, weights, data, pool)
        cases = sc.background.read_pictures(view, context.data(f"{data}:test", context.limit))
        cases = cases.take(torch.arange(len(cases))[first if context.limit is None else 0 :])
    else:
        view, cases = pictures(context, model, data, None, weights)
    name, asked = named(variant)
    rows: list[Row] = []
    for places in torch.arange(len(cases)).split(BATCH):
        part = cases.take(places)
        _, patches = explained(view, part.images, part.labels, asked)
        rows += _rows(part, set_sizes(view, part.images, part.labels, patches), method=name)
    return rows


def complete(
    context: StudyContext, *, model: str, weights: str, data: str, steps: int
) -> list[Row]:
    """How far the sum of a path's map lies from the difference of the two scores, as a share of it,
    for the predicted class; and whether that is within 1 %."""
    view, cases = pictures(context, model, data, None, weights)
    rows: list[Row] = []
    for places in torch.arange(len(cases)).split(BATCH):
        some = cases.take(places)
        result = sc.attribute(view, some.images, method="mosaic", law="path", masks=steps)
        checks = result.manifest["checks"]
        gap, whole = (torch.tensor(checks[x]).abs() for x in ("completeness gap", "difference"))
        rows += _rows(some, {"gap": gap / whole, "complete": gap <= 0.01 * whole}, method="path")
    return rows


def set_sizes(view: Any, images: Tensor, labels: Tensor, maps: Tensor) -> dict[str, Tensor]:
    """Shares [B] of the patches that keep the answer and that break it; all where no set does, NaN
    for a wrong answer."""
    proof = sc.evidence(view, images, labels, maps=maps)
    total, shares = proof.maps[0].numel(), {}
    for name in ("enough", "needed"):
        part = getattr(proof, name)
        size = torch.where(part.exists, part.count, total).double() / total
        shares[name] = torch.where(proof.answered, size, torch.nan)
    return shares


def new_head(context: StudyContext, model: str, weights: str, data: str, pool: str) -> Any:
    """A view of the model with a new last layer for the breeds, which reads the class token or the
    average over tokens."""
    start = sc.load(model, weights=weights)
    known = sc.data.open_data(f"{data}:trainval").classes
    with seeded(0):
        module: Any = timm.create_model(
            model.partition(":")[2], num_classes=len(known), global_pool=pool
        )
    state = {n: t for n, t in start.module.state_dict().items() if not n.startswith("head.")}
    if pool == "avg":  # timm norms the average instead of the tokens
        state["fc_norm.weight"], state["fc_norm.bias"] = (
            state.pop(f"norm.{name}") for name in ("weight", "bias")
        )
    module.load_state_dict(state, strict=False)
    how = start.preprocess
    return sc.wrap(
        module.to(context.device), mean=how.mean, std=how.std, size=how.size, classes=known,
        name=f"{model} on pets, {pool}",
    )  # fmt: skip


def _train(module: Any, images: Tensor, labels: Tensor) -> None:
    """Under half a cosine; mirrored pictures, and half of them without a random cell."""
    batch, draw, device = min(64, len(images)), torch.Generator().manual_seed(0), images.device

    def loss(step: int) -> Tensor:
        rows = torch.randperm(len(images), generator=draw)[:batch].to(device)
        turned = (torch.rand(batch, generator=draw) < 0.5).to(device)
        gone = F.one_hot(torch.randint(2 * CELLS**2, (batch,), generator=draw), 2 * CELLS**2)
        cells = gone[:, : CELLS**2].bool().unflatten(1, (CELLS, CELLS)).to(device)
        seen = torch.where(turned[:, None, None, None], images[rows].flip(-1), images[rows])
        seen = seen.masked_fill(spread_out(cells, seen.shape[-2:])[:, None], 0)
        with half(device):
            return F.cross_entropy(module(seen), labels[rows])

    steps = EPOCHS * max(1, len(images) // batch)
    groups = with_faster_head(module, RATE, HEAD_RATE)
    descend(groups, steps, loss, share=lambda step, steps: (1 + cos(pi * step / steps)) / 2)
