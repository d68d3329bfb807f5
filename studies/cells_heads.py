"""Cells about heads on Critters: does each way to choose them find those that read the background,
and does removing them help?

Heads are scored on training pictures that are answered right; how many go is chosen on balanced
validation pictures (`chosen`); numbers are those of balanced test pictures.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import seecause as sc
from seecause import critters
from seecause.bench.study import Row, StudyContext
from seecause.errors import DataMissing
from seecause.background import Erasure, HeadScores, Masks, penalised, protected, score, select
from seecause.background._outcomes import logits_without, outcomes
from seecause.background.erase import erase
from seecause.background.images import Pictures, critter_pictures
from seecause.metrics import group_accuracy, rank_correlation
from seecause.models.sources import saved

PRINTED, GREY, SWAP = "cigma as printed", "cigma, true masks, grey", "cigma, exact swap"
GUARD, GOLD = " + guard", "interchange (gold)"
ERM, DFR, RANDOM = "none (ERM)", "retrained last layer (DFR)", "random"
AS_MANY = "random, as many as some method removed"  # where that is no K: scores of 0 or less stay
CONTROLS = {name.replace("-", " "): name for name in (
    "weight-norm", "output-norm", "taylor", "attention-mass", "loss-gain", "loss-change",
)}  # fmt: skip


def cigma(
    model: Any, images: Tensor, labels: Tensor, looks: Mapping[str, Erasure], **options: Any
) -> dict[str, HeadScores]:
    """CIGMA by every look, as it is and less what the foreground loses."""
    scores = {}
    for name, look in looks.items():
        options |= {"baseline": look.baseline, "target": labels}
        scores[name] = score(model, images, look.masks, **options)
        scores[name + GUARD] = penalised(scores[name])
    return scores


def controls(model: Any, images: Tensor, labels: Tensor, masks: Masks) -> dict[str, HeadScores]:
    """Norms and attention on the background (the largest go first), Taylor importance (the
    smallest), and loss differences."""
    own = {"attention-mass": {"masks": masks}}
    return {
        name: select(by, model, images, labels, **own.get(by, {})) for name, by in CONTROLS.items()
    }


def contrastive_gating(
    model: Any, images: Tensor, labels: Tensor, objects: Tensor, **options: Any
) -> HeadScores:
    """Causal Head Gating that keeps answers to objects [N, H, W] and suppresses those to
    backgrounds, on grey."""
    shown, hidden = erase(model, images, objects, "grey")
    return select("gating", model, shown, labels, suppress=(hidden, labels), **options)


def selections(
    model: Any, train: Pictures, balanced: Pictures, masks: Masks, *, top: int, gating: Row,
    draws: int,
) -> dict[str, HeadScores]:  # fmt: skip
    """Scores of every method, on the same pictures; greedy ones stop at `top` heads."""
    truth, swap, images, labels = train.oracle, train.swapped, train.images, train.labels
    looks = {
        PRINTED: Erasure(masks, "mean"),
        "cigma, discovered masks, grey": Erasure(masks, "grey"),
        "cigma, true masks": Erasure(truth, "mean"),
        GREY: Erasure(truth, "grey"),
        SWAP: Erasure(None, swap),
    }
    scores = cigma(model, images, labels, looks)
    scores[f"{GREY} + strict guard"] = protected(scores[GREY])
    grey = {"baseline": "grey", "target": labels}
    scores["mean ablation, true masks, grey"] = penalised(
        score(model, images, truth, operator="mean", **grey)
    )
    scores["regression, true masks, grey"] = sc.background.regress(
        model, images, truth, draws=draws, **grey
    )
    picked = sc.background.greedy(model, images, truth, top=top, rule=penalised, **grey)
    scores["greedy, true masks, grey"] = as_scores(model, picked.heads)
    scores |= controls(model, images, labels, truth)
    gates = {
        "gating, biased labels": select("gating", model, images, labels, **gating),
        "gating, balanced labels": select(
            "gating", model, balanced.images, balanced.labels, **gating
        ),
        "gating, contrastive": contrastive_gating(
            model, images, labels, train.truth == 1, **gating
        ),
    }
    scores |= gates
    for name, scored in gates.items():  # as many go as are asked for, whatever the heads are called
        scores[f"{name}, forced"] = replace(scored, value=scored.after["interference"])
    gold = sc.background.interchange(model, images, swap)
    scores[GOLD] = HeadScores(gold.background, gold.background_error)
    less = gold.background - gold.foreground
    return scores | {"interchange, background less object": HeadScores(less)}


def as_scores(model: Any, heads: list[tuple[int, int]]) -> HeadScores:
    """An order of heads as scores: the first gets the most."""
    value = torch.zeros(model.n_layers, model.n_heads, dtype=torch.float64)
    for place, head in enumerate(heads):
        value[head] = len(heads) - place
    return HeadScores(value)


def scenes(model: Any, regime: str, split: str, count: int, *, start: int = 0, mat: bool = False,
           swaps: bool = True) -> Pictures:  # fmt: skip
    latents = critters.draw(regime, split, count, start=start, device=model.device)
    return critter_pictures(
        model, latents.on_mat(mat) if mat else latents, name=regime, swaps=swaps
    )


def open_model(context: StudyContext, model: str) -> Any:
    """A builtin model, or one that `seecause zoo train --out` wrote: FOLDER/NAME."""
    if model.startswith("builtin:"):
        return context.load(model)
    card = next(Path(model).parent.rglob(f"{Path(model).name}.json"), None)
    if card is None:
        raise DataMissing(model, "no such model", "make it by `seecause zoo train --out`")
    source = saved(card.parent, card.stem)
    return sc.wrap(source.module.to(context.device), name=card.stem, **source.wrap_options)


def audit(context: StudyContext, *, model: str, measured: int, mask_steps: int) -> list[Row]:
    """What an audit says of a whole model, trained at any reliability of the background."""
    view = open_model(context, model)
    row, _ = audited(view, scenes(view, "balanced", "test", measured), mask_steps)
    return [{"model": view.name, **row}]


def audited(model: Any, cases: Pictures, steps: int) -> tuple[Row, list[Erasure]]:
    found = sc.background.heads_audit(model, cases, steps=steps)
    names = ("discovered masks, mean", "true masks, mean", "true masks, grey", "exact swap")
    row: Row = {"IoU": float(found.overlap.nanmean()), "flips": float(found.flips.double().mean())}
    for name in names:
        row[f"BIR, {name}"] = found.gains[name].bir_ratio_of_means
        row[f"BIG, {name}"] = float(found.gains[name].big.mean())
    return row, [found.erasures[name] for name in names]


def removals(
    context: StudyContext,
    *,
    model: str,
    seed: int,
    scored: int,
    measured: int,
    val: int,
    test: int,
    iid: int,
    retrained: int,
    draws: int,
    mask_steps: int,
    ks: list[int],
    gating: Row,
    regression_draws: int,
) -> list[Row]:
    """Every method on one model: agreement with the gold score, and the model without its heads."""
    torch.backends.cudnn.allow_tf32 = False  # it would round the patch embedding
    view = open_model(context, model)
    train = sc.background.answered_right(
        view, scenes(view, "certified", "train", 4 * scored), share=0.4, cap=scored
    )
    plain = [("balanced", "train", scored), ("balanced", "val", val), ("balanced", "test", test),
             ("certified", "test", iid)]  # fmt: skip
    balanced, *seen = [scenes(view, *kind, swaps=False) for kind in plain]
    seen.append(scenes(view, "balanced", "test", measured))
    masks = sc.background.discover_masks(view, train.images, steps=mask_steps)
    row, looks = audited(view, seen[-1], mask_steps)
    options = {"top": max(ks), "gating": gating, "draws": regression_draws}
    scores = selections(view, train, balanced, masks, **options)
    rows = [{"table": "audit", **row, **_screened(view, train, scores)}]
    rows += [
        {"table": "ranking", "method": name, **agreement(view, train, one, scores)}
        for name, one in scores.items()
    ]
    wanted = {
        (name, k): tuple(sorted(one.top(min(k, one.value.numel()))))
        for name, one in scores.items()
        for k in ks
    }
    sets = list(dict.fromkeys([(), *wanted.values()]))
    by_set = dict(zip(sets, without(view, sets, seen, looks), strict=True))
    rows += [{"method": name, "K": k, **by_set[heads]} for (name, k), heads in wanted.items()]
    rows.append({"method": ERM, "K": 0, **by_set[()]})
    for size in sorted({len(heads) for heads in sets} | set(ks) - {0}):
        lots = sc.background.random_sets(view, size, draws=draws, seed=seed) if size else []
        name = RANDOM if size in ks else AS_MANY
        drawn = without(view, lots, seen, looks) if lots else []
        rows += [{"method": name, "K": size, "draw": i, **one} for i, one in enumerate(drawn)]
    held = scenes(view, "balanced", "val", retrained, start=8192, swaps=False)
    strengths = (1.0, 0.3, 0.1, 0.03, 0.01)
    new = sc.background.retrain_last_layer(
        view, held.images, held.labels, torch.tensor(held.groups), refits=5, strengths=strengths
    )
    rows.append({"method": DFR, "K": 0, **without(new, [()], seen, looks)[0]})
    return [{"table": "removal", **one} for one in rows]


def without(
    model: Any, sets: Sequence[Any], seen: Sequence[Pictures], looks: list[Erasure]
) -> list[Row]:
    """Numbers of the model without each set of heads."""
    rows: list[Row] = [{"removed": len(heads)} for heads in sets]
    *plain, measured = seen
    for name, cases in zip(("val", "test", "iid"), plain, strict=True):
        parts = [logits_without(model, part, sets) for part in cases.images.split(512)]
        right = torch.cat(parts, dim=1).argmax(dim=-1).cpu() == cases.labels.cpu()  # [S, N]
        for row, one in zip(rows, right, strict=True):
            row[f"{name} accuracy"] = float(one.double().mean())
            if name != "iid":
                row[f"{name} worst group"] = group_accuracy(one, cases.groups).worst
    for row, one in zip(rows, outcomes(model, measured, list(sets), looks), strict=True):
        row["flips"] = one.flips
        row |= {name: v for name, v in one.numbers().items() if name.startswith("BIR")}
        row["FIG, exact swap"] = float(one.gains["exact swap"].fig.mean())
    return rows


def agreement(model: Any, train: Pictures, one: HeadScores, scores: dict[str, HeadScores]) -> Row:
    """How like the gold score a ranking is, what share of the background's effect passes through
    its four best heads, and how many of them are costly."""
    gold, value, top = scores[GOLD].value, one.value.nan_to_num(neginf=-1e9), one.top(4)
    pair = (train.images[:64], train.swapped.background[:64])
    harmed = protected(scores[SWAP]).value == -torch.inf
    return {
        "Spearman with gold": float(
            rank_correlation(value.flatten()[None], gold.flatten()[None])[0]
        ),
        "mediated by top 4": sc.background.mediated(model, *pair, top),
        "costly among top 4": sum(bool(harmed[head]) for head in top) / len(top) if top else None,
        "top 8": " ".join(f"{layer}.{head}" for layer, head in one.top(min(8, one.value.numel()))),
    }


def _screened(model: Any, train: Pictures, scores: dict[str, HeadScores]) -> Row:
    """Recall of the exact top 4 among the first 16 of the first-order guess; Gini of the gold."""
    row: Row = {}
    for name, masks, fill in ((GREY, train.oracle, "grey"), (SWAP, None, train.swapped)):
        guess = sc.background.first_order(model, train.images, masks, baseline=fill)
        exact = set(scores[name].order(positive=False)[:4])
        row[f"recall at 16, {name}"] = len(exact & set(guess.order(positive=False)[:16])) / 4
    values = scores[GOLD].value.flatten().sort().values
    place = torch.arange(1, len(values) + 1)
    weights = (2 * place - len(values) - 1).double()
    return row | {"Gini": float(weights @ values / (len(values) * values.sum()))}


def planted(
    context: StudyContext, *, model: str, scored: int, measured: int, mask_steps: int,
    ks: list[int], gating: Row, regression_draws: int,
) -> list[Row]:  # fmt: skip
    """A model whose background heads are known: does each method find them, and what if they go?"""
    view = open_model(context, model)
    roles: dict[tuple[int, int], str] = view.module.roles
    train = sc.background.answered_right(
        view, scenes(view, "matted", "train", 4 * scored), share=0.4, cap=scored
    )
    balanced = scenes(view, "balanced", "train", scored, mat=True)
    masks = sc.background.discover_masks(view, train.images, steps=mask_steps)
    options = {"top": max(ks), "gating": gating, "draws": regression_draws}
    scores = selections(view, train, balanced, masks, **options)
    truth, rows = [role == "background" for role in roles.values()], []
    for name, one in scores.items():
        values = one.value.nan_to_num(neginf=-1e9)
        found = float(roc_auc_score(truth, [float(values[head]) for head in roles]))
        rows.append({"table": "planted", "method": name, "AUROC": found})
    known = [head for head, role in roles.items() if role == "background"]
    test = scenes(view, "balanced", "test", measured, mat=True)
    both = torch.cat([test.images, test.swapped.background])
    for method, heads in ((ERM, []), ("planted heads", known)):
        logits = logits_without(view, both, [heads])[0].unflatten(0, (2, -1))
        right = (logits[0].argmax(dim=1) == test.labels).double().mean()
        moved = float((logits[0] - logits[1]).abs().max())
        row = {"method": method, "removed": len(heads), "test accuracy": float(right)}
        rows.append({"table": "planted", **row, "largest difference": moved})
    return rows


def chosen(context: StudyContext, *, earlier: dict[str, list[Row]]) -> list[Row]:
    """For each seed and method, the K that is best on validation pictures (worst group, accuracy,
    fewest heads; none is allowed), beside as many random heads."""
    every = [row for row in earlier["removals"] if row["table"] == "removal" and "K" in row]
    rows = []
    for seed in dict.fromkeys(row["seed"] for row in every):
        mine = [row for row in every if row["seed"] == seed]
        none = next(row for row in mine if row["method"] == ERM)
        for name in dict.fromkeys(row["method"] for row in mine):
            own = averaged([row for row in mine if row["method"] == name])
            best = choose(own if name in (ERM, DFR) else [none, *own])
            lots = [row for row in mine if row["removed"] == best["removed"]]
            lots = [row for row in lots if row["method"] in (RANDOM, AS_MANY)] or [none]
            row = {**best, "table": "chosen", "method": name}
            for key in ("test worst group", "test accuracy"):
                row[f"{key}, as many at random"] = statistics.fmean(lot[key] for lot in lots)
            rows.append(row)
    return rows


def choose(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: (row["val worst group"], row["val accuracy"], -row["K"]))


def averaged(rows: Sequence[Row]) -> list[Row]:
    """One row for each K: means over the draws that have a number."""
    table = []
    for k in sorted({row["K"] for row in rows}):
        same = [row for row in rows if row["K"] == k]
        numbers = [name for name, value in same[0].items() if isinstance(value, int | float)]
        means = {n: statistics.fmean(row[n] for row in same if n in row) for n in numbers}
        table.append({**same[0], **means, "K": k})
    return table
