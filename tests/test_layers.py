"""Dependencies point down only, and importing the package loads no model library."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import seecause

ROOT = Path(seecause.__file__).parent
ORDER = ["errors", "models", "engine", "loading", "target", "data", "metrics", "attribution"]
ORDER += ["background", "faithful", "lvlm", "bench", "report", "critters"]  # upwards
ORDER += ["integrations", "app", "cli"]
SIDEWAYS = {("loading", "engine"), ("background", "faithful")}
DRAWS_CRITTERS = {"metrics/parts.py"}  # judges maps by counterfactuals that only this world has
RESULTS = {"result.py", "evidence.py", "interactions.py"}
WALK = "seecause.engine.walk"  # needs blocks only, and views run by it: it counts as models


def layer(module: str) -> str | None:
    if module == WALK:
        return "models"
    name = module.removeprefix("seecause.").split(".")[0]
    return name if name in ORDER else None


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {name for node in ast.walk(tree) for name in _targets(node)}


def imports_on_loading(path: Path) -> set[str]:
    """What importing the module imports: not what its functions or its type checker import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {name for node in tree.body for name in _targets(node)}


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module == "seecause":
        return [f"seecause.{alias.name}" for alias in node.names]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("seecause."):
        return [str(node.module)]
    return []


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
        if theirs == "critters":
            continue  # `test_critters_is_imported_by_those_who_draw_it` judges them
        lazy = path.name in RESULTS and theirs == "report"  # a result shows itself
        assert lazy or ORDER.index(theirs) < ORDER.index(mine), f"{mine} imports {module}"


def test_critters_is_imported_by_those_who_draw_it():
    """Importing any other part of the package loads nothing of the generated world."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("critters/", "cli/")) or name in DRAWS_CRITTERS:
            continue
        loaded = {layer(module) for module in imports_on_loading(path)}
        assert "critters" not in loaded, f"{name} imports critters on loading"


def test_importing_the_package_imports_no_model_library():
    code = (
        "import seecause, sys; heavy = ('torch', 'timm', 'transformers', 'fastapi', 'ray');"
        " print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_that_ships_imports_a_peer():
    """Peers are for comparison; Quantus is under the GPL."""
    peers = {"quantus", "captum", "pytorch_grad_cam"}
    for path in sorted(ROOT.rglob("*.py")):
        extends = {"captum"} if path == ROOT / "integrations" / "captum.py" else set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not (peers - extends) & {name.split(".")[0] for name in names}, path


def test_public_names_exist():
    for name in seecause.__all__:
        assert getattr(seecause, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = seecause.nonsense


@pytest.mark.parametrize(
    "name", ["bench", "critters", "data", "faithful", "background", "lvlm", "metrics"]
)
def test_no_file_hides_a_name_that_its_package_offers(name):
    """Names are imported on first use; importing a file of the same name would take their place."""
    package = importlib.import_module(f"seecause.{name}")
    files = {file.name for file in pkgutil.iter_modules(package.__path__)}
    assert not files & set(package.__all__)
    assert not [n for n in package.__all__ if isinstance(getattr(package, n), ModuleType)]


def test_every_planted_bug_still_has_its_line():
    """`make test-mutants` takes long; a line that moved is noticed here."""
    planted = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))
    for mutant in planted["mutant"]:
        text = (ROOT / mutant["file"]).read_text(encoding="utf-8")
        assert text.count(mutant["old"]) == 1, f"{mutant['file']}: {mutant['breaks']}"


SIZE, LENGTH, WIDTH = 400, 60, 12  # lines of a file, lines of a function, parameters
PARAMETERS = {  # of those that have more: options, which people give by name
    **{"attribution/caap.py:caap": 14, "attribution/mosaic.py:mosaic": 14, "loading.py:wrap": 13},
    **{"cli/bench.py:run": 20},
}


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_a_file_is_read_in_one_sitting(folder):
    files = sorted((ROOT.parent.parent / folder).rglob("*.py"))
    assert files
    lengths = {
        file.as_posix(): len(file.read_text(encoding="utf-8").splitlines()) for file in files
    }
    assert not {file: length for file, length in lengths.items() if length > SIZE}


def test_functions_are_short_and_take_few_things():
    long, wide = {}, {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = f"{path.relative_to(ROOT).as_posix()}:{node.name}"
            lines = (node.end_lineno or 0) - node.lineno + 1
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
            long |= {name: lines} if lines > LENGTH else {}
            kernel = path.stem.endswith("_triton")  # its arguments are pointers and strides
            wide |= {name: count} if count > PARAMETERS.get(name, WIDTH) and not kernel else {}
    assert not long and not wide
