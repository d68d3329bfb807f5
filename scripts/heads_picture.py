"""The picture in docs/heads.md: the demo's audit and repair of critters-biased, photographed with
Debian's chromium.

python scripts/heads_picture.py --out docs/heads.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.demo_picture import QUIET
from seecause.critters.demo import DemoSetting, audit, repair
from seecause.report.page import write_page


def main(
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("docs/heads.png"),
    browser: Annotated[str, typer.Option(help="A chromium.")] = "/usr/bin/chromium",
) -> None:
    """Verdict, grid and numbers on one page of 1100 pixels."""
    verdict, *_ = audit(DemoSetting(), models=("builtin:critters-biased",)).sections
    grid, change, *_ = repair(DemoSetting()).sections
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        page_file = write_page(Path(folder) / "heads.html", "", [verdict, grid, change])
        opened = play.chromium.launch(executable_path=browser, args=QUIET)
        page = opened.new_page(viewport={"width": 1100, "height": 900})
        page.goto(page_file.as_uri())
        page.add_style_tag(content=".bar, h1, .note { display: none } h2 { margin-top: 1.2rem }")
        page.locator("main").screenshot(path=out)
        opened.close()


if __name__ == "__main__":
    typer.run(main)
