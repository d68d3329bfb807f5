"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import seecause

ROOT = Path(seecause.__file__).parent
WITH_EXAMPLES = [path for path in sorted(ROOT.rglob("*.py")) if "    >>> " in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_examples_of_a_module_hold(path):
    name = path.relative_to(ROOT.parent).with_suffix("").as_posix().replace("/", ".")
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed


def test_the_public_surface_has_examples():
    names = {path.relative_to(ROOT).as_posix() for path in WITH_EXAMPLES}
    assert {"loading.py", "attribution/attribute.py", "data/dataset.py"} <= names
