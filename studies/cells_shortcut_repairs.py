"""Cells about a shortcut on real photos, continued: repairs of what `cells_shortcut` fine-tuned."""

from __future__ import annotations

import statistics
from typing import Any

from cells_shortcut import (
    Setting,
    best_setting,
    frame,
    measured,
    open_pictures,
    row_of,
    tuned_module,
)
from torch import Tensor

import seecause as sc
from seecause.bench.study import Row, StudyContext
from seecause.data.painted import SPECIES, PaintedPictures
from seecause.heads import Pictures, penalised, score
from seecause.heads._outcomes import logits_without
from seecause.heads.pictures import logits_of

DFR = "DFR: ERM with a new last layer"
PRINTED, GUARDED = "CIGMA as printed", "CIGMA, true masks, guard"
KS = (1, 2, 4, 8)  # heads that go


def repaired(
    context: StudyContext,
    *,
    data: str,
    seed: int,
    setup: Row,
    limit: int | None = None,
    earlier: dict[str, list[Row]],
) -> list[Row]:
    """What can be done to a fine-tuned model without training it again: a new last layer (DFR),
    heads removed (CIGMA), random heads removed.

    Heads are scored on training pictures that are answered right. How many go is decided on
    validation pictures: worst group, average, the fewest heads; none is allowed.
    """
    job = Setting("erm", seed, **best_setting(earlier, "erm"))
    sets = open_pictures(data, seed, setup["size"], limit, context.device)
    module = tuned_module(context, job, setup, sets)
    model = sc.wrap(module, name=f"fine-tuned {seed}", classes=SPECIES, preprocess=frame(setup))
    train, val, test = sets
    seen = {"val": (val, _seen(model, val)), "test": (test, _seen(model, test))}
    new = sc.heads.retrain_last_layer(
        model, seen["val"][1], val.labels, val.groups, seed=seed, refits=20
    )
    dfr = {name: measured(logits_of(new, images), some) for name, (some, images) in seen.items()}
    rows = [row_of(dfr["val"], dfr["test"], method=DFR, removed=0)]
    scores = _cigma(model, seed, train, setup)
    ks = [k for k in KS if k <= model.n_layers * model.n_heads]
    whole = outcomes(model, [[]], seen)[0]
    for name, one in scores.items():
        best = choose([whole, *outcomes(model, [one.top(k) for k in ks], seen)])
        rows.append({**best, "method": f"ERM without heads: {name}"})
        many, draws = best["removed"], setup["draws"]
        lots = sc.heads.random_sets(model, many, draws=draws, seed=seed + 1000) if many else [[]]
        rows.append(
            {
                **mean_row(outcomes(model, lots, seen)),
                "method": f"ERM without as many random heads as {name}",
            }
        )
    by_k = [sc.heads.random_sets(model, k, draws=setup["draws"], seed=seed) for k in ks]
    orders = [outcomes(model, list(nested), seen) for nested in zip(*by_k, strict=True)]
    lot = mean_row([choose([whole, *order]) for order in orders])
    return [*rows, {**lot, "method": "ERM without heads: a random order, chosen like CIGMA"}]


def _cigma(model: Any, seed: int, train: PaintedPictures, setup: Row) -> dict[str, Any]:
    """As printed (discovered masks, the mean colour outside, no guard), and guarded (true masks,
    grey, guard)."""
    ids = tuple(map(str, train.photos.tolist()))
    cases = Pictures("train", ids, _seen(model, train), train.labels, train.masks)
    cases = sc.heads.answered_right(model, cases, share=0.4, cap=setup["scored"], seed=seed)
    masks = sc.heads.discover_masks(model, cases.images, steps=setup["mask_steps"])
    own = {"target": cases.labels}
    printed = score(model, cases.images, masks, baseline="mean", guard=False, **own)
    guarded = score(model, cases.images, cases.truth, baseline="grey", **own)
    return {PRINTED: printed, GUARDED: penalised(guarded)}


def outcomes(
    model: Any, sets: list[Any], seen: dict[str, tuple[PaintedPictures, Tensor]]
) -> list[Row]:
    """The model without each set of heads."""
    logits = {name: logits_without(model, images, sets) for name, (_, images) in seen.items()}
    rows = []
    for place, heads in enumerate(sets):
        each = (measured(logits[name][place], seen[name][0]) for name in ("val", "test"))
        rows.append(row_of(*each, removed=len(heads)))
    return rows


def choose(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: (row["val worst"], row["val average"], -row["removed"]))


def mean_row(rows: list[Row]) -> Row:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def _seen(model: Any, pictures: PaintedPictures) -> Tensor:
    images = model.preprocess.normalise(pictures.images.float() / 255)
    return images.to(model.device, model.dtype)
