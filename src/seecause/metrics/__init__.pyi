from .annotations import localization as localization
from .faithfulness import insertion_deletion as insertion_deletion
from .registry import (
    MetricInputs as MetricInputs,
    Scores as Scores,
    higher as higher,
    lower as lower,
    measure as measure,
    metric as metric,
    metrics as metrics,
)
from .statistics import (
    calibration as calibration,
    group_accuracy as group_accuracy,
    paired_difference as paired_difference,
    rank_correlation as rank_correlation,
    summarise as summarise,
)
