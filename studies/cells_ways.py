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
    causal_scores,
    first_crossing,
    load,
    make_bank,
    text_effects,
    wrap,
)
from seecause.lvlm.fit import correlation
from seecause.lvlm.masks import How
from seecause.lvlm.trace import rows_of
from seecause.models.decoder import restrict

WAYS = {
    "derivative": (8, 32, 64, 128),
    "corrected": (200, 400, 1000),
    "fit": (100, 300, 1000, 3000),
}
FEW_MASKS: tuple[tuple[How, int], ...] = (("derivative", 8), ("derivative", 64))
CHOSEN = 8  # pictures that settings of the derivative were chosen on
TOP = 8


def ways(
    context: StudyContext, *, model: str, kind: str, part: int, parts: int, truth_masks: int,
    floor: float,
) -> list[Row]:  # fmt: skip
    """Each way to make coefficients, of heads or image tokens, against a fit to many masks, on one
    of `parts` pictures."""
    lvlm, bank = opened(model, context.device)
    case, _ = draw_cases(CHOSEN + parts)[CHOSEN + part]
    engine = engine_of(lvlm, bank, case, floor)
    if isinstance(engine, str):
        return [{"picture": case.index, "left_out": engine}]
    ask: Callable[..., Any] = partial(attribute_heads, engine)
    if kind == "tokens":
        truth = attribute_heads(engine, seed=case.index)
        chosen = truth.mask(first_crossing(engine, truth.order()))
        ask = partial(
            attribute_tokens, engine, chosen, rows_of(text_effects(engine, chosen).deltas)
        )
    made = each_way(ask, truth_masks, seed_of(f"ways {case.index}"))
    return [{"picture": case.index, **row} for row in made]


def each_way(ask: Callable[..., Any], truth_masks: int, seed: int) -> list[Row]:
    """Against many masks of one seed, few of another."""
    whole, rows = ask(how="fit", masks=truth_masks, seed=seed), []
    for how, counts in WAYS.items():
        for masks in counts:
            if how == "fit" and 0.8 * masks <= whole.coefficients.numel():
                continue  # fewer masks than coefficients
            made = ask(how=how, masks=masks, seed=seed + 1)
            rows.append({"how": how, "masks": masks, **compared(made, whole)})
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
    context: StudyContext, *, model: str, part: int, parts: int, readers: int, few_masks: int
) -> list[Row]:
    """The trained model with text reading the picture through a few heads only, other heads for
    each picture: are these the largest?"""
    case, _ = draw_cases(CHOSEN + parts)[CHOSEN + part]
    lvlm, bank, places = restricted_model(model, context.device, readers, case)
    engine = MaskEngine(lvlm, case.picture, wordings(SUBJECT)[0], bank, floor=None)
    rows: list[Row] = []
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


def planted(
    context: StudyContext, *, model: str, part: int, parts: int, planted_masks: int
) -> list[Row]:
    """The variant that was trained with text reading the picture through a few known heads only:
    what the others do, and whether the largest coefficients are those of the known ones."""
    (lvlm, bank), (exact, exact_bank) = (
        opened(model, context.device, dtype) for dtype in ("float32", "float64")
    )
    readers = [tuple(place) for place in lvlm.module.config.text_config.image_readers]
    case, _ = draw_cases(CHOSEN + parts)[CHOSEN + part]
    question = wordings(SUBJECT)[0]
    engine = MaskEngine(lvlm, case.picture, question, bank, floor=None)
    target = [engine.target]
    twin = MaskEngine(exact, case.picture, question, exact_bank, answer=target, floor=None)
    single, double = (causal_scores(one).abs() for one in (engine, twin))
    effects = {place: float(double[place]) for place in readers}
    for place in readers:
        single[place] = double[place] = 0
    most = {"outside": float(single.max()), "outside in float64": float(double.max())}
    seed, rows = seed_of(f"planted {case.index}"), []
    for how, masks in (*FEW_MASKS, ("fit", planted_masks)):
        sizes = attribute_heads(engine, how=how, masks=masks, seed=seed).coefficients.abs()
        top = {divmod(p, lvlm.n_heads) for p in sizes.flatten().topk(len(readers)).indices.tolist()}
        for place in readers:
            row = {"head": f"{place[0]}.{place[1]}", "effect": effects[place], **most}
            row |= {"picture": f"{case.index} {row['head']}", "how": how, "masks": masks}
            rows.append({**row, "span": engine.span, "found": float(place in top)})
    return rows
