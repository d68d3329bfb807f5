"""The notebooks of examples/: they run from top to bottom, and were committed after they did."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def read(path):
    return pytest.importorskip("nbformat").read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_show_what_came_out_and_are_small(path):
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/jpeg" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert path.stat().st_size < 300_000


def printed(notebook):
    """What each cell printed, without warnings."""
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(o.text for o in each if o.get("name") == "stdout") for each in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run_from_top_to_bottom_and_print_what_is_stored(path, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    place = {"metadata": {"path": str(tmp_path)}}
    stored = read(path)
    again = nbclient.NotebookClient(read(path), timeout=600, resources=place).execute()
    assert printed(again) == printed(stored)
