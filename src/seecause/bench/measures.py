"""The metrics of a benchmark: those of `seecause.metrics`, by groups that share their work, with
what a run needs to know about each.

paper   insertion, deletion and their difference, AUPR_1, AUPR_0, pointing game
all     everything; sanity checks and truth explain every picture again, some dozens of times
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from seecause._options import keyword_options
from seecause.data.dataset import Dataset, capabilities
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.metrics import Curves, MetricInputs, PartScores, PartTruth, metrics
from seecause.metrics.registry import find_metric
from seecause.models.base import ImageModel

PAPER = ("insertion", "deletion", "ins-del", "aupr1", "aupr0", "pointing")
UNDEFINED = (  # a question that does not arise, unlike one that could not be answered
    "not defined for this picture"
)
NO_MASK = "no mask: this dataset has none"
DEFAULTS = {
    "infidelity": {"scaled": True}
}  # where a benchmark's differs from the library's: unscaled, the smallest numbers win
_NOT_OPTIONS = ("truth", "rewrap")  # what callers in Python may hand over


@dataclass(frozen=True, eq=False)
class Measured:
    """Values [B] by metric, NaN where an image has none and `reasons` says why; `kept` is what the
    report draws."""

    values: dict[str, Tensor]
    reasons: Sequence[str]  # "" for measured images
    protocol: dict[str, Any]
    kept: dict[str, Tensor] = field(default_factory=dict)

    def reason(self, metric: str, place: int) -> str:
        """Why an image has no value, or nothing."""
        undefined = bool(self.values[metric][place].isnan())
        return self.reasons[place] or (UNDEFINED if undefined else "")


def group_options(group: str) -> dict[str, Any]:
    """Keyword options of a group and their defaults in a benchmark."""
    return keyword_options(find_metric(group).run, leave_out=_NOT_OPTIONS) | DEFAULTS.get(group, {})


def run_group(
    group: str, inputs: MetricInputs, options: Mapping[str, Any], *, truth: PartTruth | None = None
) -> Measured:
    """Measure. What a method or model does not define is a reason, not the end of the shard.
    `truth` saves rendering it again."""
    metric, protocol = find_metric(group), {"metric": group, **options}
    count = 0 if inputs.images is None else len(inputs.images)
    if "masks" in metric.missing(inputs):
        return _nothing(group, count, NO_MASK, protocol)
    try:
        result = metric.result(inputs, **options, **({"truth": truth} if group == "parts" else {}))
    except NotDefined as refused:
        return _nothing(group, count, str(refused), protocol)
    protocol |= {
        key: value for key, value in getattr(result, "protocol", {}).items() if key != "target"
    }  # rows have a column for it
    return Measured(
        metric.read(result),
        getattr(result, "reasons", None) or [""] * count,
        protocol,
        _kept(result),
    )


def meaning_of(metric: str) -> str:
    """What a metric measures, in a line."""
    return find_metric(group_of(metric)).columns[metric].meaning


def higher_is_better(metric: str) -> bool:
    return find_metric(group_of(metric)).columns[metric].better == "higher"


def metric_groups() -> dict[str, str]:
    """The group of every metric, plug-ins with the rest."""
    groups = {}
    for group, entry in metrics().items():
        groups |= dict.fromkeys(entry.columns, group)
    return groups


def metric_sets() -> dict[str, tuple[str, ...]]:
    """Metrics that one word asks for."""
    return {"paper": PAPER, "all": tuple(metric_groups())}


def group_of(metric: str) -> str:
    groups = metric_groups()
    if metric not in groups:
        raise UnknownName("metric", metric, (*groups, *metric_sets()))
    return groups[metric]


def groups_of(metrics: Iterable[str]) -> list[str]:
    """The groups some metrics need, each once."""
    return list(dict.fromkeys(group_of(metric) for metric in metrics))


def family_of(metric: str) -> str:
    return find_metric(group_of(metric)).family


def pick_metrics(
    words: Iterable[str], model: ImageModel, data: Dataset
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The metrics that words and names of sets ask for, and why some of a set are left out. What
    was named itself must be possible."""
    picked: dict[str, None] = {}
    left_out: dict[str, str] = {}
    sets = metric_sets()
    for word in words:
        for metric in sets.get(word, (word,)):
            why = lacking(group_of(metric), model, data)
            if why and word not in sets:
                raise BadOption("metric", word, f"another: {why}")
            if why:
                left_out[metric] = why
            else:
                picked[metric] = None
    return tuple(picked), left_out


def lacking(group: str, model: ImageModel, data: Dataset) -> str:
    """What a group of metrics needs and does not find, or nothing."""
    needs = find_metric(group).needs
    if "masks" in needs and "masks" not in capabilities(data):
        return f"it needs masks, and {data.name} has none"
    if "latents" in needs and "counterfactuals" not in capabilities(data):
        return f"it needs pictures that can be rendered again (critters:REGIME), not {data.name}"
    if "latents" in needs and tuple(model.classes) != tuple(data.classes):
        return f"it needs a classifier of Critters, and {model.name} is none"
    return ""


def _nothing(group: str, count: int, why: str, protocol: dict[str, Any]) -> Measured:
    return Measured(
        dict.fromkeys(
            find_metric(group).columns, torch.full((count,), torch.nan, dtype=torch.float64)
        ),
        [why] * count,
        protocol,
    )


def _kept(found: Any) -> dict[str, Tensor]:
    """Curves to draw, and what completeness over all pictures is made of."""
    if isinstance(found, Curves):
        return {"insertion": found.insertion, "deletion": found.deletion, "shares": found.shares}
    if isinstance(found, PartScores):
        return {f"parts.{part.name}": getattr(found, part.name) for part in fields(found)}
    return {}
