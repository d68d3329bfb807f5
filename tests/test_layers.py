"""The direction of imports, and the budgets of the source."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import seecause

ROOT = Path(seecause.__file__).parent
LAYERS = (  # a module imports from its own row and from rows above it
    ("errors", "options", "files", "registry", "results", "_random", "_software"),
    ("models", "target"),
    ("engine", "loading"),
    ("data",),
    ("metrics",),
    ("attribution",),
    ("background", "faithful", "lvlm"),
    ("bench", "_doctor"),
    ("experiments",),
    ("report",),
    ("critters",),
    ("app", "cli"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
WALK = "engine.walk"  # runs blocks only, and views run by it: it counts as models
LAZY = {"report", "critters"}  # imported inside functions: a result shows itself, a world is drawn
# maps are judged by counterfactuals that only this world has
DRAWS = {("metrics.parts", "critters"), ("experiments.ours", "critters")}
LIMITS = {"files": 150, "lines": 47_000, "nodes": 330_000, "public names": 130}


def level(module: str) -> int:
    """The row of a module, named without the package."""
    return LEVEL["models"] if module == WALK else LEVEL[module.split(".")[0]]


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module == "seecause":
        names = [alias.name for alias in node.names]
        return [name for name in names if name in LEVEL]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("seecause."):
        return [str(node.module).removeprefix("seecause.")]
    return []


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(ROOT.rglob("*.py")) if not path.name.startswith("__")],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_imports_point_up_the_list_of_layers(path):
    mine = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_once = {name for node in tree.body for name in imported(node)}
    for name in {name for node in ast.walk(tree) for name in imported(node)}:
        lazy = (name.split(".")[0] in LAZY and name not in at_once) or (
            mine,
            name.split(".")[0],
        ) in DRAWS
        assert lazy or level(name) <= level(mine), f"{mine} imports {name}"
    assert not mine.startswith("attribution") or not any("background" in n for n in at_once)


def test_importing_the_package_loads_neither_torch_nor_a_model_library():
    code = (
        "import seecause, sys; heavy = ('torch', 'timm', 'transformers', 'fastapi', 'ray');"
        " print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_package_that_is_compared_with_is_imported():
    """Quantus is under the GPL; captum's classes are extended in one file."""
    for path in sorted(ROOT.rglob("*.py")):
        peers = {"quantus", "captum", "pytorch_grad_cam"}
        peers -= {"captum"} if path == ROOT / "attribution" / "captum.py" else set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not peers & {name.split(".")[0] for name in names}, path


def public_names() -> list[str]:
    packages = [f"seecause.{m.name}" for m in pkgutil.iter_modules(seecause.__path__) if m.ispkg]
    modules = [importlib.import_module(name) for name in ["seecause", *packages]]
    names = [(module, name) for module in modules for name in getattr(module, "__all__", ())]
    for module, name in names:
        assert getattr(module, name) is not None
    return [f"{module.__name__}.{name}" for module, name in names]


def test_there_are_few_commands_with_few_flags():
    from seecause.cli import GROUPS
    from tests.cli.calls import flags_of

    counts = {name: len(flags_of(name.split())) - 2 for group in GROUPS.values() for name in group}
    assert len(counts) <= 24
    assert {name: count for name, count in counts.items() if count > 20} == {}


def test_the_source_stays_within_its_budget():
    texts = [path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")]
    sizes = {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts),
        "nodes": sum(sum(1 for _ in ast.walk(ast.parse(text))) for text in texts),
        "public names": len(public_names()),
    }
    assert {name: size for name, size in sizes.items() if size > LIMITS[name]} == {}
