"""The steps of `heads_study.py`: pictures, an audit of the whole model, scores by every method, and
the model without heads."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from scripts.head_methods import (
    FORCED,
    GREY,
    PRINTED,
    as_scores,
    cigma,
    contrastive_gating,
    controls,
    forced,
)
from seecause import critters
from seecause.heads import (
    HeadScores,
    Masks,
    discover_masks,
    first_order,
    greedy,
    information_gains,
    interchange,
    iou,
    mediated,
    penalised,
    protected,
    regress,
    score,
    select,
)  # fmt: skip
from seecause.heads.erase import Erasure
from seecause.heads.outcomes import logits_without, outcomes
from seecause.heads.pictures import Pictures, critter_pictures, logits_of
from seecause.metrics import group_accuracy, rank_correlation
from seecause.models.view import VisionModel

GATING = {"fits": 5, "batch": 32}
Row = dict[str, Any]


class Clock(Protocol):
    """What a study is to its steps."""

    sizes: Any

    def timed(self, what: str) -> AbstractContextManager[None]: ...
    def fast(self) -> AbstractContextManager[None]: ...


def cases(
    model: VisionModel,
    regime: str,
    split: str,
    count: int,
    *,
    start: int = 0,
    mat: bool = False,
    swaps: bool = True,
) -> Pictures:
    latents = critters.draw(regime, split, count, start=start, device=model.device)
    return critter_pictures(
        model,
        latents.on_mat(mat) if mat else latents,
        name=f"critters:{regime}:{split}",
        swaps=swaps,
    )


def about(model: VisionModel, measured: Pictures, steps: int) -> tuple[Row, list[Erasure]]:
    """What an audit says of the whole model, and the looks it used."""
    found = discover_masks(model, measured.images, steps=steps)
    looks = [
        Erasure(found, "mean"),
        Erasure(measured.oracle, "mean"),
        Erasure(measured.oracle, "grey"),
        Erasure(None, measured.swapped),
    ]  # type: ignore[arg-type]
    gains = {
        look.name: information_gains(model, measured.images, look.masks, baseline=look.baseline)
        for look in looks
    }
    assert measured.truth is not None and measured.swapped is not None
    flips = logits_of(model, measured.swapped.background).argmax(dim=1) != logits_of(
        model, measured.images
    ).argmax(dim=1)
    row: Row = {
        "IoU": float(iou(found, measured.truth).nanmean()),
        "flips": float(flips.double().mean()),
    }
    for name, one in gains.items():
        row |= {
            f"BIR, {name}": one.bir_ratio_of_means,
            f"BIR (mean of ratios), {name}": one.bir_mean_of_ratios,
            f"BIG, {name}": float(one.big.mean()),
        }
    return row, looks


def selections(
    study: Clock, model: VisionModel, train: Pictures, balanced: Pictures, masks: Masks, most: int
) -> dict[str, HeadScores]:
    """Scores of every method, on the same pictures."""
    truth, swap, images, labels, sizes = (
        train.oracle,
        train.swapped,
        train.images,
        train.labels,
        study.sizes,
    )
    assert truth is not None and swap is not None and labels is not None
    given = {"target": labels}
    with study.timed("cigma scores"):
        looks = {
            PRINTED: Erasure(masks, "mean"),
            "cigma, discovered masks, grey": Erasure(masks, "grey"),
            "cigma, true masks": Erasure(truth, "mean"),
            GREY: Erasure(truth, "grey"),
            "cigma, exact swap": Erasure(None, swap),
        }
        found = cigma(model, images, labels, looks)
    found[f"{GREY} + strict guard"] = protected(found[GREY])
    with study.timed("mean ablation, regression"):
        found["mean ablation, true masks, grey"] = penalised(
            score(model, images, truth, baseline="grey", operator="mean", **given)
        )
        found["regression, true masks, grey"] = regress(
            model, images, truth, baseline="grey", draws=sizes.regression_draws, **given
        )
    with study.timed("greedy"):
        picked = greedy(model, images, truth, top=most, rule=penalised, baseline="grey", **given)
        found["greedy, true masks, grey"] = as_scores(model, picked.heads)
    with study.timed("controls"):
        found |= controls(model, images, labels, truth)
    with study.timed("gating"), study.fast():
        found |= gating(model, train, balanced, sizes.gating_steps)
    with study.timed("interchange"):
        gold = interchange(model, images, swap)
        assert gold.foreground is not None
        found["interchange (gold)"] = HeadScores(gold.background, gold.background_error)
        found["interchange, background less object"] = HeadScores(gold.background - gold.foreground)
    return found


def gating(
    model: VisionModel, train: Pictures, balanced: Pictures, steps: int
) -> dict[str, HeadScores]:
    """Causal Head Gating on biased labels, on balanced ones, and contrastive: keep the object's
    pictures, suppress the background's.

    Each twice: only heads that it calls interfering may go, and "forced", where the most
    interfering go whatever they are called.
    """
    options: dict[str, Any] = {**GATING, "steps": steps}
    assert train.labels is not None and balanced.labels is not None and train.truth is not None
    found = {
        "gating, biased labels": select("gating", model, train.images, train.labels, **options),
        "gating, balanced labels": select(
            "gating", model, balanced.images, balanced.labels, **options
        ),
        "gating, contrastive": contrastive_gating(
            model, train.images, train.labels, train.truth == 1, **options
        ),
    }
    return found | {name + FORCED: forced(one) for name, one in found.items()}


def measure(
    model: VisionModel,
    sets: list[Any],
    val: Pictures,
    test: Pictures,
    iid: Pictures,
    measured: Pictures,
    looks: list[Erasure],
) -> list[Row]:
    """Numbers of the model without each set of heads."""
    rows = [{"removed": len(heads)} for heads in sets]
    for name, some in (("val", val), ("test", test), ("iid", iid)):
        answers = torch.cat(
            [
                logits_without(model, part, sets).argmax(dim=-1).cpu()
                for part in some.images.split(512)
            ],
            dim=1,
        )  # [S, N]
        assert some.labels is not None
        right = answers == some.labels.cpu()
        for row, one in zip(rows, right, strict=True):
            row[f"{name} accuracy"] = float(one.double().mean())
            if name != "iid":
                row[f"{name} worst group"] = group_accuracy(one, some.groups).worst
    for row, one in zip(rows, outcomes(model, measured, sets, looks), strict=True):
        row |= {
            "flips": one.flips,
            **{key: value for key, value in one.numbers().items() if key.startswith("BIR")},
        }
        row["FIG, exact swap"] = float(one.gains["exact swap"].fig.mean())
    return rows


def agreement(
    model: VisionModel, train: Pictures, one: HeadScores, found: dict[str, HeadScores]
) -> Row:
    """How like the gold score a method's ranking is, and how much of the background's effect passes
    through its four best heads."""
    gold, value = found["interchange (gold)"].value, one.value.nan_to_num(neginf=-1e9)
    assert train.swapped is not None
    few = slice(0, 64)
    through = mediated(model, train.images[few], train.swapped.background[few], one.top(4))
    guarded = found["cigma, exact swap"]
    harmed = protected(guarded).value == -torch.inf
    top = one.top(4)
    costly = sum(bool(harmed[head]) for head in top) / len(top) if top else float("nan")
    return {
        "Spearman with gold": float(
            rank_correlation(value.flatten()[None], gold.flatten()[None])[0]
        ),
        "mediated by top 4": through,
        "costly among top 4": costly,
        "costly among all": float(harmed.double().mean()),
        "top 8": " ".join(f"{layer}.{head}" for layer, head in one.top(min(8, one.value.numel()))),
    }


def screen_facts(model: VisionModel, train: Pictures, found: dict[str, HeadScores]) -> Row:
    """Recall of the exact top 4 among the 16 likeliest heads of the first-order guess (H4)."""
    row: Row = {"heads": model.n_layers * model.n_heads}
    for name, masks, baseline in (
        ("grey", train.oracle, "grey"),
        ("exact swap", None, train.swapped),
    ):
        guess = first_order(model, train.images, masks, baseline=baseline)  # type: ignore[arg-type]
        exact = set(
            found[GREY if name == "grey" else "cigma, exact swap"].order(positive=False)[:4]
        )
        row[f"recall at 16, {name}"] = len(exact & set(guess.order(positive=False)[:16])) / 4
    return row


def gold_facts(found: dict[str, HeadScores]) -> Row:
    """How concentrated the background's effect is (H5)."""
    values = found["interchange (gold)"].value.flatten().sort().values
    place = torch.arange(1, len(values) + 1)
    return {
        "Gini": float(
            (2 * place - len(values) - 1).double() @ values / (len(values) * values.sum())
        )
    }
