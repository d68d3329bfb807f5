"""Options of methods and metrics, checked before anything runs: names, kinds of values, and
whatever they refuse themselves.

A method is called on an empty picture and stopped where the model would run. A metric gets one
made-up answer, for the plain picture, and is stopped where it would ask about a changed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from seecause._options import check_options
from seecause.attribution.registry import find
from seecause.bench.measures import _NOT_OPTIONS, group_options
from seecause.engine.chunks import budget
from seecause.errors import NotDefined
from seecause.metrics import Metric, MetricInputs
from seecause.metrics.registry import find_metric
from seecause.models.base import ImageModel
from seecause.target import parse


class _Reached(RuntimeError):
    """The model would run now: the options were accepted."""


def method_options(
    name: str, given: Mapping[str, Any], seed: int, model: ImageModel
) -> dict[str, Any]:
    """All options of a method, defaults filled in; refused if the method would refuse them."""
    entry = find(name, model.architecture)
    entry.check(dict(given))
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
    empty = torch.zeros(1, 3, *model.preprocess.size, device=model.device, dtype=model.dtype)
    target = parse(model, 0, 1)  # counts the classes, which may run the model once
    with _halted(model.module):
        try:
            run(model, empty, target, **options)
        except (
            _Reached,
            NotDefined,
        ):  # what a readout does not define is a hole of the run, and no mistake
            return


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

    empty = torch.zeros(1, 3, *model.preprocess.size, device=model.device, dtype=model.dtype)
    maps, masks = (
        torch.zeros(1, *size, device=model.device)
        for size in (model.check(empty).grid, model.preprocess.size)
    )
    answers: Any = _Answers(model)
    with budget(1):  # one picture at a time is enough to be refused
        try:
            metric.result(
                MetricInputs(
                    answers,
                    empty,
                    maps,
                    torch.zeros(1, dtype=torch.int64),
                    masks,
                    explain=stop,
                    attribute=stop,
                ),
                **options,
            )
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
