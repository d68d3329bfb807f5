"""What `faithful_study.py` trains, in which order, and what decides a result: its digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seecause.critters import REGIMES, Regime
from seecause.critters.train.ifam_recipe import IfamRecipe, Pretraining
from seecause.faithful import LossWeights

Result = dict[str, Any]

BASE = IfamRecipe("study", pretraining_samples=409_600, samples=122_880, epochs=30)
SEEDS = (0, 1, 2)
SHAPING_OFF = LossWeights(
    presence=0, background=0, total_variation=0, entropy=0, equivariance=0, orthogonality=0
)
NO_STAGE_1 = dataclasses.replace(BASE.weights, class1=0)
ERM, PDISCO, EARLY, WHOLE, IFAM4 = (
    "ERM ViT",
    "PDiscoFormer, K = 4",
    "early mask, ground truth",
    "early mask, ground truth, whole patches",
    "iFAM, K = 4",
)
NO_PATH = "no straight-through gradient"
MAIN: dict[str, dict[str, Any]] = {
    ERM: {"reads": "everything"},
    PDISCO: {"options": {"stages": 1}},
    EARLY: {"reads": "creature"},
    WHOLE: {"reads": "creature", "covered": 1.0},
    IFAM4: {},
    "iFAM, K = 1": {"parts": 1},
    "iFAM, K = 8": {"parts": 8},
}
ABLATIONS: dict[str, dict[str, Any]] = {
    NO_PATH: {"options": {"gradient": "none"}},
    "soft masks": {"options": {"gradient": "soft"}},
    "no stage-1 loss": {"weights": NO_STAGE_1},
    "stage 2 frozen": {"options": {"freeze": "both"}},
    "no shaping, K = 1": {"parts": 1, "weights": SHAPING_OFF},
    "backbone: DINO": {"pretraining": "dino"},
    "stage-2 part dropout 0": {"options": {"part_dropout2": 0.0}},
    "stage-2 part dropout 0.1": {"options": {"part_dropout2": 0.1}},
    "stage-2 part dropout 0.5": {"options": {"part_dropout2": 0.5}},
    "background loss at the paper's weight 2": {"weights": LossWeights()},
    "stage 1 trained whole": {"options": {"freeze": "none"}},
    "ERM ViT, from scratch": {"reads": "everything", "pretraining": "none"},
}
ROWS = {**MAIN, **ABLATIONS}
CHANGEABLE = (
    PDISCO,
    "iFAM, K = 1",
    IFAM4,
    "iFAM, K = 8",
)  # rows that are tried with interventions too
RATES = (
    (5e-4, 1.0),
    (2e-4, 1.0),
    (1e-3, 1.0),
)  # learning rate and factor of the head, tried for ERM
RELIABILITIES = (0.95, 0.97, 0.99)  # of the background of `simplicity`
FAILS = 0.9  # worst-group accuracy on validation, mean over seeds, below which ERM is said to fail
TEST, VAL, CALIBRATION, QUICK = 4096, 2048, 2048, 64  # pictures


@dataclass(frozen=True)
class Training:
    """One row, one regime, one seed."""

    row: str
    regime: str
    seed: int

    @property
    def recipe(self) -> IfamRecipe:
        return dataclasses.replace(
            BASE, regime=regime_of(self.regime), seed=self.seed, **ROWS[self.row]
        )

    @property
    def file(self) -> str:
        word = "".join(c if c.isalnum() else "-" for c in self.row.lower())
        return f"{self.regime}_{word}_{self.seed}.json"

    def digest(self, device: str, *, quick: bool = False) -> str:
        """Of everything that decides the result: recipe, rates, numbers of pictures, interventions,
        kind of device."""
        recipe, rates = (
            sized(self.recipe, quick),
            (RATES if self.recipe.reads == "everything" else ()),
        )
        return digest(
            recipe=dataclasses.asdict(recipe),
            rates=rates,
            pictures=pictures(quick),
            changed=self.row in CHANGEABLE,
            device=kind(device),
        )


def backbone_recipe(pretraining: Pretraining, seed: int, *, quick: bool = False) -> IfamRecipe:
    """Of what all rows of a seed start from."""
    return sized(dataclasses.replace(BASE, seed=seed, pretraining=pretraining), quick)


def pictures(quick: bool) -> tuple[int, int, int]:
    """Of test, validation and calibration."""
    return (QUICK, QUICK, QUICK) if quick else (TEST, VAL, CALIBRATION)


def sized(recipe: IfamRecipe, quick: bool) -> IfamRecipe:
    if not quick:
        return recipe
    shape = recipe.architecture | {"img_size": 48, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return dataclasses.replace(
        recipe,
        architecture=shape,
        pretraining_samples=32,
        pretraining_batch=16,
        samples=32,
        batch=16,
        epochs=2,
    )


def digest(**decides: Any) -> str:
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def kind(device: str) -> str:
    """`cuda:1` is a `cuda`."""
    return device.partition(":")[0]


def simplicity(reliability: float) -> str:
    return f"simplicity {reliability:g}"


def regime_of(name: str) -> Regime:
    """`certified`, or `simplicity` and how reliable its background is."""
    law, _, reliability = name.partition(" ")
    return (
        dataclasses.replace(REGIMES[law], background_reliability=float(reliability))
        if reliability
        else REGIMES[law]
    )


def first_plan() -> list[Training]:
    """ERM on everything."""
    return [
        Training(ERM, regime, seed)
        for regime in (*map(simplicity, RELIABILITIES), "certified")
        for seed in SEEDS
    ]


def second_plan(regime: str) -> list[Training]:
    """Most important first: the main rows on both regimes, whether the straight-through gradient
    helps, other K, then ablations seed by seed."""
    first, others, ablations = (
        list(MAIN)[1:5],
        list(MAIN)[5:],
        [row for row in ABLATIONS if row != NO_PATH],
    )
    main, more = (
        [
            Training(row, where, seed)
            for where in (regime, "certified")
            for seed in SEEDS
            for row in rows
        ]
        for rows in (first, others)
    )
    return [
        *main,
        *(Training(NO_PATH, regime, seed) for seed in SEEDS),
        *more,
        *(Training(row, regime, seed) for seed in SEEDS for row in ablations),
    ]


def where_erm_fails(results: Sequence[Result]) -> str:
    """The least reliable `simplicity` at which ERM fails on validation pictures; the most reliable
    if it fails nowhere."""
    for regime in map(simplicity, RELIABILITIES):
        found = seeds(results, ERM, regime)
        if (
            len(found) == len(SEEDS)
            and statistics.mean(result["val"]["worst"] for result in found) < FAILS
        ):
            return regime
    return simplicity(RELIABILITIES[-1])


def seeds(results: Sequence[Result], row: str, regime: str) -> list[Result]:
    return [result for result in results if result["row"] == row and result["regime"] == regime]


def fits(result: Result, device: str, *, quick: bool = False, accept_old: bool = False) -> bool:
    """Whether a result was made as it would be made now. `accept_old` takes one without a digest at
    its word."""
    if result["row"] not in ROWS or result["quick"] != quick:
        return False
    job = Training(result["row"], result["regime"], result["seed"])
    return result["digest"] == job.digest(device, quick=quick) if "digest" in result else accept_old


def read_results(work: Path) -> dict[str, Result]:
    """By file name."""
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(work.glob("*.json"))
    }
