"""The metrics of a benchmark: groups of columns that share their work, and names for sets of them.

paper   insertion, deletion and their difference, AUPR_1, AUPR_0, pointing game
all     everything; sanity checks and truth explain every image again, some dozens of times
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from seecause.attribution.registry import find
from seecause.data.dataset import Dataset, capabilities
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.metrics import MetricInputs, Scores, metrics
from seecause.metrics.parts import PartTruth
from seecause.metrics.registry import METRICS
from seecause.models.base import ImageModel
from seecause.options import check_options, keyword_options

PAPER = ("insertion", "deletion", "ins-del", "aupr1", "aupr0", "pointing")
UNDEFINED = "not defined for this image"  # unlike a value that could not be computed
PARTS = (
    "correctness", "contrastivity", "csdc", "preservation", "deletion", "distractibility"
)  # fmt: skip
DETAILS = {  # details of a metric that are kept for each image, beside its columns
    "insertion-deletion": ("insertion curve", "deletion curve"),
    "parts": PARTS,
}
NOT_OPTIONS = ("truth",)  # keywords for callers in Python
Options = Mapping[str, Mapping[str, Any]]  # by method, or by group of metrics
Named = tuple[str, str, Any]  # an option: method or group ("" for all that have it), key, value


def method_options(
    name: str, given: Mapping[str, Any], seed: int, model: ImageModel
) -> dict[str, Any]:
    """All options of a method, defaults filled in; names and kinds of values are checked."""
    entry = find(name, model.architecture)
    check_options(name, entry.run, given)
    return {**entry.options, **({"seed": seed} if "seed" in entry.options else {}), **given}


def metric_options(group: str, given: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """All options of a group of metrics, defaults filled in; names and kinds are checked."""
    known = group_options(group)
    check_options(group, METRICS.get(group).run, given, leave_out=NOT_OPTIONS)
    return {**known, **({"seed": seed} if "seed" in known else {}), **given}


def group_options(group: str) -> dict[str, Any]:
    """Keyword options of a group and their defaults in a benchmark."""
    return keyword_options(METRICS.get(group).run, leave_out=NOT_OPTIONS)


def run_group(
    group: str, inputs: MetricInputs, options: Mapping[str, Any], *, truth: PartTruth | None = None
) -> Scores:
    """Measure one group. `details["reasons"]` says why an image has no value, "" elsewhere.

    What a method or model does not define is a reason, and no error. `truth` is what the metric
    "parts" would compute again for each method.
    """
    metric, protocol = METRICS.get(group), {"metric": group, **options}
    count = 0 if inputs.images is None else len(inputs.images)
    why = "no object mask: this dataset has none" if "masks" in metric.missing(inputs) else ""
    try:
        if not why:
            more = {"truth": truth} if group == "parts" else {}
            result = metric.scores(inputs, **options, **more)
            reasons = result.details.get("reasons") or [""] * count
            details = {**result.details, "reasons": reasons}
            return Scores(result.columns, details, {**protocol, **result.protocol})
    except NotDefined as refused:
        why = str(refused)
    nothing = torch.full((count,), torch.nan, dtype=torch.float64)
    return Scores(dict.fromkeys(metric.columns, nothing), {"reasons": [why] * count}, protocol)


def with_options(
    flag: str, own: Options, options: Sequence[Named], known: Options
) -> dict[str, dict[str, Any]]:
    """`own` options by name, and `options` added to them.

    An option without a name is added to all that have it; one that none has is refused.
    """
    by_name = {name: dict(own.get(name, {})) for name in {**own, **known}}
    for name, key, value in options:
        takers = [taker for taker in known if key in known[taker] and name in ("", taker)]
        if not takers:
            listed = [f"{taker}: {', '.join(keys) or 'none'}" for taker, keys in known.items()]
            word = f"{name}.{key}={value}".removeprefix(".")
            expected = f"[NAME.]KEY=VALUE with an option of {'; '.join(listed)}"
            raise BadOption(flag, word, expected)
        for taker in takers:
            by_name[taker][key] = value
    return by_name


def metric_groups() -> dict[str, str]:
    """The group of every column, those of plug-ins included."""
    groups = {}
    for group, entry in metrics().items():
        groups |= dict.fromkeys(entry.columns, group)
    return groups


def metric_sets() -> dict[str, tuple[str, ...]]:
    """Columns that one word stands for."""
    return {"paper": PAPER, "all": tuple(metric_groups())}


def group_of(metric: str) -> str:
    """The metric that has this column; raises `UnknownName` with the nearest names."""
    groups = metric_groups()
    if metric not in groups:
        raise UnknownName("metric", metric, (*groups, *metric_sets()))
    return groups[metric]


def groups_of(names: Iterable[str]) -> list[str]:
    """The groups that some columns need, each once."""
    return list(dict.fromkeys(group_of(metric) for metric in names))


def meaning_of(metric: str) -> str:
    """What a column measures, in a line."""
    return METRICS.get(group_of(metric)).columns[metric].meaning


def higher_is_better(metric: str) -> bool:
    """Whether a large value of this column is good."""
    return METRICS.get(group_of(metric)).columns[metric].better == "higher"


def pick_metrics(
    words: Iterable[str], model: ImageModel, data: Dataset
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The columns that names and words for sets stand for, and why some of a set are left out.

    A metric that is named itself must be possible.
    """
    picked: dict[str, None] = {}
    left_out: dict[str, str] = {}
    sets = metric_sets()
    for word in words:
        for metric in sets.get(word, (word,)):
            why = lacking(group_of(metric), model, data)
            if why and word not in sets:
                raise BadOption("metric", word, f"another metric: {why}")
            if why:
                left_out[metric] = why
            else:
                picked[metric] = None
    return tuple(picked), left_out


def lacking(group: str, model: ImageModel, data: Dataset) -> str:
    """What a group of metrics needs and model and data do not have; "" if nothing."""
    needs = METRICS.get(group).needs
    if "masks" in needs and "masks" not in capabilities(data):
        return f"it needs object masks, and {data.name} has none"
    if "latents" in needs and "counterfactuals" not in capabilities(data):
        return f"it needs images that can be rendered again (critters:REGIME), not {data.name}"
    if "latents" in needs and tuple(model.classes) != tuple(data.classes):
        return f"it needs a classifier of Critters, and {model.name} is none"
    return ""
