from seecause.metrics._localization import (
    Complexity as Complexity,
    Energy as Energy,
    Localization as Localization,
    complexity as complexity,
    energy as energy,
    localization as localization,
)
from seecause.metrics._road import Road as Road, road as road
from seecause.metrics.accuracy import (
    Calibration as Calibration,
    GroupAccuracy as GroupAccuracy,
    auroc as auroc,
    background_gap as background_gap,
    calibration as calibration,
    clopper_pearson as clopper_pearson,
    group_accuracy as group_accuracy,
    in9_answers as in9_answers,
    in9_right as in9_right,
    nll as nll,
)
from seecause.metrics.curves import (
    Curves as Curves,
    Perturbation as Perturbation,
    Removal as Removal,
    insertion_deletion as insertion_deletion,
    perturbation as perturbation,
    removal as removal,
)
from seecause.metrics.fidelity import (
    faithfulness_estimate as faithfulness_estimate,
    infidelity as infidelity,
    mu_fidelity as mu_fidelity,
    saco as saco,
    sensitivity_n as sensitivity_n,
    single_deletion as single_deletion,
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
    Stability as Stability,
    parameter_randomisation as parameter_randomisation,
    random_logit as random_logit,
    stability as stability,
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
