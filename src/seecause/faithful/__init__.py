"""A classifier that cannot look elsewhere: iFAM, its losses, and what can be changed at test
time."""

from __future__ import annotations

from seecause.faithful.checkpoint import load
from seecause.faithful.config import TrainConfig, read_config
from seecause.faithful.evaluation import (
    Evaluation,
    TrainedNetwork,
    evaluate,
    evaluate_intervention,
    example_parts,
    open_network,
    part_examples,
)
from seecause.faithful.interventions import LeaveOneOut, calibrate, intervene, leave_one_out
from seecause.faithful.losses import Affine, LossWeights, objective, parameter_groups
from seecause.faithful.net import IFAM, IFAMOptions, IFAMOutput, Intervention, Thresholds
from seecause.faithful.parts import Noise
from seecause.faithful.run import open_run
from seecause.faithful.training import TrainResult, train

__all__ = [
    "IFAM",
    "Affine",
    "Evaluation",
    "IFAMOptions",
    "IFAMOutput",
    "Intervention",
    "LeaveOneOut",
    "LossWeights",
    "Noise",
    "Thresholds",
    "TrainConfig",
    "TrainResult",
    "TrainedNetwork",
    "calibrate",
    "evaluate",
    "evaluate_intervention",
    "example_parts",
    "intervene",
    "leave_one_out",
    "load",
    "objective",
    "open_network",
    "open_run",
    "parameter_groups",
    "part_examples",
    "read_config",
    "train",
]
