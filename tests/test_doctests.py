"""The examples in docstrings give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import seecause
from seecause.registry import Registry

ROOT = Path(seecause.__file__).parent
WITH_EXAMPLES = [path for path in sorted(ROOT.rglob("*.py")) if "    >>> " in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_examples_of_a_module_hold(path):
    name = path.relative_to(ROOT.parent).with_suffix("").as_posix().replace("/", ".")
    module = importlib.import_module(name)
    registries = [value for value in vars(module).values() if isinstance(value, Registry)]
    before = [dict(registry.entries) for registry in registries]
    failed, tried = doctest.testmod(module)
    for registry, known in zip(registries, before, strict=True):  # other tests list what there is
        for extra in {*registry.entries} - {*known} - {*registry.homes}:
            del registry.entries[extra]
    assert tried and not failed
