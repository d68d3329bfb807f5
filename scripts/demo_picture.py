"""The picture of the demo report in the README: runs the demo and photographs its page with
Debian's chromium.

python scripts/demo_picture.py --out docs/demo.png
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import sync_playwright
from typer.testing import CliRunner

from seecause.cli import app

QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def main(
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("docs/demo.png"),
    browser: Annotated[str, typer.Option(help="A chromium.")] = "/usr/bin/chromium",
    width: int = 1300,
    height: int = 1230,
) -> None:
    """Run the demo and photograph the top of its page."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        page_folder = Path(folder) / "demo"
        done = CliRunner().invoke(app, ["demo", "--out", str(page_folder), "--no-open"])
        if done.exit_code:
            raise typer.Exit(done.exit_code)
        opened = play.chromium.launch(executable_path=browser, args=QUIET)
        page = opened.new_page(viewport={"width": width, "height": height})
        page.goto((page_folder / "index.html").as_uri())
        page.evaluate("window.scrollTo(0, document.querySelector('h2').offsetTop - 80)")
        page.screenshot(path=out)
        opened.close()


if __name__ == "__main__":
    typer.run(main)
