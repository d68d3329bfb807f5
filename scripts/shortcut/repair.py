"""What can be done to a fine-tuned model without training it again, for `evidence_shortcut.py`.

    whole              the model as it is
    dfr                a new last layer, fitted on validation pictures with their groups (Kirichenko
    et al. 2023)
    printed            CIGMA as printed: discovered masks, the mean colour outside them, no guard
    guarded            CIGMA with true masks, grey outside, and the guard
    random, printed    as many random heads as `printed` removes, mean over draws; none where it
    removes none
    random, guarded    as many as `guarded` removes
    random, chosen     a random order instead of CIGMA's, with the same choice of none or its first
    1, 2, 4, 8; mean over orders

Heads are scored on training pictures that are answered right. How many go is decided on validation
pictures: worst group first, then average, then the fewest heads; none is allowed.
"""

from __future__ import annotations

import statistics
from typing import Any

from torch import Tensor

from scripts.shortcut.data import Pictures
from scripts.shortcut.measure import Row, fast, measure
from seecause.heads import (
    Head,
    HeadScores,
    answered_right,
    discover_masks,
    iou,
    penalised,
    random_sets,
    retrain_last_layer,
    score,
)
from seecause.heads import (
    Pictures as Photos,
)
from seecause.heads.outcomes import logits_without
from seecause.heads.pictures import logits_of
from seecause.models.view import VisionModel

KS = (1, 2, 4, 8)
DFR: dict[str, Any] = {"refits": 20}


def repairs(
    model: VisionModel,
    seed: int,
    train: Pictures,
    val: Pictures,
    test: Pictures,
    *,
    mask_steps: int,
    scored: int,
    draws: int,
) -> Row:
    """Every repair's numbers on validation and test pictures, beside those of the model as it
    is."""
    images = {"val": _seen(model, val), "test": _seen(model, test)}
    pictures = {"val": val, "test": test}
    found: Row = {}
    retrained = retrain_last_layer(model, images["val"], val.labels, val.groups, seed=seed, **DFR)
    found["dfr"] = {
        name: measure(logits_of(retrained, images[name]), pictures[name]) for name in pictures
    }

    cases = Photos(
        "train",
        tuple(map(str, train.photos.tolist())),
        _seen(model, train),
        train.labels,
        train.masks,
    )
    cases = answered_right(model, cases, share=0.4, cap=scored, seed=seed)
    assert cases.labels is not None and cases.truth is not None
    masks = discover_masks(model, cases.images, steps=mask_steps)
    scores = {
        "printed": score(
            model, cases.images, masks, baseline="mean", target=cases.labels, guard=False
        ),
        "guarded": penalised(
            score(model, cases.images, cases.truth, baseline="grey", target=cases.labels)
        ),
    }
    found["scored"] = {"pictures": len(cases), "iou": float(iou(masks, cases.truth).nanmean())}
    found["positive"] = {name: len(one.order()) for name, one in scores.items()}

    ks = [k for k in KS if k <= model.n_layers * model.n_heads]
    wanted = {(name, k): one.top(k) for name, one in scores.items() for k in ks}
    lots = [
        heads for nested in random_orders(model, ks, draws=draws, seed=seed) for heads in nested
    ]
    without = _outcomes(model, [[], *wanted.values(), *lots], images, pictures)
    whole, chosen, drawn = (
        without[0],
        dict(zip(wanted, without[1:], strict=False)),
        without[1 + len(wanted) :],
    )
    found["whole"] = whole
    for name, one in scores.items():
        found[name] = best([whole, *(chosen[name, k] for k in ks)])
        found[name]["every"] = {str(k): chosen[name, k]["test"]["worst"] for k in ks}
        found[name]["order"] = _words(one, max(ks))
        many = len(found[name]["heads"])
        found[f"random, {name}"] = _over(
            _outcomes(
                model, random_sets(model, many, draws=draws, seed=seed + 1000), images, pictures
            )
            if many
            else [whole]
        )
    found["random, chosen"] = _over(
        [best([whole, *drawn[start : start + len(ks)]]) for start in range(0, len(drawn), len(ks))]
    )
    return found


def random_orders(
    model: VisionModel, ks: list[int], *, draws: int, seed: int
) -> list[list[list[Head]]]:
    """For each of `draws` orders of all heads, its first k for every k: as many candidates as an
    order by score has."""
    sizes = [
        random_sets(model, k, draws=draws, seed=seed) for k in ks
    ]  # the same draw is the same order, whatever k
    return [list(nested) for nested in zip(*sizes, strict=True)]


def best(outcomes: list[Row]) -> Row:
    """By worst group on validation pictures, then average, then the fewest heads; the first of
    equals."""
    return dict(
        max(
            outcomes,
            key=lambda one: (one["val"]["worst"], one["val"]["average"], -len(one["heads"])),
        )
    )


def _outcomes(
    model: VisionModel,
    sets: list[list[Head]],
    images: dict[str, Tensor],
    pictures: dict[str, Pictures],
) -> list[Row]:
    rows: list[Row] = [{"heads": [list(head) for head in heads]} for heads in sets]
    for name, some in images.items():
        with fast(model.device):
            answers = logits_without(model, some, sets)
        for row, logits in zip(rows, answers, strict=True):
            row[name] = measure(logits, pictures[name])
    return rows


def _over(rows: list[Row]) -> Row:
    """The mean of several outcomes, with the worst group of each on test pictures and how many
    heads each lost."""
    each: Row = {
        "worst": [row["test"]["worst"] for row in rows],
        "removed": [len(row["heads"]) for row in rows],
    }
    return {**each, **{name: _mean([row[name] for row in rows]) for name in ("val", "test")}}


def _mean(rows: list[Row]) -> Row:
    found: Row = {
        name: statistics.fmean(row[name] for row in rows) for name in ("average", "worst", "flips")
    }
    return {
        **found,
        "groups": [
            statistics.fmean(values)
            for values in zip(*(row["groups"] for row in rows), strict=True)
        ],
    }


def _seen(model: VisionModel, pictures: Pictures) -> Tensor:
    return model.preprocess.normalise(pictures.images.float() / 255).to(model.device, model.dtype)


def _words(scores: HeadScores, count: int) -> str:
    return " ".join(f"{layer}.{head}" for layer, head in scores.top(count))
