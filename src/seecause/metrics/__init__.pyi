from seecause.metrics._localization import (
    Overlap as Overlap,
    box_mask as box_mask,
    complexity as complexity,
    energy as energy,
    foreground as foreground,
    iou as iou,
    localization as localization,
    overlap as overlap,
)
from seecause.metrics.accuracy import (
    Calibration as Calibration,
    GroupAccuracy as GroupAccuracy,
    auroc as auroc,
    background_gap as background_gap,
    calibration as calibration,
    clopper_pearson as clopper_pearson,
    group_accuracy as group_accuracy,
    in9_predictions as in9_predictions,
    nll as nll,
)
from seecause.metrics.curves import (
    insertion_deletion as insertion_deletion,
    perturbation as perturbation,
    removal as removal,
    road as road,
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
    keypoint_error as keypoint_error,
    locate as locate,
    part_agreement as part_agreement,
)
from seecause.metrics.parts import (
    measure_truth as measure_truth,
    part_completeness as part_completeness,
    part_truth as part_truth,
)
from seecause.metrics.registry import (
    MetricInputs as MetricInputs,
    Scores as Scores,
    higher as higher,
    lower as lower,
    measure as measure,
    metric as metric,
    metrics as metrics,
)
from seecause.metrics.sanity import (
    parameter_randomisation as parameter_randomisation,
    random_logit as random_logit,
    stability as stability,
)
from seecause.metrics.statistics import (
    bootstrap_interval as bootstrap_interval,
    paired_difference as paired_difference,
    rank_correlation as rank_correlation,
    summarise as summarise,
)
