"""Twins prove something only if they share nothing with what they check."""

import ast
from pathlib import Path

import pytest

TWINS = [path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")]


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.name)
def test_a_twin_imports_nothing_from_the_package(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    named += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in named if name.split(".")[0] == "seecause"]
