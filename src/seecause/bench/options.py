"""Options of methods and metrics, checked before anything runs: names, kinds of values, and
whatever they refuse themselves.

A method is called on an empty picture and stopped where the model would run. A metric gets one
made-up answer, for the plain picture, and is stopped where it would ask about a changed one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from seecause.attribution.registry import find
from seecause.bench.measures import group_options
from seecause.engine.chunks import budget
from seecause.errors import BadOption, NotDefined
from seecause.metrics import METRICS, Given, Metric
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
    check_kinds(entry.run, name, given)
    options = {**entry.options, **({"seed": seed} if "seed" in entry.options else {}), **given}
    _dry_run(entry.run, model, options)
    return options


def measure_options(
    group: str, given: Mapping[str, Any], seed: int, model: ImageModel
) -> dict[str, Any]:
    """The same for a group of metrics."""
    known = group_options(group)
    for name, value in given.items():
        if name not in known:
            raise BadOption(
                f"option {name!r} of {group}", value, f"one of {', '.join(known) or 'no options'}"
            )
    check_kinds(METRICS[group].run, group, given)
    options = {**known, **({"seed": seed} if "seed" in known else {}), **given}
    if options:
        _dry_measure(METRICS[group], model, options)
    return options


def check_kinds(run: Callable[..., Any], name: str, given: Mapping[str, Any]) -> None:
    """Refuse a value that is not of the kind its annotation tells."""
    hints = get_type_hints(inspect.unwrap(run))
    for option, value in given.items():
        if not accepts(hints[option], value):
            raise BadOption(
                f"option {option!r} of {name}", value, " or ".join(_words(hints[option]))
            )


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value is of the kind an annotation tells. A tuple may come back as a list:
    manifests are JSON."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(accepts(part, value) for part in parts)
    if kind is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if kind is tuple and ... not in parts:
        return (
            isinstance(value, tuple | list)
            and len(value) == len(parts)
            and all(map(accepts, parts, value))
        )
    if kind is not None and isinstance(kind, type) and issubclass(kind, Sequence):
        return isinstance(value, tuple | list) and all(accepts(parts[0], item) for item in value)
    if hint in (None, type(None)):
        return value is None
    if hint in (int, float):
        return not isinstance(value, bool) and isinstance(
            value, int | float if hint is float else int
        )
    return isinstance(value, hint) if isinstance(hint, type) and hint is not Any else True


def _words(hint: Any) -> Iterator[str]:
    """What `accepts` takes, for a reader. What cannot be typed on a command line is not named."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        for part in parts:
            yield from _words(part)
    elif kind is Literal:
        yield ", ".join(map(str, parts))
    elif kind is tuple:
        yield f"{len(parts)} values such as 1,8"
    elif isinstance(kind, type) and issubclass(kind, Sequence):
        yield "several values, separated by commas"
    elif hint in (None, type(None)):
        yield "None"
    elif hint is not Tensor:
        yield {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}.get(
            hint, str(hint)
        )


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
                Given(
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
