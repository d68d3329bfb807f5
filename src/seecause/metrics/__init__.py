"""How good is a map, and how good is a model? Functions of tensors; none knows a method.

    curves = sc.metrics.insertion_deletion(model, images, maps, target)
    found = sc.metrics.localization(maps, masks)
    sc.metrics.summarise(curves.difference), sc.metrics.bootstrap_interval(found.aupr1)

Every number is given for each image first; means, errors and intervals come from `statistics`.
"""

from seecause.metrics.groups import GroupAccuracy, clopper_pearson, group_accuracy
from seecause.metrics.insertion_deletion import Curves, insertion_deletion
from seecause.metrics.localization import Localization, localization
from seecause.metrics.statistics import Summary, bootstrap_interval, paired_difference, rank_correlation, summarise

__all__ = [
    "Curves",
    "GroupAccuracy",
    "Localization",
    "Summary",
    "bootstrap_interval",
    "clopper_pearson",
    "group_accuracy",
    "insertion_deletion",
    "localization",
    "paired_difference",
    "rank_correlation",
    "summarise",
]
