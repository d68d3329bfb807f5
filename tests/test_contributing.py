"""What CONTRIBUTING.md shows runs: a method, a metric, a dataset and a model of one's own."""

import importlib
import operator
import re
import tomllib
from pathlib import Path

import pytest
import torch

from seecause.attribution import registry
from seecause.data import dataset as datasets
from seecause.metrics import registry as metrics

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def left_as_it_was(monkeypatch):
    """What the examples register is gone afterwards, and nothing else: all is loaded before."""
    registry.methods(), metrics.metrics(), datasets.datasets()
    transformers = registry.METHODS["transformer"]
    monkeypatch.setattr(transformers, "entries", dict(transformers.entries))
    monkeypatch.setattr(metrics.METRICS, "entries", dict(metrics.METRICS.entries))
    monkeypatch.setattr(datasets._REGISTRY, "entries", dict(datasets._REGISTRY.entries))


def test_the_examples_run_one_after_the_other(left_as_it_was):
    names: dict = {}
    torch.manual_seed(0)
    for block in BLOCKS:
        exec(block, names)
    assert len(BLOCKS) == 4
    assert names["maps"].shape == names["own_maps"].shape == (2, 12, 12)
    assert names["maps"].std() > 0 and names["own_maps"].std() > 0
    assert ((names["shares"] > 0) & (names["shares"] < 1)).all()
    across, down = (names["stripes"][place].image for place in (0, 1))
    assert len(names["stripes"]) == 4 and names["stripes"].name == "stripes:10"
    assert (across[0, :, 0] == across[0, :, 50]).all() and (down[0, 0] == down[0, 50]).all()


def test_every_equation_is_computed_where_the_table_says():
    table = PAGE.split("### From equation to function")[1].split("\n\n")[2]
    rows = [[cell.strip() for cell in row.split("|")[3:5]] for row in table.splitlines()[2:]]
    assert len(rows) >= 15
    for file, functions in rows:
        home = importlib.import_module(
            "seecause." + file.strip("`").removesuffix(".py").replace("/", ".")
        )
        if not functions.startswith("experiment "):  # a table by its name
            for name in functions.split(", "):
                found = operator.attrgetter(name.strip("`"))(home)
                assert getattr(found, "__module__", home.__name__) == home.__name__, name


def test_every_dependency_has_the_floor_that_was_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = project["optional-dependencies"]
    for dependency in (*project["dependencies"], *extras["clip"]):
        name, _, floor = dependency.partition(">=")
        row = rf"^\| {name} \| {re.escape(floor)} \|"
        assert re.search(row, PAGE, flags=re.M), f"{name} has no tested floor"
        assert re.search(rf"'{name}=={re.escape(floor)}", makefile), f"test-oldest has no {name}"
