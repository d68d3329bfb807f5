"""A classifier that cannot look elsewhere: iFAM, its losses, and what can be changed at test
time."""

from __future__ import annotations

from seecause.faithful.config import TrainConfig, read_config
from seecause.faithful.equivariance import Affine
from seecause.faithful.interventions import LeaveOneOut, calibrate, intervene, leave_one_out
from seecause.faithful.loop import Trained, train
from seecause.faithful.net import IFAM
from seecause.faithful.noise import Noise
from seecause.faithful.objective import LossWeights, objective, parameter_groups
from seecause.faithful.output import IFAMOutput, Intervention, Thresholds
from seecause.faithful.save import load
from seecause.faithful.snapshot import open_run

__all__ = [
    "IFAM",
    "Affine",
    "IFAMOutput",
    "Intervention",
    "LeaveOneOut",
    "LossWeights",
    "Noise",
    "Thresholds",
    "TrainConfig",
    "Trained",
    "calibrate",
    "intervene",
    "leave_one_out",
    "load",
    "objective",
    "open_run",
    "parameter_groups",
    "read_config",
    "train",
]
