"""Which attention heads answer from the background, and what happens without them (CIGMA)."""

from __future__ import annotations

from seecause.heads.audit import Audit, audit
from seecause.heads.baselines import divprune, retrain_last_layer
from seecause.heads.cigma import (
    Screened,
    Screening,
    above_noise,
    first_order,
    penalised,
    protected,
    screen,
)
from seecause.heads.erase import Erasure, Masks, Swapped
from seecause.heads.export import export
from seecause.heads.gains import Gains, information_gains
from seecause.heads.gating import Gating, head_gates
from seecause.heads.interchange import Interchange, interchange, mediated
from seecause.heads.joint import Greedy, additivity, greedy, joint_effect, regress
from seecause.heads.masks import discover_masks, iou
from seecause.heads.outcomes import Curve, Examples, Outcome, curve, examples, outcomes
from seecause.heads.pictures import AnswerSampling, Pictures, answered_right, read_pictures
from seecause.heads.prune import ablate, prune
from seecause.heads.prune_and_test import (
    Background,
    PruneResult,
    ScoredHeads,
    prune_and_test,
    score_heads,
)
from seecause.heads.registry import select, selectors
from seecause.heads.score import score
from seecause.heads.scores import Head, HeadScores
from seecause.heads.simple_selectors import random_sets
from seecause.heads.studies import StudyTable, ablation_study

__all__ = [
    "AnswerSampling",
    "Audit",
    "Background",
    "Curve",
    "Erasure",
    "Examples",
    "Gains",
    "Gating",
    "Greedy",
    "Head",
    "HeadScores",
    "Interchange",
    "Masks",
    "Outcome",
    "Pictures",
    "PruneResult",
    "ScoredHeads",
    "Screened",
    "Screening",
    "StudyTable",
    "Swapped",
    "ablate",
    "ablation_study",
    "above_noise",
    "additivity",
    "answered_right",
    "audit",
    "curve",
    "discover_masks",
    "divprune",
    "examples",
    "export",
    "first_order",
    "greedy",
    "head_gates",
    "information_gains",
    "interchange",
    "iou",
    "joint_effect",
    "mediated",
    "outcomes",
    "penalised",
    "protected",
    "prune",
    "prune_and_test",
    "random_sets",
    "read_pictures",
    "regress",
    "retrain_last_layer",
    "score",
    "score_heads",
    "screen",
    "select",
    "selectors",
]
