"""Dependencies point down only, and importing the package loads no model library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import seecause

ROOT = Path(seecause.__file__).parent
ORDER = [
    "errors",
    "models",
    "engine",
    "loading",
    "target",
    "data",
    "metrics",
    "attribution",
]  # upwards
ORDER += ["heads", "faithful", "lvlm", "train", "bench", "report", "demo", "cli"]
SIDEWAYS = {("loading", "engine")}


def layer(module: str) -> str | None:
    name = module.removeprefix("seecause.").split(".")[0]
    return name if name in ORDER else None


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("seecause")
    }


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_dependencies_point_down(path):
    mine = layer("seecause." + path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."))
    if mine is None:
        return
    for module in imports(path):
        theirs = layer(module)
        if theirs is None or theirs == mine or (mine, theirs) in SIDEWAYS:
            continue
        lazy = path.name == "result.py" and theirs == "report"  # a result shows itself
        assert lazy or ORDER.index(theirs) < ORDER.index(mine), f"{mine} imports {module}"


def test_importing_the_package_imports_no_model_library():
    code = (
        "import seecause, sys; print([m for m in ('torch', 'timm', 'transformers', 'gradio', 'ray')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist():
    for name in seecause.__all__:
        assert getattr(seecause, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = seecause.nonsense
