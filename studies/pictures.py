"""The pictures of the documentation: python studies/pictures.py NAME

app        docs/app.png: the page of `seecause serve`; with another --out, every panel at two widths
           and in two themes into that folder
critters   docs/critters.png: every class on every background, one scene under each intervention
demo       docs/demo.png: the top of the demo's page, photographed with chromium
discover   docs/discover.png: kinds of patches that turn pictures of critters-biased
heads      docs/heads.png: the demo's audit and pruning of critters-biased
repair     docs/repair.png: the end of the demo, critters-biased mended
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from seecause.critters.sheet import contact_sheet

QUIET = ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-sync",
         "disable-background-networking", "disable-component-update")  # fmt: skip


def critters_sheet(out: Path) -> None:
    contact_sheet().save(out)


def photograph(make: Callable[[Path], Path], shoot: Callable[[Any], None], size: Any) -> None:
    """Make a page in a folder that goes away, open it in chromium, and shoot."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        page_file = make(Path(folder))
        options = {"executable_path": "/usr/bin/chromium", "args": [f"--{name}" for name in QUIET]}
        browser = play.chromium.launch(**options)
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        page.goto(page_file.as_uri())
        shoot(page)
        browser.close()


SHOWN = {  # panel of the page -> link, what is clicked, what is waited for
    "explain": (
        "#explain?model=critters-vit&explain.picture=s9&explain.patches=65-68.77-80.89-92"
        "&explain.evidence=true", None, ".finding .needed",
    ),
    "swap": ("#swap?model=critters-vit&swap.a=s0&swap.b=s1&swap.patches=65-70.77-82.89-93"
        "&swap.across=-1", "Where does", ".path-table"),
    "heads": ("#heads?model=critters-biased&heads.by=background&heads.off=4.19.43", None,
        ".head-buttons .for"),
}  # fmt: skip


def app(out: Path) -> None:
    """One picture of Explain where `out` is a PNG, else all panels into a folder."""
    from playwright.sync_api import sync_playwright

    from seecause.app.server import create_app
    from seecause.app.workshop import open_workshop
    from tests.app.conftest import ARGUMENTS, MODELS, serving

    one = out.suffix == ".png"
    views = [(1280, "light")] if one else [(w, s) for w in (1280, 390) for s in ("light", "dark")]
    with serving(create_app(open_workshop(MODELS))) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=list(ARGUMENTS))
        for name, (link, button, awaited) in SHOWN.items() if not one else [*SHOWN.items()][:1]:
            for width, scheme in views:
                size = {"width": width, "height": 860}
                page = browser.new_page(viewport=size, color_scheme=scheme)
                page.goto(f"{address}/{link}")
                if button:
                    page.get_by_role("button", name=button).click()
                page.locator(awaited).first.wait_for()
                page.locator("html[data-asking='0']").wait_for()
                page.evaluate("window.scrollTo(0, 0)")
                path = out if one else out / f"{name}-{width}-{scheme}.png"
                page.screenshot(path=path, full_page=not one)
                page.close()
        browser.close()


def demo(out: Path) -> None:
    from typer.testing import CliRunner

    from seecause.cli import app

    def make(folder: Path) -> Path:
        done = CliRunner().invoke(app, ["demo", "--out", str(folder / "demo"), "--no-open"])
        if done.exit_code:
            raise typer.Exit(done.exit_code)
        return folder / "demo" / "index.html"

    def shoot(page: Any) -> None:
        page.evaluate("window.scrollTo(0, document.querySelector('h2').offsetTop - 80)")
        page.screenshot(path=out)

    photograph(make, shoot, (1300, 1230))


def heads(out: Path) -> None:
    from seecause.critters.demo import DemoSetting, audit, repair
    from seecause.report.page import write_page

    verdict, *_ = audit(DemoSetting(), models=("builtin:critters-biased",)).sections
    grid, change, *_ = repair(DemoSetting()).sections

    def shoot(page: Any) -> None:
        page.add_style_tag(content=".bar, h1, .note { display: none } h2 { margin-top: 1.2rem }")
        page.locator("main").screenshot(path=out)

    sections = [verdict, grid, change]
    photograph(lambda folder: write_page(folder / "heads.html", "", sections), shoot, (1100, 900))


def repair(out: Path) -> None:
    from seecause.critters.demo import DemoSetting, mend
    from seecause.report.page import write_page

    gallery, *_ = mend(DemoSetting(), shown=3).sections

    def shoot(page: Any) -> None:
        page.add_style_tag(content=".bar, h1, .note { display: none } h2 { margin-top: 1.2rem }")
        page.locator("main").screenshot(path=out)

    photograph(lambda folder: write_page(folder / "page.html", "", [gallery]), shoot, (1150, 700))


def discover(out: Path) -> None:
    from typer.testing import CliRunner

    from seecause.cli import app

    def make(folder: Path) -> Path:
        done = CliRunner().invoke(app, ["discover", "--out", str(folder / "kinds")])
        if done.exit_code:
            raise typer.Exit(done.exit_code)
        return folder / "kinds" / "index.html"

    def shoot(page: Any) -> None:
        page.add_style_tag(content=".bar, h1, h2, .lead, .note { display: none }")
        page.screenshot(path=out)

    photograph(make, shoot, (1200, 805))


PICTURES = {
    "app": app,
    "critters": critters_sheet, "demo": demo, "discover": discover, "heads": heads,
    "repair": repair,
}  # fmt: skip


def main(
    name: Annotated[str, typer.Argument(help=", ".join(PICTURES))],
    out: Annotated[Path | None, typer.Option(help="The PNG to write.")] = None,
) -> None:
    PICTURES[name](out or Path("docs") / f"{name}.png")


if __name__ == "__main__":
    typer.run(main)
