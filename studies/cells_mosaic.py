"""Cells about mosaic: on a real model that was fine-tuned, on pictures without one cell of a coarse
grid, to name the breeds of pets, so that single deletions are nothing strange to it (IDSDS, arXiv
2407.11910); with a class token, and with an average over tokens."""

from __future__ import annotations

from typing import Any

import timm
import torch
import torch.nn.functional as F
from cells_attribution import BATCH, Row, _rows, _scores, explained, named
from torch import Tensor

import seecause as sc
from seecause.bench.study import StudyContext
from seecause.heads.pictures import logits_of
from seecause.metrics._pixels import spread_out

CELLS = 4  # deleted ones are of CELLS x CELLS
DECAY, HEAD_RATE = 0.05, 20  # the new last layer learns so many times faster


def in_domain(
    context: StudyContext,
    *,
    model: str,
    weights: str,
    data: str,
    pool: str,
    variants: list[str | Row],
    curves: Row,
    epochs: int = 12,
    rate: float = 5e-5,
    count: int | None = None,
    limit: int | None = None,
) -> list[Row]:
    """Insertion less deletion, IDSDS and place of maps of the fine-tuned model, by its label."""
    view = new_head(context, model, weights, data, pool)
    train = sc.heads.read_pictures(view, context.data(f"{data}:trainval", limit))
    _train(view.module.requires_grad_(True).train(), train.images, train.labels, epochs, rate)
    view.module.eval().requires_grad_(False)
    context.fingerprints[view.name] = view.fingerprint()
    cases = sc.heads.read_pictures(view, context.data(f"{data}:test", limit or count))
    right = logits_of(view, cases.images).argmax(dim=1) == cases.labels
    rows: list[Row] = []
    for variant in variants:
        name, asked = named(variant)
        for places in torch.arange(len(cases)).split(BATCH):
            some = cases.take(places)
            maps, _ = explained(view, some.images, some.labels, asked)
            columns = _scores(view, some, some.labels, maps, curves)
            columns["right"] = right[places.to(right.device)]
            rows += _rows(some, columns, method=name)
    return rows


def new_head(context: StudyContext, model: str, weights: str, data: str, pool: str) -> Any:
    """A view of the model with a new last layer for the breeds, which reads the class token or the
    average over tokens."""
    start = sc.load(model, weights=weights)
    known = sc.data.open_data(f"{data}:trainval").classes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
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


def _train(module: Any, images: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    """AdamW under half a cosine; mirrored pictures, and half of them without a random cell."""
    head = {id(p) for p in module.get_classifier().parameters()}
    groups = [
        {"params": [p for p in module.parameters() if id(p) not in head], "lr": rate},
        {"params": list(module.get_classifier().parameters()), "lr": HEAD_RATE * rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY)
    batch, draw = min(64, len(images)), torch.Generator().manual_seed(0)
    steps = epochs * max(1, len(images) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randperm(len(images), generator=draw)[:batch].to(images.device)
        turned = (torch.rand(batch, generator=draw) < 0.5).to(images.device)
        gone = F.one_hot(torch.randint(2 * CELLS**2, (batch,), generator=draw), 2 * CELLS**2)
        cells = gone[:, : CELLS**2].bool().unflatten(1, (CELLS, CELLS)).to(images.device)
        seen = torch.where(turned[:, None, None, None], images[rows].flip(-1), images[rows])
        seen = seen.masked_fill(spread_out(cells, seen.shape[-2:])[:, None], 0)
        with torch.autocast(
            images.device.type, dtype=torch.bfloat16, enabled=images.device.type == "cuda"
        ):
            loss = F.cross_entropy(module(seen), labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
