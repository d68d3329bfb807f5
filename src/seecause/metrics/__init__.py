"""How good is a map, and how good is a model? Functions of tensors; none knows a method.

    curves = sc.metrics.insertion_deletion(model, images, maps, target)
    places = sc.metrics.localization(maps, masks)
    sc.metrics.summarise(curves.difference), sc.metrics.bootstrap_interval(places.aupr1)

Every number is given for each image first; means, errors and intervals come from `statistics`.
`metrics()` lists what there is: what each needs, and which way is better. Metrics that explain
again take the method as a function, `explain(images, target) -> maps`. `@metric` adds one.
"""

from seecause.metrics.calibration import Calibration, auroc, calibration, nll
from seecause.metrics.complexity import Complexity, complexity
from seecause.metrics.energy import Energy, energy
from seecause.metrics.fidelity import faithfulness_estimate, infidelity, mu_fidelity, sensitivity_n
from seecause.metrics.groups import (
    GroupAccuracy,
    background_gap,
    clopper_pearson,
    group_accuracy,
    in9_answers,
    in9_right,
)
from seecause.metrics.insertion_deletion import Curves, insertion_deletion
from seecause.metrics.keypoints import (
    KeyPointError,
    Located,
    keypoint_error,
    locate,
    part_agreement,
)
from seecause.metrics.localization import Localization, localization
from seecause.metrics.parts import PartScores, PartTruth, measure_truth, part_truth
from seecause.metrics.perturbation import Perturbation, Removal, perturbation, removal
from seecause.metrics.registry import (
    Column,
    Metric,
    MetricInputs,
    higher,
    lower,
    measure,
    metric,
    metrics,
)
from seecause.metrics.road import Road, road
from seecause.metrics.saco import saco
from seecause.metrics.sanity import (
    MapSimilarity,
    Randomisation,
    parameter_randomisation,
    random_logit,
)
from seecause.metrics.segmentation import Overlap, box_mask, foreground, iou, overlap
from seecause.metrics.stability import Stability, stability
from seecause.metrics.statistics import (
    Summary,
    bootstrap_interval,
    error_text,
    paired_difference,
    rank_correlation,
    ratio_interval,
    standard_error,
    summarise,
)

__all__ = [
    "Calibration",
    "Column",
    "Complexity",
    "Curves",
    "Energy",
    "GroupAccuracy",
    "KeyPointError",
    "Localization",
    "Located",
    "MapSimilarity",
    "Metric",
    "MetricInputs",
    "Overlap",
    "PartScores",
    "PartTruth",
    "Perturbation",
    "Randomisation",
    "Removal",
    "Road",
    "Stability",
    "Summary",
    "auroc",
    "background_gap",
    "bootstrap_interval",
    "box_mask",
    "calibration",
    "clopper_pearson",
    "complexity",
    "energy",
    "error_text",
    "faithfulness_estimate",
    "foreground",
    "group_accuracy",
    "higher",
    "in9_answers",
    "in9_right",
    "infidelity",
    "insertion_deletion",
    "iou",
    "keypoint_error",
    "localization",
    "locate",
    "lower",
    "measure",
    "measure_truth",
    "metric",
    "metrics",
    "mu_fidelity",
    "nll",
    "overlap",
    "paired_difference",
    "parameter_randomisation",
    "part_agreement",
    "part_truth",
    "perturbation",
    "random_logit",
    "rank_correlation",
    "ratio_interval",
    "removal",
    "road",
    "saco",
    "sensitivity_n",
    "stability",
    "standard_error",
    "summarise",
]
