"""`docs/models.md` lists what adapters read, and nothing else."""

import importlib.util
from pathlib import Path

import transformers

from seecause.models import decoder

SCRIPT = Path(__file__).parents[1] / "docs" / "families.py"


def test_the_table_of_families_is_fresh():
    spec = importlib.util.spec_from_file_location("families", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    absent = {name for name in decoder.FAMILIES if not hasattr(transformers, name)}
    assert absent <= set(script.NEWER)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.updated(page) == page, "the table is old; run: python docs/families.py"
    other = page.replace("SwinTransformerV2, ", "")
    assert other != page and script.updated(other) == page  # a missing family is noticed
