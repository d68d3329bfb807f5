"""The contact sheet is the picture of the docs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pictures import contact_sheet
from PIL import Image

DOCS = Path(__file__).parents[2] / "docs"


def test_the_contact_sheet_is_that_of_the_docs():
    page, published = contact_sheet(), Image.open(DOCS / "critters.png").convert("RGB")
    assert page.size == published.size
    away = np.abs(np.asarray(page, dtype=int) - np.asarray(published, dtype=int))
    assert away.mean() < 1
