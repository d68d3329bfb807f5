"""Values of options are checked by what their annotations tell, and a dry run leaves nothing
behind."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal, get_type_hints

import pytest
import torch

from seecause.attribution.registry import methods
from seecause.bench.measures import group_options, measure_options, method_options
from seecause.errors import BadOption
from seecause.metrics import metrics
from seecause.options import accepts
from tests.bench.toy import model
from tests.helpers import hooks


@pytest.mark.parametrize("name", sorted(methods()))
def test_the_defaults_of_every_method_pass_and_the_model_never_runs(name):
    found = method_options(name, methods()[name].options, 0, model())
    assert found == methods()[name].options and hooks(model().module) == 0


@pytest.mark.parametrize("group", metrics())
def test_the_defaults_of_every_metric_pass(group):
    hints = get_type_hints(inspect.unwrap(metrics()[group].run))
    assert all(accepts(hints[option], value) for option, value in group_options(group).items())
    assert measure_options(group, {}, 0, model()) == group_options(group)


REFUSED = [
    ("insertion-deletion", {"steps": 1}, "2 to 9216 steps"),
    ("perturbation", {"steps": 10_000}, "steps=10000"),
    ("removal", {"shares": (0.5, 1.5)}, "between 0 and 1"),
    ("road", {"shares": (0.5, 0.9999)}, "at least one patch"),
    ("mu-fidelity", {"subsets": 1}, "at least 2 sets"),
    ("sensitivity-n", {"shares": ()}, "between 0 and 1"),
    ("infidelity", {"share": 0.0}, "between 0 and 1"),
    ("saco", {"groups": 1}, "the number of patches"),
    ("energy", {"k": 0}, "1 to 9216 pixels"),
    ("stability", {"draws": 0}, "at least 1"),
    ("parameter-randomisation", {"steps": 1000}, "a step for each layer"),
]


@pytest.mark.parametrize(("group", "given", "said"), REFUSED, ids=[group for group, *_ in REFUSED])
def test_a_metric_refuses_its_ranges_before_the_model_runs(group, given, said, monkeypatch):
    opened = model()
    opened.n_classes  # noqa: B018  counted once, by a run
    monkeypatch.setattr(type(opened), "__call__", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(BadOption, match=said):
        measure_options(group, given, 0, opened)


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (int, [3], [True, 3.0, "3"]),
        (float, [3, 0.5], [True, "3", None]),
        (bool, [True], [1, "true"]),
        (Literal["a", 1] | None, ["a", 1, None], ["b", True, 2]),
        (tuple[int, int | None] | None, [(1, None), [0, 2], None], [(1,), 3, ("a", 2)]),
        (Sequence[float], [(0.1, 1), [0.5]], [0.5, ("a",), "ab"]),
        (torch.Tensor | str, ["x", torch.ones(1)], [1]),
        (Any, [1, None, "x"], []),
    ],
)
def test_what_an_annotation_accepts(hint, right, wrong):
    assert all(accepts(hint, value) for value in right) and not any(
        accepts(hint, value) for value in wrong
    )
