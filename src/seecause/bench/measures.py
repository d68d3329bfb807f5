"""The metrics of a benchmark: those of `seecause.metrics`, by groups that share their work, with
what a run needs to know about each.

paper   insertion, deletion and their difference, AUPR_1, AUPR_0, pointing game
all     everything; sanity checks and truth explain every picture again, some dozens of times

Options of methods and metrics are checked before anything runs: names, kinds of values, and
whatever they refuse themselves. A method is called on an empty picture and stopped where the model
would run; a metric gets one made-up answer, for the plain picture, and is stopped where it would
ask about a changed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seecause.attribution.registry import find
from seecause.data.dataset import Dataset, capabilities
from seecause.engine.chunks import budget
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.metrics import MetricInputs, Scores, metrics
from seecause.metrics.parts import PartTruth
from seecause.metrics.registry import Metric, find_metric
from seecause.models.base import ImageModel
from seecause.options import check_options, keyword_options
from seecause.target import parse

PAPER = ("insertion", "deletion", "ins-del", "aupr1", "aupr0", "pointing")
# a question that does not arise, unlike one that could not be answered
UNDEFINED = "not defined for this picture"
NO_MASK = "no mask: this dataset has none"
# where a benchmark's differs from the library's: unscaled, the smallest numbers win
DEFAULTS = {"infidelity": {"scaled": True}}
Options = Mapping[str, Mapping[str, Any]]  # by method, or by group of metrics
Named = tuple[str, str, Any]  # an option: method or group ("": all that have it), key, value
_NOT_OPTIONS = ("truth", "rewrap")  # what callers in Python may hand over


@dataclass(frozen=True, eq=False)
class MeasuredMetric:
    """Values [B] by metric, NaN where an image has none and `reasons` says why; `tensors` is what
    the report draws."""

    values: dict[str, Tensor]
    reasons: Sequence[str]  # "" for measured images
    protocol: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def reason(self, metric: str, place: int) -> str:
        """Why an image has no value, or nothing."""
        undefined = bool(self.values[metric][place].isnan())
        return self.reasons[place] or (UNDEFINED if undefined else "")


def group_options(group: str) -> dict[str, Any]:
    """Keyword options of a group and their defaults in a benchmark."""
    options = keyword_options(find_metric(group).run, leave_out=_NOT_OPTIONS)
    return options | DEFAULTS.get(group, {})


def run_group(
    group: str, inputs: MetricInputs, options: Mapping[str, Any], *, truth: PartTruth | None = None
) -> MeasuredMetric:
    """Measure. What a method or model does not define is a reason, not the end of the shard.
    `truth` saves rendering it again."""
    metric, protocol = find_metric(group), {"metric": group, **options}
    count = 0 if inputs.images is None else len(inputs.images)
    if "masks" in metric.missing(inputs):
        return _nothing(group, count, NO_MASK, protocol)
    try:
        result = metric.scores(inputs, **options, **({"truth": truth} if group == "parts" else {}))
    except NotDefined as refused:
        return _nothing(group, count, str(refused), protocol)
    protocol |= result.protocol
    protocol.pop("target", None)  # rows have a column for it
    reasons = result.details.get("reasons") or [""] * count
    return MeasuredMetric(result.columns, reasons, protocol, _tensors_of(group, result))


def with_options(
    flag: str,
    own: Options,
    options: Sequence[Named],
    known: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """`own` options by name, and more. One without a name goes to all that have it; one that none
    has is refused."""
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


def _nothing(group: str, count: int, why: str, protocol: dict[str, Any]) -> MeasuredMetric:
    return MeasuredMetric(
        dict.fromkeys(
            find_metric(group).columns, torch.full((count,), torch.nan, dtype=torch.float64)
        ),
        [why] * count,
        protocol,
    )


def _tensors_of(group: str, result: Scores) -> dict[str, Tensor]:
    """Curves to draw, and what completeness over all images is made of."""
    if group == "insertion-deletion":
        curves = {kind: result[f"{kind} curve"] for kind in ("insertion", "deletion")}
        return {**curves, "shares": result["shares"]}
    if group == "parts":
        return {f"parts.{name}": values for name, values in result.details.items()}
    return {}


class _Reached(RuntimeError):
    """The model would run now: the options were accepted."""


def method_options(
    name: str, given: Mapping[str, Any], seed: int, model: ImageModel
) -> dict[str, Any]:
    """All options of a method, defaults filled in; refused if the method would refuse them."""
    entry = find(name, model.architecture)
    check_options(name, entry.run, given)
    options = {**entry.options, **({"seed": seed} if "seed" in entry.options else {}), **given}
    _dry_run(entry.run, model, options)
    return options


def measure_options(
    group: str, given: Mapping[str, Any], seed: int, model: ImageModel
) -> dict[str, Any]:
    """The same for a group of metrics."""
    known = group_options(group)
    check_options(group, find_metric(group).run, given, leave_out=_NOT_OPTIONS)
    options = {**known, **({"seed": seed} if "seed" in known else {}), **given}
    if options:
        _dry_measure(find_metric(group), model, options)
    return options


def _dry_run(run: Callable[..., Any], model: ImageModel, options: Mapping[str, Any]) -> None:
    """Call a method on one empty picture and stop where the model would run: what it checks before
    that is checked now."""
    empty = _empty(model)
    target = parse(model, 0, 1)  # counts the classes, which may run the model once
    with _halted(model.module):
        try:
            run(model, empty, target, **options)
        except (_Reached, NotDefined):  # a hole of the run, no mistake of the user
            return


def _empty(model: ImageModel) -> Tensor:
    shape = (1, len(model.preprocess.mean), *model.preprocess.size)
    return torch.zeros(shape, device=model.device, dtype=model.dtype)


class _Answers:
    """A model that answers once, with nothing: metrics look at their options after they have seen
    the plain picture's score."""

    def __init__(self, model: ImageModel):
        self._model, self._asked = model, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, images: Tensor) -> Tensor:
        if self._asked:
            raise _Reached
        self._asked = True
        return images.new_zeros(len(images), self._model.n_classes)


def _dry_measure(metric: Metric, model: ImageModel, options: Mapping[str, Any]) -> None:
    """Measure an empty map of one empty picture, without the model."""

    def stop(*_: Any) -> Tensor:
        raise _Reached

    empty = _empty(model)
    maps, masks = (
        torch.zeros(1, *size, device=model.device)
        for size in (model.check(empty).grid, model.preprocess.size)
    )
    answers: Any = _Answers(model)
    target = torch.zeros(1, dtype=torch.int64)
    given = MetricInputs(answers, empty, maps, target, masks, explain=stop, attribute=stop)
    with budget(1):  # one picture at a time is enough to be refused
        try:
            metric.scores(given, **options)
        except (_Reached, NotDefined):
            return


@contextmanager
def _halted(module: nn.Module) -> Iterator[None]:
    """No part of the module runs; nothing is left behind."""

    def stop(*_: Any) -> None:
        raise _Reached

    handles = [part.register_forward_pre_hook(stop) for part in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
