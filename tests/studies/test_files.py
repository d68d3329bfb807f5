"""Every study file: it parses, its cells resolve, and each call gets what it takes and no more."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import seecause as sc
from seecause.attribution.registry import find
from seecause.bench.study import StudyContext, StudyRun, read_study

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "studies").glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("limit", [None, 4])
def test_cells_resolve_and_their_options_are_taken(file, limit, tmp_path):
    study = read_study(file)
    object.__setattr__(study, "files", ())
    run = StudyRun(study, StudyContext("cpu", tmp_path, limit=limit))
    assert len(set(run.keys.values())) == len(study.cells)  # no cell is there twice
    groups = {cell.group for cell in study.cells}
    for cell in study.cells:
        assert set(cell.needs) <= groups
        options = run.arguments(cell) | ({"earlier": {}} if cell.needs else {})
        inspect.signature(cell.function).bind(run.context, **options)
    assert set(study.output.get("groups", ())) <= groups
    page = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    assert f"`{file.stem}`" in page


def test_studies_of_all_methods_have_all_of_them():
    for name in ("methods", "attribution"):
        cells = read_study(ROOT / "studies" / f"{name}.toml").cells
        variants = [cell.options.get("variant") for cell in cells]
        strings = {variant for variant in variants if isinstance(variant, str)}
        assert strings == set(sc.methods())


@pytest.mark.parametrize("name", ["attribution", "mosaic"])
def test_dear_methods_are_lighter_under_a_limit(name, tmp_path):
    study = read_study(ROOT / "studies" / f"{name}.toml")
    object.__setattr__(study, "files", ())
    whole, quick = (
        StudyRun(study, StudyContext("cpu", tmp_path, limit=limit)) for limit in (None, 4)
    )
    lighter = quick.settings["lighter"]
    assert {"rise", "tis", "mda"} <= lighter.keys() and "lighter" not in whole.settings
    for method, options in lighter.items():
        find(method).check(options)
    cells = [cell for cell in study.cells if cell.call.endswith((".scored", ".sanity"))]
    assert cells and all(quick.arguments(cell)["lighter"] == lighter for cell in cells)


def test_pages_are_short_and_every_published_csv_has_its_study():
    words = {
        page.name: len(page.read_text().split()) for page in (ROOT / "docs/results").glob("*.md")
    }
    assert sum(words.values()) <= 10_000 and max(words.values()) <= 1100, words
    names = tuple(read_study(file).name for file in FILES)
    assert all(path.stem.startswith(names) for path in (ROOT / "docs/results").glob("*.csv"))
