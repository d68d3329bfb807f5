"""Which attention heads answer from the background, and what happens without them (CIGMA)."""

from __future__ import annotations

from seecause.heads.ablate import ablate
from seecause.heads.audit import Audit, audit
from seecause.heads.cases import Cases, gather, right_ones
from seecause.heads.divprune import divprune
from seecause.heads.erase import Swapped
from seecause.heads.export import export
from seecause.heads.gains import Gains, information_gains
from seecause.heads.gating import Gating, head_gates
from seecause.heads.greedy import Greedy, additivity, greedy, joint_effect
from seecause.heads.guard import above_noise, penalised, protected
from seecause.heads.interchange import Interchange, interchange, mediated
from seecause.heads.masks import Masks, discover_masks, iou
from seecause.heads.prune import prune
from seecause.heads.random_heads import random_sets
from seecause.heads.registry import select, selectors
from seecause.heads.regression import regress
from seecause.heads.removal import Curve, Look, Outcome, curve, outcomes
from seecause.heads.result import Head, HeadScores
from seecause.heads.retrain import retrain
from seecause.heads.score import score
from seecause.heads.screen import Screened, first_order, screen

__all__ = [
    "Audit",
    "Cases",
    "Curve",
    "Gains",
    "Gating",
    "Greedy",
    "Head",
    "HeadScores",
    "Interchange",
    "Look",
    "Masks",
    "Outcome",
    "Screened",
    "Swapped",
    "ablate",
    "above_noise",
    "additivity",
    "audit",
    "curve",
    "discover_masks",
    "divprune",
    "export",
    "first_order",
    "gather",
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
    "random_sets",
    "regress",
    "retrain",
    "right_ones",
    "score",
    "screen",
    "select",
    "selectors",
]
