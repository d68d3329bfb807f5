"""Cells about the ways to make coefficients of heads and image tokens: how near are few masks with
derivatives to a fit of many, and do they find heads that are known to matter?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cells_lvlm import SUBJECT, Case, draw_cases, engine_of, opened
from scipy.stats import spearmanr

from seecause.bench.lvlm_study import seed_of
from seecause.bench.study import Row, StudyContext
from seecause.critters import wordings
from seecause.lvlm import (
    MaskEngine,
    attribute_heads,
    attribute_tokens,
    calibration_critters,
    first_crossing,
    load,
    make_bank,
    text_effects,
    wrap,
)
from seecause.lvlm.fit import correlation
from seecause.lvlm.trace import rows_of
from seecause.models.decoder import restrict

WAYS = {
    "derivative": (8, 32, 64, 128),
    "corrected": (200, 400, 1000),
    "fit": (100, 300, 1000, 3000),
}
CHOSEN = 8  # pictures that settings of the derivative were chosen on
TOP = 8


def ways(
    context: StudyContext, *, model: str, part: int, parts: int, count: int, truth_masks: int,
    floor: float,
) -> list[Row]:  # fmt: skip
    """Each way to make coefficients, of heads and of image tokens, against a fit to many masks."""
    lvlm, bank = opened(model, context.device)
    rows: list[Row] = []
    for case, _ in draw_cases(CHOSEN + count)[CHOSEN:][part::parts]:
        engine = engine_of(lvlm, bank, case, floor)
        if isinstance(engine, str):
            rows.append({"picture": case.index, "left_out": engine})
            continue
        truth = attribute_heads(engine, seed=case.index)
        chosen = truth.mask(first_crossing(engine, truth.order()))
        text = rows_of(text_effects(engine, chosen).deltas)
        asks = {
            "heads": partial(attribute_heads, engine),
            "tokens": partial(attribute_tokens, engine, chosen, text),
        }
        for kind, ask in asks.items():
            made = each_way(kind, ask, truth_masks, seed_of(f"ways {case.index}"))
            rows += [{"picture": case.index, **row} for row in made]
    return rows


def each_way(kind: str, ask: Callable[..., Any], truth_masks: int, seed: int) -> list[Row]:
    """Against many masks of one seed, few of another."""
    whole, rows = ask(how="fit", masks=truth_masks, seed=seed), []
    for how, counts in WAYS.items():
        for masks in counts:
            if how == "fit" and 0.8 * masks <= whole.coefficients.numel():
                continue  # fewer masks than coefficients
            made = ask(how=how, masks=masks, seed=seed + 1)
            rows.append({"kind": kind, "how": how, "masks": masks, **compared(made, whole)})
    return rows


def compared(made: Any, whole: Any) -> Row:
    """How near coefficients are to those of many masks."""
    ours, theirs = (x.coefficients.flatten().double() for x in (made, whole))
    best = [set(x.topk(TOP).indices.tolist()) for x in (ours, theirs)]
    return {
        "pearson": correlation(ours, theirs),
        "spearman": float(spearmanr(ours, theirs).statistic),
        "shared top": len(best[0] & best[1]) / TOP,
        "distance": float((ours - theirs).square().mean().sqrt()),
        "error": float(made.standard_error.square().mean().sqrt()),
    }


def restricted(
    context: StudyContext, *, model: str, count: int, readers: int, few_masks: int
) -> list[Row]:
    """The trained model with text reading the picture through a few heads only, other heads for
    each picture: are these the largest?"""
    rows: list[Row] = []
    for case, _ in draw_cases(CHOSEN + count)[CHOSEN:]:
        lvlm, bank, places = restricted_model(model, context.device, readers, case)
        engine = MaskEngine(lvlm, case.picture, wordings(SUBJECT)[0], bank, floor=None)
        for how, masks in (("derivative", few_masks), ("fit", 10 * engine.n_components)):
            made = attribute_heads(engine, how=how, masks=masks, seed=seed_of(f"few {case.index}"))
            largest = made.coefficients.abs().flatten().topk(readers).indices.tolist()
            top = {divmod(place, lvlm.n_heads) for place in largest}
            row = {"picture": case.index, "how": how, "masks": masks, "span": engine.span}
            rows.append({**row, "found": len(top & set(places)) / readers})
    return rows


def restricted_model(
    model: str, device: str, readers: int, case: Case
) -> tuple[Any, Any, list[tuple[int, int]]]:
    """A copy of the model with so many readers, drawn by the picture's number, and its bank."""
    whole = load(model, device=device, dtype="float64", check=False)
    span = whole.prompt(case.picture, wordings(SUBJECT)[0]).image
    lot = torch.Generator().manual_seed(case.index)
    drawn = torch.randperm(whole.n_layers * whole.n_heads, generator=lot)[:readers].tolist()
    places = [divmod(place, whole.n_heads) for place in drawn]
    config = whole.module.config.text_config
    config.image_readers, config.image_span = [list(p) for p in places], [span.start, span.stop]
    lvlm = wrap(restrict(whole.module), whole.processor, check=False)
    return lvlm, make_bank(lvlm, calibration_critters(16)), places
