"""Cells about mosaic: on a real model that was fine-tuned, on pictures without one cell of a coarse
grid, to name the breeds of pets, so that single deletions are nothing strange to it (IDSDS, arXiv
2407.11910); with a class token, and with an average over tokens. And in whose order the sets of
`sc.evidence` are smallest."""

from __future__ import annotations

import fcntl
from typing import Any

import timm
import torch
import torch.nn.functional as F
from cells_attribution import BATCH, Row, _rows, _scores, explained, named, pictures
from torch import Tensor

import seecause as sc
from seecause._files import digest_json
from seecause.bench.study import StudyContext
from seecause.heads.pictures import logits_of
from seecause.metrics._pixels import spread_out

CELLS = 4  # deleted ones are of CELLS x CELLS
EPOCHS, RATE = 12, 5e-5
DECAY, HEAD_RATE = 0.05, 20  # the new last layer learns so many times faster


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
    limit: int | None = None,
) -> list[Row]:
    """Insertion less deletion, IDSDS, place and sets of maps of the fine-tuned model, by label."""
    view = fine_tuned(context, model, weights, data, pool, limit)
    context.fingerprints[view.name] = view.fingerprint()
    cases = sc.heads.read_pictures(view, context.data(f"{data}:test", limit or count))
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


_tuned: dict[str, Any] = {}  # of this process


def fine_tuned(
    context: StudyContext, model: str, weights: str, data: str, pool: str, limit: int | None
) -> Any:
    """The model with a new last layer, fine-tuned. Trained once for all processes of a run."""
    key = digest_json([model, data, pool, limit, EPOCHS, RATE, context.device])
    if key in _tuned:
        return _tuned[key]
    view, file = new_head(context, model, weights, data, pool), context.work / f"tuned-{key}.pt"
    context.work.mkdir(parents=True, exist_ok=True)
    with (context.work / f"tuned-{pool}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.is_file():
            train = sc.heads.read_pictures(view, context.data(f"{data}:trainval", limit))
            _train(view.module.requires_grad_(True).train(), train.images, train.labels)
            torch.save(view.module.state_dict(), file)
    view.module.load_state_dict(torch.load(file, map_location=context.device, weights_only=True))
    view.module.eval().requires_grad_(False)
    _tuned[key] = view
    return view


def sets(
    context: StudyContext,
    *,
    model: str,
    weights: str,
    data: str,
    variant: str | Row,
    place: str,
    limit: int | None = None,
) -> list[Row]:
    """How many patches are enough for the answer and how many must go, in the order of a map."""
    view, cases = pictures(context, model, data, limit, None, weights)
    return _set_rows(view, cases, variant)


def _set_rows(view: Any, cases: Any, variant: str | Row) -> list[Row]:
    name, asked = named(variant)
    rows: list[Row] = []
    for places in torch.arange(len(cases)).split(BATCH):
        part = cases.take(places)
        _, patches = explained(view, part.images, part.labels, asked)
        rows += _rows(part, set_sizes(view, part.images, part.labels, patches), method=name)
    return rows


def complete(
    context: StudyContext,
    *,
    model: str,
    weights: str,
    data: str,
    steps: int,
    limit: int | None = None,
) -> list[Row]:
    """How far the sum of a path's map lies from the difference of the two scores, as a share of it,
    for the predicted class; and whether that is within 1 %."""
    view, cases = pictures(context, model, data, limit, None, weights)
    rows: list[Row] = []
    for places in torch.arange(len(cases)).split(BATCH):
        some = cases.take(places)
        result = sc.attribute(view, some.images, method="mosaic", law="path", masks=steps)
        checks = result.manifest["checks"]
        gap, whole = (torch.tensor(checks[x]).abs() for x in ("completeness gap", "difference"))
        rows += _rows(some, {"gap": gap / whole, "complete": gap <= 0.01 * whole}, method="path")
    return rows


def tuned_sets(
    context: StudyContext,
    *,
    model: str,
    weights: str,
    data: str,
    pool: str,
    variant: str | Row,
    first: int,
    limit: int | None = None,
) -> list[Row]:
    """The same of the fine-tuned model, on photos from `first` on: those before may choose."""
    view = fine_tuned(context, model, weights, data, pool, limit)
    cases = sc.heads.read_pictures(view, context.data(f"{data}:test", limit))
    reported = torch.arange(len(cases))[first if limit is None else 0 :]
    return _set_rows(view, cases.take(reported), variant)


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


def _train(module: Any, images: Tensor, labels: Tensor) -> None:
    """AdamW under half a cosine; mirrored pictures, and half of them without a random cell."""
    head = {id(p) for p in module.get_classifier().parameters()}
    groups = [
        {"params": [p for p in module.parameters() if id(p) not in head], "lr": RATE},
        {"params": list(module.get_classifier().parameters()), "lr": HEAD_RATE * RATE},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY)
    batch, draw = min(64, len(images)), torch.Generator().manual_seed(0)
    steps = EPOCHS * max(1, len(images) // batch)
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
