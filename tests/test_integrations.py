"""The recipes of docs/integrations.md run as they stand, where their library is installed."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"
FIRST, *RECIPES = re.findall(
    r"```python *(\w*)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)


@pytest.fixture(scope="module")
def names():
    names: dict = {}
    exec(compile(FIRST[1], str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize(
    ("library", "block"), RECIPES, ids=[name or "plain" for name, _ in RECIPES]
)
def test_a_recipe_runs(library, block, names, tmp_path, monkeypatch):
    if library and find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    own = dict(names)
    exec(compile(block, str(PAGE), "exec"), own)
    if library == "captum":
        assert own["attributions"].shape == own["smooth"].shape == own["images"].shape
    if not library:
        assert own["maps"].shape == (4, 1, 96, 96)
    if library == "torchmetrics":
        assert 0 < own["insertion"].compute() < 1
    if library == "tensorboard":
        assert list((tmp_path / "runs").glob("events.*"))
