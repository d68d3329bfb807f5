from seecause.metrics._calibration import (
    Calibration as Calibration,
    auroc as auroc,
    calibration as calibration,
    nll as nll,
)
from seecause.metrics._complexity import Complexity as Complexity, complexity as complexity
from seecause.metrics._energy import Energy as Energy, energy as energy
from seecause.metrics._insertion_deletion import (
    Curves as Curves,
    insertion_deletion as insertion_deletion,
)
from seecause.metrics._localization import (
    Localization as Localization,
    localization as localization,
)
from seecause.metrics._perturbation import (
    Perturbation as Perturbation,
    Removal as Removal,
    perturbation as perturbation,
    removal as removal,
)
from seecause.metrics._road import Road as Road, road as road
from seecause.metrics._saco import saco as saco
from seecause.metrics._stability import Stability as Stability, stability as stability
from seecause.metrics.fidelity import (
    faithfulness_estimate as faithfulness_estimate,
    infidelity as infidelity,
    mu_fidelity as mu_fidelity,
    sensitivity_n as sensitivity_n,
    single_deletion as single_deletion,
)
from seecause.metrics.groups import (
    GroupAccuracy as GroupAccuracy,
    background_gap as background_gap,
    clopper_pearson as clopper_pearson,
    group_accuracy as group_accuracy,
    in9_answers as in9_answers,
    in9_right as in9_right,
)
from seecause.metrics.keypoints import (
    KeyPointError as KeyPointError,
    Located as Located,
    keypoint_error as keypoint_error,
    locate as locate,
    part_agreement as part_agreement,
)
from seecause.metrics.parts import (
    PartScores as PartScores,
    PartTruth as PartTruth,
    measure_truth as measure_truth,
    part_truth as part_truth,
)
from seecause.metrics.registry import (
    Column as Column,
    Metric as Metric,
    MetricInputs as MetricInputs,
    higher as higher,
    lower as lower,
    measure as measure,
    metric as metric,
    metrics as metrics,
)
from seecause.metrics.sanity import (
    MapSimilarity as MapSimilarity,
    Randomisation as Randomisation,
    parameter_randomisation as parameter_randomisation,
    random_logit as random_logit,
)
from seecause.metrics.segmentation import (
    Overlap as Overlap,
    box_mask as box_mask,
    foreground as foreground,
    iou as iou,
    overlap as overlap,
)
from seecause.metrics.statistics import (
    Summary as Summary,
    bootstrap_interval as bootstrap_interval,
    error_text as error_text,
    paired_difference as paired_difference,
    rank_correlation as rank_correlation,
    ratio_interval as ratio_interval,
    standard_error as standard_error,
    summarise as summarise,
)
