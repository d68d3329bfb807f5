"""Pictures and classes whose names hold anything: nothing of them moves a cursor, starts a line,
runs in a page or becomes a formula."""

import os
import re

import numpy as np
import pytest
from PIL import Image

from seecause.files import safe_cell
from seecause.report import rows_csv
from tests.cli.calls import invoke

NAMES = {
    "newline": "a\nseecause: all is well.png",
    "escape": "a\x1b[2J\x1b[31m.png",
    "direction": "a\u202egnp.exe\u2066.png",
    "html": "<img src=x onerror=alert(1)>.png",
    "formula": "=HYPERLINK(1).png",
    "bytes": os.fsdecode(b"a\xff\xfe.png"),
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("whole", [True, False])
def test_a_name_is_only_a_name(tmp_path, kind, whole):
    place = tmp_path / "data" / NAMES[kind]
    place.parent.mkdir()
    Image.fromarray(np.zeros((96, 96, 3), np.uint8)).save(tmp_path / "data" / "plain.png")
    content = (tmp_path / "data" / "plain.png").read_bytes()
    place.write_bytes(content if whole else content[:60])
    words = ["explain", str(place.parent), "--method", "center", "--out", str(tmp_path / "out")]
    done = invoke(*words)
    assert done.exit_code == (0 if whole else 1), done.output
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", done.output)
    assert not any(line.startswith("seecause: all") for line in done.output.splitlines())
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page and "Content-Security-Policy" in page
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != place]
    assert all(tmp_path / "out" in path.parents or path.name == "plain.png" for path in written)


def test_a_text_that_would_be_a_formula_is_quoted():
    rows = [{"picture": "=1+1", "share": -0.5}, {"picture": "@x", "share": 1.0}]
    assert rows_csv(rows).splitlines()[1:] == ["'=1+1,-0.5", "'@x,1.0"]
    safe = [safe_cell(text) for text in ("+x", "-1e-5", "\t=1", "a=1")]
    assert safe == ["'+x", "-1e-5", "'\t=1", "a=1"]
